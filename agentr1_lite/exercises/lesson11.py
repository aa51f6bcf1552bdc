"""Exercises of lesson 11: the memory of a 4-bit base, the weights of adapters, a gradient under a loss scale."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from agentr1_lite.exercises import exercise, mistakes, wrong_versions

SCALE = "Half precision and the loss scale"
Linears = list[tuple[int, int]]
Step = tuple[Tensor, float]


def _sizes(rng: random.Random) -> tuple[int, int, int]:
    block, group = rng.choice([32, 64, 128]), rng.choice([128, 256])
    return block * group * rng.randint(100, 2000), block, group


@exercise(11, inputs=_sizes)
def nf4_bytes(weights: int, block: int, group: int) -> float:
    """Bytes of a 4-bit layer: codes, an 8-bit scale a block, a float32 constant a group of scales."""
    return weights / 2 + weights / block + 4 * weights / (block * group)


# Of n weights in blocks of b, whose scales stand in groups of g.
mistakes(
    nf4_bytes,
    "Four bits",
    {
        "That is the number of bits; eight of them are one byte.": lambda n, b, g: 8 * nf4_bytes(n, b, g),
        "A code takes half a byte; yours takes a whole one.": lambda n, b, g: nf4_bytes(n, b, g) + n / 2,
        "Only the codes are counted; without their scales nothing can be read back.": lambda n, b, g: n / 2,
        "The constants of the scales are missing: one float32 for every group.": lambda n, b, g: n / 2 + n / b,
        "A constant is a float32, so 4 bytes.": lambda n, b, g: n / 2 + n / b + n / (b * g),
        "A constant has 32 bits, so 4 bytes; yours takes 32.": lambda n, b, g: n / 2 + n / b + 32 * n / (b * g),
        "A scale has 8 bits, so 1 byte; yours takes 16 bits.": lambda n, b, g: nf4_bytes(n, b, g) + n / b,
        "The block is always 64 here; use `block`.": lambda n, b, g: nf4_bytes(n, 64, g),
        "The group is always 256 here; use `group`.": lambda n, b, g: nf4_bytes(n, b, 256),
        "The block is always 64 and the group 256 here; use `block`, `group`.": lambda n, b, g: nf4_bytes(n, 64, 256),
        "The result is in GiB; the answer is a number of bytes.": lambda n, b, g: nf4_bytes(n, b, g) / 2**30,
        "The result is in MiB; the answer is a number of bytes.": lambda n, b, g: nf4_bytes(n, b, g) / 2**20,
        "The result is in GB; the answer is a number of bytes.": lambda n, b, g: nf4_bytes(n, b, g) / 1e9,
        "The result is in MB; the answer is a number of bytes.": lambda n, b, g: nf4_bytes(n, b, g) / 1e6,
    },
)


@wrong_versions(nf4_bytes, reread="Four bits")
class WrongSizes:
    def single_quantisation(n, b, g):
        """This is single quantisation: with double quantisation a block's scale is 1 byte."""
        return n / 2 + 4 * n / b

    def both_quantisations(n, b, g):
        """Scales of 4 bytes *and* constants for them: the point of the second stage is that a scale takes 1 byte."""
        return nf4_bytes(n, b, g) + 3 * n / b

    def half_scales(n, b, g):
        """Scales of 16 bits and no constants: a scale takes 1 byte, and each group of scales a float32 constant."""
        return n / 2 + 2 * n / b

    def constants_of_weights(n, b, g):
        """A group is `group` scales, and each scale stands for `block` weights: divide by both."""
        return n / 2 + n / b + 4 * n / g

    def scales_of_groups(n, b, g):
        """A scale stands for a block of weights: there are weights / block of them, not weights / group."""
        return n / 2 + n / g + 4 * n / (b * g)

    def usual_sizes(n, b, g):
        """4.127 bits a weight hold for blocks of 64 and groups of 256 alone; use `block` and `group`."""
        return n * 4.127 / 8


def _layers(rng: random.Random) -> tuple[Linears, int, int]:
    h = 64 * rng.randint(2, 8)
    k, i = h // rng.choice([2, 4]), h * rng.randint(3, 6)
    return [(h, h), (h, k), (h, k), (h, h), (h, i), (h, i), (i, h)], rng.randint(3, 12), rng.choice([8, 16, 32])


@exercise(11, inputs=_layers)
def lora_weights(linears: Linears, layers: int, rank: int) -> int:
    """Trained weights of one adapter: A is (rank, in), B is (out, rank), for each linear layer of every layer."""
    return layers * sum(rank * (inputs + outputs) for inputs, outputs in linears)


