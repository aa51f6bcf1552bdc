"""Passages, BM25 search over them, indexes on disk, and the search tool.

Other retrievers with the same `search` are in ``retrievers.py``.

Robertson and Zaragoza (2009), in Lucene's form, through ``bm25s``: for a query
q, a passage d of |d| words and a corpus of N passages,

    score(q, d) = Σ_{w ∈ q} idf(w) · tf(w, d) / (tf(w, d) + k1 · (1 − b + b · |d| / mean |d|))
    idf(w)      = ln(1 + (N − df(w) + ½) / (df(w) + ½))

The 1 inside the logarithm keeps a word that stands in half of the passages from
counting nothing, as it does in Okapi's idf.
"""

from __future__ import annotations

import random
import re
import threading
import unicodedata
import warnings
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import bm25s
import numpy as np
from bm25s.stopwords import STOPWORDS_EN
from bm25s.tokenization import Tokenized

from agentr1_lite.index_files import as_path, read_index, saved_folder, write_index
from agentr1_lite.jsonl import DataError, Problem, read_numbered
from agentr1_lite.mdp import Task
from agentr1_lite.scoring import is_missing, number_text, title_key
from agentr1_lite.tools import EMPTY_RESULT, Tool, ToolResult

WORD = re.compile(r"\w+")
HAN = "\u3005\u3007\u3400-\u4dbf\u4e00-\u9fff\U00020000-\U0003ffff"  # each character is a word or a part of one
# Scripts that put no space between words, or as Korean write what belongs to a word at its end: Han, kana, Bopomofo,
# Hangul, Thai, Lao, Burmese and Khmer with their marks
UNSPACED = re.compile(
    f"[{HAN}\u3041-\u3096\u309d-\u30fa\u30fc-\u312f\u31a0-\u31bf\u31f0-\u31ff\uac00-\ud7a3"
    "\u0e01-\u0e4e\u0e50-\u0e59\u0e80-\u0eff\u1000-\u1049\u1050-\u109f\ua9e0-\ua9fe\uaa60-\uaa7f\u1780-\u17d3\u17e0-\u17e9]+"
)
MIXED = 0.2  # the share of a title's or text's characters in them from which it is split
HAN_ONE = re.compile(f"[{HAN}]")
SEVERAL_QUOTED = re.compile(r'"(?!\s)[^"]+(?<!\s)"\W(?:.*\W)?"(?!\s)[^"]+(?<!\s)"')  # "Love" and "Hate"
STOP_WORDS = frozenset(STOPWORDS_EN) | {"s"}  # "s" is what stays of 's
CACHED_QUERIES = 65_536
CACHED_QUERY_CHARS = 1_000
CACHED_ANSWERS = 16_384  # each may hold passages of its own


@dataclass(frozen=True)
class Passage:
    """A piece of text that search can find; ``score`` is set on what a search returns."""

    title: str
    text: str
    score: float = 0.0
    id: str = ""

    @property
    def key(self) -> tuple[str, str]:
        """What makes a passage one: several texts may share a title, and each may be evidence."""
        return title_key(self.title), self.text


def unquoted(title: str) -> str:
    """A title without the pair of quotes that encloses the whole of it; those inside it are its own.

    Corpora that come from a table also double the quotes inside or put a backslash before them.
    """
    inner = title[1:-1]
    if len(title) < 2 or title[0] != '"' or title[-1] != '"':
        return title
    for mark in ('\\"', '""'):
        if mark in inner and '"' not in inner.replace(mark, ""):
            return inner.replace(mark, '"')
    return title if SEVERAL_QUOTED.fullmatch(title) else inner


def split_contents(contents: str, title: str = "") -> tuple[str, str]:
    """Title and text of ``contents``, where Search-R1 and KILT corpora keep ``"title"``, a line break and the text."""
    first, _, rest = contents.partition("\n")
    first = first.strip()
    head = unquoted(first)
    if title:  # which may stand at the head of the text too
        return (title, rest) if rest and title_key(title) in (title_key(head), title_key(first)) else (title, contents)
    return (head, rest) if rest.strip() or "\n" in contents and head != first else (title, contents)


def as_passage(value: Passage | Mapping[str, Any] | str, place: int) -> Passage:
    """A passage from a Passage, a row with ``title`` and ``text`` or with ``contents``, or a plain text."""
    if isinstance(value, str):
        value = Passage("", value)
    elif isinstance(value, Mapping):
        title, text, identity = ("" if is_missing(value.get(n)) else value[n] for n in ("title", "text", "id"))
        if not text and isinstance(value.get("contents"), str):
            title, text = split_contents(value["contents"], title)
        value = Passage(title, text, id=number_text(identity) if isinstance(identity, float) else str(identity))
    if not isinstance(value, Passage) or not isinstance(value.title, str) or not isinstance(value.text, str):
        raise DataError(f"passage {place}: expected a title and a text, both strings; found {str(value)[:80]!r}")
    return value


