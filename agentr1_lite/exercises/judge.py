"""Run a learner's function beside the solution, and find the sentence that helps most."""

from __future__ import annotations

import copy
import inspect
import random
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from agentr1_lite.escape import esc
from agentr1_lite.exercises.compare import SHORT, contrast, differences, shown, text
from agentr1_lite.exercises.registry import Exercise, find

MARKS = {"right": ("✔", "right", "#00724f"), "gap": ("○", "to do", "#5c6370")}
WRONG_MARK = ("✘", "not yet", "#b3470a")


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
        return f"{mark} {word} · {self.name}: {self.text}{self._again(self.reread)}"

    def _repr_html_(self) -> str:
        mark, word, color = MARKS.get(self.kind, WRONG_MARK)
        again = self._again(f"<em>{esc(self.reread)}</em>")
        return (
            f'<div role="status" style="border-left:4px solid {color};padding:.4em .8em;margin:.3em 0">'
            f'<span style="background:{color};color:#fff;border-radius:3px;padding:.1em .5em">{mark} {word}</span> '
            f"<code>{esc(self.name)}</code>: {esc(self.text)}{again}</div>"
        )

    def _again(self, heading: str) -> str:
        stop = "" if self.reread.endswith(("?", "!", ".")) else "."
        return f" Read again: {heading}{stop}" if self.reread else ""


def check(name: str, function: Callable[..., Any], seed: int = 0) -> Verdict:
    """Compare ``function`` with the solution of ``name``; shows itself as one sentence in a notebook."""
    task = find(name)
    if not callable(function):
        return Verdict(name, "form", f"Pass the function itself; this is {shown(function)}.")
    drawn = []
    for n in range(task.cases):
        with _seeded(seed * task.cases + n) as rng:
            drawn.append(task.inputs(rng))
    try:
        inspect.signature(function).bind(*drawn[0])
    except TypeError as error:
        wanted = ", ".join(inspect.signature(task.solution).parameters)
        return Verdict(name, "form", f"It must take the arguments ({wanted}): {error}.")
    except ValueError:  # some builtins have no signature
        pass
    tries = [Try(given, _run(function, given, n), _run(task.solution, given, n)) for n, given in enumerate(drawn)]
    try:
        return Verdict(name, *_judged(task, function, tries))
    except Exception as error:  # the learner's own class, whose methods may raise anything
        kind = type(tries[0].found.value).__name__
        return Verdict(name, "form", f"It returns a {kind} that cannot be compared: it raises {type(error).__name__}.")


# One run of a function


class Outcome(NamedTuple):
    value: Any = None
    error: BaseException | None = None
    gradients: tuple[torch.Tensor, ...] | None = None  # of the value, with respect to the inputs that require them


class Try(NamedTuple):
    given: tuple[Any, ...]
    found: Outcome
    wanted: Outcome


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


def _run(function: Callable[..., Any], given: tuple[Any, ...], seed: int) -> Outcome:
    given = copy.deepcopy(given)  # a function that changes its inputs must not change the others'
    leaves = [x for x in given if _has_gradient(x)]
    with _seeded(seed):
        try:
            value = function(*[x.clone() if _has_gradient(x) else x for x in given])  # a leaf cannot change in place
            if not leaves or not _has_gradient(value):
                return Outcome(value)
            gradients = torch.autograd.grad(value.sum(), leaves, allow_unused=True, materialize_grads=True)
            return Outcome(value, gradients=gradients)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # the learner's code may raise anything, and exit() raises too
            return Outcome(error=error)


