"""Prompts and observations as token ids: nothing is encoded twice, and foreign text cannot forge a turn.

A chat is token-in, token-out: the prompt is encoded once, sampled ids stay as
sampled, and an observation adds the ids between the policy's last token and
the first token of its next turn. Three kinds of text meet in it:

========  ==================================  ===========================================
kind      written by                          its control strings become
========  ==================================  ===========================================
template  the model's makers                  their ids
trusted   developer and policy (system,       their ids if they cannot forge a turn, such
          assistant, tool schemas)            as ``<tool_call>``; plain text otherwise
foreign   users, tools, data sets             plain text
========  ==================================  ===========================================

The template is rendered with letters in place of contents, which tells its own
control strings from all others. The text between two control tokens is then
encoded as one string: the ids are those of an ordinary render wherever the
contents hold no control strings.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from jinja2 import TemplateError

from agentr1_lite.foreign import LARGE, Control, Marks, any_of, encode_foreign, encoder_of, split, valid

__all__ = ["CHATML", "CUT_MARKER", "ChatFormat", "Observation", "encode_foreign"]

CUT_MARKER = "\n[cut]"
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Qwen2.5's wording, for templates that cannot show tools
TOOLS_SECTION = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{schemas}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""
_TRUSTED_ROLES = ("system", "assistant")
# what templates do to a reply: nothing, trim it, quote it
_SHAPES: tuple[Callable[[str], str], ...] = (str, str.strip, lambda text: json.dumps(text, ensure_ascii=False))


class Observation(NamedTuple):
    """What the environment inserts between two turns of the policy.

    ``ids`` holds seam, tool text and the next assistant header; ``[start,
    end)`` spans the tool text inside it; ``flags`` may hold ``"cut"``.
    """

    ids: list[int]
    start: int
    end: int
    flags: tuple[str, ...] = ()


class ChatFormat:
    """A tokenizer's chat template as ids: prompts, observations, ends of turns.

    Args:
        tokenizer: a Hugging Face tokenizer; ChatML is used if it has ChatML's tokens and no template.
        generation_config: a GenerationConfig, its dict, or ids: what it names as EOS ends a turn too.
        template_options: more variables for the template, such as ``{"enable_thinking": False}``.

    Attributes:
        eos_ids: every id that ends a turn, not ``tokenizer.eos_token_id`` alone (trl#7039).
        turn_end_id: the id with which the template closes an assistant turn, or None.
        pad_id: what fills batches; masks come from lengths, never from this id (trl#6357).
        prefix_preserving: whether the render of a longer chat starts with that of the shorter one.

    A template without tools gets Qwen2.5's form: ``TOOLS_SECTION`` in the
    system turn, calls as text, replies as ``<tool_response>`` blocks of one user turn.
    """

    def __init__(
        self, tokenizer: Any, generation_config: Any = None, template_options: Mapping[str, Any] | None = None
    ) -> None:
        self.tokenizer = tokenizer
        self.name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
        self._encoder = encoder_of(tokenizer)
        if not tokenizer.chat_template and "<|im_start|>" not in self._encoder.controls:
            raise ValueError(f"tokenizer {self.name!r} has no chat template; set tokenizer.chat_template first")
        self._options = {**(template_options or {}), **({} if tokenizer.chat_template else {"chat_template": CHATML})}
        self._prompt = lru_cache(512)(self._build_prompt)
        self._page = lru_cache(256)(self._build_page)
        self._observe = lru_cache(2048)(self._build_observation)
        self._probe_tools()
        hard = {text for text, control in self._encoder.controls.items() if control.hard} | self._turn_markers()
        self._hard, self._soft = any_of(hard), any_of(set(self._encoder.controls) - hard)
        seam, marks = self._page((("user", ""),))[:2]
        self.turn_end_id = next((part.id for part in self._scan(seam, marks) if isinstance(part, Control)), None)
        ends = {tokenizer.eos_token_id, self.turn_end_id, *_eos_of(generation_config)} - {None}
        self.eos_ids: frozenset[int] = frozenset(ends)
        self.pad_id = next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0)
        self.prefix_preserving = self._preserves_prefix()
        if not self.prefix_preserving:
            warnings.warn(
                f"the chat template of {self.name!r} rewrites earlier assistant turns (many strip <think>): rollouts "
                "append ids and stay exact, but a chat rendered again is not what the policy saw; "
                "use step-level contexts or a training template where you render history",
                stacklevel=2,
            )

    def prompt_ids(self, messages: Sequence[Mapping], tools: Sequence[Mapping] | None = None) -> list[int]:
        """Ids of a chat up to and including the assistant header that the policy continues."""
        clean = [_clean(index, message) for index, message in enumerate(messages)]
        return list(self._prompt(json.dumps([clean, _without_none(list(tools or []))])))

    def observation_ids(
        self, messages: Sequence[Mapping], *, ended_by: int | None, max_tokens: int | None = None
    ) -> Observation:
        """Everything between the policy's last sampled token and the first token of its next turn.

        Args:
            messages: the replies, usually ``{"role": "tool", "content": str}``; all of them are foreign text.
            ended_by: the EOS id that the policy sampled, or None. The template's end of turn is left out
                if it is this id; otherwise the environment inserts it.
            max_tokens: bound on ``end - start``; long replies share it, end at a character and in ``[cut]``,
                and keep their closing tags. A bound below the length of ``[cut]`` cannot be met.
        """
        rows = tuple(
            (m["role"], str(m.get("name", "")), m["content"]) for m in map(_clean, range(len(messages)), messages)
        )
        large = sum(len(content) for _, _, content in rows) > LARGE
        ids, start, end, head, flags = (self._build_observation if large else self._observe)(rows, max_tokens)
        skip = head if head and ids[head - 1] == ended_by else 0
        return Observation(list(ids[skip:]), start - skip, end - skip, flags)

    def turn_ids(self, text: str) -> list[int]:
        """Ids of an assistant turn that a demonstrator wrote: trusted text, then the end of turn."""
        ids = self._assemble(self._trusted(text))[0]
        return ids if self.turn_end_id is None else [*ids, self.turn_end_id]

    def end_of_turn(self, ids: Sequence[int]) -> tuple[int, int | None]:
        """``(length up to and including the first EOS, that EOS)``, or ``(len(ids), None)``."""
        return next(((n, i) for n, i in enumerate(ids, 1) if i in self.eos_ids), (len(ids), None))

    def decode(self, ids: Iterable[int]) -> str:
        """Exact text of the ids, control tokens included, spaces untouched."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    # from a chat to the template's text

    def _render(self, messages: list[dict], tools: list | None = None, generate: bool = True) -> str:
        messages, tools = self._adapt(messages, tools)
        try:
            return self.tokenizer.apply_chat_template(
                messages, tools=tools or None, tokenize=False, add_generation_prompt=generate, **self._options
            )
        except (TemplateError, TypeError) as error:
            raise ValueError(
                f"the chat template of {self.name!r} cannot show the roles {[m['role'] for m in messages]}: {error}; "
                "use roles and an order that it knows"
            ) from error

    def _adapt(self, messages: list[dict], tools: list | None) -> tuple[list[dict], list | None]:
        """Write what the template cannot show as text, in Qwen2.5's form."""
        out: list[dict] = []
        for index, message in enumerate(messages):
            text = message["content"]
            if message.get("tool_calls") and not self._shows_calls:
                calls = [json.dumps(call.get("function", call), ensure_ascii=False) for call in message["tool_calls"]]
                text = "\n".join([text] * bool(text) + [f"<tool_call>\n{call}\n</tool_call>" for call in calls])
                message = {"role": "assistant", "content": text}
            elif message["role"] == "tool" and not self._shows_replies:
                text = f"<tool_response>\n{text}\n</tool_response>"
                if index and messages[index - 1]["role"] == "tool":
                    text = f"{out.pop()['content']}\n{text}"
                message = {"role": "user", "content": text}
            out.append(message)
        if tools and not self._shows_tools:
            section = TOOLS_SECTION.format(schemas="\n".join(json.dumps(t, ensure_ascii=False) for t in tools))
            if out and out[0]["role"] == "system":
                section = f"{out.pop(0)['content']}\n\n{section}"
            return [{"role": "system", "content": section}, *out], None
        return out, tools

    def _probe_tools(self) -> None:
        """Find out which of tool schemas, calls and replies the template shows."""
        self._shows_tools = self._shows_calls = self._shows_replies = True
        ask, reply = {"role": "user", "content": "q"}, {"role": "tool", "content": "Zqxreply"}
        call = {"type": "function", "function": {"name": "Zqxcall", "arguments": {"a": "b"}}}
        schema = {"type": "function", "function": {"name": "Zqxtool", "description": "d", "parameters": {}}}

        def shows(word: str, messages: list[dict], tools: list | None = None) -> bool:
            try:
                return word in self._render(messages, tools)
            except ValueError:
                return False

        self._shows_tools = shows("Zqxtool", [ask], [schema])
        self._shows_calls = shows("Zqxcall", [ask, {"role": "assistant", "content": "", "tool_calls": [call]}])
        # plain ChatML prints a header for any role, but no model was taught a turn called "tool" by it
        self._shows_replies = "tool" in str(self.tokenizer.chat_template) and shows(
            "Zqxreply", [ask, {"role": "assistant", "content": "t"}, reply]
        )

    def _turn_markers(self) -> set[str]:
        """Control strings that frame turns, whatever the tokenizer says of them."""
        chat = [{"role": role, "content": "q"} for role in ("user", "assistant", "user")]
        return set(self._encoder.pattern.findall(self._render(chat, generate=False)))

    def _preserves_prefix(self) -> bool:
        """Header + text + end of turn, as sampled, is what the template shows, and still is when more follows."""
        ask = {"role": "user", "content": "q"}
        for text in ("Herbert", "<think>\nhmm\n</think>\n\nHerbert"):
            chat = [ask, {"role": "assistant", "content": text}]
            short = self._render(chat, generate=False)
            longer = [self._render([*chat, more]) for more in ({"role": "tool", "content": "r"}, ask)]
            if not (short.startswith(self._render([ask]) + text) and all(x.startswith(short) for x in longer)):
                return False
        return True

    def _build_prompt(self, key: str) -> tuple[int, ...]:
        messages, tools = json.loads(key)
        marks = Marks(key)
        tools = _map_strings(tools, lambda text: marks.mask(self._hard, text))
        hidden, shown = [], []
        for message in messages:
            content, trusted = message.pop("content"), message["role"] in _TRUSTED_ROLES
            pattern = self._hard if trusted else self._encoder.pattern
            rest = _map_strings(message, lambda text, pattern=pattern: marks.mask(pattern, text))
            hidden.append({**rest, "content": marks.put(content, trusted) if content else ""})
            shown.append({**rest, "content": marks.mask(pattern, content)})
        text, seen = self._render(hidden, tools), self._render(shown, tools)
        # A template that trims contents or strips thoughts must see them, unless
        # its edits join harmless pieces into a control string.
        if marks.fill(text) != marks.fill(seen) and self._hard.findall(text) == self._hard.findall(seen):
            text = seen
        return tuple(self._assemble(self._scan(text, marks))[0])

    def _build_page(self, heads: tuple[tuple[str, str], ...]) -> tuple[str, Marks, list[str], Callable[[str], str]]:
        """What replies of these (role, name) add, by difference; its slots, and what befalls a reply there."""
        marks = Marks("".join(name for _, name in heads))
        anchor, slots = marks.put(""), [marks.put("") for _ in heads]
        names = [{"name": marks.mask(self._encoder.pattern, name)} if name else {} for _, name in heads]

        def suffix(contents: list[str]) -> str:
            rows = [
                {"role": role, "content": c, **name} for (role, _), name, c in zip(heads, names, contents, strict=True)
            ]
            chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": anchor}, *rows]
            _, found, rest = self._render(chat).rpartition(anchor)
            if not found:
                raise ValueError(f"the chat template of {self.name!r} drops assistant contents; use another template")
            return rest

        text, probes = suffix(slots), [f' "{slot}"\n ' for slot in slots]
        seen = suffix(probes)
        trials = [(shape, {s: (shape(p), False) for s, p in zip(slots, probes, strict=True)}) for shape in _SHAPES]
        return text, marks, slots, next((shape for shape, trial in trials if marks.fill(text, trial) == seen), str)

    def _build_observation(self, rows: tuple[tuple[str, str, str], ...], max_tokens: int | None) -> tuple:
        text, marks, slots, shape = self._page(tuple((role, name) for role, name, _ in rows))
        contents = [content for _, _, content in rows]
        budget = None if max_tokens is None else max(0, max_tokens)
        large = budget is not None and sum(map(len, contents)) > LARGE
        shown = self._share(contents, budget) if large else contents
        while True:
            values = {slot: (shape(content), False) for slot, content in zip(slots, shown, strict=True)}
            ids, start, end, head = self._assemble(self._scan(text, marks, values))
            # tags between replies and merges at the seams count too
            over = 0 if budget is None else end - start - max_tokens
            if over <= 0 or (shown is not contents and budget == 0):
                return tuple(ids), start, end, head, ("cut",) * (shown != contents)
            budget = budget if shown is contents else max(0, budget - over)
            shown = self._share(contents, budget)

    def _share(self, contents: list[str], limit: int) -> list[str]:
        """Cut the longest replies so that all together keep to ``limit`` tokens, markers included."""
        lengths = [self._encoder.head(content, limit)[0] for content in contents]
        marker = len(self._encoder.encode(CUT_MARKER)[0])
        out, room = list(contents), limit
        for left, index in enumerate(sorted(range(len(contents)), key=lengths.__getitem__)):
            share = room // (len(contents) - left)
            if lengths[index] > share:
                out[index] = self._encoder.head(contents[index], max(0, share - marker))[1] + CUT_MARKER
            room -= min(share, lengths[index])
        return out

    # from the template's text to ids

    def _trusted(self, text: str) -> Iterator[Control | str]:
        for piece in split(self._soft, text):
            yield self._encoder.controls[piece] if self._soft.fullmatch(piece) else piece

    def _scan(
        self, text: str, marks: Marks, values: Mapping[str, tuple[str, bool]] | None = None
    ) -> Iterator[Control | str | bool]:
        """The template's control tokens and text, and each content between True and False."""
        values = {**marks.values, **(values or {})}
        for piece in split(re.compile(f"{self._encoder.pattern.pattern}|{marks.pattern}"), text):
            if piece in values:
                content, trusted = values[piece]
                yield True
                yield from self._trusted(content) if trusted else (content,)
                yield False
            else:
                yield self._encoder.controls.get(piece, piece)

    def _assemble(self, parts: Iterable[Control | str | bool]) -> tuple[list[int], int, int, int]:
        """Encode the text between two control tokens as one string.

        Returns the ids, the token span ``[start, end)`` from the first content
        to the last, and the length up to and including the first control token.
        """
        ids: list[int] = []
        edges: list[tuple[int, bool]] = []
        spans: dict[bool, list[int]] = {True: [], False: []}
        text, strip, head = "", False, 0
        for part in [*parts, None]:
            if isinstance(part, str):
                text += part
            elif isinstance(part, bool):
                edges.append((len(text), part))
            else:
                body = text.lstrip() if strip else text
                cut = len(text) - len(body)
                body = body.rstrip() if part is not None and part.lstrip else body
                encoded = self._encoder.encode(body)
                for char, opens in edges:
                    token = self._encoder.token_at(body, encoded, max(0, char - cut), opens)
                    spans[opens].append(len(ids) + token)
                ids += encoded[0]
                if part is not None:
                    ids.append(part.id)
                    head, strip = head or len(ids), part.rstrip
                text, edges = "", []
        return ids, min(spans[True], default=len(ids)), max(spans[False], default=len(ids)), head


def _eos_of(config: Any) -> set[int | None]:
    if isinstance(config, Mapping):
        config = config.get("eos_token_id")
    config = getattr(config, "eos_token_id", config)
    return set(config) if isinstance(config, Iterable) else {config}


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_map_strings(item, change) for item in value]
    if isinstance(value, dict):
        return {change(key): _map_strings(item, change) for key, item in value.items()}
    return value


def _without_none(value: Any) -> Any:
    """Drop the None with which Arrow pads rows; a default may be None."""
    if isinstance(value, list):
        return [_without_none(item) for item in value]
    if isinstance(value, Mapping):
        return {k: _without_none(item) for k, item in value.items() if item is not None or k in ("default", "const")}
    return value


def _clean(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    """A message without None, its content one string and its call arguments objects, or a sentence of what is wrong."""
    row = {key: value for key, value in message.items() if value is not None}
    role, content = row.get("role"), row.get("content")
    if calls := row.pop("tool_calls", None):
        row["tool_calls"] = [_clean_call(call) for call in calls]
        content = content or ""
    if isinstance(content, list) and all(isinstance(part, Mapping) and part.get("type") == "text" for part in content):
        content = "".join(part["text"] for part in content)
    if not isinstance(role, str) or not isinstance(content, str):
        raise ValueError(
            f"message {index} has role {role!r} and a content of type {type(content).__name__}; both must be strings"
        )
    return {**row, "content": valid(content)}


def _clean_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments written as a JSON string would be quoted twice by Qwen2.5's template."""
    function = dict(call.get("function") or call)
    if isinstance(function.get("arguments"), str):
        try:
            function["arguments"] = json.loads(function["arguments"])
        except ValueError:
            pass  # the policy's own words, shown as they are
    return {"type": "function", "function": function}
