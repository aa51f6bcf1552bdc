"""The local engine: rows of token ids in, sampled turns out, one forward pass a token.

It knows rows, not environments. ``open`` adds rows, ``next_turns`` decodes until
turns are ready, ``extend`` gives a row its observation, ``close`` lets it go;
``step``, ``top_choices`` and ``force`` take the same rows one token at a time
for lessons and players. Another engine (vLLM) has to offer the first four.

A row's keys and values stay cached over the whole episode; no turn is ever
prefilled again. Rows in use are kept in this order, so that a pass is a slice:

    [ decoding | ended or waiting for their observation | free ]
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from agentr1_lite.cache import SlotCache, shared_attention
from agentr1_lite.forward import run_backbone
from agentr1_lite.policy import QwenPolicy
from agentr1_lite.sampling import Sampling, stop_candidates, uniforms

FEED_TOKENS = 8192  # padded tokens of one prefill pass
SHORTEST_PREFIX = 16  # shorter ones are not worth a product of their own
DECODING, ENDED, WAITING, FREE = range(4)


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
        slots: tokens a row first gets room for; grows when needed.
    """

    def __init__(
        self,
        policy: QwenPolicy,
        *,
        sampling: Sampling | None = None,
        stop_strings: Sequence[str] = (),
        max_rows: int = 64,
        slots: int = 512,
    ) -> None:
        self.policy, self.sampling = policy, sampling or Sampling()
        self.stop_strings = tuple(s for s in stop_strings if s)
        causal = policy.causal
        self._backbone, self._head = causal.base_model, causal.get_output_embeddings()
        vocabulary = self._head.weight.shape[0]
        self._ends = np.zeros(vocabulary, dtype=bool)
        self._ends[[i for i in policy.chat.eos_ids if i < vocabulary]] = True
        self._may_stop = stop_candidates(policy.tokenizer, self.stop_strings, vocabulary) if self.stop_strings else None
        self.max_rows = max_rows
        self._shares, self._prefix = causal.config._attn_implementation == "sdpa", ()
        with torch.inference_mode():
            self._cache = SlotCache(causal.config, max_rows, slots, dtype=causal.dtype, device=policy.device)
        self._tokens = np.zeros((max_rows, slots), dtype=np.int64)
        self._logprobs = np.zeros((max_rows, slots), dtype=np.float32)
        self._size, self._cached, self._start, self._limit, self._drawn = (
            np.zeros(max_rows, np.int64) for _ in range(5)
        )
        self._seeds = np.zeros(max_rows, dtype=np.uint64)
        self._state = np.full(max_rows, FREE)
        self._row_at, self._slot_of = np.arange(max_rows), np.arange(max_rows)  # slot → row, row → slot
        self._decoding = self._open = 0  # slots before these decode, are in use
        self._reasons: dict[int, tuple[str, int | None]] = {}
        self.forced: dict[int, int] = {}

    # The protocol of a rollout

    @property
    def free_rows(self) -> int:
        return int((self._state == FREE).sum())

    def open(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], limits: Sequence[int]) -> list[int]:
        """Add rows; row i may sample until it holds ``limits[i]`` tokens. Distinct prompts are prefilled once each.

        Prompts that share a beginning (the system turn) share its prefill too.
        """
        if not prompts:
            return []
        if any(len(prompt) == 0 for prompt in prompts):
            raise ValueError("a prompt has no tokens; a row needs at least one to predict the next from")
        if len(prompts) > self.free_rows:
            raise ValueError(
                f"{len(prompts)} rows do not fit, {self.free_rows} of {self.max_rows} are free; "
                "close rows or raise max_rows"
            )
        with self._pass():
            self._settle()
            start = self._open
            rows = self._row_at[start : start + len(prompts)].copy()
            self._open += len(prompts)
            self._reserve(max(map(len, prompts)) + 1)
            for row, prompt, seed, limit in zip(rows, prompts, seeds, limits, strict=True):
                self._tokens[row, : len(prompt)] = prompt
                self._size[row], self._cached[row], self._drawn[row] = len(prompt), len(prompt) - 1, 0
                self._start[row], self._limit[row], self._seeds[row] = len(prompt), limit, np.uint64(seed % 2**64)
            self._prefill(start, [tuple(prompt) for prompt in prompts])
            self._state[rows] = WAITING
        return rows.tolist()

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
        decoded = self._state[row] == DECODING
        self._state[row] = FREE
        self.forced.pop(row, None)
        if decoded:
            with torch.inference_mode():
                self._decoding = self._partition(0, self._decoding, DECODING)

    def next_turns(self) -> list[EngineTurn]:
        """Decode until it pays to hand turns over: the ended rows outnumber the decoding ones, or none decodes.

        The observations of all of them then come back as one padded chunk: one
        pass instead of one a row, and their tools run together.
        """
        with self._pass():
            self._feed()
            while self._decoding and int((self._state == ENDED).sum()) <= self._decoding:
                self._step()
        return [self._turn(row) for row in np.flatnonzero(self._state == ENDED).tolist()]

    # One token at a time

    def step(self) -> list[EngineTurn]:
        """Sample one token in every row that can; returns the turns that ended with it."""
        with self._pass():
            self._feed()
            ended = self._step() if self._decoding else []
        return [self._turn(row) for row in ended]

    def force(self, row: int, token: int) -> None:
        """Let the next step take this token in this row instead of sampling; its log-prob stays the policy's."""
        self.forced[row] = int(token)

    def top_choices(self, row: int, k: int = 5) -> list[tuple[int, float]]:
        """The k likeliest next tokens of a row and their probabilities; nothing is sampled."""
        with self._pass():
            self._feed()
            slot = int(self._slot_of[row])
            if slot >= self._decoding:
                raise ValueError(f"row {row} does not decode now; give it its observation or open it again")
            probabilities = (self._logits(slot, slot + 1) / self.sampling.temperature).softmax(dim=-1)[0]
            values, ids = probabilities.topk(min(k, len(probabilities)))
        return list(zip(ids.tolist(), values.tolist(), strict=True))

    def tokens(self, row: int) -> list[int]:
        """All tokens a row holds."""
        return self._tokens[row, : self._size[row]].tolist()

    # Inside

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

    def _forward(
        self, start: int, end: int, ids: np.ndarray, positions: np.ndarray, *, one_token: bool = False
    ) -> Tensor:
        where, filled = self._device(positions), int(positions.max()) + 1
        mask = self._cache.begin(start, end, where, filled, one_token=one_token)
        extra = {"slots": self._cache} if self._shares else {}
        return run_backbone(self._backbone, self._device(ids), positions=where, mask=mask, cache=self._cache, **extra)

    @contextlib.contextmanager
    def _pass(self) -> Iterator[None]:
        with self.policy.inference() as causal, shared_attention(causal.config):
            yield

    def _share(self, start: int, prompts: list[tuple[int, ...]]) -> None:
        """Settle which beginning all rows have in common, and cache it."""
        shortest = min(map(len, prompts)) - 1
        if start:
            common = min(common_prefix([self._prefix, *prompts]), shortest)
            if common < self._cache.shared:
                self._cache.narrow(common)
        else:
            common = min(common_prefix(prompts), shortest)
            common = common if len(prompts) > 1 and self._shares and common >= SHORTEST_PREFIX else 0
            self._cache.share(0, 0)
            if common:
                self._forward(0, 1, np.array([prompts[0][:common]]), np.arange(common)[None])
                self._cache.share(0, common)
        self._prefix = prompts[0][: self._cache.shared]

    def _prefill(self, start: int, prompts: list[tuple[int, ...]]) -> None:
        """Cache all but the last token of each prompt in slots ``start ..``."""
        self._share(start, prompts)
        distinct = list(dict.fromkeys(prompts))
        owner = {prompt: i for i, prompt in enumerate(distinct)}
        shared, longest = self._cache.shared, max(map(len, distinct)) - 1
        if longest == shared:
            return
        tokens = np.zeros((len(distinct), longest - shared), dtype=np.int64)
        for row, prompt in zip(tokens, distinct, strict=True):
            row[: len(prompt) - 1 - shared] = prompt[shared:-1]
        self._chunks(start, tokens, np.full(len(distinct), shared))
        sources = torch.tensor([start + owner[prompt] for prompt in prompts], device=self.policy.device)
        self._cache.copy_rows(sources, start, longest)

    def _chunks(self, start: int, tokens: np.ndarray, first: np.ndarray) -> None:
        """Feed padded rows (r, w) at positions ``first + 0 .. w − 1``, at most FEED_TOKENS in a pass."""
        width = tokens.shape[1]
        positions = first[:, None] + np.arange(width)[None]
        rows = max(FEED_TOKENS // width, 1)
        for a in range(0, len(tokens), rows):
            b = min(a + rows, len(tokens))
            self._forward(start + a, start + b, tokens[a:b], positions[a:b])

    def _settle(self) -> None:
        """Put waiting rows before ended ones, and both before rows that were closed."""
        edge = self._decoding
        for state in (WAITING, ENDED):
            edge = self._partition(edge, self._open, state)
        self._open = edge

    def _partition(self, start: int, end: int, state: int) -> int:
        """Swap rows of slots ``start .. end − 1`` so that those in ``state`` come first; returns where they end."""
        wanted = self._state[self._row_at[start:end]] == state
        count = int(wanted.sum())
        left = start + np.flatnonzero(~wanted[:count])
        right = start + count + np.flatnonzero(wanted[count:])
        if not len(left):
            return start + count
        a, b = self._row_at[left], self._row_at[right]
        filled = int(max(self._cached[a].max(), self._cached[b].max()))
        self._cache.swap(self._device(left), self._device(right), filled)
        self._row_at[left], self._row_at[right] = b, a
        self._slot_of[b], self._slot_of[a] = left, right
        return start + count

    def _feed(self) -> None:
        """Cache what waiting rows have not cached yet, but for their last token, and let them decode."""
        if not (self._state == WAITING).any():
            return
        self._settle()
        start, end = self._decoding, self._decoding + int((self._state == WAITING).sum())
        rows = self._row_at[start:end]
        first, todo = self._cached[rows], self._size[rows] - 1 - self._cached[rows]
        width = int(todo.max())
        if width:
            self._reserve(int(first.max()) + width + 1)
            columns = first[:, None] + np.arange(width)[None]
            self._chunks(start, self._tokens[rows[:, None], columns], first)
            self._cached[rows] += todo
        slots = torch.arange(start, end, device=self.policy.device)
        self._cache.set_filled(slots, self._device(self._cached[rows]))
        self._state[rows] = DECODING
        self._decoding = end

    def _logits(self, start: int, end: int) -> Tensor:
        """Float32 logits (rows, V) of the next token in slots ``start .. end − 1``."""
        rows = self._row_at[start:end]
        at = self._cached[rows]
        hidden = self._forward(start, end, self._tokens[rows, at][:, None], at[:, None], one_token=True)
        return self._head(hidden[:, -1]).float()

    def _step(self) -> list[int]:
        """One token in each decoding row; returns the rows whose turn ended."""
        rows = self._row_at[: self._decoding].copy()
        logits = self._logits(0, self._decoding)
        ids, logprobs = self._choose(rows, logits)
        size = self._size[rows]
        self._reserve(int(size.max()) + 2)
        self._tokens[rows, size] = ids
        self._logprobs[rows, size] = logprobs
        self._size[rows] += 1
        self._cached[rows] += 1
        self._drawn[rows] += 1
        stopped = self._ends[ids]
        if self._may_stop is not None:
            for i in np.flatnonzero(self._may_stop[ids] & ~stopped):
                stopped[i] = self._holds_stop_string(rows[i])
        ended = stopped | (size + 1 >= self._limit[rows])
        if not ended.any():
            return []
        for i in np.flatnonzero(ended).tolist():
            by = int(ids[i]) if self._ends[ids[i]] else None
            self._reasons[int(rows[i])] = ("stop" if stopped[i] else "length", by)
        self._state[rows[ended]] = ENDED
        self._decoding = self._partition(0, self._decoding, DECODING)
        return rows[ended].tolist()

    def _choose(self, rows: np.ndarray, logits: Tensor) -> tuple[np.ndarray, np.ndarray]:
        draws = self._device(uniforms(self._seeds[rows], self._drawn[rows]))
        ids, logprobs = self.sampling.choose(logits, draws)
        if self.forced:
            for i, row in enumerate(rows.tolist()):
                if row in self.forced:
                    ids[i] = self.forced.pop(row)
                    logprobs[i] = (logits[i] / self.sampling.temperature).log_softmax(dim=-1)[ids[i]]
        return ids.cpu().numpy(), logprobs.cpu().numpy()

    def _holds_stop_string(self, row: int) -> bool:
        """Whether the row's turn, which had none before its last token, now holds a stop string."""
        size = int(self._size[row])
        window = max(len(s.encode()) for s in self.stop_strings) + 1  # a token is a byte at least
        text = self.policy.chat.decode(self._tokens[row, max(int(self._start[row]), size - window) : size].tolist())
        return any(stop in text for stop in self.stop_strings)
