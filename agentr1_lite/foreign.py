"""Text that must not become control tokens: encoding, spans and cuts by a tokenizer that cannot read them in a text."""

from __future__ import annotations

import json
import re
import secrets
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from tokenizers import Tokenizer

LARGE = 16_384  # characters: longer texts are not worth a place in a cache
_SECRET = secrets.token_hex(8)  # in the names that stand for control strings, so that no text can spell one


class Control(NamedTuple):
    """An added token; ``hard`` ones may frame a turn, ``alias`` stands for it in a text that is encoded."""

    id: int
    hard: bool
    text: str
    alias: str


Part = Control | str | bool  # a control token, text, or an edge: True where a span opens, False where one closes


class ForeignEncoder:
    """A tokenizer whose control tokens go by names that no text can spell.

    Everything else is the tokenizer's own: where it splits, strips and
    normalises, and where it puts a space before a word, so a text between control
    tokens gets the ids that it has in an ordinary render. Added tokens of white
    space alone (some tokenizers have them for runs of spaces) control nothing and
    keep their names.
    """

    def __init__(self, tokenizer: Any) -> None:
        special = dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
        hard = dict.fromkeys(special.items(), True)
        hard |= {(t.content, id): t.special for id, t in tokenizer.added_tokens_decoder.items() if t.content.strip()}
        self.controls = {
            # the outer characters decide which neighbours a token of `single_word` may have
            text: Control(id, is_hard or text in special, text, f"{text[0]}{_SECRET}{id:08x}{text[-1]}")
            for (text, id), is_hard in hard.items()
        }
        self._strips = {id: (t.lstrip, t.rstrip) for id, t in tokenizer.added_tokens_decoder.items()}
        alone = {t.content for t in tokenizer.added_tokens_decoder.values() if t.single_word}
        self.pattern = any_of(self.controls, alone)
        self.ids = {control.id for control in self.controls.values()}
        self._tokenizer, self._model = tokenizer, None
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if isinstance(backend, Tokenizer):
            state = self._renamed(json.loads(backend.to_str()))
            self._model = Tokenizer.from_str(json.dumps(state))
            found = {self._model.token_to_id(t["content"]): t["id"] for t in state["added_tokens"]}
            self._moved = {new: id for new, id in found.items() if new != id}
            self._words = state["model"]["type"] == "WordLevel"
            self._leads = self._model.encode("a", add_special_tokens=False).tokens != ["a"]

    def _renamed(self, state: dict[str, Any]) -> dict[str, Any]:
        names = {text: control.alias for text, control in self.controls.items()}
        plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        added = {t["content"]: t for t in state["added_tokens"]}
        for text, control in self.controls.items():  # a special token of the vocabulary need not be an added one
            added.setdefault(text, {"id": control.id, "content": text, "special": True, **plain})
        tokens = [{**t, "content": names.get(text, text)} for text, t in added.items()]
        model = state["model"]
        vocabulary = model["vocab"]
        if isinstance(vocabulary, list):
            model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocabulary]
        elif held := names.keys() & vocabulary.keys():
            model["vocab"] = {names.get(piece, piece): id for piece, id in vocabulary.items()}
            pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in model.get("merges", ())]
            if pairs:
                model["merges"] = [pair for pair in pairs if held.isdisjoint((*pair, "".join(pair)))]
            if "unk_token" in model:
                model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
        none = dict.fromkeys(("post_processor", "truncation", "padding"))
        return {**state, "added_tokens": tokens, "model": model, **none}

    def encode(self, parts: Iterable[Part], glued: bool = False) -> tuple[list[int], list[int]]:
        """Ids, and for each edge the token it stands before: none of a span is left out, none is cut.

        ``glued``: more text stood before; some tokenizers put a space before the first word of a text alone.
        """
        parts = list(parts)
        if self._model is None:
            return self._pieces(parts)
        if glued and self._leads and parts and isinstance(next((p for p in parts if p is not True), None), str):
            for letter in "\nx.1":
                ids, spans, edges = self._layout([letter, *parts])
                cut = bisect_right(spans, 1, key=lambda span: span[1])
                if spans[cut : cut + 1] and spans[cut][0] == 1:
                    return ids[cut:], [token - cut for token in _tokens_at(edges, spans)]
        ids, spans, edges = self._layout(parts)
        return ids, _tokens_at(edges, spans)

    def _layout(self, parts: list[Part]) -> tuple[list[int], list[tuple[int, int]], list[tuple[int, bool]]]:
        """Ids, the characters ``[start, end)`` that each covers, and the characters of the edges."""
        text, edges, places = "", [], []
        for index, part in enumerate(parts):
            if isinstance(part, bool):
                edges.append((len(text), part))
                continue
            word = valid(part) if isinstance(part, str) else part.alias
            if not isinstance(part, str):
                places.append((index, part.id, len(text), len(text) + len(word)))
            text += word
        ids, spans = self._encode(text)
        token, lost = 0, {}
        for index, id, start, end in places:
            while token < len(ids) and spans[token][1] < end:
                token += 1
            if token < len(ids) and ids[token] == id and spans[token][0] <= start:
                spans[token] = start, end  # without the spaces it swallowed
                token += 1
            else:  # its neighbours keep the tokenizer from reading a control token here, in an ordinary render too
                lost[index] = parts[index].text
        return self._layout([lost.get(i, part) for i, part in enumerate(parts)]) if lost else (ids, spans, edges)

    def _encode(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        if self._words and self.pattern.search(text):  # where a word is a piece, a control string goes letter by letter
            pieces = [x for part in split(self.pattern, text) for x in (part if part in self.controls else [part])]
            ends = list(accumulate(map(len, pieces)))
            found = [
                (self._model.encode(x, add_special_tokens=False), end - len(x))
                for x, end in zip(pieces, ends, strict=True)
            ]
            spans = [(start + at, end + at) for encoding, at in found for start, end in encoding.offsets]
            return [self._moved.get(id, id) for encoding, _ in found for id in encoding.ids], spans
        encoding = self._model.encode(text, add_special_tokens=False)
        return [self._moved.get(id, id) for id in encoding.ids], encoding.offsets

    def _pieces(self, parts: list[Part]) -> tuple[list[int], list[int]]:
        """As ``encode``, for a tokenizer written in Python, which does not say where its tokens stand."""
        ids, edges, text, strip = [], [], "", False
        for part in [*parts, None]:
            if isinstance(part, str):
                text += part
            elif isinstance(part, bool):
                edges.append(len(ids) + len(self._plain(text.lstrip() if strip else text)))
            else:
                left, right = (False, False) if part is None else self._strips.get(part.id, (False, False))
                text = text.lstrip() if strip else text
                ids += self._plain(text.rstrip() if left else text) + ([] if part is None else [part.id])
                text, strip = "", right
        return ids, [min(edge, len(ids)) for edge in edges]

    def _plain(self, text: str) -> list[int]:
        ids = self._tokenizer.encode(valid(text), add_special_tokens=False, split_special_tokens=True)
        return [id for id in ids if id not in self.ids]

    def head(self, text: str, limit: int) -> tuple[int, str]:
        """``(min(tokens, limit + 1), text of the first limit tokens)``; reads no more of the text than it must."""
        window = 16 * limit + 64
        while True:
            ids, spans = self._layout([text[:window]])[:2] if self._model else (self._plain(text[:window]), [])
            if len(ids) > limit or window >= len(text):
                break
            window *= 2
        if len(ids) <= limit:
            return len(ids), text
        if spans:
            return limit + 1, text[: spans[limit][0]]  # a character whose bytes are parted goes as a whole
        kept = text[:window]
        while kept and len(self._plain(kept)) > limit:
            kept = kept[: len(kept) * 9 // 10]
        return limit + 1, kept


def _tokens_at(edges: Sequence[tuple[int, bool]], spans: Sequence[tuple[int, int]]) -> list[int]:
    """First token that reaches beyond an opening edge, or one past the last that starts before a closing one."""
    return [
        bisect_right(spans, char, key=lambda span: span[1])
        if opens
        else bisect_left(spans, char, key=lambda span: span[0])
        for char, opens in edges
    ]


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
    return encoder_of(tokenizer).encode([text])[0]


class Marks:
    """Letters that stand for strings a template must not see; ``values`` maps each to (string, trusted)."""

    pattern = f"Zq{_SECRET}x[a-j]+Y"
    anchor = f"Zq{_SECRET}anchor"

    def __init__(self) -> None:
        self.values: dict[str, tuple[str, bool]] = {}

    def put(self, text: str, trusted: bool = False) -> str:
        mark = self.pattern.replace("[a-j]+", "".join("abcdefghij"[int(digit)] for digit in str(len(self.values))))
        self.values[mark] = text, trusted
        return mark

    def mask(self, pattern: re.Pattern[str], text: str) -> str:
        return pattern.sub(lambda match: self.put(match[0]), text)

    def fill(self, text: str) -> str:
        return re.sub(self.pattern, lambda match: self.values.get(match[0], (match[0],))[0], text)


def any_of(strings: Iterable[str], alone: Iterable[str] = ()) -> re.Pattern[str]:
    """Leftmost-longest match of any string, those ``alone`` only as whole words; of none, if there are none."""
    whole = {re.escape(s): rf"(?<!\w){re.escape(s)}(?!\w)" for s in alone}
    escaped = [re.escape(s) for s in sorted(strings, key=lambda s: (-len(s), s))]
    return re.compile("|".join(whole.get(s, s) for s in escaped) or r"(?!)")


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
