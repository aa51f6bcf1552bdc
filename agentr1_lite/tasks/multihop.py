"""HotpotQA, 2WikiMultiHopQA and MuSiQue, from official-format files or from the Hugging Face hub.

The corpus of a split is the passages of its rows, keyed on (title, text), or a
file, a saved index or a server; how rows are read and checked is in ``official.py``.
"""

from __future__ import annotations

import re
import warnings
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from itertools import islice
from numbers import Real
from pathlib import Path
from typing import Any

from agentr1_lite.env import ToolEnv
from agentr1_lite.index_files import as_path
from agentr1_lite.jsonl import FORMS, SUFFIXES, DataError, Problem, form_of, read_numbered, shards
from agentr1_lite.loading import hub_host, hub_reachable
from agentr1_lite.mdp import Task
from agentr1_lite.retrieval import Passage, RetrievalError, is_count, make_search_tool, one_line, unique_passages
from agentr1_lite.retrievers import HTTPRetriever, Retriever, check_options, make_retriever, recall_at_k
from agentr1_lite.scoring import evidence_recall, gold_list, title_key
from agentr1_lite.tasks import TaskSet, task
from agentr1_lite.tasks.official import Elsewhere, Example, RuleBroken, validate

# name: (hub repository, its configuration, how file names call the benchmark)
BENCHMARKS = {
    "hotpotqa": ("hotpotqa/hotpot_qa", "distractor", "hotpot"),
    "2wiki": ("framolfese/2WikiMultihopQA", None, "2wiki"),
    "musique": ("dgslibisey/MuSiQue", None, "musique"),
}
SPLITS = {"train": ("train",), "dev": ("dev", "validation", "valid", "val"), "test": ("test",)}
DESCRIPTIONS = ("dataset_dict.json", "dataset_info.json", "dataset_infos.json", "state.json")  # of hub data sets
PREFERRED_FILES = ("distractor", "ans")  # of several official files of a split, the one with passages and answers
# After Agent-R1 (arXiv 2511.14460): a thought before every call and before the answer, which its format reward asks for
SYSTEM_PROMPT = """\
You answer questions by looking facts up, one turn at a time. Every turn has two parts and nothing else.
First a thought: <think>what is known by now, and what is still missing</think>
Then one of these:
- a search, while something is missing: <tool_call>{"name": "search", "arguments": {"query": "..."}}</tool_call>
  Its reply shows passages. Ask for one fact at a time, and use what you have found in the next query.
- the answer, once the passages hold it: <answer>a name, a date, a number, yes or no; as short as possible</answer>"""
# By words in an error's type or text: what to do. The first that fits is said.
HUB_ADVICE = {
    r"gated|40[13]|authenticated": "accept its terms on the hub and log in with `hf auth login`",
    r"ConnectionError|OfflineMode|LocalEntryNotFound|Timeout": "connect to the network for a first download",
    r"(Unknown|Bad) split": "choose a split that it has",
    r"Arrow|Parquet|Generat|Verification|NonMatching|ExpectedMore|Consistency|EOF|JSONDecode": (
        "its cached copy looks half-downloaded: remove it from {cache} and load again"
    ),
    r"": "check its name",
}
KNOWN_TITLES = 0.8  # of the questions' evidence, below which a corpus is likely of another dump
PROBED = 16  # questions that a server is tried with
KNOBS = {"path": "corpus", "url": "url", "encoder": "encoder"}  # a retriever's option: the task's knob


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
    files = _data_files(folder)
    fitting = [p for p in files if _named_split(p.relative_to(folder)) == split]
    for word in (BENCHMARKS[benchmark][2], *PREFERRED_FILES):
        fitting = [p for p in fitting if word in str(p.relative_to(folder)).lower()] or fitting
    if len(fitting) != 1:
        found = ", ".join(str(p.relative_to(folder)) for p in fitting or files) or f"no file of {FORMS}"
        raise DataError(f"{folder}: expected one file of {benchmark} {split}, found {found}; give the file's path")
    return fitting[0]


