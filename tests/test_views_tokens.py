"""The table the views draw: texts of single tokens, who wrote them, checked numbers, imported conversations."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from tiny import tokenizer

from agentr1_lite.foreign import encode_foreign
from agentr1_lite.mdp import Segment, StopReason, Trajectory, Turn, TurnKind, load_jsonl, save_jsonl
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
    parts = [torch.tensor(flat[:4]), torch.tensor(flat[4:])]
    scalars = [np.float32(x) for x in flat[:5]] + [torch.tensor(x) for x in flat[5:]]
    for given in (flat, [flat], torch.tensor(flat), torch.tensor([flat]), np.array(flat), parts, scalars, tuple(flat)):
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
        ([10**400] + [0.0] * 8, "advantage is 1000"),
        (3, "advantage is int; give a list"),
        (None, "advantage is NoneType; give a list"),
        (torch.tensor(1.0), "advantage is Tensor; give a list"),
        ({"a": 1}, "advantage is dict; give a list"),
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


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"reward": None}, "reward is None; expected float"),
        ({"reward": "1.0"}, "reward is '1.0'"),
        ({"reward": math.nan}, "reward is nan"),
        ({"reward_parts": {"em": None}}, "reward_parts is {'em': None}"),
        ({"reward_parts": []}, r"reward_parts is \[\]"),
        ({"info": None}, "info is None"),
        ({"answer": 3}, "answer is 3"),
        ({"golds": None}, "golds is None"),
        ({"stop_reason": "bored"}, "stop_reason is 'bored'"),
        ({"stop_reason": []}, r"stop_reason is \[\]"),
        ({"segments": None}, "segments is None"),
        ({"segments": [[]]}, r"segments\[0\] is list"),
        ({"segments.token_ids": None}, r"segments\[0\]\.token_ids is None"),
        ({"segments.logprobs": [None] * 9}, r"segments\[0\]\.logprobs is \[None"),
        ({"segments.action_mask": [None] * 9}, r"segments\[0\]\.action_mask is \[None"),
        ({"turns.start": None}, r"turns\[0\]\.start is None; expected int"),
        ({"turns.process_reward": math.nan}, r"turns\[0\]\.process_reward is nan"),
        ({"turns.kind": 3}, r"turns\[0\]\.kind is 3"),
        ({"turns.new": 3}, r"turns\[0\]\.new is no field of a Turn"),
        ({"mine": 3}, "mine is no field of a Trajectory"),
    ],
)
def test_a_row_of_a_wrong_type_names_file_line_and_field(tmp_path, change, says):
    row = episode().to_dict()
    ((name, value),) = change.items()
    part, _, inner = name.partition(".")
    (row[part][0] if inner else row)[inner or name] = value
    path = tmp_path / "t.jsonl"
    path.write_text("\n" + json.dumps(row) + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"t\.jsonl, line 2: not a trajectory \(" + says):
        load_jsonl(path)
    if value is not math.nan:  # the views' reader takes no NaN at all
        with pytest.raises(ValueError, match=r"t\.jsonl, line 2: not a trajectory \(" + says):
            as_trajectory(path)


@pytest.mark.parametrize("text", ['{"a": 1}', "{}", "[]", "3", "[" * 100_000])
def test_a_row_that_is_no_trajectory_names_file_and_line(tmp_path, text):
    path = tmp_path / "t.jsonl"
    path.write_text("\n" + text + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"t\.jsonl, line 2: not a trajectory \("):
        load_jsonl(path)
    with pytest.raises(ValueError, match=r"t\.jsonl"):
        as_trajectory(path)


CALL = {"name": "calc", "arguments": {"e": "2+2"}}


@pytest.mark.parametrize(
    "calls",
    [
        [json.dumps(CALL)], json.dumps([CALL]), json.dumps(CALL), CALL, {"function": CALL},
        [{"function": json.dumps(CALL)}],
        [{"function": "calc", "arguments": CALL["arguments"]}], [{"function": {**CALL, "arguments": '{"e": "2+2"}'}}],
    ],
)  # fmt: skip
def test_calls_in_every_form_have_their_name(calls):
    made = from_messages([{"role": "assistant", "content": None, "tool_calls": calls}])
    assert made.turns[0].calls == [CALL]


@pytest.mark.parametrize("cut", ['[{"name": "calc", "argum', '{"name": "calc"', "{'name': 'calc'}", " "])
def test_a_call_that_was_cut_off_names_nothing(cut):
    for calls in (cut, [cut], [{"function": cut}]):
        (turn,) = from_messages([{"role": "assistant", "content": None, "tool_calls": calls}]).turns
        assert turn.calls == [{"error": "malformed_json", "raw": cut}] and turn.kind is TurnKind.INVALID
        assert turn.text == f"<tool_call>\n{cut}\n</tool_call>"
    (mixed,) = from_messages([{"role": "assistant", "tool_calls": [CALL, '{"name": "calc"']}]).turns
    assert mixed.kind is TurnKind.TOOL_CALL and mixed.calls[0] == CALL and "error" in mixed.calls[1]


def test_what_is_missing_in_a_conversation_is_empty():
    talk = [{"role": "assistant", "content": "4"}]
    assert from_messages({"prompt": None, "completion": talk, "reward": None}) == from_messages(talk)
    assert from_messages({"prompt": "2+2?", "completion": None}).question == "2+2?"
    deep = from_messages([{"role": "assistant", "tool_calls": [{"name": "f", "arguments": "[" * 100_000}]}])
    assert list(deep.turns[0].calls[0]["arguments"]) == ["raw"]


def nested(depth: int) -> list:
    out: list = []
    for _ in range(depth):
        out = [out]
    return out


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ({"tool_calls": [{"function": None}]}, r"message 1: tool_calls\[0\] is None"),
        ({"tool_calls": [3]}, r"message 1: tool_calls\[0\] is 3"),
        ({"tool_calls": 3}, "message 1: tool_calls is int"),
        ({"tool_calls": [{"name": "f", "arguments": {"x": b"y"}}]}, r"message 1: the arguments of tool_calls\[0\]"),
        ({"tool_calls": [{"name": "f", "arguments": nested(10**5)}]}, r"message 1: the arguments of tool_calls\[0\]"),
        ({"content": ["a", {"type": "text", "text": 5}]}, "message 1: part 1 of content is int"),
        ({"content": [None]}, "message 1: part 0 of content is NoneType"),
    ],
)
def test_a_wrong_field_of_a_message_is_named(message, says):
    with pytest.raises(ValueError, match=says):
        from_messages([{"role": "user", "content": "?"}, {"role": "assistant", **message}])


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"prompt": 3, "completion": "4"}, "prompt is int"),
        ({"completion": "4", "reward": [1]}, r"reward is \[1\]"),
        ({"completion": "4", "reward": "1.0"}, "reward is '1.0'"),
        ({"completion": "4", "reward": math.nan}, "reward is nan"),
        ({"a": 1}, "from_messages got a row with a; give"),
        ({}, "from_messages got a row with nothing; give"),
        ([], "from_messages got 0 messages; give"),
        ({"messages": 3}, "from_messages got a row with messages; give"),
    ],
)
def test_a_wrong_row_is_named(row, says):
    with pytest.raises(ValueError, match=says):
        from_messages(row)


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
