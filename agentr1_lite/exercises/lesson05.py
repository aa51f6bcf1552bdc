"""Exercises of lesson 05: the clipped objective, the KL estimators, the masked advantage-weighted loss."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from agentr1_lite.exercises import exercise, mistake

CLIP, KL, STEP = "Clipping", "The KL to a reference", "A step by hand"


def _ratios(rng: random.Random) -> tuple[Tensor, Tensor, float, float]:
    n = rng.randint(12, 20)
    advantages, ratio = torch.randn(n), torch.exp(0.5 * torch.randn(n))
    advantages[:4] = torch.tensor([1.0, -1.0, 2.0, -2.0])
    ratio[:4] = torch.tensor([1.9, 1.8, 0.3, 0.4])  # every corner of the clip occurs
    return ratio, advantages, 0.2, rng.choice([0.25, 0.3])


@exercise(5, "clipped_loss", inputs=_ratios)
def clipped_loss(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """PPO's loss of each token: −min(ρA, clip(ρ, 1 − clip_low, 1 + clip_high) A); (N,)."""
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)


for says, wrong in (
    (
        "This is the objective, which is to grow; the loss is minus it.",
        lambda r, a, low, high: -clipped_loss(r, a, low, high),
    ),
    (
        "Take the smaller of the two objectives, which is the larger loss: PPO keeps the pessimistic one.",
        lambda r, a, low, high: -torch.maximum(r * a, r.clamp(1 - low, 1 + high) * a),
    ),
    (
        "Only the clipped term is left; a token that moved the wrong way gets no gradient to come back.",
        lambda r, a, low, high: -r.clamp(1 - low, 1 + high) * a,
    ),
    (
        "Both bounds use clip_low; the upper one is 1 + clip_high.",
        lambda r, a, low, high: clipped_loss(r, a, low, low),
    ),
    ("The ratio is not clipped at all.", lambda r, a, low, high: -r * a),
):
    mistake("clipped_loss", says, CLIP)(wrong)


Three = tuple[Tensor, Tensor, Tensor]


def _two_policies(rng: random.Random) -> tuple[Tensor, Tensor]:
    n = rng.randint(4, 9)
    return 0.5 * torch.randn(n) - 2, 0.5 * torch.randn(n) - 2


@exercise(5, "kl_estimators", inputs=_two_policies)
def kl_estimators(logprobs: Tensor, ref_logprobs: Tensor) -> Three:
    """k1, k2, k3 of KL(π ‖ π_ref) on tokens that π sampled; (N,) each."""
    d = ref_logprobs - logprobs
    return -d, 0.5 * d**2, d.exp() - d - 1


for says, change in (
    ("The sign of d is turned round: d = log π_ref − log π.", lambda k, turned: turned),
    ("k1 has the wrong sign: it is −d = log π − log π_ref, whose mean is the KL.", lambda k, turned: (-k[0], *k[1:])),
    ("k3 takes d with the other sign than k1: one d serves all three.", lambda k, turned: (*k[:2], turned[2])),
    ("k2 lacks its factor ½.", lambda k, turned: (k[0], 2 * k[1], k[2])),
    ("k3 lacks its −1, so it is not 0 where both policies agree.", lambda k, turned: (*k[:2], k[2] + 1)),
):
    mistake("kl_estimators", says, KL)(lambda p, q, change=change: change(kl_estimators(p, q), kl_estimators(q, p)))


Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, float]


def _logprobs(logits: Tensor, ids: Tensor, temperature: float) -> Tensor:
    """log π of every token at its own place, 0 at the first; (B, T)."""
    logp = (logits[:, :-1] / temperature).log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    return torch.cat([torch.zeros_like(logp[:, :1]), logp], dim=1)


def _batch(rng: random.Random) -> Inputs:
    rows, width, vocabulary = rng.randint(2, 3), rng.randint(5, 8), rng.randint(4, 9)
    logits, ids = torch.randn(rows, width, vocabulary), torch.randint(0, vocabulary, (rows, width))
    mask = torch.rand(rows, width) < 0.5
    mask[:, 0], mask[:, 2], mask[0, 3:] = False, True, True
    temperature = rng.choice([0.7, 1.3])
    old = _logprobs(logits, ids, temperature) + 0.4 * torch.randn(rows, width)
    return logits.requires_grad_(), ids, torch.where(mask, old, 0.0), torch.randn(rows, width), mask, temperature


