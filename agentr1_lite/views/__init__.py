"""Pictures of what an agent learns from: trajectories, credit, groups, and controls.

Every view is a string of HTML that needs nothing from outside and shows alike in JupyterLab, VS Code,
Colab, nbviewer and a saved page. The names below are loaded on first use.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any

_HOMES = {
    "compare": ("compare_html",),
    "controls": ("panel", "sliders"),
    "credit": ("credit", "credit_html"),
    "group": ("group_html",),
    "player": ("StepPlayer",),
    "theme": ("COLORS", "Html", "esc", "figure", "line", "series", "show", "style"),
    "tokens": ("TokenTable", "from_messages", "token_table"),
    "trajectory": ("show_trajectory", "trajectory_html"),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'agentr1_lite.views' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"agentr1_lite.views.{_HOME[name]}"), name)
    globals()[name] = value
    return value


class _Package(types.ModuleType):
    def __setattr__(self, name: str, value: Any) -> None:
        # importing the module `credit` must not hide the function of that name
        if not (name in _HOME and isinstance(value, types.ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
