"""Lesson 00's exercises, answered as learners answer them: right in another way, and wrong in the typical ways."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import accumulate

import pytest

from agentr1_lite.exercises import check


def match(answers, golds, change=lambda text: text.strip().lower(), gold=None, first=False):
    right = 0
    for answer, accepted in zip(answers, golds, strict=True):
        if answer is not None:
            right += change(answer) in [(gold or change)(text) for text in accepted[: 1 if first else None]]
    return right / len(answers)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "equal to the solution"),
        ({"change": str.lower}, "Spaces around an answer decide"),
        ({"change": str.strip}, "Upper and lower case decide; lower()"),
        ({"change": str}, "Upper and lower case or outer spaces decide"),
        ({"gold": str}, "The golds keep their capitals"),
        ({"first": True}, "Only the first gold is compared"),
        ({"first": True, "change": str.lower}, "inputs give another value"),
    ],
)
def test_exact_match_is_told_what_it_lacks(options, words, seed):
    assert words in check("exact_match", lambda answers, golds: match(answers, golds, **options), seed).text


@pytest.mark.parametrize("seed", range(5))
def test_a_token_of_probability_zero_is_never_drawn(seed):
    assert check("draw_token", lambda p, u: bisect_right([*accumulate(p)], u), seed)
    assert "not at least u" in check("draw_token", lambda p, u: bisect_left([*accumulate(p)], u), seed).text
