"""Rows of the official HotpotQA, 2WikiMultiHopQA and MuSiQue formats: read, checked, made into tasks.

A row becomes a :class:`Task`: the answer and its aliases are the golds, the
titles of the supporting passages the evidence. Each rule a row breaks is
listed with its line; rows without a sound question, answer and evidence are
left out, other rules are only noted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from agentr1_lite.jsonl import Problem
from agentr1_lite.mdp import Task
from agentr1_lite.retrieval import Passage
from agentr1_lite.scoring import MISSING, gold_list, is_missing, number_text, title_key

NULLS = (*MISSING, "null", "")  # what a table may say in place of a text that is not there
ANSWERS = ("answers", "golden_answers", "golds", "ground_truth", "target", "reward_model")  # beside ``answer``
ALIASES = ("answer_aliases", "aliases")
FLAGS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}


Elsewhere = Callable[[str], bool]  # whether a corpus has a title, given as its key


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


def plain(value: Any) -> Any:
    """``value`` without the types of NumPy and pandas: lists, Python's numbers, None for what is missing."""
    if isinstance(value, (np.ndarray, np.generic)):
        value = value.tolist()
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inner) for inner in value]
    return None if is_missing(value) else value


def is_null(value: Any) -> bool:
    """Nothing, or what a table writes in its place."""
    return value is None or value == [] or (isinstance(value, str) and value.strip() in NULLS)


def _whole(value: Any) -> int | None:
    """A whole number, also written as 3.0, "3" or "3.0"; None where it is none."""
    if isinstance(value, str) and re.fullmatch(r"-?[0-9]{1,15}(\.0)?", value):
        value = float(value)
    whole = isinstance(value, (int, float)) and not isinstance(value, bool) and value % 1 == 0
    return int(value) if whole else None


def _flag(row: Mapping[str, Any], name: str) -> bool | None:
    """A truth value, also written as 0 or 1 or as text; None where it is missing."""
    value = row.get(name)
    if is_null(value):
        return None
    if str(value).lower() not in FLAGS:
        raise RuleBroken(f"{name} is {value!r:.40}, neither true nor false")
    return FLAGS[str(value).lower()]


def _records(value: Any, names: tuple[str, ...], field_name: str) -> list[tuple[Any, ...]]:
    """Records as tuples in the order of ``names``.

    Official files hold lists of lists, MuSiQue lists of objects, the hub
    objects of lists, some of its copies all that as a JSON string.
    """
    if isinstance(value, str):
        try:
            value = plain(json.loads(value))
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
    if value is not None and not isinstance(value, str):
        raise RuleBroken(f"{name} is a {type(value).__name__}, not text")
    if value is None or (is_null(value) and value.strip()):
        raise RuleBroken(f"{name} is missing")
    if not value.strip():
        raise RuleBroken(f"{name} is empty")
    return value.strip()


def _start(row: Mapping[str, Any], place: int) -> Example:
    """Id, question, answer and aliases: what all formats share."""
    example = Example("", _text(row, "question"), [], [], [])
    answer = row.get("answer")
    if isinstance(answer, (int, float)) and not isinstance(answer, bool):
        row = {**row, "answer": "".join(_golds(row, "answer"))}
        example.notes.append(f"answer is the number {row['answer']}, read as text")
    aliases = [gold for name in ALIASES for gold in _golds(row, name)]
    if is_null(answer):
        example.golds = [*(gold for name in ANSWERS for gold in _golds(row, name)), *aliases]
    example.golds = example.golds or [_text(row, "answer"), *aliases]
    example.id = _identity(row)
    if not example.id:
        example.id = f"row-{place}"
        example.notes.append(f"id is missing, called {example.id}")
    return example


def _golds(row: Mapping[str, Any], name: str) -> list[str]:
    """The answers under ``name``, which hub copies may keep as JSON."""
    value = row.get(name)
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            value = plain(json.loads(value))
        except (ValueError, RecursionError):
            pass
    try:
        return [gold.strip() for gold in gold_list(value, name) if not is_null(gold)]
    except ValueError as error:
        raise RuleBroken(str(error)) from None


def _identity(row: Mapping[str, Any]) -> str:
    """The id of a row, "" where it has none."""
    found = next((row[name] for name in ("_id", "id") if not is_null(row.get(name))), "")
    return number_text(found) if isinstance(found, float) else str(found)


