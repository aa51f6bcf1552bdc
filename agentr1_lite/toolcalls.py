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

- **Nothing vanishes**: what a turn holds beside its calls, where it looks like
  part of one, stands in ``TurnText.left_out`` for the model to read.

Flags of a call: ``trailing_text``, ``unclosed``, ``string_arguments`` (JSON in a
string), ``extra_keys`` (beside name and arguments), and where ``lenient``:
``repaired`` (Python literals, trailing commas, raw newlines), ``no_tags`` (a
fenced or bare object), ``shared_tags`` (several objects between two tags, each
a call), ``renamed_key`` (``parameters``), ``duplicate_key`` (the last one counts).
With ``lenient=False`` the last five are errors, left out, or no call at all.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from agentr1_lite.loose_json import BadValue, decode, decode_all, plain
from agentr1_lite.schema import shown
from agentr1_lite.tools import Tool, ToolCall, ToolCallError, clean_text

CUT_REASONS = frozenset({"length", "max_tokens", "abort", "interrupted"})
DEFAULT_TOOLS: Mapping[str, str] = {"search": "query"}
_SHARED_TAGS = ("<think>", "</think>", "<answer>", "</answer>", "<tool_response>")
_END_MARKERS = ("<|im_end|>", "<|endoftext|>", "</s>")
_FENCE = re.compile(r"```(?:json|tool_call|tool|python)?[ \t]*\n(.*?)(```|\Z)", re.DOTALL)


@dataclass(frozen=True)
class TurnText:
    """What one turn of the policy says; ``answer`` is None where no closed pair stands.

    ``left_out`` says in short pieces what stood in or beside the calls and was not read; ``flags`` tell that it does.
    """

    calls: list[ToolCall | ToolCallError]
    answer: str | None
    flags: tuple[str, ...]
    left_out: tuple[str, ...] = ()


class CallFormat(ABC):
    """How calls are written. ``tools`` maps a tool's name to the parameter that plain text fills."""

    in_template = False  # True: the chat template shows the tools' schemas to the policy

    @abstractmethod
    def open_tags(self, tools: Mapping[str, str]) -> tuple[str, ...]:
        """The tags that start a call."""

    @abstractmethod
    def read(self, turn: _Reading, tag: str, start: int) -> tuple[list[ToolCall | ToolCallError], int]:
        """Read what the opening ``tag`` that ends at ``start`` begins; return the calls and where to read on."""

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
        """Calls without tags, looked for in lenient mode: run where a turn holds nothing else, else named."""
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
    left_out: list[str]

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
    turn = _Reading(text, _tag_pattern(opening), finish_reason in CUT_REASONS, lenient, tools, [])
    calls: list[ToolCall | ToolCallError] = []
    flags: list[str] = []
    beside: list[str] = []  # between the tags
    answer, answer_start = None, None
    position, thought, end = 0, False, len(text)
    last_close = text.rfind("</think>")
    while match := turn.pattern.search(text, position):
        beside.append(text[position : match.start()])
        tag, position = match.group(), match.end()
        if tag == "<think>" and position <= last_close:
            position, thought = text.index("</think>", position) + len("</think>"), True
        elif tag == "</think>" and not thought:
            calls, answer, answer_start, thought = [], None, None, True
            beside.clear()
            turn.left_out.clear()
        elif tag == "<tool_response>":
            flags.append("wrote_tool_response")
            end, rest = match.start(), strip_end(text[position:])
            turn.left_out.extend([f"what follows your own <tool_response>: {_quoted(rest)}"] if rest else [])
            break
        elif tag == "<answer>":
            answer_start = position
        elif tag == "</answer>" and answer_start is not None:
            answer, answer_start = text[answer_start : match.start()].strip(), None
        elif tag in opening:
            found, position = reader.read(turn, tag, position)
            calls += found
        elif tag[2:-1] in tools and beside[-1].strip():
            turn.left_out.append(f"{_quoted(beside[-1])} before {tag}")
    else:
        beside.append(text[position:])
    if answer_start is not None:
        flags.append("unclosed_answer")
    if lenient and not calls and answer is None:
        calls = reader.untagged(turn, text[last_close + len("</think>") if last_close >= 0 else 0 : end])
    elif lenient and answer is None:
        outside = (call for piece in beside for call in reader.untagged(turn, piece) if isinstance(call, ToolCall))
        turn.left_out.extend(f"a call without tags: {_quoted(call.raw)}" for call in outside)
    if turn.left_out and "wrote_tool_response" not in flags:
        flags.append("left_out")
    return TurnText(calls, answer, tuple(flags), tuple(turn.left_out))


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


