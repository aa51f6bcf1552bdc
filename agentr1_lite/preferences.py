"""Offline RL by preferences: pairs of logged episodes and the gradient of DPO on them.

The step is the kit's own. TRL's ``DPOTrainer`` can be led to the same loss (`agentr1_lite.bridges.trl.run_dpo`, which
the tests compare with), but it encodes text where the kit has ids, knows one sequence an episode, and brings an
optimiser loop of its own, in which the trainer's checkpoints, seeds and callbacks have no place.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from agentr1_lite.batch import Batch, collate
from agentr1_lite.losses import Stats, dpo_loss, sequence_logprobs
from agentr1_lite.mdp import Trajectory
from agentr1_lite.policy import QwenPolicy
from agentr1_lite.update import ALONE, Share, merged


class PreferencePair(NamedTuple):
    """Two episodes of one task from one prompt; ``chosen`` earned more."""

    chosen: Trajectory
    rejected: Trajectory

    @property
    def margin(self) -> float:
        return self.chosen.total_reward - self.rejected.total_reward

    @property
    def num_tokens(self) -> int:
        """Padded tokens of the pair's rows."""
        segments = [segment for trajectory in self for segment in trajectory.segments]
        return len(segments) * max(map(len, segments))


def dpo_pairs(trajectories: Iterable[Trajectory], *, min_margin: float = 0.0) -> list[PreferencePair]:
    """Pairs of one task and one prompt whose total rewards lie further apart than ``min_margin``.

    Best meets worst, second best second worst, and so on: an episode stands in at most one pair, so that a task with
    many logs weighs no more per episode than one with few. Episodes without a sampled token are left out.
    """
    groups: dict[tuple[str, tuple[int, ...]], list[Trajectory]] = defaultdict(list)
    for trajectory in trajectories:
        if trajectory.num_actions:
            first = trajectory.segments[0]
            groups[trajectory.task_id, tuple(first.token_ids[: first.prompt_length])].append(trajectory)
    pairs = []
    for group in groups.values():
        ranked = sorted(group, key=lambda t: -t.total_reward)
        both_ends = zip(ranked[: len(ranked) // 2], reversed(ranked), strict=False)
        pairs += [pair for pair in map(PreferencePair._make, both_ends) if pair.margin > min_margin]
    return pairs


def split_pairs(pairs: Sequence[PreferencePair], max_tokens: int) -> list[list[PreferencePair]]:
    """Parts of at most ``max_tokens`` padded tokens (one pair at least); the loss of a pair needs both its sides."""
    parts: list[list[PreferencePair]] = []
    widest = 0
    for pair in sorted(pairs, key=lambda p: -p.num_tokens):
        if not parts or (len(parts[-1]) + 1) * widest > max_tokens:
            parts.append([])
            widest = pair.num_tokens
        parts[-1].append(pair)
    return parts


def episode_logprobs(policy: QwenPolicy, batch: Batch, which: str = "actor") -> Tensor:
    """``log π(y) = Σ_t M_t log π(a_t | s_t)`` of every episode in ``batch``, over all its segments: (episodes,)."""
    rows = sequence_logprobs(policy.log_probs(batch, which=which).logprobs, batch.action_mask)
    return rows.new_zeros(int(batch.trajectory_index.max()) + 1).index_add(0, batch.trajectory_index, rows)


def dpo_step(
    policy: QwenPolicy,
    pairs: Sequence[PreferencePair],
    *,
    beta: float = 0.1,
    max_tokens: int = 16384,
    share: Share = ALONE,
    scale: float = 1.0,
) -> dict[str, float]:
    """Add the gradient of DPO's mean loss over ``pairs`` to the actor's parameters; returns statistics.

    ``L = −log σ(β [(log π(y⁺) − log π_ref(y⁺)) − (log π(y⁻) − log π_ref(y⁻))])`` (arXiv 2305.18290, eq. 7) with
    ``log π(y)`` over the tokens the policy chose: tool replies and template tokens count on neither side. The
    reference is the policy's frozen one.
    """
    parts: list[Stats] = []
    for part in split_pairs(pairs, max_tokens)[share.rank :: share.size]:
        episodes = [pair.chosen for pair in part] + [pair.rejected for pair in part]
        batch = collate(episodes, pad_id=policy.tokenizer.pad_token_id or 0).to(policy.device)
        with torch.no_grad():
            ref_chosen, ref_rejected = episode_logprobs(policy, batch, "reference").chunk(2)
        chosen, rejected = episode_logprobs(policy, batch).chunk(2)
        loss, stats = dpo_loss(chosen, rejected, ref_chosen, ref_rejected, beta=beta, normalizer=len(pairs))
        (loss * scale).backward()
        parts.append({**stats, "loss": loss.detach()})
    return merged(parts, share, "loss")
