"""Answer scores, equal to the official scripts, and intervals around their means.

Sources: ``hotpot_evaluate_v1.py`` (HotpotQA), ``2wikimultihop_evaluate_v1.1.py``
(2WikiMultiHopQA), ``metrics/answer.py`` (MuSiQue) and the substring match of
Search-R1 for ``cover_em``. Published numbers come from the official
normalisation; the Unicode-aware mode is a second number, never a replacement.
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from decimal import ROUND_HALF_UP, Decimal
from statistics import NormalDist

import numpy as np

ARTICLES = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = frozenset(string.punctuation)
CLOSED_ANSWERS = frozenset({"yes", "no", "noanswer"})
# typed for ' and - but no punctuation in Unicode; case folding would leave a loose dot over the Turkish I
LOOK_ALIKES = str.maketrans({"ʼ": "'", "ʻ": "'", "−": "-", "İ": "i"})


def _official(text: str) -> str:
    """Lower case without ASCII punctuation: the first half of every official normaliser."""
    return "".join(c for c in text.lower() if c not in PUNCTUATION)


def _unicode(text: str) -> str:
    """NFKC and case folding; punctuation of every script and invisible characters removed."""
    # NFKC alone would turn an acute typed as apostrophe into a space
    text = unicodedata.normalize("NFC", text).replace("´", "'")
    text = unicodedata.normalize("NFKC", text).translate(LOOK_ALIKES)
    # case folding may leave decomposed letters: compose again, so that equal texts get equal forms
    text = unicodedata.normalize("NFKC", text.casefold())
    kept = (c for c in text if c not in PUNCTUATION and unicodedata.category(c)[0] != "P")
    return "".join(c for c in kept if unicodedata.category(c) != "Cf" and not "\ufe00" <= c <= "\ufe0f")


MODES: dict[str, Callable[[str], str]] = {"official": _official, "unicode": _unicode}


def normalize(text: str, mode: str = "official") -> str:
    """The form of an answer in which two answers are compared.

    ``official``: lower case, ASCII punctuation and the articles a, an, the
    removed, white space collapsed, as all three benchmarks do. Composed and
    decomposed letters, curly and straight quotes differ.

    ``unicode``: the same steps after NFKC and case folding, with the
    punctuation of all scripts, zero-width and soft characters removed and the
    Turkish dotted I read as i. Accents stay: Beyonce is not Beyoncé.
    """
    if mode not in MODES:
        raise ValueError(f"normalize: mode {mode!r} is unknown; choose one of {', '.join(MODES)}")
    return " ".join(ARTICLES.sub(" ", MODES[mode](text)).split())


def overlap_f1(prediction: str, gold: str) -> float:
    """F1 of the bags of words of two normalised answers: 2PR / (P + R), 0 where they share none."""
    predicted, expected = prediction.split(), gold.split()
    common = sum((Counter(predicted) & Counter(expected)).values())
    if not common:
        return 0.0
    precision, recall = common / len(predicted), common / len(expected)
    return 2 * precision * recall / (precision + recall)


def closed_f1(prediction: str, gold: str) -> float:
    """HotpotQA and 2Wiki: no partial credit where either side is yes, no or noanswer."""
    if prediction != gold and (prediction in CLOSED_ANSWERS or gold in CLOSED_ANSWERS):
        return 0.0
    return overlap_f1(prediction, gold)


def empty_aware_f1(prediction: str, gold: str) -> float:
    """MuSiQue: where one side normalises to nothing, 1 if both do and 0 otherwise."""
    if not prediction or not gold:
        return float(prediction == gold)
    return overlap_f1(prediction, gold)


F1: dict[str, Callable[[str, str], float]] = {
    "hotpotqa": closed_f1,
    "2wiki": closed_f1,
    "musique": empty_aware_f1,
}


def gold_list(golds: str | Iterable[str | None] | None) -> list[str]:
    """Accepted answers as a list of strings: one string is one answer, None and missing aliases are dropped."""
    if golds is None:
        return []
    if isinstance(golds, (str, int, float)):
        return [str(golds)]
    return [str(gold) for gold in golds if gold is not None]


def score_answer(
    prediction: str | None,
    golds: str | Iterable[str | None] | None,
    benchmark: str = "hotpotqa",
    *,
    mode: str = "official",
) -> dict[str, float]:
    """Scores of one answer, each the maximum over the accepted answers.

    Returns ``em`` (normalised strings are equal), ``cover_em`` (a gold is a
    substring of the prediction) and ``f1`` (word overlap). No prediction or no
    golds give 0. A gold that normalises to nothing ("The The", "!!!") is never
    covered by another answer; only its exact match pays. Its F1 is 0 in the
    official HotpotQA and 2Wiki scripts; ``mode="unicode"`` gives 1 to the
    exact match on every benchmark.
    """
    if benchmark not in F1:
        raise ValueError(f"score_answer: benchmark {benchmark!r} is unknown; choose one of {', '.join(F1)}")
    scores = {"em": 0.0, "cover_em": 0.0, "f1": 0.0}
    if prediction is None:
        return scores
    said = normalize(str(prediction), mode)
    for gold in gold_list(golds):
        right = normalize(gold, mode)
        same = said == right
        f1 = 1.0 if same and mode == "unicode" else F1[benchmark](said, right)
        scores["em"] = max(scores["em"], float(same))
        scores["cover_em"] = max(scores["cover_em"], float(right in said if right else same))
        scores["f1"] = max(scores["f1"], f1)
    return scores


Interval = tuple[float, float]


def mean_interval(values: Sequence[float], *, level: float = 0.95, **options: int) -> Interval | None:
    """Interval of the mean of one score a question: `wilson_interval` where all are 0 or 1, else `bootstrap_interval`.

    None where the scores tell nothing of their spread: all are one number other than 0 and 1.
    """
    scores = _scores(values, level)
    if np.isin(scores, (0, 1)).all():
        return wilson_interval(int(scores.sum()), len(scores), level=level)
    return None if scores.min() == scores.max() else bootstrap_interval(scores, level=level, **options)


def wilson_interval(right: int, n: int, *, level: float = 0.95) -> Interval:
    """Score interval of a share ``p = right / n`` (Wilson 1927); it has a width at 0 of n and n of n too.

    ``(p + z²/2n ± z · sqrt(p(1 − p)/n + z²/4n²)) / (1 + z²/n)``,  z the normal quantile of ``level``.
    """
    z2, p = _quantile(level) ** 2, right / n
    centre, half = p + z2 / (2 * n), (z2 * (p * (1 - p) / n + z2 / (4 * n * n))) ** 0.5
    low, high = ((centre + side * half) / (1 + z2 / n) for side in (-1, 1))
    return (low if right else 0.0), (high if right < n else 1.0)


def _quantile(level: float) -> float:
    return NormalDist().inv_cdf((1 + level) / 2)


def _scores(values: Sequence[float], level: float) -> np.ndarray:
    scores = np.asarray(values, dtype=np.float64)
    if scores.ndim != 1 or not len(scores) or not np.isfinite(scores).all():
        raise ValueError(f"interval: expected a list of finite scores, found shape {scores.shape}; score first")
    if not 0 < level < 1:
        raise ValueError(f"interval: level {level} must lie in (0, 1)")
    return scores


def bootstrap_interval(values: Sequence[float], *, level: float = 0.95, samples: int = 2000, seed: int = 0) -> Interval:
    """Percentile bootstrap interval of the mean: resample with replacement, take the middle ``level``.

    Equal scores give it no width, whatever their number: `mean_interval` is the one to report.

    Args:
        values: one score a question, shape (N,), N ≥ 1, all finite.
        level: share of resampled means inside the interval, in (0, 1).
    """
    scores = _scores(values, level)
    if samples < 1:
        raise ValueError(f"bootstrap_interval: samples is {samples}; give at least 1")
    rng = np.random.default_rng(seed)
    means = np.array([scores[rng.integers(len(scores), size=len(scores))].mean() for _ in range(samples)])
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def paired_difference_interval(
    first: Sequence[float], second: Sequence[float], *, level: float = 0.95, **options: int
) -> Interval | None:
    """Interval of mean(first − second) over the same questions: question difficulty cancels out.

    Where every score is 0 or 1, the adjusted interval of Bonett and Price (2012): with b questions that only ``first``
    answered, c that only ``second`` did, ``p = (b + 1)/(n + 2)``, ``q = (c + 1)/(n + 2)`` it is
    ``p − q ± z · sqrt((p + q − (p − q)²)/(n + 2))``, which has a width though both answered alike. Else the bootstrap;
    None where all differences are one number. ``second`` is better beyond chance when the interval lies below 0.
    """
    if len(first) != len(second):
        raise ValueError(f"paired_difference_interval: {len(first)} and {len(second)} scores; score the same questions")
    first, second = _scores(first, level), _scores(second, level)
    difference, n = first - second, len(first) + 2
    if np.isin((first, second), (0, 1)).all():
        p, q = (((difference == sign).sum() + 1) / n for sign in (1, -1))
        half = _quantile(level) * ((p + q - (p - q) ** 2) / n) ** 0.5
        return float(max(p - q - half, -1.0)), float(min(p - q + half, 1.0))
    same = difference.min() == difference.max()
    return None if same else bootstrap_interval(difference, level=level, **options)


def three_digits(x: float | None, sign: bool = False) -> str:
    """A share to three digits, halves away from zero; "–" for None, and ``<0.001`` or ``>0.999`` for what is close.

    ``f"{0.9995:.3f}"`` would claim certainty, and ``f"{0.0125:.3f}"`` round the binary number below the half.
    """
    if x is None or not np.isfinite(x):
        return "–"
    if not sign and 0 < x < 0.0005:
        return "<0.001"
    if not sign and 0.9995 <= x < 1:
        return ">0.999"
    shown = Decimal(repr(float(x) + 0.0)).quantize(Decimal("0.001"), ROUND_HALF_UP)  # + 0.0: there is no −0
    return f"{shown:+}" if sign else f"{shown}"


def with_interval(mean: float | None, interval: Sequence[float] | None, sign: bool = False) -> str:
    """``0.955 [0.917, 0.976]``; an interval that is not known is "–"."""
    bounds = ", ".join(three_digits(x, sign) for x in interval) if interval is not None else "–"
    return f"{three_digits(mean, sign)} [{bounds}]"