def _losses(logits: Tensor, ids: Tensor, old: Tensor, advantages: Tensor, temperature: float) -> Tensor:
    """The clipped loss of every token, on the mask or not; (B, T)."""
    return clipped_loss((_logprobs(logits, ids, temperature) - old).exp(), advantages, 0.2, 0.2)


@exercise(5, "agent_loss", inputs=_batch)
def agent_loss(
    logits: Tensor, ids: Tensor, old_logprobs: Tensor, advantages: Tensor, action_mask: Tensor, temperature: float
) -> Tensor:
    """The masked, advantage-weighted PPO loss (clip 0.2), mean over action tokens; (B, T, V), (B, T) → scalar."""
    return _losses(logits, ids, old_logprobs, advantages, temperature)[action_mask].mean()


def _unshifted(z: Tensor, ids: Tensor, old: Tensor, a: Tensor, mask: Tensor, temperature: float) -> Tensor:
    logp = (z / temperature).log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    return clipped_loss((logp - old).exp(), a, 0.2, 0.2)[mask].mean()


def _cut_off(z: Tensor, ids: Tensor, old: Tensor, a: Tensor, mask: Tensor, temperature: float) -> Tensor:
    """The loss from old log-probs, advantages and mask that are cut already; (B, T − 1) each."""
    return clipped_loss((_logprobs(z, ids, temperature)[:, 1:] - old).exp(), a, 0.2, 0.2)[mask].mean()


for says, reread, wrong in (
    (
        "There is no mask: prompt and tool output pull at the weights.",
        STEP,
        lambda z, ids, old, a, mask, t: _losses(z, ids, old, a, t).mean(),
    ),
    (
        "There is no mask: all T − 1 predicted tokens pull at the weights.",
        STEP,
        lambda z, ids, old, a, mask, t: _losses(z, ids, old, a, t)[:, 1:].mean(),
    ),
    (
        "The mean is over all tokens; divide by the number of action tokens.",
        STEP,
        lambda z, ids, old, a, mask, t: (_losses(z, ids, old, a, t) * mask).mean(),
    ),
    (
        "The mean is over all T − 1 predicted tokens; divide by the number of action tokens.",
        STEP,
        lambda z, ids, old, a, mask, t: (_losses(z, ids, old, a, t) * mask)[:, 1:].mean(),
    ),
    (
        "The temperature is missing: divide the logits by it, as the sampler did.",
        "Temperature and top-p",
        lambda z, ids, old, a, mask, t: agent_loss(z, ids, old, a, mask, 1.0),
    ),
    (
        "The logits are multiplied by the temperature; divide by it.",
        "Temperature and top-p",
        lambda z, ids, old, a, mask, t: agent_loss(z, ids, old, a, mask, 1 / t),
    ),
    ("Nothing is shifted: the logits at position t belong to the token at t + 1.", STEP, _unshifted),
    (
        "Old log-probs, advantages and mask are cut at the wrong end: cut them as you cut the ids, [:, 1:].",
        STEP,
        lambda z, ids, old, a, mask, t: _cut_off(z, ids, old[:, :-1], a[:, :-1], mask[:, :-1], t),
    ),
    (
        "The mask is off by one: cut it as you cut the ids, action_mask[:, 1:].",
        STEP,
        lambda z, ids, old, a, mask, t: _cut_off(z, ids, old[:, 1:], a[:, 1:], mask[:, :-1], t),
    ),
    (
        "The sign is turned round: this would make good actions rarer.",
        STEP,
        lambda z, ids, old, a, mask, t: -agent_loss(z, ids, old, a, mask, t),
    ),
    (
        "The ratio is not clipped.",
        CLIP,
        lambda z, ids, old, a, mask, t: -((_logprobs(z, ids, t) - old).exp() * a)[mask].mean(),
    ),
    (
        "This is −A · log π without the ratio: right on the policy that sampled, and only there.",
        "The ratio",
        lambda z, ids, old, a, mask, t: -(_logprobs(z, ids, t) * a)[mask].mean(),
    ),
    (
        "Each row is averaged first, so a token of a short row counts more.",
        "Aggregation",
        lambda z, ids, old, a, mask, t: ((_losses(z, ids, old, a, t) * mask).sum(-1) / mask.sum(-1)).mean(),
    ),
):
    mistake("agent_loss", says, reread)(wrong)
