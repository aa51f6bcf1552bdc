"""agentr1_lite: reinforcement learning of LLM agents, small enough to read.

The names most programs start from; everything else lies in the module that its subject names.
They are loaded on first use.
"""

from __future__ import annotations

from agentr1_lite.lazy import exports

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
__getattr__, __all__ = exports(__name__, _HOMES)
