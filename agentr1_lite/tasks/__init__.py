"""Tasks by name: questions, the environment that asks them and the passages behind the search tool."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module

from agentr1_lite.env import ToolEnv
from agentr1_lite.jsonl import DataError, Problem
from agentr1_lite.mdp import Task
from agentr1_lite.retrieval import BM25, Passage


@dataclass
class TaskSet:
    """One split of a task, ready for ``rollout(policy, task_set.env, task_set.tasks)``.

    ``index`` is what the search tool searches, None for a task without one;
    ``problems`` lists the rows of a data file that broke a rule; ``read_prompt`` is the system
    prompt under which a policy answers from passages alone, where the task has one.
    """

    name: str
    split: str
    tasks: list[Task]
    env: ToolEnv
    index: BM25 | None = None
    problems: list[Problem] = field(default_factory=list)
    read_prompt: str = ""

    def __len__(self) -> int:
        return len(self.tasks)

    @property
    def passages(self) -> list[Passage]:
        return self.index.passages if self.index is not None else []


Builder = Callable[..., TaskSet]
_BUILDERS: dict[str, Builder] = {}
# Modules of shipped tasks, imported when one of theirs is first asked for
MODULES = {"atlas": "atlas", "hotpotqa": "multihop", "2wiki": "multihop", "musique": "multihop"}


def task(name: str) -> Callable[[Builder], Builder]:
    """Register ``build(split, **knobs) -> TaskSet`` under ``name``; ``**env_options`` in it go to ToolEnv."""

    def register(build: Builder) -> Builder:
        _BUILDERS[name] = build
        return build

    return register


def names() -> list[str]:
    """The names :func:`load_task` knows."""
    return sorted({*MODULES, *_BUILDERS})


def load_task(name: str, split: str = "train", **knobs: object) -> TaskSet:
    """One split of a task by name; ``knobs`` are the task's own and, where it takes them, ToolEnv's.

    The environment's ``tasks`` are those of the split. Raises :class:`DataError` on an unknown name or knob.
    """
    allowed = accepted_knobs(name)
    for knob in knobs:
        if knob not in allowed:
            raise DataError(
                f"task {name!r} has no knob {knob!r}{_closest(knob, allowed)}; it takes {', '.join(allowed)}"
            )
    task_set = _builder(name)(split, **knobs)
    task_set.env.tasks = task_set.tasks
    return task_set


def accepted_knobs(name: str) -> list[str]:
    """The knobs of a task by name; raises :class:`DataError` on an unknown name."""
    return knob_names(_builder(name))


def default_knobs(name: str) -> dict[str, object]:
    """What each knob of a task is where nobody sets it."""
    return _knobs(_builder(name))


def knob_names(build: Builder) -> list[str]:
    """The keywords a builder takes, those of ToolEnv included where it passes ``**options`` on."""
    return list(_knobs(build))


def _knobs(build: Builder) -> dict[str, object]:
    parameters = list(inspect.signature(build).parameters.values())[1:]
    found = {p.name: p.default for p in parameters if p.kind is not p.VAR_KEYWORD}
    if len(found) < len(parameters):
        passed_on = inspect.signature(ToolEnv).parameters.values()
        found |= {p.name: p.default for p in passed_on if p.name not in ("tools", *found)}
    return found


def _builder(name: str) -> Builder:
    """The builder of a task, whatever the case of its name."""
    known = name if name in names() else next((n for n in names() if n.casefold() == str(name).casefold()), None)
    if known is None:
        raise DataError(f"task {name!r} is unknown{_closest(name, names())}; choose one of {', '.join(names())}")
    if known not in _BUILDERS:
        import_module(f"{__name__}.{MODULES[known]}")
    return _BUILDERS[known]


def _closest(word: str, choices: list[str]) -> str:
    close = difflib.get_close_matches(word, choices, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
