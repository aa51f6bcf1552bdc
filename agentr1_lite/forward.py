"""Forward passes of the update: hidden states where actions were chosen, and what is read off them.

Rows are right-padded, so position t of a row is slot t and a causal mask alone
keeps padding out of every real token's sight: a mask built from token ids would
lose a true end of turn where pad == eos (trl#6357).
"""

from __future__ import annotations

import copy
import functools
import inspect
from typing import NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

# Logits held at once, float32: 64 MiB. Blocks of up to 32 MiB are kept by the C library's allocator when they are
# freed and lie too scattered to be used again: with those, the peak on a CPU grew with the number of chunks.
CHUNK_ELEMENTS = 2**24
KEEP_ELEMENTS = 2**26  # above this many logits the backward pass recomputes them
LOWEST = torch.finfo(torch.float32).min  # finite: 0 · −∞ would make the entropy NaN


class Rows(Protocol):
    """What the passes read from a batch."""

    input_ids: Tensor  # (B, T)
    action_mask: Tensor  # (B, T)
    lengths: Tensor  # (B,)


class Stage(NamedTuple):
    """Columns ``[start, end)``, each distinct beginning of ``end`` tokens once.

    ``rows`` (R,): a row that shows it. ``parent`` (R,): its place among the former stage's. ``node`` (B,): the place of
    every row of the batch; meaningless for a row that ended before ``start``, which is passed no more.
    """

    start: int
    end: int
    rows: Tensor
    parent: Tensor
    node: Tensor


# What a stage costs beside its own tokens, counted in tokens: the keys and values it copies, and the call
COPY_COST, STAGE_COST, MAX_CUTS = 0.03, 60.0, 32


def numbered_rows(input_ids: Tensor) -> Tensor:
    """(B,) equal for equal rows of (B, T), in the order of their tokens: what begins alike stands together."""
    return torch.unique(input_ids, dim=0, return_inverse=True)[1]


def plan_stages(input_ids: Tensor, lengths: Tensor, *, share: bool = True, cached: bool = True) -> list[Stage]:
    """Cut (B, T) into stages so that what rows have in common is passed once.

    Rollouts of a question share its prompt, and as long as they say the same they also share calls and replies: rows
    are a tree of prefixes. In a stage every branch is one row, and rows that have ended are gone; dynamic programming
    picks the cuts that forward the fewest tokens. Without ``cached`` there is one stage, which holds equal rows once;
    without ``share`` it holds all rows.
    """
    width, device = int(lengths.max()), input_ids.device
    ids, lengths = input_ids[:, :width], lengths.cpu()
    everything = torch.arange(len(ids), device=device)
    if not share:
        return [Stage(0, width, everything, everything, everything)]
    kept, number = (x.cpu() for x in torch.unique(ids, dim=0, return_inverse=True))
    first = torch.empty(len(kept), dtype=torch.long)
    first[number.flip(0)] = torch.arange(len(ids) - 1, -1, -1)
    longest = torch.zeros(len(kept), dtype=torch.long).scatter_reduce(0, number, lengths, "amax").numpy()
    differs = (kept[1:] != kept[:-1]).int()
    common = np.concatenate([[0], differs.argmax(1).numpy()])
    cuts = _cheapest(common, longest, width) if cached else [0, width]
    stages, former = [], torch.zeros(len(kept), dtype=torch.long)
    for start, end in zip(cuts, cuts[1:], strict=False):
        alive = longest > start
        opens = np.zeros(len(kept), dtype=bool)
        opens[np.flatnonzero(alive)] = np.concatenate([[True], _between(common, alive) < end])
        node = torch.from_numpy((np.cumsum(opens) - 1).clip(0))
        shown = torch.from_numpy(np.flatnonzero(opens))
        stages.append(Stage(start, end, *(x.to(device) for x in (first[shown], former[shown], node[number]))))
        former = node
    return stages


def _between(common: np.ndarray, alive: np.ndarray) -> np.ndarray:
    """Tokens that each living row shares with the one before it: the least of what lies between them."""
    places = np.flatnonzero(alive)
    return np.minimum.reduceat(common[: places[-1] + 1], places[:-1] + 1) if len(places) > 1 else common[:0]


