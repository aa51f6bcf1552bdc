"""HotpotQA, 2WikiMultiHopQA and MuSiQue, from official-format files or from the Hugging Face hub.

The corpus of a split is the passages of its rows, keyed on (title, text); how
rows are read and checked is in ``official.py``.
"""

from __future__ import annotations

import re
import warnings
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from agentr1_lite.env import ToolEnv
from agentr1_lite.jsonl import DataError, Problem, read_numbered, read_rows
from agentr1_lite.mdp import Task
from agentr1_lite.retrieval import BM25, Passage, make_search_tool, unique_passages
from agentr1_lite.tasks import TaskSet, task
from agentr1_lite.tasks.official import Example, validate

# name: (hub repository, its configuration, how file names call the benchmark)
BENCHMARKS = {
    "hotpotqa": ("hotpotqa/hotpot_qa", "distractor", "hotpot"),
    "2wiki": ("framolfese/2WikiMultihopQA", None, "2wiki"),
    "musique": ("dgslibisey/MuSiQue", None, "musique"),
}
SPLITS = {"train": ("train",), "dev": ("dev", "validation", "valid", "val"), "test": ("test",)}
PREFERRED_FILES = ("distractor", "ans")  # of several official files of a split, the one with passages and answers


@dataclass
class Split:
    """Tasks of a split, the passages they come with and the rows that broke a rule."""

    tasks: list[Task]
    passages: list[Passage]
    problems: list[Problem]


def split_of(split: str) -> str:
    """``train``, ``dev`` or ``test`` for any of the names a split goes by."""
    for name, others in SPLITS.items():
        if split in others:
            return name
    known = ", ".join(name for others in SPLITS.values() for name in others)
    raise DataError(f"split {split!r} is unknown; choose one of {known}")


def find_file(folder: Path, benchmark: str, split: str) -> Path:
    """The file of a folder that holds ``split``, by the words in its name."""
    files = [p for p in sorted(folder.iterdir()) if p.suffix in (".json", ".jsonl")]
    fitting = [p for p in files if _named_split(p) == split]
    for word in (BENCHMARKS[benchmark][2], *PREFERRED_FILES):
        fitting = [p for p in fitting if word in p.name.lower()] or fitting
    if len(fitting) != 1:
        found = ", ".join(p.name for p in fitting or files) or "no .json or .jsonl file"
        raise DataError(f"{folder}: expected one file of {benchmark} {split}, found {found}; give the file's path")
    return fitting[0]


def _named_split(path: Path) -> str | None:
    parts = re.split(r"[^a-z0-9]+", path.stem.lower())
    return next((name for name, others in SPLITS.items() if set(others) & set(parts)), None)


def _hub_rows(repository: str, benchmark: str, split: str) -> list[tuple[int, Mapping[str, Any]]]:
    from datasets import load_dataset  # imported late: it takes seconds and local files do not need it

    default, config, _ = BENCHMARKS[benchmark]
    repository = default if repository == "hub" else repository
    try:
        rows = load_dataset(
            repository, config if repository == default else None, split="validation" if split == "dev" else split
        )
    except Exception as error:  # the hub client raises dozens of types
        reason = " ".join(str(error).split())[:200]
        raise DataError(
            f"hub data set {repository!r}, split {split!r}: cannot be loaded ({type(error).__name__}: {reason}); "
            "check name and network, or give a local file"
        ) from error
    return list(enumerate(rows, 1))


def _source(
    path_or_hub: str | Path, benchmark: str, split: str, dev_share: float
) -> tuple[str, list, list[Problem], Path | None]:
    """Name, numbered rows, unreadable lines and folder of the data."""
    path = Path(path_or_hub).expanduser()
    if path.is_dir():
        path = find_file(path, benchmark, split)
    if path.is_file():
        if (_named_split(path) or split) != split and not dev_share:
            warnings.warn(f"{path} is loaded as {split}; dev_share=0.2 would hold a fifth of it out", stacklevel=4)
        rows, problems = read_numbered(path)
        return str(path), rows, problems, path.parent
    if path.suffix or path.is_absolute() or str(path_or_hub).count("/") > 1 or str(path_or_hub)[:1] in (".", "~", ""):
        raise DataError(f"{path_or_hub}: no such file or folder; give an official file, its folder or a hub name")
    return str(path_or_hub), _hub_rows(str(path_or_hub), benchmark, split), [], None


