"""What the estimators share: sums over time, group statistics, and rows without observations.

K rollouts, N action tokens; B rows of T tokens as they lie in a batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

_ROUNDING = 1e-6  # relative; a sum of float32 rewards carries an error below this


def discounted_sum(x: Tensor, factor: float) -> Tensor:
    """``y_t = x_t + factor · y_{t+1}`` along the last axis: reward-to-go, and GAE's sum of δ."""
    running, out = torch.zeros_like(x[..., 0]) if x.shape[-1] else x, []
    for column in reversed(x.unbind(-1)):
        running = column + factor * running
        out.append(running)
    return torch.stack(out[::-1], dim=-1) if out else x


def whitened(x: Tensor, mask: Tensor, on: bool = True) -> Tensor:
    """``(x − mean_M) / sqrt(var_M + 1e-8)`` over the whole batch's action tokens, unbiased variance; 0 off M.

    Equal numbers give exactly 0: rounding of the mean must not be blown up to an advantage. ``on`` False returns x.
    """
    if not on:
        return x
    picked = x[mask]
    if picked.numel() < 2 or picked.max() - picked.min() <= _ROUNDING * picked.abs().max():
        return torch.zeros_like(x)
    return torch.where(mask, (x - picked.mean()) * torch.rsqrt(picked.var() + 1e-8), 0.0)


class GroupScores(NamedTuple):
    """Per rollout (K,): its return, its distance from the group's mean, the group's std (unbiased) and size."""

    scores: Tensor
    centred: Tensor
    std: Tensor
    count: Tensor
    equal: Tensor


def group_scores(scores: Tensor, used: Tensor, groups: Tensor, scale: Tensor | None = None) -> GroupScores:
    """Compare each score (K,) with its group; ``used`` False leaves a row out (it gets 0).

    A group whose max equals its min, up to the rounding of sums of size ``scale``, is centred to exactly 0.
    Deciding by the std instead gives ``[1.3] * 8`` an advantage of 0.106 (trl#5640); a group of one is such a group.
    """
    _, groups = torch.unique(groups, return_inverse=True)
    scale = scores.abs() if scale is None else scale
    zeros = scores.new_zeros(int(groups.max()) + 1)

    def per_group(x: Tensor, reduce: str = "sum") -> Tensor:
        return zeros.scatter_reduce(0, groups[used], x[used], reduce, include_self=reduce == "sum")[groups]

    count = per_group(used.to(scores.dtype))
    distance = scores - per_group(scores) / count.clamp(min=1)
    std = (per_group(distance**2) / (count - 1).clamp(min=1)).sqrt()
    spread = per_group(scores, "amax") - per_group(scores, "amin")
    equal = spread <= _ROUNDING * per_group(scale, "amax")
    centred = torch.where(used & ~equal, distance, 0.0)
    return GroupScores(scores, centred, std, count, equal)


def zero_variance_share(scores: Any, group_ids: Any, scale: Any = None) -> float:
    """Share of groups whose rollouts all earned the same, groups of one included: these teach GRPO nothing.

    What is the same is what `group_scores` gives no advantage: 0.1 + 0.2 and 0.3 are. ``scores`` (K,) one return a
    rollout, ``group_ids`` (K,) as in `agentr1_lite.advantages.estimate`, ``scale`` (K,) as in `group_scores`.
    """
    if not len(scores):
        return 0.0
    scores, scale = (x if x is None else torch.as_tensor(x).detach().cpu().double() for x in (scores, scale))
    groups = number_ids(group_ids)
    equal = scores.new_zeros(int(groups.max()) + 1)  # one number a group
    equal[groups] = group_scores(scores, torch.ones_like(groups, dtype=torch.bool), groups, scale).equal.double()
    return float(equal.mean())


@dataclass(frozen=True)
class Dense:
    """Where each action token goes: row ``k`` of K rollouts, place ``n`` of N. Several rows may make one rollout."""

    mask: Tensor  # (B, T)
    row: Tensor  # (B,) rollout of each batch row
    k: Tensor  # (#actions,)
    n: Tensor  # (#actions,)

    @classmethod
    def of(cls, mask: Tensor, trajectory_index: Tensor | None = None) -> Dense:
        row = torch.arange(len(mask)) if trajectory_index is None else number_ids(trajectory_index)
        row = checked("trajectory_index", row, mask.shape[:1], None, torch.long)
        earlier = (row.unsqueeze(0) == row.unsqueeze(1)).tril(-1).long() @ mask.sum(-1)
        place = earlier.unsqueeze(-1) + mask.cumsum(-1) - 1
        return cls(mask, row, row.unsqueeze(-1).expand_as(mask)[mask], place[mask])

    def pack(self, x: Tensor) -> Tensor:
        """(B, T) → (K, N); whatever stood off the mask is gone."""
        out = x.new_zeros(int(self.row.max()) + 1, int(self.n.max()) + 1)
        out[self.k, self.n] = x[self.mask]
        return out

    def unpack(self, x: Tensor) -> Tensor:
        """(K, N) → (B, T); 0 off the mask."""
        out = x.new_zeros(self.mask.shape)
        out[self.mask] = x[self.k, self.n]
        return out

    def per_rollout(self, x: Tensor) -> Tensor:
        """(B,) → (K,); rows of one rollout carry the same number."""
        return x.new_zeros(int(self.row.max()) + 1).scatter(0, self.row, x)


