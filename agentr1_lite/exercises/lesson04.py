"""Exercises of lesson 04: returns across tool spans, the group's advantage, potential-based shaping."""

from __future__ import annotations

import random

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from agentr1_lite.exercises import exercise, wrong_versions
from agentr1_lite.exercises.inputs import turns


def _rows(rng: random.Random) -> tuple[Tensor, Tensor, float]:
    """Rows of at least two turns and a reply between them, padded; rewards on sampled tokens."""
    rows = [[*turns(rng), True, True, False] for _ in range(rng.randint(2, 3))]
    mask = pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
    return torch.where(mask, torch.randn(mask.shape), 0.0), mask, rng.choice([0.5, 0.8, 0.9])


def _summed(rewards: Tensor, mask: Tensor, gamma: float, off: str = "carry") -> Tensor:
    """Backwards over the tokens; ``off`` says what a token off the mask does to the sum that runs through it."""
    out, running = torch.zeros_like(rewards), torch.zeros(len(rewards))
    for t in reversed(range(rewards.shape[1])):
        ahead = {"carry": running, "decay": gamma * running, "reset": torch.zeros_like(running)}[off]
        running = torch.where(mask[:, t], rewards[:, t] + gamma * running, ahead)
        out[:, t] = running
    return out


@exercise(4, inputs=_rows)
def returns_to_go(rewards: Tensor, action_mask: Tensor, gamma: float) -> Tensor:
    """G_t = r_t + γ G of the next *action* token, 0 off the mask; all (B, T)."""
    return torch.where(action_mask, _summed(rewards, action_mask, gamma), 0.0)


@wrong_versions(returns_to_go, reread="Returns across tool spans")
class WrongReturns:
    def decaying_on_replies(rewards, mask, gamma):
        """The return decays on observation tokens: a long reply would cost more. Only action tokens count as steps."""
        return torch.where(mask, _summed(rewards, mask, gamma, "decay"), 0.0)

    def anew_at_replies(rewards, mask, gamma):
        """The return starts anew at each observation, so no turn before a tool's reply hears of the outcome."""
        return torch.where(mask, _summed(rewards, mask, gamma, "reset"), 0.0)

    def undiscounted(rewards, mask, gamma):
        """γ is missing."""
        return returns_to_go(rewards, mask, 1.0)

    def unmasked(rewards, mask, gamma):
        """Off the mask it must be 0; yours goes on there."""
        return _summed(rewards, mask, gamma)

    def unmasked_and_decaying(rewards, mask, gamma):
        """Off the mask it must be 0, and observation tokens are no steps: yours decays on them."""
        return _summed(rewards, mask, gamma, "decay")

    def from_the_left(rewards, mask, gamma):
        """You sum what was earned before the token; a return is what comes from it on."""
        return returns_to_go(rewards.flip(-1), mask.flip(-1), gamma).flip(-1)

    def whole_episode(rewards, mask, gamma):
        """Each token gets the whole episode's sum; a token cannot be credited with what came before it."""
        return torch.where(mask, rewards.sum(-1, keepdim=True), 0.0)


def _groups(rng: random.Random) -> tuple[Tensor, Tensor]:
    """Groups in mixed order: different returns, nearly the same, all the same, and a group of one."""
    groups = [
        torch.randn(rng.randint(3, 5)),
        torch.linspace(0.48, 0.52, rng.randint(3, 5)),
        torch.full((rng.choice([7, 9, 11]),), rng.choice([0.7, 1.3, 0.1])),
        torch.randn(1),
    ]
    ids = torch.cat([torch.full((len(own),), n) for n, own in enumerate(groups)])
    order = torch.randperm(len(ids))
    return torch.cat(groups)[order], ids[order]


def _per_group(
    returns: Tensor, group_ids: Tensor, correction: int = 1, equal: bool = True, divide: bool = True
) -> Tensor:
    out = torch.zeros_like(returns)
    for group in group_ids.unique():
        own = returns[group_ids == group]
        if equal and own.max() == own.min():
            continue
        std = own.std(correction=correction) if len(own) > correction else float("nan")  # without torch's warning
        out[group_ids == group] = (own - own.mean()) / (std + 1e-6 if divide else 1.0)
    return out


