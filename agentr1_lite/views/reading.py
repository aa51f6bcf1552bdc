"""What other programs wrote as a trajectory to look at: files, conversations, and single tokens as text."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from agentr1_lite.foreign import encode_foreign
from agentr1_lite.jsonl import read_numbered
from agentr1_lite.mdp import Segment, StopReason, Trajectory, Turn, TurnKind


def splitter(tokenizer: Any) -> Any:
    """The tokenizer itself, or that of a policy."""
    found = getattr(tokenizer, "tokenizer", tokenizer)
    if found is not None and not hasattr(found, "convert_ids_to_tokens"):
        raise ValueError(f"tokenizer is {found!r:.60}; give a tokenizer or a policy that has one")
    return found


def piece(tokenizer: Any, id: int) -> tuple[str, bool]:
    """The text of one token, and whether it is a control token; an id outside the vocabulary reads ``⟨id⟩``."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).get(id)
    if added is not None and added.content.strip():
        return added.content, True
    try:
        token = tokenizer.convert_ids_to_tokens(id)
        text = tokenizer.decode([id], skip_special_tokens=False, clean_up_tokenization_spaces=False)
    except (IndexError, KeyError, OverflowError, TypeError, ValueError):
        token = None
    if token is None:
        return f"⟨{id}⟩", False
    if token.startswith("▁") and not text.startswith(" "):
        text = " " + text  # SentencePiece drops the first space of a text
    if "�" in text:
        table = _bytes()
        raw = [table[c] for c in token] if all(c in table for c in token) else []
        if found := re.fullmatch(r"<0x([0-9A-F]{2})>", token):
            raw = [int(found[1], 16)]
        text = "⟨" + " ".join(f"{byte:02X}" for byte in raw) + "⟩" if raw else text
    return text, False


BYTES = re.compile("⟨[0-9A-F]{2}( [0-9A-F]{2})*⟩")  # how `piece` writes them


@cache
def _bytes() -> dict[str, int]:
    """The letter that byte-level tokenizers write for each byte → the byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + n): byte for n, byte in enumerate(others)}


def is_finite(x: Any) -> bool:
    return isinstance(x, (int, float)) and abs(x) <= sys.float_info.max


def as_trajectory(source: Any, index: int = 0, tokenizer: Any = None) -> Trajectory:
    """A trajectory, row ``index`` of a JSONL file of trajectories or conversations, or a list of messages."""
    if isinstance(source, Trajectory):
        return source
    if isinstance(source, (str, Path)):
        rows, problems = read_numbered(source)
        if not -len(rows) <= index < len(rows):
            more = f"; the first of {len(problems)} problems: {problems[0]}" if problems else ""
            raise ValueError(f"{source}: there is no row {index} among {len(rows)} rows{more}")
        line, row = rows[index]
        try:
            return as_trajectory(row, 0, tokenizer)
        except ValueError as error:
            raise ValueError(f"{source}, line {line}: {error}") from error
    if isinstance(source, Mapping) and "segments" in source:
        try:
            return Trajectory.from_dict(source)
        except ValueError as error:
            raise ValueError(f"not a trajectory ({error}); write it with save_jsonl") from error
    return from_messages(source, tokenizer)


def from_messages(messages: Any, tokenizer: Any = None) -> Trajectory:
    """A conversation (TRL, verifiers, OpenAI) as a trajectory to look at; nothing in it was measured.

    Args:
        messages: a list of ``{"role", "content", "tool_calls"?, "reasoning_content"?}``, or a mapping that has it as
            "messages" or as "prompt" and "completion"; a "reward" beside them is kept.
        tokenizer: splits the texts; without it words stand for tokens.
    """
    messages, reward = _conversation(messages)
    tape = _Tape(splitter(tokenizer))
    made = Trajectory("conversation", "conversation", [tape.segment], reward=reward, info={"pieces": [tape.pieces]})
    for number, message in enumerate(messages):
        where = f"message {number}"
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(f"{where} is {type(message).__name__} without a role; give role and content")
        role, text = message["role"], _content(message.get("content"), where)
        if role == "assistant":
            text, calls = _spoken(message, text, where)
            broken = bool(calls) and all("error" in call for call in calls)
            called = TurnKind.INVALID if broken else TurnKind.TOOL_CALL if "<tool_call>" in text else TurnKind.TEXT
            kind = TurnKind.ANSWER if "<answer>" in text else called
            start, end = tape.add(text, acted=True)
            turn = Turn(0, start, end, kind, text, calls, observation_start=end, observation_end=end)
            made.turns.append(turn)
        elif made.turns:
            turn = made.turns[-1]
            tape.add(f"\n{role}:\n")
            start, turn.observation_end = tape.add(text)
            turn.observation_start = turn.observation_start if turn.observation else start
            turn.observation += text
        else:
            made.question = text if role == "user" else made.question
            tape.add(f"{role}:\n{text}\n")
    if made.turns and made.turns[-1].kind is not TurnKind.TOOL_CALL:
        answered = made.turns[-1].kind is TurnKind.ANSWER
        made.stop_reason = StopReason.ANSWER if answered else StopReason.NO_CALL
    return made


class _Tape:
    """Texts as the tokens of one segment, one after the other."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.segment = tokenizer, Segment()
        self.pieces: list[str] = []
        self.words: dict[str, int] = {}

    def add(self, text: str, acted: bool = False) -> tuple[int, int]:
        """The span in which the text now stands."""
        if self.tokenizer is not None:
            ids = encode_foreign(self.tokenizer, text)
            self.pieces += [piece(self.tokenizer, i)[0] for i in ids]
        else:
            found = re.findall(r"\s*(?:</?\w+>|[^\s<]+|<)|\s+$", text)
            ids = [self.words.setdefault(word, len(self.words)) for word in found]
            self.pieces += found
        return self.segment.extend(ids, [0.0] * len(ids) if acted else None)


