"""Another engine samples, the trainer learns: same weights, other kernels, so not quite the same distribution.

An engine such as vLLM gives a token the probability π_engine, the trainer π. On the engine's tokens the policy
gradient is then one of another policy, and the error is not noise that averages out. Truncated importance sampling
weighs each token's loss by min(π / π_engine, cap): without the cap the expectation is the right one again, and the
cap keeps a rare token from ruling the step (Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy
RL Training", 2025; `rollout_is` in verl, `vllm_importance_sampling_correction` in TRL).

The ratio of PPO is something else: how far an update has moved π since the rollouts, which is 1 at the first pass.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from agentr1_lite.batch import Batch
from agentr1_lite.config import TrainingConfig


def importance_weights(logprobs: Tensor, engine_logprobs: Tensor, action_mask: Tensor, cap: float) -> Tensor:
    """w = min(exp(log π − log π_engine), cap) on M, 1 off it; (B, T), no gradient."""
    log_weight = (logprobs.detach() - engine_logprobs).clamp(max=math.log(cap))
    return torch.where(action_mask.bool(), log_weight.exp(), 1.0)


def engine_metrics(logprobs: Tensor, batch: Batch, config: TrainingConfig) -> dict[str, float]:
    """The trainer's ``logprobs`` (B, T) against the engine's in ``batch``: mean and largest |difference|, share capped.

    Nothing where the kit's own engine samples.
    """
    if config.engine == "local":
        return {}
    difference, cap = (logprobs - batch.old_logprobs)[batch.turn_ids >= 0], config.importance_cap
    return {
        "engine_difference_mean": float(difference.abs().mean()),
        "engine_difference_max": float(difference.abs().max()),
        "importance_capped": float((difference > math.log(cap)).float().mean()) if cap else 0.0,
    }
