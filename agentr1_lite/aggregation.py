"""From a matrix of token losses to one number, over action tokens only.

Every aggregation is a sum over tokens divided by one number. Pass that number
of the whole batch as ``normalizer`` (see `normalizer_for`), add up the losses
of the micro-batches, and the gradient is that of the whole batch whatever the
split (trl#3021, verl#593). Where processes average their gradients, multiply
the loss by the number of processes, with ``normalizer`` summed over all of them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def on_mask(x: Tensor, mask: Tensor, name: str) -> Tensor:
    """``x`` (B, T), (B, 1) or (B,) as (B, T): at least float32, 0 off the mask in value and in gradient."""
    x = x.unsqueeze(-1) if x.dim() == 1 else x
    if x.dim() != 2 or x.shape[0] != mask.shape[0] or x.shape[1] not in (1, mask.shape[1]):
        raise ValueError(f"{name} has shape {tuple(x.shape)}; beside this action_mask it needs {tuple(mask.shape)}")
    return torch.where(mask, x.to(torch.promote_types(x.dtype, torch.float32)), 0.0)


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean over M for reporting: no gradient, 0 where M is empty."""
    return torch.where(mask, x.detach(), 0.0).sum() / mask.sum().clamp(min=1)


DENOMINATORS: dict[str, Callable[[Tensor, int], float]] = {
    "token-mean": lambda mask, length: mask.sum().item(),
    "token-sum": lambda mask, length: 1.0,
    "seq-mean-token-mean": lambda mask, length: mask.any(-1).sum().item(),
    "seq-mean-token-sum": lambda mask, length: mask.any(-1).sum().item(),
    "seq-mean-token-sum-norm": lambda mask, length: mask.any(-1).sum().item() * length,
    "constant": lambda mask, length: mask.shape[0] * length,
}
AGGREGATIONS = tuple(DENOMINATORS)


def normalizer_for(action_mask: Tensor, aggregation: str = "token-mean", max_length: int | None = None) -> float:
    """The denominator of ``aggregation`` for the rows of ``action_mask`` (B, T).

    | aggregation             | sum over             | divided by                                  |
    |-------------------------|----------------------|---------------------------------------------|
    | token-mean              | tokens of M          | tokens of M                                 |
    | token-sum               | tokens of M          | 1                                           |
    | seq-mean-token-mean     | each row's mean on M | rows with an action token                   |
    | seq-mean-token-sum      | tokens of M          | rows with an action token                   |
    | seq-mean-token-sum-norm | tokens of M          | rows with an action token × ``max_length``  |
    | constant (Dr. GRPO)     | tokens of M          | all rows × ``max_length``                   |

    ``max_length`` is the longest response a run allows; without it T, which depends on the padding.
    """
    if aggregation not in DENOMINATORS:
        raise ValueError(f"no aggregation is called {aggregation!r}; choose one of {', '.join(DENOMINATORS)}")
    return float(DENOMINATORS[aggregation](action_mask.bool(), max_length or action_mask.shape[-1]))


def aggregate(
    loss_matrix: Tensor,
    mask: Tensor,
    mode: str = "token-mean",
    normalizer: float | Tensor | None = None,
    max_length: int | None = None,
) -> Tensor:
    """Masked (B, T) → scalar, as `normalizer_for` describes; 0 (verl: NaN) where no token is left."""
    if normalizer is None or mode not in DENOMINATORS:
        normalizer = normalizer_for(mask, mode, max_length)
    mask = mask.bool()
    loss_matrix = on_mask(loss_matrix, mask, "loss_matrix")
    if mode == "seq-mean-token-mean":
        loss_matrix = loss_matrix / mask.sum(-1, keepdim=True).clamp(min=1)
    return loss_matrix.sum() / (normalizer if normalizer > 0 else 1.0)
