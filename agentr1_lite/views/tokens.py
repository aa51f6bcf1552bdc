"""One trajectory as a table of tokens: what each says, who wrote it, in which turn, and its numbers.

The views draw this table and nothing else, so everything they need is checked here.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

from agentr1_lite.foreign import encode_foreign
from agentr1_lite.jsonl import read_numbered
from agentr1_lite.mdp import Segment, StopReason, Trajectory, Turn, TurnKind

SOURCES = ("prompt", "action", "seam", "observation")
Numbers = list[float | None]
ALIASES = {
    "mask": "action_mask",
    "advantages": "advantage",
    "returns": "return",
    "rewards": "reward",
    "values": "value",
    "logprobs": "logprob",
    "old_logprobs": "old_logprob",
    "ref_logprobs": "ref_logprob",
    "entropies": "entropy",
    "ratios": "ratio",
}


@dataclass(frozen=True)
class TokenTable:
    """T tokens of a trajectory, its segments one after the other; every list has T entries.

    Attributes:
        pieces: the text of each token alone; bytes that are no whole character as ``⟨F0 9F⟩``.
        special: True where the tokenizer holds the token as a control token.
        source: one of `SOURCES`; "action" exactly where the action mask is True.
        turn: index of the turn, −1 before a segment's first turn.
        quantities: numbers by name, None where there is none; "action_mask" is always there.
        empty: turns that hold no token, as `blocks` gives them.
    """

    ids: list[int]
    pieces: list[str]
    special: list[bool]
    source: list[str]
    turn: list[int]
    segment: list[int]
    quantities: dict[str, Numbers] = field(default_factory=dict)
    has_text: bool = True
    empty: list[tuple[int, int, int, int]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.ids)

    def turns(self) -> list[tuple[int, int]]:
        """Half-open spans of tokens with one segment and one turn, in order."""
        return runs(list(zip(self.segment, self.turn, strict=True)))

    def blocks(self) -> list[tuple[int, int, int, int]]:
        """(segment, turn, start, end) of every prompt and turn in order; start = end where it holds no token."""
        held = [(self.segment[a], self.turn[a], a, b) for a, b in self.turns()]
        return sorted(held + self.empty, key=lambda block: (block[0], block[2], block[1]))


def runs(keys: Sequence[Any]) -> list[tuple[int, int]]:
    """Half-open spans of equal neighbours."""
    edges = [0, *(i for i in range(1, len(keys)) if keys[i] != keys[i - 1]), len(keys)]
    return [(a, b) for a, b in zip(edges, edges[1:], strict=False) if b > a]


def token_table(
    trajectory: Any, tokenizer: Any = None, quantities: Mapping[str, Any] | None = None, *, index: int = 0
) -> TokenTable:
    """The table of a trajectory (or of anything `as_trajectory` reads).

    Args:
        tokenizer: a tokenizer, or a policy that has one. ``trajectory.info["pieces"]`` (a list of texts a segment)
            comes before it; without either the ids are shown.
        quantities: name → T numbers, flat or one list a segment; tensors of shape (T,) too; None where there is none.
            Ratio and KL are added where "logprob", and "ref_logprob", of the present policy are given.

    Raises:
        ValueError: naming the field and the place that is inconsistent.
    """
    tokenizer = _splitter(tokenizer)
    trajectory = as_trajectory(trajectory, index, tokenizer)
    trajectory.check()
    where = f"trajectory of task {trajectory.task_id!r}"
    ids = [i for s in trajectory.segments for i in s.token_ids]
    mask = [m for s in trajectory.segments for m in s.action_mask]
    source, turns, segments = _places(trajectory)
    pieces, special = _texts(trajectory, ids, tokenizer, where)
    given: dict[str, Any] = {"action_mask": [float(m) for m in mask]}
    given["sampled_logprob"] = [
        x if m else None for s in trajectory.segments for m, x in zip(s.action_mask, s.logprobs, strict=True)
    ]
    if not any(x for x in given["sampled_logprob"]):
        del given["sampled_logprob"]  # made by hand or imported: nobody measured them
    given["reward"] = trajectory.token_rewards()
    if not isinstance(quantities or {}, Mapping):
        raise ValueError(f"{where}: quantities is {type(quantities).__name__}; give numbers by name, as credit() does")
    given |= {ALIASES.get(name, name): values for name, values in (quantities or {}).items()}
    table = {name: _numbers(name, values, len(ids), where) for name, values in given.items()}
    _derive(table, mask)
    has_text = tokenizer is not None or "pieces" in trajectory.info
    firsts = list(accumulate((len(s) for s in trajectory.segments), initial=0))
    starts = {i: firsts[t.segment] + t.start for i, t in enumerate(trajectory.turns)}
    empty = [(trajectory.turns[i].segment, i, starts[i], starts[i]) for i in starts.keys() - set(turns)]
    return TokenTable(ids, pieces, special, source, turns, segments, table, has_text, empty)


def _places(trajectory: Trajectory) -> tuple[list[str], list[int], list[int]]:
    """Source, turn and segment of every token."""
    source, turns, segments = [], [], []
    for index, segment in enumerate(trajectory.segments):
        mine = sorted((t.start, t.end, i) for i, t in enumerate(trajectory.turns) if t.segment == index)
        seen = {
            t for turn in trajectory.turns if turn.segment == index
            for t in range(turn.observation_start, turn.observation_end)
        }  # fmt: skip
        now = -1
        for t, acted in enumerate(segment.action_mask):
            while mine and mine[0][0] <= t:
                now = mine.pop(0)[2]
            before = now < 0 and t < segment.prompt_length
            source.append("action" if acted else "observation" if t in seen else "prompt" if before else "seam")
            turns.append(now)
            segments.append(index)
    return source, turns, segments


def _texts(trajectory: Trajectory, ids: list[int], tokenizer: Any, where: str) -> tuple[list[str], list[bool]]:
    if "pieces" in trajectory.info:  # the ids of an imported conversation may be no tokenizer's
        pieces = [str(p) for p in flat(trajectory.info["pieces"]) or []]
        if len(pieces) != len(ids):
            raise ValueError(f"{where}: info['pieces'] holds {len(pieces)} texts for {len(ids)} tokens; give one each")
        return pieces, [False] * len(ids)
    if tokenizer is None:
        return [f"{i} " for i in ids], [False] * len(ids)
    known = {i: piece(tokenizer, i) for i in set(ids)}
    return [known[i][0] for i in ids], [known[i][1] for i in ids]


def _splitter(tokenizer: Any) -> Any:
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


def flat(values: Any) -> list[Any] | None:
    """The items of a list, a tensor, or a list of either; None of anything else."""
    values = values.tolist() if hasattr(values, "tolist") else values
    if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Iterable):
        return None
    out: list[Any] = []
    for x in values:
        x = x.tolist() if hasattr(x, "tolist") else x
        out += x if isinstance(x, (list, tuple)) else [x]
    return out


def is_finite(x: Any) -> bool:
    try:
        return isinstance(x, (int, float)) and math.isfinite(x)
    except OverflowError:  # a whole number beyond floats
        return False


def _numbers(name: str, given: Any, size: int, where: str) -> Numbers:
    """T numbers or None, from what `flat` reads; raises where one is not finite."""
    if (values := flat(given)) is None:
        raise ValueError(f"{where}: {name} is {type(given).__name__}; give a list with one number a token")
    if len(values) != size:
        raise ValueError(f"{where}: {name} has {len(values)} numbers for {size} tokens; give one each, or None")
    for t, x in enumerate(values):
        if x is not None and not is_finite(x):
            raise ValueError(
                f"{where}: {name} is {x!r:.60} at token {t}; give a finite number, or None where there is none"
            )
    return [None if x is None else float(x) for x in values]


def _derive(table: dict[str, Numbers], mask: list[bool]) -> None:
    """Add ρ = π/π_old and the k3 estimate of KL(π ‖ π_ref) where their log-probs are there."""
    now, old = table.get("logprob"), table.get("old_logprob", table.get("sampled_logprob"))
    wanted = [("ratio", old), ("kl", table.get("ref_logprob"))]
    if now is None or all(other is None or name in table for name, other in wanted):
        return
    import torch

    from agentr1_lite.losses import kl, policy_ratio

    for name, other in wanted:
        if other is None or name in table:
            continue
        there = [m and a is not None and b is not None for m, a, b in zip(mask, now, other, strict=True)]
        a, b = (torch.tensor([[x or 0.0 for x in side]], dtype=torch.float64) for side in (now, other))
        acted = torch.tensor([there])
        found = policy_ratio(a, b, acted) if name == "ratio" else kl(a, b, "k3", acted)
        table[name] = [x if m else None for x, m in zip(found[0].tolist(), there, strict=True)]


# Reading what other programs wrote


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


def from_messages(messages: Any, tokenizer: Any = None, *, reward: float = 0.0) -> Trajectory:
    """A conversation (TRL, verifiers, OpenAI) as a trajectory to look at; nothing in it was measured.

    Args:
        messages: a list of ``{"role", "content", "tool_calls"?, "reasoning_content"?}``, or a mapping that has it as
            "messages" or as "prompt" and "completion"; a "reward" beside them is kept.
        tokenizer: splits the texts; without it words stand for tokens.
    """
    got = f"{len(messages)} messages" if isinstance(messages, (list, tuple)) else type(messages).__name__
    if isinstance(messages, Mapping):
        got = f"a row with {', '.join(map(str, messages)) or 'nothing'}"
        reward = reward if messages.get("reward") is None else messages["reward"]
        messages = messages.get("messages") or [
            *_side(messages, "prompt", "user"), *_side(messages, "completion", "assistant")
        ]  # fmt: skip
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)) or not messages:
        raise ValueError(f"from_messages got {got}; give a list of messages, or a row that has it as messages")
    if not is_finite(reward):
        raise ValueError(f"the conversation's reward is {reward!r:.60}; give a finite number")
    tokenizer = _splitter(tokenizer)
    words: dict[str, int] = {}
    made = Trajectory("conversation", "conversation", [Segment()], reward=float(reward))
    segment, pieces = made.segments[0], []

    def add(text: str, acted: bool = False) -> tuple[int, int]:
        if tokenizer is not None:
            ids = encode_foreign(tokenizer, text)
            pieces.extend(piece(tokenizer, i)[0] for i in ids)
        else:
            found = re.findall(r"\s*(?:</?\w+>|[^\s<]+|<)|\s+$", text)
            ids = [words.setdefault(word, len(words)) for word in found]
            pieces.extend(found)
        return segment.extend(ids, [0.0] * len(ids) if acted else None)

    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(f"message {number} is {type(message).__name__} without a role; give role and content")
        text = _content(message.get("content"), f"message {number}")
        if message["role"] == "assistant":
            made.turns.append(_assistant(message, text, add, f"message {number}"))
        elif made.turns:
            turn = made.turns[-1]
            add(f"\n{message['role']}:\n")
            start, end = add(text)
            turn.observation_start = start if not turn.observation else turn.observation_start
            turn.observation_end = end
            turn.observation += text
        else:
            made.question = text if message["role"] == "user" else made.question
            add(f"{message['role']}:\n{text}\n")
    last = made.turns[-1] if made.turns else None
    if last is not None and last.kind is not TurnKind.TOOL_CALL:
        made.stop_reason = StopReason.ANSWER if last.kind is TurnKind.ANSWER else StopReason.NO_CALL
    made.info["pieces"] = [pieces]
    return made


def _side(row: Mapping[str, Any], name: str, role: str) -> list[Any]:
    """The prompt or the completion of a row as messages."""
    given = row.get(name)
    if given is None or isinstance(given, (list, tuple)):
        return list(given or ())
    if not isinstance(given, (str, Mapping)):
        raise ValueError(f"{name} is {type(given).__name__}; give a text or a list of messages")
    return [{"role": role, "content": given} if isinstance(given, str) else given]


def _content(content: Any, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else [content]
    out = []
    for i, p in enumerate(parts):
        said = (p.get("text") or f"[{p.get('type', 'part')}]") if isinstance(p, Mapping) else p
        if not isinstance(said, (str, int, float)) or said is not p and not isinstance(said, str):
            raise ValueError(f"{where}: part {i} of content is {type(said).__name__}, not a text; give it as a string")
        out.append(str(said))
    return "".join(out)


def _loads(text: Any) -> Any:
    """What a JSON string holds; anything else, and what cannot be read, as it is."""
    try:
        return json.loads(text) if isinstance(text, str) else text
    except (ValueError, RecursionError):
        return text


def _call(call: Any, where: str) -> dict[str, Any]:
    """Name and arguments of a tool call, an object or (verifiers) its JSON; the error of one that was cut off."""
    call = _loads(call)
    made = _loads(call.get("function", call)) if isinstance(call, Mapping) else call
    if isinstance(made, str) and not re.fullmatch(r"[\w./:-]+", made):
        return {"error": "malformed_json", "raw": made}
    if isinstance(made, str):
        made = {"name": made, "arguments": call.get("arguments") if isinstance(call, Mapping) else None}
    if not isinstance(made, Mapping):
        raise ValueError(f"{where} is {made!r:.60}; give an object with name and arguments")
    arguments = _loads({} if made.get("arguments") is None else made["arguments"])
    arguments = {"raw": arguments} if isinstance(arguments, str) else arguments
    return {"name": str(made.get("name", "")), "arguments": arguments}


def _assistant(message: Mapping[str, Any], text: str, add: Callable[..., tuple[int, int]], where: str) -> Turn:
    texts = [f"<think>{thought}</think>" for thought in [message.get("reasoning_content")] if thought]
    texts += [text] if text else []
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
    text = "\n".join(texts)
    broken = bool(calls) and all("error" in call for call in calls)
    called = TurnKind.INVALID if broken else TurnKind.TOOL_CALL if "<tool_call>" in text else TurnKind.TEXT
    kind = TurnKind.ANSWER if "<answer>" in text else called
    start, end = add(text, acted=True)
    return Turn(0, start, end, kind, text, calls, observation_start=end, observation_end=end)
