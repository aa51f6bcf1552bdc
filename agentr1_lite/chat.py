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

The template is rendered with letters in place of the contents' control strings,
which tells its own from all others, and the whole text is encoded at once: the
ids are those of an ordinary render wherever the contents hold no control strings.
A tokenizer or a template for which that does not hold is refused.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import date
from functools import lru_cache
from os.path import commonprefix
from typing import Any, NamedTuple

from jinja2 import TemplateError

from agentr1_lite.foreign import LARGE, Control, Marks, Part, any_of, encode_foreign, encoder_of, split, valid

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
TODAY = "2024-07-26"  # the date of templates that print one: a prompt must not change overnight
THOUGHTS = ("reasoning_content", "reasoning", "thinking", "tool_plan")  # what makers call an assistant's thought
_TRUSTED_ROLES = ("system", "assistant")
_OWN_OPTIONS = ("messages", "conversation", "tools", "documents", "tokenize", "add_generation_prompt", "chat_template")
_ASK = {"role": "user", "content": "q"}


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
        template_options: more variables for the template, such as ``{"enable_thinking": False}``. A template that
            prints today's date reads ``strftime_now``, a date such as "2025-01-31"; without one it is ``TODAY``.

    Attributes:
        eos_ids: every id that ends a turn, not ``tokenizer.eos_token_id`` alone (trl#7039).
        turn_end_id: the id with which the template closes an assistant turn, or None.
        pad_id: what fills batches; masks come from lengths, never from this id (trl#6357).
        prefill: how the template begins each turn for the model, such as an opened ``<think>``: part of the turn
            for whoever reads it, part of the prompt for the ids.
        prefix_preserving: whether the render of a longer chat starts with that of the shorter one.

    A template without tools gets Qwen2.5's form: ``TOOLS_SECTION`` in the
    system turn, calls as text, replies as ``<tool_response>`` blocks of one user turn.
    Raises ``ValueError`` where the ids would not be those of an ordinary render.
    """

    def __init__(
        self, tokenizer: Any, generation_config: Any = None, template_options: Mapping[str, Any] | None = None
    ) -> None:
        self.tokenizer = tokenizer
        self.name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
        self._encoder = encoder_of(tokenizer)
        if not tokenizer.chat_template and "<|im_start|>" not in self._encoder.controls:
            raise ValueError(f"tokenizer {self.name!r} has no chat template; set tokenizer.chat_template first")
        self._options = self._checked_options(template_options or {})
        self._prompt = lru_cache(512)(self._build_prompt)
        self._page = lru_cache(256)(self._build_page)
        self._observe = lru_cache(2048)(self._build_observation)
        self._probe_tools()
        self._read_header()
        markers = {text for text, control in self._encoder.controls.items() if control.hard} | self._turn_markers()
        markers -= set(self._encoder.pattern.findall(self.prefill + (self._lead or "")))  # they stand inside a turn
        self._hard, self._soft = any_of(markers), any_of(set(self._encoder.controls) - markers)
        seam = self._scan(self._suffix([_ASK]), Marks())
        self._turn_end = next((part for part in seam if isinstance(part, Control)), None)
        self.turn_end_id = self._turn_end and self._turn_end.id
        ends = {tokenizer.eos_token_id, self.turn_end_id, *_eos_of(generation_config)} - {None}
        self.eos_ids: frozenset[int] = frozenset(ends)
        self.pad_id = next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0)
        self._check_ids()
        self.prefix_preserving = self._preserves_prefix()
        if not self.prefix_preserving:
            warnings.warn(
                f"the chat template of {self.name!r} rewrites earlier assistant turns (many strip <think>): rollouts "
                "append ids and stay exact, but a chat rendered again is not what the policy saw; keep trajectories, "
                "not messages, or give the tokenizer a template that leaves earlier turns as they are",
                stacklevel=2,
            )

    def prompt_ids(self, messages: Sequence[Mapping], tools: Sequence[Mapping] | None = None) -> list[int]:
        """Ids of a chat up to and including the assistant header that the policy continues."""
        clean = [clean_message(index, message) for index, message in enumerate(messages)]
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
        rows = [clean_message(index, message) for index, message in enumerate(messages)]
        large = sum(len(row["content"]) for row in rows) > LARGE
        build = self._build_observation if large else self._observe
        ids, start, end, head, flags = build(json.dumps(rows), max_tokens)
        skip = head if head and ids[head - 1] == ended_by else 0
        return Observation(list(ids[skip:]), start - skip, end - skip, flags)

    def turn_ids(self, text: str) -> list[int]:
        """Ids of an assistant turn that a demonstrator wrote: trusted text, then the end of turn."""
        return self._continued([*self._trusted(text), *([self._turn_end] if self._turn_end else [])])

    def turn(self, message: Mapping[str, Any]) -> tuple[str, list[int]]:
        """An assistant message as the policy would have said it: its text without ``prefill``, and its ids to the end.

        Calls and thoughts are written by the template (``<think>`` where it shows
        none). ``ValueError`` where the template leaves a part of the message out, or
        begins a turn with words that the message lacks.
        """
        row = clean_message(0, message)
        thought = next((row.pop(key) for key in THOUGHTS if row.get(key)), "")
        if thought and self._thought_key is None:
            row["content"], thought = f"<think>\n{thought}\n</think>\n\n{row['content']}", ""
        if thought:
            row[self._thought_key] = thought
        if thought or row.get("tool_calls"):
            parts = self._written(row)
        else:
            parts = [*self._trusted(self._said(row["content"])), *([self._turn_end] if self._turn_end else [])]
        said = parts[:-1] if parts and isinstance(parts[-1], Control) and parts[-1].id in self.eos_ids else parts
        return "".join(part if isinstance(part, str) else part.text for part in said), self._continued(parts)

    def end_of_turn(self, ids: Sequence[int]) -> tuple[int, int | None]:
        """``(length up to and including the first EOS, that EOS)``, or ``(len(ids), None)``."""
        return next(((n, i) for n, i in enumerate(ids, 1) if i in self.eos_ids), (len(ids), None))

    def decode(self, ids: Iterable[int]) -> str:
        """Exact text of the ids, control tokens included, spaces untouched."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    # what the template does

    def _checked_options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        template = str(self.tokenizer.chat_template or CHATML)
        for name in options:
            if name in _OWN_OPTIONS or not (name == "strftime_now" or re.search(rf"\b{re.escape(name)}\b", template)):
                raise ValueError(
                    f"template_options: the chat template of {self.name!r} reads no {name!r}; leave it out"
                )
        try:
            today = date.fromisoformat(str(options.get("strftime_now", TODAY)))
        except ValueError as error:
            raise ValueError(f"template_options: strftime_now must be a date such as {TODAY!r}, {error}") from None
        self._clock = _clock(today)
        return {name: value for name, value in options.items() if name != "strftime_now"}

    def _render(self, messages: list[dict], tools: list | None = None, generate: bool = True) -> str:
        messages, tools = self._adapt(messages, tools)
        template = self.tokenizer.get_chat_template(tools=tools or None) if self.tokenizer.chat_template else CHATML
        template = self._clock + template if "strftime_now" in template else template
        options = {"chat_template": template, "add_generation_prompt": generate, **self._options}
        try:
            return self.tokenizer.apply_chat_template(messages, tools=tools or None, tokenize=False, **options)
        except (TemplateError, TypeError) as error:
            raise ValueError(
                f"the chat template of {self.name!r} cannot show the roles {[m['role'] for m in messages]}: {error}; "
                "use roles and an order that it knows"
            ) from error

    def _adapt(self, messages: list[dict], tools: list | None) -> tuple[list[dict], list | None]:
        """Write what the template cannot show as text, in Qwen2.5's form."""
        out: list[dict] = []
        native = self._shows_replies
        for index, message in enumerate(messages):
            text, calls = message["content"], message.get("tool_calls")
            if message["role"] == "assistant":
                native = self._shows_answers if calls and self._shows_calls else self._shows_replies
            if calls and not self._shows_calls:
                written = [json.dumps(_named(call), ensure_ascii=False) for call in calls]
                text = "\n".join([text] * bool(text) + [f"<tool_call>\n{call}\n</tool_call>" for call in written])
                message = {"role": "assistant", "content": text}
            elif calls and self._quotes_arguments:
                message = {**message, "tool_calls": [_quoted(call) for call in calls]}
            elif message["role"] == "tool" and not native:
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
        """Find out which of tool schemas, calls, replies and thoughts the template shows."""
        self._shows_tools = self._shows_calls = self._shows_replies = self._shows_answers = True
        self._quotes_arguments = False
        reply = {"role": "tool", "content": "Zqxreply"}
        call = {"type": "function", "id": "zqxcall01", "function": {"name": "Zqxcall", "arguments": {"a": "b"}}}
        schema = {"type": "function", "function": {"name": "Zqxtool", "description": "d", "parameters": {}}}
        calling = {"role": "assistant", "content": "", "tool_calls": [call]}

        def shows(word: str, *messages: dict, tools: list | None = None) -> bool:
            try:
                return word in self._render([_ASK, *messages], tools)
            except ValueError:
                return False

        shown = shows("Zqxtool", tools=[schema]), shows("Zqxcall", calling)
        if not shown[1]:
            self._quotes_arguments = True
            self._quotes_arguments = shows("Zqxcall", calling)
        self._shows_tools, self._shows_calls = shown[0], shown[1] or self._quotes_arguments
        # plain ChatML prints a header for any role, but no model was taught a turn called "tool" by it
        known = "tool" in str(self.tokenizer.chat_template)
        replies = shows("Zqxreply", {"role": "assistant", "content": "t"}, reply)
        answers = shows("Zqxreply", calling, {**reply, "tool_call_id": "zqxcall01"})
        self._shows_replies, self._shows_answers = known and replies, known and answers
        if self._shows_answers and not self._shows_replies:
            warnings.warn(
                f"the chat template of {self.name!r} shows tool replies only behind calls in its own form; "
                "behind calls that the policy writes as text they are user turns with <tool_response>",
                stacklevel=4,
            )
        said = {"role": "assistant", "content": "t"}
        self._thought_key = next((key for key in THOUGHTS if shows("Zqxthought", {**said, key: "Zqxthought"})), None)

    def _read_header(self) -> None:
        """How the template begins an assistant turn: for the model to go on from, and around a message's content."""
        said = {"role": "assistant", "content": Marks.anchor}
        self._header = self._render([_ASK])
        pages = [self._render([_ASK, said, *more], generate=False).partition(Marks.anchor) for more in ((), (_ASK,))]
        if not all(found for _, found, _ in pages):
            raise ValueError(f"the chat template of {self.name!r} drops assistant contents; use another template")
        begun = [self._header[len(page[0]) :] for page in pages if self._header.startswith(page[0])]
        tag = re.search(r"<(\w+)>\s*(?:</\1>\s*)?$", self._header)  # a template that closes the tag in every turn
        self.prefill = max(begun, key=len) if begun else tag[0] if tag else ""
        self.prefill = self.prefill if self.prefill.strip() else ""
        before, _, after = pages[0]
        self._lead = before[len(self._header) :] if before.startswith(self._header) else None
        self._tail = next(split(self._encoder.pattern, after))
        parts = list(self._scan(self._header, Marks()))
        last = max((i for i, part in enumerate(parts) if isinstance(part, Control)), default=0)
        self._opening = parts[last:]

    def _turn_markers(self) -> set[str]:
        """Control strings that frame turns, whatever the tokenizer says of them."""
        chat = [{"role": role, "content": "q"} for role in ("user", "assistant", "user")]
        return set(self._encoder.pattern.findall(self._render(chat, generate=False)))

    def _preserves_prefix(self) -> bool:
        """Header + text + end of turn, as sampled, is what the template shows, and still is when more follows."""
        for text in ("Herbert", "<think>\nhmm\n</think>\n\nHerbert"):
            chat = [_ASK, {"role": "assistant", "content": text}]
            short = self._render(chat, generate=False)
            longer = [self._render([*chat, more]) for more in ({"role": "tool", "content": "r"}, _ASK)]
            if not (short.startswith(self._header + text) and all(x.startswith(short) for x in longer)):
                return False
        return True

    def _check_ids(self) -> None:
        """Encode a chat both ways: ``ValueError`` where the tokenizer cannot be followed."""
        chat = [("user", "Who wrote Dune?\n"), ("assistant", "Frank  Herbert"), ("user", " It's 1965.\tWhen (\u00e9)?")]
        rows = [{"role": role, "content": content} for role, content in chat]
        whole = self.tokenizer(self._render(rows), add_special_tokens=False).input_ids
        seen = [] if self._turn_end is None else self.observation_ids(rows[2:], ended_by=self.turn_end_id).ids
        if self.prompt_ids(rows) != list(whole) or seen != list(whole)[len(whole) - len(seen) :]:
            raise ValueError(
                f"the tokenizer of {self.name!r} gives a chat other ids than its parts one after another; "
                "use another tokenizer"
            )

    # from a chat to parts

    def _masked(self, marks: Marks, messages: list[dict]) -> tuple[list[dict], list[dict]]:
        """The messages with marks in place of contents, and with marks in place of their control strings alone."""
        hidden, shown = [], []
        for message in messages:
            content, trusted = message["content"], message["role"] in _TRUSTED_ROLES
            pattern = self._hard if trusted else self._encoder.pattern
            rest = {key: value for key, value in message.items() if key != "content"}
            rest = _map_strings(rest, lambda text, pattern=pattern: marks.mask(pattern, text))
            # a template may leave out what is blank
            hidden.append({**rest, "content": marks.put(content, trusted) if content.strip() else content})
            shown.append({**rest, "content": marks.mask(pattern, content)})
        return hidden, shown

    def _sees(self, hidden: str, shown: str) -> str:
        """What the template makes of the contents, unless its edits join harmless pieces into a control string."""
        return shown if self._hard.findall(hidden) == self._hard.findall(shown) else hidden

    def _build_prompt(self, key: str) -> tuple[int, ...]:
        messages, tools = json.loads(key)
        marks = Marks()
        tools = _map_strings(tools, lambda text: marks.mask(self._hard, text))
        hidden, shown = self._masked(marks, messages)
        blind = self._render(hidden, tools)
        for message in hidden:
            if message["role"] != "assistant" and message["content"].strip() and message["content"] not in blind:
                raise ValueError(
                    f"the chat template of {self.name!r} leaves out messages of role {message['role']!r} here; "
                    "use roles and an order that it shows"
                )
        text = self._sees(blind, self._render(shown, tools))
        return tuple(self._encoder.encode(self._scan(text, marks))[0])

    def _suffix(self, rows: list[dict]) -> str:
        """What the template puts behind an assistant's content when ``rows`` follow it."""
        said = {"role": "assistant", "content": Marks.anchor}
        return self._render([_ASK, said, *rows]).rpartition(Marks.anchor)[2]

    def _build_page(self, key: str) -> tuple[str, str, str]:
        """Texts before the first and behind the last of replies whose contents are hidden, and the text in full.

        ``key`` holds the replies, their contents only where they are blank.
        """
        rows, marks = json.loads(key), Marks()
        slots = [marks.put("") for _ in rows]
        full = self._suffix([{**row, "content": slot} for row, slot in zip(rows, slots, strict=True)])
        some = [{**row, "content": row.get("content", slot)} for row, slot in zip(rows, slots, strict=True)]
        texts = re.split(marks.pattern, full)
        if len(texts) <= len(slots):
            roles = sorted({row["role"] for row in rows})
            raise ValueError(f"the chat template of {self.name!r} leaves out replies of role {', '.join(roles)}")
        return texts[0], texts[-1] if slots else "", self._suffix(some)

    def _build_observation(self, key: str, max_tokens: int | None) -> tuple:
        rows = json.loads(key)
        contents = [row.pop("content") for row in rows]
        budget = None if max_tokens is None else max(0, max_tokens)
        large = budget is not None and sum(map(len, contents)) > LARGE
        shown = self._share(contents, budget) if large else contents
        while True:
            ids, start, end = self._answered(rows, shown)
            # tags between replies and merges at the seams count too
            over = 0 if budget is None else end - start - max_tokens
            if over <= 0 or (shown is not contents and budget == 0):
                head = next((n for n, i in enumerate(ids[:start], 1) if i in self._encoder.ids), 0)
                return tuple(ids), start, end, head, ("cut",) * (shown != contents)
            budget = budget if shown is contents else max(0, budget - over)
            shown = self._share(contents, budget)

    def _answered(self, rows: list[dict], contents: list[str]) -> tuple[list[int], int, int]:
        """Ids of everything behind a turn that replies follow, and the span from the first content to the last."""
        marks = Marks()
        rows = _map_strings(rows, lambda text: marks.mask(self._encoder.pattern, text))
        blank = [{} if content.strip() else {"content": content} for content in contents]
        key = json.dumps([{**row, **content} for row, content in zip(rows, blank, strict=True)])
        before, after, hidden = self._page(key)
        masked = [marks.mask(self._encoder.pattern, content) for content in contents]
        text = self._suffix([{**row, "content": content} for row, content in zip(rows, masked, strict=True)])
        if self._sees(hidden, text) is not text:
            slots = iter([marks.put(content) if content.strip() else content for content in contents])
            text = self._suffix([{**row, "content": slot} for row, slot in zip(rows, slots, strict=True)])
        start = len(commonprefix([before, text]))
        end = len(text) - len(commonprefix([after[::-1], text[start:][::-1]]))
        spans = (text[:start], text[start:end], text[end:])
        lead, said, rest = (list(self._scan(span, marks)) for span in spans)
        ids, (first, last) = self._encoder.encode([*lead, True, *said, False, *rest], glued=True)
        return ids, first, max(first, last)

    def _share(self, contents: list[str], limit: int) -> list[str]:
        """Cut the longest replies so that all together keep to ``limit`` tokens, markers included."""
        lengths = [self._encoder.head(content, limit)[0] for content in contents]
        marker = len(self._encoder.encode([CUT_MARKER], glued=True)[0])
        out, room = list(contents), limit
        for left, index in enumerate(sorted(range(len(contents)), key=lengths.__getitem__)):
            share = room // (len(contents) - left)
            if lengths[index] > share:
                out[index] = self._encoder.head(contents[index], max(0, share - marker))[1] + CUT_MARKER
            room -= min(share, lengths[index])
        return out

    # from a demonstration's message to parts

    def _said(self, content: str) -> str:
        """What the policy says where a message holds text alone: all of it behind ``prefill``."""
        begun = self.prefill.strip()
        if begun and content.lstrip().startswith(begun):
            whole = content.startswith(self.prefill)
            return content[len(self.prefill) :] if whole else content.lstrip()[len(begun) :]
        if self._lead is not None and (begun or not self._lead.strip()):
            return self._lead + content + self._tail
        tags = re.findall(r"<(/?\w+)>", begun)
        if tags and not tags[-1].startswith("/"):
            raise ValueError(f"the chat template begins a turn with {begun!r} and the message does not; write it there")
        return content

    def _written(self, row: dict[str, Any]) -> list[Part]:
        """A message with calls or a thought as the template writes it behind its assistant header."""
        marks = Marks()
        text = self._sees(*(self._render([_ASK, *rows], generate=False) for rows in self._masked(marks, [row])))
        if not text.startswith(self._header):
            begun = repr(self.prefill) if self.prefill else "another header"
            raise ValueError(f"the chat template prompts with {begun}, not as it writes this message; give it as text")
        text = text[len(self._header) :]
        told = marks.fill(text)
        for name, value in _leaves(row):
            if not _tells(told, value):
                raise ValueError(f"the chat template does not show {name} {value!r:.60}; give the message as text")
        parts = list(self._scan(text, marks))
        while parts and isinstance(parts[-1], str) and not parts[-1].strip():
            parts.pop()
        last = parts[-1] if parts else None
        if isinstance(last, Control) and last.id not in self.eos_ids and last.hard:
            raise ValueError(f"the chat template ends this message with {last.text!r}, which is no EOS of this model")
        ended = isinstance(last, Control) and last.id in self.eos_ids
        return parts if ended or self._turn_end is None else [*parts, self._turn_end]

    def _continued(self, parts: list[Part]) -> list[int]:
        """Ids of what follows the assistant header."""
        opening = self._encoder.encode(self._opening)[0]
        whole = self._encoder.encode([*self._opening, *parts])[0]
        if whole[: len(opening)] == opening:
            return whole[len(opening) :]
        return self._encoder.encode(parts, glued=True)[0]

    # from the template's text to parts

    def _trusted(self, text: str) -> Iterator[Part]:
        for piece in split(self._soft, text):
            yield self._encoder.controls[piece] if self._soft.fullmatch(piece) else piece

    def _scan(self, text: str, marks: Marks) -> Iterator[Part]:
        """The template's control tokens, and text."""
        for piece in split(re.compile(f"{self._encoder.pattern.pattern}|{marks.pattern}"), text):
            if piece in marks.values:
                content, trusted = marks.values[piece]
                yield from self._trusted(content) if trusted else (content,)
            else:
                yield self._encoder.controls.get(piece, piece)


def _clock(day: date) -> str:
    """A macro in place of transformers' ``strftime_now``; the line break behind it is no part of the text."""
    parts = {f"%{letter}": day.strftime(f"%{letter}").strip() for letter in "aAbBdeHIjmMpSuUVwWyYFDT"}
    bare = {f"%-{name[1]}": text.lstrip("0") or "0" for name, text in parts.items() if text.isdigit()}
    chain = "".join(f"|replace({name!r}, {text!r})" for name, text in {**bare, **parts, "%%": "%"}.items())
    return f"{{% macro strftime_now(format) %}}{{{{ format{chain} }}}}{{% endmacro %}}\n"


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


def clean_message(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    """A message without None, its content one string and its call arguments objects, or a sentence of what is wrong."""
    row = {key: value for key, value in message.items() if value is not None}
    calls, old = row.pop("tool_calls", None), row.pop("function_call", None)  # OpenAI's form of today, and before it
    role, content = row.get("role"), row.get("content")
    if calls := calls or [old] * bool(old):
        if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
            raise ValueError(f"message {index} has tool_calls {calls!r:.60}; expected a list of objects")
        row["tool_calls"] = [_clean_call(call) for call in calls]
    if content is None and (calls or any(row.get(key) for key in THOUGHTS)):
        content = ""
    if isinstance(content, list) and all(isinstance(part, Mapping) for part in content):
        parts = [(part.get("type"), part.get(part.get("type"))) for part in content]
        if all(kind in ("text", "thinking") and isinstance(text, str) for kind, text in parts):
            thoughts = "\n".join(text for kind, text in parts if kind == "thinking")
            row |= {"thinking": thoughts} if thoughts else {}
            content = "".join(text for kind, text in parts if kind == "text")
    if not isinstance(role, str) or not isinstance(content, str):
        raise ValueError(
            f"message {index} has role {role!r} and a content of type {type(content).__name__}; both must be strings"
        )
    return {**row, "role": "tool" if role == "function" else role, "content": valid(content)}


def _clean_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments written as a JSON string would be quoted twice by Qwen2.5's template."""
    function = dict(call.get("function") or call)
    if isinstance(function.get("arguments"), str):
        try:
            function["arguments"] = json.loads(function["arguments"])
        except ValueError:
            pass  # the policy's own words, shown as they are
    return {"type": "function", **({"id": call["id"]} if call.get("id") else {}), "function": function}


def _named(call: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in call["function"].items() if key in ("name", "arguments")}


def _quoted(call: Mapping[str, Any]) -> dict[str, Any]:
    """A call for templates that take the arguments as JSON text."""
    arguments = call["function"].get("arguments", {})
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**call["function"], "arguments": text}}


def check_message(index: int, message: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` where a demonstration's message holds what no template would show, or a broken call."""
    role, row = message.get("role"), clean_message(index, message)
    known = {"role", "content", "name", "id", "tool_call_id"}
    known |= {"tool_calls", "function_call", *THOUGHTS} if role == "assistant" else set()
    for key, value in message.items():
        if key not in known and value not in (None, "", [], {}):
            raise ValueError(
                f"message {index} holds {key!r}, which would be lost; remove it or write it into the content"
            )
    thoughts = {row[key] for key in THOUGHTS if isinstance(row.get(key, ""), str) and row.get(key)}
    if len(thoughts) > 1 or not all(isinstance(row.get(key, ""), str) for key in THOUGHTS):
        raise ValueError(f"message {index} holds several thoughts, or one that is not text; give one text")
    for call in row.get("tool_calls", ()):
        name, arguments = call["function"].get("name"), call["function"].get("arguments", {})
        if not isinstance(name, str) or not name.strip() or not isinstance(arguments, dict):
            raise ValueError(
                f"message {index} calls {name!r:.60} with {arguments!r:.60}; expected a name and an object"
            )


def _leaves(row: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """What a message says, each with its name: content, thought, names and arguments of calls."""
    yield from ((key, row[key]) for key in ("content", *THOUGHTS) if row.get(key))
    waiting = [("a call's", _named(call)) for call in row.get("tool_calls", ())]
    for name, value in waiting:  # grows as it is read
        if isinstance(value, Mapping):
            waiting += [("the argument", key) for key in value if key not in ("name", "arguments")]
            waiting += [(f"{name} {key}", item) for key, item in value.items()]
        elif isinstance(value, list):
            waiting += [(name, item) for item in value]
        else:
            yield name, value


def _tells(text: str, value: Any) -> bool:
    """Whether a text holds a value in any usual spelling, white space aside."""
    spellings = (str(value), repr(value), json.dumps(value), json.dumps(value, ensure_ascii=False))
    whole = "".join(text.split())
    quotes = isinstance(value, str)
    return any(
        "".join(form[i > 0 and quotes : len(form) - (i > 0 and quotes)].split()) in whole
        for i, form in enumerate(spellings)
    )
