"""Read tool calls and answers out of a policy's text; errors are values, nothing raises.

A turn is read once, from left to right, and these choices hold for every format:

- **Thoughts**: what stands in a closed ``<think>…</think>`` is neither call nor
  answer. A template may open the block itself, so text before a first, unopened
  ``</think>`` is thought too. An unclosed ``<think>`` hides nothing.
- **Forged replies**: a ``<tool_response>`` the model wrote itself ends the
  reading (flag ``wrote_tool_response``): what follows rests on invented facts.
- **Answers**: the last closed ``<answer>`` pair counts, the inner one of nested
  pairs. Tags inside a call's JSON strings are text.
- **Answer and call in one turn**: both are returned; the environment lets the
  answer end the episode.
- **Cut by length**: a call still open at the end of a cut text is an error with
  reason ``truncated``, even if its JSON happens to be whole. Calls closed before stay calls.

Flags of a call: ``trailing_text``, ``unclosed``, ``string_arguments`` (JSON in a
string), and where ``lenient``: ``repaired`` (Python literals, trailing commas,
raw newlines), ``no_tags`` (a fenced or bare object), ``renamed_key``
(``parameters``), ``duplicate_key`` (the last one counts). With
``lenient=False`` the last four are errors or, without tags, no call at all.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from agentr1_lite.loose_json import BadValue, decode, plain
from agentr1_lite.schema import shown
from agentr1_lite.tools import Tool, ToolCall, ToolCallError, clean_text

CUT_REASONS = frozenset({"length", "max_tokens", "abort", "interrupted"})
DEFAULT_TOOLS: Mapping[str, str] = {"search": "query"}
_SHARED_TAGS = ("<think>", "</think>", "<answer>", "</answer>", "<tool_response>")
_END_MARKERS = ("<|im_end|>", "<|endoftext|>", "</s>")
_FENCE = re.compile(r"```(?:json|tool_call|tool|python)?[ \t]*\n(.*?)(```|\Z)", re.DOTALL)


@dataclass(frozen=True)
class TurnText:
    """What one turn of the policy says; ``answer`` is None where no closed pair stands."""

    calls: list[ToolCall | ToolCallError]
    answer: str | None
    flags: tuple[str, ...]


class CallFormat(ABC):
    """How calls are written. ``tools`` maps a tool's name to the parameter that plain text fills."""

    in_template = False  # True: the chat template shows the tools' schemas to the policy

    @abstractmethod
    def open_tags(self, tools: Mapping[str, str]) -> tuple[str, ...]:
        """The tags that start a call."""

    @abstractmethod
    def read(self, turn: _Reading, tag: str, start: int) -> tuple[ToolCall | ToolCallError, int]:
        """Read the call whose opening ``tag`` ends at ``start``; return it and where to read on."""

    @abstractmethod
    def render(self, call: ToolCall) -> str:
        """The text of a call; ``ValueError`` where the format cannot hold it."""

    @abstractmethod
    def instruction(self, tools: Sequence[Tool]) -> str:
        """A sentence or list for the system prompt that says how to call."""

    def stop_strings(self, tools: Mapping[str, str], parallel: bool) -> tuple[str, ...]:
        """Strings after which sampling stops; engines leave them in the text."""
        return ("<tool_response>",)

    def untagged(self, turn: _Reading, text: str) -> list[ToolCall | ToolCallError]:
        """Calls without tags, looked for in lenient mode where a turn holds nothing else."""
        return []


FORMATS: dict[str, CallFormat] = {}


def call_format(name: str) -> Callable[[type[CallFormat]], type[CallFormat]]:
    """Register a format under ``name``."""

    def register(cls: type[CallFormat]) -> type[CallFormat]:
        FORMATS[name] = cls()
        return cls

    return register


def get_format(name: str) -> CallFormat:
    if name not in FORMATS:
        raise ValueError(f"call format {name!r} is unknown; choose one of {', '.join(sorted(FORMATS))}")
    return FORMATS[name]


@dataclass(frozen=True)
class _Reading:
    """One turn being read, with how it is read."""

    text: str
    pattern: re.Pattern[str]
    cut: bool
    lenient: bool
    tools: Mapping[str, str]

    def is_cut(self, following: re.Match[str] | None) -> bool:
        """An open call was cut by length if the text ends in it; a later tag shows that the model moved on."""
        return self.cut and following is None


@lru_cache(maxsize=64)
def _tag_pattern(tags: tuple[str, ...]) -> re.Pattern[str]:
    closing = tuple(tag.replace("<", "</", 1) for tag in tags)
    return re.compile("|".join(map(re.escape, (*_SHARED_TAGS, *tags, *closing))))