def _sum(count: Callable[[int, int, int], int]) -> Callable[[Linears, int, int], int]:
    """Another count for one linear layer of (in, out, rank)."""
    return lambda linears, layers, rank: layers * sum(count(a, b, rank) for a, b in linears)


def _of(chosen: Callable[[Linears], Iterable[tuple[int, int]]]) -> Callable[[Linears, int, int], int]:
    return lambda linears, layers, rank: lora_weights(chosen(linears), layers, rank)


mistakes(
    lora_weights,
    "Adapters",
    {
        "That is the base, W of shape (out, in); the adapter is A and B alone.": _sum(lambda a, b, r: a * b),
        "The base is frozen: count A and B, without W.": _sum(lambda a, b, r: a * b + r * (a + b)),
        "Only A is counted; B of shape (out, rank) is trained too.": _sum(lambda a, b, r: r * a),
        "Only B is counted; A of shape (rank, in) is trained too.": _sum(lambda a, b, r: r * b),
        "A and B are two thin matrices: rank · (in + out), not rank · in · out.": _sum(lambda a, b, r: r * a * b),
        "A has `in` columns, B has `out` rows: rank · (in + out), not 2 · rank · in.": _sum(lambda a, b, r: 2 * r * a),
        "The rank is missing.": _sum(lambda a, b, r: a + b),
        "A weight counts once: gradient and moments are memory, not weights.": _sum(lambda a, b, r: 2 * r * (a + b)),
        "That is the number of bytes in float32; a weight counts as one.": _sum(lambda a, b, r: 4 * r * (a + b)),
        "This is one decoder layer; the model has `layers` of them.": lambda linears, n, r: lora_weights(linears, 1, r),
        "Two linear layers are counted, q and v; all of `linears` have adapters.": _of(lambda x: [x[0], x[2]]),
        "Only the attention's four linear layers are counted; those of the MLP have adapters too.": _of(
            lambda x: x[:4]
        ),
        "Only the first linear layer is counted; sum over all of `linears`.": _of(lambda x: x[:1]),
        "Linear layers of one size are counted once (in a set or a dict); each has an adapter of its own.": _of(set),
    },
)


def _gradient(rng: random.Random) -> tuple[Tensor, float, float]:
    """A gradient below the limit, one above it, or one in which a number overflowed, all equally likely."""
    scale, n = float(2 ** rng.randint(1, 4)), rng.randint(4, 8)
    kind = rng.choice([1e-3, 2.0, math.inf, -math.inf, math.nan])
    gradient = scale * torch.randn(n) * (kind if math.isfinite(kind) else 2.0)
    if not math.isfinite(kind):
        gradient[rng.randrange(n)] = kind
    return gradient, scale, rng.choice([0.5, 1.0, 2.0])


@exercise(11, inputs=_gradient, cases=24)
def unscaled(gradient: Tensor, scale: float, limit: float) -> Step:
    """What the optimiser gets, (N,), and the next scale: the factor off, then the clip; nothing where it overflowed."""
    gradient = gradient / scale
    if not gradient.isfinite().all():
        return torch.zeros_like(gradient), scale / 2
    return gradient * min(1.0, limit / float(gradient.norm())), scale


def _clipped(gradient: Tensor, limit: float, norm: Callable[[Tensor], Tensor] = Tensor.norm) -> Tensor:
    """By a number: min() leaves the numbers beside a NaN."""
    return gradient * min(1.0, limit / float(norm(gradient)))


def _clipped_all(gradient: Tensor, limit: float) -> Tensor:
    """By a tensor: a NaN in the norm goes into every number."""
    return gradient * (limit / gradient.norm()).clamp(max=1.0)


def _without_overflow(step: Callable[..., Step]) -> Callable[..., Step]:
    return lambda g, s, limit: step(g, s, limit) if g.isfinite().all() else unscaled(g, s, limit)


def _at_overflow(step: Callable[..., Step]) -> Callable[..., Step]:
    return lambda g, s, limit: unscaled(g, s, limit) if g.isfinite().all() else step(g, s, limit)


