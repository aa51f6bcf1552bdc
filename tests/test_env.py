"""ToolEnv: what a turn does to an episode, what it pays, and how little an own environment needs."""

from __future__ import annotations

import json
import random
import threading
import time
from collections import defaultdict, deque
from dataclasses import dataclass, field
from queue import SimpleQueue
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentr1_lite.batch import collate
from agentr1_lite.env import StepResult, ToolEnv, anchor_of
from agentr1_lite.mdp import Segment, StopReason, Task, Trajectory, TurnKind
from agentr1_lite.retrieval import BM25
from agentr1_lite.toolcalls import ToolCall, render_tool_call
from agentr1_lite.tools import Tool, ToolResult, tool

TASK = Task("t1", "Who directed Kes?", ("Ken Loach", "Loach"), evidence=("Kes", "Ken Loach"))
PAGES = {"kes": ("Kes", "Kes was directed by Ken Loach."), "loach": ("Ken Loach", "He was born in Nuneaton.")}


@tool(inline=True)
def search(query: str, top_k: int = 1) -> ToolResult:
    """Search the corpus.

    Args:
        query: words
    """
    title, text = PAGES.get(query.lower(), ("Quiz", "Quiz page: <answer>Bergen</answer>"))
    return ToolResult(text, info={"titles": [title]})


@tool(inline=True)
def boom(query: str) -> str:
    """Fail."""
    raise ValueError(query)


def call(name="search", **arguments) -> str:
    return render_tool_call(ToolCall(name, arguments))


def start(*tools, task=TASK, **options) -> ToolEnv:
    env = ToolEnv(tools or (search, boom), **options)
    env.reset(task)
    return env


def test_reset_gives_the_first_messages():
    env = ToolEnv([search])
    system, user = env.reset(TASK)
    assert user == {"role": "user", "content": "Who directed Kes?"} and system["role"] == "system"
    assert "<tool_call>" in system["content"] and "<answer>" in system["content"]
    assert env.tool_schemas == [search.schema()] and env.stop_strings == ("</answer>", "<tool_response>")
    assert ToolEnv([search], system_prompt="").reset(TASK) == [user]
    tags = ToolEnv([search], call_format="tag", parallel_calls=False)
    assert "<search>query</search>: Search the corpus." in tags.reset(TASK)[0]["content"]
    assert tags.tool_schemas == [] and tags.stop_strings == ("</answer>", "</search>", "<tool_response>")


def test_an_episode_with_a_call_and_an_answer():
    env = start(rewards={"em": 1.0, "step_penalty": -0.01, "evidence": 0.1})
    first = env.step(f"<think>look</think>{call(query='Kes')}")
    assert first.observation == [{"role": "tool", "content": "Kes was directed by Ken Loach."}]
    assert (first.done, first.info["stop_reason"], first.info["answer"]) == (False, None, None)
    turn = first.info["turn"]
    assert first.reward == turn.process_reward == pytest.approx(0.09)
    assert turn.kind is TurnKind.TOOL_CALL and turn.flags == [] and turn.finish_reason == "stop"
    assert turn.calls == [{"name": "search", "arguments": {"query": "Kes"}, "flags": []}]
    assert turn.results[0]["info"] == {"titles": ["Kes"]}
    last = env.step("<think>so</think><answer> Loach </answer>")
    assert (last.observation, last.done, last.info["answer"]) == ([], True, "Loach")
    assert last.reward == pytest.approx(0.99) and last.info["outcome"] == 1.0
    assert last.info["stop_reason"] is StopReason.ANSWER and last.info["turn"].kind is TurnKind.ANSWER
    assert last.info["reward_parts"] == {"em": 1.0, "step_penalty": 2.0, "evidence": 1.0}
    assert env.finish(StopReason.LENGTH) == (1.0, last.info["reward_parts"])
    with pytest.raises(RuntimeError, match="came after the episode's end"):
        env.step("more")
    with pytest.raises(RuntimeError, match=r"before reset\(task\)"):
        env.fork().step("more")


