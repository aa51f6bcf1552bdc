"""Forward passes of the update: hidden states where actions were chosen, and what is read off them.

Rows are right-padded, so position t of a row is slot t and a causal mask alone
keeps padding out of every real token's sight: a mask built from token ids would
lose a true end of turn where pad == eos (trl#6357).
"""

from __future__ import annotations

import functools
import inspect
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache

CHUNK_ELEMENTS = 2**23  # logits held at once, float32: 32 MiB
KEEP_ELEMENTS = 2**26  # above this many logits the backward pass recomputes them


class Rows(Protocol):
    """What the passes read from a batch."""

    input_ids: Tensor  # (B, T)
    action_mask: Tensor  # (B, T)
    prompt_lengths: Tensor  # (B,)
    lengths: Tensor  # (B,)


class SomeRows(NamedTuple):
    """A selection of rows; see `Rows`."""

    input_ids: Tensor
    action_mask: Tensor
    prompt_lengths: Tensor
    lengths: Tensor


def row_numbers(rows: Rows) -> Tensor:
    """(B,) equal for rows of equal tokens and masks: rollouts of one question often say the same."""
    return torch.unique(rows.input_ids * 2 + rows.action_mask, dim=0, return_inverse=True)[1]


def distinct_rows(rows: Rows) -> tuple[Rows, Tensor | None]:
    """Each row once, and where to find every row among them; ``(rows, None)`` where all differ.

    Log-probs of a repeated row are read from the one pass, so its gradients add up there: exact, not an estimate.
    """
    number = row_numbers(rows)
    count, size = int(number.max()) + 1, len(number)
    if count == size:
        return rows, None
    places = torch.arange(size - 1, -1, -1, device=number.device)
    first = torch.zeros(count, dtype=torch.long, device=number.device).scatter_(0, number.flip(0), places)
    return SomeRows(*(getattr(rows, field)[first] for field in SomeRows._fields)), number


class PrefixPlan(NamedTuple):
    """How the prompts of some rows are shared.

    All rows agree on the first ``common`` tokens; the first ``shared`` tokens of
    row b are those of row ``first[owner[b]]``.
    """

    common: int
    shared: int
    first: Tensor  # (P,)
    owner: Tensor  # (B,)

    def cost(self, rows: int, width: int) -> int:
        """Tokens forwarded for ``rows`` rows of ``width`` tokens."""
        return self.common + len(self.first) * (self.shared - self.common) + rows * (width - self.shared)


def plan_prefixes(input_ids: Tensor, prompt_lengths: Tensor) -> PrefixPlan:
    """Find the prompts that rows have in common.

    Only tokens that every row's prompt still has are shared, and a prompt's last
    token is left to its row (it predicts the first action): no padding ever
    stands between prompt and response, and one causal mask serves all rows.
    """
    shared = max(int(prompt_lengths.min()) - 1, 0)
    heads = input_ids[:, :shared]  # (B, shared)
    differs = (heads != heads[:1]).any(dim=0).nonzero()
    common = int(differs[0]) if len(differs) else shared
    _, owner = torch.unique(heads, dim=0, return_inverse=True) if shared else (None, torch.zeros_like(prompt_lengths))
    count = int(owner.max()) + 1
    order = torch.arange(len(owner) - 1, -1, -1, device=owner.device)
    first = torch.zeros(count, dtype=torch.long, device=owner.device).scatter_(0, owner.flip(0), order)
    return PrefixPlan(common, shared, first, owner)


@functools.lru_cache(maxsize=8)
def _cache_argument(kind: type[nn.Module]) -> str:
    # transformers 5.2x renamed the argument; both names are in use among supported versions
    return "cache" if "cache" in inspect.signature(kind.forward).parameters else "past_key_values"


def run_backbone(
    backbone: nn.Module, ids: Tensor, *, positions: Tensor, mask: Tensor | None, cache: object | None, **options: object
) -> Tensor:
    """Hidden states (B, T, H) of ``ids`` (B, T) at ``positions``; ``mask`` is additive, (·, 1, T, keys)."""
    cached = {} if cache is None else {_cache_argument(type(backbone)): cache}
    return backbone(
        input_ids=ids, position_ids=positions, attention_mask=mask, use_cache=cache is not None, **cached, **options
    ).last_hidden_state


