"""Two trajectories side by side, or one under two estimators: aligned by turn, differences marked."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import SequenceMatcher
from typing import Any

from agentr1_lite.views.theme import esc, part
from agentr1_lite.views.tokens import TokenTable, as_trajectory, token_table
from agentr1_lite.views.trajectory import Scale, Sheet, asked, block, facts, heading

NOTABLE = 0.02  # share of the scale from which on two numbers are called different
Spans = dict[tuple[int, int], tuple[int, int]]


def compare_html(
    left: Any,
    right: Any,
    *,
    color_by: str = "advantage",
    labels: tuple[str, str] = ("left", "right"),
    tokenizer: Any = None,
    quantities: tuple[Mapping[str, Any] | None, Mapping[str, Any] | None] = (None, None),
    title: str = "",
) -> str:
    """A page part with both, on one colour scale.

    Where a turn's tokens differ, the differing ones are outlined. Where they are the same (one trajectory, two
    estimators), those whose ``color_by`` differs by more than 2 % of the scale are.

    Args:
        left, right: trajectories, or what `as_trajectory` reads. quantities: one mapping a side, see `token_table`.
    """
    sides = [as_trajectory(x, 0, tokenizer) for x in (left, right)]
    tables = [token_table(t, tokenizer, q) for t, q in zip(sides, quantities, strict=True)]
    sheet = Sheet(tables, color_by)
    spans = [_spans(table) for table in tables]
    marked: tuple[set[int], set[int]] = (set(), set())
    notes: dict[tuple[int, int], str] = {}
    places = sorted({*spans[0], *spans[1]})
    for place in places:
        notes[place] = _mark(tables, [s.get(place, (0, 0)) for s in spans], sheet.scales[sheet.color_by], marked)
    body = []
    for place in places:
        cells = []
        for side, table, own, marks, label in zip(sides, tables, spans, marked, labels, strict=True):
            none = '<p class="note">no such turn</p>'
            drawn = block(sheet, side, table, (*place, *own[place]), marks) if place in own else none
            cells.append(f'<div data-side="{esc(label)}, "><p class="side">{esc(label)}</p>{drawn}</div>')
        body.append(f'<div class="pair">{"".join(cells)}</div><p class="note">{notes[place]}</p>')
    one = sides[0].question == sides[1].question
    heads = "".join(
        f"<div><h4>{esc(label)}</h4>{facts(side, ask=not one)}</div>" for label, side in zip(labels, sides, strict=True)
    )
    head = heading(title) + (asked(sides[0]) if one else "")
    head += f'<div class="pair">{heads}</div>'
    view = sheet.close("".join(body), head=head, key='<span class="t d">line above</span>: differs')
    return part(view, script=True, kind="wide", label=title or " and ".join(labels))


def _spans(table: TokenTable) -> Spans:
    return {(segment, turn): (a, b) for segment, turn, a, b in table.blocks()}


def _mark(
    tables: list[TokenTable], spans: list[tuple[int, int]], scale: Scale, marked: tuple[set[int], set[int]]
) -> str:
    """Put the differing tokens of one turn into ``marked``; returns the sentence under the pair."""
    (a, b), (c, d) = spans
    ids = tables[0].ids[a:b], tables[1].ids[c:d]
    if not any(ids):
        return "no tokens"
    if ids[0] != ids[1]:
        found = [o for o in SequenceMatcher(None, *ids, autojunk=False).get_opcodes() if o[0] != "equal"]
        for _, i, j, k, m in found:
            marked[0].update(range(a + i, a + j))
            marked[1].update(range(c + k, c + m))
        sizes = (sum(o[2] - o[1] for o in found), sum(o[4] - o[3] for o in found))
        return f"different tokens: {sizes[0]} of {b - a} and {sizes[1]} of {d - c}"
    numbers = [t.quantities.get(scale.name, [None] * len(t)) for t in tables]
    pairs = [(numbers[0][a + i], numbers[1][c + i]) for i in range(b - a)]
    differ = [i for i, (x, y) in enumerate(pairs) if _notable(x, y, scale.span)]
    marked[0].update(a + i for i in differ)
    marked[1].update(c + i for i in differ)
    signs = sum(x is not None and y is not None and x * y < 0 for x, y in pairs)
    flips = f", {signs} in sign" if signs else ""
    return f"same tokens; {esc(scale.label)} differs on {len(differ)} of {b - a}{flips}" if differ else "the same"


def _notable(x: float | None, y: float | None, span: float) -> bool:
    return (x is None) != (y is None) or x is not None and y is not None and abs(x - y) > NOTABLE * span
