"""The table the views draw: texts of single tokens, who wrote them, checked numbers, imported conversations."""

from __future__ import annotations

import json
import math

import pytest
import torch
from tiny import tokenizer

from agentr1_lite.foreign import encode_foreign
from agentr1_lite.mdp import Segment, StopReason, Trajectory, Turn, TurnKind, save_jsonl
from agentr1_lite.views import from_messages, token_table
from agentr1_lite.views.tokens import as_trajectory, piece, runs


def episode() -> Trajectory:
    """prompt 1 2 | sampled 3 4 | seam 5, observation 6 7, seam 8 | sampled 9."""
    segment = Segment()
    segment.extend([1, 2])
    segment.extend([3, 4], [-0.5, -1.0])
    segment.extend([5, 6, 7, 8])
    segment.extend([9], [-2.0])
    turns = [
        Turn(0, 2, 4, TurnKind.TOOL_CALL, observation_start=5, observation_end=7, process_reward=0.25),
        Turn(0, 8, 9, TurnKind.ANSWER, observation_start=9, observation_end=9),
    ]
    return Trajectory("t", "g", [segment], turns, reward=1.0, stop_reason=StopReason.ANSWER)


def test_sources_and_turns_follow_the_record():
    table = token_table(episode())
    assert [s[0] for s in table.source] == list("ppaasoosa")
    assert table.turn == [-1, -1, 0, 0, 0, 0, 0, 0, 1]
    assert table.quantities["reward"] == [0, 0, 0, 0.25, 0, 0, 0, 0, 1.0]
    assert table.quantities["sampled_logprob"] == [None, None, -0.5, -1.0, None, None, None, None, -2.0]
    assert table.turns() == [(0, 2), (2, 8), (8, 9)]


def test_step_level_contexts_keep_their_own_prompts():
    first, second = Segment(), Segment()
    first.extend([1])
    first.extend([2], [-0.1])
    second.extend([1, 2, 3])
    second.extend([4], [-0.1])
    table = token_table(Trajectory("t", "g", [first, second], [Turn(0, 1, 2), Turn(1, 3, 4)]))
    assert [s[0] for s in table.source] == list("papppa")
    assert table.segment == [0, 0, 1, 1, 1, 1]
    assert table.turn == [-1, 0, -1, -1, -1, 1]


def test_a_token_reads_as_itself():
    tok = tokenizer()
    end = tok.convert_tokens_to_ids("<|im_end|>")
    assert piece(tok, end) == ("<|im_end|>", True)
    spelled = [piece(tok, i) for i in encode_foreign(tok, "<|im_end|>")]
    assert "".join(text for text, _ in spelled) == "<|im_end|>"
    assert len(spelled) > 1 and not any(special for _, special in spelled)
    emoji = [piece(tok, i)[0] for i in encode_foreign(tok, "😀")]
    assert emoji == [f"⟨{byte:02X}⟩" for byte in "😀".encode()]
    assert piece(tok, 10**6) == ("⟨1000000⟩", False)


def test_numbers_come_as_lists_tensors_or_one_list_a_segment():
    flat = [float(i) for i in range(9)]
    for given in (flat, [flat], torch.tensor(flat), torch.tensor([flat])):
        assert token_table(episode(), quantities={"advantages": given}).quantities["advantage"] == flat


def test_ratio_and_kl_from_log_probs():
    now = [0, 0, -0.25, -1.0, 0, 0, 0, 0, -3.0]
    ref = [0, 0, -0.75, -1.0, 0, 0, 0, 0, -3.0]
    found = token_table(episode(), quantities={"logprob": now, "ref_logprob": ref}).quantities
    expected = [math.exp(0.25), 1.0, math.exp(-1.0)]
    acted = [2, 3, 8]
    assert [found["ratio"][t] for t in acted] == pytest.approx(expected)
    assert [found["kl"][t] for t in acted] == pytest.approx([math.exp(-0.5) + 0.5 - 1, 0, 0])
    assert found["ratio"][0] is None and found["kl"][5] is None


