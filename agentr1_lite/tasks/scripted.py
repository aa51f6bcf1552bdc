"""Scripted players of chain questions, and logs of what they did.

A player knows the chain of facts behind a question (`task.info["chain"]`) but
has to find each fact by searching, so its episodes are what an expert, or a
careless annotator, would have left behind. `record` lets one play in an
environment; `encode_log` turns a log into a Trajectory for a given tokenizer.
"""

from __future__ import annotations

import math
import random
from collections.abc import Generator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentr1_lite.chat import THOUGHTS, ChatFormat, check_message, clean_message
from agentr1_lite.env import FINAL_TOOL, ToolEnv
from agentr1_lite.jsonl import DataError, read_numbered
from agentr1_lite.loading import data_root
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
    "careful": Habits(give_up=0.7),
    "annotator": Habits(stop_early={3: 0.75}, give_up=1.0),
    "novice": Habits(stop_early={2: 0.2, 3: 0.9}, give_up=1.0),
    "hasty": Habits(guess=0.05, stop_early={2: 0.9, 3: 0.9}, give_up=0.9),
    "guesser": Habits(guess=0.8, give_up=1.0),
    "doubter": Habits(give_up=0.5, repeat=0.3),
}


def say_search(query: str, call_format: str = "hermes") -> str:
    return render_tool_call(ToolCall("search", {"query": query.strip()}), call_format)


def say_answer(answer: str, env: ToolEnv | None = None) -> str:
    """As ``env`` reads an answer; spaces inside the tags keep a name's first word the same token as in running text."""
    if env is not None and env.final_answer == "tool":
        return render_tool_call(ToolCall(FINAL_TOOL, {"answer": answer}), env.call_format)
    return f"<answer> {answer} </answer>"


def say_verdict(first: str, second: str, env: ToolEnv | None = None) -> str:
    """Yes or no behind a thought that names both: side by side a small model can tell whether they are equal."""
    return f"<think> {first} and {second} </think>\n" + say_answer("yes" if first == second else "no", env)


def play(task: Task, habits: Habits, rng: random.Random, env: ToolEnv | None = None) -> Generator[str, str, None]:
    """Yield the texts of the turns, written as ``env`` reads them; the environment's reply is sent in."""
    call_format = "hermes" if env is None else env.call_format
    chains = task.info["chain"]
    steps = [tuple(step) for chain in chains for step in chain]
    yes_no = len(chains) > 1
    if rng.random() < habits.guess:
        yield say_answer("yes" if yes_no else steps[0][1], env)
        return
    for index, (noun, subject, found) in enumerate(steps):
        searches = 1 + (rng.random() < habits.repeat)
        while searches:
            reply = yield say_search(f"{noun} of {subject}", call_format)
            searches -= 1
            if f"{subject} is" not in reply:
                if rng.random() < habits.give_up:
                    yield say_answer("unknown", env)
                    return
                searches = max(searches, 1)
        last = index == len(steps) - 1
        if not last and rng.random() < habits.stop_early.get(len(steps), 0.0):
            yield say_answer(rng.choice(["yes", "no"]) if yes_no else found, env)
            return
    if yes_no:
        yield say_verdict(steps[0][2], steps[1][2], env)
    else:
        yield say_answer(steps[-1][2], env)


def record(env: ToolEnv, task: Task, player: str, seed: int = 0) -> dict[str, Any]:
    """Play one episode and return its log: messages as text, reward, stop reason, and who played."""
    rng = random.Random(f"{seed}/{player}/{task.id}")
    env = env.fork()
    messages = list(env.reset(task, seed))
    turns = play(task, PLAYERS[player], rng, env)
    text = next(turns)
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
        "reward": env.total_reward,
        "reward_parts": result.info["reward_parts"],
        "answer": result.info["answer"],
        "stop_reason": result.info["stop_reason"].value,
    }


def find_data(name: str | Path) -> Path:
    """A file as it is named, else the shipped one: ``data/offline_logs.json`` is found from any folder."""
    path = Path(name)
    shipped = data_root() / path.name
    if path.exists():
        return path
    if str(path.parent) in (".", "data") and shipped.exists():
        return shipped
    raise DataError(f"{name}: no such file, here or in {data_root()}; remake it with `python -m agentr1_lite data`")


class _Log(dict):
    """A message log that knows the file and line it was read from."""

    where = ""


def load_logs(path: str | Path) -> list[Trajectory | dict[str, Any]]:
    """Read trajectories or message logs from JSON Lines or a JSON array; the first broken row is a `DataError`."""
    path = find_data(path)
    rows, problems = read_numbered(path)
    if problems:
        raise DataError(f"{problems[0]}; mend or remove the row")
    if not rows:
        raise DataError(f"{path}: holds no trajectory to learn from; give at least one")
    return [_episode(row, f"{path}, line {line}") for line, row in rows]


def _episode(row: dict[str, Any], where: str) -> Trajectory | dict[str, Any]:
    try:
        if "segments" not in row:
            check_log(row)
            log = _Log(row)
            log.where = where
            return log
        trajectory = Trajectory.from_dict(row)
        trajectory.check()
        return trajectory
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        said = f"has no {error}" if isinstance(error, KeyError) else error
        raise DataError(f"{where}: {said}; mend or remove the row") from error


