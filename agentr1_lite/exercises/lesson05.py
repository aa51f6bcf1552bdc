"""Exercises of lesson 05: the clipped objective, the KL estimators, the masked advantage-weighted loss."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from agentr1_lite.exercises import exercise, mistakes, wrong_versions
from agentr1_lite.exercises.inputs import model_output

Three = tuple[Tensor, Tensor, Tensor]


def _ratios(rng: random.Random) -> tuple[Tensor, Tensor, float, float]:
    n = rng.randint(12, 20)
    advantages, ratio = torch.randn(n), torch.exp(0.5 * torch.randn(n))
    advantages[:4] = torch.tensor([1.0, -1.0, 2.0, -2.0])
    ratio[:4] = torch.tensor([1.9, 1.8, 0.3, 0.4])  # every corner of the clip occurs
    return ratio, advantages, 0.2, rng.choice([0.25, 0.3])


@exercise(5, inputs=_ratios)
def clipped_loss(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """PPO's loss of each token: −min(ρA, clip(ρ, 1 − clip_low, 1 + clip_high) A); (N,)."""
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)


@wrong_versions(clipped_loss, reread="Clipping")
class WrongClips:
    def objective(ratio, advantages, low, high):
        """This is the objective, which is to grow; the loss is minus it."""
        return -clipped_loss(ratio, advantages, low, high)

    def optimistic(ratio, advantages, low, high):
        """Take the smaller of the two objectives, which is the larger loss: PPO keeps the pessimistic one."""
        return -torch.maximum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)

    def clipped_term_alone(ratio, advantages, low, high):
        """Only the clipped term is left; a token that moved the wrong way gets no gradient to come back."""
        return -ratio.clamp(1 - low, 1 + high) * advantages

    def same_bounds(ratio, advantages, low, high):
        """Both bounds use clip_low; the upper one is 1 + clip_high."""
        return clipped_loss(ratio, advantages, low, low)

    def unclipped(ratio, advantages, low, high):
        """The ratio is not clipped at all."""
        return -ratio * advantages


def _two_policies(rng: random.Random) -> tuple[Tensor, Tensor]:
    n = rng.randint(4, 9)
    return 0.5 * torch.randn(n) - 2, 0.5 * torch.randn(n) - 2


@exercise(5, inputs=_two_policies)
def kl_estimators(logprobs: Tensor, ref_logprobs: Tensor) -> Three:
    """k1, k2, k3 of KL(π ‖ π_ref) on tokens that π sampled; (N,) each."""
    d = ref_logprobs - logprobs
    return -d, 0.5 * d**2, d.exp() - d - 1


def _changed(change: Callable[[Three, Three], Three]) -> Callable[[Tensor, Tensor], Three]:
    """Made of the right three and of those with d turned round."""
    return lambda p, q: change(kl_estimators(p, q), kl_estimators(q, p))


mistakes(
    kl_estimators,
    "The KL to a reference",
    {
        "The sign of d is turned round: d = log π_ref − log π.": _changed(lambda k, turned: turned),
        "k1 has the wrong sign: it is −d, whose mean is the KL.": _changed(lambda k, turned: (-k[0], *k[1:])),
        "k3 takes d with the other sign than k1: one d for all three.": _changed(lambda k, turned: (*k[:2], turned[2])),
        "k2 lacks its factor ½.": _changed(lambda k, turned: (k[0], 2 * k[1], k[2])),
        "k3 lacks its −1, so it is not 0 where both policies agree.": _changed(lambda k, turned: (*k[:2], k[2] + 1)),
    },
)


def _logprobs(logits: Tensor, ids: Tensor, temperature: float) -> Tensor:
    """log π of every token at its own place, 0 at the first; (B, T)."""
    logp = (logits[:, :-1] / temperature).log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    return torch.cat([torch.zeros_like(logp[:, :1]), logp], dim=1)


def _batch(rng: random.Random) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, float]:
    logits, ids, mask = model_output(rng)
    temperature = rng.choice([0.7, 1.3])
    old = _logprobs(logits, ids, temperature) + 0.4 * torch.randn(ids.shape)
    return logits.requires_grad_(), ids, torch.where(mask, old, 0.0), torch.randn(ids.shape), mask, temperature


