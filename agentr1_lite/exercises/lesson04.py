"""Exercises of lesson 04: returns across tool spans, the group's advantage, potential-based shaping."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from agentr1_lite.exercises import exercise, mistake

RETURNS, GROUPS, SHAPING = ("Returns across tool spans", "What a group does", "Shaping")


def _rows(rng: random.Random) -> tuple[Tensor, Tensor, float]:
    """A prompt, a turn, a reply, a turn, and rows that end at different tokens; rewards on sampled tokens."""
    rows = [
        [False] * rng.randint(1, 2)
        + [True] * rng.randint(1, 3)
        + [False] * rng.randint(2, 3)
        + [True] * rng.randint(2, 3)
        for _ in range(rng.randint(2, 3))
    ]
    width = max(map(len, rows)) + 1
    mask = torch.tensor([row + [False] * (width - len(row)) for row in rows])
    return torch.where(mask, torch.randn(mask.shape), 0.0), mask, rng.choice([0.5, 0.8, 0.9])


def _summed(rewards: Tensor, mask: Tensor, gamma: float, off: str = "carry") -> Tensor:
    """Backwards over the tokens; ``off`` says what a token off the mask does to the sum that runs through it."""
    out, running = torch.zeros_like(rewards), torch.zeros(len(rewards))
    for t in reversed(range(rewards.shape[1])):
        ahead = {"carry": running, "decay": gamma * running, "reset": torch.zeros_like(running)}[off]
        running = torch.where(mask[:, t], rewards[:, t] + gamma * running, ahead)
        out[:, t] = running
    return out


@exercise(4, "returns_to_go", inputs=_rows)
def returns_to_go(rewards: Tensor, action_mask: Tensor, gamma: float) -> Tensor:
    """G_t = r_t + γ G of the next *action* token, 0 off the mask; all (B, T)."""
    return torch.where(action_mask, _summed(rewards, action_mask, gamma), 0.0)


for says, wrong in (
    (
        "The return decays on observation tokens: a long reply would cost more. Only action tokens count as steps.",
        lambda r, m, gamma: torch.where(m, _summed(r, m, gamma, "decay"), 0.0),
    ),
    (
        "The return starts anew at each observation, so no turn before a tool's reply hears of the outcome.",
        lambda r, m, gamma: torch.where(m, _summed(r, m, gamma, "reset"), 0.0),
    ),
    ("γ is missing.", lambda r, m, gamma: returns_to_go(r, m, 1.0)),
    ("Off the mask it must be 0; yours goes on there.", lambda r, m, gamma: _summed(r, m, gamma)),
    (
        "Off the mask it must be 0, and observation tokens are no steps: yours decays on them.",
        lambda r, m, gamma: _summed(r, m, gamma, "decay"),
    ),
    (
        "You sum what was earned before the token; a return is what comes from it on.",
        lambda r, m, gamma: returns_to_go(r.flip(-1), m.flip(-1), gamma).flip(-1),
    ),
    (
        "Each token gets the whole episode's sum; a token cannot be credited with what came before it.",
        lambda r, m, gamma: torch.where(m, r.sum(-1, keepdim=True), 0.0),
    ),
):
    mistake("returns_to_go", says, RETURNS)(wrong)


def _groups(rng: random.Random) -> tuple[Tensor, Tensor]:
    """Groups in mixed order: different returns, nearly the same, all the same, and a group of one."""
    sizes = [rng.randint(3, 5), rng.randint(3, 5), rng.choice([7, 9, 11]), 1]
    returns = torch.cat([torch.randn(n) for n in sizes])
    returns[sizes[0] : sizes[0] + sizes[1]] = torch.linspace(0.48, 0.52, sizes[1])
    returns[sizes[0] + sizes[1] : -1] = rng.choice([0.7, 1.3, 0.1])
    order = torch.randperm(len(returns))
    return returns[order], torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))[order]


def _per_group(
    returns: Tensor, group_ids: Tensor, correction: int = 1, equal: bool = True, divide: bool = True
) -> Tensor:
    out = torch.zeros_like(returns)
    for group in group_ids.unique():
        own = returns[group_ids == group]
        if equal and own.max() == own.min():
            continue
        std = own.std(correction=correction) if len(own) > correction else float("nan")  # without torch's warning
        std = std if divide else 1.0
        out[group_ids == group] = (own - own.mean()) / (std + 1e-6 * divide)
    return out


@exercise(4, "group_advantage", inputs=_groups, tolerance=1e-4)
def group_advantage(returns: Tensor, group_ids: Tensor) -> Tensor:
    """GRPO: (R − mean_g) / (std_g + 1e-6) with the unbiased std, exactly 0 where a group's returns are equal; (B,)."""
    return _per_group(returns, group_ids)