def _data_files(folder: Path) -> list[Path]:
    """The data files of a folder, numbered ones as one; where none names a split, those of its folders too."""
    found, inside = shards(folder), sorted(folder.iterdir())
    found += [
        p for p in inside if form_of(p) in SUFFIXES and p.is_file() and not any(p.match(str(one)) for one in found)
    ]
    if not any(_named_split(Path(p.name)) for p in found):
        found += [p for below in inside if below.is_dir() and below.name[0] != "." for p in _data_files(below)]
    return [p for p in found if p.name not in DESCRIPTIONS]


def _named_split(path: Path) -> str | None:
    parts = re.split(r"[^a-z0-9]+", str(path).lower())
    return next((name for name, others in SPLITS.items() if set(others) & set(parts)), None)


def _hub_rows(
    repository: str, benchmark: str, split: str, count: int | None = None
) -> list[tuple[int, Mapping[str, Any]]]:
    """The first ``count`` rows of a hub data set, streamed; all of them, through the cache, where it is None."""
    from datasets import config, load_dataset  # imported late: it takes seconds and local files do not need it

    default, configuration, _ = BENCHMARKS[benchmark]
    repository = default if repository == "hub" else repository
    cached = Path(config.HF_DATASETS_CACHE, repository.replace("/", "___")).exists()
    if not cached and not hub_reachable():
        raise DataError(
            f"hub data set {repository!r} is not on this machine and {hub_host()} cannot be reached; connect to the "
            "network for a first download, or give a local file"
        )
    name = configuration if repository == default else None
    ask = partial(load_dataset, repository, name, split="validation" if split == "dev" else split)
    try:
        try:
            rows = list(islice(ask(streaming=True), count)) if count is not None else list(ask())
        except ConnectionError:
            if count is None:
                raise
            rows = list(islice(ask(), count))  # what was downloaded before can be read without a network
    except Exception as error:  # the hub client raises dozens of types
        said = f"{type(error).__name__}: {one_line(error)}"
        advice = next(advice for words, advice in HUB_ADVICE.items() if re.search(words, said, re.IGNORECASE))
        raise DataError(
            f"hub data set {repository!r}, split {split!r}: cannot be loaded ({said}); "
            f"{advice.format(cache=config.HF_DATASETS_CACHE)}, or give a local file"
        ) from error
    return list(enumerate(rows, 1))


def _source(
    path_or_hub: str | Path, benchmark: str, split: str, dev_share: float, limit: int | None
) -> tuple[str, list, list[Problem], Path | None]:
    """Name, numbered rows, unreadable lines and folder of the data."""
    path = as_path(path_or_hub, "path")
    if path.is_dir():
        path = find_file(path, benchmark, split)
    if path.is_file() or "*" in path.name:
        if (_named_split(Path(path.name)) or split) != split and not dev_share:
            warnings.warn(f"{path} is loaded as {split}; dev_share=0.2 would hold a fifth of it out", stacklevel=4)
        rows, problems = read_numbered(path)
        return str(path), rows, problems, path.parent
    if path.suffix or path.is_absolute() or str(path_or_hub).count("/") > 1 or str(path_or_hub)[:1] in (".", "~", ""):
        raise DataError(f"{path_or_hub}: no such file or folder; give an official file, its folder or a hub name")
    count = None if dev_share else limit
    return str(path_or_hub), _hub_rows(str(path_or_hub), benchmark, split, count), [], None


