"""Exercises of the lessons: a gap to fill, and a check that knows the typical mistakes.

A lesson's file holds the solution, a function that draws its inputs, and wrong
versions with what to say to each::

    @exercise(4, "group_advantage", inputs=draw)
    def group_advantage(rewards, groups): ...

    @mistake("group_advantage", "The standard deviation is the biased one.", reread="Group effects")
    def _biased(rewards, groups): ...

``check(name, function)`` runs the learner's function and the solution on the
same random inputs. A mistake is named where the learner's outcome equals that
wrong version's on every input.
"""

from __future__ import annotations

import copy
import difflib
import html
import importlib
import inspect
import linecache
import math
import pkgutil
import random
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

CASES = 8
MARKS = {"right": ("✔", "right", "#00724f"), "gap": ("○", "to do", "#5c6370")}
WRONG_MARK = ("✘", "not yet", "#b3470a")


@dataclass(frozen=True)
class Mistake:
    """A wrong version of a solution, what to say to it and the heading of the lesson to read again."""

    function: Callable[..., Any]
    says: str
    reread: str = ""


@dataclass(frozen=True)
class Exercise:
    """``inputs(rng)`` gives the arguments of one case: a tuple, or a dict of keywords.

    ``rng`` is a ``random.Random``; torch's and numpy's own generators are seeded
    for the call as well, so ``torch.randn`` repeats. ``tolerance`` is absolute
    and relative; ``equal(found, wanted)`` replaces the comparison of values.
    """

    lesson: int
    name: str
    solution: Callable[..., Any]
    inputs: Callable[[random.Random], Any]
    mistakes: list[Mistake] = field(default_factory=list)
    tolerance: float = 1e-5
    equal: Callable[[Any, Any], bool] | None = None


@dataclass(frozen=True)
class Verdict:
    """What a check found. ``kind``: right, gap, mistake, error, form (type, shape, arguments) or value."""

    name: str
    kind: str
    text: str
    reread: str = ""

    def __bool__(self) -> bool:
        return self.kind == "right"

    def __repr__(self) -> str:
        mark, word, _ = MARKS.get(self.kind, WRONG_MARK)
        again = f" Read again: {self.reread}." if self.reread else ""
        return f"{mark} {word} · {self.name}: {self.text}{again}"

    def _repr_html_(self) -> str:
        mark, word, color = MARKS.get(self.kind, WRONG_MARK)
        again = f" Read again: <em>{html.escape(self.reread)}</em>." if self.reread else ""
        return (
            f'<div role="status" style="border-left:4px solid {color};padding:.4em .8em;margin:.3em 0">'
            f'<span style="background:{color};color:#fff;border-radius:3px;padding:.1em .5em">{mark} {word}</span> '
            f"<code>{html.escape(self.name)}</code>: {html.escape(self.text)}{again}</div>"
        )


EXERCISES: dict[str, Exercise] = {}


def exercise(
    lesson: int, name: str, inputs: Callable[[random.Random], Any], **options: Any
) -> Callable[[Callable], Callable]:
    """Register the decorated function as the solution of ``name``; ``options`` are fields of `Exercise`."""

    def register(solution: Callable) -> Callable:
        EXERCISES[name] = Exercise(lesson, name, solution, inputs, **options)
        return solution

    return register


def mistake(name: str, says: str, reread: str = "") -> Callable[[Callable], Callable]:
    """Register the decorated function as a typical wrong answer to ``name``."""

    def register(function: Callable) -> Callable:
        EXERCISES[name].mistakes.append(Mistake(function, says, reread))
        return function

    return register


def exercises(lesson: int | None = None) -> list[Exercise]:
    """All exercises, or those of one lesson; the lessons' files are imported at the first call."""
    for module in pkgutil.iter_modules(__path__, f"{__name__}."):
        importlib.import_module(module.name)
    return [item for item in EXERCISES.values() if lesson in (None, item.lesson)]


def find(name: str) -> Exercise:
    if name not in EXERCISES:
        exercises()
    if name not in EXERCISES:
        near = difflib.get_close_matches(str(name), EXERCISES, 1) or sorted(EXERCISES)
        raise ValueError(f"exercise {name!r} is unknown; did you mean {', '.join(near)}?")
    return EXERCISES[name]


