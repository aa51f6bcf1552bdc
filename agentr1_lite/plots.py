"""Pictures: inline SVG for pages, whose colours follow the page's theme, and one matplotlib figure.

Colours are told apart by people with any common colour blindness (after Okabe
and Ito) and always come with a word beside them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from agentr1_lite.escape import esc
from agentr1_lite.scoring import three_digits, with_interval

PHASES = ("base", "imitation", "offline", "online")
LABELS = {
    "base": "Before training",
    "imitation": "1 · Imitation",
    "offline": "2 · Offline RL",
    "online": "3 · Online RL",
    "closed_book": "Closed book",
    "naive_rag": "Naive RAG",
    "base_tool_call": "Base tool call",
    "scripted_expert": "Scripted expert",
}
# name: (on light, on dark)
COLORS = {
    "base": ("#7b8494", "#98a3b3"),
    "imitation": ("#13866a", "#4cc6a2"),
    "offline": ("#c4570f", "#f29a5c"),
    "online": ("#0b66b5", "#62b4f5"),
    "other": ("#9a8f7d", "#8d877c"),
    "answer": ("#0b66b5", "#62b4f5"),
    "no_call": ("#d7a31b", "#e8c04f"),
    "max_turns": ("#a8508a", "#d98abf"),
    "length": ("#c4570f", "#f29a5c"),
    "tool_error_limit": ("#13866a", "#4cc6a2"),
    "environment": ("#5fb0d8", "#9ad4ef"),
    "interrupted": ("#7b8494", "#98a3b3"),
}


class Estimate(NamedTuple):
    """A share with its interval, both in [0, 1]."""

    name: str
    mean: float
    low: float | None = None
    high: float | None = None

    @property
    def label(self) -> str:
        return LABELS.get(self.name, self.name.replace("_", " "))

    @property
    def text(self) -> str:
        known = self.low is not None and self.high is not None
        return with_interval(self.mean, (self.low, self.high) if known else None)


class Curve(NamedTuple):
    """One number over the steps of one phase (or one layer of a stack)."""

    name: str
    steps: Sequence[float]
    values: Sequence[float]


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """About ``count`` round numbers that cover [low, high]: steps of 1, 2 or 5 times a power of ten."""
    span = max(high - low, 1e-9 * max(abs(low), abs(high)), 1e-300)
    size = 10 ** math.floor(math.log10(span / count))
    step = min((m * size for m in (1, 2, 5, 10)), key=lambda s: abs(span / s - count))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, max(last, first + 1) + 1)]


def smooth(values: Sequence[float], window: float | None = None) -> list[float]:
    """Exponential moving average over about ``window`` values (a twelfth of them), unbiased at the start."""
    keep = 1 - 2 / (1 + max(1.0, len(values) / 12 if window is None else window))
    total, weight, out = 0.0, 0.0, []
    for value in values:
        total, weight = keep * total + value, keep * weight + 1
        out.append(total / weight)
    return out


def css_colors(mode: int) -> str:
    """The palette as CSS variables; ``mode`` 0 is light, 1 dark."""
    return "".join(f"--{name.replace('_', '-')}:{pair[mode]};" for name, pair in COLORS.items())


def _color(name: str) -> str:
    return f"var(--{(name if name in COLORS else 'other').replace('_', '-')})"


def _text(x: float, y: float, text: str, anchor: str = "start", kind: str = "tick", fill: str = "") -> str:
    style = f' style="fill:{fill}"' if fill else ""
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{style}>{esc(text)}</text>'


def _line(x: tuple[float, float], y: tuple[float, float], kind: str, color: str = "") -> str:
    stroke = f' stroke="{color}"' if color else ""
    return f'<line class="{kind}" x1="{x[0]:.1f}" x2="{x[1]:.1f}" y1="{y[0]:.1f}" y2="{y[1]:.1f}"{stroke}/>'


def _svg(width: float, height: float, label: str, parts: Sequence[str]) -> str:
    size = f'viewBox="0 0 {width:g} {height:g}"'
    return f'<svg {size} role="img" aria-label="{esc(label)}">{"".join(parts)}</svg>'


def svg_intervals(groups: Sequence[tuple[str, Sequence[Estimate]]], axis: str) -> str:
    """Estimates as dots with 95 % intervals, one row each, under a heading a group."""
    width, left, right, row = 720, 152, 164, 32
    span = width - left - right
    height = 34 + sum(26 + row * len(rows) for _, rows in groups) + 16
    parts = [_text(left + span / 2, height - 6, axis, "middle", "axis")]
    for i in range(6):
        x = left + span * i / 5
        parts += [_line((x, x), (6, height - 40), "grid"), _text(x, height - 24, f"{i / 5:g}", "middle")]
    top = 0.0
    for heading, rows in groups:
        parts.append(_text(0, top + 22, heading, kind="heading"))
        top += 26
        for e in rows:
            y, color = top + row / 2, _color(e.name)
            parts.append(f"<g><title>{esc(f'{e.label}: {e.text}')}</title>")
            parts.append(_text(12, y + 4, e.label, kind="label"))
            parts.append(_line((left, left + span * e.mean), (y, y), "stem", color))
            if e.low is not None:
                parts.append(_line((left + span * e.low, left + span * e.high), (y, y), "whisker", color))
            parts.append(f'<circle class="dot" cx="{left + span * e.mean:.1f}" cy="{y}" r="6.5" fill="{color}"/>')
            parts.append(_text(width, y + 4, e.text, "end", "value") + "</g>")
            top += row
    return _svg(width, height, axis, parts)


class _Frame(NamedTuple):
    """Where the plotting area of a small chart lies, and what it spans in data."""

    x: tuple[float, float]
    y: tuple[float, float]
    width: float = 360
    height: float = 206
    left: float = 40
    right: float = 12
    top: float = 20
    bottom: float = 36

    def at(self, x: float, y: float) -> tuple[float, float]:
        across = (x - self.x[0]) / (self.x[1] - self.x[0] or 1)
        up = (y - self.y[0]) / (self.y[1] - self.y[0] or 1)
        inner = self.width - self.left - self.right, self.height - self.top - self.bottom
        return self.left + across * inner[0], self.height - self.bottom - up * inner[1]

    def path(self, xs: Sequence[float], ys: Sequence[float]) -> str:
        points = (self.at(x, y) for x, y in zip(xs, ys, strict=True))
        return "M" + "L".join(f"{x:.1f},{y:.1f}" for x, y in points)

    def axes(self, x_label: str) -> list[str]:
        edge, foot = self.width - self.right, self.height - self.bottom
        parts = [_text(edge, self.height - 4, x_label, "end", "axis")]
        slack = 1e-6 * (self.y[1] - self.y[0])
        for value in [v for v in ticks(*self.y) if self.y[0] - slack <= v <= self.y[1] + slack]:
            y = self.at(self.x[0], value)[1]
            parts += [_line((self.left, edge), (y, y), "grid"), _text(self.left - 6, y + 4, f"{value:.6g}", "end")]
        for value in ticks(*self.x):
            if self.x[0] <= value <= self.x[1] and value == round(value):
                parts.append(_text(self.at(value, 0)[0], foot + 16, f"{value:g}", "middle"))
        return parts


def _limits(values: Sequence[float], zero: bool) -> tuple[float, float]:
    low, high = min(values), max(values)
    if zero and low >= 0:
        low = 0.0
    if low == high:
        low, high = (0.0, 1.0) if low == 0 else (low - abs(low) / 2, high + abs(high) / 2)
    marks = ticks(low, high)
    return marks[0], marks[-1]


def svg_curves(curves: Sequence[Curve], label: str, *, share: bool = False) -> str:
    """Curves one after the other on one axis of steps: faint as measured, bold smoothed."""
    curves = [c for c in curves if len(c.steps)]
    ends = [0.0]
    for curve in curves:
        ends.append(ends[-1] + max(curve.steps))
    values = [v for curve in curves for v in curve.values]
    frame = _Frame((0, max(ends[-1], 1)), (0.0, 1.0) if share else _limits(values, zero=True))
    parts = frame.axes("step")
    for curve, start, end in zip(curves, ends, ends[1:], strict=False):
        xs, color = [start + s for s in curve.steps], _color(curve.name)
        if len(curves) > 1:
            x, middle = frame.at(start, 0)[0], frame.at((start + end) / 2, 0)[0]
            parts.append(_text(middle, frame.top - 4, curve.name, "middle", fill=color))
            if start:
                parts.append(_line((x, x), (frame.top, frame.height - frame.bottom), "border"))
        if len(xs) == 1:
            x, y = frame.at(xs[0], curve.values[0])
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{color}"/>')
            continue
        parts.append(f'<path d="{frame.path(xs, curve.values)}" stroke="{color}" class="raw"/>')
        parts.append(f'<path d="{frame.path(xs, smooth(curve.values))}" stroke="{color}" class="line"/>')
    return _svg(frame.width, frame.height, label, parts)


def svg_stack(layers: Sequence[Curve], label: str) -> str:
    """Shares of a whole over steps, stacked from below; all layers have the same steps."""
    steps = list(layers[0].steps)
    frame = _Frame((steps[0], max(steps[-1], steps[0] + 1)), (0.0, 1.0))
    below, parts = [0.0] * len(steps), frame.axes("step")
    for layer in layers:
        above = [b + v for b, v in zip(below, layer.values, strict=True)]
        outline = frame.path([*steps, *reversed(steps)], [*above, *reversed(below)])
        parts.append(
            f'<path d="{outline}Z" fill="{_color(layer.name)}" class="area"><title>{esc(layer.name)}</title></path>'
        )
        below = above
    return _svg(frame.width, frame.height, label, parts)


def legend(names: Sequence[str]) -> str:
    keys = (f'<span><i style="background:{_color(n)}"></i>{esc(n.replace("_", " "))}</span>' for n in names)
    return f'<p class="legend">{"".join(keys)}</p>'


# matplotlib

INK, MUTED, GRID, PAPER = "#1d2430", "#5c6675", "#e4e0d7", "#fdfcf9"
THEME: dict[str, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": GRID,
    "axes.facecolor": PAPER,
    "figure.facecolor": PAPER,
    "savefig.facecolor": PAPER,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": GRID,
    "grid.linewidth": 0.9,
    "axes.axisbelow": True,
    "axes.titlesize": 11.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 12,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
}


def draw_summary(
    path: str | Path, estimates: Sequence[Estimate], curves: Mapping[str, Curve], *, title: str, curve_title: str
) -> Path:
    """The picture of a run as PNG: EM by phase beside baselines, and online learning curves."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context(THEME):
        figure = Figure(figsize=(10.6, 4.3), layout="constrained")
        FigureCanvasAgg(figure)
        left, right = figure.subplots(1, 2, width_ratios=(1.25, 1))
        _draw_estimates(left, estimates, title)
        _draw_curves(right, curves, curve_title)
        figure.get_layout_engine().set(w_pad=0.14, h_pad=0.12, wspace=0.06)
        figure.savefig(path, dpi=160)
    return Path(path)


