"""One learning step, in pure pieces: rollouts → experience → gradient → weights.

Every micro-batch divides by the normaliser of the whole mini-batch and every
process adds its share, so the gradient does not depend on how the rows were
split (trl#3021, verl#593).
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from agentr1_lite import losses
from agentr1_lite.advantages import estimate, find, inputs, reinforce_pp
from agentr1_lite.batch import Batch, collate, micro_batches
from agentr1_lite.checks import zero_variance_share
from agentr1_lite.config import TrainingConfig
from agentr1_lite.importance import importance_weights
from agentr1_lite.mdp import StopReason, Trajectory
from agentr1_lite.policy import LogProbs, QwenPolicy


@dataclass
class Experience:
    """A batch with everything the update needs, all (B, T).

    ``batch.action_mask`` is the actor's loss mask; ``returns`` and ``values`` count on ``estimated``. Where another
    engine sampled, ``batch.old_logprobs`` are its log-probs, ``old_logprobs`` the trainer's of the same weights.
    """

    batch: Batch
    advantages: Tensor
    returns: Tensor
    estimated: Tensor
    old_logprobs: Tensor
    ref_logprobs: Tensor | None = None
    values: Tensor | None = None
    importance: Tensor | None = None


@dataclass(frozen=True)
class Share:
    """Which part of the work this process does: micro-batches ``rank, rank + size, ...``.

    ``gather`` puts the lists of all processes together.
    """

    rank: int = 0
    size: int = 1
    gather: Callable[[list], list] = field(default=list, compare=False)


ALONE = Share()


def needs_critic(algorithm: str) -> bool:
    """Whether the estimator reads ``values``."""
    return "values" in inputs(algorithm)


def kl_place(config: TrainingConfig) -> str:
    """Where the KL term goes: "reward", "loss", or "" for nowhere."""
    if not config.kl_weight:
        return ""
    in_reward = needs_critic(config.algorithm) or find(config.algorithm) is reinforce_pp
    usual = "reward" if in_reward else "loss"
    return usual if config.kl_in == "auto" else config.kl_in


def response_mask(batch: Batch) -> Tensor:
    """Every token after the prompt, observations included: what a missing action mask would train on; (B, T)."""
    steps = torch.arange(batch.input_ids.shape[1], device=batch.input_ids.device)[None]
    return batch.attention_mask & (steps >= batch.prompt_lengths[:, None])


@torch.no_grad()
def in_micro_batches(function: Callable[[Batch], Tensor], batch: Batch, max_tokens: int) -> Tensor:
    """Run a (b, T) → (b, T) function over micro-batches and put the rows back in order; (B, T)."""
    out = torch.zeros(batch.input_ids.shape, device=batch.input_ids.device)
    for rows in micro_batches(batch, max_tokens):
        out[rows] = function(batch.select(rows))
    return out


def prepare(
    policy: QwenPolicy,
    trajectories: Sequence[Trajectory],
    config: TrainingConfig,
    *,
    kl_weight: float | None = None,
    kl_penalty: float = 0.0,
    baselines: Sequence[float] | None = None,
) -> Experience:
    """Turn rollouts into advantages.

    ``kl_penalty`` is charged per token inside the reward whatever the algorithm does with ``kl_weight``.
    ``baselines`` holds one greedy return per trajectory (ReMax). With
    ``config.advantage_mask`` off the estimator counts observation tokens as
    actions, with ``config.loss_mask`` off the loss does: [P1] Table 4. With the
    loss mask off alone an observation takes the advantage of the turn before it. What another engine than the kit's
    sampled (``config.engine``) is passed over once more, so that the first ratio is 1 whatever the engine rounds.
    """
    batch = collate(trajectories, pad_id=policy.tokenizer.pad_token_id or 0).to(policy.device)
    everything = response_mask(batch)
    wide = not (config.loss_mask and config.advantage_mask)
    scored = replace(batch, action_mask=everything) if wide else batch
    budget, temperature = config.micro_batch_tokens, config.temperature

    def log_probs(which: str) -> Tensor:
        return in_micro_batches(
            lambda part: policy.log_probs(part, temperature=temperature, which=which).logprobs, scored, budget
        )

    foreign, cap = config.engine != "local", config.importance_cap
    old = log_probs("actor") if wide or foreign else batch.old_logprobs
    if wide and not foreign:
        old = torch.where(batch.action_mask, batch.old_logprobs, old)
    weights = importance_weights(old, batch.old_logprobs, batch.action_mask, cap) if foreign and cap else None
    place = kl_place(config)
    reference = log_probs("reference") if place or kl_penalty else None
    mask = batch.action_mask if config.advantage_mask else everything
    rewards = batch.rewards
    if place == "reward":
        kl_penalty += config.kl_weight if kl_weight is None else kl_weight
    if kl_penalty:
        rewards = losses.kl_in_reward(rewards, old, reference, batch.action_mask, kl_penalty, "k1")
    values = in_micro_batches(policy.values, scored, budget) if needs_critic(config.algorithm) else None
    advantages, returns = estimate(
        config.algorithm,
        rewards,
        mask,
        values=values,
        group_ids=batch.group_ids,
        gamma=config.gamma,
        lam=config.lam,
        turn_ids=batch.turn_ids if config.advantage_mask else None,
        anchor_ids=batch.anchor_ids,
        trajectory_index=batch.trajectory_index,
        baseline=None if baselines is None else torch.tensor(baselines)[batch.trajectory_index.cpu()],
        n=config.n_step,
        step_weight=config.step_weight,
        whiten=config.whiten,
    )
    learned = batch if config.loss_mask else scored
    if not config.loss_mask:
        advantages = last_on_mask(advantages, mask)
    return Experience(learned, advantages, returns, mask, old, reference, values, weights)


def last_on_mask(x: Tensor, mask: Tensor) -> Tensor:
    """Each token gets the number of the last token on the mask up to it, 0 before the first; (B, T)."""
    steps = torch.arange(x.shape[1], device=x.device).expand_as(x)
    latest = torch.where(mask, steps, -1).cummax(-1).values
    return torch.where(latest >= 0, x.gather(-1, latest.clamp(min=0)), 0.0)


def mini_batches(experience: Experience, count: int, seed: int) -> list[Tensor]:
    """Rows of each optimiser step; whole trajectories, shuffled by ``seed`` where there are several steps."""
    trajectory = experience.batch.trajectory_index.cpu()
    if count == 1:
        return [torch.arange(len(trajectory))]
    order = trajectory.unique()  # a trajectory without tokens has no row
    order = order[torch.randperm(len(order), generator=torch.Generator().manual_seed(seed))]
    return [torch.isin(trajectory, part).nonzero()[:, 0] for part in order.chunk(count)]


def actor_gradient(
    policy: QwenPolicy,
    experience: Experience,
    rows: Tensor,
    config: TrainingConfig,
    *,
    kl_weight: float | None = None,
    max_length: int | None = None,
    share: Share = ALONE,
    scale: float = 1.0,
) -> dict[str, float]:
    """Add the policy loss's gradient over ``rows``, times ``scale``, to the actor's parameters; returns statistics.

    loss = policy loss + kl_weight · KL (where it belongs in the loss) − entropy_weight · H.
    """
    whole = experience.batch.select(rows)
    normalizer = losses.normalizer_for(whole.action_mask, config.aggregation, max_length)
    parts: list[losses.Stats] = []
    for local in micro_batches(whole, config.micro_batch_tokens)[share.rank :: share.size]:
        out = policy.log_probs(whole.select(local), **reading(config))
        weights = {"normalizer": normalizer, "max_length": max_length, "kl_weight": kl_weight}
        loss, stats = actor_loss(out, experience, rows[local], config, **weights)
        (loss * scale).backward()
        parts.append(stats)
    return merged(parts, share, "loss")


def reading(config: TrainingConfig) -> dict[str, Any]:
    """What the actor's loss asks of `QwenPolicy.log_probs`."""
    return {"temperature": config.temperature, "entropy": config.entropy_weight > 0}


