"""Trajectories as tensors: one row per segment, right-padded; (B, T) throughout.

Every mask is built from lengths and from the record of who wrote a token, never
from token ids: pad == eos must not hide a true end of turn (trl#6357).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import torch
from torch import LongTensor, Tensor

from agentr1_lite.forward import forwarded_tokens, numbered_rows
from agentr1_lite.mdp import Trajectory


@dataclass
class Batch:
    """What the update sees of B rows.

    Attributes:
        input_ids: (B, T) long, right-padded.
        attention_mask: (B, T) bool, True on real tokens; from lengths.
        action_mask: (B, T) bool, True where the policy sampled the token.
        old_logprobs: (B, T) of the sampling policy; 0 off the action mask.
        rewards: (B, T), each on an action token.
        group_ids: (B,) equal for rollouts of one question.
        prompt_lengths: (B,) tokens before the first sampled one.
        lengths: (B,) real tokens.
        turn_ids: (B, T) index of the turn that a token was sampled in, −1 off turns.
        anchor_ids: (B, T) equal for turns of one group that started from the same observation, −1 off turns.
        trajectory_index: (B,) which trajectory the row belongs to.
    """

    input_ids: Tensor
    attention_mask: Tensor
    action_mask: Tensor
    old_logprobs: Tensor
    rewards: Tensor
    group_ids: Tensor
    prompt_lengths: Tensor
    lengths: Tensor
    turn_ids: Tensor
    anchor_ids: Tensor
    trajectory_index: Tensor

    def __len__(self) -> int:
        return len(self.input_ids)

    def _map(self, change: Callable[[Tensor], Tensor]) -> Batch:
        return Batch(**{f.name: change(getattr(self, f.name)) for f in fields(self)})

    def select(self, rows: LongTensor | Sequence[int]) -> Batch:
        """The given rows, still T tokens wide: tensors made for the whole batch are indexed the same way."""
        index = torch.as_tensor(rows, dtype=torch.long, device=self.input_ids.device)
        return self._map(lambda tensor: tensor[index])

    def to(self, device: torch.device | str) -> Batch:
        return self._map(lambda tensor: tensor.to(device))


def collate(trajectories: Sequence[Trajectory], pad_id: int = 0) -> Batch:
    """One row per segment with tokens, in order; raises ValueError where a trajectory is inconsistent."""
    for trajectory in trajectories:
        trajectory.check()
    places = [(i, j) for i, t in enumerate(trajectories) for j, s in enumerate(t.segments) if len(s)]
    if not places:
        raise ValueError("no trajectory holds a token; a batch needs at least one row")
    lengths = [len(trajectories[i].segments[j]) for i, j in places]
    shape = (len(places), max(lengths))
    ids, turn_ids, anchor_ids = (torch.full(shape, fill, dtype=torch.long) for fill in (pad_id, -1, -1))
    mask, old, rewards = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape), torch.zeros(shape)
    groups: dict[str, int] = {}
    anchors: dict[tuple[str, str], int] = {}
    earned = [trajectory.token_rewards() for trajectory in trajectories]
    for row, ((i, j), length) in enumerate(zip(places, lengths, strict=True)):
        trajectory, segment = trajectories[i], trajectories[i].segments[j]
        ids[row, :length] = torch.tensor(segment.token_ids)
        mask[row, :length] = torch.tensor(segment.action_mask)
        old[row, :length] = torch.tensor(segment.logprobs)
        rewards[row, :length] = torch.tensor(earned[i][j])
        _check_row(f"trajectory of task {trajectory.task_id!r}: segment {j}", mask[row], old[row], rewards[row])
        groups.setdefault(trajectory.group_id, len(groups))
        for index, turn in enumerate(trajectory.turns):
            if turn.segment == j:
                turn_ids[row, turn.start : turn.end] = index
                key = (trajectory.group_id, turn.anchor)
                anchor_ids[row, turn.start : turn.end] = anchors.setdefault(key, len(anchors))
    steps = torch.arange(shape[1])[None]
    sizes = torch.tensor(lengths)
    return Batch(
        input_ids=ids,
        attention_mask=steps < sizes[:, None],
        action_mask=mask,
        old_logprobs=old,
        rewards=rewards,
        group_ids=torch.tensor([groups[trajectories[i].group_id] for i, _ in places]),
        prompt_lengths=torch.tensor([trajectories[i].segments[j].prompt_length for i, j in places]),
        lengths=sizes,
        turn_ids=turn_ids,
        anchor_ids=anchor_ids,
        trajectory_index=torch.tensor([i for i, _ in places]),
    )


def _check_row(where: str, mask: Tensor, old: Tensor, rewards: Tensor) -> None:
    """What may be looked at and not trained on: a sampled token that follows none, numbers that are not finite."""
    if mask[0]:
        raise ValueError(f"{where} token 0 is marked as sampled; nothing stands before it to sample it from")
    for name, values in (("log-prob", old), ("reward", rewards)):
        for token in (~values.isfinite()).nonzero()[:1, 0].tolist():
            raise ValueError(f"{where} token {token} has the {name} {values[token].item()}; leave the episode out")


def micro_batches(batch: Batch, max_tokens: int, *, share_prompt: bool = True) -> list[LongTensor]:
    """Split rows so that a micro-batch holds at most ``max_tokens`` padded tokens (one row at least).

    Two orders are tried, rows by length and groups by length, and the one that
    forwards fewer tokens is taken: long prompts of their own favour whole
    groups, a common system prompt favours equal lengths. Equal rows stay
    together and count once, as they are passed once.
    """
    number = numbered_rows(batch.input_ids).cpu() if share_prompt else torch.arange(len(batch))
    lengths, groups = batch.lengths.cpu(), batch.group_ids.cpu()
    by_length = torch.argsort(lengths * (len(number) + 1) + number, descending=True, stable=True)
    longest = torch.zeros(int(groups.max()) + 1, dtype=torch.long).scatter_reduce(0, groups, lengths, "amax")
    group_key = longest[groups] * (len(longest) + 1) + groups
    by_group = by_length[torch.argsort(group_key[by_length], descending=True, stable=True)]
    plans = [
        _cut(lengths, number, order, max_tokens) for order in ((by_length, by_group) if share_prompt else (by_length,))
    ]
    return min(
        plans,
        key=lambda plan: sum(
            forwarded_tokens(batch.input_ids[rows], batch.lengths[rows], share=share_prompt) for rows in plan
        ),
    )


def _cut(lengths: Tensor, number: Tensor, order: Tensor, max_tokens: int) -> list[LongTensor]:
    parts: list[list[int]] = []
    widest, rows, former = 0, 0, -1
    for row, length, content in zip(order.tolist(), lengths[order].tolist(), number[order].tolist(), strict=True):
        widest, rows = max(widest, length), rows + (content != former)
        if not parts or rows * widest > max_tokens and content != former:
            parts.append([])
            widest, rows = length, 1
        parts[-1].append(row)
        former = content
    return [torch.tensor(part) for part in parts]
