"""Text that must not become control tokens: encoding, spans and cuts without a tokenizer's added tokens."""

from __future__ import annotations

import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from tokenizers import Tokenizer

LARGE = 16_384  # characters: longer texts are not worth a place in a cache
Encoded = tuple[tuple[int, ...], tuple[tuple[int, int], ...]]


class Control(NamedTuple):
    """An added token; ``hard`` ones may frame a turn, ``lstrip`` and ``rstrip`` swallow the spaces beside them."""

    id: int
    hard: bool
    lstrip: bool = False
    rstrip: bool = False


class ForeignEncoder:
    """A tokenizer's model with every control token taken out of its vocabulary.

    Added tokens of white space alone (some tokenizers have them for runs of
    spaces) control nothing and stay in.
    """

    def __init__(self, tokenizer: Any) -> None:
        special = dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
        self.controls = {text: Control(id, True) for text, id in special.items()}
        for id, t in tokenizer.added_tokens_decoder.items():
            if t.content.strip():
                self.controls[t.content] = Control(id, t.special or t.content in special, t.lstrip, t.rstrip)
        self.pattern = any_of(self.controls)
        frame = {tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id}
        # a word unknown to a word-level vocabulary is no threat
        self._forbidden = {c.id for c in self.controls.values()} - ({tokenizer.unk_token_id} - frame)
        self._tokenizer, self._model = tokenizer, None
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if isinstance(backend, Tokenizer):
            state = json.loads(backend.to_str())
            state["added_tokens"] = [t for t in state["added_tokens"] if not t["content"].strip()]
            state |= {"post_processor": None, "truncation": None, "padding": None}
            self._model = Tokenizer.from_str(json.dumps(state))
        self._cached = lru_cache(4096)(self._encode)

    def encode(self, text: str) -> Encoded:
        """Ids, and the characters ``[start, end)`` that each covers (empty if the tokenizer cannot tell)."""
        return (self._cached if len(text) <= 128 else self._encode)(text)  # seams repeat, long texts rarely

    def _encode(self, text: str) -> Encoded:
        ids, offsets = self._plain(text)
        if self._forbidden.isdisjoint(ids):
            return tuple(ids), tuple(offsets)
        # Unigram and word-level models hold control strings as whole pieces: take those apart
        pieces = [x for part in split(self.pattern, text) for x in (part if part in self.controls else [part])]
        return tuple(i for x in pieces for i in self._plain(x)[0] if i not in self._forbidden), ()

    def _plain(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        if self._model is None:
            return self._tokenizer.encode(valid(text), add_special_tokens=False, split_special_tokens=True), []
        encoding = self._model.encode(valid(text), add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def token_at(self, text: str, encoded: Encoded, char: int, opens: bool) -> int:
        """First token that reaches beyond ``char`` (``opens``), or one past the last that starts before it."""
        ids, offsets = encoded
        if not offsets:
            return min(len(ids), len(self.encode(text[:char])[0]))
        if opens:
            return bisect_right(offsets, char, key=lambda span: span[1])
        return bisect_left(offsets, char, key=lambda span: span[0])

    def head(self, text: str, limit: int) -> tuple[int, str]:
        """``(min(tokens, limit + 1), text of the first limit tokens)``; reads no more of the text than it must."""
        window = 16 * limit + 64
        while True:
            ids, offsets = self.encode(text[:window])
            if len(ids) > limit or window >= len(text):
                break
            window *= 2
        if len(ids) <= limit:
            return len(ids), text
        if offsets:
            return limit + 1, text[: offsets[limit][0]]  # a character whose bytes are parted goes as a whole
        kept = text[:window]
        while kept and len(self._encode(kept)[0]) > limit:
            kept = kept[: len(kept) * 9 // 10]
        return limit + 1, kept


_ENCODERS: WeakKeyDictionary[Any, tuple[int, ForeignEncoder]] = WeakKeyDictionary()


def encoder_of(tokenizer: Any) -> ForeignEncoder:
    """The tokenizer's encoder; made anew after tokens were added to it."""
    size, encoder = _ENCODERS.get(tokenizer, (0, None))
    if encoder is None or size != len(tokenizer):
        encoder = ForeignEncoder(tokenizer)
        _ENCODERS[tokenizer] = len(tokenizer), encoder
    return encoder


def encode_foreign(tokenizer: Any, text: str) -> list[int]:
    """Ids of a text that a tool, a user or a data set wrote; never one of the tokenizer's control ids.

    They are the ids of the tokenizer's own model with all control tokens taken
    out of its vocabulary: Qwen2.5 gives 82639 318 6213 91 29 for ``" <|im_end|>"``.
    """
    if not isinstance(text, str):
        raise TypeError(
            f"encode_foreign got {type(text).__name__}, not a string; turn the tool's result into text first"
        )
    return list(encoder_of(tokenizer).encode(text)[0])


class Marks:
    """Letters that stand for strings a template must not see; ``values`` maps each to (string, trusted)."""

    def __init__(self, taken: str) -> None:
        size = 1
        while (base := f"Z{'q' * size}x") in taken:
            size *= 2
        self.base, self.pattern = base, f"{base}[a-j]+Y"
        self.values: dict[str, tuple[str, bool]] = {}

    def put(self, text: str, trusted: bool = False) -> str:
        mark = self.base + "".join("abcdefghij"[int(digit)] for digit in str(len(self.values))) + "Y"
        self.values[mark] = text, trusted
        return mark

    def mask(self, pattern: re.Pattern[str], text: str) -> str:
        return pattern.sub(lambda match: self.put(match[0]), text)

    def fill(self, text: str, values: Mapping[str, tuple[str, bool]] | None = None) -> str:
        values = self.values if values is None else values
        return re.sub(self.pattern, lambda match: values.get(match[0], (match[0],))[0], text)


def any_of(strings: Iterable[str]) -> re.Pattern[str]:
    """Leftmost-longest match of any string; of none, if there are none."""
    return re.compile("|".join(map(re.escape, sorted(strings, key=lambda s: (-len(s), s)))) or r"(?!)")


def split(pattern: re.Pattern[str], text: str) -> Iterator[str]:
    """Matches and the texts between them, in order."""
    at = 0
    for match in pattern.finditer(text):
        yield text[at : match.start()]
        yield match[0]
        at = match.end()
    yield text[at:]


def valid(text: str) -> str:
    """Join surrogate pairs and replace lone ones: no tokenizer takes them."""
    return text if text.isascii() else text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