def _cheapest(common: np.ndarray, longest: np.ndarray, width: int) -> list[int]:
    """Columns ``0 = c_0 < … < c_n = width`` where the stages between them cost least."""
    edges = np.unique(np.concatenate([common, longest]))
    edges = edges[(edges > 0) & (edges < width)]
    if len(edges) > MAX_CUTS:
        edges = edges[np.linspace(0, len(edges) - 1, MAX_CUTS).astype(int)]
    edges = np.concatenate([[0], edges, [width]])
    best, came = np.full(len(edges), np.inf), np.zeros(len(edges), dtype=int)
    best[0] = 0.0
    for i, start in enumerate(edges[:-1]):
        rows = 1 + np.searchsorted(np.sort(_between(common, longest > start)), edges, side="left")
        price = best[i] + rows * (edges - start + COPY_COST * start) + STAGE_COST
        better = (price < best) & (np.arange(len(edges)) > i)
        best[better], came[better] = price[better], i
    path = [len(edges) - 1]
    while path[-1]:
        path.append(came[path[-1]])
    return [int(edges[i]) for i in reversed(path)]


def forwarded_tokens(input_ids: Tensor, lengths: Tensor, *, share: bool = True) -> int:
    """Tokens, padding included, that a pass over (B, T) forwards."""
    return sum(len(stage.rows) * (stage.end - stage.start) for stage in plan_stages(input_ids, lengths, share=share))


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


@functools.lru_cache(maxsize=8)
def wants_mask(device: torch.device) -> bool:
    """Whether a pass gets the causal mask that it could go without.

    Before compute capability 8.0 (a T4) grouped heads without a mask run in a kernel that holds every score, heads · T²
    in float32; with one, in a kernel that does not.
    """
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] < 8


def _continue(cache: DynamicCache, parent: Tensor) -> None:
    """Give every row its parent's keys and values; gradients flow back through the expansion."""
    for layer in cache.layers:
        if layer.keys.shape[0] == 1:
            shape = (len(parent), *layer.keys.shape[1:])
            layer.keys, layer.values = layer.keys.expand(shape), layer.values.expand(shape)
        else:
            layer.keys, layer.values = layer.keys.index_select(0, parent), layer.values.index_select(0, parent)


def hidden_states(backbone: nn.Module, rows: Rows, stages: list[Stage]) -> tuple[Tensor, Tensor]:
    """Hidden states of all stages (S, H), and in which of them each position of the batch lies, (B, T).

    Keys and values of a stage are handed on to the rows that continue it: exact to rounding.
    """
    dtype, device = next(backbone.parameters()).dtype, rows.input_ids.device
    cache = DynamicCache() if len(stages) > 1 else None
    states, count = [], 0
    place = torch.zeros(rows.input_ids.shape, dtype=torch.long, device=device)
    for start, end, shown, parent, node in stages:
        if start:
            _continue(cache, parent)
        columns = torch.arange(start, end, device=device)
        hidden = run_backbone(
            backbone,
            rows.input_ids[shown, start:end],
            positions=columns[None].expand(len(shown), -1),
            mask=causal_mask(end - start, end, dtype, device) if start or wants_mask(device) else None,
            cache=cache,
        )
        place[:, start:end] = count + node[:, None] * (end - start) + columns - start
        states.append(hidden.reshape(-1, hidden.shape[-1]))
        count += len(states[-1])
    return torch.cat(states), place


