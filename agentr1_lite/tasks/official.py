"""Rows of the official HotpotQA, 2WikiMultiHopQA and MuSiQue formats: read, checked, made into tasks.

A row becomes a :class:`Task`: the answer and its aliases are the golds, the
titles of the supporting passages the evidence. Each rule a row breaks is
listed with its line; rows without a sound question, answer and evidence are
left out, other rules are only noted.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from agentr1_lite.jsonl import Problem
from agentr1_lite.mdp import Task
from agentr1_lite.retrieval import Passage


class RuleBroken(ValueError):
    """The row cannot become a task; the message is the reason."""


@dataclass
class Example:
    """One row of any of the three formats; ``notes`` are rules it broke and survives."""

    id: str
    question: str
    golds: list[str]
    evidence: list[str]
    passages: list[Passage]
    kind: str = ""
    hops: int = 0
    info: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def task(self) -> Task:
        return Task(
            self.id, self.question, tuple(self.golds), self.kind, self.hops, tuple(self.evidence), dict(self.info)
        )


def _records(value: Any, names: tuple[str, ...], field_name: str) -> list[tuple[Any, ...]]:
    """Records as tuples in the order of ``names``.

    Official files hold lists of lists, MuSiQue lists of objects, the hub
    objects of lists, some of its copies all that as a JSON string.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise RuleBroken(f"{field_name} is text, not a list") from None
    if value is None:
        return []
    if isinstance(value, Mapping):
        columns = [value.get(name) for name in names]
        if not all(isinstance(c, list) and len(c) == len(columns[0]) for c in columns):
            raise RuleBroken(f"{field_name} needs lists {' and '.join(names)} of one length")
        return list(zip(*columns, strict=True))
    if not isinstance(value, list):
        raise RuleBroken(f"{field_name} is a {type(value).__name__}, not a list")
    found = []
    for place, record in enumerate(value):
        if isinstance(record, Mapping):
            record = [record.get(name) for name in names]
        if not isinstance(record, (list, tuple)) or len(record) < len(names):
            raise RuleBroken(f"{field_name} {place} is not a record of {', '.join(names)}")
        found.append(tuple(record[: len(names)]))
    return found


def _text(row: Mapping[str, Any], name: str) -> str:
    value = row.get(name)
    if value is None:
        raise RuleBroken(f"{name} is missing")
    if not isinstance(value, str):
        raise RuleBroken(f"{name} is a {type(value).__name__}, not text")
    if not value.strip():
        raise RuleBroken(f"{name} is empty")
    return value.strip()


def _start(row: Mapping[str, Any], place: int) -> Example:
    """Id, question, answer and aliases: what all formats share."""
    example = Example("", _text(row, "question"), [], [], [])
    answer = row.get("answer")
    if isinstance(answer, (int, float)) and not isinstance(answer, bool):
        example.notes.append(f"answer is the number {answer}, read as text")
        row = {**row, "answer": str(answer)}
    example.golds.append(_text(row, "answer"))
    aliases = row.get("answer_aliases")
    for alias in [aliases] if isinstance(aliases, str) else aliases if isinstance(aliases, list) else []:
        if isinstance(alias, (str, int, float)) and str(alias).strip():
            example.golds.append(str(alias).strip())
    identity = row.get("_id", row.get("id"))
    if identity is None or not str(identity).strip():
        identity = f"row-{place}"
        example.notes.append(f"id is missing, called {identity}")
    example.id = str(identity)
    return example


