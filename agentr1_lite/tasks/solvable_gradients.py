"""Policy gradients of Two Boxes from sampled rollouts, and how good they are against the exact one.

N batches of B rollouts of T tokens; S states with two legal tokens each (`agentr1_lite.tasks.solvable`).
"""

from __future__ import annotations

from statistics import NormalDist
from typing import Any, NamedTuple

import torch
from torch import Tensor

from agentr1_lite.advantages import estimate
from agentr1_lite.tasks.solvable import Boxes, probabilities, solve


class Batch(NamedTuple):
    """N batches of B rollouts: ``index`` (N, B) into ``world.rows``, ``group_ids`` (B,), ``baseline`` (N, B)."""

    index: Tensor
    group_ids: Tensor
    baseline: Tensor


def sample(
    world: Boxes, logits: Tensor, *, groups: int = 4, group_size: int = 4, batches: int = 1, seed: int = 0
) -> Batch:
    """Draw whole batches; the questions take turns, and each group of rollouts has one greedy rollout beside it."""
    if groups % len(world.roots):
        raise ValueError(f"sample: {groups} groups for {len(world.roots)} questions; give a multiple of these")
    generator = torch.Generator().manual_seed(seed)
    greedy = torch.nn.functional.one_hot(logits.argmax(-1), 2).double().log()
    asked = world.roots[torch.arange(groups) % len(world.roots)]
    first = torch.tensor([path[0].state for path in world.paths])

    def draw(table: Tensor, rollouts: int) -> Tensor:
        """(N, groups · rollouts) trajectories of the policy."""
        chances = torch.where(first == asked[:, None], probabilities(world, table.detach()), 0.0)
        drawn = torch.multinomial(chances, batches * rollouts, replacement=True, generator=generator)
        return drawn.view(groups, batches, rollouts).transpose(0, 1).flatten(1)

    index = draw(logits, group_size)
    returns = world.rows.rewards.sum(-1)[draw(greedy, 1)]
    return Batch(index, torch.arange(groups).repeat_interleave(group_size), returns.repeat_interleave(group_size, -1))


def advantages(world: Boxes, name: str, batch: Batch, n: int = 0, *, values: Tensor, **options: Any) -> Tensor:
    """(B, T): `agentr1_lite.advantages.estimate` on batch n; ``values`` (S,) is the critic's table."""
    rows = world.rows.select(batch.index[n])
    known = {"turn_ids": rows.turn_ids, "anchor_ids": rows.anchor_ids, "group_ids": batch.group_ids}
    known |= {"values": values[rows.state], "baseline": batch.baseline[n]}
    return estimate(name, rows.rewards, rows.action_mask, **known, **options).advantages


def policy_gradient(world: Boxes, logits: Tensor, index: Tensor, advantages: Tensor) -> Tensor:
    """1/B Σ_b Σ_t A_bt ∇log π(a_bt | s_bt); index (N, B), advantages (N, B, T) → (N, S, 2)."""
    state, choice, mask = (getattr(world.rows, name)[index] for name in ("state", "choice", "action_mask"))
    n = torch.arange(len(index)).view(-1, 1, 1).expand_as(state)
    pushed = torch.zeros(len(index), *logits.shape, dtype=torch.float64)
    pushed.index_put_((n[mask], state[mask], choice[mask]), advantages[mask] / index.shape[1], accumulate=True)
    return pushed - pushed.sum(-1, keepdim=True) * logits.detach().softmax(-1)  # ∇log π = one-hot − π


def gradient_samples(
    world: Boxes, logits: Tensor, name: str, n: int = 1000, *, values: Tensor | None = None, **options: Any
) -> Tensor:
    """(n, S · 2): the policy gradient of n batches under one estimator; ``values`` None is the policy's exact V.

    ``groups``, ``group_size`` and ``seed`` of ``options`` are those of `sample`, the others the estimator's.
    """
    sampling = {key: options.pop(key) for key in ("groups", "group_size", "seed") if key in options}
    batch = sample(world, logits, batches=n, **sampling)
    values = solve(world, logits)[0] if values is None else values
    each = [advantages(world, name, batch, i, values=values, **options) for i in range(n)]
    return policy_gradient(world, logits, batch.index, torch.stack(each)).flatten(1)


class Figure(NamedTuple):
    """An estimate with its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


class Quality(NamedTuple):
    """A gradient estimator ĝ against the exact g, over many batches.

    gain: E ĝ · g / |g|², 1 where unbiased; another constant is another learning rate.
    bias: |E ĝ − g| / |g|.  angle: between E ĝ and g, in degrees: the bias that no learning rate undoes.
    noise: √tr Cov ĝ over the length of E ĝ along g: how much louder one batch's noise is than its signal.
    """

    gain: Figure
    bias: Figure
    angle: Figure
    noise: Figure


def quality(samples: Tensor, exact: Tensor) -> Quality:
    """Measure gradients (N, D) against the exact one (D,), with normal intervals from the jackknife.

    |E ĝ|² is estimated without the samples' own noise, (N |mean|² − mean |ĝ|²) / (N − 1), so that an unbiased
    estimator does not seem biased for being noisy; a square below 0 counts as 0.
    """
    n, size = len(samples), exact @ exact

    def measure(p: Tensor, q: Tensor, s: Tensor, n: int) -> Tensor:
        """From mean ĝ · g, |mean ĝ|² and mean |ĝ|² of n samples, the four figures, all but the gain squared."""
        length, spread = (n * q - s) / (n - 1), (s - q) * n / (n - 1)
        return torch.stack([p / size, (length - 2 * p) / size + 1, length * size / p**2 - 1, spread * size / p**2])

    mean, square = samples.mean(0), (samples**2).sum(-1)
    all_but_one = (n * mean - samples) / (n - 1)
    value = measure(mean @ exact, mean @ mean, square.mean(), n)
    each = measure(all_but_one @ exact, (all_but_one**2).sum(-1), (n * square.mean() - square) / (n - 1), n - 1)
    error = NormalDist().inv_cdf(0.975) * ((n - 1) ** 2 / n * each.var(-1)).sqrt()
    ends = torch.stack([value, value - error, value + error])
    ends[:, 1:] = ends[:, 1:].clamp(min=0).sqrt()
    ends[:, 2] = ends[:, 2].atan().rad2deg()
    return Quality(*(Figure(*column) for column in ends.T.tolist()))
