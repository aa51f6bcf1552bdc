from __future__ import annotations

import ast
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentr1_lite.scoring import (
    bootstrap_interval,
    mean_interval,
    normalize,
    paired_difference_interval,
    score_answer,
    three_digits,
    wilson_interval,
    with_interval,
)

GOLDEN = Path(__file__).parent / "golden" / "answer_scores.tsv"
BENCHMARKS = ("hotpotqa", "2wiki", "musique")
WORDS = st.sampled_from(["the", "a", "yes", "no", "Oslo", "oslo", "New", "York", "3.0", "!!!", "", "Beyoncé", "U.S."])
ANSWERS = st.lists(WORDS, max_size=4).map(" ".join)


def golden_rows() -> list[tuple]:
    header, *lines = GOLDEN.read_text(encoding="utf-8").rstrip("\n").split("\n")
    names = header.split("\t")[2:]
    rows = []
    for line in lines:
        prediction, golds, *numbers = line.split("\t")
        scores = dict(zip(names, map(float, numbers), strict=True))
        rows.append((ast.literal_eval(prediction), ast.literal_eval(golds), scores))
    return rows


@pytest.mark.parametrize("prediction, golds, right", golden_rows())
def test_equal_to_the_official_scripts(prediction, golds, right):
    for benchmark, column in (("hotpotqa", "hotpot"), ("2wiki", "2wiki"), ("musique", "musique")):
        scores = score_answer(prediction, golds, benchmark)
        assert scores["em"] == right[f"{column}_em"]
        assert round(scores["f1"], 2) == right[f"{column}_f1"]
        assert scores["cover_em"] == right["searchr1_sub"]
        assert all(type(value) is float for value in scores.values())


def scores_of(pairs, key, benchmark="hotpotqa", mode="official"):
    return [round(score_answer(p, g, benchmark, mode=mode)[key], 3) for p, g in pairs]


def test_an01_yes_and_no_get_no_partial_credit_in_hotpotqa():
    pairs = [("Yes, they were.", ["yes"]), ("no", ["no one"]), ("yes", ["Yes."])]
    assert scores_of(pairs, "f1") == scores_of(pairs, "f1", "2wiki") == [0, 0, 1]
    assert scores_of(pairs, "f1", "musique") == [0.5, 0.667, 1]


@pytest.mark.parametrize("benchmark", BENCHMARKS)
def test_an02_gold_that_normalises_to_nothing(benchmark):
    pairs = [("The The", ["The The"]), ("Oslo", ["The The"]), ("", ["!!!"])]
    assert scores_of(pairs, "em", benchmark) == [1, 0, 1]
    assert scores_of(pairs, "cover_em", benchmark) == [1, 0, 1]
    assert scores_of(pairs, "f1", benchmark, "unicode") == [1, 0, 1]
    assert scores_of(pairs, "f1", benchmark) == ([1, 0, 1] if benchmark == "musique" else [0, 0, 0])


UNICODE_PAIRS = [
    ("Beyonc\u00e9", ["Beyonce\u0301"]),
    ("Arthur\u2019s Magazine", ["Arthur's Magazine"]),
    ("1947\u201391", ["1947-91"]),
    ("Paris\u00a0France", ["Paris France"]),
    ("Paris\u200b", ["Paris"]),
    ("\uff35\uff33\uff21", ["USA"]),
    ("\u0130stanbul", ["istanbul"]),
]


def test_an03_unicode_forms_in_both_modes():
    assert scores_of(UNICODE_PAIRS, "em") == [0, 0, 0, 1, 0, 0, 0]
    assert scores_of(UNICODE_PAIRS, "em", mode="unicode") == [1] * 7
    more = [
        ("stra\u00dfe", ["STRASSE"]),
        ("\u201cRush\u201d", ["Rush"]),
        ("O\u02bbahu", ["O'ahu"]),
        ("\u221240", ["-40"]),
    ]
    assert scores_of(more, "em", mode="unicode") == [1] * 4
    assert scores_of([("Beyonce", ["Beyonc\u00e9"])], "em", mode="unicode") == [0]


def test_an04_articles_and_punctuation():
    pairs = [("Vitamin A", ["Vitamin"]), ("U.S.", ["us"]), ("3-4", ["34"]), ("3.0", ["30"])]
    pairs += [("rock_band", ["rock band"]), ("well-known", ["well known"])]
    assert scores_of(pairs, "em") == [1, 1, 1, 1, 0, 0]


