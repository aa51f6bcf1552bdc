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
from agentr1_lite.views.theme import Html, esc, part
from agentr1_lite.views.tokens import ALIASES, BYTES, SOURCES, TokenTable, as_trajectory, runs, token_table

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
    low: float
    high: float

    @classmethod
    def of(cls, name: str, values: Collection[float]) -> Scale:
        q = QUANTITIES.get(name, Quantity(name.replace("_", " ")))
        low, high = min(values, default=0.0), max(values, default=0.0)
        kind = q.kind or ("signed" if low < 0 else "size")
        span = max(abs(low - q.centre), abs(high - q.centre), q.floor) or 1.0
        return cls(name, q.label, q.unit, kind, q.centre, span, low, high)

    def look(self, value: float | None) -> tuple[str, float]:
        """CSS class (p positive, n negative, z size, none) and strength in [0, 1]."""
        level = 0.0 if value is None else (value - self.centre) / self.span
        if abs(level) < 0.005:
            return "", 0.0
        return ("z" if self.kind == "size" else "p" if level > 0 else "n"), min(1.0, abs(level))

    def legend(self) -> str:
        """The scale as HTML: a bar with its ends, and how signs are marked."""
        unit = f" {self.unit}" if self.unit else ""
        if self.kind == "source":
            keys = "".join(f'<span class="t s{name[0]}">{name}</span> ' for name in SOURCES)
            return f"who wrote the token: {keys}"
        if self.name.endswith("mask"):
            return '<span class="t z" style="--m:1">1</span> in the mask, <span class="t">0</span> outside it'
        if self.kind == "size":
            negative = self.low < 0
            end = -self.span if negative else self.span
            says = " (likely) … unlikely" if negative else ""
            return f'0{says}<i class="bar size"></i>{number(end)}{unit}'
        low, high = self.centre - self.span, self.centre + self.span
        return (
            f'{number(low)}<i class="bar signed"></i>{number(high)}{unit}, {number(self.centre)} in the middle; '
            '<span class="t n" style="--m:.7">below: dotted</span> <span class="t p" style="--m:.7">above: solid</span>'
        )


def number(x: float) -> str:
    """Four significant digits, with a true minus sign."""
    return f"{x:.4g}".replace("-", "−")


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
        self.color_by = color_by
        self.drawn: list[tuple[TokenTable, int]] = []

    def tokens(self, table: TokenTable, start: int, end: int, marked: Collection[int] = ()) -> str:
        """The tokens of a span as spans; ``marked`` ones are outlined as different."""
        out, scale = [], self.scales[self.color_by]
        values = table.quantities.get(self.color_by)
        for t in range(start, end):
            name, strength = scale.look(values[t]) if values else ("", 0.0)
            text = table.pieces[t]
            if t == start and text.startswith("\n"):  # an empty first line would be nothing to point at
                text = text.lstrip("\n").rjust(len(text), "↵")
            kinds = ["t", "s" + table.source[t][0] if scale.kind == "source" else name]
            kinds += ["x"] * table.special[t] + ["seam"] * (table.source[t] == "seam") + ["d"] * (t in marked)
            style = f' style="--m:{strength:.2f}"' if name else ""
            out.append(f'<span class="{" ".join(filter(None, kinds))}"{style}>{esc(text)}</span>')
            self.drawn.append((table, t))
        return "".join(out)

    def close(self, body: str, *, head: str = "", key: str = "") -> str:
        """The whole view: head, selector, legend, the drawn body, the line of details, and the data."""
        chosen = ((f'<option value="{esc(n)}"{" selected" * (n == self.color_by)}>{esc(s.label)}</option>')
                  for n, s in self.scales.items())  # fmt: skip
        legends = "".join(
            f'<p class="legend" data-q="{esc(n)}"{"" if n == self.color_by else " hidden"}>{s.legend()}</p>'
            for n, s in self.scales.items()
        )
        data = {
            "ids": [table.ids[t] for table, t in self.drawn],
            "t": [t for _, t in self.drawn],
            "turn": [table.turn[t] for table, t in self.drawn],
            "source": "".join(table.source[t][0] for table, t in self.drawn),
            "q": {
                visible(n): {
                    "label": visible(s.label),
                    "unit": visible(s.unit),
                    "kind": s.kind,
                    "centre": s.centre,
                    "span": s.span,
                    "v": [] if n == "source" else [
                        None if (v := table.quantities.get(n)) is None or v[t] is None else float(f"{v[t]:.4g}")
                        for table, t in self.drawn
                    ],
                }
                for n, s in self.scales.items()
            },
        }  # fmt: skip
        packed = json.dumps(data, separators=(",", ":"), ensure_ascii=True).replace("<", "\\u003c")
        return (
            f'<div class="ar1-view">{head}<div class="tools"><label>Colour by '
            f"<select>{''.join(chosen)}</select></label><span>{key}</span>"
            '<label><input type="checkbox" class="blank"> show spaces</label>'
            '<span class="keys">←→ token, ↑↓ turn</span></div>'
            f'{legends}<div class="flow">{body}</div><div class="info" role="status"></div>'
            f'<script type="application/json">{packed}</script></div>'
        )


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