def _add_aliases(examples: list[Example], path: Path) -> None:
    """2Wiki's ``id_aliases.json``: more golds by ``answer_id``, as its evaluation script adds them."""
    rows, problems = read_numbered(path)
    known: dict[str, list[str]] = {}
    for line, row in rows:
        try:
            identity = row.get("Q_id")
            if not isinstance(identity, str) or not identity.strip():
                raise RuleBroken("Q_id is missing or not text")
            found = [*_other_names(row, "aliases"), *_other_names(row, "demonyms")]
            known.setdefault(identity.strip(), []).extend(found)
        except RuleBroken as broken:
            problems.append(Problem(str(path), line, str(broken)))
    if problems:
        first = min(problems, key=lambda problem: problem.line)
        raise DataError(f"{first}; repair the alias file or give another")
    matched = [example for example in examples if example.info.get("answer_id") in known]
    for example in matched:
        example.golds += known[example.info["answer_id"]]
    if not matched:
        shown = f"{path}: none of the {len(examples)} questions has an answer_id among its {len(known)}"
        warnings.warn(f"{shown}; give the alias file of this benchmark", stacklevel=3)


def _other_names(row: Mapping[str, Any], name: str) -> list[str]:
    """The non-empty strings and numbers of a field, which may also be one string or absent."""
    values = row.get(name)
    values = [] if values is None else [values] if isinstance(values, str) else values
    if not isinstance(values, list):
        raise RuleBroken(f"{name} is a {type(values).__name__}, not a list of names")
    for value in values:
        if isinstance(value, (bool, list, dict)):
            raise RuleBroken(f"{name} holds a {type(value).__name__}, not only names")
    return [name.strip() for name in gold_list(values) if name.strip()]


def load_split(
    path_or_hub: str | Path = "hub",
    benchmark: str = "hotpotqa",
    split: str = "train",
    *,
    limit: int | None = None,
    dev_share: float = 0.0,
    aliases: str | Path | None = None,
    elsewhere: Elsewhere | None = None,
) -> Split:
    """Tasks, passages and problems of one split.

    Args:
        path_or_hub: a file of official rows (see ``jsonl.py`` for its formats), a name with a star, a folder of them
            or of the hub's, ``"hub"`` for the benchmark's own repository, or ``owner/name``.
        split: train, dev (also validation) or test. A single file is that split
            as a whole unless ``dev_share`` divides it.
        limit: at most so many tasks, from the top; from the hub only so many rows are downloaded, so that
            rows left out are not made up for.
        dev_share: share of the questions, chosen by a hash of their id, that
            ``dev`` and ``test`` see and ``train`` does not; raises where a split would be empty.
        aliases: 2Wiki's ``id_aliases.json``; by default the one beside the file.
        elsewhere: whether a corpus has a title, given as its ``title_key``; asked for evidence that is not in its row.
    """
    if benchmark not in BENCHMARKS:
        raise DataError(f"benchmark {benchmark!r} is unknown; choose one of {', '.join(BENCHMARKS)}")
    if not isinstance(dev_share, Real) or not 0 <= dev_share < 1:
        raise DataError(f"dev_share {dev_share!r} must be a number of at least 0 and below 1")
    if limit is not None and not is_count(limit):
        raise DataError(f"limit {limit!r} must be a whole number of at least 1 question; leave it out for all")
    split = split_of(split)
    name, rows, unreadable, folder = _source(path_or_hub, benchmark, split, dev_share, limit)
    examples, problems = validate(rows, benchmark, name, elsewhere)
    problems = sorted([*unreadable, *problems], key=lambda problem: problem.line)
    if not examples:
        first = f"; the first problem: line {problems[0].line}: {problems[0].reason}" if problems else ""
        raise DataError(f"{name}: no usable {benchmark} row among {len(rows) + len(unreadable)}{first}")
    if aliases is None and folder is not None and benchmark == "2wiki" and (folder / "id_aliases.json").is_file():
        aliases = folder / "id_aliases.json"
    if aliases is not None:
        _add_aliases(examples, as_path(aliases, "aliases"))
    if dev_share:
        count = len(examples)
        examples = [e for e in examples if (zlib.crc32(e.id.encode()) / 2**32 >= dev_share) == (split == "train")]
        if not examples:
            raise DataError(
                f"{name}: none of its {count} questions falls to {split} with dev_share {dev_share}; "
                "choose another share or give more questions"
            )
    examples = examples[:limit]
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


