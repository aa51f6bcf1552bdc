"""Exercises of lesson 00: drawing a token, and counting right answers."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import accumulate

from agentr1_lite.exercises import exercise, wrong_versions


def _wheel(rng: random.Random) -> tuple[list[float], float]:
    """Half of the time u equals a running sum, often that of a first token that is never drawn."""
    if rng.random() < 0.5:
        return rng.choice([([0.0, 0.25, 0.75], 0.0), ([0.5, 0.25, 0.125, 0.125], 0.75)])
    weights = [rng.random() + 0.05 for _ in range(rng.randint(3, 6))]
    return [w / sum(weights) for w in weights], rng.random()


@exercise(0, inputs=_wheel)
def draw_token(probabilities: list[float], u: float) -> int:
    """The first place where the running sum of the probabilities is above u in [0, 1)."""
    return next(i for i, total in enumerate(accumulate(probabilities)) if total > u)


@wrong_versions(draw_token, reread="Token by token")
class WrongDraws:
    def greedy(p, u):
        """This is the likeliest token whatever u is: greedy, not a draw."""
        return p.index(max(p))

    def single_probability(p, u):
        """Compare u with the running sum p[0] + … + p[i], not with p[i] alone."""
        return next((i for i, share in enumerate(p) if share > u), len(p) - 1)

    def one_too_far(p, u):
        """One place too far: the token is where the sum passes u, not the next."""
        return draw_token(p, u) + 1

    def at_least(p, u):
        """Ask for a sum above u, not at least u: at u = 0 yours draws a first token of probability 0."""
        return next(i for i, total in enumerate(accumulate(p)) if total >= u)

    def uniform(p, u):
        """Every token gets the same share; the probabilities are not used."""
        return int(u * len(p))


def _answers(rng: random.Random) -> tuple[list[str | None], list[list[str]]]:
    """Each kind of answer a number of times of its own, so that two mistakes seldom cost the same share."""
    pairs = []
    for kind in (None, "City of {}", " {} ", "{upper}", "maybe {}", "Paris", "{}"):
        for name in rng.choices(["Oslo", "Rome", "Lima", "Bern", "Cairo"], k=rng.randint(1, 3)):
            pairs.append((kind and kind.format(name, upper=name.upper()), [name, f"City of {name}"]))
    rng.shuffle(pairs)
    return [answer for answer, _ in pairs], [golds for _, golds in pairs]


def _plain(text: str) -> str:
    return text.strip().lower()


def _is_right(answer: str, golds: list[str]) -> bool:
    return _plain(answer) in map(_plain, golds)


def _share(
    answers: list[str | None], golds: list[list[str]], right: Callable[[str, list[str]], bool] = _is_right
) -> float:
    return sum(a is not None and right(a, g) for a, g in zip(answers, golds, strict=True)) / len(answers)


@exercise(0, inputs=_answers)
def exact_match(answers: list[str | None], golds: list[list[str]]) -> float:
    """Share of questions whose answer equals one of its golds, upper and lower case and outer spaces aside."""
    return _share(answers, golds)


@wrong_versions(exact_match, reread="How often is it right?")
class WrongMatches:
    def of_the_answered(answers, golds):
        """A question without an answer counts too, as wrong; divide by all questions."""
        return exact_match(answers, golds) * len(answers) / sum(answer is not None for answer in answers)

    def first_gold(answers, golds):
        """Only the first gold is compared; the aliases behind it are right as well."""
        return exact_match(answers, [own[:1] for own in golds])

    def as_written(answers, golds):
        """Upper and lower case or outer spaces decide; compare answer.strip().lower() with the golds alike."""
        return _share(answers, golds, lambda a, g: a in g)

    def with_spaces(answers, golds):
        """Spaces around an answer decide; strip() it as well."""
        return _share(answers, golds, lambda a, g: a.lower() in map(str.lower, g))

    def with_capitals(answers, golds):
        """Upper and lower case decide; lower() the answer and the golds as well."""
        return _share(answers, golds, lambda a, g: a.strip() in g)

    def golds_with_capitals(answers, golds):
        """The golds keep their capitals, so an answer in small letters never equals one; treat both alike."""
        return _share(answers, golds, lambda a, g: _plain(a) in g)

    def containing(answers, golds):
        """An answer that contains a gold is not equal to it; this pays for listing candidates."""
        return _share(answers, golds, lambda a, g: any(_plain(gold) in _plain(a) for gold in g))

    def number(answers, golds):
        """This is the number of right answers; a share is divided by the number of questions."""
        return exact_match(answers, golds) * len(answers)
