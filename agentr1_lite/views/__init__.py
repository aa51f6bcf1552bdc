"""Pictures of what an agent learns from: trajectories, credit, groups, and controls.

Every view is a string of HTML that needs nothing from outside and shows alike in JupyterLab, VS Code,
Colab, nbviewer and a saved page. The names below are loaded on first use.
"""

from __future__ import annotations

from agentr1_lite.lazy import exports

_HOMES = {
    "compare": ("compare_html",),
    "controls": ("panel", "sliders"),
    "credit": ("credit", "credit_html"),
    "group": ("group_html",),
    "memory": ("plan_figure", "plan_panel"),
    "player": ("StepPlayer",),
    "theme": ("COLORS", "Html", "esc", "figure", "line", "series", "show", "style"),
    "reading": ("from_messages",),
    "tokens": ("TokenTable", "token_table"),
    "trajectory": ("show_trajectory", "trajectory_html"),
}
__getattr__, __all__ = exports(__name__, _HOMES)
