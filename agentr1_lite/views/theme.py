"""One look for every view and figure: colours for light and dark, templates that escape, figures that follow the theme.

People with any common colour blindness tell the colours apart (after Okabe and Ito), and a second sign (a word, a
line style, a mark) always goes with them. In HTML a colour is a CSS custom property ``--ar1-name`` on ``.ar1``, so the
same saved picture is readable in a light and in a dark page.
"""

from __future__ import annotations

import hashlib
import io
import re
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentr1_lite.escape import esc, visible

if TYPE_CHECKING:
    from jinja2.runtime import TemplateModule

# name: (on light, on dark)
COLORS: dict[str, tuple[str, str]] = {
    "ink": ("#1d2430", "#e9e7e2"),
    "muted": ("#5c6675", "#9ba5b4"),
    "rule": ("#d9d5cb", "#3a414d"),
    "paper": ("#fefdfb", "#14171c"),
    "tint": ("#f3f0e8", "#232831"),
    "bad": ("#b3261e", "#ff8a80"),
    "blue": ("#0b66b5", "#62b4f5"),
    "orange": ("#c4570f", "#f29a5c"),
    "green": ("#13866a", "#4cc6a2"),
    "purple": ("#a8508a", "#d98abf"),
    "yellow": ("#d7a31b", "#e8c04f"),
    "grey": ("#7b8494", "#98a3b3"),
    "sky": ("#5fb0d8", "#9ad4ef"),
    "sand": ("#9a8f7d", "#8d877c"),
}
SERIES = ("blue", "orange", "green", "purple", "yellow", "grey")
LINES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 2)))
MARKERS = ("o", "s", "^", "D", "v", "P")
# what matplotlib paints where nothing else was said
_DEFAULTS = {"#000000": "ink", "#ffffff": "paper", "#cccccc": "rule", "#b0b0b0": "rule"}
_TIP = "tip: "


def number(x: float) -> str:
    """Four significant digits, with a true minus sign."""
    return f"{x:.4g}".replace("-", "−")


def signed(reward: float) -> str:
    """A reward with its sign: two digits, or as many as it has up to four."""
    text = f"{reward:+.2f}"
    return text if float(text) == reward else f"{reward:+.4g}"


class Html(str):
    """HTML that a notebook shows as such; ``html`` is the string itself, ``alt`` says what it shows."""

    alt: str

    def __new__(cls, html: str, alt: str = "") -> Html:
        made = super().__new__(cls, html)
        made.alt = alt
        return made

    @property
    def html(self) -> str:
        return str(self)

    def __repr__(self) -> str:
        return f"<Html: {visible(self.alt) or 'a picture; show it in a notebook or save it as a page'}>"

    def _repr_html_(self) -> str:
        return self.html

    __html__ = _repr_html_  # a template takes it as it is


@cache
def asset(name: str) -> str:
    """A packaged file of this folder."""
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


@cache
def templates() -> TemplateModule:
    """The macros of ``views.jinja``: each takes plain values and gives HTML.

    Whatever a macro writes is escaped by `esc`, unless it is HTML already.
    """
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    def finalize(value: Any) -> Any:
        return value if hasattr(value, "__html__") else Markup(esc(value))

    options = {"trim_blocks": True, "lstrip_blocks": True, "undefined": StrictUndefined}
    environment = Environment(autoescape=True, finalize=finalize, **options)
    environment.filters |= {"number": number, "signed": signed}
    return environment.from_string(asset("views.jinja")).module


@cache
def style() -> str:
    """A ``<style>`` element: the palette and the rules of every view, all of it inside ``.ar1``."""
    light, dark = ("".join(f"--ar1-{name}:{pair[mode]};" for name, pair in COLORS.items()) for mode in (0, 1))
    return templates().style(light, dark, Html(asset("views.css")))


def part(body: str, *, kind: str = "", script: bool = False, label: str = "", id: str | None = None) -> Html:
    """A self-contained piece of a page around ``body``: style, and the viewer's script where it is wanted.

    ``kind`` names further CSS classes, ``label`` (plain text) is what a screen reader announces.
    """
    code = Html(asset("views.js")) if script else ""
    return Html(templates().part(style(), Html(body), code, kind, label, id), label)


# Figures


def series(i: int) -> str:
    """The colour of line ``i``; `show` turns it into the theme's."""
    return COLORS[SERIES[i % len(SERIES)]][0]


