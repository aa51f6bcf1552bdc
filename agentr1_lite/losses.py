"""Masked losses: policy, value, KL, entropy, and what imitation and offline RL need.

Shapes: (B, T) for everything per token, M the action mask. Log-probs, values,
advantages may hold anything off the mask, NaN included: each is replaced by 0
there before it is used, so that loss and gradient stay finite and the gradient
is exactly 0 (0 · inf would be NaN).
How tokens become one number: `agentr1_lite.aggregation`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from agentr1_lite.aggregation import AGGREGATIONS, aggregate, masked_mean, normalizer_for, on_mask

__all__ = [
    "AGGREGATIONS",
    "KINDS",
    "KL_ESTIMATORS",
    "PRESETS",
    "KLController",
    "aggregate",
    "awr_weights",
    "dpo_loss",
    "entropy",
    "entropy_loss",
    "kl",
    "kl_in_reward",
    "kl_loss",
    "masked_mean",
    "merge_stats",
    "normalizer_for",
    "policy_kind",
    "policy_loss",
    "policy_ratio",
    "sequence_logprobs",
    "value_loss",
    "weighted_nll",
]

Stats = dict[str, Tensor]
LOG_RATIO_LIMIT = 20.0  # |log ratio| beyond this is clamped: exp(20) is far outside every clip range

# The settings under which the names of papers and of TRL are met; pass as policy_loss(..., **PRESETS[name])
PRESETS: dict[str, dict[str, Any]] = {
    "ppo": {"aggregation": "token-mean", "dual_clip": 3.0},
    "grpo": {"aggregation": "seq-mean-token-mean"},
    "bnpo": {"aggregation": "token-mean"},
    "dapo": {"aggregation": "token-mean", "clip_high": 0.28},
    "dr_grpo": {"aggregation": "constant"},
    "gspo": {"aggregation": "seq-mean-token-mean", "ratio": "sequence", "clip_low": 3e-4, "clip_high": 4e-4},
    "luspo": {"aggregation": "seq-mean-token-sum", "ratio": "sequence"},
    "cispo": {"aggregation": "token-mean", "kind": "cispo", "clip_low": 1.0, "clip_high": 4.0},
}


# Policy losses: (ratio, logprobs, advantages, …) -> (loss matrix, clipped, dual-clipped)

Kind = Callable[..., tuple[Tensor, Tensor, Tensor]]
KINDS: dict[str, Kind] = {}


def policy_kind(name: str) -> Callable[[Kind], Kind]:
    """Register a form of the policy loss; all operate on (B, T) and leave masking to `policy_loss`."""

    def register(function: Kind) -> Kind:
        KINDS[name] = function
        return function

    return register


@policy_kind("ppo")
def clipped_surrogate(
    ratio: Tensor,
    logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
    ratio_cap: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """PPO (arXiv 1707.06347): −min(ρA, clip(ρ, 1 − clip_low, 1 + clip_high) A); DAPO has clip_high > clip_low.

    ``dual_clip`` c (arXiv 1912.09729) bounds the loss of A < 0 by −cA; ``ratio_cap`` δ (INTELLECT-2, arXiv
    2505.07291) takes min(ρ, δ) in the first term.
    """
    free = -advantages * (ratio if ratio_cap is None else ratio.clamp(max=ratio_cap))
    held = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = torch.maximum(free, held)
    dual = torch.zeros_like(loss, dtype=torch.bool)
    if dual_clip is not None:
        bound = -advantages * dual_clip
        dual = (advantages < 0) & (loss > bound)
        loss = torch.where(dual, bound, loss)
    return loss, held > free, dual


@policy_kind("cispo")
def clipped_weight(
    ratio: Tensor, logprobs: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float, **_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """CISPO (MiniMax-M1, arXiv 2506.13585): −sg(clip(ρ, 1 − clip_low, 1 + clip_high)) · A · log π; no token is lost."""
    weight = ratio.detach().clamp(1 - clip_low, 1 + clip_high)
    return -weight * advantages * logprobs, weight != ratio, torch.zeros_like(ratio, dtype=torch.bool)


@policy_kind("reinforce")
def plain_gradient(ratio: Tensor, logprobs: Tensor, advantages: Tensor, **_: Any) -> tuple[Tensor, Tensor, Tensor]:
    """−A · log π: the score-function gradient itself, right only on the policy that sampled."""
    none = torch.zeros_like(ratio, dtype=torch.bool)
    return -advantages * logprobs, none, none


def policy_ratio(logprobs: Tensor, old_logprobs: Tensor, action_mask: Tensor, ratio: str = "token") -> Tensor:
    """ρ (B, T), log ρ clamped to ±20; "token": π/π_old of each token; "sequence": GSPO (arXiv 2507.18071).

    The sequence ratio is exp of the mean log-ratio over the row's *action* tokens, the same number on each of
    them, with each token's gradient its own (GSPO-token): with one advantage a row it is GSPO's gradient.
    """
    mask = action_mask.bool()
    new = on_mask(logprobs, mask, "logprobs")
    log_ratio = new - on_mask(old_logprobs, mask, "old_logprobs")
    if ratio == "sequence":
        mean = log_ratio.detach().sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
        log_ratio = torch.where(mask, mean, 0.0) + new - new.detach()
    elif ratio != "token":
        raise ValueError(f"policy_loss: ratio is {ratio!r}; choose one of token, sequence")
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    action_mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    ratio_cap: float | None = None,
    ratio: str = "token",
    kind: str = "ppo",
    aggregation: str = "token-mean",
    normalizer: float | Tensor | None = None,
    max_length: int | None = None,
    weights: Tensor | None = None,
) -> tuple[Tensor, Stats]:
    """The loss of one micro-batch and its statistics.

    Args:
        logprobs, old_logprobs: (B, T), log π(token t) now and when it was sampled. advantages: (B, T) or (B,).
        clip_low, clip_high, dual_clip, ratio_cap: see `clipped_surrogate` and `clipped_weight`.
        ratio: "token" or "sequence", see `policy_ratio`. kind: a key of `KINDS`.
        aggregation, normalizer, max_length: see `normalizer_for` and `aggregate`.
        weights: (B, T), times each token's loss; no gradient; see `agentr1_lite.importance`.

    Returns:
        loss (scalar) and 0-dim tensors without gradient, means over M: clip_fraction, dual_clip_fraction,
        approx_kl (k1, mean of log π_old − log π: may be negative), approx_kl_k3 (never negative), ratio_mean,
        ratio_max, ratio_min, and ``tokens`` (size of M, the weight for `merge_stats`).
    """
    if kind not in KINDS:
        raise ValueError(f"policy_loss: kind is {kind!r}; choose one of {', '.join(KINDS)}")
    if dual_clip is not None and dual_clip <= 1:
        raise ValueError(f"policy_loss: dual_clip is {dual_clip}; it bounds a ratio from above and must be over 1")
    mask = action_mask.bool()
    rho = policy_ratio(logprobs, old_logprobs, mask, ratio)
    logprobs, old_logprobs = on_mask(logprobs, mask, "logprobs"), on_mask(old_logprobs, mask, "old_logprobs")
    advantages = on_mask(advantages, mask, "advantages").detach()
    bounds = {"clip_low": clip_low, "clip_high": clip_high, "dual_clip": dual_clip, "ratio_cap": ratio_cap}
    matrix, clipped, dual = KINDS[kind](rho, logprobs, advantages, **bounds)
    if weights is not None:
        matrix = matrix * on_mask(weights, mask, "weights").detach()
    loss = aggregate(matrix, mask, aggregation, normalizer, max_length)
    picked = rho.detach()[mask] if mask.any() else torch.ones_like(rho[:1, 0])
    return loss, {
        "clip_fraction": masked_mean(clipped.float(), mask),
        "dual_clip_fraction": masked_mean(dual.float(), mask),
        "approx_kl": masked_mean(old_logprobs - logprobs, mask),
        "approx_kl_k3": masked_mean(kl(old_logprobs, logprobs, "k3"), mask),
        "ratio_mean": masked_mean(rho, mask),
        "ratio_max": picked.max(),
        "ratio_min": picked.min(),
        "tokens": mask.sum(),
    }


def merge_stats(parts: Iterable[Stats]) -> dict[str, float]:
    """Statistics of micro-batches as those of the batch: means weighted by ``tokens``, extremes kept; floats."""
    parts = list(parts)
    weights = [float(part["tokens"]) for part in parts]
    out: dict[str, float] = {}
    for name in parts[0] if parts else ():
        numbers = [float(part[name]) for part in parts]
        if name.endswith(("_max", "_min")):
            acted = [x for x, weight in zip(numbers, weights, strict=True) if weight] or numbers
            out[name] = (max if name.endswith("_max") else min)(acted)
        elif name == "tokens":
            out[name] = sum(weights)
        else:
            out[name] = sum(w * x for w, x in zip(weights, numbers, strict=True)) / (sum(weights) or 1.0)
    return out


# KL to a reference

_KL: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda d: -d,
    "abs": lambda d: d.abs(),
    "k2": lambda d: 0.5 * d * d,
    "k3": lambda d: (d.clamp(-20, 20).exp() - d.clamp(-20, 20) - 1).clamp(-10, 10),
}
KL_ALIASES = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}
KL_ESTIMATORS = tuple(_KL)


def kl(logprobs: Tensor, ref_logprobs: Tensor, estimator: str = "k1", action_mask: Tensor | None = None) -> Tensor:
    """Per-token estimate of KL(π ‖ π_ref) on tokens of π; (B, T). With d = log π_ref − log π:

    | estimator | formula     | on samples                                    | clamps                   |
    |-----------|-------------|-----------------------------------------------|--------------------------|
    | k1        | −d          | unbiased, often negative                      | none                     |
    | abs       | |d|         | biased                                        | none                     |
    | k2        | ½ d²        | biased a little, its gradient is that of KL   | none                     |
    | k3        | e^d − d − 1 | unbiased, never negative, explodes for d ≫ 0  | d to ±20, result to ±10  |

    (Schulman, "Approximating KL divergence", 2020.) As a loss, k1's gradient is 0 in expectation: put k1 into the
    reward. A clamped k3 has no gradient, which happens from d = 2.6 on; a "+" behind a name ("k3+") keeps its value
    and takes k2's gradient. ``action_mask`` gives 0 off it.
    """
    base = estimator.removesuffix("+")
    base = KL_ALIASES.get(base, base)
    if base not in _KL:
        raise ValueError(
            f"kl: estimator is {estimator!r}; choose one of {', '.join(KL_ESTIMATORS)}, or with a + behind"
        )
    if action_mask is not None:
        mask = action_mask.bool()
        logprobs, ref_logprobs = on_mask(logprobs, mask, "logprobs"), on_mask(ref_logprobs, mask, "ref_logprobs")
    d = ref_logprobs - logprobs
    if not estimator.endswith("+"):
        return _KL[base](d)
    straight = _KL["k2"](d)
    return _KL[base](d).detach() + straight - straight.detach()


def kl_loss(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    action_mask: Tensor,
    estimator: str = "k3",
    aggregation: str = "token-mean",
    normalizer: float | Tensor | None = None,
    max_length: int | None = None,
) -> Tensor:
    """KL as a term of the loss (GRPO: k3, coefficient 0.001), aggregated like the policy loss; unweighted scalar."""
    per_token = kl(logprobs, ref_logprobs.detach(), estimator, action_mask)
    return aggregate(per_token, action_mask, aggregation, normalizer, max_length)


def kl_in_reward(
    rewards: Tensor,
    logprobs: Tensor,
    ref_logprobs: Tensor,
    action_mask: Tensor,
    coefficient: float,
    estimator: str = "k1",
) -> Tensor:
    """KL as a part of the reward (PPO, REINFORCE++): r_t − coefficient · KL_t on action tokens; (B, T), no gradient."""
    return rewards - coefficient * kl(logprobs, ref_logprobs, estimator, action_mask).detach().to(rewards.dtype)


@dataclass
class KLController:
    """The coefficient of the KL term: fixed without a target, else Ziegler et al.'s (arXiv 1909.08593) controller.

    ``update(kl, n)``: value ← value · (1 + clip(kl / target − 1, ±0.2) · n / horizon), n rollouts since the last one.
    """

    value: float = 0.001
    target: float | None = None
    horizon: float = 10_000

    def update(self, current: float, n: int) -> float:
        if self.target is not None and math.isfinite(current):
            error = min(max(current / self.target - 1, -0.2), 0.2)
            self.value *= 1 + error * n / self.horizon
        return self.value


# Critic and entropy


def value_loss(
    values: Tensor,
    old_values: Tensor | None,
    returns: Tensor,
    action_mask: Tensor,
    *,
    clip: float | None = 0.5,
    aggregation: str = "token-mean",
    normalizer: float | Tensor | None = None,
    max_length: int | None = None,
) -> tuple[Tensor, Stats]:
    """½ · max((V − G)², (clip(V, V_old ± clip) − G)²) over M; ``clip`` or ``old_values`` None leaves the first term."""
    mask = action_mask.bool()
    values, returns = on_mask(values, mask, "values"), on_mask(returns, mask, "returns").detach()
    matrix = (values - returns) ** 2
    clipped = torch.zeros_like(mask)
    if clip is not None and old_values is not None:
        old = on_mask(old_values, mask, "old_values").detach()
        held = (torch.maximum(torch.minimum(values, old + clip), old - clip) - returns) ** 2
        matrix, clipped = torch.maximum(matrix, held), held > matrix
    residual = masked_mean((returns - values) ** 2, mask)
    spread = masked_mean((returns - masked_mean(returns, mask)) ** 2, mask)
    return aggregate(0.5 * matrix, mask, aggregation, normalizer, max_length), {
        "value_clip_fraction": masked_mean(clipped.float(), mask),
        "value_mean": masked_mean(values, mask),
        "return_mean": masked_mean(returns, mask),
        "explained_variance": torch.where(spread > 0, 1 - residual / spread.clamp(min=1e-12), 0.0),
        "tokens": mask.sum(),
    }


def entropy(logits: Tensor) -> Tensor:
    """H = log Σ e^z − Σ p·z of the next-token distribution; (…, V) → (…)."""
    return torch.logsumexp(logits, -1) - (logits.softmax(-1) * logits).sum(-1)


def entropy_loss(
    entropies: Tensor,
    action_mask: Tensor,
    aggregation: str = "token-mean",
    normalizer: float | Tensor | None = None,
    max_length: int | None = None,
) -> Tensor:
    """−H aggregated: add ``coefficient · entropy_loss`` to the loss as a bonus for exploration."""
    return -aggregate(entropies, action_mask, aggregation, normalizer, max_length)


# Imitation and offline RL


def weighted_nll(
    logprobs: Tensor,
    weights: Tensor | float,
    action_mask: Tensor,
    aggregation: str = "token-mean",
    normalizer: float | Tensor | None = None,
    max_length: int | None = None,
) -> Tensor:
    """−w · log π over M; w (B, T), (B,) or a number: 1 is supervised fine-tuning, `awr_weights` gives AWR."""
    mask = action_mask.bool()
    weights = torch.as_tensor(weights, device=mask.device)
    weights = weights.expand(mask.shape) if weights.dim() == 0 else weights
    matrix = -on_mask(weights, mask, "weights").detach() * on_mask(logprobs, mask, "logprobs")
    return aggregate(matrix, mask, aggregation, normalizer, max_length)


def awr_weights(advantages: Tensor, temperature: float = 1.0, max_weight: float = 20.0) -> Tensor:
    """Advantage-weighted regression (Peng et al., arXiv 1910.00177): w = min(e^(A / temperature), max_weight)."""
    return (advantages / temperature).clamp(max=math.log(max_weight)).exp()


def sequence_logprobs(logprobs: Tensor, action_mask: Tensor) -> Tensor:
    """log π of all of a row's actions: Σ over M; (B, T) → (B,)."""
    return on_mask(logprobs, action_mask.bool(), "logprobs").sum(-1)


def dpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    *,
    beta: float = 0.1,
    normalizer: float | Tensor | None = None,
) -> tuple[Tensor, Stats]:
    """DPO (Rafailov et al., arXiv 2305.18290) on `sequence_logprobs` of P pairs, each (P,).

    −log σ(β · [(log π − log π_ref)(chosen) − (log π − log π_ref)(rejected)]), mean over pairs or over ``normalizer``.
    """
    margin = beta * ((chosen - ref_chosen.detach()) - (rejected - ref_rejected.detach()))
    loss = -torch.nn.functional.logsigmoid(margin).sum() / (max(len(margin), 1) if normalizer is None else normalizer)
    pairs = torch.ones_like(margin, dtype=torch.bool)
    return loss, {
        "preference_accuracy": masked_mean((margin > 0).float(), pairs),
        "margin": masked_mean(margin, pairs),
        "tokens": pairs.sum(),
    }
