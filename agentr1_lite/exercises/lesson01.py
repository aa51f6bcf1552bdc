"""Exercises of lesson 01: the two transitions, a Bellman backup, where rewards lie."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import Tensor

from agentr1_lite.exercises import exercise, mistake

KINDS, BELLMAN, REWARDS = ("Two transitions on a real trajectory", "A tiny MDP solved exactly", "Where rewards lie")


def _mask(rng: random.Random) -> list[bool]:
    """A prompt, then turns with a reply behind each; the last reply is sometimes missing."""
    mask = [False] * rng.randint(2, 4)
    for _ in range(rng.randint(1, 3)):
        mask += [True] * rng.randint(1, 4) + [False] * rng.randint(2, 4)
    return mask + [True] * rng.choice([0, 0, 3])


@exercise(1, "transition_kinds", inputs=lambda rng: (_mask(rng),))
def transition_kinds(action_mask: list[bool]) -> list[str]:
    """ "generative" for each sampled token, "environmental" once for each run of other tokens behind one."""
    kinds = []
    for before, acted in zip([False, *action_mask], action_mask, strict=False):
        if acted:
            kinds.append("generative")
        elif before:
            kinds.append("environmental")
    return kinds


def _for_each_token(action_mask: list[bool]) -> list[str]:
    return ["generative" if acted else "environmental" for acted in action_mask]


for says, wrong in (
    (
        "The prompt is the first state, not a transition; start behind it.",
        lambda mask: ["environmental", *transition_kinds(mask)],
    ),
    (
        "A reply is one transition however many tokens it has; you count one for each token, and the prompt's too.",
        _for_each_token,
    ),
    (
        "A reply is one transition however many tokens it has; you count one for each of its tokens.",
        lambda mask: _for_each_token(mask[mask.index(True) :]),
    ),
    (
        "An episode may end on a tool's reply; that transition is missing.",
        lambda mask: transition_kinds(mask[: len(mask) - mask[::-1].index(True)]),
    ),
    (
        "Only the replies are listed; each sampled token is a transition as well.",
        lambda mask: [kind for kind in transition_kinds(mask) if kind == "environmental"],
    ),
):
    mistake("transition_kinds", says, KINDS)(wrong)


def _mdp(rng: random.Random) -> tuple[Tensor, Tensor, Tensor, float]:
    states, actions = rng.randint(2, 4), rng.randint(2, 3)
    chances = torch.rand(states, actions, states).softmax(-1)
    return chances, torch.randn(states, actions, states), torch.randn(states), rng.choice([0.5, 0.8, 0.9])


@exercise(1, "bellman_backup", inputs=_mdp)
def bellman_backup(P: Tensor, R: Tensor, V: Tensor, gamma: float) -> Tensor:
    """max_a Σ_s' P(s' | s, a) (R(s, a, s') + γ V(s')); P, R (S, A, S), V (S,) → (S,)."""
    return (P * (R + gamma * V)).sum(-1).amax(-1)


for says, wrong in (
    ("γ is missing: what comes later counts less.", lambda P, R, V, gamma: bellman_backup(P, R, V, 1.0)),
    (
        "γ discounts the reward too; the reward of this step comes now, only V(s') lies ahead.",
        lambda P, R, V, gamma: gamma * bellman_backup(P, R, V, 1.0),
    ),
    (
        "You average over the actions, which values a policy that acts at random; the best policy takes the maximum.",
        lambda P, R, V, gamma: (P * (R + gamma * V)).sum(-1).mean(-1),
    ),
    (
        "You take the best next state; the agent chooses a, but P decides where it leads: an expectation over s'.",
        lambda P, R, V, gamma: (R + gamma * V).amax(-1).amax(-1),
    ),
    (
        "The rewards are missing, so only V(s') is left.",
        lambda P, R, V, gamma: bellman_backup(P, torch.zeros_like(R), V, gamma),
    ),
):
    mistake("bellman_backup", says, BELLMAN)(wrong)


def _episode(rng: random.Random) -> tuple[list[bool], list[int], list[float], float]:
    mask, ends = [False] * rng.randint(1, 3), []
    for _ in range(rng.randint(2, 3)):
        mask += [True] * rng.randint(2, 4)
        ends.append(len(mask))
        mask += [False] * rng.randint(2, 3)
    if rng.random() < 0.3:
        mask = mask[: ends[-1]]
    return mask, ends, [rng.choice([-0.1, -0.2, 0.3]) for _ in ends], rng.choice([0.5, 1.0])


def _placed(
    mask: list[bool], ends: list[int], process: list[float], outcome: float, last: Callable[[list[bool]], int]
) -> list[float]:
    rewards = [0.0] * len(mask)
    for end, reward in zip(ends, process, strict=True):
        rewards[end - 1] += reward
    rewards[last(mask)] += outcome
    return rewards


def _last_action(mask: list[bool]) -> int:
    return len(mask) - 1 - mask[::-1].index(True)


@exercise(1, "place_rewards", inputs=_episode)
def place_rewards(action_mask: list[bool], turn_ends: list[int], process: list[float], outcome: float) -> list[float]:
    """A reward for each token: ``process[k]`` on the last token of turn k, the outcome on the last sampled token.

    ``turn_ends[k]`` is one behind the last sampled token of turn k.
    """
    return _placed(action_mask, turn_ends, process, outcome, _last_action)


def _overwritten(mask: list[bool], ends: list[int], process: list[float], outcome: float) -> list[float]:
    rewards = place_rewards(mask, ends, process, outcome)
    rewards[_last_action(mask)] = outcome
    return rewards


def _on_reply(mask: list[bool], ends: list[int], process: list[float], outcome: float) -> list[float]:
    rewards = _placed(mask, [], [], outcome, _last_action)
    for end, reward in zip(ends, process, strict=True):
        rewards[end] += reward
    return rewards


for says, wrong in (
    (
        "The outcome lies on the very last token; where an episode ends on a tool's reply no estimator will see it.",
        lambda mask, ends, process, outcome: _placed(mask, ends, process, outcome, lambda mask: -1),
    ),
    (
        "The outcome replaces the last turn's process reward; add it, both may fall on one token.",
        _overwritten,
    ),
    (
        "The process rewards lie one token too late, on the reply; a turn's last sampled token is turn_ends[k] - 1.",
        _on_reply,
    ),
    (
        "The outcome lies on every sampled token, so long answers earn more; it is paid once.",
        lambda mask, ends, process, outcome: [
            r + outcome * acted for r, acted in zip(place_rewards(mask, ends, process, 0.0), mask, strict=True)
        ],
    ),
    (
        "The process rewards are missing.",
        lambda mask, ends, process, outcome: place_rewards(mask, ends, [0.0] * len(ends), outcome),
    ),
):
    mistake("place_rewards", says, REWARDS)(wrong)
