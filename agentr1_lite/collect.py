"""The rollouts of one online step: which questions, whose baselines, and each process's part of them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

from agentr1_lite.advantages import find
from agentr1_lite.bridges import vllm
from agentr1_lite.checks import zero_variance_share
from agentr1_lite.config import TrainingConfig
from agentr1_lite.env import ToolEnv
from agentr1_lite.mdp import Task, Trajectory
from agentr1_lite.policy import QwenPolicy
from agentr1_lite.rollout import rollout
from agentr1_lite.sampling import Sampling
from agentr1_lite.update import ALONE, Share, phase_seed


class Engines:
    """``(config, share)`` → the engine that samples phase 3: None is the kit's own, which every rollout makes anew.

    vLLM is made at the first call and kept. Evaluations always use the kit's own engine. Raises ``ValueError``, where
    vLLM is asked for and not installed, already when this is made.
    """

    def __init__(self, policy: QwenPolicy, config: TrainingConfig) -> None:
        self._policy, self._vllm = policy, None
        if config.engine == "vllm":
            vllm.require()

    def __call__(self, config: TrainingConfig, share: Share = ALONE) -> vllm.VLLMEngine | None:
        if config.engine == "local":
            return None
        if share.size > 1:
            raise ValueError(f"training.engine {config.engine!r} serves one process and {share.size} run; start one")
        if self._vllm is None:
            self._vllm = vllm.VLLMEngine(self._policy, max_rows=config.max_rows, memory=config.engine_memory)
        return self._vllm


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
    engine: vllm.VLLMEngine | None = None,
) -> Episodes:
    """Sample the groups of step ``index``: a function of ``config.seed``, the step and the weights.

    Args:
        tasks: all questions of the run; chosen: those of this step, of which process r of n plays r, r + n, …
        engine: from `Engines`.
    """
    size, mine = config.group_size, list(chosen[share.rank :: share.size])
    seed = phase_seed(config.seed, "rollout", index, share.rank)

    def play(numbers: Sequence[int], sampling: Sampling, seed: int, size: int = 1) -> list[Trajectory]:
        if engine is None:
            options = {"temperature": sampling.temperature, "greedy": sampling.greedy, "max_batch": config.max_rows}
        else:
            options = {"engine": engine.using(sampling, env.stop_strings)}
        return rollout(policy, env, [tasks[i] for i in numbers], group_size=size, seed=seed, **options)

    def sample(numbers: Sequence[int], seed: int) -> list[list[Trajectory]]:
        found = play(numbers, Sampling(config.temperature), seed, size)
        return [found[i : i + size] for i in range(0, len(found), size)]

    groups = sample(mine, seed)
    if config.resample_zero_variance:
        flat = [i for i, group in enumerate(groups) if size > 1 and zero_variance_share(group) == 1]
        others = sorted(set(range(len(tasks))) - set(chosen))
        fresh = random.Random(seed).sample(others, min(len(flat), len(others)))
        fresh += [mine[i] for i in flat[len(fresh) :]]  # no other question is left: the same one, other noise
        for i, question, group in zip(flat, fresh, sample(fresh, seed + 1), strict=True):
            mine[i], groups[i] = question, group
    baselines = None
    if find(config.algorithm).__name__ == "remax":
        greedy = play(mine, Sampling(greedy=True), seed)
        baselines = share.gather([t.total_reward for t in greedy for _ in range(size)])
    return Episodes(share.gather([t for group in groups for t in group]), baselines)