def _add_aliases(examples: list[Example], path: Path) -> None:
    """2Wiki's ``id_aliases.json``: more golds by ``answer_id``, as its evaluation script adds them."""
    rows, problems = read_rows(path)
    if problems:
        raise DataError(f"{problems[0]}; repair the alias file")
    known = {row.get("Q_id"): [*(row.get("aliases") or ()), *(row.get("demonyms") or ())] for row in rows}
    for example in examples:
        example.golds += [str(alias) for alias in known.get(example.info.get("answer_id"), ())]


def load_split(
    path_or_hub: str | Path = "hub",
    benchmark: str = "hotpotqa",
    split: str = "train",
    *,
    limit: int | None = None,
    dev_share: float = 0.0,
    aliases: str | Path | None = None,
) -> Split:
    """Tasks, passages and problems of one split.

    Args:
        path_or_hub: an official-format JSON or JSON Lines file, a folder of
            them, ``"hub"`` for the benchmark's own repository, or ``owner/name``.
        split: train, dev (also validation) or test. A single file is that split
            as a whole unless ``dev_share`` divides it.
        limit: at most so many tasks, from the top.
        dev_share: share of the questions, chosen by a hash of their id, that
            ``dev`` and ``test`` see and ``train`` does not.
        aliases: 2Wiki's ``id_aliases.json``; by default the one beside the file.
    """
    if benchmark not in BENCHMARKS:
        raise DataError(f"benchmark {benchmark!r} is unknown; choose one of {', '.join(BENCHMARKS)}")
    if not 0 <= dev_share < 1:
        raise DataError(f"dev_share {dev_share} must be at least 0 and below 1")
    split = split_of(split)
    name, rows, unreadable, folder = _source(path_or_hub, benchmark, split, dev_share)
    examples, problems = validate(rows, benchmark, name)
    problems = sorted([*unreadable, *problems], key=lambda problem: problem.line)
    if not examples:
        first = f"; the first problem: line {problems[0].line}: {problems[0].reason}" if problems else ""
        raise DataError(f"{name}: no usable {benchmark} row among {len(rows) + len(unreadable)}{first}")
    if dev_share:
        examples = [e for e in examples if (zlib.crc32(e.id.encode()) / 2**32 >= dev_share) == (split == "train")]
    examples = examples[:limit]
    if aliases is None and folder is not None and benchmark == "2wiki" and (folder / "id_aliases.json").is_file():
        aliases = folder / "id_aliases.json"
    if aliases is not None:
        _add_aliases(examples, Path(aliases))
    for example in examples:
        example.golds = list(dict.fromkeys(example.golds))
    passages = unique_passages(p for e in examples for p in e.passages if p.text)
    return Split([e.task() for e in examples], passages, problems)


def warn_left_out(problems: Iterable[Problem]) -> None:
    """Warn with a count: a row is never dropped in silence."""
    dropped = [problem for problem in problems if not problem.kept]
    if dropped:
        text = (
            f"{dropped[0].file}: {len(dropped)} rows left out, the first: line {dropped[0].line}: {dropped[0].reason}"
        )
        warnings.warn(f"{text}; load_split(...).problems lists them all", stacklevel=3)


def load(
    path_or_hub: str | Path = "hub", benchmark: str = "hotpotqa", split: str = "train", **options: Any
) -> list[Task]:
    """The tasks of one split; see :func:`load_split` for the options, the passages and the problems."""
    found = load_split(path_or_hub, benchmark, split, **options)
    warn_left_out(found.problems)
    return found.tasks


def _build(
    benchmark: str,
    split: str,
    path: str | Path = "hub",
    k: int = 3,
    failing: float = 0.0,
    noisy: float = 0.0,
    limit: int | None = None,
    dev_share: float = 0.0,
    aliases: str | Path | None = None,
    **env_options: Any,
) -> TaskSet:
    """A benchmark's split with a BM25 search tool over the split's passages."""
    found = load_split(path, benchmark, split, limit=limit, dev_share=dev_share, aliases=aliases)
    warn_left_out(found.problems)
    index = BM25(found.passages)
    env = ToolEnv([make_search_tool(index, k, failing, noisy)], **{"benchmark": benchmark, **env_options})
    env.tasks = found.tasks
    return TaskSet(benchmark, split, found.tasks, env, index, found.problems)


for _name in BENCHMARKS:
    task(_name)(partial(_build, _name))