def check(name: str, function: Callable[..., Any], seed: int = 0) -> Verdict:
    """Compare ``function`` with the solution of ``name``; shows itself as one sentence in a notebook."""
    task = find(name)
    if not callable(function):
        return Verdict(name, "form", f"Pass the function itself; this is {_shown(function)}.")
    cases = [_draw(task, seed * CASES + n) for n in range(CASES)]
    wrong_call = _wrong_arguments(task, function, cases[0])
    if wrong_call:
        return Verdict(name, "form", wrong_call)
    found = [_run(function, case, n) for n, case in enumerate(cases)]
    wanted = [_run(task.solution, case, n) for n, case in enumerate(cases)]
    if all(_same(task, a, b) for a, b in zip(found, wanted, strict=True)):
        return Verdict(name, "right", f"equal to the solution on {CASES} random inputs.")
    gap = _gap(function, found, wanted)
    if gap:
        return Verdict(name, "gap", gap)
    for wrong in task.mistakes:
        theirs = [_run(wrong.function, case, n) for n, case in enumerate(cases)]
        if all(_same(task, a, b) for a, b in zip(found, theirs, strict=True)):
            return Verdict(name, "mistake", wrong.says, wrong.reread)
    return _first_difference(task, function, cases, found, wanted)


# One run of a function


@dataclass(frozen=True)
class _Outcome:
    value: Any = None
    error: Exception | None = None


@contextmanager
def _seeded(seed: int) -> Iterator[random.Random]:
    """The global generators seeded, and as they were afterwards."""
    state, array_state = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        try:
            yield random.Random(seed)
        finally:
            random.setstate(state)
            np.random.set_state(array_state)


def _draw(task: Exercise, seed: int) -> Any:
    with _seeded(seed) as rng:
        return task.inputs(rng)


def _run(function: Callable[..., Any], case: Any, seed: int) -> _Outcome:
    case = copy.deepcopy(case)  # a function that changes its inputs must not change the others'
    args, named = ((), case) if isinstance(case, Mapping) else (case, {})
    with _seeded(seed):
        try:
            return _Outcome(function(*args, **named))
        except Exception as error:  # the learner's code may raise anything
            return _Outcome(error=error)


def _wrong_arguments(task: Exercise, function: Callable[..., Any], case: Any) -> str | None:
    args, named = ((), case) if isinstance(case, Mapping) else (case, {})
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some builtins have none
        return None
    try:
        signature.bind(*args, **named)
    except TypeError as error:
        wanted = ", ".join(inspect.signature(task.solution).parameters)
        return f"It must take the arguments ({wanted}): {error}."
    return None


# Comparing


def _same(task: Exercise, found: _Outcome, wanted: _Outcome) -> bool:
    if found.error or wanted.error:
        return type(found.error) is type(wanted.error)
    if _form_difference(found.value, wanted.value):
        return False
    if task.equal is not None:
        return task.equal(found.value, wanted.value)
    return _close(found.value, wanted.value, task.tolerance)


def _form_difference(found: Any, wanted: Any, what: str = "It returns") -> str | None:
    """How type, shape or dtype differ, as a sentence; None where only values can."""
    if isinstance(wanted, torch.Tensor):
        if not isinstance(found, torch.Tensor):
            return f"{what} {_shown(found)}, expected {_shown(wanted)}."
        if found.shape != wanted.shape:
            return f"{what} shape {tuple(found.shape)}, expected {tuple(wanted.shape)}."
        return None if found.dtype == wanted.dtype else f"{what} dtype {found.dtype}, expected {wanted.dtype}."
    if isinstance(wanted, int | float) and not isinstance(wanted, bool):
        scalar = isinstance(found, torch.Tensor) and found.ndim == 0
        number = isinstance(found, int | float | np.number) and not isinstance(found, bool)
        return None if scalar or number else f"{what} {_shown(found)}, expected a number."
    if isinstance(wanted, list | tuple):
        if not isinstance(found, list | tuple) or len(found) != len(wanted):
            return f"{what} {_shown(found)}, expected a {type(wanted).__name__} of {len(wanted)}."
        pairs = [(f"Item {n} is", a, b) for n, (a, b) in enumerate(zip(found, wanted, strict=True))]
    elif isinstance(wanted, Mapping):
        if not isinstance(found, Mapping) or set(found) != set(wanted):
            return f"{what} {_shown(found)}, expected a dict with the keys {', '.join(map(str, wanted))}."
        pairs = [(f"Entry {key!r} is", found[key], wanted[key]) for key in wanted]
    else:
        return None if isinstance(found, type(wanted)) else f"{what} {_shown(found)}, expected {_shown(wanted)}."
    return next((said for text, a, b in pairs if (said := _form_difference(a, b, text))), None)