@wrong_versions(unscaled, reread=SCALE, wrap=_without_overflow)
class WrongSteps:
    def clipped_first(g, s, limit):
        """Clip after the factor is taken off: the limit is one of the true gradient, far below the scaled one."""
        return _clipped(g, limit) / s, s

    def still_scaled(g, s, limit):
        """The factor is still on the gradient; divide by it."""
        return _clipped(g, limit), s

    def scaled_again(g, s, limit):
        """The factor is multiplied once more; divide by it."""
        return _clipped(g * s, limit), s

    def unclipped(g, s, limit):
        """The gradient is not clipped."""
        return g / s, s

    def limit_of_one(g, s, limit):
        """The norm is always clipped to 1; use `limit`."""
        return unscaled(g, s, 1.0)

    def each_number(g, s, limit):
        """The limit is one of the norm of the whole gradient, not of each number."""
        return (g / s).clamp(-limit, limit), s

    def stretched(g, s, limit):
        """A gradient shorter than the limit stays as it is; yours is stretched to it."""
        return g / g.norm() * limit, s

    def sum_of_absolutes(g, s, limit):
        """The norm is the root of the sum of squares; yours sums the absolute values (L1)."""
        return _clipped(g / s, limit, lambda x: x.abs().sum()), s

    def no_root(g, s, limit):
        """The norm is the root of the sum of squares; the root is missing."""
        return _clipped(g / s, limit, lambda x: x.square().sum()), s

    def largest(g, s, limit):
        """The norm is the root of the sum of squares; yours is the largest absolute value."""
        return _clipped(g / s, limit, lambda x: x.abs().max()), s

    def falling_scale(g, s, limit):
        """The scale falls only after an overflow."""
        return unscaled(g, s, limit)[0], s / 2

    def growing_scale(g, s, limit):
        """The scale grows after a step without an overflow; here it stays."""
        return unscaled(g, s, limit)[0], 2 * s


@wrong_versions(unscaled, reread=SCALE, wrap=_at_overflow)
class WrongOverflows:
    def unnoticed(g, s, limit):
        """An overflow is not noticed: one inf or NaN spoils every weight. Return zeros, half the scale."""
        return _clipped(g / s, limit), s

    def unnoticed_everywhere(g, s, limit):
        """An overflow is not noticed: one inf or NaN spoils every weight. Return zeros, half the scale. The clip even
        makes every number NaN where one is."""
        return _clipped_all(g / s, limit), s

    def inf_alone(g, s, limit):
        """Only inf is noticed; NaN is an overflow too. torch.isfinite finds both."""
        return unscaled(g, s, limit) if g.isinf().any() else WrongOverflows.unnoticed(g, s, limit)

    def inf_alone_everywhere(g, s, limit):
        """Only inf is noticed; NaN is an overflow too. torch.isfinite finds both. The clip even makes every number
        NaN where one is."""
        return unscaled(g, s, limit) if g.isinf().any() else WrongOverflows.unnoticed_everywhere(g, s, limit)

    def plus_inf_alone(g, s, limit):
        """Only +inf is noticed; −inf and NaN are overflows too: torch.isfinite."""
        return unscaled(g, s, limit) if g.isposinf().any() else WrongOverflows.unnoticed(g, s, limit)

    def plus_inf_alone_everywhere(g, s, limit):
        """Only +inf is noticed; −inf and NaN are overflows too: torch.isfinite. The clip even makes every number NaN
        where one is."""
        return unscaled(g, s, limit) if g.isposinf().any() else WrongOverflows.unnoticed_everywhere(g, s, limit)

    def nan_alone(g, s, limit):
        """Only NaN is noticed; inf is an overflow too. torch.isfinite finds both."""
        return unscaled(g, s, limit) if g.isnan().any() else WrongOverflows.unnoticed(g, s, limit)

    def same_scale(g, s, limit):
        """After an overflow the scale must fall by half, or the next step overflows too."""
        return torch.zeros_like(g), s

    def doubled_scale(g, s, limit):
        """After an overflow the scale is doubled; it must fall by half, or the next step overflows too."""
        return torch.zeros_like(g), 2 * s

    def passed_on(g, s, limit):
        """The scale is halved, but the broken gradient is passed on: one inf or NaN would spoil every weight."""
        return g / s, s / 2

    def passed_on_clipped(g, s, limit):
        """The scale is halved, but the broken gradient is clipped and passed on; the clip cannot mend inf or NaN."""
        return _clipped(g / s, limit), s / 2

    def passed_on_everywhere(g, s, limit):
        """The scale is halved, but the broken gradient is passed on; the clip made NaN of every number beside a
        NaN."""
        return _clipped_all(g / s, limit), s / 2

    def left_out(g, s, limit):
        """Only the numbers that overflowed are left out; the others are of the same broken step, so drop it whole."""
        return _clipped((g / s).nan_to_num(0.0, 0.0, 0.0), limit), s / 2


mistakes(
    unscaled,
    SCALE,
    {"The two are swapped: the gradient comes first, then the next scale.": lambda *given: unscaled(*given)[::-1]},
)