def line(i: int, marker: bool = False) -> dict[str, Any]:
    """Keywords of ``axes.plot`` for line ``i``: colour and line style (and marker), so that neither stands alone."""
    n = i % len(SERIES)
    return {"color": series(i), "linestyle": LINES[n], **({"marker": MARKERS[n]} if marker else {})}


def tip(artist: Any, text: str) -> None:
    """Say ``text`` where the pointer rests on a part of a figure."""
    artist.set_gid(_TIP + visible(text))


def _rc() -> dict[str, Any]:
    from cycler import cycler

    ink, muted, rule = (COLORS[name][0] for name in ("ink", "muted", "rule"))
    return {
        "font.family": "DejaVu Sans",
        "font.size": 10,
        "text.color": ink,
        "axes.labelcolor": muted,
        "axes.edgecolor": rule,
        "axes.facecolor": "none",
        "figure.facecolor": "none",
        "savefig.facecolor": "none",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": rule,
        "grid.linewidth": 0.9,
        "axes.titlecolor": ink,
        "axes.titlesize": 11.5,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.titlepad": 12,
        "xtick.color": muted,
        "ytick.color": muted,
        "xtick.major.size": 0,
        "ytick.major.size": 0,
        "lines.linewidth": 2.0,
        "legend.frameon": False,
        "axes.prop_cycle": cycler(color=[series(i) for i in range(6)]) + cycler(linestyle=LINES),
        "svg.fonttype": "none",
        "svg.hashsalt": "agentr1_lite",
    }


def figure(width: float = 7, height: float = 3, rows: int = 1, cols: int = 1, **options: Any) -> tuple[Any, Any]:
    """A matplotlib figure in the theme and its axes (an array where there are several); sizes in inches.

    ``options`` go to ``Figure.subplots`` (sharex, width_ratios …). The figure belongs to no window: give it to `show`.
    """
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_rc()):
        made = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasSVG(made)
        return made, made.subplots(rows, cols, **options)


def show(what: Any, *, alt: str = "") -> Html:
    """A figure or a piece of HTML as one that follows the page's theme.

    A matplotlib figure becomes inline SVG on a transparent ground whose colours are the theme's, and is closed;
    ``alt`` describes it for those who cannot see it. HTML without a view's frame gets one.
    """
    if isinstance(what, str):
        framed = isinstance(what, Html) or what.startswith('<div class="ar1')
        return Html(what if framed else part(what, label=alt), alt or getattr(what, "alt", ""))
    if not hasattr(what, "savefig"):
        raise ValueError(f"show got {type(what).__name__}; give a matplotlib figure or a string of HTML")
    return Html(part(figure_svg(what, alt)), alt)


def figure_svg(fig: Any, alt: str = "") -> Html:
    """The figure as an ``<svg>`` element, the same bytes for the same figure; closes the figure."""
    import matplotlib

    file = io.StringIO()
    with matplotlib.rc_context(_rc()):
        fig.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    if "matplotlib.pyplot" in sys.modules:
        sys.modules["matplotlib.pyplot"].close(fig)
    svg = file.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", svg, flags=re.S)
    svg = re.sub(r' xmlns(:xlink)?="[^"]*"', "", svg)  # inside HTML nobody asks
    svg = re.sub(r"'DejaVu Sans'(, *('[^']*'|[\w -]+))*", "'DejaVu Sans', Verdana, sans-serif", svg)
    svg = re.sub(rf'<g id="{_TIP}([^"]*)">', r"<g><title>\1</title>", svg)
    names = {pair[0]: name for name, pair in COLORS.items()} | _DEFAULTS
    svg = re.sub(r"#[0-9a-f]{6}\b", lambda m: f"var(--ar1-{names[m[0]]})" if m[0] in names else m[0], svg, flags=re.I)
    # several figures share a page: their ids must not meet
    salt = hashlib.sha1(svg.encode()).hexdigest()[:6]
    svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>f{salt}-", svg)
    width = fig.get_figwidth() * 96  # CSS pixels
    head = f'<svg class="fig" role="img" aria-label="{esc(alt)}" style="max-width:{width:.0f}px"'
    svg = re.sub(r' (?:width|height)="[\d.]+pt"', "", svg, count=2).replace("<svg", head, 1)
    return Html(visible(re.sub(r"\n\s*", "\n", svg).strip()), alt)