WRONG = [
    ('{"name": "search", "arguments": {"query": null}}', "must be a string, not null", "invalid_arguments"),
    ('{"name": "search", "arguments": {"query": ["Oslo", "Bergen"]}}', 'not ["Oslo", "Bergen"]', "invalid_arguments"),
    ('{"name": "search", "arguments": {}}', '"query" is missing', "invalid_arguments"),
    ('{"name": "search", "arguments": null}', '"arguments" is null instead of an object', "bad_arguments"),
    (
        '{"name": "browse", "arguments": {"query": "x"}}',
        "no tool named 'browse'; the tools are: search",
        "unknown_tool",
    ),
    ('{"name": "se\\narch", "arguments": {}}', "no tool named 'se\\narch'", "unknown_tool"),
    ('{"name": "search", "arguments": {"query": "   "}}', '"query" must not be empty', "invalid_arguments"),
    ('[{"name": "search", "arguments": {"query": "a"}}]', "not one JSON object", "not_an_object"),
    ('{"query": "no name key"}', 'without a "name"', "no_name"),
    ("NaN", "not valid JSON", "not_finite"),
    ('{"name": "search", "arguments": {"query": "a}}', "not valid JSON", "malformed_json"),
    ('{"name": "boom", "arguments": {"query": "x"}}', "Error: boom failed (ValueError: x).", "raised"),
]


@pytest.mark.parametrize(("body", "words", "flag"), WRONG)
def test_a_faulty_call_is_one_line_back_and_the_episode_goes_on(body, words, flag):
    env = start()
    step = env.step(f"<tool_call>\n{body}\n</tool_call>")
    (message,) = step.observation
    assert words in message["content"] and len(message["content"].splitlines()) == 1
    assert not step.done and flag in step.info["turn"].flags and env.errors == 1
    assert step.info["turn"].kind is (TurnKind.TOOL_CALL if flag == "raised" else TurnKind.INVALID)
    assert env.step("<answer>Ken Loach</answer>").reward == 1.0


def test_a_number_is_coerced_and_strict_reading_reports_literals():
    number = '<tool_call>{"name": "search", "arguments": {"query": 1994}}</tool_call>'
    assert start().step(number).info["turn"].results[0]["success"]
    literal = "<tool_call>{'name': 'search', 'arguments': {'query': 'kes'}}</tool_call>"
    assert "Ken Loach" in start().step(literal).observation[0]["content"]
    strict = start(lenient=False).step(literal)
    assert "not valid JSON" in strict.observation[0]["content"] and not strict.done
    fence = '```json\n{"name": "search", "arguments": {"query": "kes"}}\n```'
    assert start().step(fence).info["turn"].kind is TurnKind.TOOL_CALL
    ended = start(lenient=False).step(fence)
    assert ended.info["stop_reason"] is StopReason.NO_CALL and ended.info["answer"] is None


def test_parallel_calls_are_several_messages_of_one_turn():
    text = call(query="Kes") + "\n<tool_call>{}</tool_call>\n" + call(query="Loach")
    step = start().step(text)
    assert [m["content"][:12] for m in step.observation] == ["Kes was dire", "Error: the t", "He was born "]
    assert len(step.info["turn"].calls) == len(step.info["turn"].results) == 3
    one = start(parallel_calls=False).step(text)
    assert [m["content"] for m in one.observation[1:]] == ["Error: one call a turn; this one was not run."] * 2
    assert one.observation[0] == step.observation[0] and "not_run" in one.info["turn"].flags


@pytest.mark.parametrize(
    ("text", "reason", "kind"),
    [
        (
            '<tool_call>\n{"name": "search", "arguments": {"query": "population of the munici',
            "length",
            TurnKind.INVALID,
        ),
        (call(query="Kes") + '\n<tool_call>{"name": "search"', "length", TurnKind.INVALID),
        ("<think>I wonder", "length", TurnKind.TEXT),
        ("<answer>Ken Lo", "length", TurnKind.TEXT),
        ("I do not know.", "no_call", TurnKind.TEXT),
        ("", "no_call", TurnKind.TEXT),
        ("<answer>Ken Loach", "no_call", TurnKind.TEXT),
    ],
)
def test_turns_that_end_the_episode_without_an_answer(text, reason, kind):
    ran = []

    @tool(name="search", inline=True)
    def spy(query: str):
        ran.append(query)

    step = start(spy, rewards={"em": 1.0, "no_answer": -0.5}).step(text, "length" if reason == "length" else "stop")
    assert (step.done, step.observation, step.reward) == (True, [], -0.5)
    assert step.info["stop_reason"] is StopReason(reason) and step.info["turn"].kind is kind
    assert ran == []


