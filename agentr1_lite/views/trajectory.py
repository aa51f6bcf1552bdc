"""The trajectory viewer: every token of an episode, coloured by a number of your choice.

The page part holds all it needs. Without its script it still reads as a coloured text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from agentr1_lite.escape import visible
from agentr1_lite.mdp import Trajectory, Turn, TurnKind
from agentr1_lite.views.reading import BYTES, as_trajectory
from agentr1_lite.views.theme import Html, part, templates
from agentr1_lite.views.tokens import ALIASES, SOURCES, Place, TokenTable, runs, token_table

OF_THE_ANSWER = {"em", "f1", "cover_em"}  # reward parts that compare an answer with the right ones


class Quantity(NamedTuple):
    """How a number is named and drawn: ``signed`` around ``centre``, ``size`` from 0, ``source`` by name.

    The full colour stands for at least ``floor``, so that numbers next to nothing stay pale.
    """

    label: str
    unit: str = ""
    kind: str = ""  # "": signed if there is a negative value, else size
    centre: float = 0.0
    floor: float = 0.0


QUANTITIES: dict[str, Quantity] = {
    "source": Quantity("source", kind="source"),
    "action_mask": Quantity("action mask", kind="size"),
    "loss_mask": Quantity("loss mask", kind="size"),
    "reward": Quantity("reward", kind="signed"),
    "return": Quantity("return", kind="signed"),
    "advantage": Quantity("advantage", kind="signed"),
    "loss": Quantity("loss contribution", kind="signed"),
    "sampled_logprob": Quantity("log-prob when sampled", "nats", "size", floor=1.0),
    "old_logprob": Quantity("log-prob before the update", "nats", "size", floor=1.0),
    "logprob": Quantity("log-prob now", "nats", "size", floor=1.0),
    "ref_logprob": Quantity("log-prob of the reference", "nats", "size", floor=1.0),
    "ratio": Quantity("ratio", kind="signed", centre=1.0),
    "kl": Quantity("KL to the reference", "nats", floor=0.1),
    "value": Quantity("value", kind="signed"),
    "entropy": Quantity("entropy", "nats", "size", floor=1.0),
}


class Scale(NamedTuple):
    """What turns a number into a strength of colour: (x − centre) / span, in [−1, 1]."""

    name: str
    label: str
    unit: str
    kind: str
    centre: float
    span: float
    negative: bool

    @classmethod
    def of(cls, name: str, values: Collection[float]) -> Scale:
        q = QUANTITIES.get(name, Quantity(name.replace("_", " ")))
        low, high = min(values, default=0.0), max(values, default=0.0)
        kind = q.kind or ("signed" if low < 0 else "size")
        span = max(abs(low - q.centre), abs(high - q.centre), q.floor) or 1.0
        return cls(name, q.label, q.unit, kind, q.centre, span, low < 0)

    def look(self, value: float | None) -> tuple[str, float]:
        """CSS class (p positive, n negative, z size, none) and strength in [0, 1]."""
        level = 0.0 if value is None else (value - self.centre) / self.span
        if abs(level) < 0.005:
            return "", 0.0
        return ("z" if self.kind == "size" else "p" if level > 0 else "n"), min(1.0, abs(level))

    def legend(self) -> str:
        """The scale as HTML: a bar with its ends, and how signs are marked."""
        return templates().legend(self, SOURCES)


class Token(NamedTuple):
    """A token as it is drawn: CSS classes, strength of its colour, text."""

    kind: str
    text: str
    strength: float = 0.0


class Row(NamedTuple):
    """What one side wrote in a turn, as tokens or as plain text, with a word in the margin."""

    kind: str
    label: str
    tokens: Sequence[Token] = ()
    text: str = ""


class Block(NamedTuple):
    """A turn with the reply to it, or a segment's prompt: what folds in a view."""

    name: str
    note: str
    rows: list[Row]
    open: bool = True
    reward: float = 0.0
    flags: Sequence[str] = ()
    ended: str = ""
    late: bool = False