def actor_loss(
    out: LogProbs,
    experience: Experience,
    rows: Tensor,
    config: TrainingConfig,
    *,
    normalizer: float | None = None,
    kl_weight: float | None = None,
    max_length: int | None = None,
) -> tuple[Tensor, losses.Stats]:
    """The loss that a step descends, of the given rows with log-probs and entropies ``out``; and its statistics."""
    mask, old = experience.batch.action_mask[rows], experience.old_logprobs[rows]
    common = {"aggregation": config.aggregation, "normalizer": normalizer, "max_length": max_length}
    loss, stats = losses.policy_loss(
        out.logprobs,
        old,
        experience.advantages[rows],
        mask,
        clip_low=config.clip_low,
        clip_high=config.clip_high,
        dual_clip=config.dual_clip,
        ratio=config.ratio,
        kind=config.loss,
        weights=None if experience.importance is None else experience.importance[rows],
        **common,
    )
    stats["loss"] = loss.detach()
    if kl_place(config) == "loss":
        reference, weight = experience.ref_logprobs[rows], config.kl_weight if kl_weight is None else kl_weight
        loss = loss + weight * losses.kl_loss(out.logprobs, reference, mask, config.kl_estimator, **common)
    if out.entropy is not None:
        loss = loss + config.entropy_weight * losses.entropy_loss(out.entropy, mask, **common)
        stats["entropy"] = losses.masked_mean(out.entropy, mask)
    stats["log_ratio_max"] = ((out.logprobs.detach() - old) * mask).abs().max()
    return loss, stats


