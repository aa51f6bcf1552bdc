"""agentr1_lite: reinforcement learning of LLM agents, small enough to read.

The names most programs start from; everything else lies in the module that its subject names.
They are loaded on first use: torch and transformers take seconds, and ``--help`` needs neither.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any

_HOMES = {
    "advantages": ("compute_gae", "compute_returns", "estimate"),
    "config": ("Config", "load_config"),
    "env": ("ToolEnv",),
    "evaluation": ("evaluate", "score_answer"),
    "mdp": ("Action", "Segment", "State", "StopReason", "Task", "Trajectory", "Turn"),
    "policy": ("QwenPolicy",),
    "rollout": ("collect_trajectory", "rollout"),
    "tasks": ("load_task",),
    "tools": ("Tool", "tool"),
    "trainer": ("AgentR1Trainer",),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'agentr1_lite' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"agentr1_lite.{_HOME[name]}"), name)
    globals()[name] = value
    return value


class _Package(types.ModuleType):
    def __setattr__(self, name: str, value: Any) -> None:
        # importing the module `rollout` must not hide the function of that name
        if not (name in _HOME and isinstance(value, types.ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
