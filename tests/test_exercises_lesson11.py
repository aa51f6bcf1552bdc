"""Lesson 11's exercises, answered as learners answer them: right in another way, and wrong in the typical ways."""

from __future__ import annotations

import math

import pytest
import torch

from agentr1_lite.exercises import check
from agentr1_lite.exercises.registry import find
from agentr1_lite.footprint import NF4_BYTES
from agentr1_lite.shapes import SHAPES


def in_bits(weights, block, group):
    return weights * (4 + 8 / block + 32 / (block * group)) / 8


def of_modules(linears, layers, rank):
    """Counted on layers as torch builds them."""
    total = 0
    for inputs, outputs in linears:
        pair = torch.nn.Linear(inputs, rank, False, "meta"), torch.nn.Linear(rank, outputs, False, "meta")
        total += sum(p.numel() for module in pair for p in module.parameters())
    return total * layers


def by_torch(gradient, scale, limit):
    weight = torch.nn.Parameter(torch.zeros_like(gradient))
    weight.grad = gradient / scale
    norm = torch.nn.utils.clip_grad_norm_([weight], limit)
    if math.isfinite(norm):
        return weight.grad, scale
    return 0 * torch.ones_like(gradient), scale / 2


def clipped(gradient, limit, p=2):
    """By torch: a NaN in the norm goes into every number."""
    weight = torch.nn.Parameter(torch.zeros_like(gradient))
    weight.grad = gradient.clone()
    torch.nn.utils.clip_grad_norm_([weight], limit, norm_type=p)
    return weight.grad


def clipped_with_min(gradient, limit):
    norm = math.sqrt(sum(x * x for x in gradient.tolist()))
    return gradient * limit / norm if norm > limit else gradient


def broken(gradient):
    return not gradient.isfinite().all()


def skip(gradient, scale):
    return torch.zeros(len(gradient)), scale / 2


def unless(overflowed, clip, at_overflow=skip, growth=1):
    """An answer made of its parts, each of which may be wrong."""

    def answer(gradient, scale, limit):
        if overflowed(gradient):
            return at_overflow(gradient, scale)
        return clip(gradient / scale, limit), growth * scale

    return answer


ANSWERS = {"nf4_bytes": in_bits, "lora_weights": of_modules, "unscaled": by_torch}
ANSWERS_IN_PARTS = unless(broken, clipped), unless(broken, clipped_with_min)


@pytest.mark.parametrize("name", ANSWERS)
def test_right_in_another_way(name):
    assert check(name, ANSWERS[name]) and check(name, ANSWERS[name], seed=3)


@pytest.mark.parametrize("answer", ANSWERS_IN_PARTS)
def test_parts_of_the_wrong_answers_are_right_together(answer):
    assert check("unscaled", answer)


def test_solutions_agree_with_the_plan():
    shape = SHAPES["qwen2.5-3b"]
    count = find("lora_weights").solution(list(shape.linears().values()), shape.layers, 16)
    assert count == shape.lora_weights(16) == 29_933_568
    found = find("nf4_bytes").solution(shape.linear_weights, 64, 256)
    assert found == pytest.approx(shape.linear_weights * NF4_BYTES)
    assert 8 * found / shape.linear_weights == pytest.approx(4.127, abs=5e-4)  # QLoRA: 0.373 bits less than 4.5


