"""Exercises of lesson 11: the memory of a 4-bit base, the weights of adapters, a gradient under a loss scale."""

from __future__ import annotations

import random

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
    ("The rank is missing.", lambda linears, layers, rank: lora_weights(linears, layers, 1)),
    (
        "Every weight counts once: the gradient and the optimiser's moments are memory, not weights.",
        lambda linears, layers, rank: 2 * lora_weights(linears, layers, rank),
    ),
):
    mistake("lora_weights", says, ADAPTERS)(wrong)


def _gradient(rng: random.Random) -> tuple[Tensor, float, float]:
    scale, n = float(2 ** rng.randint(2, 8)), rng.randint(4, 8)
    gradient = scale * rng.choice([1e-3, 2.0]) * torch.randn(n)
    if rng.random() < 0.25:
        gradient[rng.randrange(n)] = rng.choice([float("inf"), float("nan")])
    return gradient, scale, 1.0


Step = tuple[Tensor, float]


def _clipped(gradient: Tensor, limit: float) -> Tensor:
    return gradient * min(1.0, limit / float(gradient.norm()))


@exercise(11, "unscaled", inputs=_gradient)
def unscaled(gradient: Tensor, scale: float, limit: float) -> Step:
    """What the optimiser gets, (N,), and the next scale: the factor off, then the clip; nothing where it overflowed."""
    gradient = gradient / scale
    if not torch.isfinite(gradient).all():
        return torch.zeros_like(gradient), scale / 2
    return _clipped(gradient, limit), scale


def _unless_overflow(change):
    """A wrong version of the steps without an overflow, right where there is one."""
    return lambda g, s, limit: change(g, s, limit) if torch.isfinite(g).all() else unscaled(g, s, limit)


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
    (
        "The limit is one of the norm of the whole gradient, not of each number.",
        _unless_overflow(lambda g, s, limit: ((g / s).clamp(-limit, limit), s)),
    ),
    (
        "A gradient shorter than the limit stays as it is; yours is stretched to it.",
        _unless_overflow(lambda g, s, limit: (g / g.norm() * limit, s)),
    ),
    (
        "An overflow is not noticed: one inf or NaN would spoil every weight. Return zeros and half the scale.",
        lambda g, s, limit: (_clipped(g / s, limit), s),
    ),
    (
        "After an overflow the scale must fall by half, or the next step overflows too.",
        lambda g, s, limit: (unscaled(g, s, limit)[0], s),
    ),
    (
        "The scale falls only after an overflow.",
        lambda g, s, limit: (unscaled(g, s, limit)[0], s / 2),
    ),
    (
        "Only the numbers that overflowed are left out; the others are of the same broken step, so drop it whole.",
        lambda g, s, limit: (
            _clipped((g / s).nan_to_num(0.0, 0.0, 0.0), limit),
            unscaled(g, s, limit)[1],
        ),
    ),
):
    mistake("unscaled", says, SCALE)(wrong)