def unique_passages(passages: Iterable[Passage | Mapping[str, Any] | str]) -> list[Passage]:
    """Passages in order, the first of each (title, text), each with an id."""
    found: dict[tuple[str, str], Passage] = {}
    for place, value in enumerate(passages):
        passage = as_passage(value, place)
        found.setdefault(passage.key, passage)
    return [replace(p, score=0.0, id=p.id or str(i)) for i, p in enumerate(found.values())]


def words(text: str, share: float = 0.0) -> list[str]:
    """The words BM25 counts: case-folded, compatibility forms unified, stop words dropped.

    A text of stop words alone, such as the name "The The", gives them and itself as one word. Scripts without spaces
    give each pair of neighbouring characters, as in Lucene, and Han each character too, where at least ``share`` of the
    text is in them: names in brackets do not make an English passage longer. A query, of which any share will do, gives
    them as they stand too.
    """
    text = unicodedata.normalize("NFKC", text).casefold()
    found, runs = WORD.findall(text), [] if text.isascii() else UNSPACED.findall(text)
    pieces = []
    if runs and sum(map(len, runs)) >= share * len(text):
        whole, found = found, WORD.findall(UNSPACED.sub(" ", text))
        for run in runs:
            pieces += [run[i : i + 2] for i in range(len(run) - 1)] or [run]
            pieces += HAN_ONE.findall(run) if len(run) > 1 else []
        pieces += [] if share else [w for w in whole if len(w) > 2 and w not in found]
    kept = [w for w in found if w not in STOP_WORDS] + pieces
    return kept or list(dict.fromkeys([*found, " ".join(found)]) if found else [])


def _numbered_words(passages: Sequence[Passage]) -> Tokenized:
    """The words of each passage as numbers: a number per occurrence costs a tenth of a string's memory."""
    vocabulary: dict[str, int] = {}
    found = (words(p.title, MIXED) + words(p.text, MIXED) for p in passages)  # a title may be stop words alone
    ids = [[vocabulary.setdefault(w, len(vocabulary)) for w in bag] for bag in found]
    if empty := [p for p, bag in zip(passages, ids, strict=True) if not bag]:
        warnings.warn(
            f"BM25: {len(empty)} of {len(passages)} passages hold no word, so no query finds them; the first is "
            f"{empty[0].id!r} with the text {empty[0].text!r:.60}",
            stacklevel=3,
        )
    return Tokenized(ids=ids, vocab=vocabulary)


class BM25:
    """An index over passages; equal (title, text) pairs are one passage.

    Args:
        passages: Passages, rows with ``title`` and ``text``, or plain texts.
        k1: how fast repeated words stop counting, > 0.
        b: how much long passages are discounted, in [0, 1].
    """

    inline = True  # microseconds a call on small corpora, a millisecond on 100,000 passages

    def __init__(self, passages: Iterable[Passage | Mapping[str, Any] | str] = (), *, k1: float = 1.5, b: float = 0.75):
        if not k1 > 0 or not 0 <= b <= 1:
            raise ValueError(f"BM25: k1 {k1} must be above 0 and b {b} lie in [0, 1]")
        self.passages = unique_passages(passages)
        self.k1, self.b = k1, b
        self.index = None
        numbered = _numbered_words(self.passages)
        if numbered.vocab:
            self.index = bm25s.BM25(k1=k1, b=b, method="lucene", backend="numpy")
            self.index.index(numbered, show_progress=False)
        self._cached = lru_cache(maxsize=CACHED_QUERIES)(self._search)

    def __len__(self) -> int:
        return len(self.passages)

    def __deepcopy__(self, memo: dict[int, Any]) -> BM25:
        return self  # nothing in it changes after construction, so episodes share it

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_cached"}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)
        self._cached = lru_cache(maxsize=CACHED_QUERIES)(self._search)

    def has_words(self, query: str | None) -> bool:
        """Whether there is anything in ``query`` to look for."""
        return query is not None and bool(words(str(query)))

    def scores(self, query: str) -> np.ndarray:  # (N,)
        """The score of every passage for ``query``."""
        ids = self.index.get_tokens_ids(words(query)) if self.index is not None else []
        if not ids:
            return np.zeros(len(self.passages), dtype=np.float32)
        return self.index.get_scores_from_ids(ids)

    def _search(self, query: str, k: int) -> tuple[Passage, ...]:
        scores = self.scores(query)
        hits = np.flatnonzero(scores > 0)
        if len(hits) > k:  # sort only what can be among the first k, ties included
            hits = hits[scores[hits] >= np.partition(scores[hits], len(hits) - k)[len(hits) - k]]
        order = hits[np.argsort(-scores[hits], kind="stable")][:k]
        return tuple(replace(self.passages[i], score=float(scores[i])) for i in order)

    def search(self, query: str | None, k: int = 5) -> list[Passage]:
        """The at most ``k`` best passages that share a word with ``query``; ties in corpus order.

        Stop words, punctuation, unknown words, an empty corpus or ``k < 1`` find nothing.
        """
        query = "" if query is None else str(query)
        if k < 1:
            return []
        find = self._cached if len(query) <= CACHED_QUERY_CHARS else self._search
        return list(find(query, k))

    def search_batch(self, queries: Sequence[str | None], k: int = 5) -> list[list[Passage]]:
        """:meth:`search` for each query; repeated queries are looked up once."""
        return [self.search(query, k) for query in queries]

    def save(self, folder: str | Path) -> None:
        """Write passages, index and settings into ``folder``, whole or not at all; loading does not index again."""

        def write(part: Path) -> None:
            if self.index is not None:
                self.index.save(part, show_progress=False)

        write_index(folder, "bm25", self.passages, write, k1=self.k1, b=self.b)

    @classmethod
    def load(cls, path: str | Path) -> BM25:
        """An index from a folder written by :meth:`save`, or from one file of passages.

        Raises :class:`DataError` at the first broken row: a corpus that silently
        lost a passage would make questions unanswerable.
        """
        folder = saved_folder(path)
        if folder is None:
            return cls(load_passages(path))
        settings, rows = read_index(folder, "bm25", "k1", "b")
        index = None
        if "params.index.json" in settings["files"]:
            try:
                index = bm25s.BM25.load(folder, show_progress=False)
            except Exception as error:  # of numpy, json and the library's own, as versions differ
                raise DataError(f"{folder}: bm25s cannot load the index ({error}); save it again") from error
        found = cls.__new__(cls)
        passages = [as_passage(row, place) for place, row in enumerate(rows)]
        found.__setstate__({"passages": passages, "k1": settings["k1"], "b": settings["b"], "index": index})
        return found


