"""Keys and values of a rollout, allocated ahead and written in place.

The beginning that all prompts have in common (the system turn) is stored once
and read once a step for all rows. After it, a row's token at position p lies in
slot ``p − shared``: rows of different lengths stand side by side without a gap,
and what a padded chunk writes past a row's end is overwritten before the row can
see it. Attention reads only the filled part. Single tokens are decoded in a
slice of rows, in place; chunks (prompts, observations) gather their rows.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, Cache, PretrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

ATTENTION = "agentr1_slots"
LAZY_BYTES = 2**31  # address space reserved on a CPU, where untouched pages cost nothing
FIRST_SLOTS = 512  # allocated at first elsewhere, where nothing says how long rows will be
ODD_SLOTS = 8  # rows at distances of a power of two would compete for the same cache lines


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that on a CPU take memory only where they are written; ``torch.zeros`` writes them all.

    Zeros, because a masked slot has weight 0 and 0 · NaN of unwritten memory
    would be NaN. In small pages: huge ones would be filled for a row's few slots.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with contextlib.suppress(OSError):  # kernels without huge pages refuse the advice
            pages.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).view(shape)


class SlotCache(Cache):
    """A ``transformers`` cache of ``rows`` rows with room for ``slots`` tokens each, and for more when needed.

    ``storage`` is (layers, 2, rows, heads, capacity, head_dim), ``prefix``
    (layers, 2, heads, shared, head_dim). Before each forward pass ``begin`` says
    which rows are fed and at which positions.
    """

    def __init__(
        self, config: PretrainedConfig, rows: int, slots: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(layers=[])
        config = config.get_text_config()
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        slot_bytes = config.num_hidden_layers * 2 * rows * heads * dim * dtype.itemsize
        capacity = min(slots, LAZY_BYTES // slot_bytes) if device.type == "cpu" else slots
        capacity = max(capacity, 1) + ODD_SLOTS
        self.storage = lazy_zeros((config.num_hidden_layers, 2, rows, heads, capacity, dim), dtype, device)
        self.closed = torch.finfo(dtype).min
        self._mask = torch.full((rows, capacity), self.closed, dtype=dtype, device=device)
        self.prefix = self.storage[:, :, 0, :, :0]
        self.decoding, self._longest = False, 0

    @property
    def capacity(self) -> int:
        return self.storage.shape[4]

    @property
    def shared(self) -> int:
        """Tokens that all rows have in common and ``prefix`` holds."""
        return self.prefix.shape[3]

    def reserve(self, slots: int) -> None:
        """Make room for ``slots`` slots a row; grows by half at least, so that copies stay rare."""
        if slots > self.capacity:
            self._resize(max(slots, self.capacity * 3 // 2) + ODD_SLOTS, 0)

    def _resize(self, capacity: int, start: int) -> None:
        former, kept = self.storage, min(self._longest, capacity - start)
        self.storage = lazy_zeros((*former.shape[:4], capacity, former.shape[5]), former.dtype, former.device)
        self.storage[..., start : start + kept, :] = former[..., :kept, :]
        mask = self._mask.new_full((len(self._mask), capacity), self.closed)
        mask[:, start : start + kept] = self._mask[:, :kept]
        self._mask, self._longest = mask, start + kept

    def share(self, row: int, length: int) -> None:
        """The first ``length`` tokens of ``row`` become the prefix of all; no other row may be in use."""
        self.prefix = self.storage[:, :, row, :, :length].clone()
        self._longest = 0

    def narrow(self, length: int) -> None:
        """Only ``length`` tokens are common now: rows get the rest of the prefix as slots of their own."""
        rest = self.prefix[:, :, None, :, length:]
        moved = rest.shape[4]
        self._resize(self.capacity + moved, moved)
        self.storage[..., :moved, :] = rest
        self._mask[:, :moved] = 0.0
        self.prefix = self.prefix[:, :, :, :length]

    def begin(self, rows: slice | Tensor, positions: Tensor, length: int) -> Tensor:
        """Rows are fed at ``positions`` (rows, tokens), all below ``length``; returns their additive mask.

        A token sees positions up to its own. A slice of rows is fed one token
        each and attends to slots, a tensor of rows to prefix and slots: the mask
        is (rows, 1, tokens, slots) or (rows, 1, tokens, length).
        """
        self.reserve(length - self.shared)
        self._rows, self._filled = rows, length - self.shared
        self._longest = max(self._longest, self._filled)
        self.decoding = isinstance(rows, slice)
        if self.decoding:
            mask = self._mask[rows]
            self._index = torch.arange(len(mask), device=positions.device), positions[:, 0] - self.shared
            mask[self._index] = 0.0
            return mask[:, None, None, : self._filled]
        self._index = rows[:, None], positions - self.shared
        hidden = torch.arange(length, device=positions.device) > positions[:, None, :, None]
        return torch.zeros(hidden.shape, dtype=self._mask.dtype, device=hidden.device).masked_fill_(hidden, self.closed)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write (rows, heads, tokens, head_dim) in place; return what the mask of ``begin`` is for."""
        layer = self.storage[layer_idx]
        return self._write(layer[0], key_states, layer_idx, 0), self._write(layer[1], value_states, layer_idx, 1)

    def _write(self, slots: Tensor, new: Tensor, layer: int, part: int) -> Tensor:
        where, at = self._index
        if self.decoding:
            slots = slots[self._rows]
            slots[where, :, at] = new[:, :, 0]
            return slots[:, :, : self._filled]
        slots[where, :, at] = new.transpose(1, 2)
        slots = slots[:, :, : self._filled].index_select(0, self._rows)
        prefix = self.prefix[layer, part].expand(len(slots), -1, -1, -1)
        return torch.cat([prefix, slots], dim=2) if self.shared else slots

    def set_filled(self, rows: Tensor, lengths: Tensor) -> None:
        """Rows hold ``lengths`` tokens: open the slots behind them and close the rest of their masks."""
        slots = torch.arange(self.capacity, device=lengths.device)
        self._mask[rows] = torch.where(slots < lengths[:, None] - self.shared, 0.0, self.closed).to(self._mask.dtype)

    def swap(self, left: Tensor, right: Tensor, length: int) -> None:
        """Exchange rows pairwise, up to position ``length``."""
        filled = length - self.shared
        for view in (*(part[:, :, :filled] for layer in self.storage for part in layer), self._mask):
            former = view[left]
            view[left] = view[right]
            view[right] = former

    def copy_rows(self, sources: Tensor, targets: Tensor, length: int) -> None:
        """Targets become copies of sources up to position ``length``: a prefill given to its group."""
        filled = length - self.shared
        for layer in self.storage:
            for part in layer:
                part[targets, :, :filled] = part[:, :, :filled].index_select(0, sources)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0  # positions and masks are always given, nothing is derived from a length

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self._filled, 0