class Sheet:
    """Tokens drawn one after the other, from one or more tables, under one selector and legend."""

    def __init__(self, tables: Sequence[TokenTable], color_by: str) -> None:
        names = dict.fromkeys(name for table in tables for name in table.quantities)
        order = [n for n in QUANTITIES if n in names or n == "source"] + [n for n in names if n not in QUANTITIES]
        self.scales = {
            n: Scale.of(n, [x for t in tables for x in t.quantities.get(n, ()) if x is not None]) for n in order
        }
        color_by = ALIASES.get(color_by, color_by)
        if color_by not in self.scales and color_by in QUANTITIES:
            color_by = "sampled_logprob" if color_by == "logprob" and "sampled_logprob" in names else "source"
        if color_by not in self.scales:
            raise ValueError(f"there is no quantity {color_by!r} to colour by; choose one of {', '.join(order)}")
        self.scale = self.scales[color_by]
        self.drawn: list[tuple[TokenTable, int]] = []

    def tokens(self, table: TokenTable, start: int, end: int, marked: Collection[int] = ()) -> list[Token]:
        """The tokens of a span, in the order in which they will stand; ``marked`` ones are outlined as different."""
        out = []
        for t in range(start, end):
            kind, strength = self.scale.look(table.value(self.scale.name, t))
            text = table.pieces[t]
            if t == start and text.startswith("\n"):  # an empty first line would be nothing to point at
                text = text.lstrip("\n").rjust(len(text), "↵")
            kinds = ["t", "s" + table.source[t][0] if self.scale.kind == "source" else kind]
            kinds += ["x"] * table.special[t] + ["seam"] * (table.source[t] == "seam") + ["d"] * (t in marked)
            out.append(Token(" ".join(filter(None, kinds)), text, strength))
            self.drawn.append((table, t))
        return out

    def close(self, body: str, *, head: str = "", key: str = "") -> Html:
        """The whole view: head, selector, legend, the drawn body, the line of details, and the data."""
        quantities = {}
        for name, scale in self.scales.items():
            values = [table.value(name, t) for table, t in self.drawn if scale.kind != "source"]
            quantities[visible(name)] = scale._asdict() | {
                "name": visible(name),
                "label": visible(scale.label),
                "v": [None if v is None else float(f"{v:.4g}") for v in values],
            }
        data = {
            "ids": [table.ids[t] for table, t in self.drawn],
            "t": [t for _, t in self.drawn],
            "turn": [table.turn[t] for table, t in self.drawn],
            "source": "".join(table.source[t][0] for table, t in self.drawn),
            "q": quantities,
        }
        packed = Html(json.dumps(data, separators=(",", ":"), ensure_ascii=True).replace("<", "\\u003c"))
        return templates().view(head, body, list(self.scales.values()), self.scale.name, packed, Html(key))


# Turns as blocks

_TAG = re.compile(r"<(/?)([a-zA-Z_]\w*)>")
_LABELS = {"think": "thought", "answer": "answer", "tool_response": "forged reply"}


def labels(table: TokenTable, start: int, end: int, kind: TurnKind) -> list[str]:
    """What each of a turn's own tokens belongs to: thought, call, answer, a reply the policy forged, or text."""
    text = "".join(table.pieces[start:end])
    spans: list[tuple[int, int, str]] = []
    at = 0
    while found := _TAG.search(text, at):
        at = found.end()
        if found[1]:
            continue
        close = text.find(f"</{found[2]}>", at)
        if close < 0 and found[2] not in _LABELS and kind is not TurnKind.TOOL_CALL:
            continue
        at = len(text) if close < 0 else close + len(found[2]) + 3
        spans.append((found.start(), at, _LABELS.get(found[2], "call")))
    plain = "text" if kind is not TurnKind.TOOL_CALL or spans or table.has_text else "call"
    out, position = [], 0
    for t in range(start, end):
        first = position + len(table.pieces[t]) - len(table.pieces[t].lstrip())
        name = next((name for a, b, name in spans if a <= first < b), plain)
        if out and (table.special[t] or not table.pieces[t].strip()) and name == plain:
            name = out[-1]  # spaces and control tokens between two parts are no part of their own
        out.append(name)
        position += len(table.pieces[t])
    return out