def critic_gradient(
    policy: QwenPolicy,
    experience: Experience,
    rows: Tensor,
    config: TrainingConfig,
    *,
    share: Share = ALONE,
    scale: float = 1.0,
) -> dict[str, float]:
    """Add the clipped value loss's gradient over ``rows``, times ``scale``, to the critic's; returns statistics."""
    whole = replace(experience.batch, action_mask=experience.estimated).select(rows)
    normalizer = losses.normalizer_for(whole.action_mask)
    parts: list[losses.Stats] = []
    for local in micro_batches(whole, config.micro_batch_tokens)[share.rank :: share.size]:
        micro, at = whole.select(local), rows[local]
        loss, stats = losses.value_loss(
            policy.values(micro),
            experience.values[at],
            experience.returns[at],
            micro.action_mask,
            clip=config.value_clip,
            normalizer=normalizer,
        )
        (loss * scale).backward()
        parts.append({**stats, "value_loss": loss.detach()})
    at = whole.action_mask
    fit = explained_variance(experience.values[rows][at], experience.returns[rows][at])
    return {**merged(parts, share, "value_loss"), "explained_variance": fit}


def explained_variance(values: Tensor, returns: Tensor) -> float:
    """1 − Σ (G − V)² / Σ (G − mean G)² over the tokens (N,): 1 is a perfect critic, 0 no better than the mean.

    Of the values that the advantages came from; not a mean over tokens, so micro-batches cannot be averaged.
    """
    spread = float(((returns - returns.mean()) ** 2).sum())
    return 1 - float(((returns - values) ** 2).sum()) / spread if spread > 1e-9 else 0.0


def nll_gradient(
    policy: QwenPolicy,
    batch: Batch,
    weights: Tensor,
    max_tokens: int,
    *,
    share: Share = ALONE,
    scale: float = 1.0,
) -> dict[str, float]:
    """Add the gradient of −w · log π over M, w (B, T) or (B,); 1 is imitation, AWR weights are offline RL."""
    normalizer = losses.normalizer_for(batch.action_mask)
    parts: list[losses.Stats] = []
    for rows in micro_batches(batch, max_tokens)[share.rank :: share.size]:
        micro = batch.select(rows)
        logprobs = policy.log_probs(micro).logprobs
        loss = losses.weighted_nll(logprobs, weights[rows], micro.action_mask, normalizer=normalizer)
        (loss * scale).backward()
        nll, tokens = losses.masked_mean(-logprobs, micro.action_mask), micro.action_mask.sum()
        parts.append({"loss": loss.detach(), "nll": nll, "tokens": tokens})
    return merged(parts, share, "loss")


def merged(parts: Sequence[losses.Stats], share: Share, total: str) -> dict[str, float]:
    """Statistics of every process's micro-batches as those of the batch; the one called ``total`` is a sum."""
    everyone = share.gather([{name: float(value) for name, value in part.items()} for part in parts])
    return {**losses.merge_stats(everyone), total: sum(part[total] for part in everyone)}