def slot_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    slots: SlotCache | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of one token a row over the shared prefix and the row's own slots.

    The scores on the prefix are one matrix product for all rows, which reads its
    keys once; a copy in every row would be read ``rows`` times. Anything else
    is left to ``sdpa``. Shapes: query (n, H, 1, D), key and value (n, K, L, D)
    with H = K · g, returns (n, 1, H, D).
    """
    if slots is None or not slots.decoding or not slots.shared:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    (n, heads, _, dim), groups = query.shape, key.shape[1]
    prefix_key, prefix_value = slots.prefix[module.layer_idx]  # (K, shared, D)
    q = (query * scaling).view(n, groups, heads // groups, dim)
    together = q.transpose(0, 1).reshape(groups, -1, dim)  # (K, n · g, D)
    common = (together @ prefix_key.transpose(1, 2)).view(groups, n, -1, slots.shared).transpose(0, 1)
    own = q @ key.transpose(2, 3) + attention_mask  # (n, K, g, L)
    weights = torch.cat([common, own], dim=-1).softmax(dim=-1, dtype=torch.float32).to(query.dtype)
    common = weights[..., : slots.shared].transpose(0, 1).reshape(groups, -1, slots.shared) @ prefix_value
    out = weights[..., slots.shared :] @ value + common.view(groups, n, -1, dim).transpose(0, 1)
    return out.reshape(n, 1, heads, dim), None


AttentionInterface.register(ATTENTION, slot_attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)


@contextlib.contextmanager
def shared_attention(config: PretrainedConfig, shares: bool) -> Iterator[None]:
    """Let a model that uses ``sdpa`` read shared prefixes meanwhile."""
    former = config._attn_implementation
    if shares:
        config._attn_implementation = ATTENTION
    try:
        yield
    finally:
        config._attn_implementation = former