@exercise(4, inputs=_groups, tolerance=1e-4)
def group_advantage(returns: Tensor, group_ids: Tensor) -> Tensor:
    """GRPO: (R − mean_g) / (std_g + 1e-6) with the unbiased std, exactly 0 where a group's returns are equal; (B,)."""
    return _per_group(returns, group_ids)


def _alone(group_ids: Tensor) -> Tensor:
    return torch.bincount(group_ids)[group_ids] == 1


@wrong_versions(group_advantage, reread="What a group does")
class WrongAdvantages:
    def biased(returns, groups):
        """The std divides by n; with few rollouts divide by n − 1, as torch's std does by itself."""
        return _per_group(returns, groups, correction=0)

    def no_std(returns, groups):
        """The std is missing: this is Dr. GRPO's advantage."""
        return _per_group(returns, groups, divide=False)

    def whole_batch(returns, groups):
        """Mean and std are those of the whole batch; an easy question's rollouts must be compared with each other."""
        return (returns - returns.mean()) / (returns.std() + 1e-6)

    def nan(returns, groups):
        """A group of one gives nan, since one number has no unbiased std; nothing to compare means 0."""
        return _per_group(returns, groups, equal=False)

    def nan_alone(returns, groups):
        """A group of one gives nan; equal returns are treated well, but one rollout is such a group too."""
        return torch.where(_alone(groups), float("nan"), _per_group(returns, groups))

    def rounding_error(returns, groups):
        """Equal returns do not give 0: the mean's rounding error is divided by a std of next to nothing. Ask whether
        the largest return equals the smallest."""
        return torch.where(_alone(groups), 0.0, _per_group(returns, groups, equal=False))

    def biased_rounding_error(returns, groups):
        """Equal returns do not give 0 (ask whether the largest equals the smallest), and the std divides by n."""
        return _per_group(returns, groups, correction=0, equal=False)


def _turns(rng: random.Random) -> tuple[Tensor, Tensor, float]:
    n = rng.randint(2, 5)
    return torch.randn(n), torch.rand(n) + 0.1, rng.choice([0.5, 0.8, 0.9])


@exercise(4, inputs=_turns)
def potential_shaping(rewards: Tensor, potentials: Tensor, gamma: float) -> Tensor:
    """r_k + γ Φ(s_{k+1}) − Φ(s_k), (N,); ``potentials[k]`` is Φ at the start of turn k, and Φ is 0 behind the end."""
    return rewards + gamma * torch.cat([potentials[1:], torch.zeros(1)]) - potentials


@wrong_versions(potential_shaping, reread="Shaping")
class WrongShaping:
    def last_turn_keeps(rewards, potentials, gamma):
        """The last turn keeps its potential: behind the end Φ is 0, so Φ(s_k) must be taken back there. Otherwise
        ending in a state of high Φ pays, and the optimum moves."""
        return torch.cat([potential_shaping(rewards, potentials, gamma)[:-1], rewards[-1:]])

    def last_again(rewards, potentials, gamma):
        """Behind the end stands the last Φ again; an ended episode has no potential, put 0."""
        return rewards + gamma * torch.cat([potentials[1:], potentials[-1:]]) - potentials

    def undiscounted(rewards, potentials, gamma):
        """γ is missing before Φ(s_{k+1}); without it the sums do not cancel."""
        return potential_shaping(rewards, potentials, 1.0)

    def wrong_sign(rewards, potentials, gamma):
        """The sign is turned round: gaining potential must pay."""
        return 2 * rewards - potential_shaping(rewards, potentials, gamma)

    def nothing_taken(rewards, potentials, gamma):
        """Φ(s_k) is not taken away: a bonus for each good state, which pays for staying in it."""
        return potential_shaping(rewards, potentials, gamma) + potentials

    def potential_as_reward(rewards, potentials, gamma):
        """Φ itself is added to the reward; shaping pays for its change."""
        return rewards + potentials
