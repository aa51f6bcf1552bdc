"""Keys and values of a rollout, allocated ahead and written in place.

The beginning that all prompts have in common (the system turn) is stored once
and read once a step for all rows. After it, a row's token at position p lies in
slot ``p − shared``: rows of different lengths stand side by side without a gap,
and what a padded chunk writes past a row's end is overwritten before the row can
see it. Attention reads only the filled part. Rows that work together are kept
side by side by swapping rows, so that a pass takes a slice and never a gather.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, Cache, PretrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

ATTENTION = "agentr1_slots"


class SlotCache(Cache):
    """A ``transformers`` cache of ``rows`` rows and ``capacity`` slots a row.

    ``storage`` is (layers, 2, rows, heads, capacity, head_dim), ``prefix``
    (layers, 2, heads, shared, head_dim). Before each forward pass ``begin`` says
    which rows are fed and at which positions.
    """

    def __init__(
        self, config: PretrainedConfig, rows: int, capacity: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(layers=[])
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        # zeros: a masked slot has weight 0, and 0 · NaN of uninitialised memory would be NaN
        self.storage = torch.zeros(
            (config.num_hidden_layers, 2, rows, heads, capacity, dim), dtype=dtype, device=device
        )
        self.closed = torch.finfo(dtype).min
        self._mask = torch.full((rows, capacity), self.closed, dtype=dtype, device=device)
        self.prefix = self.storage[:, :, 0, :, :0]
        self.one_token = False

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
            self._resize(max(slots, self.capacity * 3 // 2), 0)

    def _resize(self, capacity: int, start: int) -> None:
        former, kept = self.storage, min(self.capacity, capacity - start)
        self.storage = former.new_zeros((*former.shape[:4], capacity, former.shape[5]))
        self.storage[..., start : start + kept, :] = former[..., :kept, :]
        mask = self._mask.new_full((len(self._mask), capacity), self.closed)
        mask[:, start : start + kept] = self._mask[:, :kept]
        self._mask = mask

    def share(self, row: int, length: int) -> None:
        """The first ``length`` tokens of ``row`` become the prefix of all; no other row may be in use."""
        self.prefix = self.storage[:, :, row, :, :length].clone()

    def narrow(self, length: int) -> None:
        """Only ``length`` tokens are common now: rows get the rest of the prefix as slots of their own."""
        rest = self.prefix[:, :, None, :, length:]
        moved = rest.shape[4]
        self._resize(self.capacity + moved, moved)
        self.storage[..., :moved, :] = rest
        self._mask[:, :moved] = 0.0
        self.prefix = self.prefix[:, :, :, :length]

    def begin(self, start: int, end: int, positions: Tensor, filled: int, *, one_token: bool = False) -> Tensor:
        """Rows ``start .. end − 1`` are fed at ``positions`` (rows, tokens); returns their additive mask.

        ``filled`` is one more than the largest position. A token sees positions
        up to its own. The mask is (rows, 1, tokens, keys), the keys being prefix
        and slots; with ``one_token``, for rows whose masks stand, slots alone.
        """
        self.reserve(filled - self.shared)
        self._rows, self._filled = slice(start, end), filled - self.shared
        self.one_token = one_token
        index = torch.arange(end - start, device=positions.device)
        if self.one_token:
            self._index, self._at = index, positions[:, 0] - self.shared
            mask = self._mask[start:end]
            mask[index, self._at] = 0.0
            return mask[:, None, None, : self._filled]
        self._index, self._at = index[:, None], positions - self.shared
        hidden = torch.arange(filled, device=positions.device) > positions[:, None, :, None]
        return torch.zeros(hidden.shape, dtype=self._mask.dtype, device=hidden.device).masked_fill_(hidden, self.closed)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write (rows, heads, tokens, head_dim) in place; return what the mask of ``begin`` is for."""
        out = []
        for part, new in enumerate((key_states, value_states)):
            slots = self.storage[layer_idx, part, self._rows]
            slots[self._index, :, self._at] = new[:, :, 0] if self.one_token else new.transpose(1, 2)
            slots = slots[:, :, : self._filled]
            if self.shared and not self.one_token:
                prefix = self.prefix[layer_idx, part].expand(len(slots), -1, -1, -1)
                slots = torch.cat([prefix, slots], dim=2)
            out.append(slots)
        return out[0], out[1]

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

    def copy_rows(self, sources: Tensor, start: int, length: int) -> None:
        """Rows ``start ..`` become copies of ``sources`` up to position ``length``: a prefill given to its group."""
        filled = length - self.shared
        for layer in self.storage:
            for part in layer:
                part[start : start + len(sources), :, :filled] = part[:, :, :filled].index_select(0, sources)

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
    if slots is None or not slots.one_token or not slots.shared:
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
def shared_attention(config: PretrainedConfig) -> Iterator[None]:
    """Let a model that uses ``sdpa`` read shared prefixes meanwhile."""
    former = config._attn_implementation
    if former == "sdpa":
        config._attn_implementation = ATTENTION
    try:
        yield
    finally:
        config._attn_implementation = former
