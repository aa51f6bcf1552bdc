"""The rollouts of one online step: which questions, whose baselines, and each process's part of them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

from agentr1_lite.advantages import find
from agentr1_lite.config import TrainingConfig
from agentr1_lite.env import ToolEnv
from agentr1_lite.mdp import Task, Trajectory
from agentr1_lite.policy import QwenPolicy
from agentr1_lite.rollout import rollout
from agentr1_lite.update import ALONE, Share, phase_seed


class Episodes(NamedTuple):
    """Trajectories of whole groups, and for ReMax the greedy return of each one's question."""

    trajectories: list[Trajectory]
    baselines: list[float] | None


def collect(
    policy: QwenPolicy,
    env: ToolEnv,
    tasks: Sequence[Task],
    chosen: Sequence[int],
    index: int,
    config: TrainingConfig,
    share: Share = ALONE,
) -> Episodes:
    """Sample the groups of step ``index``: a function of ``config.seed``, the step and the weights.

    Args:
        tasks: all questions of the run; chosen: those of this step, of which process r of n plays r, r + n, …
    """
    size, mine = config.group_size, list(chosen[share.rank :: share.size])
    seed = phase_seed(config.seed, "rollout", index, share.rank)

    def sample(numbers: Sequence[int], seed: int) -> list[list[Trajectory]]:
        asked = [tasks[i] for i in numbers]
        found = rollout(policy, env, asked, group_size=size, temperature=config.temperature, seed=seed)
        return [found[i : i + size] for i in range(0, len(found), size)]

    groups = sample(mine, seed)
    if config.resample_zero_variance:
        flat = [i for i, group in enumerate(groups) if size > 1 and len({t.total_reward for t in group}) == 1]
        others = sorted(set(range(len(tasks))) - set(chosen))
        fresh = random.Random(seed).sample(others, min(len(flat), len(others)))
        fresh += [mine[i] for i in flat[len(fresh) :]]  # no other question is left: the same one, other noise
        for i, question, group in zip(flat, fresh, sample(fresh, seed + 1), strict=True):
            mine[i], groups[i] = question, group
    baselines = None
    if find(config.algorithm).__name__ == "remax":
        greedy = rollout(policy, env, [tasks[i] for i in mine], greedy=True, seed=seed)
        baselines = share.gather([t.total_reward for t in greedy for _ in range(size)])
    return Episodes(share.gather([t for group in groups for t in group]), baselines)