def apply_gradient(
    parameters: Sequence[Tensor],
    optimizer: torch.optim.Optimizer,
    grad_clip: float,
    reduce: Callable[[Tensor], Tensor] | None = None,
    scale: float = 1.0,
) -> float:
    """Sum the gradient over processes, take ``scale`` off, clip its norm, step, clear; returns the unclipped norm.

    A gradient that is not finite is dropped: the weights stay as they were and the norm says so.
    """
    if reduce is not None:  # a process without a micro-batch takes part in every sum
        for p in parameters:
            p.grad = reduce(torch.zeros_like(p) if p.grad is None else p.grad)
    held = [p for p in parameters if p.grad is not None]
    if scale != 1.0:
        for p in held:
            p.grad /= scale
    norm = float(torch.nn.utils.clip_grad_norm_(held, grad_clip if grad_clip > 0 else math.inf))
    if math.isfinite(norm):
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm


def group_baselines(rewards: Sequence[float], groups: Sequence[str]) -> list[float]:
    """A baseline per logged trajectory: its question's mean reward, or the mean of all where a question has one log."""
    everyone = sum(rewards) / max(len(rewards), 1)
    by_group: dict[str, list[float]] = {}
    for reward, group in zip(rewards, groups, strict=True):
        by_group.setdefault(group, []).append(reward)
    return [sum(by_group[g]) / len(by_group[g]) if len(by_group[g]) > 1 else everyone for g in groups]


def learning_rate(step: int, base: float, warmup: int) -> float:
    """Linear warm-up, then constant."""
    return base * min(1.0, (step + 1) / (warmup + 1))


def decay(step: int, steps: int) -> float:
    """Linear to a tenth: logs are seen a few times only."""
    return max(0.1, 1.0 - step / max(steps, 1))


def step_rows(total: int, size: int, step: int, seed: int, whole: bool = False) -> list[int]:
    """Which of ``total`` rows step ``step`` takes, ``size`` at a time: a fresh permutation every epoch.

    ``whole``: the remainder of an epoch is left out instead of making a small step.
    """
    epoch, place = divmod(step, total // size if whole else math.ceil(total / size))
    return epoch_rows(total, epoch, seed)[place * size : (place + 1) * size]


def epoch_rows(total: int, epoch: int, seed: int) -> list[int]:
    """The order of ``total`` rows in an epoch."""
    return torch.randperm(total, generator=torch.Generator().manual_seed(phase_seed(seed, epoch))).tolist()


def phase_seed(seed: int, *parts: Any) -> int:
    """A seed below 2³¹ from a run's seed and where in the run it is used; equal on every machine."""
    return zlib.crc32(re.sub(r"\s", "", repr((seed, *parts))).encode()) & 0x7FFFFFFF


def episode_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Means over episodes, for curves: reward and its parts, turns, tokens, shares of the stop reasons."""
    count = len(trajectories)

    def mean(numbers: Iterable[float]) -> float:
        return sum(numbers) / count

    metrics = {
        "reward": mean(t.total_reward for t in trajectories),
        "turns": mean(len(t.turns) for t in trajectories),
        "action_tokens": mean(t.num_actions for t in trajectories),
        "tokens": mean(t.num_tokens for t in trajectories),
        "tool_calls": mean(len(turn.calls) for t in trajectories for turn in t.turns),
        "frac_reward_zero_std": zero_variance_share(trajectories),
    }
    for part in sorted({name for t in trajectories for name in t.reward_parts}):
        metrics[f"reward/{part}"] = mean(t.reward_parts.get(part, 0.0) for t in trajectories)
    for reason in StopReason:
        if share := mean(t.stop_reason is reason for t in trajectories):
            metrics[f"stop/{reason.value}"] = share
    segments = [s for t in trajectories for s in t.segments]
    sampled = [x for s in segments for x, acted in zip(s.logprobs, s.action_mask, strict=True) if acted]
    metrics["entropy_estimate"] = -sum(sampled) / max(len(sampled), 1)
    return metrics