def _draw_estimates(axes: Any, estimates: Sequence[Estimate], title: str) -> None:
    for place, e in enumerate(reversed(estimates)):
        color = COLORS.get(e.name, COLORS["other"])[0]
        axes.plot([0, e.mean], [place, place], color=color, lw=1.2, alpha=0.35, solid_capstyle="butt")
        if e.low is not None:
            axes.plot([e.low, e.high], [place, place], color=color, lw=5, alpha=0.45, solid_capstyle="round")
        axes.plot(e.mean, place, "o", color=color, ms=9, mec=PAPER, mew=1.2, zorder=3)
        axes.text(1.05, place, three_digits(e.mean), va="center", color=color, weight="bold", clip_on=False)
    axes.set(title=title, xlim=(0, 1.02), ylim=(-0.6, max(len(estimates), 1) - 0.4))
    axes.set_xlabel("exact match, share of questions (95 % interval)")
    axes.set_yticks(range(len(estimates)), [e.label for e in reversed(estimates)], color=INK)
    axes.grid(axis="y", visible=False)
    axes.spines["left"].set_visible(False)


def _draw_curves(axes: Any, curves: Mapping[str, Curve], title: str) -> None:
    names = iter(("online", "offline", "imitation"))
    for label, curve in curves.items():
        color = COLORS[next(names)][0]
        axes.plot(curve.steps, curve.values, color=color, lw=1, alpha=0.3)
        axes.plot(curve.steps, smooth(curve.values), color=color, lw=2.4, label=label)
    values = [value for curve in curves.values() for value in curve.values]
    axes.set(title=title, ylim=(min([0.0, *values]), max([1.0, *values]) + 0.02))
    axes.set_xlabel("online step")
    axes.set_ylabel("mean over the step's episodes")
    if curves:
        axes.legend(frameon=False, loc="lower right", labelcolor=INK)
    else:
        axes.text(0.5, 0.5, "no online steps in this run", ha="center", color=MUTED, transform=axes.transAxes)