def causal_mask(queries: int, keys: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Additive mask (1, 1, queries, keys) where the last query sees the last key."""
    closed = torch.full((queries, keys), torch.finfo(dtype).min, dtype=dtype, device=device)
    return closed.triu_(keys - queries + 1)[None, None]


def _expand(cache: DynamicCache, owner: Tensor) -> None:
    """Give every row its prompt's keys and values; gradients flow back through the expansion."""
    for layer in cache.layers:
        if layer.keys.shape[0] == 1:
            shape = (len(owner), *layer.keys.shape[1:])
            layer.keys, layer.values = layer.keys.expand(shape), layer.values.expand(shape)
        else:
            layer.keys, layer.values = layer.keys.index_select(0, owner), layer.values.index_select(0, owner)


def hidden_states(backbone: nn.Module, rows: Rows, *, share_prompt: bool = True) -> tuple[Tensor, int]:
    """Hidden states (B, T − offset, H) of positions ``offset .. T − 1`` and the offset.

    With ``share_prompt`` every distinct prompt is forwarded once, as a tree of
    two levels (the tokens all rows have in common, then each prompt's own), and
    its keys and values are expanded to the rows: exact to rounding.
    """
    width = int(rows.lengths.max())
    ids = rows.input_ids[:, :width]
    count, device = len(ids), ids.device
    everywhere = torch.arange(width, device=device)[None]
    plan = plan_prefixes(ids, rows.prompt_lengths) if share_prompt else None
    if plan is None or plan.cost(count, width) > 0.85 * count * width:
        return run_backbone(backbone, ids, positions=everywhere.expand(count, -1), mask=None, cache=None), 0
    dtype, cache = next(backbone.parameters()).dtype, DynamicCache()
    stages = [
        (ids[:1], 0, plan.common, torch.zeros_like(plan.first)),
        (ids[plan.first], plan.common, plan.shared, plan.owner),
        (ids, plan.shared, width, None),
    ]
    hidden = ids
    for tokens, start, end, owner in stages:
        if end > start:
            mask = causal_mask(end - start, end, dtype, device) if start else None
            positions = everywhere[:, start:end].expand(len(tokens), -1)
            hidden = run_backbone(backbone, tokens[:, start:end], positions=positions, mask=mask, cache=cache)
        if owner is not None and end:
            _expand(cache, owner)
    return hidden, plan.shared


def action_states(backbone: nn.Module, rows: Rows, *, share_prompt: bool = True) -> tuple[Tensor, Tensor]:
    """The states actions were chosen in: hidden (N, H), and each action's flat index (N,) into (B, T)."""
    if bool(rows.action_mask[:, :1].any()):
        raise ValueError(
            "the first token of a row is marked as an action, but nothing stands before it to predict it from"
        )
    hidden, offset = hidden_states(backbone, rows, share_prompt=share_prompt)
    where, when = rows.action_mask.nonzero(as_tuple=True)
    flat = hidden.reshape(-1, hidden.shape[-1]).index_select(0, where * hidden.shape[1] + when - 1 - offset)
    return flat, where * rows.action_mask.shape[1] + when


def scatter(values: Tensor, index: Tensor, like: Tensor) -> Tensor:
    """Values (N,) at their flat places in a (B, T) tensor of zeros."""
    return (
        torch.zeros(like.numel(), dtype=values.dtype, device=values.device)
        .index_copy(0, index, values)
        .view(like.shape)
    )


def _read(head: nn.Module, hidden: Tensor, targets: Tensor, temperature: float, entropy: bool) -> tuple[Tensor, Tensor]:
    logits = head(hidden).float() / temperature  # (n, V)
    if not entropy:
        return -F.cross_entropy(logits, targets, reduction="none"), logits.new_zeros(())
    logp = logits.log_softmax(dim=-1)
    return logp.gather(-1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(dim=-1)


def token_log_probs(
    head: nn.Module, hidden: Tensor, targets: Tensor, *, temperature: float, entropy: bool, chunk: int | None = None
) -> tuple[Tensor, Tensor | None]:
    """``log softmax(head(h)/temperature)[target]`` and the entropy, float32, (N,) each.

    The logits of N × 151,936 numbers are the largest tensor of the update
    (trl#3678): they exist for ``chunk`` positions at a time, and the backward
    pass recomputes them where they would not fit.
    """
    vocabulary = head.weight.shape[0]
    chunk = chunk or max(CHUNK_ELEMENTS // vocabulary, 1)
    recompute = torch.is_grad_enabled() and len(hidden) * vocabulary > KEEP_ELEMENTS
    read = functools.partial(checkpoint, _read, use_reentrant=False) if recompute else _read
    parts = [
        read(head, h, t, temperature, entropy) for h, t in zip(hidden.split(chunk), targets.split(chunk), strict=True)
    ]
    logprobs = torch.cat([p[0] for p in parts])
    return logprobs, torch.cat([p[1] for p in parts]) if entropy else None