def _close(found: Any, wanted: Any, tolerance: float) -> bool:
    """Equal values, where the form is already known to agree."""
    if isinstance(wanted, torch.Tensor):
        if not wanted.is_floating_point():
            return torch.equal(found, wanted)
        return torch.allclose(found.detach(), wanted.detach(), rtol=tolerance, atol=tolerance, equal_nan=True)
    if isinstance(wanted, float):
        a, b = float(found), float(wanted)
        return math.isclose(a, b, rel_tol=tolerance, abs_tol=tolerance) or (math.isnan(a) and math.isnan(b))
    if isinstance(wanted, list | tuple):
        return all(_close(a, b, tolerance) for a, b in zip(found, wanted, strict=True))
    if isinstance(wanted, Mapping):
        return all(_close(found[key], wanted[key], tolerance) for key in wanted)
    return bool(found == wanted)


# What to say


def _gap(function: Callable[..., Any], found: list[_Outcome], wanted: list[_Outcome]) -> str | None:
    """A sentence where the gap is not filled in yet, or where nothing is returned."""
    unfilled = "the gap is still open; replace the ... in the cell above, run it, then run this one."
    for outcome in found:
        if isinstance(outcome.error, NotImplementedError) or "ellipsis" in str(outcome.error):
            return unfilled
        values = outcome.value if isinstance(outcome.value, list | tuple) else [outcome.value]
        if any(value is Ellipsis for value in values):
            return unfilled
    if all(o.value is None and o.error is None for o in found) and any(o.value is not None for o in wanted):
        with suppress(OSError, TypeError):  # a function typed into a console has no source
            if "..." not in inspect.getsource(function):
                return "it returns None; is the return missing?"
        return unfilled
    return None


def _first_difference(
    task: Exercise, function: Callable[..., Any], cases: list[Any], found: list[_Outcome], wanted: list[_Outcome]
) -> Verdict:
    """A sentence about the smallest case in which the learner's outcome differs."""
    wrong = [n for n, pair in enumerate(zip(found, wanted, strict=True)) if not _same(task, *pair)]
    n = min(wrong, key=lambda i: len(repr(cases[i])))
    mine, right = found[n], wanted[n]
    given = f"for {_given(task, cases[n])}"
    if mine.error and not right.error:
        return Verdict(task.name, "error", f"{_fault(mine.error, function)} {given}.")
    if right.error:
        kind = type(right.error).__name__
        got = type(mine.error).__name__ if mine.error else _shown(mine.value)
        return Verdict(task.name, "value", f"it must raise {kind} {given}; yours gives {got}.")
    form = _form_difference(mine.value, right.value)
    if form:
        return Verdict(task.name, "form", f"{form[:-1]} {given}.")
    text = f"{len(wrong)} of {len(cases)} inputs give another value; {given} yours is "
    return Verdict(task.name, "value", f"{text}{_shown(mine.value)}, expected {_shown(right.value)}.")


def _fault(error: Exception, function: Callable[..., Any]) -> str:
    """An exception of the learner's code with its line, counted from the ``def``."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    said = f"it raises {type(error).__name__}: {str(error).splitlines()[0][:120] if str(error) else 'no message'}"
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if code is not None and frame.filename == code.co_filename:
            line = linecache.getline(frame.filename, frame.lineno).strip()
            place = frame.lineno - code.co_firstlineno + 1
            return f"{said}, in line {place}{f' ({line})' if line else ''},"
    return said


def _given(task: Exercise, case: Any) -> str:
    names = list(inspect.signature(task.solution).parameters)
    pairs = case.items() if isinstance(case, Mapping) else zip(names, case, strict=False)
    return ", ".join(f"{name} = {_shown(value)}" for name, value in pairs)


def _shown(value: Any, limit: int = 90) -> str:
    """A value on one short line."""
    if isinstance(value, torch.Tensor):
        text = f"tensor {_rounded(value.tolist())}"
        return text if len(text) <= limit else f"a tensor of shape {tuple(value.shape)} and dtype {value.dtype}"
    text = repr(_rounded(value))
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 4)
    return type(value)(map(_rounded, value)) if type(value) in (list, tuple) else value