def _has_gradient(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


# What to say


def _judged(task: Exercise, function: Callable[..., Any], tries: list[Try]) -> tuple[str, ...]:
    """A verdict's kind, text and heading: right, gap or a known mistake if one holds, else where outcomes differ."""
    if all(_same(task, one.found, one.wanted) for one in tries):
        lost = _lost_gradient(task, tries)
        return ("value", lost) if lost else ("right", f"equal to the solution on {task.cases} random inputs.")
    gap = _gap(function, tries)
    if gap:
        return "gap", gap
    for wrong in task.mistakes:
        if all(_same(task, one.found, _run(wrong.function, one.given, n)) for n, one in enumerate(tries)):
            return "mistake", wrong.says, wrong.reread
    return _first_difference(task, function, tries)


def _same(task: Exercise, found: Outcome, wanted: Outcome) -> bool:
    if found.error or wanted.error:
        return type(found.error) is type(wanted.error)
    return not any(differences(found.value, wanted.value, task.tolerance, task.equal))


def _lost_gradient(task: Exercise, tries: list[Try]) -> str | None:
    """A sentence where values are right but gradients are not."""
    pairs = [(one.found.gradients, one.wanted.gradients) for one in tries if one.wanted.gradients]
    if not all(found for found, _ in pairs):
        return (
            "The value is right, but the loss has lost its gradient, so nothing would be learned; leave out "
            "detach(), item(), no_grad() and torch.tensor()."
        )
    if any(any(differences(*pair, task.tolerance)) for pair in pairs):
        return "The value is right, but its gradient is another one; is a part of it detached?"
    return None


def _gap(function: Callable[..., Any], tries: list[Try]) -> str | None:
    """A sentence where the gap is not filled in yet, or where nothing is returned."""
    unfilled = "the gap is still open; replace the ... in the cell above, run it, then run this one."
    for value, error, _ in (one.found for one in tries):
        items = value[:SHORT] if isinstance(value, list | tuple) else [value]
        if isinstance(error, NotImplementedError) or "ellipsis" in _message(error) or any(x is ... for x in items):
            return unfilled
    nothing = all(one.found.value is None and one.found.error is None for one in tries)
    if nothing and any(one.wanted.value is not None for one in tries):
        with suppress(OSError, TypeError):  # a function typed into a console has no source
            if "..." not in inspect.getsource(function):
                return "it returns None; is the return missing?"
        return unfilled
    return None


def _first_difference(task: Exercise, function: Callable[..., Any], tries: list[Try]) -> tuple[str, str]:
    """Kind and sentence about the smallest case in which the learner's outcome differs."""
    wrong = [one for one in tries if not _same(task, one.found, one.wanted)]
    case, mine, right = min(wrong, key=lambda one: len(repr(one.given)))
    given = _given(task, case)
    if mine.error and not right.error:
        return "error", f"{_fault(mine.error, function)} for {given}."
    if right.error:
        got = type(mine.error).__name__ if mine.error else shown(mine.value)
        return "value", f"it must raise {type(right.error).__name__} for {given}; yours gives {got}."
    places = list(differences(mine.value, right.value, task.tolerance, task.equal))
    for place in places:
        if place.form:
            return "form", f"It returns{place.where} {place.form} for {given}."
    a, b = text(mine.value), text(right.value)
    if a != b and max(len(a), len(b)) <= SHORT and task.equal is None:
        parting = f"{given}, yours is {a}, expected {b}"
    else:  # too long to show, so the first place alone
        path, found, wanted, _ = places[0]
        parting = f"{_given(task, case, *path[:1])},{places[0].where} {contrast(found, wanted)}"
    return "value", f"{len(wrong)} of {len(tries)} inputs give another value; for {parting}."


def _given(task: Exercise, case: tuple[Any, ...], at: Any = None) -> str:
    """The arguments; of long lists of texts, and lists beside them, item ``at`` alone."""
    lists = [value for value in case if isinstance(value, list) and isinstance(at, int) and at < len(value)]
    long = {len(value) for value in lists if isinstance(value[at], str) and len(text(value)) > SHORT}
    return ", ".join(
        f"{name}[{at}] = {shown(value[at])}"
        if isinstance(value, list) and len(value) in long
        else f"{name} = {shown(value)}"
        for name, value in zip(inspect.signature(task.solution).parameters, case, strict=False)
    )


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
            line = f" ({frame.line})" if frame.line else ""
            return f"{said}, in line {frame.lineno - code.co_firstlineno + 1}{line},"
    return said
