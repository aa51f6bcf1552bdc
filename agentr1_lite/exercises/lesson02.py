"""Exercises of lesson 02: a calculator that cannot be misused, an observation cut to size, a reward for a turn."""

from __future__ import annotations

import ast
import random
from collections.abc import Callable
from operator import add, floordiv, mul, neg, pow, sub, truediv
from typing import Any

from agentr1_lite.exercises import exercise, wrong_versions

Operations = dict[type, Callable[..., float]]
OPERATIONS: Operations = {ast.Add: add, ast.Sub: sub, ast.Mult: mul, ast.Div: truediv, ast.USub: neg}
HARD = ["1 / (2 - 2)", "3 +", "(1).__class__", "'ab' * 3", "9 - 4 - 3", "-2 * -3"]
HARD += ["2**3", "7 // 2", "2.5 * 2", "True + 1"]  # a small power: wrong answers work it out


def _expressions(rng: random.Random) -> tuple[list[str]]:
    """All of the hard kind, so that every case tells every mistake apart, and some with other numbers."""
    a, b, c = (rng.randint(2, 99) for _ in range(3))
    sums = [f"{a} * (3 + 4)", f"{a} + {b} * {c}", f"{a} / {b}", f"-{a} - {b} - {c}", f"{a} - {b} / {c}"]
    bad = [f"{a} / ({b} - {b})", f"{a} +", f"{a}.__class__", f"'{a}' * {b}", f"x * {b}"]
    return (["7 / 2", "len('abc')", *rng.sample(sums, 3), *rng.sample(bad, 3), *HARD],)


def _value(node: ast.AST, operations: Operations) -> float:
    match node:
        case ast.Constant(value) if type(value) in (int, float):
            return value
        case ast.BinOp(left, op, right) if type(op) in operations:
            return operations[type(op)](_value(left, operations), _value(right, operations))
        case ast.UnaryOp(op, operand) if type(op) in operations:
            return operations[type(op)](_value(operand, operations))
    raise ValueError(f"{type(node).__name__} is not arithmetic")


def _walk(text: str, operations: Operations = OPERATIONS) -> float:
    return _value(ast.parse(text, mode="eval").body, operations)


def _eval(text: str) -> Any:
    """Only ever run on this file's own inputs."""
    return eval(text, {"__builtins__": {"len": len}})


def _reply(
    evaluate: Callable[[str], Any], text: str, caught: Any = (ValueError, SyntaxError, ZeroDivisionError)
) -> str:
    try:
        return f"{evaluate(text):g}"
    except caught as error:
        return f"Error: {error}"


def _with(text: str, operations: Operations) -> str:
    return _reply(lambda text: _walk(text, operations), text)


def _alike(found: str, wanted: str) -> bool:
    """Numbers as text must agree, errors only in being errors."""
    return found == wanted or (found.startswith("Error") and wanted.startswith("Error"))


@exercise(2, inputs=_expressions, equal=_alike)
def calculate(expressions: list[str]) -> list[str]:
    """The value of each as text (``:g``), or ``Error: …``; numbers, + − * / and brackets alone."""
    return [_reply(_walk, text) for text in expressions]


def _of_each(one: Callable[..., str]) -> Callable[..., list[str]]:
    return lambda *lists: list(map(one, *lists))


@wrong_versions(calculate, reread="A calculator that cannot be misused", wrap=_of_each)
class WrongReplies:
    def any_value(text):
        """eval runs whatever the policy writes, len('abc') too: walk the parsed tree instead."""
        try:
            value = _eval(text)
            return f"{value:g}" if isinstance(value, int | float) else str(value)
        except Exception as error:
            return f"Error: {error}"

    def any_number(text):
        """eval runs whatever the policy writes: len('abc') gives 3, and :g hides the rest. Walk the tree."""
        return _reply(_eval, text, Exception)

    def few_errors_caught(text):
        """eval runs whatever the policy writes, len('abc') too, and may raise any error: walk the parsed tree
        instead."""
        return _reply(_eval, text)

    def no_error_caught(text):
        """eval runs whatever the policy writes, and a broken expression raises: walk the tree, and reply Error: …"""
        return _reply(_eval, text, ())

    def walk_raises(text):
        """A broken expression must come back as text that starts with Error; yours raises."""
        return _reply(_walk, text, ())

    def powers(text):
        """Powers are worked out: 9**9**9 would keep the machine busy for ever. Leave ** (Pow) out."""
        return _with(text, OPERATIONS | {ast.Pow: pow})

    def characters(text):
        """Powers and // are worked out: a list of allowed characters lets ** through, and 9**9**9 would keep the
        machine busy for ever. Walk the tree, knowing + − * / alone."""
        return _with(text, OPERATIONS | {ast.Pow: pow, ast.FloorDiv: floordiv})

    def floor_division(text):
        """/ must be true division: 7 / 2 is 3.5."""
        return _with(text, OPERATIONS | {ast.Div: floordiv})

    def no_sign(text):
        """A minus in front of a number or bracket (a UnaryOp) is not handled."""
        return _with(text, {kind: act for kind, act in OPERATIONS.items() if kind is not ast.USub})

    def silent(text):
        """An error must say so: an empty reply leaves the policy without a hint."""
        reply = _reply(_walk, text)
        return "" if reply.startswith("Error") else reply