def check_corpus(index: Retriever, tasks: list[Task]) -> None:
    """Warn where few of the questions' evidence titles are in the corpus, raise where none is.

    A server's titles are unknown, so it is tried with a few of the questions: raises where it does not answer, warns
    where ten passages a question show no evidence at all.
    """
    proven = [task for task in tasks if task.evidence]
    titles = {title_key(title) for task in proven for title in task.evidence}
    advice = "it may be of another dump, so take the one that the questions were made from"
    if not proven:
        return
    if isinstance(index, HTTPRetriever):
        try:
            seen = recall_at_k(index, proven[:PROBED], (10,))[10]
        except RetrievalError as error:
            raise DataError(str(error)) from error
        if not seen:
            shown = f"corpus: the server shows no evidence of the first {len(proven[:PROBED])} questions"
            warnings.warn(f"{shown} among ten passages each; {advice}", stacklevel=3)
        return
    share = evidence_recall(titles, [p.title for p in index.passages])
    if share < KNOWN_TITLES:
        shown = f"corpus: {share:.0%} of the {len(titles)} titles that prove the answers are among its passages"
        if not share:
            raise DataError(f"{shown} ({len(index.passages)}); {advice}")
        warnings.warn(f"{shown}; {advice}", stacklevel=3)


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
    corpus: str | Path | None = None,
    retriever: str = "bm25",
    url: str | None = None,
    encoder: str | Callable[[list[str]], Any] | None = None,
    **env_options: Any,
) -> TaskSet:
    """A benchmark's split with a search tool over ``corpus``, else over the split's own passages.

    Args:
        path, limit, dev_share, aliases: see :func:`load_split`.
        k, failing, noisy: of the search tool, see ``make_search_tool``.
        corpus: a passages file, or the folder of a saved index of this ``retriever``.
        retriever: "bm25", "dense" or "http", see ``make_retriever``.
        url: of the server, for "http".
        encoder: for "dense": a sentence-transformers name or folder, or a function.
        env_options: of ToolEnv; ``system_prompt`` is :data:`SYSTEM_PROMPT` where none is given.
    """
    given = {"path": corpus, "url": url, "encoder": encoder}
    check_options(retriever, [option for option, value in given.items() if value is not None], KNOBS)
    if corpus is not None:
        corpus = as_path(corpus, "corpus")

    @cache
    def outside() -> tuple[Retriever, set[str]]:
        index = make_retriever(retriever, path=corpus, url=url, encoder=encoder)
        return index, {title_key(p.title) for p in index.passages}

    def has(key: str) -> bool:  # a server's titles are unknown
        return retriever == "http" or key in outside()[1]

    own = corpus is None and retriever != "http"
    chosen = {"limit": limit, "dev_share": dev_share, "aliases": aliases}
    found = load_split(path, benchmark, split, **chosen, elsewhere=None if own else has)
    warn_left_out(found.problems)
    index = make_retriever(retriever, passages=found.passages, encoder=encoder) if own else outside()[0]
    if not own:
        check_corpus(index, found.tasks)
    options = {"benchmark": benchmark, "call_format": "hermes", "final_answer": "tag", **env_options}
    if options.get("system_prompt") is None and (options["call_format"], options["final_answer"]) == ("hermes", "tag"):
        options["system_prompt"] = SYSTEM_PROMPT  # which shows these two forms
    env = ToolEnv([make_search_tool(index, k, failing, noisy)], **options)
    env.tasks = found.tasks
    return TaskSet(benchmark, split, found.tasks, env, index, found.problems)


for _name in BENCHMARKS:
    task(_name)(partial(_build, _name))
