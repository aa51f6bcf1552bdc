"""Exercises of lesson 00: drawing a token, and counting right answers."""

from __future__ import annotations

import random
from itertools import accumulate

from agentr1_lite.exercises import exercise, mistake

DRAW, COUNT = "Token by token", "How often is it right?"


def _wheel(rng: random.Random) -> tuple[list[float], float]:
    weights = [rng.random() + 0.05 for _ in range(rng.randint(3, 6))]
    return [w / sum(weights) for w in weights], rng.random()


@exercise(0, "draw_token", inputs=_wheel)
def draw_token(probabilities: list[float], u: float) -> int:
    """The first place where the running sum of the probabilities is above u in [0, 1)."""
    return next(i for i, total in enumerate(accumulate(probabilities)) if total > u)


for says, wrong in (
    ("This is the likeliest token whatever u is: greedy, not a draw.", lambda p, u: p.index(max(p))),
    ("Compare u with the running sum p[0] + … + p[i], not with p[i] alone.", lambda p, u: _first(p, u)),
    ("One place too far: the token is where the sum passes u, not the next.", lambda p, u: draw_token(p, u) + 1),
    ("Every token gets the same share; the probabilities are not used.", lambda p, u: int(u * len(p))),
):
    mistake("draw_token", says, DRAW)(wrong)


def _first(probabilities: list[float], u: float) -> int:
    return next((i for i, p in enumerate(probabilities) if p > u), len(probabilities) - 1)


def _answers(rng: random.Random) -> tuple[list[str | None], list[list[str]]]:
    """Every case holds a missing answer, an alias, two in capitals and an answer with the gold in it."""
    names = ["Oslo", "Rome", "Lima", "Bern", "Cairo"]
    golds = [[name, f"City of {name}"] for name in rng.sample(names, 5)]
    answers = [None, golds[1][1], f" {golds[2][0].upper()}", f"maybe {golds[3][0]}", golds[4][0].upper()]
    more = rng.randint(0, 4)
    pairs = [
        *zip(answers, golds, strict=True),
        *[(rng.choice([*names, None]), [rng.choice(names)]) for _ in range(more)],
    ]
    rng.shuffle(pairs)
    return [answer for answer, _ in pairs], [gold for _, gold in pairs]


def _same(text: str) -> str:
    return text.strip().lower()


def _is_right(answer: str | None, golds: list[str]) -> bool:
    return answer is not None and _same(answer) in map(_same, golds)


@exercise(0, "exact_match", inputs=_answers)
def exact_match(answers: list[str | None], golds: list[list[str]]) -> float:
    """Share of questions whose answer equals one of its golds, upper and lower case and outer spaces aside."""
    return sum(map(_is_right, answers, golds)) / len(answers)


def _of_answered(answers, golds):
    said = [(a, g) for a, g in zip(answers, golds, strict=True) if a is not None]
    return sum(_is_right(a, g) for a, g in said) / len(said)


for says, wrong in (
    ("A question without an answer counts too, as wrong; divide by all questions.", _of_answered),
    (
        "Only the first gold is compared; the aliases behind it are right as well.",
        lambda answers, golds: exact_match(answers, [g[:1] for g in golds]),
    ),
    (
        "Upper and lower case or outer spaces decide; compare answer.strip().lower() with the golds alike.",
        lambda answers, golds: sum(a in g for a, g in zip(answers, golds, strict=True)) / len(answers),
    ),
    (
        "An answer that contains a gold is not equal to it; this pays for listing candidates.",
        lambda answers, golds: (
            sum(a is not None and any(_same(x) in _same(a) for x in g) for a, g in zip(answers, golds, strict=True))
            / len(answers)
        ),
    ),
    (
        "This is the number of right answers; a share is divided by the number of questions.",
        lambda answers, golds: float(sum(map(_is_right, answers, golds))),
    ),
):
    mistake("exact_match", says, COUNT)(wrong)