def _pages(rng: random.Random) -> tuple[list[str], list[int]]:
    texts = [" ".join(rng.choices(["river", "city", "founded", "in", "the"], k=rng.randint(3, 12))) for _ in range(6)]
    limits = [rng.choice([len(text) + 5, len(text), 9, 14]) for text in texts]
    return [*texts, "the river rises in the old city", "short"], [*limits, 12, 5]


OPEN, CUT, CLOSE = "<tool_response>\n", " [cut]", "\n</tool_response>"


def _observation(text: str, limit: int) -> str:
    return f"{OPEN}{text if len(text) <= limit else text[:limit] + CUT}{CLOSE}"


@exercise(2, inputs=_pages)
def observe(texts: list[str], limits: list[int]) -> list[str]:
    """Each text in its tags, cut to so many characters with `` [cut]`` behind where it is longer."""
    return list(map(_observation, texts, limits))


def _cut_finished(text: str, limit: int, tags: str, cut: str) -> str:
    """Cut with the tags around it, of which ``tags`` count towards the limit."""
    whole = f"{OPEN}{text}{CLOSE}"
    return whole if len(tags + text) <= limit else whole[:limit] + cut


@wrong_versions(observe, reread="Raw result and observation", wrap=_of_each)
class WrongObservations:
    def no_closing_tag(text, limit):
        """The closing tag is cut off with the rest, so the policy reads on inside the reply: cut first, then wrap."""
        return _observation(text, limit) if len(text) <= limit else OPEN + text[:limit] + CUT

    def dropped(text, limit):
        """A long reply is dropped whole; keep its beginning, which is where search puts the best passage."""
        return _observation(text if len(text) <= limit else CUT, len(text))

    def silent(text, limit):
        """Nothing says that the reply was cut; the policy takes the stump for all there was."""
        return OPEN + text[:limit] + CLOSE

    def always_marked(text, limit):
        """Replies that fit are marked as cut too; compare len(text) with limit."""
        return OPEN + text[:limit] + CUT + CLOSE

    def no_tags(text, limit):
        """The raw text is no observation yet: the tags around it are missing."""
        return _observation(text, limit).removeprefix(OPEN).removesuffix(CLOSE)

    def cut_finished(text, limit):
        """The finished text is cut, so its closing tag is lost: cut first, then wrap."""
        return _cut_finished(text, limit, "", CUT)

    def cut_finished_silently(text, limit):
        """The finished text is cut, so its closing tag is lost and nothing says so: cut first, then wrap."""
        return _cut_finished(text, limit, "", "")

    def tags_counted(text, limit):
        """The finished text is cut, so its closing tag is lost, and the tags count towards the limit: cut first, then
        wrap."""
        return _cut_finished(text, limit, OPEN + CLOSE, CUT)

    def tags_counted_silently(text, limit):
        """The finished text is cut, so its closing tag is lost and nothing says so, and the tags count towards the
        limit: cut first, then wrap."""
        return _cut_finished(text, limit, OPEN + CLOSE, "")


Rows = list[dict[str, Any]]


def _turn(rng: random.Random) -> tuple[Rows, list[str]]:
    """Good and failing calls, new and made before: each of the four at least once, a new good one twice; and what
    was called before."""
    before = [f"{rng.randint(1, 9)} + {rng.randint(1, 9)}", "40 / 0"]
    kinds = [(before[0], True), (before[1], False), ("20 / 7", True), ("30 / 0", False)]
    calls = [*kinds, kinds[2], *rng.choices(kinds, k=rng.randint(0, 2)), *[("2 * 3", True)] * rng.randint(0, 1)]
    rng.shuffle(calls)
    return [{"call": call, "success": worked} for call, worked in calls], before


def _pay(turn: Rows, before: list[str], good: float = 0.2, bad: float = -0.1, step: float = -0.05) -> float:
    found = sum(good for row in turn if row["success"] and row["call"] not in before)
    return step + found + sum(bad for row in turn if not row["success"])


@exercise(2, inputs=_turn)
def turn_reward(turn: Rows, before: list[str]) -> float:
    """−0.05 for the turn, +0.2 for each call that works and was not made before, −0.1 for each that fails."""
    return _pay(turn, before)


@wrong_versions(turn_reward, reread="Process rewards")
class WrongPayments:
    def repeats_paid(turn, before):
        """A call made before is paid again: the policy will learn to repeat one easy call for ever."""
        return _pay(turn, [])

    def new_calls_paid_once(turn, before):
        """A new call made twice in this turn is paid once; each call that works and is not in before earns 0.2."""
        return _pay([row for n, row in enumerate(turn) if not row["success"] or row not in turn[:n]], before)

    def turn_is_free(turn, before):
        """The price of the turn (−0.05) is missing."""
        return _pay(turn, before, step=0.0)

    def failing_again_is_free(turn, before):
        """A failing call costs nothing where it was made before; every one that fails costs 0.1."""
        return _pay([row for row in turn if row["call"] not in before], before)

    def repeats_cost(turn, before):
        """A call that works costs 0.1 where it was made before; it earns nothing, and only failing ones cost."""
        return _pay([row | {"success": row["success"] and row["call"] not in before} for row in turn], before)

    def failing_is_free(turn, before):
        """Failing calls cost nothing here; they should cost 0.1 each."""
        return _pay(turn, before, bad=0.0)

    def failing_is_paid(turn, before):
        """Failing calls are paid as if they had worked: look at success."""
        return _pay([row | {"success": True} for row in turn], before)

    def price_of_calls(turn, before):
        """The price of the turn is taken once for every call; a turn is one turn."""
        return _pay(turn, before, step=-0.05 * len(turn))