def test_an05_aliases():
    pairs = [("NYC", ["New York City", "NYC"]), ("NYC", ["New York City"])]
    pairs += [("Big Apple City", ["Big Apple", "City of New York"])]
    for benchmark in BENCHMARKS:
        assert scores_of(pairs, "em", benchmark) == [1, 0, 0]
    # one string is one answer, not a list of letters; None among aliases is no answer
    assert score_answer("NYC", "NYC")["em"] == 1
    assert score_answer("N", "NYC")["em"] == 0
    assert score_answer("None", [None, "Oslo"])["em"] == 0
    assert score_answer("1984", [1984])["em"] == 1


@pytest.mark.parametrize("benchmark", BENCHMARKS)
@pytest.mark.parametrize(
    "prediction, golds", [(None, ["x"]), (None, [""]), ("x", []), ("", []), ("x", None), ("x", [None])]
)
def test_nothing_to_compare_scores_zero(prediction, golds, benchmark):
    assert score_answer(prediction, golds, benchmark) == {"em": 0.0, "cover_em": 0.0, "f1": 0.0}


def test_unknown_names_are_named():
    with pytest.raises(ValueError, match="'nq' is unknown; choose one of hotpotqa, 2wiki, musique"):
        score_answer("a", ["b"], "nq")
    with pytest.raises(ValueError, match="official, unicode"):
        normalize("a", "loose")


@settings(deadline=None)
@given(ANSWERS, st.lists(ANSWERS, min_size=1, max_size=3), st.sampled_from(BENCHMARKS))
def test_scores_are_maxima_over_golds_in_order(prediction, golds, benchmark):
    scores = score_answer(prediction, golds, benchmark)
    singles = [score_answer(prediction, [gold], benchmark) for gold in golds]
    assert scores == {key: max(s[key] for s in singles) for key in scores}
    assert scores["em"] <= scores["cover_em"]
    assert 0 <= scores["f1"] <= 1
    for gold in golds:  # F1 is symmetric
        swapped = score_answer(gold, [prediction], benchmark)["f1"]
        assert swapped == pytest.approx(score_answer(prediction, [gold], benchmark)["f1"])


@settings(deadline=None)
@given(st.text(max_size=12))
def test_an_empty_gold_never_pays_a_real_answer(prediction):
    for gold in ("The The", "!!!", "", "a", "   "):
        for mode in ("official", "unicode"):
            if normalize(prediction, mode):
                assert score_answer(prediction, [gold], mode=mode)["cover_em"] == 0


@settings(deadline=None)
@given(st.text(alphabet=st.characters(exclude_categories=["Cs", "Cn"]), max_size=20))
def test_unicode_mode_sees_through_encodings_of_one_text(text):
    for form in ("NFC", "NFD"):
        assert normalize(unicodedata.normalize(form, text), "unicode") == normalize(text, "unicode")
    assert normalize("\u200b".join(text), "unicode") == normalize(text, "unicode")
    wide = "".join(chr(ord(c) + 0xFEE0) if "!" <= c <= "~" else c for c in text)
    assert normalize(wide, "unicode") == normalize(text, "unicode")


def test_bootstrap_agrees_with_the_normal_interval():
    values = [1.0] * 240 + [0.0] * 160
    low, high = bootstrap_interval(values)
    half = 1.96 * np.sqrt(0.6 * 0.4 / 400)
    assert low == pytest.approx(0.6 - half, abs=0.006)
    assert high == pytest.approx(0.6 + half, abs=0.006)
    assert bootstrap_interval(values, seed=0) == bootstrap_interval(values, seed=0)
    assert bootstrap_interval(values, seed=1) != bootstrap_interval(values, seed=2)
    narrow = bootstrap_interval(values, level=0.5)
    assert low < narrow[0] < 0.6 < narrow[1] < high
    assert bootstrap_interval([0.25] * 3) == (0.25, 0.25)


def test_paired_difference_cancels_the_difficulty_of_questions():
    rng = np.random.default_rng(0)
    first = (rng.random(300) < 0.5).astype(float)
    second = first.copy()
    second[np.flatnonzero(first == 0)[:15]] = 1.0
    low, high = paired_difference_interval(first, second)
    assert low < -0.05 < high < 0
    assert bootstrap_interval(first)[1] > bootstrap_interval(second)[0]  # unpaired intervals overlap