def block(sheet: Sheet, trajectory: Trajectory, table: TokenTable, place: Place, marked: Collection[int] = ()) -> Block:
    """One of `TokenTable.blocks`, drawn: a turn with the reply to it, or a segment's prompt."""
    segment, index, start, end = place
    if index < 0:
        name = f"Context {segment + 1}, prompt" if len(trajectory.segments) > 1 else "Prompt"
        rows = [Row("prompt", "prompt", sheet.tokens(table, start, end, marked))]
        return Block(name, f"{end - start} tokens", rows, open=end - start <= 60)
    turn = trajectory.turns[index]
    names, acted = ["reply"] * (end - start), 0
    for a, b in runs([table.source[t] == "action" for t in range(start, end)]):
        if table.source[start + a] == "action":
            names[a:b] = labels(table, start + a, start + b, turn.kind)
            acted += b - a
    rows = []
    for a, b in runs(names):
        kind = {"reply": "reply", "forged reply": "agent forged"}.get(names[a], "agent")
        rows.append(Row(kind, names[a], sheet.tokens(table, start + a, start + b, marked)))
    if turn.text and (not acted or not table.has_text or any(map(BYTES.fullmatch, table.pieces[start:end]))):
        rows.insert(0, Row("agent words", "as text", text=turn.text))
    late = bool(turn.observation) and turn.observation_end == turn.observation_start
    if late:
        rows.append(Row("reply words", "reply", text=turn.observation))
    note = f"{turn_kind(turn)}, {acted} sampled, {end - start - acted} fed"
    ended = "" if turn.finish_reason == "stop" else turn.finish_reason
    return Block(f"Turn {index + 1}", note, rows, True, turn.process_reward, turn.flags, ended, late)


def turn_kind(turn: Turn) -> str:
    return TurnKind(turn.kind).value.replace("_", " ")


def facts(trajectory: Trajectory, ask: bool = True) -> str:
    """Question, answer and outcome of an episode in two lines."""
    t = trajectory
    scored = bool(t.golds or t.total_reward) or not t.reward_parts.keys() <= OF_THE_ANSWER
    return templates().facts(t, scored, ask)


def view_html(
    trajectory: Trajectory, color_by: str, tokenizer: Any, quantities: Mapping[str, Any] | None, title: str = ""
) -> str:
    """The viewer without its frame: for pages that hold several."""
    table = token_table(trajectory, tokenizer, quantities)
    sheet = Sheet([table], color_by)
    blocks = [block(sheet, trajectory, table, place) for place in table.blocks()]
    return sheet.close(templates().trajectory(blocks), head=templates().heading(title) + facts(trajectory))


def trajectory_html(
    trajectory: Any,
    color_by: str = "advantage",
    *,
    tokenizer: Any = None,
    quantities: Mapping[str, Any] | None = None,
    title: str = "",
    index: int = 0,
    id: str | None = None,
) -> Html:
    """A self-contained page part that shows a trajectory token by token.

    Args:
        trajectory: a `Trajectory`, a JSONL file (row ``index``) or a list of messages.
        color_by: a key of `QUANTITIES` or of ``quantities``; where it is not known for this trajectory, the source.
        tokenizer, quantities: see `token_table`. title: a heading. id: of the outer element.

    Raises:
        ValueError: naming field and place where the trajectory or a quantity is inconsistent.
    """
    trajectory = as_trajectory(trajectory, index, tokenizer)
    body = view_html(trajectory, color_by, tokenizer, quantities, title)
    return part(body, script=True, label=title or f"Trajectory: {trajectory.question}", id=id)


show_trajectory = trajectory_html