def action_states(
    backbone: nn.Module, rows: Rows, *, share: bool = True, cached: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """The states actions were chosen in.

    Returns hidden states (S, H), which of them each of the N actions was chosen in (N,), and each action's flat index
    into (B, T), (N,). ``share`` and ``cached``: see `plan_stages`.
    """
    if bool(rows.action_mask[:, :1].any()):
        raise ValueError(
            "the first token of a row is marked as an action, but nothing stands before it to predict it from"
        )
    stages = plan_stages(rows.input_ids, rows.lengths, share=share, cached=cached)
    hidden, place = hidden_states(backbone, rows, stages)
    where, when = rows.action_mask.nonzero(as_tuple=True)
    return hidden, place[where, when - 1], where * rows.action_mask.shape[1] + when


def scatter(values: Tensor, index: Tensor, like: Tensor) -> Tensor:
    """Values (N,) at their flat places in a (B, T) tensor of zeros."""
    return (
        torch.zeros(like.numel(), dtype=values.dtype, device=values.device)
        .index_copy(0, index, values)
        .view(like.shape)
    )


class _Given(nn.Module):
    """Stands where a model has its backbone and gives it these hidden states."""

    states: Tensor

    def forward(self, *args: object, **kwargs: object) -> BaseModelOutput:
        return _Output(last_hidden_state=self.states)


class _Output(BaseModelOutput):
    def __getattr__(self, name: str) -> None:  # what a backbone may give beside its states
        if name.startswith("__"):
            raise AttributeError(name)


class Head:
    """Logits (n, V), float32, of hidden states (n, H): the one place where engine, update and reference get them.

    They are those of the model's own forward, which may change what its output layer gives (Gemma 2 caps it, Cohere and
    Granite scale it): it is called with ``h`` in its backbone's place. Where that is the output layer and nothing else
    (``plain``), the layer alone is called. Ids without a token (Qwen's padding rows) get the lowest float: probability
    0 in the sampler as in the update, and none of the entropy.

    Args:
        known: (V,) True for ids that the tokenizer has a token for.
        plain: whether the output layer is all that follows the backbone, see `selfcheck`.
    """

    def __init__(self, model: PreTrainedModel, known: Tensor, plain: bool = False) -> None:
        self.known, self.plain, self.vocabulary = known, plain, len(known)
        unknown = (~known).nonzero()[:, 0]
        self._unknown = unknown if len(unknown) else None
        self._given, self._model, self._shell = _Given(), model, copy.copy(model)
        self._shell._modules = {**model._modules, model.base_model_prefix: self._given}

    def own(self, hidden: Tensor) -> Tensor:
        """What the model's own forward makes of hidden states, in its number format."""
        self._given.states = hidden[None]
        try:
            return self._shell(inputs_embeds=hidden[None]).logits[0]
        finally:
            del self._given.states

    def layer(self, hidden: Tensor) -> Tensor:
        """What the output layer makes of hidden states."""
        return self._model.get_output_embeddings()(hidden)

    def __call__(self, hidden: Tensor, temperature: float | None = None) -> Tensor:
        logits = (self.layer(hidden) if self.plain else self.own(hidden)).float()
        if temperature is not None:
            logits = logits / temperature
        return logits if self._unknown is None else logits.index_fill_(-1, self._unknown, LOWEST)


def _read(head: Head, hidden: Tensor, targets: Tensor, temperature: float, entropy: bool) -> tuple[Tensor, Tensor]:
    logits = head(hidden, temperature)  # (n, V)
    if not entropy:
        return -F.cross_entropy(logits, targets, reduction="none"), logits.new_zeros(())
    logp = logits.log_softmax(dim=-1)
    return logp.gather(-1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(dim=-1)


def token_log_probs(
    head: Head, hidden: Tensor, targets: Tensor, *, temperature: float, entropy: bool, chunk: int | None = None
) -> tuple[Tensor, Tensor | None]:
    """``log softmax(head(h)/temperature)[target]`` and the entropy, float32, (N,) each.

    The logits of N × 151,936 numbers are the largest tensor of the update
    (trl#3678): they exist for ``chunk`` positions at a time, and the backward
    pass recomputes them where they would not fit.
    """
    vocabulary = head.vocabulary
    chunk = chunk or max(CHUNK_ELEMENTS // vocabulary, 1)
    recompute = torch.is_grad_enabled() and len(hidden) * vocabulary > KEEP_ELEMENTS
    read = functools.partial(checkpoint, _read, use_reentrant=False) if recompute else _read
    parts = [
        read(head, h, t, temperature, entropy) for h, t in zip(hidden.split(chunk), targets.split(chunk), strict=True)
    ]
    logprobs = torch.cat([p[0] for p in parts])
    return logprobs, torch.cat([p[1] for p in parts]) if entropy else None