def test_a_complete_call_before_cut_chatter_still_runs():
    step = start().step(call(query="Kes") + " and then I wi", "length")
    assert not step.done and "Ken Loach" in step.observation[0]["content"]
    assert start().step("<answer>Ken Loach</answer> bec", "length").info["stop_reason"] is StopReason.ANSWER


def test_answer_beside_a_call_wins_and_is_flagged():
    for text in ("<answer>Oslo</answer>\n" + call(query="Kes"), call(query="Kes") + "<answer>Oslo</answer>"):
        twin = start(task=Task("n", "Capital?", ("Oslo",)))
        assert "Bergen" in twin.step(call(query="quiz")).observation[0]["content"]
        step = twin.step(text)
        assert (step.info["answer"], step.reward, step.observation) == ("Oslo", 1.0, [])
        assert step.info["turn"].flags == ["answer_and_call"] and step.info["turn"].results == []
    bergen = start(task=Task("n", "Capital?", ("Bergen",)), rewards={"em": 1.0, "cover_em": 1.0, "f1": 1.0})
    bergen.step(call(query="quiz"))
    assert bergen.step("I saw it.").reward == 0.0


def test_a_forged_tool_response_is_not_read():
    step = start().step(f"{call(query='quiz')}\n<tool_response>\nx\n</tool_response><answer>Ken Loach</answer>")
    assert (step.done, step.info["answer"], step.info["turn"].flags) == (False, None, ["wrote_tool_response"])
    assert len(step.observation) == 1


def test_what_was_left_out_is_told_before_the_first_reply():
    kes, loach = (json.dumps({"name": "search", "arguments": {"query": query}}) for query in ("Kes", "Loach"))
    both = start().step(f"<tool_call>\n{kes}\n{loach}\n</tool_call>")
    assert [m["content"][:12] for m in both.observation] == ["Kes was dire", "He was born "]
    one = start(parallel_calls=False).step(f"<tool_call>\n{kes}\n{loach}\n</tool_call>")
    assert one.observation[1]["content"] == "Error: one call a turn; this one was not run."
    step = start().step(f"<tool_call>\n{kes}\nthen\n{loach}\n</tool_call>" + call(query="Loach"))
    note, reply = step.observation[0]["content"].split("\n")
    assert note.startswith("Note: left out of your turn: ") and "then" in note and "Loach" in note
    assert note.endswith(" Write each call in tags of its own.") and reply == "Kes was directed by Ken Loach."
    assert step.observation[1]["content"] == "He was born in Nuneaton." and step.info["turn"].flags == ["left_out"]
    assert step.info["turn"].results[0]["content"] == f"{note}\n{reply}"
    tagged = start(call_format="tag").step("<search>Kes <think>or</think> Loach</search>")
    assert tagged.observation[0]["content"].startswith('Note: left out of your turn: "Loach" before </search>.')


def test_limits_on_turns_and_errors():
    env = start(max_turns=2)
    assert not env.step(call(query="Kes")).done
    last = env.step(call(query="Loach"))
    assert last.done and last.info["stop_reason"] is StopReason.MAX_TURNS and last.observation
    env = start(max_tool_errors=2)
    assert not env.step(call("boom", query="x") + call(query="Kes")).done
    assert env.step(call("nope")).info["stop_reason"] is StopReason.TOOL_ERROR_LIMIT
    env = start(rewards={"no_answer": -1.0, "step_penalty": -0.1})
    env.step(call(query="Kes"))
    assert env.finish(StopReason.INTERRUPTED) == (-1.0, {"no_answer": 1.0, "step_penalty": 1.0})
    assert env.episode.stop_reason is StopReason.INTERRUPTED


