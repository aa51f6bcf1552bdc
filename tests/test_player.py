"""The step player: an episode by hand is the episode of a rollout, and every action says what it did."""

from __future__ import annotations

import math

import pytest
import tiny

from agentr1_lite.__main__ import main
from agentr1_lite.env import ToolEnv
from agentr1_lite.mdp import StopReason, Task, states
from agentr1_lite.rollout import rollout
from agentr1_lite.tools import tool
from agentr1_lite.views.player import HELP, StepPlayer, play_lines

TASK = Task("t", "Who founded Arda?", ("Oslo",))


@tool
def search(query: str) -> str:
    """Search.

    Args:
        query: the words
    """
    return f"about {query}"


def player(**options) -> StepPlayer:
    limits = {"max_turns": 3, "max_turn_tokens": 12, "max_response_tokens": 200, "max_tool_tokens": 40}
    env = ToolEnv([search], call_format="tag", rewards={"em": 1.0, "tool_success": 0.25}, **{**limits, **options})
    return StepPlayer(tiny.policy(), env, TASK)


@pytest.mark.parametrize("greedy", [True, False])
def test_policy_left_alone_plays_what_a_rollout_plays(greedy):
    hand = player()
    while not hand.done:
        hand.choose(hand.choices(1)[0].token) if greedy else hand.sample()
    (made,) = rollout(hand.policy, hand.env, [TASK], greedy=greedy, seed=0)
    mine, theirs = hand.trajectory.to_dict(), made.to_dict()
    logprobs = [row["segments"][0].pop("logprobs") for row in (mine, theirs)]
    assert mine == theirs and logprobs[0] == pytest.approx(logprobs[1], abs=1e-6)
    logprobs = [x for x in logprobs[1] if x]
    assert [math.log(step.probability) for step in hand.steps] == pytest.approx(logprobs, abs=1e-4)


def test_choices_are_the_likeliest_tokens_and_name_them():
    hand = player()
    found = hand.choices(400)
    assert len(found) == len(tiny.tokenizer()) and sum(c.probability for c in found) == pytest.approx(1, abs=1e-4)
    assert found == sorted(found, key=lambda c: -c.probability)
    assert found[0].text == tiny.tokenizer().decode([found[0].token])


def test_choices_and_tokens_stay_inside_the_vocabulary(monkeypatch):
    hand = player()
    real = len(tiny.tokenizer())
    assert len(hand.choices(10**6)) <= real and hand.choices(-1) == hand.choices(0) == []
    vocabulary = tiny.tokenizer().get_vocab()
    fewer = {text: i for text, i in vocabulary.items() if i < real - 40}
    monkeypatch.setattr(type(hand.policy.tokenizer), "get_vocab", lambda self: fewer)
    hand = player()  # of a model with more rows than its tokenizer has tokens
    assert len(hand.choices(10**6)) == real - 40 and max(c.token for c in hand.choices(10**6)) < real - 40
    assert len(hand.choices(5)) == 5
    for token in (3.7, "3", None, real, real - 40, -1):
        with pytest.raises(ValueError, match="is not in the vocabulary"):
            hand.choose(token)
    assert hand.steps == []


def test_typed_turns_show_transition_observation_and_reward():
    hand = player(max_turn_tokens=60)
    taken = hand.type_text("<search>Arda</search>")
    assert [step.environmental for step in taken] == [False] * (len(taken) - 1) + [True]
    assert (taken[-1].observation, taken[-1].reward, taken[-1].done) == ("about Arda", 0.25, False)
    assert hand.state.tools == ("search",) and len(hand.state.turns) == 1 and hand.state.partial == ()
    ((spoken, feedback),) = hand.state.turns
    assert hand.policy.chat.decode(
        spoken
    ) == "<search>Arda</search><|im_end|>" and "about Arda" in tiny.tokenizer().decode(feedback)
    assert sum(step.reward for step in taken) == 0.25
    last = hand.type_text("<answer>Oslo</answer>")[-1]
    assert (last.reward, last.done) == (1.0, True)
    assert (hand.trajectory.stop_reason, hand.trajectory.answer) == (StopReason.ANSWER, "Oslo")
    *_, (_, _, final) = states(hand.trajectory)
    assert final.token_ids == hand.state.token_ids
    assert hand.choices() == []


def test_text_without_an_end_leaves_the_turn_open():
    hand = player(max_turn_tokens=60)
    assert not any(step.environmental for step in hand.type_text("the river"))
    assert hand.policy.chat.decode(hand.state.partial) == "the river"
    assert hand.type_text("", end=True)[-1].done and hand.trajectory.stop_reason is StopReason.NO_CALL


