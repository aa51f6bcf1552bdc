"""Exercises of the lessons: a gap to fill, and a check that knows the typical mistakes.

A lesson's file holds the solution, a function that draws its inputs, and wrong
versions with what to say to each::

    @exercise(4, "group_advantage", inputs=draw)
    def group_advantage(rewards, groups): ...

    @mistake("group_advantage", "The standard deviation is the biased one.", reread="Group effects")
    def _biased(rewards, groups): ...

``check(name, function)`` runs the learner's function and the solution on the
same random inputs. A mistake is named where the learner's outcome equals that
wrong version's on every input. No run is timed: interrupting the kernel stops an
endless loop.
"""

from __future__ import annotations

import copy
import difflib
import importlib
import inspect
import linecache
import pkgutil
import random
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from agentr1_lite.escape import esc
from agentr1_lite.exercises.compare import SHORT, close, contrast, differing_place, form_difference, shown, text

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
    and relative; ``equal(found, wanted)`` replaces the comparison of values; ``cases``
    inputs are drawn. Where an input requires grad and the solution's value does,
    gradients must agree too.
    """

    lesson: int
    name: str
    solution: Callable[..., Any]
    inputs: Callable[[random.Random], Any]
    mistakes: list[Mistake] = field(default_factory=list)
    tolerance: float = 1e-5
    equal: Callable[[Any, Any], bool] | None = None
    cases: int = CASES


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
        again = f" Read again: {self.reread}{self._stop()}" if self.reread else ""
        return f"{mark} {word} · {self.name}: {self.text}{again}"

    def _repr_html_(self) -> str:
        mark, word, color = MARKS.get(self.kind, WRONG_MARK)
        again = f" Read again: <em>{esc(self.reread)}</em>{self._stop()}" if self.reread else ""
        return (
            f'<div role="status" style="border-left:4px solid {color};padding:.4em .8em;margin:.3em 0">'
            f'<span style="background:{color};color:#fff;border-radius:3px;padding:.1em .5em">{mark} {word}</span> '
            f"<code>{esc(self.name)}</code>: {esc(self.text)}{again}</div>"
        )

    def _stop(self) -> str:
        return "" if self.reread.endswith(("?", "!", ".")) else "."


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
        return Verdict(name, "form", f"Pass the function itself; this is {shown(function)}.")
    cases = [_draw(task, seed * task.cases + n) for n in range(task.cases)]
    wrong_call = _wrong_arguments(task, function, cases[0])
    if wrong_call:
        return Verdict(name, "form", wrong_call)
    found = [_run(function, case, n) for n, case in enumerate(cases)]
    wanted = [_run(task.solution, case, n) for n, case in enumerate(cases)]
    try:
        return _judged(task, function, cases, found, wanted)
    except Exception as error:  # the learner's own class, whose methods may raise anything
        kind = type(found[0].value).__name__
        return Verdict(name, "form", f"It returns a {kind} that cannot be compared: it raises {type(error).__name__}.")


def _judged(
    task: Exercise, function: Callable[..., Any], cases: list[Any], found: list[_Outcome], wanted: list[_Outcome]
) -> Verdict:
    """The first that holds: right, gap, a known mistake; else where the outcomes differ."""
    name = task.name
    if all(_same(task, a, b) for a, b in zip(found, wanted, strict=True)):
        lost = _lost_gradient(task, found, wanted)
        if lost:
            return Verdict(name, "value", lost)
        return Verdict(name, "right", f"equal to the solution on {task.cases} random inputs.")
    gap = _gap(function, found, wanted)
    if gap:
        return Verdict(name, "gap", gap)
    for wrong in task.mistakes:
        if all(_same(task, found[n], _run(wrong.function, case, n)) for n, case in enumerate(cases)):
            return Verdict(name, "mistake", wrong.says, wrong.reread)
    return _first_difference(task, function, cases, found, wanted)


# One run of a function


@dataclass(frozen=True)
class _Outcome:
    value: Any = None
    error: BaseException | None = None
    gradients: tuple[torch.Tensor, ...] | None = None  # of the value, with respect to the inputs that require them


@contextmanager
def _seeded(seed: int) -> Iterator[random.Random]:
    """The global generators seeded and gradients on; these and the default dtype are afterwards as they were."""
    state, array_state, dtype = random.getstate(), np.random.get_state(), torch.get_default_dtype()
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        try:
            yield random.Random(seed)
        finally:
            random.setstate(state)
            np.random.set_state(array_state)
            torch.set_default_dtype(dtype)


def _draw(task: Exercise, seed: int) -> Any:
    with _seeded(seed) as rng:
        return task.inputs(rng)


def _run(function: Callable[..., Any], case: Any, seed: int) -> _Outcome:
    case = copy.deepcopy(case)  # a function that changes its inputs must not change the others'
    args, named = ((), case) if isinstance(case, Mapping) else (case, {})
    leaves = [x for x in (*args, *named.values()) if _has_gradient(x)]
    with _seeded(seed):
        args = [x.clone() if _has_gradient(x) else x for x in args]  # a leaf could not be changed in place
        named = {key: x.clone() if _has_gradient(x) else x for key, x in named.items()}
        try:
            value = function(*args, **named)
            if not leaves or not _has_gradient(value):
                return _Outcome(value)
            gradients = torch.autograd.grad(value.sum(), leaves, allow_unused=True, materialize_grads=True)
            return _Outcome(value, gradients=gradients)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # the learner's code may raise anything, and exit() raises too
            return _Outcome(error=error)


def _has_gradient(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


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
    if form_difference(found.value, wanted.value):
        return False
    if task.equal is not None:
        return task.equal(found.value, wanted.value)
    return close(found.value, wanted.value, task.tolerance)


def _lost_gradient(task: Exercise, found: list[_Outcome], wanted: list[_Outcome]) -> str | None:
    """A sentence where values are right but gradients are not."""
    pairs = [(a.gradients, b.gradients) for a, b in zip(found, wanted, strict=True) if b.gradients is not None]
    if any(a is None for a, _ in pairs):
        return (
            "The value is right, but the loss has lost its gradient, so nothing would be learned; leave out "
            "detach(), item(), no_grad() and torch.tensor()."
        )
    if not all(close(a, b, task.tolerance) for a, b in pairs):
        return "The value is right, but its gradient is another one; is a part of it detached?"
    return None


# What to say


def _gap(function: Callable[..., Any], found: list[_Outcome], wanted: list[_Outcome]) -> str | None:
    """A sentence where the gap is not filled in yet, or where nothing is returned."""
    unfilled = "the gap is still open; replace the ... in the cell above, run it, then run this one."
    for outcome in found:
        if isinstance(outcome.error, NotImplementedError) or "ellipsis" in _message(outcome.error):
            return unfilled
        values = outcome.value[:SHORT] if isinstance(outcome.value, list | tuple) else [outcome.value]
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
        got = type(mine.error).__name__ if mine.error else shown(mine.value)
        return Verdict(task.name, "value", f"it must raise {kind} {given}; yours gives {got}.")
    form = form_difference(mine.value, right.value)
    if form:
        return Verdict(task.name, "form", f"{form[:-1]} {given}.")
    parting = _parting(task, cases[n], mine.value, right.value)
    return Verdict(task.name, "value", f"{len(wrong)} of {len(cases)} inputs give another value; for {parting}.")


def _parting(task: Exercise, case: Any, found: Any, wanted: Any) -> str:
    """The input and both values; of values too long to show, the first place where they differ."""
    a, b = text(found), text(wanted)
    if a != b and max(len(a), len(b)) <= SHORT and task.equal is None:
        return f"{_given(task, case)}, yours is {a}, expected {b}"
    path, found, wanted = differing_place(found, wanted, task.tolerance, task.equal)
    given = _given(task, case, path[0] if path else None)
    where = "".join(f"[{', '.join(map(repr, key if isinstance(key, tuple) else [key]))}]" for key in path)
    given += f", at {where}" if path else ","
    return f"{given} {contrast(found, wanted)}"


def _message(error: BaseException | None) -> str:
    """What an error says; a learner's own class may fail to say it."""
    try:
        return str(error)
    except Exception:
        return ""


def _fault(error: BaseException, function: Callable[..., Any]) -> str:
    """An exception of the learner's code with its line, counted from the ``def``."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    said = f"it raises {type(error).__name__}: {[*_message(error).splitlines(), 'no message'][0][:120]}"
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if code is not None and frame.filename == code.co_filename:
            line = linecache.getline(frame.filename, frame.lineno).strip()
            place = frame.lineno - code.co_firstlineno + 1
            return f"{said}, in line {place}{f' ({line})' if line else ''},"
    return said


def _given(task: Exercise, case: Any, at: Any = None) -> str:
    """The arguments; of long lists of texts, and lists beside them, item ``at`` alone."""
    names = list(inspect.signature(task.solution).parameters)
    pairs = list(case.items() if isinstance(case, Mapping) else zip(names, case, strict=False))
    rows = [value for _, value in pairs if isinstance(value, list) and isinstance(at, int) and at < len(value)]
    long = [value for value in rows if isinstance(value[at], str) and len(text(value)) > SHORT]
    return ", ".join(
        f"{name}[{at}] = {shown(value[at])}"
        if long and isinstance(value, list) and len(value) == len(long[0])
        else f"{name} = {shown(value)}"
        for name, value in pairs
    )
