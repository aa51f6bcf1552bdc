"""Lesson 11's exercises, answered as learners answer them: right in another way, and wrong in the typical ways."""

from __future__ import annotations

import math

import pytest
import torch

from agentr1_lite.exercises import check, find
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


ANSWERS = {"nf4_bytes": in_bits, "lora_weights": of_modules, "unscaled": by_torch}


@pytest.mark.parametrize("name", ANSWERS)
def test_right_in_another_way(name):
    assert check(name, ANSWERS[name]) and check(name, ANSWERS[name], seed=3)


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
        ("nf4_bytes", lambda n, b, g: n / 2 + n // b, "The constants of the scales are missing"),
        ("nf4_bytes", lambda n, b, g: n * (4 + 32 / b) / 8, "This is single quantisation"),
        ("nf4_bytes", lambda n, b, g: n / 2 + n / b + 4 * (n / g), "divide by both"),
        ("lora_weights", lambda linears, n, r: n * sum(map(math.prod, linears)), "That is the base"),
        ("lora_weights", lambda linears, n, r: of_modules(linears, 1, r), "This is one decoder layer"),
        ("lora_weights", lambda linears, n, r: n * r * sum(a for a, _ in linears), "Only A is counted"),
        ("lora_weights", lambda linears, n, r: n * r * sum(map(math.prod, linears)), "not rank · in · out"),
        ("unscaled", lambda g, s, limit: (by_torch(g, 1.0, limit)[0] / s, by_torch(g, s, limit)[1]), "Clip after"),
        ("unscaled", lambda g, s, limit: by_torch(g, s, math.inf), "The gradient is not clipped"),
        ("unscaled", lambda g, s, limit: (by_torch(g, s, limit)[0], s), "After an overflow the scale must fall"),
        ("unscaled", lambda g, s, limit: (g / s * min(1, limit / (g / s).norm()), s), "An overflow is not noticed"),
    ],
)
def test_wrong_in_a_typical_way(name, answer, words):
    verdict = check(name, answer)
    assert (verdict.kind, words in verdict.text) == ("mistake", True), str(verdict)
