"""Exercises of lesson 11: the memory of a 4-bit base, the weights of adapters, a gradient under a loss scale."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import torch
from torch import Tensor

from agentr1_lite.exercises import exercise, mistake

BITS, ADAPTERS, SCALE = "Four bits", "Adapters", "Half precision and the loss scale"

Linears = list[tuple[int, int]]


def _sizes(rng: random.Random) -> tuple[int, int, int]:
    block, group = rng.choice([32, 64, 128]), rng.choice([128, 256])
    return block * group * rng.randint(100, 2000), block, group


@exercise(11, "nf4_bytes", inputs=_sizes)
def nf4_bytes(weights: int, block: int, group: int) -> float:
    """Bytes of a 4-bit layer: codes, an 8-bit scale a block, a float32 constant a group of scales."""
    return weights / 2 + weights / block + 4 * weights / (block * group)


for says, wrong in (
    ("That is the number of bits; eight of them are one byte.", lambda n, b, g: 8 * nf4_bytes(n, b, g)),
    ("A code takes half a byte; yours takes a whole one.", lambda n, b, g: nf4_bytes(n, b, g) + n / 2),
    ("Only the codes are counted; without their scales nothing can be read back.", lambda n, b, g: n / 2),
    ("The constants of the scales are missing: one float32 for every group.", lambda n, b, g: n / 2 + n / b),
    (
        "This is single quantisation: with double quantisation a block's scale is 1 byte.",
        lambda n, b, g: n / 2 + 4 * n / b,
    ),
    (
        "Scales of 4 bytes *and* constants for them: the point of the second stage is that a scale takes 1 byte.",
        lambda n, b, g: nf4_bytes(n, b, g) + 3 * n / b,
    ),
    (
        "A group is `group` scales, and each scale stands for `block` weights: divide by both.",
        lambda n, b, g: n / 2 + n / b + 4 * n / g,
    ),
    ("A constant is a float32, so 4 bytes.", lambda n, b, g: n / 2 + n / b + n / (b * g)),
    ("A constant has 32 bits, so 4 bytes; yours takes 32.", lambda n, b, g: n / 2 + n / b + 32 * n / (b * g)),
    (
        "A scale stands for a block of weights: there are weights / block of them, not weights / group.",
        lambda n, b, g: n / 2 + n / g + 4 * n / (b * g),
    ),
    ("A scale is stored in 8 bits, so 1 byte; yours takes 16 bits.", lambda n, b, g: nf4_bytes(n, b, g) + n / b),
    (
        "Scales of 16 bits and no constants: a scale takes 1 byte, and each group of scales a float32 constant.",
        lambda n, b, g: n / 2 + 2 * n / b,
    ),
    ("The block is always 64 here; use `block`.", lambda n, b, g: nf4_bytes(n, 64, g)),
    ("The group is always 256 here; use `group`.", lambda n, b, g: nf4_bytes(n, b, 256)),
    ("The block is always 64 and the group 256 here; use `block` and `group`.", lambda n, b, g: nf4_bytes(n, 64, 256)),
    (
        "4.127 bits a weight hold for blocks of 64 and groups of 256 alone; use `block` and `group`.",
        lambda n, b, g: n * 4.127 / 8,
    ),
    *[
        (f"The result is in {unit}; the answer is a number of bytes.", lambda n, b, g, u=u: nf4_bytes(n, b, g) / u)
        for unit, u in {"GiB": 2**30, "MiB": 2**20, "GB": 1e9, "MB": 1e6}.items()
    ],
):
    mistake("nf4_bytes", says, BITS)(wrong)


def _layers(rng: random.Random) -> tuple[Linears, int, int]:
    h = 64 * rng.randint(2, 8)
    k, i = h // rng.choice([2, 4]), h * rng.randint(3, 6)
    return [(h, h), (h, k), (h, k), (h, h), (h, i), (h, i), (i, h)], rng.randint(3, 12), rng.choice([8, 16, 32])


@exercise(11, "lora_weights", inputs=_layers)
def lora_weights(linears: Linears, layers: int, rank: int) -> int:
    """Trained weights of one adapter: A is (rank, in), B is (out, rank), for each linear layer of every layer."""
    return layers * sum(rank * (inputs + outputs) for inputs, outputs in linears)


for says, wrong in (
    (
        "That is the base, W of shape (out, in); the adapter is A and B alone.",
        lambda linears, layers, rank: layers * sum(a * b for a, b in linears),
    ),
    (
        "The base is frozen: count A and B, without W.",
        lambda linears, layers, rank: layers * sum(a * b + rank * (a + b) for a, b in linears),
    ),
    (
        "This is one decoder layer; the model has `layers` of them.",
        lambda linears, layers, rank: lora_weights(linears, 1, rank),
    ),
    (
        "Only A is counted; B of shape (out, rank) is trained too.",
        lambda linears, layers, rank: layers * sum(rank * a for a, b in linears),
    ),
    (
        "Only B is counted; A of shape (rank, in) is trained too.",
        lambda linears, layers, rank: layers * sum(rank * b for a, b in linears),
    ),
    (
        "A and B are two thin matrices: rank · (in + out), not rank · in · out.",
        lambda linears, layers, rank: layers * sum(rank * a * b for a, b in linears),
    ),
    (
        "A has `in` columns, but B has `out` rows: rank · (in + out), not 2 · rank · in.",
        lambda linears, layers, rank: layers * sum(2 * rank * a for a, b in linears),
    ),
    ("The rank is missing.", lambda linears, layers, rank: lora_weights(linears, layers, 1)),
    (
        "Every weight counts once: the gradient and the optimiser's moments are memory, not weights.",
        lambda linears, layers, rank: 2 * lora_weights(linears, layers, rank),
    ),
    (
        "That is the number of bytes in float32; a weight counts as one.",
        lambda linears, layers, rank: 4 * lora_weights(linears, layers, rank),
    ),
    (
        "Two linear layers of each decoder layer are counted, q and v; here all of `linears` have adapters.",
        lambda linears, layers, rank: lora_weights([linears[0], linears[2]], layers, rank),
    ),
    (
        "Only the attention's four linear layers are counted; those of the MLP have adapters too.",
        lambda linears, layers, rank: lora_weights(linears[:4], layers, rank),
    ),
    (
        "Only the first linear layer is counted; sum over all of `linears`.",
        lambda linears, layers, rank: lora_weights(linears[:1], layers, rank),
    ),
    (
        "Linear layers of one size are counted once (in a set or a dict); each has an adapter of its own.",
        lambda linears, layers, rank: lora_weights(list(set(linears)), layers, rank),
    ),
):
    mistake("lora_weights", says, ADAPTERS)(wrong)


def _gradient(rng: random.Random) -> tuple[Tensor, float, float]:
    """A gradient below the limit, one above it, or one in which a number overflowed, all equally likely."""
    scale, n = float(2 ** rng.randint(1, 4)), rng.randint(4, 8)
    kind = rng.choice([1e-3, 2.0, math.inf, -math.inf, math.nan])
    gradient = scale * torch.randn(n) * (kind if math.isfinite(kind) else 2.0)
    if not math.isfinite(kind):
        gradient[rng.randrange(n)] = kind
    return gradient, scale, rng.choice([0.5, 1.0, 2.0])


Step = tuple[Tensor, float]


def _clipped(gradient: Tensor, limit: float, norm: Callable[[Tensor], Tensor] = Tensor.norm) -> Tensor:
    return gradient * min(1.0, limit / float(norm(gradient)))


@exercise(11, "unscaled", inputs=_gradient, cases=24)
def unscaled(gradient: Tensor, scale: float, limit: float) -> Step:
    """What the optimiser gets, (N,), and the next scale: the factor off, then the clip; nothing where it overflowed."""
    gradient = gradient / scale
    if not torch.isfinite(gradient).all():
        return torch.zeros_like(gradient), scale / 2
    return _clipped(gradient, limit), scale


Answer = Callable[[Tensor, float, float], Step]


def _finite(gradient: Tensor) -> bool:
    return bool(torch.isfinite(gradient).all())


def _unless_overflow(change: Answer) -> Answer:
    """A wrong version of the steps without an overflow, right where there is one."""
    return lambda g, s, limit: change(g, s, limit) if _finite(g) else unscaled(g, s, limit)


def _at_overflow(change: Answer) -> Answer:
    """A wrong version of the steps with an overflow, right where there is none."""
    return lambda g, s, limit: unscaled(g, s, limit) if _finite(g) else change(g, s, limit)


def _in_norm(norm: Callable[[Tensor], Tensor]) -> Answer:
    return _unless_overflow(lambda g, s, limit: (_clipped(g / s, limit, norm), s))


def _passed_on(gradient: Tensor, limit: float, spread: bool) -> Tensor:
    """A broken gradient after the clip: min() leaves the numbers beside a NaN, a clip of tensors loses them too."""
    return gradient * math.nan if spread and gradient.isnan().any() else _clipped(gradient, limit)


def _noticing(overflowed: Callable[[Tensor], Tensor | bool], spread: bool = False) -> Answer:
    """A wrong version that clips what its test for an overflow misses."""
    return _at_overflow(
        lambda g, s, limit: unscaled(g, s, limit) if overflowed(g) else (_passed_on(g / s, limit, spread), s)
    )


for says, wrong in (
    (
        "Clip after the factor is taken off: the limit is one of the true gradient, far below the scaled one.",
        _unless_overflow(lambda g, s, limit: (_clipped(g, limit) / s, s)),
    ),
    (
        "The factor is still on the gradient; divide by it.",
        _unless_overflow(lambda g, s, limit: (_clipped(g, limit), s)),
    ),
    (
        "The factor is multiplied once more; divide by it.",
        _unless_overflow(lambda g, s, limit: (_clipped(g * s, limit), s)),
    ),
    ("The gradient is not clipped.", _unless_overflow(lambda g, s, limit: (g / s, s))),
    ("The norm is always clipped to 1; use `limit`.", _unless_overflow(lambda g, s, limit: unscaled(g, s, 1.0))),
    (
        "The limit is one of the norm of the whole gradient, not of each number.",
        _unless_overflow(lambda g, s, limit: ((g / s).clamp(-limit, limit), s)),
    ),
    (
        "A gradient shorter than the limit stays as it is; yours is stretched to it.",
        _unless_overflow(lambda g, s, limit: (g / g.norm() * limit, s)),
    ),
    (
        "The norm is the root of the sum of squares; yours sums the absolute values (L1).",
        _in_norm(lambda g: g.abs().sum()),
    ),
    ("The norm is the root of the sum of squares; the root is missing.", _in_norm(lambda g: g.square().sum())),
    (
        "The norm is the root of the sum of squares; yours is the largest absolute value.",
        _in_norm(lambda g: g.abs().max()),
    ),
    *[
        (says + also, _noticing(overflowed, spread))
        for says, overflowed in (
            (
                "An overflow is not noticed: one inf or NaN spoils every weight. Return zeros, half the scale.",
                lambda g: False,
            ),
            ("Only inf is noticed; NaN is an overflow too. torch.isfinite finds both.", lambda g: g.isinf().any()),
            ("Only +inf is noticed; −inf and NaN are overflows too: torch.isfinite.", lambda g: (g == math.inf).any()),
        )
        for also, spread in (("", False), (" The clip even makes every number NaN where one is.", True))
    ],
    ("Only NaN is noticed; inf is an overflow too. torch.isfinite finds both.", _noticing(lambda g: g.isnan().any())),
    (
        "After an overflow the scale must fall by half, or the next step overflows too.",
        lambda g, s, limit: (unscaled(g, s, limit)[0], s),
    ),
    (
        "After an overflow the scale is doubled; it must fall by half, or the next step overflows too.",
        _at_overflow(lambda g, s, limit: (torch.zeros_like(g), 2 * s)),
    ),
    (
        "The scale falls only after an overflow.",
        lambda g, s, limit: (unscaled(g, s, limit)[0], s / 2),
    ),
    (
        "The scale grows after a step without an overflow; here it stays.",
        _unless_overflow(lambda g, s, limit: (unscaled(g, s, limit)[0], 2 * s)),
    ),
    (
        "The scale is halved, but the broken gradient is passed on: one inf or NaN would spoil every weight.",
        _at_overflow(lambda g, s, limit: (g / s, s / 2)),
    ),
    (
        "The scale is halved, but the broken gradient is clipped and passed on; the clip cannot mend inf or NaN.",
        _at_overflow(lambda g, s, limit: (_passed_on(g / s, limit, False), s / 2)),
    ),
    (
        "The scale is halved, but the broken gradient is passed on; the clip made NaN of every number beside a NaN.",
        _at_overflow(lambda g, s, limit: (_passed_on(g / s, limit, True), s / 2)),
    ),
    (
        "Only the numbers that overflowed are left out; the others are of the same broken step, so drop it whole.",
        lambda g, s, limit: (_clipped((g / s).nan_to_num(0.0, 0.0, 0.0), limit), unscaled(g, s, limit)[1]),
    ),
    ("The two are swapped: the gradient comes first, then the next scale.", lambda *given: unscaled(*given)[::-1]),
):
    mistake("unscaled", says, SCALE)(wrong)
