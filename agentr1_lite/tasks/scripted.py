"""Scripted players of chain questions, and logs of what they did.

A player knows the chain of facts behind a question (`task.info["chain"]`) but
has to find each fact by searching, so its episodes are what an expert, or a
careless annotator, would have left behind. `record` lets one play in an
environment; `encode_log` turns a log into a Trajectory for a given tokenizer.
"""

from __future__ import annotations

import random
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentr1_lite.chat import ChatFormat
from agentr1_lite.env import ToolEnv
from agentr1_lite.jsonl import DataError, read_rows
from agentr1_lite.mdp import Segment, StopReason, Task, Trajectory, Turn, TurnKind
from agentr1_lite.toolcalls import ToolCall, parse_answer, parse_tool_calls, render_tool_call


@dataclass(frozen=True)
class Habits:
    """How often a player cuts corners; all zero is the expert.

    Attributes:
        guess: answers from the question alone.
        stop_early: answers after an intermediate fact, by number of hops.
        give_up: answers "unknown" after a search that found nothing.
        repeat: searches the same thing twice.
    """

    guess: float = 0.0
    stop_early: Mapping[int, float] = field(default_factory=dict)
    give_up: float = 0.0
    repeat: float = 0.0


PLAYERS: dict[str, Habits] = {
    "expert": Habits(),
    "annotator": Habits(stop_early={3: 0.75}, give_up=1.0),
    "hasty": Habits(guess=0.1, stop_early={2: 0.7, 3: 0.7}, give_up=0.5),
    "guesser": Habits(guess=0.8, give_up=1.0),
    "doubter": Habits(give_up=0.7, repeat=0.4),
}


def say_search(query: str, call_format: str = "hermes") -> str:
    return render_tool_call(ToolCall("search", {"query": query}), call_format)


def say_answer(answer: str) -> str:
    """Spaces inside the tags keep a name's first word the same token as in running text."""
    return f"<answer> {answer} </answer>"


def play(task: Task, habits: Habits, rng: random.Random) -> Generator[str, str, None]:
    """Yield the texts of the turns; the environment's reply is sent in."""
    chains = task.info["chain"]
    steps = [tuple(step) for chain in chains for step in chain]
    yes_no = len(chains) > 1
    if rng.random() < habits.guess:
        yield say_answer("yes" if yes_no else steps[0][1])
        return
    for index, (noun, subject, found) in enumerate(steps):
        searches = 1 + (rng.random() < habits.repeat)
        while searches:
            reply = yield say_search(f"{noun} of {subject}")
            searches -= 1
            if f"{subject} is" not in reply:
                if rng.random() < habits.give_up:
                    yield say_answer("unknown")
                    return
                searches = max(searches, 1)
        last = index == len(steps) - 1
        if not last and rng.random() < habits.stop_early.get(len(steps), 0.0):
            yield say_answer(rng.choice(["yes", "no"]) if yes_no else found)
            return
    answer = ("yes" if steps[0][2] == steps[1][2] else "no") if yes_no else steps[-1][2]
    yield say_answer(answer)


def record(env: ToolEnv, task: Task, player: str, seed: int = 0) -> dict[str, Any]:
    """Play one episode and return its log: messages as text, reward, stop reason, and who played."""
    rng = random.Random(f"{seed}/{player}/{task.id}")
    env = env.fork()
    messages = list(env.reset(task, seed))
    turns = play(task, PLAYERS[player], rng)
    text, result = next(turns), None
    while True:
        messages.append({"role": "assistant", "content": text})
        result = env.step(text)
        messages += result.observation
        if result.done:
            break
        text = turns.send("\n".join(m["content"] for m in result.observation))
    return {
        "policy": player,
        "seed": seed,
        "task": task.to_dict(),
        "tools": env.tool_schemas,
        "messages": messages,
        "reward": result.reward,
        "reward_parts": result.info["reward_parts"],
        "answer": result.info["answer"],
        "stop_reason": result.info["stop_reason"].value,
    }


def load_logs(path: str | Path) -> list[dict[str, Any]]:
    """Read message logs from JSON Lines or a JSON array; the first broken row is named in a `DataError`."""
    rows, problems = read_rows(path)
    if problems:
        raise DataError(f"{problems[0]}; mend or remove the row")
    for number, row in enumerate(rows, 1):
        missing = [key for key in ("policy", "task", "messages", "reward") if key not in row]
        if missing:
            raise DataError(
                f"{path}: row {number} has no {missing[0]!r}; a log needs policy, task, messages and reward"
            )
        if not any(m.get("role") == "assistant" for m in row["messages"]):
            raise DataError(f"{path}: row {number} has no assistant turn; there is nothing to learn from it")
    return rows


def encode_log(log: Mapping[str, Any], chat: ChatFormat) -> Trajectory:
    """Encode a message log once, as the policy would have sampled it; log-probs are unknown and set to 0."""
    task = Task.from_dict(log["task"])
    messages = [dict(m) for m in log["messages"]]
    first = next(i for i, m in enumerate(messages) if m["role"] == "assistant")
    segment = Segment()
    segment.extend(chat.prompt_ids(messages[:first], log.get("tools")))
    trajectory = Trajectory(
        task.id, log.get("group_id", task.id), [segment], question=task.question, golds=list(task.golds)
    )
    anchor, index = task.question, first
    while index < len(messages):
        text = messages[index]["content"]
        ids = chat.turn_ids(text)
        start, end = segment.extend(ids, [0.0] * len(ids))
        calls = [c for c in parse_tool_calls(text) if isinstance(c, ToolCall)]
        answered = parse_answer(text) is not None
        kind = TurnKind.ANSWER if answered else TurnKind.TOOL_CALL if calls else TurnKind.TEXT
        turn = Turn(
            0, start, end, kind, text, [{"name": c.name, "arguments": c.arguments} for c in calls], anchor=anchor
        )
        trajectory.turns.append(turn)
        replies = index + 1
        while replies < len(messages) and messages[replies]["role"] == "tool":
            replies += 1
        if replies < len(messages):
            reply = chat.observation_ids(messages[index + 1 : replies], ended_by=ids[-1])
            base, _ = segment.extend(reply.ids)
            turn.observation_start, turn.observation_end = base + reply.start, base + reply.end
            turn.observation = anchor = "\n".join(m["content"] for m in messages[index + 1 : replies])
        index = max(replies, index + 1)
    trajectory.answer, trajectory.reward = log.get("answer"), float(log["reward"])
    trajectory.reward_parts = dict(log.get("reward_parts", {}))
    trajectory.stop_reason = StopReason(log.get("stop_reason", "answer"))
    trajectory.policy, trajectory.seed = log["policy"], int(log.get("seed", 0))
    return trajectory
