"""Named reward parts: values worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentr1_lite import rewards
from agentr1_lite.mdp import StopReason, Task, Turn, TurnKind
from agentr1_lite.rewards import Episode, Rewards, normalize_process, shape

TASK = Task("t", "Who?", ("Ole Rømer", "Rømer"), evidence=("Rømer", "Light"))
CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "x"}}\n</tool_call>'


def turn(text="", kind=TurnKind.TOOL_CALL, titles=(), success=True, flags=(), **info):
    calls = [{"name": "search", "arguments": {"query": text}, "flags": []}] if kind is TurnKind.TOOL_CALL else []
    results = [{"content": "<answer>Bergen</answer>", "success": success, "info": {"titles": list(titles), **info}}]
    return Turn(0, 0, 0, kind, text, calls, results if calls else [], flags=list(flags))


def answered(answer, *turns, text="<think>so</think> <answer>a</answer>"):
    last = turn(text, TurnKind.ANSWER)
    return Episode(TASK, turns=[*turns, last], answer=answer, stop_reason=StopReason.ANSWER)


@pytest.mark.parametrize(
    ("answer", "em", "f1", "cover_em", "no_answer"),
    [
        ("Ole Rømer", 1, 1, 1, 0),
        ("the Rømer.", 1, 1, 1, 0),
        ("Ole Rømer or Bohr", 0, 2 * (2 / 4) * 1 / (2 / 4 + 1), 1, 0),
        ("Bergen", 0, 0, 0, 0),
        ("", 0, 0, 0, 0),
        (None, 0, 0, 0, 1),
    ],
)
def test_outcome_parts_read_the_parsed_answer_only(answer, em, f1, cover_em, no_answer):
    episode = answered(answer, turn(titles=["Light"]))
    expected = {"em": em, "f1": f1, "cover_em": cover_em, "no_answer": no_answer}
    final, parts = Rewards({**dict.fromkeys(expected, 1.0), "no_answer": -0.5}).outcome(episode)
    assert parts == pytest.approx(expected)
    assert final == pytest.approx(em + f1 + cover_em - 0.5 * no_answer)


def test_a_weight_of_zero_is_a_metric():
    assert Rewards({"em": 0.0, "f1": 2.0}).outcome(answered("Rømer")) == (2.0, {"em": 1.0, "f1": 1.0})


GOOD = turn(f"<think>look</think>\n{CALL}")
FINAL = "<think>so</think>It is <answer>Rømer</answer><|im_end|>"


@pytest.mark.parametrize(
    ("turns", "final", "score"),
    [
        ([GOOD], FINAL, 1.0),
        ([GOOD, turn(f"<think>look</think>{CALL}\n{CALL}<|im_end|>\n")], FINAL, 1.0),
        ([], FINAL, 1.0),
        ([turn(CALL)], FINAL, 0.5),
        ([turn(f"<think>a</think> hm {CALL}")], FINAL, 0.5),
        ([turn(f"<think>a<think>b</think>{CALL}")], FINAL, 0.5),
        ([GOOD, turn("<tool_call>{bad</tool_call>", TurnKind.INVALID)], FINAL, 2 / 3),
        ([GOOD], "<answer>Rømer</answer>", 0.5),
        ([GOOD], FINAL + " and more", 0.5),
    ],
)
def test_format_and_the_papers_reward(turns, final, score):
    """EM if the format score is 1, else format - 1 (REFERENCE of arXiv 2511.14460, section 4)."""
    for answer, em in (("Rømer", 1.0), ("Bohr", 0.0)):
        episode = answered(answer, *turns, text=final)
        assert Rewards({"format": 1}).outcome(episode)[0] == pytest.approx(score)
        assert Rewards({"agent_r1": 1}).outcome(episode)[0] == pytest.approx(em if score == 1.0 else score - 1.0)


def test_format_without_thoughts_and_without_repairs():
    episode = answered("Rømer", turn(CALL), text="<answer>Rømer</answer>")
    assert Rewards({"format": {"weight": 2.0, "think": False}}).outcome(episode) == (2.0, {"format": 1.0})
    episode.turns[0].calls[0]["flags"] = ["unclosed"]
    assert Rewards({"format": {"think": False}}).outcome(episode)[0] == 0.5
    assert Rewards({"format": 1}).outcome(Episode(TASK))[0] == 0.0


def test_cost_cut_and_success():
    unsafe = [turn(cost=0.5), turn(cost=2), turn(cost="free"), turn(cost=float("nan"))]
    episode = Episode(TASK, turns=unsafe, stop_reason=StopReason.LENGTH, success=0.25)
    final, parts = Rewards({"cost": -0.1, "cut": -1.0, "task_success": 4.0}).outcome(episode)
    assert parts == {"cost": 2.5, "cut": 1.0, "task_success": 0.25} and final == pytest.approx(-0.25)


def play(spec, turns, task=TASK):
    """Process rewards turn by turn, as the environment asks for them."""
    scheme, episode, earned = Rewards(spec), Episode(task), []
    for t in turns:
        episode.turns.append(t)
        earned.append(scheme.process(episode, t)[0])
    return earned


def test_evidence_pays_each_gold_title_once():
    turns = [
        turn("a", titles=["Light", "Bohr"]),
        turn("b", titles=["Light", "Rømer", "Rømer"]),
        turn("c", titles=["Rømer"]),
    ]
    assert play({"evidence": 0.5}, turns) == [0.5, 0.5, 0.0]
    assert play({"evidence": 0.5}, [turn("a", titles=["Light", "Rømer"]), turn("b")]) == [1.0, 0.0]
    # the same page in other writing is found, and found once
    others = [turn("a", titles=["Ro\u0338mer", "R&oslash;mer"]), turn("b", titles=["Rømer", "Light\u00a0"])]
    assert play({"evidence": 0.5}, others) == [0.5, 0.5]


def test_steps_errors_repeats_and_dense_rewards():
    turns = [turn("a", reward=0.2), turn("a", success=False), turn("b", reward=1), turn("", TurnKind.ANSWER)]
    assert play({"step_penalty": -0.01}, turns) == [-0.01] * 4
    assert play({"tool_success": 1.0, "tool_error": -2.0}, turns) == [1.0, -2.0, 1.0, 0.0]
    assert play({"repeated_call": -1.0}, turns) == [0.0, -1.0, 0.0, 0.0]
    assert play({"tool_reward": 0.5}, turns) == [0.1, 0.0, 0.5, 0.0]


def test_shaping_by_hand():
    """r_final = 2, gamma = 1/2, T = 3: 0.5, 1, 2; the last one is the outcome itself."""
    assert shape(2.0, [0.0, 0.25, 0.0], 0.5) == [0.5, 1.25, 2.0]
    episode = answered("Rømer", turn(), turn())
    episode.turns[1].process_reward = 0.25
    final, parts = Rewards({"em": 2.0, "shaping": {"weight": 1.0, "gamma": 0.5}}).outcome(episode)
    assert [t.process_reward for t in episode.turns] == [0.5, 1.25, 0.0] and final == 2.0
    assert parts == {"em": 1.0, "shaping": 1.5}


def test_prime_normalisation_by_hand():
    """Returns-to-go are (3, 1, 2) and (-4): divided by 4."""
    assert normalize_process([[2.0, -1.0, 2.0], [-4.0]]) == [[0.5, -0.25, 0.5], [-1.0]]
    assert normalize_process([[0.0, 0.0], []]) == [[0.0, 0.0], []]
    episode = answered("x", turn(), turn())
    for t, reward in zip(episode.turns, (1.0, 1.0, 2.0), strict=True):
        t.process_reward = reward
    Rewards({"em": 1.0}, normalize=True).outcome(episode)
    assert [t.process_reward for t in episode.turns] == [0.25, 0.25, 0.5]


@given(st.lists(st.lists(st.integers(-9, 9).map(float), max_size=5), max_size=4))
def test_prime_normalisation_bounds_every_return(rows):
    to_go = [abs(sum(row[t:])) for row in normalize_process(rows) for t in range(len(row))]
    assert max(to_go, default=0.0) == pytest.approx(1.0) or not any(to_go)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"emm": 1.0}, "reward part 'emm' is unknown; allowed: agent_r1, cost, cover_em, cut, em, evidence, f1"),
        ({"em": "1"}, "reward part 'em' has the weight '1'; give a finite number"),
        ({"em": float("nan")}, "has the weight nan"),
        ({"em": True}, "has the weight True"),
        ({"shaping": {"weight": 1, "gama": 1}}, "reward part 'shaping' has no option 'gama'; allowed: weight, gamma"),
        ({"em": {"gamma": 1}}, "no option 'gamma'; allowed: weight"),
    ],
)
def test_bad_specifications_are_one_sentence(spec, words):
    with pytest.raises(ValueError) as error:
        Rewards(spec)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_a_new_part_is_one_function():
    @rewards.outcome_part
    def short_answer(episode, limit=3):
        return float(episode.answer is not None and len(episode.answer.split()) <= limit)

    try:
        assert Rewards({"short_answer": {"weight": 0.1, "limit": 2}}).outcome(answered("Ole Rømer"))[0] == 0.1
    finally:
        del rewards.OUTCOME_PARTS["short_answer"]


def raising(episode):
    raise KeyError("depth")


@pytest.mark.parametrize(
    ("part", "said"),
    [
        (lambda episode: None, "is null"),
        (lambda episode: float("nan"), "is NaN"),
        (lambda episode: float("-inf"), "is -Infinity"),
        (lambda episode: "0.5", 'is "0.5"'),
        (lambda episode: 10**400, "is 10000"),
        (lambda episode: 1j, "is "),
        (lambda episode: 1e308, "is 1e\\+308"),  # times its weight it is infinite
        (raising, "raised KeyError: 'depth'"),
    ],
    ids=range(8),
)
def test_a_part_without_a_number_counts_nothing_and_is_named(part, said, monkeypatch):
    monkeypatch.setitem(rewards.OUTCOME_PARTS, "mine", part)
    monkeypatch.setitem(rewards.PROCESS_PARTS, "ours", lambda episode, turn: part(episode))
    scheme, episode = Rewards({"em": 1.0, "mine": 1e3, "ours": 1e3}), answered("Rømer")
    with pytest.warns(UserWarning, match=f"reward part 'mine' of task 't' {said}.*; it counts as 0 here"):
        assert scheme.outcome(episode) == (1.0, {"em": 1.0, "mine": 0.0})
    with pytest.warns(UserWarning, match=f"reward part 'ours' of task 't' {said}"):
        assert scheme.process(episode, episode.turns[-1]) == (0.0, {"ours": 0.0})
    assert episode.faults == ["mine", "ours"]


def test_booleans_and_scalars_of_libraries_are_numbers(monkeypatch):
    for value, number in ((True, 1.0), (np.float32(0.5), 0.5), (torch.tensor([2.0]), 2.0), (np.bool_(False), 0.0)):
        monkeypatch.setitem(rewards.OUTCOME_PARTS, "mine", lambda episode, value=value: value)
        assert Rewards({"mine": 2.0}).outcome(answered("x")) == (2 * number, {"mine": number})