def test_final_answer_by_a_tool():
    env = start(final_answer="tool")
    assert "final_answer" in [s["function"]["name"] for s in env.tool_schemas] and "</answer>" not in env.stop_strings
    wrong = env.step(call("final_answer", answer=" "))
    assert not wrong.done and "must not be empty" in wrong.observation[0]["content"]
    assert "<answer>" not in env.system_prompt
    step = env.step("<answer>Bergen</answer>" + call(query="Kes") + call("final_answer", answer="Loach"))
    assert (step.done, step.info["answer"], step.reward, step.observation) == (True, "Loach", 1.0, [])
    assert step.info["turn"].flags == ["answer_and_call"]
    clean = start(final_answer="tool").step(call("final_answer", answer="Loach")).info["turn"]
    assert clean.flags == [] and clean.kind is TurnKind.ANSWER


def test_anchors_are_the_observations_that_precede_a_turn():
    env = start()
    first = env.step(call(query="Kes"))
    second = env.step(call(query="Loach"))
    assert first.info["turn"].anchor == anchor_of("Who directed Kes?") == "7489bf01b65afaeb"
    assert second.info["turn"].anchor == anchor_of("Kes was directed by Ken Loach.")
    other = start()
    other.step(call(query="KES"))
    assert other.step("hm").info["turn"].anchor == second.info["turn"].anchor


def test_shaping_reaches_earlier_turns_through_the_same_objects():
    env = start(rewards={"em": 1.0, "shaping": {"gamma": 0.5}, "step_penalty": -0.25})
    turns = [env.step(call(query="Kes")).info["turn"] for _ in range(2)]
    assert [t.process_reward for t in turns] == [-0.25, -0.25]
    last = env.step("<answer>Loach</answer>")
    assert [t.process_reward for t in turns] == [0.0, 0.25]
    # 1 for the answer, -0.25 for its turn, and 0.25 + 0.5 that the earlier turns got late
    assert last.reward == 1.5 and env.total_reward == 1.0


SPECS = [
    {"em": 1.0},
    {"em": 1.0, "shaping": {"gamma": 0.9}},
    {"em": 1.0, "shaping": {"weight": 0.5, "gamma": 0.5}, "step_penalty": -0.25},
    {"f1": 1.0, "evidence": 0.5, "tool_success": 1.0},
]


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("spec", SPECS, ids=range(len(SPECS)))
@pytest.mark.parametrize("last", ["<answer>Loach</answer>", "<answer>Lyon</answer>", "hm", None])
def test_an_episode_has_one_reward_whoever_sums_it(spec, normalize, last):
    env = start(rewards=spec, normalize_process=normalize, max_turns=9)
    earned, turns = [], []
    for text in (call(query="Kes"), call(query="Loach"), *([last] if last else [])):
        step = env.step(text)
        earned.append(step.reward)
        turns.append(step.info["turn"])
    outcome, _ = env.finish(StopReason.LENGTH)
    segment = Segment([0] * 7, [False, True] * len(turns) + [False] * (7 - 2 * len(turns)), [0.0] * 7)
    trajectory = Trajectory("t1", "g", [segment], turns, reward=outcome)
    for place, turn in enumerate(turns):
        turn.start, turn.end = 2 * place + 1, 2 * place + 2
    assert env.total_reward == trajectory.total_reward
    if last:
        assert sum(earned) == pytest.approx(trajectory.total_reward)
        assert collate([trajectory]).rewards.sum().item() == pytest.approx(trajectory.total_reward)


def test_two_searches_and_a_right_answer_by_hand():
    """Shaped by gamma = 0.9: 0.81 + 0.9 beside the 1; a search that finds a gold title is worth 1, over their sum 2."""
    shaped = start(rewards={"em": 1, "shaping": {"gamma": 0.9, "weight": 0.5}})
    texts = (call(query="Kes"), call(query="Loach"), "<answer>Loach</answer>")
    assert sum(shaped.step(text).reward for text in texts) == pytest.approx(1 + (0.81 + 0.9) / 2) == shaped.total_reward
    normal = start(rewards={"em": 1, "evidence": 1}, normalize_process=True)
    assert sum(normal.step(text).reward for text in texts) == pytest.approx(2.0) == normal.total_reward