def block(
    sheet: Sheet,
    trajectory: Trajectory,
    table: TokenTable,
    place: tuple[int, int, int, int],
    marked: Collection[int] = (),
) -> str:
    """HTML of one of `TokenTable.blocks`: a turn with the reply to it, or a segment's prompt."""
    _, index, start, end = place
    if index < 0:
        return _prompt(sheet, table, start, end, marked, len(trajectory.segments))
    return _turn(sheet, trajectory.turns[index], index, table, start, end, marked)


def _row(kind: str, label: str, body: str) -> str:
    return f'<div class="row {kind}"><i>{esc(label)}</i><p>{body}</p></div>'


def _prompt(sheet: Sheet, table: TokenTable, start: int, end: int, marked: Collection[int], contexts: int) -> str:
    name = f"Context {table.segment[start] + 1}, prompt" if contexts > 1 else "Prompt"
    rows = _row("prompt", "prompt", sheet.tokens(table, start, end, marked))
    return (
        f'<details class="turn"{" open" if end - start <= 60 else ""}><summary><b>{name}</b> '
        f'<span class="note">{end - start} tokens</span></summary>{rows}</details>'
    )


def _turn(
    sheet: Sheet, turn: Turn, index: int, table: TokenTable, start: int, end: int, marked: Collection[int]
) -> str:
    rows, acted = [], 0
    names = ["" if table.source[t] == "action" else "reply" for t in range(start, end)]
    for a, b in runs(names):
        if names[a]:
            rows.append(_row("reply", "reply", sheet.tokens(table, start + a, start + b, marked)))
            continue
        acted += b - a
        parts = labels(table, start + a, start + b, turn.kind)
        for c, d in runs(parts):
            kind = "agent" + " forged" * (parts[c] == "forged reply")
            rows.append(_row(kind, parts[c], sheet.tokens(table, start + a + c, start + a + d, marked)))
    if turn.text and (not acted or not table.has_text or any(map(BYTES.fullmatch, table.pieces[start:end]))):
        rows.insert(0, _row("agent words", "as text", esc(turn.text)))
    if turn.observation and turn.observation_end == turn.observation_start:
        rows.append(_row("reply words", "reply", esc(turn.observation)))
        rows.append('<p class="note">the episode was over: this reply never became tokens</p>')
    chips = [f'<span class="chip">process reward {number(turn.process_reward)}</span>'] * bool(turn.process_reward)
    chips += [f'<span class="chip bad">{esc(flag)}</span>' for flag in turn.flags]
    if turn.finish_reason not in ("stop", ""):
        chips.append(f'<span class="chip">ended by {esc(turn.finish_reason)}</span>')
    kind = TurnKind(turn.kind).value.replace("_", " ")
    return (
        f'<details class="turn" open><summary><b>Turn {index + 1}</b> <span class="note">{kind}, {acted} sampled, '
        f"{end - start - acted} fed</span> {' '.join(chips)}</summary>{''.join(rows)}</details>"
    )


def heading(title: str) -> str:
    return f"<h4>{esc(title)}</h4>" if title else ""


def asked(trajectory: Trajectory) -> str:
    return f'<p class="ask">{esc(trajectory.question)}</p>'


def facts(trajectory: Trajectory, ask: bool = True) -> str:
    """Question, answer and outcome of an episode in two lines."""
    parts = ", ".join(f"{esc(k)} {number(v)}" for k, v in trajectory.reward_parts.items())
    said = "no answer" if trajectory.answer is None else esc(trajectory.answer)
    right = f", right: {esc(' or '.join(map(str, trajectory.golds)))}" if trajectory.golds else ""
    stop = trajectory.stop_reason.value.replace("_", " ")
    earned = f"reward {number(trajectory.total_reward)}{f' ({parts})' if parts else ''}"
    if not trajectory.golds and not trajectory.total_reward and trajectory.reward_parts.keys() <= OF_THE_ANSWER:
        earned = "not scored, no right answer is known"
    return (
        f'{asked(trajectory) * ask}<p class="note">{earned}'
        f" · stopped by {stop} · answer: <bdi>{said}</bdi>"
        f"<bdi>{right}</bdi> · {trajectory.num_tokens} tokens, {trajectory.num_actions} sampled</p>"
    )


def view_html(
    trajectory: Trajectory, color_by: str, tokenizer: Any, quantities: Mapping[str, Any] | None, title: str = ""
) -> str:
    """The viewer without its frame: for pages that hold several."""
    table = token_table(trajectory, tokenizer, quantities)
    sheet = Sheet([table], color_by)
    body = "".join(block(sheet, trajectory, table, place) for place in table.blocks())
    head = heading(title) + facts(trajectory)
    return sheet.close(body or '<p class="note">This trajectory holds no token.</p>', head=head)


def trajectory_html(
    trajectory: Any,
    color_by: str = "advantage",
    *,
    tokenizer: Any = None,
    quantities: Mapping[str, Any] | None = None,
    title: str = "",
    index: int = 0,
    id: str | None = None,
) -> str:
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


def show_trajectory(trajectory: Any, color_by: str = "advantage", **options: Any) -> Html:
    """`trajectory_html` for a notebook."""
    return Html(trajectory_html(trajectory, color_by, **options), "a trajectory, token by token")
