"""Charts of runs: estimates with intervals, learning curves and shares, for pages and as one picture of a run.

Names of phases, baselines and stop reasons have their colours here, and a word always stands beside a colour.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from agentr1_lite.escape import esc, visible
from agentr1_lite.scoring import with_interval
from agentr1_lite.views import theme

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
_NAMES = {
    "base": "grey",
    "imitation": "green",
    "offline": "orange",
    "online": "blue",
    "other": "sand",
    "answer": "blue",
    "no_call": "yellow",
    "max_turns": "purple",
    "length": "orange",
    "tool_error_limit": "green",
    "environment": "sky",
    "interrupted": "grey",
}
COLORS = {name: theme.COLORS[color] for name, color in _NAMES.items()}  # name: (on light, on dark)


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


def smooth(values: Sequence[float], window: float | None = None) -> list[float]:
    """Exponential moving average over about ``window`` values (a twelfth of them), unbiased at the start."""
    keep = 1 - 2 / (1 + max(1.0, len(values) / 12 if window is None else window))
    total, weight, out = 0.0, 0.0, []
    for value in values:
        total, weight = keep * total + value, keep * weight + 1
        out.append(total / weight)
    return out


def css_colors(mode: int) -> str:
    """The palette as CSS variables, by name and by use; ``mode`` 0 is light, 1 dark."""
    names = {f"ar1-{name}": pair for name, pair in theme.COLORS.items()} | COLORS
    return "".join(f"--{name.replace('_', '-')}:{pair[mode]};" for name, pair in names.items())


def _color(name: str) -> str:
    return COLORS.get(name, COLORS["other"])[0]


def _words(text: str) -> str:
    """A text from a file as matplotlib draws it letter by letter, dollar signs too."""
    return visible(text).replace("$", r"\$")


def _svg(figure: Any, label: str) -> str:
    """The figure as SVG that asks for nothing else on the page; nothing in it reaches over its axes."""
    return re.sub(r' clip-path="[^"]*"', "", theme.figure_svg(figure, label))


# Charts of a page


def svg_intervals(groups: Sequence[tuple[str, Sequence[Estimate]]], axis: str) -> str:
    """Estimates as dots with 95 % intervals, one row each, under a heading a group."""
    rows = sum(1 + len(estimates) for _, estimates in groups)
    figure, axes = theme.figure(7.6, 0.6 + 0.32 * rows)
    _draw_intervals(axes, groups)
    axes.set_xlabel(_words(axis))
    return _svg(figure, axis)


def svg_curves(curves: Sequence[Curve], label: str, *, share: bool = False) -> str:
    """Curves one after the other on one axis of steps: faint as measured, bold smoothed."""
    figure, axes = _small()
    start = 0.0
    for curve in curves:
        if not len(curve.steps):
            continue
        _draw_curve(axes, [start + step for step in curve.steps], curve.values, _color(curve.name))
        end = start + max(curve.steps)
        if len(curves) > 1:
            place = {"transform": axes.get_xaxis_transform(), "ha": "center", "size": 9}
            axes.text((start + end) / 2, 1.03, _words(curve.name), color=_color(curve.name), **place)
            axes.axvline(start, color=theme.COLORS["muted"][0], ls=":", lw=1)
        start = end
    axes.set_xlim(0, max(start, 1))
    if share:
        axes.set_ylim(0, 1)
    elif all(value >= 0 for curve in curves for value in curve.values):
        axes.set_ylim(bottom=0)
    return _svg(figure, label)


def svg_stack(layers: Sequence[Curve], label: str) -> str:
    """Shares of a whole over steps, stacked from below; all layers have the same steps."""
    figure, axes = _small()
    steps, colors = layers[0].steps, [_color(layer.name) for layer in layers]
    areas = axes.stackplot(steps, *(layer.values for layer in layers), colors=colors, alpha=0.82)
    for layer, area in zip(layers, areas, strict=True):
        theme.tip(area, layer.name)
    axes.set(xlim=(steps[0], max(steps[-1], steps[0] + 1)), ylim=(0, 1))
    return _svg(figure, label)


def legend(names: Sequence[str]) -> str:
    """What the colours of a stack stand for."""
    colors = {name: f"var(--{(name if name in COLORS else 'other').replace('_', '-')})" for name in names}
    keys = (f'<span><i style="background:{c}"></i>{esc(n.replace("_", " "))}</span>' for n, c in colors.items())
    return f'<p class="legend">{"".join(keys)}</p>'


def _small() -> tuple[Any, Any]:
    figure, axes = theme.figure(4.2, 2.4)
    axes.set_xlabel("step", loc="right")
    axes.grid(axis="x", visible=False)
    axes.xaxis.get_major_locator().set_params(integer=True, nbins=6)
    axes.yaxis.get_major_locator().set_params(nbins=5)
    return figure, axes


def _draw_intervals(axes: Any, groups: Sequence[tuple[str, Sequence[Estimate]]]) -> None:
    rows: list[tuple[str, Estimate | None]] = []
    for heading, estimates in groups:
        rows += [(heading, None)] if heading else []
        rows += [(e.label, e) for e in estimates]
    for place, (_, e) in enumerate(rows):
        if e is None:
            continue
        look = {"color": _color(e.name), "ls": "-"}
        axes.plot([0, e.mean], [place, place], lw=1.2, alpha=0.35, **look)
        if e.low is not None:
            axes.plot([e.low, e.high], [place, place], lw=5, alpha=0.45, solid_capstyle="round", **look)
        (dot,) = axes.plot(e.mean, place, "o", ms=9, mec=theme.COLORS["paper"][0], mew=1.2, zorder=3, **look)
        theme.tip(dot, f"{e.label}: {e.text}")
        axes.text(1.05, place, e.text, va="center_baseline", color=theme.COLORS["ink"][0])
    axes.set(xlim=(0, 1.02), ylim=(max(len(rows), 1) - 0.4, -0.6))
    axes.set_yticks(range(len(rows)), [_words(label) for label, _ in rows], color=theme.COLORS["ink"][0])
    for name, (_, e) in zip(axes.get_yticklabels(), rows, strict=True):
        name.set_fontweight("bold" if e is None else "normal")
    axes.grid(axis="y", visible=False)
    axes.spines["left"].set_visible(False)


def _draw_curve(axes: Any, steps: Sequence[float], values: Sequence[float], color: str, label: str = "") -> None:
    marker = "o" if len(steps) == 1 else ""
    axes.plot(steps, values, color=color, ls="-", lw=1, alpha=0.3)
    axes.plot(steps, smooth(values), color=color, ls="-", lw=2.4, marker=marker, label=label)


# The picture of a run


def draw_summary(
    path: str | Path, estimates: Sequence[Estimate], curves: Mapping[str, Curve], *, title: str, curve_title: str
) -> Path:
    """The picture of a run as PNG: EM by phase beside baselines, and online learning curves."""
    figure, (left, right) = theme.figure(10.6, 4.3, cols=2, width_ratios=(1.25, 1))
    _draw_intervals(left, [("", estimates)])
    heading = {"loc": "left", "weight": "bold", "size": 11.5, "pad": 12}
    left.set_title(_words(title), **heading)
    left.set_xlabel("exact match, share of questions (95 % interval)")
    for name, (label, curve) in zip(("online", "offline"), curves.items(), strict=False):
        _draw_curve(right, curve.steps, curve.values, _color(name), label)
    values = [value for curve in curves.values() for value in curve.values]
    right.set_title(_words(curve_title), **heading)
    right.set(xlabel="online step", ylabel="mean over the step's episodes")
    right.set_ylim(min([0.0, *values]), max([1.0, *values]) + 0.02)
    if curves:
        right.legend(frameon=False, loc="lower right", labelcolor=theme.COLORS["ink"][0])
    else:
        right.text(0.5, 0.5, "no online steps in this run", ha="center", transform=right.transAxes)
    figure.get_layout_engine().set(w_pad=0.14, h_pad=0.12, wspace=0.06)
    figure.savefig(path, dpi=160, facecolor=theme.COLORS["paper"][0])
    return Path(path)