@pytest.mark.parametrize(
    ("numbers", "says"),
    [
        ([1.0] * 8, "advantage has 8 numbers for 9 tokens"),
        ([0.0] * 4 + [math.nan] + [0.0] * 4, "advantage is nan at token 4"),
        ([math.inf] + [0.0] * 8, "advantage is inf at token 0"),
        (["x"] + [0.0] * 8, "advantage is 'x' at token 0"),
    ],
)
def test_bad_numbers_name_field_and_place(numbers, says):
    with pytest.raises(ValueError, match="task 't'.*" + says):
        token_table(episode(), quantities={"advantage": numbers})


def test_inconsistent_trajectories_name_field_and_place():
    outside = episode()
    outside.turns[1].end = 12
    with pytest.raises(ValueError, match=r"turn 1 span \[8, 12\) lies outside"):
        token_table(outside)
    short = episode()
    short.segments[0].logprobs.pop()
    with pytest.raises(ValueError, match="segment 0 has 9 token_ids, 9 action_mask and 8 logprobs"):
        token_table(short)
    odd = episode()
    odd.segments[0].logprobs[3] = math.nan
    with pytest.raises(ValueError, match="segment 0 token 3 has log-prob nan"):
        token_table(odd)
    unbounded = episode()
    unbounded.segments[0].logprobs[3] = -math.inf
    with pytest.raises(ValueError, match="sampled_logprob is -inf at token 3"):
        token_table(unbounded)
    unpaid = episode()
    unpaid.reward = math.nan
    with pytest.raises(ValueError, match="reward is nan at token 8"):
        token_table(unpaid)
    wordless = episode()
    wordless.info["pieces"] = [["a", "b"]]
    with pytest.raises(ValueError, match=r"info\['pieces'\] holds 2 texts for 9 tokens"):
        token_table(wordless)


MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "2+2?"}, {"type": "image_url"}]},
    {
        "role": "assistant",
        "content": None,
        "reasoning_content": "use it",
        "tool_calls": [{"id": "1", "function": {"name": "calc", "arguments": '{"e": "2+2"}'}}],
    },
    {"role": "tool", "content": "4"},
    {"role": "assistant", "content": "It is <answer>4</answer>"},
]


@pytest.mark.parametrize("tok", [None, tokenizer()])
def test_a_conversation_becomes_a_trajectory(tok):
    made = from_messages({"prompt": MESSAGES[:2], "completion": MESSAGES[2:], "reward": 0.5}, tok)
    made.check()
    assert made.question == "2+2?[image_url]" and made.reward == 0.5
    assert [turn.kind for turn in made.turns] == [TurnKind.TOOL_CALL, TurnKind.ANSWER]
    assert made.turns[0].calls == [{"name": "calc", "arguments": {"e": "2+2"}}]
    table = token_table(made)
    said = ["".join(table.pieces[turn.start : turn.end]) for turn in made.turns]
    assert said[0] == '<think>use it</think>\n<tool_call>\n{"name": "calc", "arguments": {"e": "2+2"}}\n</tool_call>'
    assert said[1] == "It is <answer>4</answer>"
    seen = [p for p, s in zip(table.pieces, table.source, strict=True) if s == "observation"]
    assert "".join(seen) == "4"


def test_files_of_trajectories_and_of_conversations(tmp_path):
    save_jsonl(tmp_path / "t.jsonl", [episode(), episode()])
    assert as_trajectory(tmp_path / "t.jsonl", 1) == episode()
    (tmp_path / "m.jsonl").write_text(json.dumps({"messages": MESSAGES}) + "\n", encoding="utf-8")
    assert as_trajectory(str(tmp_path / "m.jsonl")) == from_messages(MESSAGES)
    with pytest.raises(ValueError, match="no row 7 among 2 rows"):
        as_trajectory(tmp_path / "t.jsonl", 7)


@pytest.mark.parametrize("bad", [[], "text", 3, [{"content": "x"}], ["x"], {"messages": []}])
def test_what_is_no_conversation_is_refused_in_a_sentence(bad):
    with pytest.raises(ValueError, match=r"from_messages got|message 0 is"):
        from_messages(bad)


def test_runs_of_equal_neighbours():
    assert runs([]) == [] and runs([1, 1, 2, 1]) == [(0, 2), (2, 3), (3, 4)]
