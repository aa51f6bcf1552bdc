"""Exercises of lesson 00: drawing a token, and counting right answers."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import accumulate

from agentr1_lite.exercises import exercise, mistake

DRAW, COUNT = "Token by token", "How often is it right?"


def _wheel(rng: random.Random) -> tuple[list[float], float]:
    """Half of the time u equals a running sum, often that of a first token that is never drawn."""
    weights = [rng.random() + 0.05 for _ in range(rng.randint(3, 6))]
    probabilities = [w / sum(weights) for w in weights]
    if rng.random() < 0.5:
        return rng.choice([([0.0, *probabilities], 0.0), ([0.5, 0.25, 0.125, 0.125], 0.75)])
    return probabilities, rng.random()


@exercise(0, "draw_token", inputs=_wheel)
def draw_token(probabilities: list[float], u: float) -> int:
    """The first place where the running sum of the probabilities is above u in [0, 1)."""
    return next(i for i, total in enumerate(accumulate(probabilities)) if total > u)


for says, wrong in (
    ("This is the likeliest token whatever u is: greedy, not a draw.", lambda p, u: p.index(max(p))),
    ("Compare u with the running sum p[0] + … + p[i], not with p[i] alone.", lambda p, u: _first(p, u)),
    ("One place too far: the token is where the sum passes u, not the next.", lambda p, u: draw_token(p, u) + 1),
    (
        "Ask for a sum above u, not at least u: at u = 0 yours draws a first token of probability 0.",
        lambda p, u: next(i for i, total in enumerate(accumulate(p)) if total >= u),
    ),
    ("Every token gets the same share; the probabilities are not used.", lambda p, u: int(u * len(p))),
):
    mistake("draw_token", says, DRAW)(wrong)


def _first(probabilities: list[float], u: float) -> int:
    return next((i for i, p in enumerate(probabilities) if p > u), len(probabilities) - 1)


def _answers(rng: random.Random) -> tuple[list[str | None], list[list[str]]]:
    """Each kind of answer a number of times of its own, so that two mistakes seldom cost the same share."""
    kinds = [
        lambda name: None,
        lambda name: f"City of {name}",
        lambda name: f" {name} ",
        lambda name: name.upper(),
        lambda name: f"maybe {name}",
        lambda name: "Paris",
        lambda name: name,
    ]
    pairs = []
    for answer in kinds:
        names = [rng.choice(["Oslo", "Rome", "Lima", "Bern", "Cairo"]) for _ in range(rng.randint(1, 3))]
        pairs += [(answer(name), [name, f"City of {name}"]) for name in names]
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


def _share(right: Callable[[str, list[str]], bool]) -> Callable[[list[str | None], list[list[str]]], float]:
    """Exact match with another idea of which answer is right."""
    return lambda answers, golds: (
        sum(a is not None and right(a, g) for a, g in zip(answers, golds, strict=True)) / len(answers)
    )


def _of_answered(answers, golds):
    said = [(a, g) for a, g in zip(answers, golds, strict=True) if a is not None]
    return sum(_is_right(a, g) for a, g in said) / len(said)


for says, wrong in (
    ("A question without an answer counts too, as wrong; divide by all questions.", _of_answered),
    (
        "Only the first gold is compared; the aliases behind it are right as well.",
        _share(lambda a, g: _is_right(a, g[:1])),
    ),
    (
        "Upper and lower case or outer spaces decide; compare answer.strip().lower() with the golds alike.",
        _share(lambda a, g: a in g),
    ),
    (
        "Spaces around an answer decide; strip() it as well.",
        _share(lambda a, g: a.lower() in map(str.lower, g)),
    ),
    (
        "Upper and lower case decide; lower() the answer and the golds as well.",
        _share(lambda a, g: a.strip() in g),
    ),
    (
        "The golds keep their capitals, so an answer in small letters never equals one; treat both alike.",
        _share(lambda a, g: _same(a) in g),
    ),
    (
        "An answer that contains a gold is not equal to it; this pays for listing candidates.",
        _share(lambda a, g: any(_same(x) in _same(a) for x in g)),
    ),
    (
        "This is the number of right answers; a share is divided by the number of questions.",
        lambda answers, golds: float(sum(map(_is_right, answers, golds))),
    ),
):
    mistake("exact_match", says, COUNT)(wrong)