def load_passages(path: str | Path) -> list[Passage]:
    """The passages of a file; raises :class:`DataError` at the first row that is none."""
    passages, problems = read_passages(as_path(path, "path"))
    if problems:
        raise DataError(f"{problems[0]}; repair the row or load the others with read_passages")
    if not passages:
        raise DataError(f"{path}: holds no passages (0); give a file of rows with title and text")
    return passages


def read_passages(path: str | Path) -> tuple[list[Passage], list[Problem]]:
    """Passages of a data file (see :func:`as_passage`), and the rows that are none."""
    rows, problems = read_numbered(path)
    passages = []
    for line, row in rows:
        try:
            if not row.get("text") and not row.get("contents"):
                raise DataError("has no text")
            passages.append(as_passage(row, line))
        except DataError as error:
            problems.append(Problem(str(path), line, str(error)))
    return passages, sorted(problems, key=lambda problem: problem.line)


class RetrievalError(OSError):
    """A search that could not be answered; inside an episode it becomes a failed tool result."""


def one_line(error: object) -> str:
    """An error's text for the brackets of a sentence: one line, at most 200 characters."""
    return " ".join(str(error).split())[:200]


def is_count(value: object) -> bool:
    """Whether a setting is a whole number from 1, which True and 2.0 are not."""
    return isinstance(value, Integral) and not isinstance(value, bool) and value >= 1


class BatchRetriever(ABC):
    """A retriever that answers many queries at once; answers are kept by (query, k), the least recent dropped.

    Attributes:
        timeout: seconds the search tool gives a batch; None means the environment's ``tool_timeout``.
        at_once: queries of one call of :meth:`find`.
    """

    timeout: float | None = None
    at_once = 256

    def __init__(self, passages: list[Passage], cached: int = CACHED_ANSWERS):
        self.passages, self.cached = passages, cached
        self._answers: OrderedDict[tuple[str, int], list[Passage]] = OrderedDict()
        self._lock = threading.Lock()

    def __deepcopy__(self, memo: dict[int, Any]) -> BatchRetriever:
        return self  # nothing but the cache changes after construction, so episodes share it

    @abstractmethod
    def find(self, queries: list[str], k: int) -> list[list[Passage]]:
        """Answer distinct, non-empty queries."""

    def search(self, query: str | None, k: int = 5) -> list[Passage]:
        """The at most ``k`` best passages; an empty query or ``k < 1`` finds nothing."""
        return self.search_batch([query], k)[0]

    def search_batch(self, queries: Sequence[str | None], k: int = 5) -> list[list[Passage]]:
        """:meth:`search` for each query; only those not asked before reach :meth:`find`, each once."""
        texts = ["" if query is None else str(query).strip() for query in queries]
        wanted = list(dict.fromkeys(text for text in texts if text)) if k > 0 else []
        with self._lock:
            known = {text: self._answers[text, k] for text in wanted if (text, k) in self._answers}
        missing = [text for text in wanted if text not in known]
        for start in range(0, len(missing), self.at_once):
            part = missing[start : start + self.at_once]
            known |= zip(part, self.find(part, k), strict=True)
        with self._lock:
            for text in wanted:
                self._answers[text, k] = known[text]
                self._answers.move_to_end((text, k))
            while len(self._answers) > self.cached:
                self._answers.popitem(last=False)
        return [list(known.get(text, ())) for text in texts]