for says, wrong in (
    (
        "The std divides by n; with few rollouts divide by n − 1, as torch's std does by itself.",
        lambda r, g: _per_group(r, g, correction=0),
    ),
    ("The std is missing: this is Dr. GRPO's advantage.", lambda r, g: _per_group(r, g, divide=False)),
    (
        "Mean and std are those of the whole batch; an easy question's rollouts must be compared with each other.",
        lambda r, g: (r - r.mean()) / (r.std() + 1e-6),
    ),
    (
        "A group of one gives nan, since one number has no unbiased std; nothing to compare means 0.",
        lambda r, g: _per_group(r, g, equal=False),
    ),
    (
        "A group of one gives nan; equal returns are treated well, but one rollout is such a group too.",
        lambda r, g: torch.where(torch.bincount(g)[g] == 1, float("nan"), _per_group(r, g)),
    ),
    (
        "Equal returns do not give 0: the mean's rounding error is divided by a std of next to nothing. Ask whether "
        "the largest return equals the smallest.",
        lambda r, g: torch.where(torch.bincount(g)[g] == 1, 0.0, _per_group(r, g, equal=False)),
    ),
    (
        "Equal returns do not give 0 (ask whether the largest equals the smallest), and the std divides by n.",
        lambda r, g: _per_group(r, g, correction=0, equal=False),
    ),
):
    mistake("group_advantage", says, GROUPS)(wrong)


def _turns(rng: random.Random) -> tuple[Tensor, Tensor, float]:
    n = rng.randint(2, 5)
    return torch.randn(n), torch.rand(n) + 0.1, rng.choice([0.5, 0.8, 0.9])


@exercise(4, "potential_shaping", inputs=_turns)
def potential_shaping(rewards: Tensor, potentials: Tensor, gamma: float) -> Tensor:
    """r_k + γ Φ(s_{k+1}) − Φ(s_k), (N,); ``potentials[k]`` is Φ at the start of turn k, and Φ is 0 behind the end."""
    return rewards + gamma * torch.cat([potentials[1:], torch.zeros(1)]) - potentials


for says, wrong in (
    (
        "The last turn keeps its potential: behind the end Φ is 0, so Φ(s_k) must be taken back there. Otherwise "
        "ending in a state of high Φ pays, and the optimum moves.",
        lambda r, p, gamma: torch.cat([potential_shaping(r, p, gamma)[:-1], r[-1:]]),
    ),
    (
        "Behind the end stands the last Φ again; an ended episode has no potential, put 0.",
        lambda r, p, gamma: r + gamma * torch.cat([p[1:], p[-1:]]) - p,
    ),
    (
        "γ is missing before Φ(s_{k+1}); without it the sums do not cancel.",
        lambda r, p, gamma: potential_shaping(r, p, 1.0),
    ),
    (
        "The sign is turned round: gaining potential must pay.",
        lambda r, p, gamma: 2 * r - potential_shaping(r, p, gamma),
    ),
    (
        "Φ(s_k) is not taken away: a bonus for each good state, which pays for staying in it.",
        lambda r, p, gamma: potential_shaping(r, p, gamma) + p,
    ),
    ("Φ itself is added to the reward; shaping pays for its change.", lambda r, p, gamma: r + p),
):
    mistake("potential_shaping", says, SHAPING)(wrong)
