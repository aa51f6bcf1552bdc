"""Exercises of lesson 01: the two transitions, a Bellman backup, where rewards lie."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from agentr1_lite.exercises import exercise, wrong_versions
from agentr1_lite.exercises.inputs import turns


@exercise(1, inputs=lambda rng: (turns(rng),))
def transition_kinds(action_mask: list[bool]) -> list[str]:
    """ "generative" for each sampled token, "environmental" once for each run of other tokens behind one."""
    kinds = []
    for before, acted in zip([False, *action_mask], action_mask, strict=False):
        if acted:
            kinds.append("generative")
        elif before:
            kinds.append("environmental")
    return kinds


@wrong_versions(transition_kinds, reread="Two transitions on a real trajectory")
class WrongKinds:
    def prompt_counted(mask):
        """The prompt is the first state, not a transition; start behind it."""
        return ["environmental", *transition_kinds(mask)]

    def every_token(mask):
        """A reply is one transition however many tokens it has; you count one for each token, and the prompt's
        too."""
        return ["generative" if acted else "environmental" for acted in mask]

    def every_token_of_a_reply(mask):
        """A reply is one transition however many tokens it has; you count one for each of its tokens."""
        return WrongKinds.every_token(mask[mask.index(True) :])

    def last_reply_missing(mask):
        """An episode may end on a tool's reply; that transition is missing."""
        return transition_kinds(mask[: len(mask) - mask[::-1].index(True)])

    def replies_alone(mask):
        """Only the replies are listed; each sampled token is a transition as well."""
        return [kind for kind in transition_kinds(mask) if kind == "environmental"]


def _mdp(rng: random.Random) -> tuple[Tensor, Tensor, Tensor, float]:
    states, actions = rng.randint(2, 4), rng.randint(2, 3)
    chances = torch.rand(states, actions, states).softmax(-1)
    return chances, torch.randn(states, actions, states), torch.randn(states), rng.choice([0.5, 0.8, 0.9])


@exercise(1, inputs=_mdp)
def bellman_backup(P: Tensor, R: Tensor, V: Tensor, gamma: float) -> Tensor:
    """max_a Σ_s' P(s' | s, a) (R(s, a, s') + γ V(s')); P, R (S, A, S), V (S,) → (S,)."""
    return (P * (R + gamma * V)).sum(-1).amax(-1)


@wrong_versions(bellman_backup, reread="A tiny MDP solved exactly")
class WrongBackups:
    def undiscounted(P, R, V, gamma):
        """γ is missing: what comes later counts less."""
        return bellman_backup(P, R, V, 1.0)

    def discounted_reward(P, R, V, gamma):
        """γ discounts the reward too; the reward of this step comes now, only V(s') lies ahead."""
        return gamma * bellman_backup(P, R, V, 1.0)

    def mean_over_actions(P, R, V, gamma):
        """You average over the actions, which values a policy that acts at random; the best policy takes the
        maximum."""
        return (P * (R + gamma * V)).sum(-1).mean(-1)

    def best_next_state(P, R, V, gamma):
        """You take the best next state; the agent chooses a, but P decides where it leads: an expectation over s'."""
        return (R + gamma * V).amax(-1).amax(-1)

    def no_reward(P, R, V, gamma):
        """The rewards are missing, so only V(s') is left."""
        return bellman_backup(P, torch.zeros_like(R), V, gamma)


def _episode(rng: random.Random) -> tuple[list[bool], list[int], list[float], float]:
    mask = turns(rng)
    ends = [t for t in range(1, len(mask) + 1) if mask[t - 1] and not (*mask, False)[t]]
    return mask, ends, [rng.choice([-0.1, -0.2, 0.3]) for _ in ends], rng.choice([0.5, 1.0])


@exercise(1, inputs=_episode)
def place_rewards(action_mask: list[bool], turn_ends: list[int], process: list[float], outcome: float) -> list[float]:
    """A reward for each token: ``process[k]`` on the last token of turn k, the outcome on the last sampled token.

    ``turn_ends[k]`` is one behind the last sampled token of turn k.
    """
    rewards = [0.0] * len(action_mask)
    for end, reward in zip(turn_ends, process, strict=True):
        rewards[end - 1] += reward
    rewards[turn_ends[-1] - 1] += outcome
    return rewards


@wrong_versions(place_rewards, reread="Where rewards lie")
class WrongPlaces:
    def very_last_token(mask, ends, process, outcome):
        """The outcome lies on the very last token; where an episode ends on a tool's reply no estimator will see
        it."""
        rewards = place_rewards(mask, ends, process, 0.0)
        return [*rewards[:-1], rewards[-1] + outcome]

    def outcome_replaces(mask, ends, process, outcome):
        """The outcome replaces the last turn's process reward; add it, both may fall on one token."""
        return place_rewards(mask, ends, [*process[:-1], 0.0], outcome)

    def on_the_reply(mask, ends, process, outcome):
        """The process rewards lie one token too late, on the reply; a turn's last sampled token is
        turn_ends[k] - 1."""
        rewards = place_rewards(mask, ends, [0.0] * len(ends), outcome)
        for end, reward in zip(ends, process, strict=True):
            rewards[end] += reward
        return rewards

    def on_every_sampled_token(mask, ends, process, outcome):
        """The outcome lies on every sampled token, so long answers earn more; it is paid once."""
        rewards = place_rewards(mask, ends, process, 0.0)
        return [reward + outcome * acted for reward, acted in zip(rewards, mask, strict=True)]

    def no_process_rewards(mask, ends, process, outcome):
        """The process rewards are missing."""
        return place_rewards(mask, ends, [0.0] * len(ends), outcome)