def _conversation(given: Any) -> tuple[Sequence[Any], float]:
    """The messages and the reward of a row, or the list itself."""
    got = f"{len(given)} messages" if isinstance(given, (list, tuple)) else type(given).__name__
    messages, reward = given, 0.0
    if isinstance(given, Mapping):
        got = f"a row with {', '.join(map(str, given)) or 'nothing'}"
        reward = 0.0 if given.get("reward") is None else given["reward"]
        sides = (("prompt", "user"), ("completion", "assistant"))
        messages = given.get("messages") or [message for side in sides for message in _side(given, *side)]
    if not isinstance(messages, (list, tuple)) or not messages:
        raise ValueError(f"from_messages got {got}; give a list of messages, or a row that has it as messages")
    if not is_finite(reward):
        raise ValueError(f"the conversation's reward is {reward!r:.60}; give a finite number")
    return messages, float(reward)


def _side(row: Mapping[str, Any], name: str, role: str) -> list[Any]:
    """The prompt or the completion of a row as messages."""
    given = row.get(name)
    if given is None or isinstance(given, (list, tuple)):
        return list(given or ())
    if not isinstance(given, (str, Mapping)):
        raise ValueError(f"{name} is {type(given).__name__}; give a text or a list of messages")
    return [{"role": role, "content": given} if isinstance(given, str) else given]


def _content(content: Any, where: str) -> str:
    """A message's content as one text; what is no text in it (an image) by its type."""
    parts = content if isinstance(content, list) else [] if content is None else [content]
    out = []
    for i, part in enumerate(parts):
        if isinstance(part, Mapping):
            part = part.get("text") or f"[{part.get('type', 'part')}]"
        elif isinstance(part, (int, float)):
            part = str(part)
        if not isinstance(part, str):
            raise ValueError(f"{where}: part {i} of content is {type(part).__name__}, not a text; give it as a string")
        out.append(part)
    return "".join(out)


def _spoken(message: Mapping[str, Any], text: str, where: str) -> tuple[str, list[dict[str, Any]]]:
    """An assistant's message as the policy would have written it, and its calls."""
    thought = message.get("reasoning_content")
    texts = [f"<think>{thought}</think>"] * bool(thought) + [text] * bool(text)
    given = _loads(message.get("tool_calls") or [])
    if not isinstance(given, (list, tuple, Mapping, str)):
        raise ValueError(f"{where}: tool_calls is {type(given).__name__}; give a list of calls")
    calls = []
    for i, call in enumerate(given if isinstance(given, (list, tuple)) else [given]):
        calls.append(_call(call, f"{where}: tool_calls[{i}]"))
        try:
            written = calls[-1].get("raw") or json.dumps(calls[-1], ensure_ascii=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"{where}: the arguments of tool_calls[{i}] are not JSON ({error})") from error
        texts.append(f"<tool_call>\n{written}\n</tool_call>")
    return "\n".join(texts), calls


def _call(call: Any, where: str) -> dict[str, Any]:
    """Name and arguments of a tool call, an object or (verifiers) its JSON; the error of one that was cut off."""
    call = _loads(call)
    outer = call if isinstance(call, Mapping) else {"function": call}
    made = _loads(outer.get("function", outer))
    if isinstance(made, str) and not re.fullmatch(r"[\w./:-]+", made):
        return {"error": "malformed_json", "raw": made}
    if isinstance(made, str):
        made = {"name": made, "arguments": outer.get("arguments")}
    if not isinstance(made, Mapping):
        raise ValueError(f"{where} is {made!r:.60}; give an object with name and arguments")
    arguments = _loads({} if made.get("arguments") is None else made["arguments"])
    return {
        "name": str(made.get("name", "")),
        "arguments": {"raw": arguments} if isinstance(arguments, str) else arguments,
    }


def _loads(text: Any) -> Any:
    """What a JSON string holds; anything else, and what cannot be read, as it is."""
    try:
        return json.loads(text) if isinstance(text, str) else text
    except (ValueError, RecursionError):
        return text