def check_log(log: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` or ``KeyError`` where a message log is not what `record` writes."""
    task, messages, reward = log["task"], log["messages"], log["reward"]
    if not isinstance(task, Mapping) or not isinstance(task["question"], str):
        raise ValueError(f"task is {task!r:.60}; expected an object with id, question and golds")
    Task.from_dict(task)
    if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
        raise ValueError(f"reward is {reward!r:.60}; expected a number")
    for number, message in enumerate(messages if isinstance(messages, list) else [messages]):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or not _says(message):
            raise ValueError(f"message {number} is {message!r:.60}; expected an object with role and content as text")
        check_message(number, message)
    tools = log.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise ValueError(f"tools is {tools!r:.60}; expected a list of schemas")
    roles = [message["role"] for message in messages]
    if "assistant" not in roles[1:] or roles[0] == "assistant":
        raise ValueError("messages hold no assistant turn behind a prompt; there is nothing to learn from")
    if any(pair == ("assistant", "assistant") for pair in zip(roles, roles[1:], strict=False)):
        raise ValueError("messages hold two assistant turns in a row; a reply belongs between them")
    if log["policy"] != str(log["policy"]):
        raise ValueError(f"policy is {log['policy']!r:.60}; expected a name")
    StopReason(log.get("stop_reason", "answer"))


def _says(message: Mapping[str, Any]) -> bool:
    """Whether a message has a content, or what an assistant may say instead of one."""
    if message["role"] == "assistant" and any(message.get(k) for k in ("tool_calls", "function_call", *THOUGHTS)):
        return True
    return isinstance(message.get("content"), str | list)


def encode_log(log: Mapping[str, Any], chat: ChatFormat, call_format: str | None = None) -> Trajectory:
    """Encode a message log once, as the policy would have sampled it; log-probs are unknown and set to 0.

    Calls and thoughts in fields of their own are written as the model's template
    writes them. ``call_format`` is the environment's: a call it would not read is
    written in it. `DataError` names the file and line of what cannot be written.
    """
    try:
        check_log(log)
        return _encode_log(log, chat, call_format)
    except ValueError as error:
        raise DataError(f"{getattr(log, 'where', 'a message log')}: {error}; mend or remove the row") from error


def _in_format(
    message: dict[str, Any], chat: ChatFormat, call_format: str | None
) -> tuple[dict[str, Any], list[tuple[str, dict[str, Any]]]]:
    """An assistant message whose calls the environment reads back, and these calls."""
    text = message["content"]
    calls = [
        (call["function"]["name"], call["function"].get("arguments", {})) for call in message.get("tool_calls", ())
    ]
    if calls:
        with suppress(ValueError):
            if call_format is None or _calls(chat.turn(message)[0], call_format) == calls:
                return message, calls
        written = [render_tool_call(ToolCall(*call), call_format) for call in calls]
        message = {key: value for key, value in message.items() if key != "tool_calls"}
        return {**message, "content": "\n".join([text] * bool(text) + written)}, calls
    calls = _calls(text, call_format or "hermes")
    if calls or call_format in (None, "hermes"):
        return message, calls
    found = [call for call in parse_tool_calls(text, "hermes", lenient=False) if isinstance(call, ToolCall)]
    for call in found:
        text = text.replace(call.raw, render_tool_call(call, call_format), 1)
    return {**message, "content": text}, [(call.name, call.arguments) for call in found]


def _calls(text: str, call_format: str) -> list[tuple[str, dict[str, Any]]]:
    return [(call.name, call.arguments) for call in parse_tool_calls(text, call_format) if isinstance(call, ToolCall)]


def _encode_log(log: Mapping[str, Any], chat: ChatFormat, call_format: str | None) -> Trajectory:
    task = Task.from_dict(log["task"])
    messages = [clean_message(number, message) for number, message in enumerate(log["messages"])]
    first = next(i for i, m in enumerate(messages) if m["role"] == "assistant")
    segment = Segment()
    segment.extend(chat.prompt_ids(messages[:first], log.get("tools")))
    trajectory = Trajectory(
        task.id, log.get("group_id", task.id), [segment], question=task.question, golds=list(task.golds)
    )
    anchor, index = task.question, first
    while index < len(messages):
        message, calls = _in_format(messages[index], chat, call_format)
        try:
            said, ids = chat.turn(message)
        except ValueError as error:
            raise ValueError(f"message {index}: {error}") from error
        text = chat.prefill + said
        start, end = segment.extend(ids, [0.0] * len(ids))
        answered = parse_answer(text) is not None
        kind = TurnKind.ANSWER if answered else TurnKind.TOOL_CALL if calls else TurnKind.TEXT
        told = [{"name": name, "arguments": arguments} for name, arguments in calls]
        turn = Turn(0, start, end, kind, text, told, anchor=anchor)
        trajectory.turns.append(turn)
        following = next(
            (i for i in range(index + 1, len(messages)) if messages[i]["role"] == "assistant"), len(messages)
        )
        turn.observation = anchor = "\n".join(m["content"] for m in messages[index + 1 : following])
        turn.observation_start = turn.observation_end = end
        if following < len(messages):  # a reply to the last turn stays text: nothing was said after it
            reply = chat.observation_ids(messages[index + 1 : following], ended_by=ids[-1])
            base, _ = segment.extend(reply.ids)
            turn.observation_start, turn.observation_end = base + reply.start, base + reply.end
        index = following
    trajectory.answer, trajectory.reward = log.get("answer"), float(log["reward"])
    trajectory.reward_parts = dict(log.get("reward_parts", {}))
    trajectory.stop_reason = StopReason(log.get("stop_reason", "answer"))
    trajectory.policy, trajectory.seed = log["policy"], int(log.get("seed", 0))
    return trajectory
