"""Retrievers by name (BM25 in process, dense vectors, a server over HTTP), and how much of the evidence one finds.

All have ``search(query, k)``, ``search_batch(queries, k)`` and ``passages``, and stand behind the search tool of
``retrieval.py``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from agentr1_lite.dense import ENCODER, Dense, Encode
from agentr1_lite.index_files import saved_folder
from agentr1_lite.jsonl import DataError
from agentr1_lite.mdp import Task
from agentr1_lite.retrieval import BM25, Passage, RetrievalError, load_passages
from agentr1_lite.scoring import evidence_recall
from agentr1_lite.search_server import HTTPRetriever

__all__ = ["RETRIEVERS", "Dense", "HTTPRetriever", "RetrievalError", "Retriever", "make_retriever", "recall_at_k"]


class Retriever(Protocol):
    """What a search tool needs. ``passages`` is empty where the corpus lies on a server."""

    passages: list[Passage]

    def search(self, query: str | None, k: int = 5) -> list[Passage]:
        """The at most ``k`` best passages, the best first."""

    def search_batch(self, queries: Sequence[str | None], k: int = 5) -> list[list[Passage]]:
        """:meth:`search` for each query."""


RETRIEVERS: dict[str, Callable[..., Retriever]] = {}


def register(name: str) -> Callable[[Callable[..., Retriever]], Callable[..., Retriever]]:
    """Register a builder under ``name``; its keywords are what :func:`make_retriever` takes for it."""

    def add(build: Callable[..., Retriever]) -> Callable[..., Retriever]:
        RETRIEVERS[name] = build
        return build

    return add


def make_retriever(kind: str = "bm25", **options: Any) -> Retriever:
    """A retriever by name, over ``passages``, a passages file or saved folder ``path``, or the server at ``url``.

    Options that are None count as not given. Raises :class:`DataError` on a name or an option nobody knows.
    """
    given = {name: value for name, value in options.items() if value is not None}
    check_options(kind, given)
    if "passages" in given and "path" in given:
        raise DataError(f"retriever {kind!r} got passages and a path; give one of them")
    return RETRIEVERS[kind](**given)


def check_options(kind: str, given: Iterable[str], names: Mapping[str, str] | None = None) -> None:
    """Raise :class:`DataError` on a retriever nobody knows, and on an option that it does not have or that is missing.

    ``names`` says what the caller's user calls the options, where not by their own names; only those are spoken of.
    """
    if not isinstance(kind, str) or kind not in RETRIEVERS:
        raise DataError(f"retriever {kind!r} is unknown; choose one of {', '.join(RETRIEVERS)}")
    takes = inspect.signature(RETRIEVERS[kind]).parameters
    names = dict(zip(takes, takes, strict=True)) if names is None else names
    if wrong := [names.get(name, name) for name in given if name not in takes]:
        known = ", ".join(names[name] for name in takes if name in names)
        raise DataError(f"retriever {kind!r} has no option {wrong[0]!r}; it takes {known}")
    if missing := [name for name, p in takes.items() if p.default is p.empty and name not in given]:
        raise DataError(f"retriever {kind!r} needs {names.get(missing[0], missing[0])!r}; give it")


@register("bm25")
def make_bm25(passages: Iterable[Any] = (), path: str | Path | None = None, k1: float = 1.5, b: float = 0.75) -> BM25:
    """BM25 in process; a saved folder keeps the constants it was saved with."""
    if path is not None and saved_folder(path):
        return BM25.load(path)
    return BM25(passages if path is None else load_passages(path), k1=k1, b=b)


@register("dense")
def make_dense(
    passages: Iterable[Any] = (),
    path: str | Path | None = None,
    encoder: str | Encode | None = None,
    instruction: str | None = None,
    device: str | None = None,
) -> Dense:
    """Dense vectors; a saved folder is loaded, a passages file encoded."""
    if path is not None and saved_folder(path):
        return Dense.load(path, encoder, device)
    passages = passages if path is None else load_passages(path)
    return Dense(passages, encoder=encoder or ENCODER, instruction=instruction, device=device)


register("http")(HTTPRetriever)


def recall_at_k(retriever: Retriever, tasks: Iterable[Task], ks: Sequence[int] = (1, 2, 5, 10)) -> dict[int, float]:
    """The mean over questions of |gold titles ∩ titles of the first k| / |gold titles|, the question as the query.

    Gold titles are ``task.evidence``; questions without are left out. One search can rarely show all hops, so this is
    what naive RAG reads and a trained agent must exceed. Raises ``ValueError`` where no question has evidence.
    """
    tasks = [task for task in tasks if task.evidence]
    if not tasks or not ks or min(ks) < 1:
        raise ValueError(f"recall_at_k: {len(tasks)} questions with evidence, ks {list(ks)}; give some, each k from 1")
    found = retriever.search_batch([task.question for task in tasks], max(ks))
    totals = dict.fromkeys(ks, 0.0)
    for task, passages in zip(tasks, found, strict=True):
        for k in ks:
            totals[k] += evidence_recall(task.evidence, [p.title for p in passages[:k]])
    return {k: total / len(tasks) for k, total in totals.items()}
