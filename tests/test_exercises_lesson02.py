"""Lesson 02's exercises, answered as learners answer them: right in another way, and wrong in the typical ways."""

from __future__ import annotations

import ast
import operator
import re

import pytest

from agentr1_lite.exercises import check


def evaluated(caught):
    def replies(expressions):
        out = []
        for text in expressions:
            try:
                out.append(f"{eval(text):g}")
            except caught as error:
                out.append(f"Error: {error}")
        return out

    return replies


def walked(extra=(), kinds=(int, float), refused="_"):
    known = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
    known |= {ast.USub: operator.neg, **dict(extra)}

    def value(node):
        if isinstance(node, ast.BinOp):
            return known[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.UnaryOp):
            return known[type(node.op)](value(node.operand))
        if type(node.value) not in kinds:
            raise ValueError
        return node.value

    def reply(text):
        try:
            return "Error" if refused in text else f"{value(ast.parse(text, mode='eval').body):g}"
        except Exception:
            return "Error"

    return lambda expressions: [reply(text) for text in expressions]


def by_characters(expressions):
    allowed = [text if re.fullmatch(r"[\d\s.+\-*/()]+", text) else "" for text in expressions]
    return evaluated(Exception)(allowed)


def pay(turn, before):
    reward = -0.05
    for row in turn:
        reward += -0.1 if not row["success"] else 0.2 * (row["call"] not in before)
    return reward


def pay_once(turn, before):
    good = {row["call"] for row in turn if row["success"]} - set(before)
    return 0.2 * len(good) - 0.1 * sum(not row["success"] for row in turn) - 0.05


def skips(turn, before):
    return pay([row for row in turn if row["call"] not in before], before)


def punishes(turn, before):
    return sum((0.2 if row["success"] and row["call"] not in before else -0.1 for row in turn), -0.05)


def finished(cut, tags=0):
    def observations(texts, limits):
        whole = [f"<tool_response>\n{text}\n</tool_response>" for text in texts]
        return [w if len(w) - 33 + tags <= n else w[:n] + cut for w, n in zip(whole, limits, strict=True)]

    return observations


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("name", "answer", "words"),
    [
        ("calculate", evaluated(Exception), ":g hides the rest"),
        ("calculate", evaluated((ValueError, SyntaxError, ZeroDivisionError)), "may raise any error"),
        ("calculate", evaluated(()), "a broken expression raises"),
        ("calculate", walked(), "equal to the solution"),
        ("calculate", walked({ast.Pow: operator.pow}), "Powers are worked out: 9**9**9"),
        ("calculate", by_characters, "a list of allowed characters lets ** through"),
        ("calculate", walked({ast.FloorDiv: operator.floordiv}), "'7 // 2', at "),
        ("calculate", walked(kinds=(int, float, bool)), "'True + 1', at "),
        ("calculate", walked(refused="."), "'2.5 * 2', at "),
        ("observe", finished(" [cut]"), "its closing tag is lost: cut first"),
        ("observe", finished(""), "its closing tag is lost and nothing says so: cut first"),
        ("observe", finished(" [cut]", 33), "is lost, and the tags count towards the limit: cut first"),
        ("observe", finished("", 33), "is lost and nothing says so, and the tags count"),
        ("turn_reward", pay, "equal to the solution"),
        ("turn_reward", pay_once, "A new call made twice in this turn is paid once"),
        ("turn_reward", skips, "A failing call costs nothing where it was made before"),
        ("turn_reward", punishes, "A call that works costs 0.1 where it was made before"),
    ],
)
def test_answers_are_told_what_they_lack(name, answer, words, seed):
    verdict = check(name, answer, seed)
    assert words in verdict.text, str(verdict)


def test_the_shown_difference_is_no_wording_of_an_error():
    from agentr1_lite.exercises.lesson02 import calculate

    def shouts(expressions):
        replies = ["Error!" if x.startswith("Error") else x for x in calculate(expressions)]
        return [str(ast.literal_eval("9")) if x == "2" else x for x in replies]

    verdict = check("calculate", shouts)
    assert verdict.text.endswith("] yours is '9', expected '2'.") and "for expressions[" in verdict.text