def read_turn(
    text: str,
    format: str = "hermes",
    finish_reason: str = "stop",
    lenient: bool = True,
    tools: Mapping[str, str] | None = None,
) -> TurnText:
    """Read one turn's calls and answer in linear time."""
    reader, tools = get_format(format), DEFAULT_TOOLS if tools is None else tools
    opening = reader.open_tags(tools)
    turn = _Reading(text, _tag_pattern(opening), finish_reason in CUT_REASONS, lenient, tools)
    calls: list[ToolCall | ToolCallError] = []
    flags: list[str] = []
    answer, answer_start = None, None
    position, thought, end = 0, False, len(text)
    last_close = text.rfind("</think>")
    while match := turn.pattern.search(text, position):
        tag, position = match.group(), match.end()
        if tag == "<think>" and position <= last_close:
            position, thought = text.index("</think>", position) + len("</think>"), True
        elif tag == "</think>" and not thought:
            calls, answer, answer_start, thought = [], None, None, True
        elif tag == "<tool_response>":
            flags.append("wrote_tool_response")
            end = match.start()
            break
        elif tag == "<answer>":
            answer_start = position
        elif tag == "</answer>" and answer_start is not None:
            answer, answer_start = text[answer_start : match.start()].strip(), None
        elif tag in opening:
            call, position = reader.read(turn, tag, position)
            calls.append(call)
    if answer_start is not None:
        flags.append("unclosed_answer")
    if lenient and not calls and answer is None:
        calls = reader.untagged(turn, text[last_close + len("</think>") if last_close >= 0 else 0 : end])
    return TurnText(calls, answer, tuple(flags))


def parse_tool_calls(
    text: str,
    format: str = "hermes",
    finish_reason: str = "stop",
    lenient: bool = True,
    tools: Mapping[str, str] | None = None,
) -> list[ToolCall | ToolCallError]:
    """The calls of a turn in order, broken ones as :class:`ToolCallError`; never raises on any text."""
    return read_turn(text, format, finish_reason, lenient, tools).calls


def parse_answer(text: str, format: str = "hermes") -> str | None:
    """The last closed ``<answer>`` pair of a policy's turn, stripped; None where there is none."""
    return read_turn(text, format).answer


def render_tool_call(call: ToolCall, format: str = "hermes") -> str:
    """The text of a call, such that parsing it gives the call back."""
    return get_format(format).render(call)


def _call_from(value: Any, lenient: bool, flags: tuple[str, ...], raw: str) -> ToolCall | ToolCallError:
    """A decoded value as a call, or the error that says what is wrong with it."""
    found: set[str] = set()
    try:
        value = plain(value, found)
        if not isinstance(value, dict):
            raise BadValue("not_an_object", f"not one JSON object but {shown(value)}")
        name, key = value.get("name"), "arguments"
        if not isinstance(name, str) or not name.strip():
            raise BadValue("no_name", 'without a "name"')
        if key not in value and lenient and "parameters" in value:
            key = "parameters"
            found.add("renamed_key")
        arguments = value.get(key)
        if isinstance(arguments, str):
            arguments, end, repaired = decode(value[key], lenient)
            if value[key][end:].strip():
                raise BadValue("bad_arguments", 'not usable: text follows the object in "arguments"')
            arguments = plain(arguments, found)
            found |= {"string_arguments", "repaired"} if repaired else {"string_arguments"}
        if not isinstance(arguments, dict):
            state = f"{shown(arguments)} instead of an object" if key in value else "missing"
            raise BadValue("bad_arguments", f'not usable: "arguments" is {state}')
        if "duplicate_key" in found and not lenient:
            raise BadValue("duplicate_key", "not usable: it holds one key twice")
    except BadValue as error:
        return _broken(error, raw)
    return ToolCall(name, arguments, (*flags, *sorted(found - set(flags))), raw)


def _broken(error: BadValue, raw: str) -> ToolCallError:
    form = '{"name": ..., "arguments": {...}}'
    return ToolCallError(error.reason, raw, f"Error: the tool call is {error}. Write one JSON object {form}.")


def strip_end(text: str) -> str:
    """``text`` without the white space and end-of-turn strings it ends in."""
    end, before = len(text), -1
    while end != before:
        before = end
        while end and text[end - 1].isspace():
            end -= 1
        end -= next((len(mark) for mark in _END_MARKERS if text.endswith(mark, 0, end)), 0)
    return text[:end]


def _truncated(raw: str) -> ToolCallError:
    return ToolCallError("truncated", raw, "Error: the tool call was cut by the length limit and not run.")