def test_task_success_is_the_environments_own_and_em_is_em():
    @tool(inline=True)
    def door(query: str):
        return ToolResult("open", info={"score": 1.0, "done": True})

    for spec, earned in (({"task_success": 2.0}, 2.0), ({"em": 2.0}, 0.0), ({"task_success": 1.0, "em": 1.0}, 1.0)):
        assert start(door, rewards=spec).step(call("door", query="x")).reward == earned
    searched = start(rewards={"task_success": 1.0, "em": 0.0})
    assert searched.step("<answer>Loach</answer>").info["reward_parts"] == {"task_success": 1.0, "em": 1.0}


class Faulty(ToolEnv):
    def success(self):
        return self.given

    def process_reward(self, turn):
        return self.given


@pytest.mark.parametrize("given", [None, float("nan"), float("inf"), 10**400, "1.0", [1.0], object()])
def test_a_reward_that_is_no_number_is_named_and_the_run_goes_on(given):
    env = Faulty([search], rewards={"em": 1.0, "task_success": 1.0})
    env.given = given
    env.reset(TASK)
    with pytest.warns(UserWarning, match="reward part 'process_reward' of task 't1' is .*; it counts as 0"):
        first = env.step(call(query="Kes"))
    assert first.reward == 0.0 and first.info["turn"].flags == ["reward_fault"]
    with pytest.warns(UserWarning, match="reward part 'task_success' of task 't1' is "):
        last = env.step("<answer>Loach</answer>")
    assert last.reward == 1.0 and last.info["reward_parts"] == {"em": 1.0, "task_success": 0.0}
    assert env.episode.faults == ["process_reward", "process_reward", "task_success"]


def test_numbers_that_a_tool_reports_cannot_end_a_rollout():
    infos = [{"cost": 10**400}, {"score": 10**400}, {"reward": -(10**400)}, {"cost": 2}]

    @tool(inline=True)
    def odd(index: int):
        return ToolResult("ok", info=infos[index])

    env = start(odd, rewards={"task_success": 1.0, "cost": -0.5, "tool_reward": 1.0}, max_turns=9)
    with pytest.warns(UserWarning, match="info.'cost'. is 10+.*; it is left out, give a finite number"):
        steps = [env.step(call("odd", index=i)) for i in range(4)]
        assert env.step("<answer>Loach</answer>").reward == 0.0
    assert [step.reward for step in steps] == [0.0] * 4 and env.reward_parts["cost"] == 2.0


def test_odd_info_of_a_tool_is_ignored_by_rewards():
    infos = [{"titles": 5, "score": "good", "cost": "x"}, {"titles": [["Kes"], None, "Kes"], "reward": None, "done": 1}]

    @tool(inline=True)
    def odd(index: int):
        return ToolResult("ok", info=infos[index])

    env = start(odd, rewards={"task_success": 1.0, "evidence": 1.0, "cost": 1.0, "tool_reward": 1.0})
    assert [env.step(call("odd", index=i)).reward for i in range(2)] == [0.0, 1.0]
    assert env.step("<answer>Loach</answer>").reward == 1.0


def test_a_tool_whose_own_check_raises():
    class Odd(Tool):
        name, inline = "odd", True

        def validate_args(self, args):
            raise KeyError("x")

        def execute(self, args):
            return "never"

    step = start(Odd()).step(call("odd"))
    assert step.observation[0]["content"] == "Error: odd could not check its arguments (KeyError)." and not step.done


def test_batch_step_equals_steps_and_survives_a_hanging_tool():
    @tool(timeout=0.1)
    def slow(query: str):
        """Hang."""
        time.sleep(0.0 if query == "no" else 5.0)
        return "done"

    texts = [call("slow", query="yes"), call("slow", query="no"), "<answer>Loach</answer>", "x", call(query="Kes") * 2]
    base = ToolEnv([slow, search, boom])
    envs = [base.fork() for _ in texts]
    for env in envs:
        env.reset(TASK)
    steps = ToolEnv.batch_step(envs, texts, ["stop"] * len(texts))
    assert all(isinstance(step, StepResult) for step in steps)
    assert steps[0].observation[0]["content"] == "Error: slow gave no reply within 0.1 s." and not steps[0].done
    assert [s.observation[0]["content"] if s.observation else s.reward for s in steps[1:4]] == ["done", 1.0, 0.0]
    assert [m["content"] for m in steps[4].observation] == ["Kes was directed by Ken Loach."] * 2