def test_intervals_refuse_what_they_cannot_mean():
    for values in ([], [1.0, float("nan")], [[1.0]]):
        with pytest.raises(ValueError, match="finite scores"):
            bootstrap_interval(values)
    with pytest.raises(ValueError, match="level"):
        bootstrap_interval([1.0], level=1.0)
    with pytest.raises(ValueError, match="same questions"):
        paired_difference_interval([1.0], [1.0, 0.0])


@pytest.mark.parametrize(
    ("right", "n", "level", "low", "high"),
    [  # scipy.stats.binomtest(right, n).proportion_ci(level, method="wilson")
        (0, 200, 0.95, 0.0, 0.0188453264),
        (200, 200, 0.95, 0.9811546736, 1.0),
        (1, 1, 0.95, 0.2065493144, 1.0),
        (5, 200, 0.95, 0.0107247197, 0.0571783404),
        (191, 200, 0.95, 0.9167032960, 0.9761474570),
        (32, 32, 0.95, 0.8928208017, 1.0),
        (5, 10, 0.9, 0.2692718211, 0.7307281789),
    ],
)
def test_a_share_gets_the_score_interval(right, n, level, low, high):
    for values in ([1.0] * right + [0.0] * (n - right), [True] * right + [False] * (n - right)):
        assert mean_interval(values, level=level) == pytest.approx((low, high), abs=1e-9)
    bounds = wilson_interval(right, n, level=level)
    assert bounds[0] <= right / n <= bounds[1] and (bounds[0] == 0) == (right == 0) and (bounds[1] == 1) == (right == n)


def test_other_scores_are_resampled_and_equal_ones_tell_nothing():
    values = [0.0, 1 / 3, 1.0, 1.0, 2 / 3]
    assert mean_interval(values) == bootstrap_interval(values)
    assert mean_interval([0.4]) is mean_interval([1 / 3] * 50) is None
    assert with_interval(1 / 3, None) == "0.333 [–]"


@given(st.integers(1, 400).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_the_score_interval_solves_its_equation(case):
    """Its bounds are where the normal test of p stands exactly at z: |right/n − p| = z · sqrt(p(1 − p)/n)."""
    right, n = case
    for p in wilson_interval(right, n):
        if 0 < p < 1:
            assert abs(right / n - p) == pytest.approx(1.959963985 * (p * (1 - p) / n) ** 0.5, rel=1e-6)


def paired(both: int, first: int, second: int, neither: int) -> tuple[list[float], list[float]]:
    a = [1.0] * (both + first) + [0.0] * (second + neither)
    return a, [1.0] * both + [0.0] * first + [1.0] * second + [0.0] * neither


def test_paired_shares_as_published():
    """Fagerland, Lydersen and Laake, Statistical Analysis of Contingency Tables, chapter 8: 59, 6, 16 and 80 pairs."""
    assert paired_difference_interval(*paired(59, 6, 16, 80)) == pytest.approx((-0.1195, -0.0032), abs=5e-5)


@given(st.tuples(*[st.integers(0, 30)] * 4).filter(any))
def test_paired_shares_never_claim_certainty(counts):
    a, b = paired(*counts)
    low, high = paired_difference_interval(a, b)
    mean = (counts[1] - counts[2]) / sum(counts)
    assert -1 <= low <= mean <= high <= 1 and low < high
    assert paired_difference_interval(b, a) == pytest.approx((-high, -low))


def test_paired_scores_that_are_no_shares():
    a, b = [0.5, 1.0, 0.25], [0.25, 1.0, 0.0]
    assert paired_difference_interval(a, b) == bootstrap_interval(np.subtract(a, b))
    assert paired_difference_interval(a, a) is None and paired_difference_interval([0.5], [0.0]) is None


@given(st.integers(0, 1000))
def test_three_digits_are_those_of_the_share(k):
    assert three_digits(k / 1000) == f"{k // 1000}.{k % 1000:03d}"


@pytest.mark.parametrize(
    ("x", "shown"),
    [(0.0125, "0.013"), (0.0135, "0.014"), (2.125, "2.125"), (-0.0, "0.000"), (-0.2, "-0.200"), (None, "–")]
    + [(0.9999, ">0.999"), (1999 / 2000, ">0.999"), (1 / 3000, "<0.001"), (1 / 2000, "0.001"), (float("nan"), "–")],
)
def test_no_rounding_to_a_certainty(x, shown):
    assert three_digits(x) == shown
    assert three_digits(0.0004, sign=True) == "+0.000" and three_digits(-0.2125, sign=True) == "-0.213"