def _call_from(value: Any, turn: _Reading, flags: tuple[str, ...], raw: str) -> ToolCall | ToolCallError:
    """A decoded value as a call, or the error that says what is wrong with it."""
    found: set[str] = set()
    try:
        value = plain(value, found)
        if not isinstance(value, dict):
            raise BadValue("not_an_object", f"not one JSON object but {shown(value)}")
        name, key = value.get("name"), "arguments"
        if not isinstance(name, str) or not name.strip():
            raise BadValue("no_name", 'without a "name"')
        if key not in value and turn.lenient and "parameters" in value:
            key = "parameters"
            found.add("renamed_key")
        arguments = value.get(key)
        if isinstance(arguments, str):
            arguments = _string_arguments(arguments, turn.lenient, found)
        if not isinstance(arguments, dict):
            state = f"{shown(arguments)} instead of an object" if key in value else "missing"
            raise BadValue("bad_arguments", f'not usable: "arguments" is {state}')
        if "duplicate_key" in found and not turn.lenient:
            raise BadValue("duplicate_key", "not usable: it holds one key twice")
    except BadValue as error:
        return _broken(error, raw)
    if "duplicate_key" in found:
        turn.left_out.append("all but the last value of a key that stands twice")
    if extra := {k: v for k, v in value.items() if k not in ("name", key, "id", "type")}:
        found.add("extra_keys")
        turn.left_out.append(f'{shown(extra)} beside "name" and "{key}"')
    return ToolCall(name, arguments, (*flags, *sorted(found - set(flags))), raw)


def _string_arguments(text: str, lenient: bool, found: set[str]) -> Any:
    """Arguments that were written as JSON in a string."""
    try:
        arguments, end, repaired = decode(text, lenient)
    except BadValue as error:
        raise BadValue(error.reason, f'not usable: "arguments" is a string, and {error}') from error
    if text[end:].strip():
        raise BadValue("bad_arguments", 'not usable: text follows the object in "arguments"')
    found |= {"string_arguments", "repaired"} if repaired else {"string_arguments"}
    return plain(arguments, found)


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


def _quoted(text: str) -> str:
    text = " ".join(text.split())
    return f'"{text}"' if len(text) <= 200 else f'"{text[:197]}..."'


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

    def read(self, turn: _Reading, tag: str, start: int) -> tuple[list[ToolCall | ToolCallError], int]:
        text, begin = turn.text, start - len(tag)
        near = self._tags.search(text, start)

        def next_tag(place: int) -> int:
            nonlocal near
            if near and near.start() < start + place:
                near = self._tags.search(text, start + place)
            return (near.start() if near else len(text)) - start

        # a tag may stand in a string: the body ends at the first one outside
        body = text[start : max(start + next_tag(0), self._body.match(text, start).end())]
        values, end, error = decode_all(body, turn.lenient, next_tag)
        following = near if error else turn.pattern.search(text, start + end)
        closed = following is not None and following.group() == "</tool_call>"
        stop = following.end() if closed else following.start() if following else len(text)
        raw = text[begin:stop]
        if not closed and turn.is_cut(following):
            return [_truncated(raw)], len(text)
        rest = "" if error else strip_end(text[start + end : following.start() if following else len(text)])
        calls = self._calls(turn, body, (values, error), {"unclosed": not closed, "trailing_text": bool(rest)}, raw)
        turn.left_out.extend([f"{_quoted(rest)} behind a call"] if rest else [])
        return calls, stop if closed else start + end

    def _calls(self, turn: _Reading, body: str, found: Any, states: dict[str, bool], raw: str) -> list[Any]:
        """What ``decode_all`` found as calls; those that share their tags have each their own words as ``raw``."""
        (values, error), calls = found, []
        for value, start, end, repaired in values:
            states |= {"repaired": repaired, "shared_tags": len(values) > 1}
            own = body[start:end] if len(values) > 1 else raw
            calls.append(_call_from(value, turn, tuple(flag for flag, on in states.items() if on), own))
        return [*calls, _broken(error, raw)] if error else calls

    def untagged(self, turn: _Reading, text: str) -> list[ToolCall | ToolCallError]:
        bare = strip_end(text).strip()
        is_bare = bare.startswith(("{", "["))
        found = [(bare, bare, False)] if is_bare else [(m[1], m[0], m[2] == "```") for m in _FENCE.finditer(text)]
        calls = []
        for body, raw, closed in found:
            values, end, error = decode_all(body, True, lambda place, body=body: len(body))
            names = set(values[0][0]) if values and isinstance(values[0][0], dict) else set()
            # a fence may hold any example; a turn that is nothing but JSON can only be meant as a call
            if not values or not (is_bare or ("name" in names and names & {"arguments", "parameters"})):
                continue
            if turn.cut and not closed:
                calls.append(_truncated(raw))
                continue
            rest = "" if error else body[end:].strip().removesuffix("</tool_call>").strip()
            calls += self._calls(turn, body, (values, error), {"no_tags": True, "trailing_text": bool(rest)}, raw)
            turn.left_out.extend([f"{_quoted(rest)} behind a call"] if rest else [])
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

    def read(self, turn: _Reading, tag: str, start: int) -> tuple[list[ToolCall | ToolCallError], int]:
        name = tag[1:-1]
        following = turn.pattern.search(turn.text, start)
        closed = following is not None and following.group() == f"</{name}>"
        stop = following.start() if following else len(turn.text)
        read_on = following.end() if closed else stop
        raw = turn.text[start - len(tag) : read_on]
        if not closed and turn.is_cut(following):
            return [_truncated(raw)], read_on
        body = strip_end(turn.text[start:stop]).strip()
        return [ToolCall(name, {turn.tools[name]: clean_text(body)}, () if closed else ("unclosed",), raw)], read_on

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
