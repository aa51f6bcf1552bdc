"""The local engine: rows of token ids in, sampled turns out, one forward pass a token.

It knows rows, not environments. ``open`` adds rows, ``next_turns`` decodes until
turns are ready, ``extend`` gives a row its observation, ``close`` lets it go;
``step``, ``top_choices`` and ``force`` take the same rows one token at a time
for lessons and players. Another engine (vLLM) has to offer the first four.

A row's keys and values stay cached over the whole episode; no turn is ever
prefilled again. A step runs the slice of rows up to the last one that decodes.
Rows in between whose turn has ended idle along, which costs less than moving
them, until moving pays (``_tighten``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from agentr1_lite.cache import FIRST_SLOTS, SlotCache, shared_attention
from agentr1_lite.forward import run_backbone
from agentr1_lite.policy import QwenPolicy
from agentr1_lite.sampling import Sampling, stop_candidates, uniforms

FEED_TOKENS = 4096  # padded tokens of one prefill pass
MOVE_STEPS = 16  # moving a row costs about as much as decoding it so many times
SHORTEST_PREFIX = 16  # shorter ones are not worth a product of their own
FREE, WAITING, DECODING, ENDED = range(4)


@dataclass(frozen=True)
class EngineTurn:
    """What one row sampled: ids as sampled, their log-probs, why it stopped, and the EOS id if one did."""

    row: int
    ids: list[int]
    logprobs: list[float]
    finish_reason: str
    ended_by: int | None


class Engine(Protocol):
    """What a rollout needs of an engine."""

    free_rows: int

    def open(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], limits: Sequence[int]) -> list[int]: ...
    def next_turns(self) -> list[EngineTurn]: ...
    def extend(self, row: int, ids: Sequence[int], limit: int) -> None: ...
    def close(self, row: int) -> None: ...


def check_prompts(prompts: Sequence[Sequence[int]], free: int, max_rows: int) -> None:
    """Raise ``ValueError`` where an engine cannot open these rows."""
    if not all(prompts):
        raise ValueError("a prompt has no tokens; a row needs at least one to predict the next from")
    if len(prompts) > free:
        raise ValueError(f"{len(prompts)} rows do not fit, {free} of {max_rows} are free; close rows or raise max_rows")


def common_prefix(rows: Sequence[Sequence[int]]) -> int:
    """Tokens that all rows start with."""
    low, high = min(rows), max(rows)
    return next((i for i, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), min(len(low), len(high)))


class LocalEngine:
    """Decoding with one cache, all rows at once.

    Args:
        policy: whose actor decodes.
        sampling: how tokens are chosen.
        stop_strings: texts of the environment that end a turn.
        max_rows: rows that can be open at once.
        slots: tokens a row gets room for (``SlotCache``), grows when needed; if not given, the model's context on a
            CPU, where untouched room costs nothing, and a few hundred elsewhere.
        handover: share of the rows in play whose turns must have ended before the environment gets them;
            higher means fewer and larger batches of calls, for slow tools.
    """

    def __init__(
        self,
        policy: QwenPolicy,
        *,
        sampling: Sampling | None = None,
        stop_strings: Sequence[str] = (),
        max_rows: int = 64,
        slots: int | None = None,
        handover: float = 0.25,
    ) -> None:
        self.policy, self.sampling = policy, sampling or Sampling()
        self.max_rows, self.handover = max_rows, handover
        self.stop_strings = tuple(s for s in stop_strings if s)
        causal = policy.causal
        self._backbone, self._head = causal.base_model, policy.head
        with torch.inference_mode():
            slots = slots or (policy.context_length if policy.device.type == "cpu" else FIRST_SLOTS)
            self._cache = SlotCache(causal.config, max_rows, slots, dtype=causal.dtype, device=policy.device)
        vocabulary = self._head.vocabulary
        self._ends = np.zeros(vocabulary, dtype=bool)
        self._ends[[i for i in policy.chat.eos_ids if i < vocabulary]] = True
        may_stop = stop_candidates(policy.tokenizer, self.stop_strings, vocabulary) if self.stop_strings else None
        self._may_stop = may_stop
        self._tokens = np.zeros((max_rows, 256), dtype=np.int64)
        self._logprobs = np.zeros((max_rows, 256), dtype=np.float32)
        # per row: tokens known, tokens cached, where its turn starts, tokens it may hold, tokens it has sampled
        self._size, self._cached, self._start, self._limit, self._drawn = np.zeros((5, max_rows), dtype=np.int64)
        self._seeds = np.zeros(max_rows, dtype=np.uint64)
        self._state = np.full(max_rows, FREE)
        self._reasons: dict[int, tuple[str, int | None]] = {}
        self._row_at, self._slot_of = np.arange(max_rows), np.arange(max_rows)  # slot → row, row → slot
        self._prefix: tuple[int, ...] = ()
        self._idled = 0  # row-steps spent on idle rows since rows were last moved
        self.forced: dict[int, int] = {}

    # The protocol of a rollout

    @property
    def free_rows(self) -> int:
        return self._count(FREE)

    def open(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], limits: Sequence[int]) -> list[int]:
        """Add rows; row i may sample until it holds ``limits[i]`` tokens. Distinct prompts are prefilled once each.

        What all prompts begin with (the system turn) is prefilled once for all.
        """
        if not prompts:
            return []
        check_prompts(prompts, self.free_rows, self.max_rows)
        free = self._state[self._row_at] == FREE
        rows = self._row_at[np.flatnonzero(free)[: len(prompts)]]
        self._reserve(max(map(len, prompts)) + 1)
        for row, prompt, seed in zip(rows, prompts, seeds, strict=True):
            self._tokens[row, : len(prompt)] = prompt
            self._size[row] = self._start[row] = len(prompt)
            self._seeds[row] = np.uint64(seed % 2**64)
        self._cached[rows], self._limit[rows], self._drawn[rows] = self._size[rows] - 1, limits, 0
        with self._pass():
            self._prefill(rows, [tuple(prompt) for prompt in prompts], alone=bool(free.all()))
        self._state[rows] = WAITING
        return rows.tolist()

    def next_turns(self) -> list[EngineTurn]:
        """Decode until it pays to hand turns over: ``handover`` of the rows in play have ended theirs.

        Their observations then come back as one padded chunk: one pass instead
        of one a row, and their tools run together. The rule counts rows, not
        time, so that a run repeats exactly.
        """
        with self._pass():
            self._feed()
            while (decoding := self._count(DECODING)) and not self._enough(self._count(ENDED), decoding):
                self._step()
        return [self._turn(row) for row in np.flatnonzero(self._state == ENDED).tolist()]

    def extend(self, row: int, ids: Sequence[int], limit: int) -> None:
        """Give an ended row its observation; it may sample again until it holds ``limit`` tokens."""
        if self._state[row] != ENDED:
            raise ValueError(f"row {row} has not ended its turn, so it cannot take an observation")
        size = int(self._size[row])
        self._reserve(size + len(ids) + 1)
        self._tokens[row, size : size + len(ids)] = ids
        self._size[row] = self._start[row] = size + len(ids)
        self._limit[row] = limit
        self._state[row] = WAITING

    def close(self, row: int) -> None:
        """Let a row go, whatever it was doing."""
        self._state[row] = FREE
        self.forced.pop(row, None)

    # One token at a time

    def step(self) -> list[EngineTurn]:
        """Sample one token in every row that can; returns the turns that ended with it."""
        with self._pass():
            self._feed()
            ended = self._step() if self._count(DECODING) else []
        return [self._turn(row) for row in ended]

    def force(self, row: int, token: int) -> None:
        """Let the next step take this token in this row instead of sampling; its log-prob stays the policy's."""
        self.forced[row] = int(token)

    def top_choices(self, row: int, k: int = 5) -> list[tuple[int, float]]:
        """The k likeliest next tokens of a row and their probabilities; nothing is sampled."""
        with self._pass():
            self._feed()
            if self._state[row] != DECODING:
                raise ValueError(f"row {row} does not decode now; give it its observation or open it again")
            logits = self._logits(self._slot_of[row : row + 1])
            probabilities = (logits / self.sampling.temperature).softmax(dim=-1)[0]
            values, ids = probabilities.topk(min(k, int(self._head.known.sum())))
        return list(zip(ids.tolist(), values.tolist(), strict=True))

    def tokens(self, row: int) -> list[int]:
        """All tokens a row holds."""
        return self._tokens[row, : self._size[row]].tolist()

    # Inside

    def _count(self, state: int) -> int:
        return int(np.count_nonzero(self._state == state))

    def _enough(self, ended: int, decoding: int) -> bool:
        return ended > 0 and ended >= self.handover * (ended + decoding)

    def _turn(self, row: int) -> EngineTurn:
        span = slice(self._start[row], self._size[row])
        reason, ended_by = self._reasons[row]
        return EngineTurn(row, self._tokens[row, span].tolist(), self._logprobs[row, span].tolist(), reason, ended_by)

    def _device(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.policy.device)

    def _reserve(self, length: int) -> None:
        """Make room for ``length`` token ids a row."""
        width = self._tokens.shape[1]
        if length > width:
            more = max(length, width * 3 // 2) - width
            self._tokens = np.pad(self._tokens, ((0, 0), (0, more)))
            self._logprobs = np.pad(self._logprobs, ((0, 0), (0, more)))

    @contextlib.contextmanager
    def _pass(self) -> Iterator[None]:
        with self.policy.inference() as causal, shared_attention(causal.config, self.policy.shares):
            yield

    def _forward(self, slots: slice | np.ndarray, ids: np.ndarray, positions: np.ndarray) -> Tensor:
        where = self._device(positions)
        rows = slots if isinstance(slots, slice) else self._device(slots)
        mask = self._cache.begin(rows, where, int(positions.max()) + 1)
        extra = {"slots": self._cache} if self.policy.shares else {}
        return run_backbone(self._backbone, self._device(ids), positions=where, mask=mask, cache=self._cache, **extra)

    def _share(self, slot: int, prompts: list[tuple[int, ...]], alone: bool) -> None:
        """Settle which beginning all rows have in common, and cache it."""
        common = common_prefix(prompts if alone else [self._prefix, *prompts])
        common = min(common, min(map(len, prompts)) - 1)
        if alone:
            self._cache.share(slot, 0)
            if self.policy.shares and len(prompts) > 1 and common >= SHORTEST_PREFIX:
                self._forward(np.array([slot]), np.array([prompts[0][:common]]), np.arange(common)[None])
                self._cache.share(slot, common)
        elif common < self._cache.shared:
            self._cache.narrow(common)
        self._prefix = prompts[0][: self._cache.shared]

    def _prefill(self, rows: np.ndarray, prompts: list[tuple[int, ...]], alone: bool) -> None:
        """Cache all but the last token of each prompt; ``alone``: no other row is in use."""
        slots = self._slot_of[rows]
        self._share(int(slots[0]), prompts, alone)
        first = {prompt: i for i, prompt in reversed(list(enumerate(prompts)))}  # where each prompt occurs first
        distinct = sorted(first.values())
        ends = self._cached[rows[distinct]]
        if ends.max() > self._cache.shared:
            self._chunks(rows[distinct], np.full(len(distinct), self._cache.shared), ends)
            sources = slots[[first[prompt] for prompt in prompts]]
            self._cache.copy_rows(self._device(sources), self._device(slots), int(ends.max()))

    def _chunks(self, rows: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> None:
        """Cache the tokens ``start .. end − 1`` of each row, padded to one width, at most FEED_TOKENS in a pass."""
        width = int((ends - starts).max())
        last = max(int(ends.max()), self.policy.context_length - 1)  # padding may not stand where no token ever does
        positions = np.minimum(starts[:, None] + np.arange(width)[None], last)
        self._reserve(int(positions.max()) + 1)
        ids = self._tokens[rows[:, None], positions]
        count = max(FEED_TOKENS // width, 1)
        for a in range(0, len(rows), count):
            part = slice(a, a + count)
            self._forward(self._slot_of[rows[part]], ids[part], positions[part])

    def _feed(self) -> None:
        """Cache what waiting rows have not cached yet, but for their last token, and let them decode."""
        rows = np.flatnonzero(self._state == WAITING)
        if not len(rows):
            return
        starts, ends = self._cached[rows], self._size[rows] - 1
        if (ends > starts).any():
            self._chunks(rows, starts, ends)
        self._cached[rows] = ends
        self._cache.set_filled(self._device(self._slot_of[rows]), self._device(ends))
        self._state[rows] = DECODING

    def _tighten(self) -> np.ndarray:
        """The slots that decode, moved together once the idle rows between them have cost more than the moves."""
        live = np.flatnonzero(self._state[self._row_at] == DECODING)
        count = len(live)
        right = live[live >= count]
        self._idled += int(live[-1]) + 1 - count
        if not len(right) or self._idled < MOVE_STEPS * len(right):
            return live
        left = np.setdiff1d(np.arange(count), live)
        a, b = self._row_at[left], self._row_at[right]
        length = int(max(self._size[a].max(), self._size[b].max()))
        self._cache.swap(self._device(left), self._device(right), length)
        self._row_at[left], self._row_at[right] = b, a
        self._slot_of[b], self._slot_of[a] = left, right
        self._idled = 0
        return np.arange(count)

    def _logits(self, slots: np.ndarray) -> Tensor:
        """Float32 logits (slots, V) of the next token."""
        end = int(slots[-1]) + 1
        rows = self._row_at[:end]
        # an idle row's last token is fed again where it stands, which changes nothing
        at = np.maximum(self._cached[rows], self._cache.shared)
        hidden = self._forward(slice(0, end), self._tokens[rows, at][:, None], at[:, None])[:, -1]
        return self._head(hidden if len(slots) == end else hidden[self._device(slots)])

    def _step(self) -> list[int]:
        """One token in each decoding row; returns the rows whose turn ended."""
        slots = self._tighten()
        rows, logits = self._row_at[slots], self._logits(slots)
        ids, logprobs = self._choose(rows, logits)
        size = self._size[rows]
        self._reserve(int(size.max()) + 2)
        self._tokens[rows, size], self._logprobs[rows, size] = ids, logprobs
        self._size[rows] += 1
        self._cached[rows] += 1
        self._drawn[rows] += 1
        stopped = self._ends[ids]
        if self._may_stop is not None:
            for i in np.flatnonzero(self._may_stop[ids] & ~stopped):
                stopped[i] = self._holds_stop_string(rows[i])
        ended = stopped | (size + 1 >= self._limit[rows])
        for i in np.flatnonzero(ended).tolist():
            by = int(ids[i]) if self._ends[ids[i]] else None
            self._reasons[int(rows[i])] = ("stop" if stopped[i] else "length", by)
        self._state[rows[ended]] = ENDED
        return rows[ended].tolist()

    def _choose(self, rows: np.ndarray, logits: Tensor) -> tuple[np.ndarray, np.ndarray]:
        draws = self._device(uniforms(self._seeds[rows], self._drawn[rows]))
        ids, logprobs = self.sampling.choose(logits, draws)
        for i in [i for i, row in enumerate(rows.tolist()) if row in self.forced] if self.forced else ():
            ids[i] = self.forced.pop(int(rows[i]))
            logprobs[i] = (logits[i] / self.sampling.temperature).log_softmax(dim=-1)[ids[i]]
        found = logprobs.cpu().numpy()
        if np.isnan(found).any():
            kind = str(self.policy.causal.dtype).removeprefix("torch.")
            raise ValueError(
                f"the policy's logits are not numbers in {kind}; choose another model.dtype (float16 overflows first), "
                "or go back to a checkpoint before its weights broke"
            )
        return ids.cpu().numpy(), found

    def _holds_stop_string(self, row: int) -> bool:
        """Whether the row's turn, which had none before its last token, now holds a stop string."""
        size = int(self._size[row])
        window = max(len(s.encode()) for s in self.stop_strings) + 1  # a token is a byte at least
        text = self.policy.chat.decode(self._tokens[row, max(int(self._start[row]), size - window) : size].tolist())
        return any(stop in text for stop in self.stop_strings)