def render_passages(passages: Sequence[Passage]) -> str:
    """One passage a line, ``title: text``."""
    return "\n".join(f"{p.title}: {p.text}" if p.title else p.text for p in passages)


FAILED = ToolResult("Error: the search failed; try again.", False, flags=("failed",), info={"titles": []})


class SearchTool(Tool):
    """Search the corpus; with ``failing`` or ``noisy`` above 0 a stochastic environment ``P_E``.

    All draws come from the episode's generator, so an episode is a function of
    its seed. ``result.info`` holds the ``titles`` and ``ids`` that were shown;
    the flag ``no_words`` marks a query in which there was nothing to look for.
    An in-process index is searched in the caller's thread, any other with a
    deadline and with one batch for all calls of a turn.
    """

    name = "search"
    description = "Search the corpus for passages about a topic."
    parameters = {
        "type": "object",
        "properties": {"query": {"type": "string", "description": "What to look for."}},
        "required": ["query"],
    }
    shared = ("index", "rng")  # reset gives every episode a generator of its own

    def __init__(
        self,
        index: BM25 | BatchRetriever,
        k: int = 2,
        failing: float = 0.0,
        noisy: float = 0.0,
        render: Callable[[Sequence[Passage]], str] = render_passages,
    ):
        for label, share in (("failing", failing), ("noisy", noisy)):
            if not isinstance(share, Real) or not 0 <= share <= 1:
                raise ValueError(f"search tool: {label} {share!r} is a share of calls; give a number from 0 to 1")
        if not is_count(k):
            raise ValueError(f"search tool: k {k!r} must be a whole number of at least 1 passage")
        if noisy and not index.passages:
            raise ValueError(
                f"search tool: noisy {noisy} draws from the corpus, which is empty or not here; set it to 0"
            )
        self.index, self.k, self.failing, self.noisy, self.render = index, k, failing, noisy, render
        self.inline, self.timeout = getattr(index, "inline", False), getattr(index, "timeout", None)
        self.batched = not self.inline
        self.stateful = bool(failing or noisy)
        self.rng = random.Random(0)

    def reset(self, task: Task, rng: random.Random) -> None:
        self.rng = random.Random(rng.getrandbits(64))

    def execute(self, args: dict[str, Any]) -> ToolResult:
        """The best passages as text, ``No results.`` where there are none."""
        return self.batch_execute([args])[0]

    def batch_execute(self, batch: Sequence[dict[str, Any]]) -> list[ToolResult]:
        """:meth:`execute` for several calls with one batch of queries."""
        broken = [bool(self.failing) and self.rng.random() < self.failing for _ in batch]
        queries = [args.get("query") for args, fails in zip(batch, broken, strict=True) if not fails]
        found = iter(zip(queries, self.index.search_batch(queries, self.k), strict=True))
        return [FAILED if fails else self._show(*next(found)) for fails in broken]

    def _show(self, query: Any, found: list[Passage]) -> ToolResult:
        shown = [self._noise(passage) for passage in found] if self.noisy else found
        info = {"titles": [p.title for p in shown], "ids": [p.id for p in shown]}
        flags = ("noisy",) if [p.key for p in shown] != [p.key for p in found] else ()
        if not found and not getattr(self.index, "has_words", bool)(query):
            flags = ("no_words",)  # nothing was looked for
        return ToolResult(self.render(shown) if shown else EMPTY_RESULT, flags=flags, info=info)

    def _noise(self, passage: Passage) -> Passage:
        """The passage, or with probability ``noisy`` any passage of the corpus in its place."""
        return self.rng.choice(self.index.passages) if self.rng.random() < self.noisy else passage


def make_search_tool(
    index: BM25 | BatchRetriever,
    k: int = 2,
    failing: float = 0.0,
    noisy: float = 0.0,
    render: Callable[[Sequence[Passage]], str] = render_passages,
) -> SearchTool:
    """The search tool over ``index``: a :class:`BM25` or any retriever of ``retrievers.py``.

    Args:
        k: passages a call shows at most.
        failing: share of calls that end in an error instead of passages.
        noisy: share of shown passages that are replaced by one of the corpus at random.
        render: passages to the text the policy reads.
    """
    return SearchTool(index, k, failing, noisy, render)