def read_hotpot(row: Mapping[str, Any], place: int) -> Example:
    """HotpotQA and 2WikiMultiHopQA: ``context`` [title, sentences], ``supporting_facts`` [title, sentence index]."""
    example = _start(row, place)
    lengths: dict[str, int] = {}
    for title, sentences in _records(row.get("context"), ("title", "sentences"), "context"):
        sentences = [sentences] if isinstance(sentences, str) else sentences
        texts = [title, *sentences] if isinstance(sentences, list) else [None]
        if not all(isinstance(text, str) for text in texts):
            raise RuleBroken("context needs a title and a list of sentences for each passage")
        lengths[title] = max(lengths.get(title, 0), len(sentences))
        example.passages.append(Passage(title, " ".join(s.strip() for s in sentences)))
    if not lengths:
        raise RuleBroken("context is missing or empty, so no passage can prove the answer")
    for title, sentence in _records(row.get("supporting_facts"), ("title", "sent_id"), "supporting_facts"):
        if not isinstance(title, str) or title not in lengths:
            raise RuleBroken(f"supporting title {title!r} is not in the context")
        if not isinstance(sentence, int) or not 0 <= sentence < lengths[title]:
            example.notes.append(f"supporting fact points to sentence {sentence} of {lengths[title]} in {title!r}")
        example.evidence.append(title)
    example.evidence = list(dict.fromkeys(example.evidence))
    example.kind, example.hops = str(row.get("type") or ""), len(example.evidence)
    example.info = {name: row[name] for name in ("level", "answer_id") if isinstance(row.get(name), str)}
    return example


def read_musique(row: Mapping[str, Any], place: int) -> Example:
    """MuSiQue: ``paragraphs`` with ``is_supporting``, ``question_decomposition`` into single hops."""
    example = _start(row, place)
    if row.get("answerable") is False:
        raise RuleBroken("question is marked as not answerable from its paragraphs")
    titles: dict[int, str] = {}
    names = ("idx", "title", "paragraph_text", "is_supporting")
    for i, (idx, title, text, supporting) in enumerate(_records(row.get("paragraphs"), names, "paragraphs")):
        if not isinstance(title, str) or not isinstance(text, str):
            raise RuleBroken(f"paragraph {i} needs a title and a paragraph_text")
        titles[idx if isinstance(idx, int) else i] = title
        example.passages.append(Passage(title, text.strip()))
        if supporting:
            example.evidence.append(title)
    if not titles:
        raise RuleBroken("paragraphs are missing or empty, so no passage can prove the answer")
    example.evidence = list(dict.fromkeys(example.evidence))
    steps = []
    names = ("question", "answer", "paragraph_support_idx")
    for question, answer, idx in _records(row.get("question_decomposition"), names, "question_decomposition"):
        title = titles.get(idx) if isinstance(idx, int) else None
        if idx is not None and title is None:
            example.notes.append(f"question_decomposition points to paragraph {idx}, which is not there")
        steps.append({"question": question, "answer": answer, "title": title or ""})
    example.kind, example.hops = example.id.split("__")[0] if "hop" in example.id else "", len(steps)
    example.info = {"decomposition": steps}
    return example


READERS: dict[str, Callable[[Mapping[str, Any], int], Example]] = {
    "hotpotqa": read_hotpot,
    "2wiki": read_hotpot,
    "musique": read_musique,
}


def validate(
    rows: Iterable[tuple[int, Mapping[str, Any]]], benchmark: str, name: str
) -> tuple[list[Example], list[Problem]]:
    """The sound rows of ``(line, row)`` pairs as examples, and every row that broke a rule.

    An id that stands for different questions is left out wherever it stands:
    nothing says which of them is meant, and scores are matched by id. Of equal
    rows the first stays.
    """
    examples: list[tuple[int, Example]] = []
    problems: list[Problem] = []
    for place, (line, row) in enumerate(rows, 1):
        try:
            examples.append((line, READERS[benchmark](row, place)))
        except RuleBroken as broken:
            identity = row.get("_id", row.get("id"))
            where = "no id" if identity is None else f"id {identity!r}"
            problems.append(Problem(name, line, f"{where}: {broken}"))
    same_id: dict[str, list[tuple[int, Example]]] = {}
    for line, example in examples:
        same_id.setdefault(example.id, []).append((line, example))
    good = []
    for line, example in examples:
        first, original = same_id[example.id][0]
        where = f"id {example.id!r}"
        if any((e.question, e.golds) != (original.question, original.golds) for _, e in same_id[example.id]):
            lines = ", ".join(str(other) for other, _ in same_id[example.id])
            problems.append(Problem(name, line, f"{where}: stands for different questions (lines {lines})"))
        elif example is not original:
            problems.append(Problem(name, line, f"{where}: repeats the row on line {first}"))
        else:
            good.append(example)
            problems += [Problem(name, line, f"{where}: {note}", kept=True) for note in example.notes]
    return good, sorted(problems, key=lambda problem: problem.line)
