"""BM25 search over passages, and the search tool built on it.

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
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import bm25s
import numpy as np
from bm25s.stopwords import STOPWORDS_EN

from agentr1_lite.jsonl import DataError, Problem, read_numbered, read_rows, write_rows
from agentr1_lite.mdp import Task
from agentr1_lite.tools import EMPTY_RESULT, Tool, ToolResult

WORD = re.compile(r"\w+")
STOP_WORDS = frozenset(STOPWORDS_EN) | {"s"}  # "s" is what stays of 's
CACHED_QUERIES = 65_536
CACHED_QUERY_CHARS = 1_000


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
        return self.title, self.text


def as_passage(value: Passage | Mapping[str, Any] | str, place: int) -> Passage:
    """A passage from a Passage, a ``{"title", "text"}`` row or a plain text."""
    if isinstance(value, str):
        value = Passage("", value)
    elif isinstance(value, Mapping):
        fields = {name: "" if value.get(name) is None else value[name] for name in ("title", "text", "id")}
        value = Passage(fields["title"], fields["text"], id=str(fields["id"]))
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


def words(text: str) -> list[str]:
    """The words BM25 counts: case-folded, compatibility forms unified, stop words dropped."""
    return [w for w in WORD.findall(unicodedata.normalize("NFKC", text).casefold()) if w not in STOP_WORDS]


class BM25:
    """An index over passages; equal (title, text) pairs are one passage.

    Args:
        passages: Passages, rows with ``title`` and ``text``, or plain texts.
        k1: how fast repeated words stop counting, > 0.
        b: how much long passages are discounted, in [0, 1].
    """

    def __init__(self, passages: Iterable[Passage | Mapping[str, Any] | str] = (), *, k1: float = 1.5, b: float = 0.75):
        if not k1 > 0 or not 0 <= b <= 1:
            raise ValueError(f"BM25: k1 {k1} must be above 0 and b {b} lie in [0, 1]")
        self.passages = unique_passages(passages)
        self.k1, self.b = k1, b
        tokens = [words(f"{p.title}\n{p.text}") for p in self.passages]
        self.index = None
        if any(tokens):
            self.index = bm25s.BM25(k1=k1, b=b, method="lucene", backend="numpy")
            self.index.index(tokens, show_progress=False)
        self._cached = lru_cache(maxsize=CACHED_QUERIES)(self._search)

    def __len__(self) -> int:
        return len(self.passages)

    def __deepcopy__(self, memo: dict[int, Any]) -> BM25:
        return self  # nothing in it changes after construction, so episodes share it

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.passages, self.k1, self.b)

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
        """Write ``passages.jsonl`` and ``bm25.jsonl`` (the two constants); the index is rebuilt on loading."""
        write_rows(
            Path(folder) / "passages.jsonl", ({"id": p.id, "title": p.title, "text": p.text} for p in self.passages)
        )
        write_rows(Path(folder) / "bm25.jsonl", [{"k1": self.k1, "b": self.b}])

    @classmethod
    def load(cls, path: str | Path) -> BM25:
        """An index from a folder written by :meth:`save`, or from one JSON Lines file of passages.

        Raises :class:`DataError` at the first broken row: a corpus that silently
        lost a passage would make questions unanswerable.
        """
        folder = Path(path)
        constants: dict[str, float] = {}
        if folder.is_dir():
            rows, problems = read_rows(folder / "bm25.jsonl")
            if problems or len(rows) != 1 or set(rows[0]) != {"k1", "b"}:
                raise DataError(f"{folder / 'bm25.jsonl'}: expected one row with k1 and b; save the index again")
            constants, path = rows[0], folder / "passages.jsonl"
        passages, problems = read_passages(path)
        if problems:
            raise DataError(f"{problems[0]}; repair the row or load the others with read_passages")
        return cls(passages, **constants)


def _rebuild(passages: list[Passage], k1: float, b: float) -> BM25:
    return BM25(passages, k1=k1, b=b)


def read_passages(path: str | Path) -> tuple[list[Passage], list[Problem]]:
    """Passages of a JSON Lines file or JSON array with ``title`` and ``text``, and the rows that are none."""
    rows, problems = read_numbered(path)
    passages = []
    for line, row in rows:
        try:
            if not row.get("text"):
                raise DataError("has no text")
            passages.append(as_passage(row, line))
        except DataError as error:
            problems.append(Problem(str(path), line, str(error)))
    return passages, sorted(problems, key=lambda problem: problem.line)


def render_passages(passages: Sequence[Passage]) -> str:
    """One passage a line, ``title: text``."""
    return "\n".join(f"{p.title}: {p.text}" if p.title else p.text for p in passages)


class SearchTool(Tool):
    """Search the corpus; with ``failing`` or ``noisy`` above 0 a stochastic environment ``P_E``.

    All draws come from the episode's generator, so an episode is a function of
    its seed. ``result.info`` holds the ``titles`` and ``ids`` that were shown.
    """

    name = "search"
    description = "Search the corpus for passages about a topic."
    parameters = {
        "type": "object",
        "properties": {"query": {"type": "string", "description": "What to look for."}},
        "required": ["query"],
    }
    inline = True  # microseconds a call, and in the order the calls were written
    shared = ("index", "rng")  # reset gives every episode a generator of its own

    def __init__(
        self,
        index: BM25,
        k: int = 2,
        failing: float = 0.0,
        noisy: float = 0.0,
        render: Callable[[Sequence[Passage]], str] = render_passages,
    ):
        for label, share in (("failing", failing), ("noisy", noisy)):
            if not 0 <= share <= 1:
                raise ValueError(f"search tool: {label} {share} is a share of calls; give a number from 0 to 1")
        if k < 1:
            raise ValueError(f"search tool: k {k} must be at least 1 passage")
        self.index, self.k, self.failing, self.noisy, self.render = index, k, failing, noisy, render
        self.stateful = bool(failing or noisy)
        self.rng = random.Random(0)

    def reset(self, task: Task, rng: random.Random) -> None:
        self.rng = random.Random(rng.getrandbits(64))

    def execute(self, args: dict[str, Any]) -> ToolResult:
        """The best passages as text, ``No results.`` where there are none."""
        if self.failing and self.rng.random() < self.failing:
            return ToolResult("Error: the search failed; try again.", False, flags=("failed",), info={"titles": []})
        found = self.index.search(args.get("query"), self.k)
        shown = [self._noise(passage) for passage in found] if self.noisy else found
        info = {"titles": [p.title for p in shown], "ids": [p.id for p in shown]}
        flags = ("noisy",) if [p.key for p in shown] != [p.key for p in found] else ()
        return ToolResult(self.render(shown) if shown else EMPTY_RESULT, flags=flags, info=info)

    def _noise(self, passage: Passage) -> Passage:
        """The passage, or with probability ``noisy`` any passage of the corpus in its place."""
        return self.rng.choice(self.index.passages) if self.rng.random() < self.noisy else passage


def make_search_tool(
    index: BM25,
    k: int = 2,
    failing: float = 0.0,
    noisy: float = 0.0,
    render: Callable[[Sequence[Passage]], str] = render_passages,
) -> SearchTool:
    """The search tool over ``index``.

    Args:
        k: passages a call shows at most.
        failing: share of calls that end in an error instead of passages.
        noisy: share of shown passages that are replaced by one of the corpus at random.
        render: passages to the text the policy reads.
    """
    return SearchTool(index, k, failing, noisy, render)