@call_format("hermes")
class HermesFormat(CallFormat):
    """``<tool_call>{"name": …, "arguments": {…}}</tool_call>``, as Qwen2.5 and Hermes write it."""

    in_template = True
    _tags = re.compile("</?tool_call>")
    # a backslash outside a string ends the look-ahead, which keeps it linear over many open tags
    _body = re.compile(r'(?:[^"<\\]+|"[^"\\]*(?:\\.[^"\\]*)*"|<(?!/?tool_call>))*', re.DOTALL)

    def open_tags(self, tools: Mapping[str, str]) -> tuple[str, ...]:
        return ("<tool_call>",)

    def read(self, turn: _Reading, tag: str, start: int) -> tuple[ToolCall | ToolCallError, int]:
        text, begin, error = turn.text, start - len(tag), None
        near = self._tags.search(text, start)
        near_start = near.start() if near else len(text)
        try:
            # a tag may stand in a string: the body ends at the first one outside
            body = text[start : max(near_start, self._body.match(text, start).end())]
            value, length, repaired = decode(body, turn.lenient, near_start - start)
            end = start + length
            following = turn.pattern.search(text, end)
        except BadValue as bad:
            error, end, following = bad, start, near
        closed = following is not None and following.group() == "</tool_call>"
        stop = following.end() if closed else following.start() if following else len(text)
        raw = text[begin:stop]
        if not closed and turn.is_cut(following):
            return _truncated(raw), len(text)
        read_on = stop if closed else end
        if error is not None:
            return _broken(error, raw), read_on
        rest = strip_end(text[end : following.start() if following else len(text)])
        states = {"repaired": repaired, "unclosed": not closed, "trailing_text": bool(rest)}
        return _call_from(value, turn.lenient, tuple(flag for flag, on in states.items() if on), raw), read_on

    def untagged(self, turn: _Reading, text: str) -> list[ToolCall | ToolCallError]:
        bare = strip_end(text).strip()
        is_bare = bare.startswith(("{", "["))
        found = [(bare, bare, False)] if is_bare else [(m[1], m[0], m[2] == "```") for m in _FENCE.finditer(text)]
        calls = []
        for body, raw, closed in found:
            try:
                value, _, repaired = decode(body, True)
            except BadValue:
                continue
            names = set(value) if isinstance(value, dict) else set()
            # a fence may hold any example; a turn that is nothing but JSON can only be meant as a call
            if is_bare or ("name" in names and names & {"arguments", "parameters"}):
                call = _call_from(value, True, ("repaired", "no_tags") if repaired else ("no_tags",), raw)
                calls.append(_truncated(raw) if turn.cut and not closed else call)
        return calls

    def render(self, call: ToolCall) -> str:
        body = json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False)
        return f"<tool_call>\n{body}\n</tool_call>"

    def instruction(self, tools: Sequence[Tool]) -> str:
        return 'To call a tool, write <tool_call>{"name": ..., "arguments": {...}}</tool_call>.'

    def stop_strings(self, tools: Mapping[str, str], parallel: bool) -> tuple[str, ...]:
        return ("<tool_response>",) if parallel else ("</tool_call>", "<tool_response>")


@call_format("tag")
class TagFormat(CallFormat):
    """``<search>query</search>``: the tool's name is the tag, its text parameter the content."""

    def open_tags(self, tools: Mapping[str, str]) -> tuple[str, ...]:
        return tuple(f"<{name}>" for name in tools)

    def read(self, turn: _Reading, tag: str, start: int) -> tuple[ToolCall | ToolCallError, int]:
        name = tag[1:-1]
        following = turn.pattern.search(turn.text, start)
        closed = following is not None and following.group() == f"</{name}>"
        stop = following.start() if following else len(turn.text)
        read_on = following.end() if closed else stop
        raw = turn.text[start - len(tag) : read_on]
        if not closed and turn.is_cut(following):
            return _truncated(raw), read_on
        body = strip_end(turn.text[start:stop]).strip()
        return ToolCall(name, {turn.tools[name]: clean_text(body)}, () if closed else ("unclosed",), raw), read_on

    def render(self, call: ToolCall) -> str:
        values = list(call.arguments.values())
        text = f"<{call.name}>{values[0] if values else ''}</{call.name}>"
        tools = {call.name: next(iter(call.arguments), "")}
        if len(values) != 1 or [c.to_dict() for c in parse_tool_calls(text, "tag", tools=tools)] != [call.to_dict()]:
            raise ValueError(f"the tag format cannot hold {call.name}({shown(call.arguments)}); use the hermes format")
        return text

    def instruction(self, tools: Sequence[Tool]) -> str:
        lines = [f"<{t.name}>{t.text_parameter}</{t.name}>: {t.description}".rstrip(": ") for t in tools]
        return "To call a tool, write its tags:\n" + "\n".join(lines)

    def stop_strings(self, tools: Mapping[str, str], parallel: bool) -> tuple[str, ...]:
        return ("<tool_response>",) if parallel else (*(f"</{name}>" for name in tools), "<tool_response>")
