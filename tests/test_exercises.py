"""The exercise checker says what is wrong, and every lesson's exercises are sound."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from agentr1_lite.exercises import EXERCISES, Exercise, Mistake, check, exercises, find

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


def test_a_mistake_names_the_paragraph_to_reread():
    assert str(check("toy", whole_batch)).endswith("Read again: Group effects.")
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


def test_an_unknown_name_is_one_sentence():
    with pytest.raises(ValueError, match="exercise 'tox' is unknown; did you mean toy"):
        find("tox")


# The lessons' exercises

ALL = exercises()


def headings(lesson: int) -> str:
    found = list(NOTEBOOKS.glob(f"{lesson:02d}_*.py"))
    if not found:
        pytest.skip(f"notebooks/{lesson:02d}_*.py does not exist")
    lines = found[0].read_text(encoding="utf-8").splitlines()
    return "\n".join(line.lstrip("# ") for line in lines if line.startswith("# #"))


@pytest.mark.parametrize("task", ALL, ids=lambda task: task.name)
def test_solution_passes_and_every_mistake_is_told_apart(task):
    assert check(task.name, task.solution) and check(task.name, task.solution, seed=7)
    assert len(task.mistakes) >= 3
    said = [check(task.name, wrong.function, seed) for wrong in task.mistakes for seed in (0, 7)]
    assert [(v.kind, v.text) for v in said] == [("mistake", w.says) for w in task.mistakes for _ in (0, 7)]
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
