"""Two trajectories side by side, or one under two estimators: aligned by turn, differences marked."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import SequenceMatcher
from typing import Any

from agentr1_lite.views.reading import as_trajectory
from agentr1_lite.views.theme import Html, part, templates
from agentr1_lite.views.tokens import TokenTable, token_table
from agentr1_lite.views.trajectory import Scale, Sheet, block, facts

NOTABLE = 0.02  # share of the scale from which on two numbers are called different


def compare_html(
    left: Any,
    right: Any,
    *,
    color_by: str = "advantage",
    labels: tuple[str, str] = ("left", "right"),
    tokenizer: Any = None,
    quantities: tuple[Mapping[str, Any] | None, Mapping[str, Any] | None] = (None, None),
    title: str = "",
) -> Html:
    """A page part with both, on one colour scale.

    Where a turn's tokens differ, the differing ones are outlined. Where they are the same (one trajectory, two
    estimators), those whose ``color_by`` differs by more than 2 % of the scale are.

    Args:
        left, right: trajectories, or what `as_trajectory` reads. quantities: one mapping a side, see `token_table`.
    """
    sides = [as_trajectory(x, 0, tokenizer) for x in (left, right)]
    tables = [token_table(t, tokenizer, q) for t, q in zip(sides, quantities, strict=True)]
    sheet = Sheet(tables, color_by)
    spans = [{(segment, turn): (a, b) for segment, turn, a, b in table.blocks()} for table in tables]
    places = []
    for place in sorted({*spans[0], *spans[1]}):
        *marked, note = _differing(tables, [own.get(place, (0, 0)) for own in spans], sheet.scale)
        blocks = [
            block(sheet, side, table, (*place, *own[place]), marks) if place in own else None
            for side, table, own, marks in zip(sides, tables, spans, marked, strict=True)
        ]
        places.append((blocks, note))
    one = sides[0].question if sides[0].question == sides[1].question else ""
    said = [(label, facts(side, ask=not one)) for label, side in zip(labels, sides, strict=True)]
    head = templates().compare_head(title, said, one)
    key = '<span class="t d">line above</span>: differs'
    view = sheet.close(templates().compare(labels, places), head=head, key=key)
    return part(view, script=True, kind="wide", label=title or " and ".join(labels))


def _differing(tables: list[TokenTable], spans: list[tuple[int, int]], scale: Scale) -> tuple[set[int], set[int], str]:
    """The differing tokens of one turn, left and right, and the sentence under the pair."""
    (a, b), (c, d) = spans
    ids = tables[0].ids[a:b], tables[1].ids[c:d]
    if not any(ids):
        return set(), set(), "no tokens"
    if ids[0] != ids[1]:
        found = [o for o in SequenceMatcher(None, *ids, autojunk=False).get_opcodes() if o[0] != "equal"]
        left = {a + i for _, start, end, _, _ in found for i in range(start, end)}
        right = {c + i for _, _, _, start, end in found for i in range(start, end)}
        return left, right, f"different tokens: {len(left)} of {b - a} and {len(right)} of {d - c}"
    pairs = [(tables[0].value(scale.name, a + i), tables[1].value(scale.name, c + i)) for i in range(b - a)]
    differ = [i for i, (x, y) in enumerate(pairs) if _notable(x, y, scale.span)]
    signs = sum(x is not None and y is not None and x * y < 0 for x, y in pairs)
    flips = f", {signs} in sign" if signs else ""
    note = f"same tokens; {scale.label} differs on {len(differ)} of {b - a}{flips}" if differ else "the same"
    return {a + i for i in differ}, {c + i for i in differ}, note


def _notable(x: float | None, y: float | None, span: float) -> bool:
    return (x is None) != (y is None) or x is not None and y is not None and abs(x - y) > NOTABLE * span