def read_hotpot(row: Mapping[str, Any], place: int, elsewhere: Elsewhere | None = None) -> Example:
    """HotpotQA and 2WikiMultiHopQA: ``context`` [title, sentences], ``supporting_facts`` [title, sentence index].

    A supporting title that is not in the context, as in HotpotQA's full-wiki setting, is looked up ``elsewhere``.
    """
    example = _start(row, place)
    lengths: dict[str, int] = {}
    titles: dict[str, str] = {}  # by their keys
    for title, sentences in _records(row.get("context"), ("title", "sentences"), "context"):
        sentences = [sentences] if isinstance(sentences, str) else sentences
        texts = [title, *sentences] if isinstance(sentences, list) else [None]
        if not all(isinstance(text, str) for text in texts):
            raise RuleBroken("context needs a title and a list of sentences for each passage")
        title = titles.setdefault(title_key(title), title)
        lengths[title] = max(lengths.get(title, 0), len(sentences))
        example.passages.append(Passage(title, " ".join(s.strip() for s in sentences)))
    if not lengths and elsewhere is None:
        raise RuleBroken("context is missing or empty, so no passage can prove the answer")
    for title, sentence in _records(row.get("supporting_facts"), ("title", "sent_id"), "supporting_facts"):
        key = title_key(title) if isinstance(title, str) else None
        if key not in titles and (key is None or elsewhere is None or not elsewhere(key)):
            where = "the context" if elsewhere is None else "the context nor in the corpus"
            raise RuleBroken(f"supporting title {title!r} is not in {where}")
        length, number = lengths.get(titles.get(key)), _whole(sentence)
        if length is not None and (number is None or not 0 <= number < length):
            example.notes.append(f"supporting fact points to sentence {sentence} of {length} in {title!r}")
        example.evidence.append(titles.setdefault(key, title))
    example.evidence = list(dict.fromkeys(example.evidence))
    example.kind, example.hops = str(row.get("type") or ""), len(example.evidence)
    example.info = {name: row[name] for name in ("level", "answer_id") if isinstance(row.get(name), str)}
    return example


def read_musique(row: Mapping[str, Any], place: int, elsewhere: Elsewhere | None = None) -> Example:
    """MuSiQue: ``paragraphs`` with ``is_supporting``, ``question_decomposition`` into single hops."""
    example = _start(row, place)
    if _flag(row, "answerable") is False:
        raise RuleBroken("question is marked as not answerable from its paragraphs")
    titles: dict[int, str] = {}
    spelt: dict[str, str] = {}  # a title by its key, as it is first written
    names = ("idx", "title", "paragraph_text", "is_supporting")
    for i, (idx, title, text, supporting) in enumerate(_records(row.get("paragraphs"), names, "paragraphs")):
        if not isinstance(title, str) or not isinstance(text, str):
            raise RuleBroken(f"paragraph {i} needs a title and a paragraph_text")
        if (number := i if is_null(idx) else _whole(idx)) is None:
            raise RuleBroken(f"paragraph {i} has the idx {idx!r:.40}, not a whole number")
        titles[number] = title
        example.passages.append(Passage(title, text.strip()))
        if _flag({"is_supporting": supporting}, "is_supporting"):
            example.evidence.append(spelt.setdefault(title_key(title), title))
    if not titles:
        raise RuleBroken("paragraphs are missing or empty, so no passage can prove the answer")
    example.evidence = list(dict.fromkeys(example.evidence))
    steps = []
    names = ("question", "answer", "paragraph_support_idx")
    for question, answer, idx in _records(row.get("question_decomposition"), names, "question_decomposition"):
        title = titles.get(_whole(idx))
        if not is_null(idx) and title is None:
            example.notes.append(f"question_decomposition points to paragraph {idx}, which is not there")
        answer = number_text(answer) if isinstance(answer, float) else answer
        steps.append({"question": question, "answer": answer, "title": title or ""})
    example.kind, example.hops = example.id.split("__")[0] if "hop" in example.id else "", len(steps)
    example.info = {"decomposition": steps}
    return example


READERS: dict[str, Callable[..., Example]] = {
    "hotpotqa": read_hotpot,
    "2wiki": read_hotpot,
    "musique": read_musique,
}


def validate(
    rows: Iterable[tuple[int, Mapping[str, Any]]], benchmark: str, name: str, elsewhere: Elsewhere | None = None
) -> tuple[list[Example], list[Problem]]:
    """The sound rows of ``(line, row)`` pairs as examples, and every row that broke a rule.

    An id that stands for different questions is left out wherever it stands:
    nothing says which of them is meant, and scores are matched by id. Of equal
    rows the first stays. ``elsewhere`` says whether a corpus has a title that
    is not in its row.
    """
    examples: list[tuple[int, Example]] = []
    problems: list[Problem] = []
    for place, (line, row) in enumerate(rows, 1):
        row = plain(row)
        try:
            examples.append((line, READERS[benchmark](row, place, elsewhere)))
        except RuleBroken as broken:
            where = f"id {identity!r}" if (identity := _identity(row)) else "no id"
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