def test_undo_goes_back_across_turns_and_past_the_end():
    hand = player(max_turn_tokens=60)
    hand.type_text("<search>Arda</search>")
    at = hand.state
    hand.type_text("<answer>Oslo</answer>")
    before = list(hand.steps)
    hand.undo(len(before) - len(at.turns[0][0]))
    assert hand.state == at and not hand.done
    hand.type_text("<answer>Oslo</answer>")
    assert [s.token for s in hand.steps] == [s.token for s in before] and hand.trajectory.reward == 1.0
    hand.undo(10_000)
    assert hand.steps == [] and hand.state.token_ids == hand.state.prompt


def test_undo_takes_back_what_was_done_last():
    hand = player(max_turn_tokens=60)
    sizes, moves = [0], [hand.sample, lambda: hand.type_text("the river"), lambda: hand.choose(5), hand.finish_turn]
    for move in moves:
        move()
        sizes.append(len(hand.steps))
    assert sizes[2] - sizes[1] > 1 and sizes[4] - sizes[3] > 1
    with pytest.raises(ValueError, match="token 99999"):
        player().choose(99999)
    for size in reversed(sizes[:-1]):
        hand.undo()
        assert len(hand.steps) == size
    hand.undo()
    hand.type_text("the river")
    hand.undo(1)
    hand.undo()
    assert hand.steps == []


def test_wrong_moves_are_one_sentence():
    hand = player(max_turn_tokens=60)
    with pytest.raises(ValueError, match="token 99999 is not in the vocabulary"):
        hand.choose(99999)
    hand.type_text("<answer>Oslo</answer>")
    with pytest.raises(ValueError, match=r"the episode is over \(answer\); take back"):
        hand.sample()


def test_the_page_shows_state_transition_and_choices():
    hand = player(max_turn_tokens=60)
    assert "State <b>s₀</b>" in hand.html()
    hand.type_text("<search>Arda</search>")
    page = hand.html(3).html
    assert "&lt;search&gt;" in page.replace('</span><span class="t sa">', "") and "P_E" in page and "+0.25" in page
    assert page.count("background:var(--ar1-blue)") >= 3
    hand.type_text("the")
    assert "P_G" in hand.html() and "<search>" not in hand.html()
    hand.type_text(" <answer>Oslo</answer>")
    assert "The episode is over (answer): answer Oslo, right is Oslo." in hand.html()


def test_buttons_play(monkeypatch):
    updates = []
    hand = player(max_turn_tokens=60)
    row, below = hand._buttons(3).children
    monkeypatch.setattr(
        hand, "_handle", type("Handle", (), {"update": lambda self, page: updates.append(page)})(), raising=False
    )
    best = hand.choices(1)[0]
    assert row.children[0].description.startswith("1 · ")
    row.children[0].click()
    assert hand.steps[0].token == best.token and len(updates) == 1
    typed, ahead, back = below.children
    back.click()
    assert hand.steps == []
    typed.value = "<answer>Oslo</answer>"
    assert hand.done and typed.value == "" and ahead.disabled and row.children[0].disabled
    assert "The episode is over" in updates[-1]


def test_a_terminal_plays():
    said = []
    play_lines(
        player(max_turn_tokens=60),
        iter(["1", "undo", "<search>Arda</search>", "<answer>Oslo</answer>", "1"]),
        said.append,
    )
    text = "\n".join(said)
    assert "so far> <search>" not in text
    assert "world> about Arda\n[P_E, reward +0.25]" in text
    assert said[-1] == "[answer] answer: Oslo; right: Oslo"
    said = []
    play_lines(player(), iter(["go"]), said.append)
    assert any(line.startswith("agent> ") for line in said)


def test_command_offers_tokens(tmp_path, monkeypatch, capsys):
    tiny.policy().save(tmp_path / "model")
    lines = iter(["the", "undo", "quit"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    assert main(["play", "task.knobs.count=6", "--by", "token", "--policy", str(tmp_path / "model")]) == 0
    out = capsys.readouterr().out
    assert out.startswith("question> ") and "so far> the\n" in out and "  1) " in out


def test_lines_that_pick_nothing_are_not_typed():
    said, player = [], StepPlayer(tiny.policy(), ToolEnv([], max_turn_tokens=60), Task("t", "Who?", ("Oslo",)))
    play_lines(player, iter(["0", "9", "-1", "?", "undo 3"]), said.append)
    assert player.steps == [] and said.count(HELP) == 2 and "quit" in HELP
    assert [line for line in said if "no choice" in line] == [
        f"{n} is no choice; the numbers go from 1 to 5" for n in (0, 9, -1)
    ]
    play_lines(player, iter(["1", "2", "the", "1", "undo 3", "undoing"]), said.append)
    assert player.steps[0].text + "undoing" == "".join(step.text for step in player.steps)
