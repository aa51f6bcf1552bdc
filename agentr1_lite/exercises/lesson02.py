"""Exercises of lesson 02: a calculator that cannot be misused, an observation cut to size, a reward for a turn."""

from __future__ import annotations

import ast
import operator
import random
from collections.abc import Callable
from typing import Any

from agentr1_lite.exercises import exercise, mistake

CALCULATOR, OBSERVATION, PROCESS = (
    "A calculator that cannot be misused",
    "Raw result and observation",
    "Process rewards",
)
OPERATIONS: dict[type, Callable[..., float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
}


def _expression(rng: random.Random) -> str:
    a, b, c = (rng.randint(1, 99) for _ in range(3))
    sums = [f"{a} + {b} * {c}", f"({a} + {b}) * {c}", f"{a} / {b}", f"-{a} - {b} - {c}", f"{a} - {b} / {c}"]
    bad = [f"{a} / ({b} - {b})", f"{a} +", f"len('{a}')", f"{a}.__class__", f"'{a}' * {b}", f"x * {b}"]
    return rng.choice(sums if rng.random() < 0.5 else bad)


def _expressions(rng: random.Random) -> tuple[list[str]]:
    """Two of the harmless kind and all the others, so that every case tells every mistake apart."""
    easy = ["7 / 2", f"{rng.randint(2, 9)} * (3 + 4)"]
    return ([*easy, "len('abc')", *(_expression(rng) for _ in range(6)), *_HARD],)


_HARD = ["1 / (2 - 2)", "3 +", "(1).__class__", "'ab' * 3", "9 - 4 - 3", "-2 * -3"]
_HARD += ["2**3", "7 // 2", "2.5 * 2", "True + 1"]  # a small power: wrong answers work it out


def _walk(node: ast.AST, operations: dict[type, Callable[..., float]]) -> float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in operations:
        return operations[type(node.op)](_walk(node.left, operations), _walk(node.right, operations))
    if isinstance(node, ast.UnaryOp) and type(node.op) in operations:
        return operations[type(node.op)](_walk(node.operand, operations))
    raise ValueError(f"{type(node).__name__} is not arithmetic")


def _calculate(text: str, operations: dict[type, Callable[..., float]] = OPERATIONS) -> str:
    try:
        return f"{_walk(ast.parse(text, mode='eval').body, operations):g}"
    except (ValueError, SyntaxError, ZeroDivisionError) as error:
        return f"Error: {error}"


def _alike(found: list[str], wanted: list[str]) -> bool:
    """Numbers as text must agree, errors only in being errors."""
    return all(
        a == b or (str(a).startswith("Error") and b.startswith("Error")) for a, b in zip(found, wanted, strict=True)
    )


@exercise(2, "calculate", inputs=_expressions, equal=_alike)
def calculate(expressions: list[str]) -> list[str]:
    """The value of each as text (``:g``), or ``Error: …``; numbers, + − * / and brackets alone."""
    return [_calculate(text) for text in expressions]


def _with_eval(text: str, caught: tuple[type[Exception], ...] = (Exception,), number: bool = True) -> str:
    """What eval replies; only ever run on this file's own inputs."""
    try:
        value = eval(text, {"__builtins__": {"len": len}})
        return f"{value:g}" if number or isinstance(value, int | float) else str(value)
    except caught as error:
        return f"Error: {error}"


def _raises(text: str) -> str:
    return f"{_walk(ast.parse(text, mode='eval').body, OPERATIONS):g}"


def _one_by_one(one: Callable[[str], Any]) -> Callable[[list[str]], list[Any]]:
    return lambda expressions: [one(text) for text in expressions]


for says, wrong in (
    (
        "eval runs whatever the policy writes, len('abc') too: walk the parsed tree instead.",
        lambda t: _with_eval(t, number=False),
    ),
    ("eval runs whatever the policy writes: len('abc') gives 3, and :g hides the rest. Walk the tree.", _with_eval),
    (
        "eval runs whatever the policy writes, len('abc') too, and may raise any error: walk the parsed tree instead.",
        lambda t: _with_eval(t, (ValueError, SyntaxError, ZeroDivisionError)),
    ),
    (
        "eval runs whatever the policy writes, and a broken expression raises: walk the tree, and reply Error: …",
        lambda t: _with_eval(t, ()),
    ),
    ("A broken expression must come back as text that starts with Error; yours raises.", _raises),
    (
        "Powers are worked out: 9**9**9 would keep the machine busy for ever. Leave ** (Pow) out.",
        lambda t: _calculate(t, {**OPERATIONS, ast.Pow: operator.pow}),
    ),
    (
        "Powers and // are worked out: a list of allowed characters lets ** through, and 9**9**9 would keep the "
        "machine busy for ever. Walk the tree, knowing + − * / alone.",
        lambda t: _calculate(t, {**OPERATIONS, ast.Pow: operator.pow, ast.FloorDiv: operator.floordiv}),
    ),
    ("/ must be true division: 7 / 2 is 3.5.", lambda t: _calculate(t, {**OPERATIONS, ast.Div: operator.floordiv})),
    (
        "A minus in front of a number or bracket (a UnaryOp) is not handled.",
        lambda t: _calculate(t, {kind: act for kind, act in OPERATIONS.items() if kind is not ast.USub}),
    ),
    (
        "An error must say so: an empty reply leaves the policy without a hint.",
        lambda t: "" if _calculate(t).startswith("Error") else _calculate(t),
    ),
):
    mistake("calculate", says, CALCULATOR)(_one_by_one(wrong))


def _page(rng: random.Random) -> tuple[str, int]:
    words = " ".join(rng.choice(["river", "city", "founded", "in", "the"]) for _ in range(rng.randint(3, 12)))
    return words, rng.choice([len(words) + 5, len(words), 9, 14])


def _long_page(rng: random.Random) -> tuple[list[str], list[int]]:
    pages = [_page(rng) for _ in range(6)] + [("the river rises in the old city", 12), ("short", 5)]
    return [text for text, _ in pages], [limit for _, limit in pages]


def _wrap(text: str, limit: int) -> str:
    inside = text if len(text) <= limit else text[:limit] + " [cut]"
    return f"<tool_response>\n{inside}\n</tool_response>"


_TAGS = len(_wrap("", 0))


def _cut_finished(text: str, limit: int, tags: int, mark: str) -> str:
    whole = _wrap(text, len(text))
    return whole if len(text) + tags <= limit else whole[:limit] + mark


def _each(one: Callable[[str, int], str]) -> Callable[[list[str], list[int]], list[str]]:
    return lambda texts, limits: [one(text, limit) for text, limit in zip(texts, limits, strict=True)]


@exercise(2, "observe", inputs=_long_page)
def observe(texts: list[str], limits: list[int]) -> list[str]:
    """Each text in its tags, cut to so many characters with `` [cut]`` behind where it is longer."""
    return _each(_wrap)(texts, limits)


for says, one in (
    (
        "The closing tag is cut off with the rest, so the policy reads on inside the reply: cut first, then wrap.",
        lambda t, n: _wrap(t, n) if len(t) <= n else f"<tool_response>\n{t[:n]} [cut]",
    ),
    (
        "A long reply is dropped whole; keep its beginning, which is where search puts the best passage.",
        lambda t, n: _wrap(t, n) if len(t) <= n else "<tool_response>\n [cut]\n</tool_response>",
    ),
    (
        "Nothing says that the reply was cut; the policy takes the stump for all there was.",
        lambda t, n: f"<tool_response>\n{t[:n]}\n</tool_response>",
    ),
    (
        "Replies that fit are marked as cut too; compare len(text) with limit.",
        lambda t, n: f"<tool_response>\n{t[:n]} [cut]\n</tool_response>",
    ),
    ("The raw text is no observation yet: the tags around it are missing.", lambda t, n: _wrap(t, n)[16:-17]),
    *[
        (
            f"The finished text is cut, so its closing tag is lost{silent}{counted}: cut first, then wrap.",
            lambda t, n, tags=tags, mark=mark: _cut_finished(t, n, tags, mark),
        )
        for tags, counted in ((0, ""), (_TAGS, ", and the tags count towards the limit"))
        for mark, silent in ((" [cut]", ""), ("", " and nothing says so"))
    ],
):
    mistake("observe", says, OBSERVATION)(_each(one))


def _turn(rng: random.Random) -> tuple[list[dict[str, Any]], list[str]]:
    """Good and failing calls, new and made before: each of the four at least once, a new good one twice; and what
    was called before."""
    before = [f"{rng.randint(1, 9)} + {rng.randint(1, 9)}", "40 / 0"]
    kinds = [(before[0], True), (before[1], False), ("20 / 7", True), ("30 / 0", False)]
    kinds += [kinds[2], *rng.choices(kinds, k=rng.randint(0, 2))]
    kinds += [(f"{n} * 3", True) for n in range(rng.randint(0, 2))]
    rng.shuffle(kinds)
    return [{"call": call, "success": ok} for call, ok in kinds], before


def _pay(
    turn: list[dict[str, Any]], before: list[str], good: float = 0.2, bad: float = -0.1, step: float = -0.05
) -> float:
    found = sum(good for row in turn if row["success"] and row["call"] not in before)
    return step + found + sum(bad for row in turn if not row["success"])


def _pay_once(turn: list[dict[str, Any]], before: list[str]) -> float:
    fresh = [row["call"] for row in turn if row["success"] and row["call"] not in before]
    return _pay(turn, before) - 0.2 * (len(fresh) - len(set(fresh)))


@exercise(2, "turn_reward", inputs=_turn)
def turn_reward(turn: list[dict[str, Any]], before: list[str]) -> float:
    """−0.05 for the turn, +0.2 for each call that works and was not made before, −0.1 for each that fails."""
    return _pay(turn, before)


for says, wrong in (
    (
        "A call made before is paid again: the policy will learn to repeat one easy call for ever.",
        lambda turn, before: _pay(turn, []),
    ),
    (
        "A new call made twice in this turn is paid once; each call that works and is not in before earns 0.2.",
        _pay_once,
    ),
    ("The price of the turn (−0.05) is missing.", lambda turn, before: _pay(turn, before, step=0.0)),
    (
        "A failing call costs nothing where it was made before; every one that fails costs 0.1.",
        lambda turn, before: _pay([row for row in turn if row["call"] not in before], before),
    ),
    (
        "A call that works costs 0.1 where it was made before; it earns nothing, and only failing ones cost.",
        lambda turn, before: _pay([{**r, "success": r["success"] and r["call"] not in before} for r in turn], before),
    ),
    ("Failing calls cost nothing here; they should cost 0.1 each.", lambda turn, before: _pay(turn, before, bad=0.0)),
    (
        "Failing calls are paid as if they had worked: look at success.",
        lambda turn, before: _pay([{**row, "success": True} for row in turn], before),
    ),
    (
        "The price of the turn is taken once for every call; a turn is one turn.",
        lambda turn, before: _pay(turn, before, step=-0.05 * len(turn)),
    ),
):
    mistake("turn_reward", says, PROCESS)(wrong)