def test_turns_fit_a_trajectory_and_its_file():
    env = start()
    odd = env.step(call(query="Kes") + "\ud800" + '<tool_call>{"name": "x", "arguments": {"a": "\\ud800"}}</tool_call>')
    trajectory = Trajectory("t1", "g", turns=[odd.info["turn"]])
    line = json.dumps(trajectory.to_dict(), ensure_ascii=False)
    assert Trajectory.from_dict(json.loads(line.encode())) == trajectory


PARTS = [call(query="Kes"), call("boom", query="x"), call("nope"), "<tool_call>", "{'name'", "<answer>", "</answer>"]
PARTS += ["Loach", "<think>", "</think>", "<tool_response>", "```json\n", '"', "\ud800", "</tool_call>"]


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.lists(st.sampled_from(PARTS), max_size=6).map("".join), min_size=6, max_size=6),
    st.sampled_from(["stop", "length"]),
    st.booleans(),
    st.sampled_from(["tag", "tool"]),
)
def test_any_policy_ends_with_a_reason_and_consistent_turns(texts, finish_reason, parallel, final):
    env = start(parallel_calls=parallel, final_answer=final, rewards={"em": 1.0, "step_penalty": -0.1})
    for text in texts:
        step = env.step(text, finish_reason)
        turn = step.info["turn"]
        assert len(turn.results) == len(step.observation) and len(turn.results) in (0, len(turn.calls))
        assert "\n".join(m["content"] for m in step.observation) == turn.observation
        if step.done:
            break
        assert step.observation
    assert step.done and step.info["stop_reason"] is not None and len(env.episode.turns) <= 5
    assert (step.info["answer"] is not None) == (step.info["stop_reason"] is StopReason.ANSWER)
    assert step.info["reward_parts"]["step_penalty"] == len(env.episode.turns)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"final_answer": "text"}, "final_answer='text' is unknown; choose 'tag' or 'tool'"),
        ({"call_format": "xml"}, "choose one of hermes, tag"),
        ({"benchmark": "squad"}, "'squad' is unknown"),
        ({"max_turns": 0}, "max_turns=0 must be above 0"),
        ({"rewards": {"acc": 1}}, "reward part 'acc' is unknown; allowed: agent_r1"),
        ({"tools": [search, search]}, "tool name 'search' is empty or taken"),
    ],
)
def test_bad_options_are_one_sentence(options, words):
    with pytest.raises(ValueError) as error:
        ToolEnv(**options)
    assert words in str(error.value) and "\n" not in str(error.value)


class Guess(Tool):
    """Guess a hidden number; every episode has its own."""

    name, description, stateful, inline = "guess", "Guess the number.", True, True
    parameters = {  # noqa: RUF012
        "type": "object",
        "properties": {"number": {"type": "integer", "minimum": 1, "maximum": 100}},
        "required": ["number"],
    }

    def reset(self, task: Task, rng: random.Random) -> None:
        self.hidden = rng.randint(1, 100)

    def execute(self, args):
        distance = abs(args["number"] - self.hidden)
        reply = "correct" if not distance else "too low" if args["number"] < self.hidden else "too high"
        return {"content": reply, "info": {"done": not distance, "score": float(not distance), "distance": distance}}


class GuessEnv(ToolEnv):
    """Closer guesses earn a little; hitting the number ends the episode and is its success."""

    def __init__(self, **options):
        super().__init__([Guess()], rewards={"task_success": 1.0, "step_penalty": -0.01}, max_turns=10, **options)

    def process_reward(self, turn):
        return 0.1 if any(r["info"].get("distance", 99) <= 5 for r in turn.results) else 0.0


def bisect(env: ToolEnv, seed: int) -> tuple[float, StopReason, int]:
    env.reset(Task(f"n{seed}", "Find the number from 1 to 100."), seed)
    low, high, total = 1, 100, 0.0
    while True:
        middle = (low + high) // 2
        step = env.step(call("guess", number=middle))
        total += step.reward
        if step.done:
            return total, step.info["stop_reason"], len(env.episode.turns)
        low, high = (middle + 1, high) if step.observation[0]["content"] == "too low" else (low, middle - 1)