@pytest.mark.parametrize(
    ("name", "answer", "words"),
    [
        ("nf4_bytes", lambda n, b, g: n * (4 + 8 / b + 32 / (b * g)), "That is the number of bits"),
        ("nf4_bytes", lambda n, b, g: n * 4 / 8, "Only the codes are counted"),
        ("nf4_bytes", lambda n, b, g: n / 2 + n / b + 32 * n / b / g, "yours takes 32"),
        ("lora_weights", lambda linears, n, r: 2 * n * r * sum(i for i, _ in linears), "not 2 · rank · in"),
        ("nf4_bytes", lambda n, b, g: n / 2 + n // b, "The constants of the scales are missing"),
        ("nf4_bytes", lambda n, b, g: n * (4 + 32 / b) / 8, "This is single quantisation"),
        ("nf4_bytes", lambda n, b, g: n / 2 + n / b + 4 * (n / g), "divide by both"),
        ("nf4_bytes", lambda n, b, g: in_bits(n, b, g) / 1024**3, "The result is in GiB"),
        ("nf4_bytes", lambda n, b, g: in_bits(n, b, g) / 1e6, "The result is in MB"),
        ("nf4_bytes", lambda n, b, g: in_bits(n, 64, 256), "always 64 and the group 256"),
        ("nf4_bytes", lambda n, b, g: in_bits(n, 64, g), "The block is always 64"),
        ("nf4_bytes", lambda n, b, g: in_bits(n, b, 256), "The group is always 256"),
        ("nf4_bytes", lambda n, b, g: 4.127 * n / 8, "4.127 bits a weight hold for"),
        ("nf4_bytes", lambda n, b, g: n * (4 + 8 / g + 32 / (b * g)) / 8, "not weights / group"),
        ("nf4_bytes", lambda n, b, g: n * (4 + 16 / b + 32 / (b * g)) / 8, "yours takes 16 bits"),
        ("nf4_bytes", lambda n, b, g: n * (4 + 16 / b) / 8, "Scales of 16 bits and no constants"),
        ("lora_weights", lambda linears, n, r: n * sum(map(math.prod, linears)), "That is the base"),
        ("lora_weights", lambda linears, n, r: of_modules(linears, 1, r), "This is one decoder layer"),
        ("lora_weights", lambda linears, n, r: n * r * sum(a for a, _ in linears), "Only A is counted"),
        ("lora_weights", lambda linears, n, r: n * r * sum(map(math.prod, linears)), "not rank · in · out"),
        ("lora_weights", lambda linears, n, r: 4 * of_modules(linears, n, r), "bytes in float32"),
        ("lora_weights", lambda linears, n, r: of_modules([linears[0], linears[2]], n, r), "q and v"),
        ("lora_weights", lambda linears, n, r: of_modules(linears[:4], n, r), "Only the attention's four"),
        ("lora_weights", lambda linears, n, r: n * r * sum(linears[0]), "Only the first linear layer"),
        ("lora_weights", lambda linears, n, r: of_modules({*linears}, n, r), "counted once (in a set"),
        ("unscaled", lambda g, s, limit: (by_torch(g, 1.0, limit)[0] / s, by_torch(g, s, limit)[1]), "Clip after"),
        ("unscaled", lambda g, s, limit: by_torch(g, s, math.inf), "The gradient is not clipped"),
        ("unscaled", lambda g, s, limit: (by_torch(g, s, limit)[0], s), "After an overflow the scale must fall"),
        ("unscaled", lambda g, s, limit: (g / s * min(1, limit / (g / s).norm()), s), "An overflow is not noticed"),
        ("unscaled", lambda g, s, limit: (clipped(g / s, limit), s), "The clip even makes every number NaN"),
        ("unscaled", unless(lambda g: g.isinf().any(), clipped), "Only inf is noticed"),
        ("unscaled", unless(lambda g: g.isinf().any(), clipped_with_min), "Only inf is noticed"),
        ("unscaled", unless(lambda g: g.max() == math.inf, clipped), "Only +inf is noticed"),
        ("unscaled", unless(lambda g: g.isnan().any(), clipped), "Only NaN is noticed"),
        ("unscaled", unless(broken, clipped, lambda g, s: (g / s, s / 2)), "broken gradient is passed on: one inf"),
        ("unscaled", unless(broken, clipped, lambda g, s: (clipped(g / s, 1.0), s / 2)), "clip made NaN of every"),
        ("unscaled", unless(broken, clipped, lambda g, s: (0 * g.nan_to_num(), 2 * s)), "the scale is doubled"),
        ("unscaled", unless(broken, clipped, skip, growth=2), "The scale grows"),
        ("unscaled", lambda g, s, limit: by_torch(g, s, 1.0), "use `limit`"),
        ("unscaled", unless(broken, lambda g, limit: clipped(g, limit, p=1)), "absolute values (L1)"),
        ("unscaled", unless(broken, lambda g, limit: clipped(g, limit, p=math.inf)), "the largest absolute value"),
        ("unscaled", unless(broken, lambda g, limit: g * (limit / g.dot(g)).clamp(max=1)), "the root is missing"),
        ("unscaled", lambda g, s, limit: by_torch(g, s, limit)[::-1], "The two are swapped"),
    ],
)
def test_wrong_in_a_typical_way(name, answer, words):
    verdict = check(name, answer)
    assert (verdict.kind, words in verdict.text) == ("mistake", True), str(verdict)