def number_ids(x: Any) -> Tensor:
    """Number ids 0, 1, …; a tensor or any sequence of strings or numbers."""
    if isinstance(x, Tensor):
        return torch.unique(x.detach().cpu(), return_inverse=True)[1]
    seen: dict[Any, int] = {}
    return torch.tensor([seen.setdefault(i, len(seen)) for i in x], dtype=torch.long)


def move_rewards_to_actions(rewards: Tensor, action_mask: Tensor) -> Tensor:
    """Put every reward on a token the policy chose; (B, T).

    A reward on a masked token goes to the last action token before it, or to the first one behind it where there is
    none: a trajectory that ends on a tool reply would lose its outcome otherwise (miles#1827). NaN and infinity on
    masked tokens are dropped; so is everything in a row without an action.
    """
    mask = action_mask.bool()
    rewards = torch.where(mask | rewards.isfinite(), rewards, 0.0)
    place = torch.where(mask, torch.arange(mask.shape[-1], device=mask.device), -1).cummax(-1).values
    place = torch.where(place < 0, mask.long().argmax(-1, keepdim=True), place)
    return torch.where(mask, torch.zeros_like(rewards).scatter_add(-1, place, rewards), 0.0)


def normalise_process_rewards(rewards: Tensor, action_mask: Tensor) -> Tensor:
    """PRIME's scaling (Cui et al., arXiv 2502.01456): r / max over the batch of |Σ_{j≥t} r_j|; (B, T), 0 off M."""
    rewards = move_rewards_to_actions(rewards, action_mask)
    largest = rewards.flip(-1).cumsum(-1).abs().amax() if rewards.numel() else 0.0
    return rewards / largest if largest > 0 else rewards


def checked(name: str, x: Any, shape: torch.Size, mask: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Check the shape and, on action tokens, the numbers; float64 on the CPU, where many small steps are fast."""
    x = torch.as_tensor(x).detach().cpu().to(dtype)  # in two steps: Apple's GPU has no float64
    if x.shape != shape:
        raise ValueError(f"estimate: {name} has shape {tuple(x.shape)}; beside these rewards it needs {tuple(shape)}")
    if mask is not None and not x[mask].isfinite().all():
        b, t = (mask & ~x.isfinite()).nonzero()[0].tolist()
        raise ValueError(
            f"estimate: {name} is {x[b, t]} on the action token at row {b}, token {t}; find where it arose"
        )
    return x


def dense_inputs(mask: Tensor, dense: Dense, given: dict[str, Any]) -> dict[str, Any]:
    """The tensors among ``given``, checked and dense; ``turn_ids`` are made from the mask where there are none."""
    turn_ids = given.get("turn_ids")
    if turn_ids is None:  # a turn is then a run of action tokens between observations
        starts = mask & ~torch.nn.functional.pad(mask, (1, 0))[:, :-1]
        turn_ids = starts.cumsum(-1) + torch.arange(len(mask)).unsqueeze(-1) * (mask.shape[1] + 1)
    out = {"turn_ids": dense.pack(checked("turn_ids", turn_ids, mask.shape, None, torch.long))}
    if given.get("values") is not None:
        out["values"] = dense.pack(checked("values", given["values"], mask.shape, mask, torch.float64))
    if given.get("anchor_ids") is not None:
        out["anchor_ids"] = dense.pack(checked("anchor_ids", given["anchor_ids"], mask.shape, None, torch.long))
    if given.get("baseline") is not None:
        out["baseline"] = dense.per_rollout(checked("baseline", given["baseline"], mask.shape[:1], None, torch.float64))
    if given.get("group_ids") is not None:
        ids = checked("group_ids", number_ids(given["group_ids"]), mask.shape[:1], None, torch.long)
        out["group_ids"] = dense.per_rollout(ids)
    return out