def test_an_own_environment_with_a_stateful_tool():
    base = GuessEnv()
    runs = [bisect(base.fork(), seed) for seed in range(20)]
    assert all(reason is StopReason.ENVIRONMENT and turns <= 7 for _, reason, turns in runs)
    assert all(total > 1.0 for total, _, _ in runs) and runs == [bisect(base.fork(), seed) for seed in range(20)]
    one, two = base.fork(), base.fork()
    one.reset(Task("a", "?"), 1)
    two.reset(Task("a", "?"), 2)
    assert one.tool("guess").hidden != two.tool("guess").hidden and not hasattr(base.tool("guess"), "hidden")
    assert "at least 1 and at most 100" in one.step(call("guess", number=1000)).observation[0]["content"]


@dataclass
class Room:
    items: list
    lock: object = field(default_factory=threading.Lock)
    places: dict = field(default_factory=dict)


class House(ToolEnv):
    """Keeps the state of an episode in every way a subclass may, beside things that must stay one."""

    visited = []  # noqa: RUF012
    shared = ("corpus",)

    def __init__(self, **options):
        super().__init__([Guess()], **options)
        self.seen, self.inside = [], {"hall": [1], "open": {2}}
        self.pair, self.queue, self.counts = ([1], "x"), deque([[1]]), defaultdict(list)
        self.room = Room([1], places={"key": ["hall"]})
        self.loose = SimpleNamespace(items=[1], lock=threading.Lock())
        self.grid, self.random, self.tensor = np.zeros(3), random.Random(0), torch.zeros(2)
        self.guess, self.me, self.other = self.tools[0], self, ToolEnv([Guess()])
        self.lock, self.model, self.stream = threading.Lock(), torch.nn.Linear(2, 2), (n for n in (1, 2))
        self.holder = [self.model, self.lock, [1]]
        self.index, self.corpus, self.client = BM25([]), [["big"]], SimpleQueue()
        self.hook = self.look

    def look(self):
        self.seen.append("looked")

    def live(self):
        """Change everything an episode may change."""
        for box in (self.visited, self.seen, self.inside["hall"], self.pair[0], self.queue[0], self.counts["a"]):
            box.append(2)
        for box in (self.room.items, self.room.places["key"], self.loose.items, self.holder[2], self.holder):
            box.append(2)
        self.inside["open"].add(3)
        self.grid[0] = self.tensor[0] = 1
        self.random.random()
        self.guess.found = True
        self.other.done = True
        self.hook()

    def state(self):
        boxes = (self.visited, self.seen, self.inside, self.pair, self.queue, self.counts, self.room.items)
        more = (self.loose.items, self.room.places, self.holder[2], len(self.holder), self.grid, self.tensor)
        return repr((*boxes, *more, self.random.getstate(), vars(self.guess), getattr(self.other, "done", None)))


def test_what_one_episode_does_no_other_sees():
    base, fresh = House(), House()
    one, two = base.fork(), base.fork()
    one.live()
    one.fork().live()
    assert base.state() == two.state() == base.fork().state() == fresh.state() != one.state()
    assert House.visited == [] and (two.me, two.guess) == (two, two.tools[0]) and two.hook.__self__ is two


def test_what_cannot_or_must_not_be_copied_stays_shared():
    base = House()
    twin = base.fork().fork()
    for name in ("lock", "model", "stream", "index", "corpus", "client", "rewards", "format"):
        assert getattr(twin, name) is getattr(base, name), name
    assert twin.holder[:2] == base.holder[:2] and twin.room.lock is base.room.lock
    assert twin.loose.lock is base.loose.lock and twin.index.search("x", 1) == []


def test_a_stateful_tool_with_a_lock_forks():
    class Safe(Guess):
        tried = []  # noqa: RUF012

        def __init__(self):
            self.lock, self.log = threading.Lock(), []

        def execute(self, args):
            with self.lock:
                self.log.append(args)
                self.tried.append(args)
            return str(len(self.log) + len(self.tried))

    env = ToolEnv([Safe()])
    for _ in range(2):
        twin = env.fork()
        twin.reset(TASK)
        assert twin.step(call("guess", number=1)).observation[0]["content"] == "2"
