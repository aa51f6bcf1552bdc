"""The exercise checker says what is wrong, and every lesson's exercises are sound."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentr1_lite.exercises import check
from agentr1_lite.exercises.compare import SHORT, shown, text
from agentr1_lite.exercises.judge import Verdict
from agentr1_lite.exercises.registry import EXERCISES, Exercise, Mistake, exercises, find

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"


def centred(rewards, groups):
    return torch.cat([part - part.mean() for part in rewards.split(groups)])


def whole_batch(rewards, groups):
    return rewards - rewards.mean()


@pytest.fixture(autouse=True)
def toy(monkeypatch):
    def draw(rng):
        groups = [rng.randint(2, 4) for _ in range(3)]
        return torch.randn(sum(groups)), groups

    wrong = Mistake(whole_batch, "The mean runs over the whole batch.", "Group effects")
    monkeypatch.setitem(EXERCISES, "toy", Exercise(1, "toy", centred, draw, [wrong]))


def fails(rewards, groups):
    return rewards[100]


def ellipsis_inside(rewards, groups):
    mean = ...
    return rewards - mean


def gap(rewards, groups): ...


def forgot(rewards, groups):
    rewards - rewards.mean()


def spoils_its_input(rewards, groups):
    result = centred(rewards, groups)
    rewards.zero_()
    return result


@pytest.mark.parametrize(
    ("function", "kind", "words"),
    [
        (centred, "right", "equal to the solution"),
        (spoils_its_input, "right", "equal to the solution"),
        (whole_batch, "mistake", "The mean runs over the whole batch."),
        (gap, "gap", "replace the ..."),
        (ellipsis_inside, "gap", "replace the ..."),
        (forgot, "gap", "is the return missing?"),
        (fails, "error", "it raises IndexError: index 100 is out of bounds"),
        (fails, "error", "in line 2 (return rewards[100])"),
        (lambda rewards: rewards, "form", "It must take the arguments (rewards, groups)"),
        (lambda rewards, groups: rewards[:2], "form", "It returns shape (2,), expected ("),
        (lambda rewards, groups: rewards.double(), "form", "dtype torch.float64, expected torch.float32"),
        (lambda rewards, groups: rewards.tolist(), "form", "expected tensor ["),
        (lambda rewards, groups: 2 * rewards, "value", "8 of 8 inputs give another value; for rewards = tensor ["),
        (lambda rewards, groups: centred(rewards, groups) * torch.nan, "value", "yours is tensor [nan"),
        (3, "form", "Pass the function itself; this is 3."),
    ],
)
def test_each_kind_of_answer_gets_its_own_sentence(function, kind, words):
    verdict = check("toy", function)
    assert (verdict.kind, bool(verdict)) == (kind, kind == "right")
    assert words in str(verdict) and "\n" not in str(verdict)


def numbers(n=60):
    return [float(i) for i in range(n)]


def at_last(value, n=60):
    return [*numbers(n)[:-1], value]


LONG = "the river rises in the old city and " * 4


@pytest.mark.parametrize(
    ("wanted", "found", "words"),
    [
        (
            torch.zeros(2, 40),
            torch.zeros(2, 40).index_put((torch.tensor(1), torch.tensor(3)), torch.tensor(0.5)),
            ", at [1, 3] yours is 0.5, expected 0.",
        ),
        (torch.ones(60, dtype=torch.bool), torch.arange(60) != 7, ", at [7] yours is False, expected True."),
        ((torch.ones(3), torch.zeros(60)), (torch.ones(3), torch.ones(60)), ", at [1][0] yours is 1, expected 0."),
        (torch.tensor(0.5), torch.tensor(0.50004), ", yours is 0.50004, expected 0.5."),
        (0.5, 0.50004, ", yours is 0.50004, expected 0.5."),
        (numbers(), at_last(0.25), ", at [59] yours is 0.25, expected 59."),
        ({"x": 1, "y": numbers()}, {"x": 1, "y": at_last(0.25)}, ", at ['y'][59] yours is 0.25, expected 59."),
        (
            LONG,
            LONG[:40] + "forest" + LONG[40:],
            ", the texts part at character 41: yours '…",
        ),
        (LONG, LONG[:60], ", the texts part at character 61: yours '…"),
        (["a"] * 30 + [LONG], ["a"] * 30 + [LONG + "!"], ", at [30] the texts part at character 145: yours '…"),
        ("short", "shirt", ", yours is 'shirt', expected 'short'."),
    ],
)
def test_a_difference_is_shown_where_it_is(monkeypatch, wanted, found, words):
    monkeypatch.setitem(EXERCISES, "value", Exercise(1, "value", lambda n: wanted, lambda rng: (3,)))
    assert f"for n = 3{words}" in f"{check('value', lambda n: found)}"


def test_a_difference_is_one_that_the_exercise_counts(monkeypatch):
    def alike(found, wanted):
        return found.lower() == wanted.lower()

    texts = ["a", "b", "c"]
    options = {"equal": alike}
    monkeypatch.setitem(EXERCISES, "texts", Exercise(1, "texts", lambda x: x, lambda rng: (texts * 20,), **options))
    said = str(check("texts", lambda x: [*map(str.upper, x[:-1]), "d"]))
    assert said.endswith("for x[59] = 'c', at [59] yours is 'd', expected 'c'.")


def test_a_mistake_names_the_paragraph_to_reread():
    assert str(check("toy", whole_batch)).endswith("Read again: Group effects.")
    asks = Verdict("toy", "mistake", "No.", "How often?")
    assert str(asks).endswith("Read again: How often?") and "<em>How often?</em></div>" in asks._repr_html_()
    assert "<em>Group effects</em>" in check("toy", whole_batch)._repr_html_()


def test_page_shows_a_word_beside_the_colour_and_escapes():
    def nasty(rewards, groups):
        raise ValueError("<script>alert(1)</script>")

    page = check("toy", nasty)._repr_html_()
    assert "not yet" in page and "&lt;script&gt;" in page and "<script" not in page


def test_an_error_that_is_wanted_counts_as_an_outcome(monkeypatch):
    def must_raise(x):
        raise ValueError("no")

    monkeypatch.setitem(EXERCISES, "raises", Exercise(1, "raises", must_raise, lambda rng: (rng.random(),)))
    assert check("raises", must_raise)
    assert "it must raise ValueError" in str(check("raises", lambda x: x))
    assert "yours gives KeyError" in str(check("raises", lambda x: {}[x]))


@pytest.mark.parametrize(
    ("wanted", "close", "far"),
    [
        (1.0, 1.0 + 1e-7, 1.001),
        (1.0, torch.tensor(1.0), torch.tensor([1.0])),
        ("a", "a", "b"),
        (True, True, 1),
        (None, None, 0),
        ([1, 2.0], (1, 2.0), [1, 2, 3]),
        ({"x": [1.0]}, {"x": [1.0]}, {"x": [1.5]}),
        ({"x": 1}, {"x": 1}, {"y": 1}),
        (torch.tensor([True]), torch.tensor([True]), torch.tensor([False])),
        (float("nan"), float("nan"), 0.0),
    ],
)
def test_values_are_compared_by_what_they_are(monkeypatch, wanted, close, far):
    monkeypatch.setitem(EXERCISES, "value", Exercise(1, "value", lambda: wanted, lambda rng: ()))
    assert check("value", lambda: close)
    assert not check("value", lambda: far)


def test_inputs_repeat_and_the_global_generators_are_left_alone():
    random.seed(3), np.random.seed(3), torch.manual_seed(3)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    seen = []
    for _ in range(2):
        check("toy", lambda rewards, groups: seen.append(rewards))
    assert torch.equal(torch.cat(seen[:8]), torch.cat(seen[8:]))
    assert before[0] == random.getstate() and before[1] == np.random.get_state()[1].tolist()
    assert torch.equal(before[2], torch.get_rng_state())


class Unspeakable(Exception):
    def __str__(self):
        raise RuntimeError

    __repr__ = __str__


def unspeakable(x):
    raise Unspeakable


class Lengthless(list):
    def __len__(self):
        return 1 // 0


def within_itself(x):
    loop = []
    loop.append(loop)
    return loop


@pytest.mark.parametrize(
    ("wanted", "function", "words"),
    [
        (1.0, lambda x: exit(), "it raises SystemExit: no message"),
        (1.0, unspeakable, "it raises Unspeakable: no message"),
        (1.0, within_itself, "It returns [[[[[["),
        (1.0, lambda x: Unspeakable(), "a Unspeakable that cannot be shown, expected a number"),
        (1.0, lambda x: 10**5000, "for x = 3, yours is about 10**5000, expected 1"),
        (1.0, lambda x: -(10**5000), "yours is about -10**5000, expected 1"),
        (7, lambda x: 10**5000, "yours is about 10**5000, expected 7"),
        ([1.0, 2.0], lambda x: [1.0, 10**5000], "yours is [1.0, about 10**5000], expected [1.0, 2.0]"),
        (1.0, lambda x: np.complex128(1), "expected a number"),
        ([1.0], lambda x: Lengthless([1.0]), "a Lengthless that cannot be compared: it raises ZeroDivisionError"),
        (1.0, lambda x: torch.zeros((), device="meta"), "a Tensor that cannot be shown, expected a number"),
        (torch.eye(2), lambda x: torch.eye(2).to_sparse(), "a tensor of layout torch.sparse_coo on device cpu"),
        (torch.eye(2), lambda x: torch.eye(2, device="meta"), "on device meta, expected torch.strided on cpu"),
    ],
)
def test_hostile_answers_get_a_sentence(monkeypatch, wanted, function, words):
    monkeypatch.setitem(EXERCISES, "hostile", Exercise(1, "hostile", lambda x: wanted, lambda rng: (3,)))
    assert words in str(check("hostile", function))


class Counted:
    """Counts how many are written out; hashable and unequal to each other."""

    written = 0

    def __repr__(self):
        Counted.written += 1
        return "x"


@pytest.mark.parametrize("wanted", [1.0, 7, "a", [1.0, 2.0], {"a": 1}, None, torch.eye(2), (torch.eye(2), 1.0)])
@pytest.mark.parametrize("kind", [list, tuple, set, dict.fromkeys, lambda many: [many], lambda many: {"a": many}])
def test_of_a_huge_answer_only_what_is_shown_is_written_out(monkeypatch, wanted, kind):
    many = kind([Counted() for _ in range(10_000)])
    wrong = [Mistake(lambda x, n=n: n, f"It is no {n}.") for n in range(100, 120)]
    monkeypatch.setattr(Counted, "written", 0)
    monkeypatch.setitem(EXERCISES, "huge", Exercise(1, "huge", lambda x: wanted, lambda rng: (3,), wrong))
    said = str(check("huge", lambda x: many))
    assert "x, x, x" in said or "x: None, x: None" in said
    assert len(said) < 400 and Counted.written < 2_000


def test_of_a_huge_text_or_tensor_the_beginning_or_shape_is_shown():
    assert text("a" * 10**6) == repr("a" * (SHORT + 1)) and text(b"a" * 10**6) == repr(b"a" * (SHORT + 1))
    assert shown(torch.zeros(1).expand(10**9)) == "a tensor of shape (1000000000,) and dtype torch.float32"


plain = st.one_of(st.integers(-99, 99), st.text(max_size=5), st.booleans(), st.none())
nested = st.recursive(
    plain, lambda inner: st.lists(inner, max_size=4).map(tuple) | st.lists(inner) | st.dictionaries(plain, inner)
)


@given(nested)
def test_a_short_value_is_shown_as_python_writes_it(value):
    wanted = repr(value)
    if len(wanted) <= SHORT:
        assert text(value) == shown(value) == wanted
    else:
        assert shown(value) == f"{wanted[: SHORT - 1]}…"


def test_interrupting_the_kernel_stops_a_check():
    def interrupted(rewards, groups):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        check("toy", interrupted)


def test_torch_settings_of_an_answer_end_with_it():
    def sets(rewards, groups):
        result = centred(rewards, groups)
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(False)
        return result

    try:
        assert check("toy", sets) and check("toy", centred)
        assert torch.get_default_dtype() == torch.float32 and torch.is_grad_enabled()
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_grad_enabled(True)


@pytest.mark.parametrize("name", ["masked_loss", "agent_loss"])
def test_a_loss_needs_its_gradient(name):
    loss = find(name).solution
    for lost in (lambda *x: loss(*x).detach(), lambda *x: torch.tensor(loss(*x).item())):
        assert "the loss has lost its gradient" in check(name, lost).text
    half = check(name, lambda *x: (loss(*x) + loss(*x).detach()) / 2)
    assert not half and "its gradient is another one" in half.text
    with torch.no_grad():
        assert check(name, lambda z, *x: loss(z.mul_(1), *x))


def test_an_unknown_name_is_one_sentence():
    with pytest.raises(ValueError, match="exercise 'tox' is unknown; did you mean toy"):
        find("tox")


# The lessons' exercises

ALL = exercises()


def headings(lesson: int) -> str:
    (source,) = NOTEBOOKS.glob(f"{lesson:02d}_*.py")
    lines = source.read_text(encoding="utf-8").splitlines()
    return "\n".join(line.lstrip("# ") for line in lines if line.startswith("# #"))


@pytest.mark.parametrize("task", ALL, ids=lambda task: task.name)
@pytest.mark.parametrize("wrong_type", [object(), "text"], ids=["object", "text"])
def test_the_open_gap_and_a_wrong_type_get_their_own_sentence(task, wrong_type):
    assert check(task.name, lambda *x: ...).kind == "gap"
    assert check(task.name, lambda *x: wrong_type).kind == "form"


@pytest.mark.parametrize("task", ALL, ids=lambda task: task.name)
def test_solution_passes_and_every_mistake_is_told_apart(task):
    assert check(task.name, task.solution) and check(task.name, task.solution, seed=7)
    assert len(task.mistakes) >= 3
    seeds = (0, 1, 7)
    said = [check(task.name, wrong.function, seed) for wrong in task.mistakes for seed in seeds]
    assert [(v.kind, v.text) for v in said] == [("mistake", w.says) for w in task.mistakes for _ in seeds]
    assert len({wrong.says for wrong in task.mistakes}) == len(task.mistakes)


@pytest.mark.parametrize("task", ALL, ids=lambda task: task.name)
def test_gap_and_nonsense_get_a_sentence(task):
    assert check(task.name, lambda *args, **named: ...).kind == "gap"
    assert check(task.name, lambda *args, **named: object()).kind in ("form", "value")
    assert check(task.name, lambda one, two, three, four, five, six, seven: 0).kind == "form"


@pytest.mark.parametrize("task", ALL, ids=lambda task: task.name)
def test_paragraphs_to_reread_stand_in_the_lesson(task):
    known = headings(task.lesson)
    assert [wrong.reread for wrong in task.mistakes if wrong.reread not in known] == []
    assert all(wrong.reread for wrong in task.mistakes)