def _losses(logits: Tensor, ids: Tensor, old: Tensor, advantages: Tensor, temperature: float) -> Tensor:
    """The clipped loss of every token, on the mask or not; (B, T)."""
    return clipped_loss((_logprobs(logits, ids, temperature) - old).exp(), advantages, 0.2, 0.2)


@exercise(5, inputs=_batch)
def agent_loss(
    logits: Tensor, ids: Tensor, old_logprobs: Tensor, advantages: Tensor, action_mask: Tensor, temperature: float
) -> Tensor:
    """The masked, advantage-weighted PPO loss (clip 0.2), mean over action tokens; (B, T, V), (B, T) → scalar."""
    return _losses(logits, ids, old_logprobs, advantages, temperature)[action_mask].mean()


def _early(values: Tensor) -> Tensor:
    """What the cut ``[:, :-1]`` puts beside the token at t + 1."""
    return F.pad(values[:, :-1], (1, 0))


@wrong_versions(agent_loss, reread="A step by hand")
class WrongSteps:
    def no_mask(logits, ids, old, advantages, mask, temperature):
        """There is no mask: prompt and tool output pull at the weights."""
        return _losses(logits, ids, old, advantages, temperature).mean()

    def no_mask_on_predicted(logits, ids, old, advantages, mask, temperature):
        """There is no mask: all T − 1 predicted tokens pull at the weights."""
        return _losses(logits, ids, old, advantages, temperature)[:, 1:].mean()

    def mean_over_all(logits, ids, old, advantages, mask, temperature):
        """The mean is over all tokens; divide by the number of action tokens."""
        return (_losses(logits, ids, old, advantages, temperature) * mask).mean()

    def mean_over_predicted(logits, ids, old, advantages, mask, temperature):
        """The mean is over all T − 1 predicted tokens; divide by the number of action tokens."""
        return (_losses(logits, ids, old, advantages, temperature) * mask)[:, 1:].mean()

    def unshifted(logits, *given):
        """Nothing is shifted: the logits at position t belong to the token at t + 1."""
        return agent_loss(logits.roll(-1, 1), *given)

    def cut_at_the_wrong_end(logits, ids, old, advantages, mask, temperature):
        """Old log-probs, advantages and mask are cut at the wrong end: cut them as you cut the ids, [:, 1:]."""
        return agent_loss(logits, ids, _early(old), _early(advantages), _early(mask), temperature)

    def mask_off_by_one(logits, ids, old, advantages, mask, temperature):
        """The mask is off by one: cut it as you cut the ids, action_mask[:, 1:]."""
        return agent_loss(logits, ids, old, advantages, _early(mask), temperature)

    def wrong_sign(*given):
        """The sign is turned round: this would make good actions rarer."""
        return -agent_loss(*given)


@wrong_versions(agent_loss, reread="Temperature and top-p")
class WrongTemperatures:
    def no_temperature(*given):
        """The temperature is missing: divide the logits by it, as the sampler did."""
        return agent_loss(*given[:-1], 1.0)

    def multiplied(*given):
        """The logits are multiplied by the temperature; divide by it."""
        return agent_loss(*given[:-1], 1 / given[-1])


@wrong_versions(agent_loss, reread="Clipping")
class WrongRatios:
    def unclipped(logits, ids, old, advantages, mask, temperature):
        """The ratio is not clipped."""
        return -((_logprobs(logits, ids, temperature) - old).exp() * advantages)[mask].mean()


@wrong_versions(agent_loss, reread="The ratio")
class NoRatio:
    def logprobs(logits, ids, old, advantages, mask, temperature):
        """This is −A · log π without the ratio: right on the policy that sampled, and only there."""
        return -(_logprobs(logits, ids, temperature) * advantages)[mask].mean()


@wrong_versions(agent_loss, reread="Aggregation")
class WrongMeans:
    def rows_first(logits, ids, old, advantages, mask, temperature):
        """Each row is averaged first, so a token of a short row counts more."""
        losses = _losses(logits, ids, old, advantages, temperature)
        return ((losses * mask).sum(-1) / mask.sum(-1)).mean()
