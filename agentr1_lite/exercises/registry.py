"""The exercises that there are: solutions, the inputs they are tried on, and typical mistakes."""

from __future__ import annotations

import difflib
import importlib
import inspect
import pkgutil
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Mistake:
    """A wrong version of a solution, what to say to it and the heading of the lesson to read again."""

    function: Callable[..., Any]
    says: str
    reread: str = ""


@dataclass(frozen=True)
class Exercise:
    """``inputs(rng)`` gives the arguments of one case as a tuple.

    ``rng`` is a ``random.Random``; torch's and numpy's own generators are seeded
    for the call as well, so ``torch.randn`` repeats. ``tolerance`` is absolute
    and relative; ``equal(found, wanted)`` replaces the comparison of items that hold
    no others; ``cases`` inputs are drawn. Where an input requires grad and the
    solution's value does, gradients must agree too.
    """

    lesson: int
    name: str
    solution: Callable[..., Any]
    inputs: Callable[[random.Random], tuple[Any, ...]]
    mistakes: list[Mistake] = field(default_factory=list)
    tolerance: float = 1e-5
    equal: Callable[[Any, Any], bool] | None = None
    cases: int = 8


EXERCISES: dict[str, Exercise] = {}


def exercise(lesson: int, inputs: Callable[[random.Random], tuple[Any, ...]], **options: Any) -> Callable:
    """Register the decorated function as the solution of the exercise of its name; ``options`` of `Exercise`."""

    def register(solution: Callable) -> Callable:
        EXERCISES[solution.__name__] = Exercise(lesson, solution.__name__, solution, inputs, **options)
        return solution

    return register


def mistakes(solution: Callable, reread: str, table: Mapping[str, Callable]) -> None:
    """Register typical wrong answers to the exercise that ``solution`` solves: what to say → function."""
    EXERCISES[solution.__name__].mistakes.extend(Mistake(wrong, says, reread) for says, wrong in table.items())


def wrong_versions(solution: Callable, reread: str, wrap: Callable[[Callable], Callable] = lambda wrong: wrong):
    """Decorate a class of typical wrong answers: functions, whose docstrings are what to say.

    ``wrap`` makes the answer of a function that covers a part of it.
    """

    def register(versions: type) -> type:
        functions = filter(inspect.isfunction, vars(versions).values())
        mistakes(solution, reread, {" ".join(wrong.__doc__.split()): wrap(wrong) for wrong in functions})
        return versions

    return register


def exercises() -> list[Exercise]:
    """All exercises; the lessons' files are imported at the first call."""
    for module in pkgutil.iter_modules([str(Path(__file__).parent)], f"{__package__}."):
        importlib.import_module(module.name)
    return list(EXERCISES.values())


def find(name: str) -> Exercise:
    if name not in EXERCISES:
        exercises()
    if name not in EXERCISES:
        near = difflib.get_close_matches(str(name), EXERCISES, 1) or sorted(EXERCISES)
        raise ValueError(f"exercise {name!r} is unknown; did you mean {', '.join(near)}?")
    return EXERCISES[name]
