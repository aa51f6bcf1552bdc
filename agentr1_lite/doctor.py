"""The doctor: looks at every step of a run, and at the machine before one.

The checks themselves are in `checks.py`; here is what they need measured.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from agentr1_lite import update
from agentr1_lite.batch import Batch, collate
from agentr1_lite.checks import CHECKS, LESSONS, Case, Finding, Gradients, examine, sampled_mask, zero_variance_share
from agentr1_lite.config import TrainingConfig
from agentr1_lite.loading import PolicyError, data_root
from agentr1_lite.mdp import Trajectory
from agentr1_lite.policy import LogProbs
from agentr1_lite.versions import package_version

__all__ = ["CHECKS", "LESSONS", "Case", "Doctor", "Finding", "Gradients", "examine", "machine_check"]
__all__ += ["observation_gradient", "sampled_mask", "self_test", "step_gradient", "zero_variance_share"]

STACK = {"torch": "2.6", "transformers": "5.0", "peft": "0.18", "trl": "1.14", "accelerate": "1.10", "bm25s": "0.3"}
STACK |= {"bitsandbytes": "0.49", "datasets": "4.7", "matplotlib": "3.10", "pandas": "2.2"}
SHIPPED = ("atlas-tiny", "atlas-agent", "demonstrations.jsonl", "offline_logs.json")


class Doctor:
    """Runs the checks on every step and keeps the history they compare with.

    ``every``: the gradient on observations costs a pass over two rows, so it is
    measured at the first step and then once in so many.
    """

    def __init__(self, policy: Any = None, *, has_tools: bool = True, every: int = 50) -> None:
        self.policy, self.has_tools, self.every = policy, has_tools, every
        self.history: list[dict[str, float]] = []
        self._examined = 0

    def examine(
        self,
        trajectories: Sequence[Trajectory] = (),
        batch: Batch | None = None,
        metrics: Mapping[str, float] | None = None,
        gradient: Callable[[Tensor], Gradients | None] | None = None,
        **case: Any,
    ) -> list[Finding]:
        """One finding for every check that has something to look at, the worst first.

        ``gradient``: who wrote each token (`sampled_mask`) → the gradient of the loss, as `step_gradient` measures it;
        without it that of Σ log π over ``batch.action_mask``.
        """
        if self.policy is not None and batch is not None and len(trajectories) and "gradients" not in case:
            if self._examined % self.every == 0:
                mask = sampled_mask(batch, trajectories)
                case["gradients"] = gradient(mask) if gradient else observation_gradient(self.policy, batch, mask)
            self._examined += 1
        case = {"policy": self.policy, "has_tools": self.has_tools, **case}
        found = examine(Case(trajectories, batch, dict(metrics or {}), self.history, **case))
        if metrics:
            self.history = [*self.history[-99:], dict(metrics)]
        return found


def observation_gradient(
    policy: Any,
    batch: Batch,
    sampled: Tensor | None = None,
    loss: Callable[[Tensor, Batch], Tensor] | None = None,
    rows: int = 2,
) -> Gradients:
    """Measure ∂loss/∂h where h is the model's last hidden state, on the shortest ``rows`` rows.

    The state before token t feeds nothing but the distribution of token t, so its
    gradient says whether that token is trained on, whatever layers are shared
    below. Weights' gradients are left alone.

    Args:
        sampled: (B, T), see `sampled_mask`; None trusts ``batch.action_mask``.
        loss: log-probs (b, T) and the rows' batch → scalar; None is Σ log π over the batch's action mask.
    """
    chosen = torch.argsort(batch.lengths)[:rows]
    part, mask = batch.select(chosen), (batch.action_mask if sampled is None else sampled)[chosen]

    def value(out: LogProbs) -> Tensor:
        return loss(out.logprobs, part) if loss else out.logprobs.sum()

    return _gradients(policy, part, mask, value)


def step_gradient(
    policy: Any,
    experience: update.Experience,
    config: TrainingConfig,
    sampled: Tensor,
    *,
    rows: int = 2,
    **weights: Any,
) -> Gradients | None:
    """The same of the very loss that a step descends (`agentr1_lite.update.actor_loss`), where its ratio is 1.

    On the shortest ``rows`` rows with an advantage; None where there is none, since the loss is flat then. At ratio 1
    nothing is clipped, so that every action with an advantage must have a gradient; one that ``experience.batch`` does
    not count as an action was missed by its mask. ``weights``: kl_weight, max_length.
    """
    batch = experience.batch
    learns = ((experience.advantages != 0) & batch.action_mask).any(-1)
    if not learns.any():
        return None
    chosen = torch.argsort(torch.where(learns, batch.lengths, batch.lengths + batch.input_ids.shape[1]))[:rows]
    expected = ((experience.advantages != 0) | ~batch.action_mask)[chosen]

    def value(out: LogProbs) -> Tensor:
        old = experience.old_logprobs.clone()
        old[chosen] = out.logprobs.detach()
        return update.actor_loss(out, replace(experience, old_logprobs=old), chosen, config, **weights)[0]

    return _gradients(policy, batch.select(chosen), sampled[chosen], value, expected, **update.reading(config))


def _gradients(
    policy: Any,
    part: Batch,
    mask: Tensor,
    value: Callable[[LogProbs], Tensor],
    expected: Tensor | None = None,
    **reading: Any,
) -> Gradients:
    """∂value/∂h by token, and how many actions ``expected`` to count have ∂value/∂log π = 0."""
    acts = part.action_mask.clone()
    acts[:, 0] = False  # a mask that is wrong there too shall be told, not refused by the forward pass
    states: list[Tensor] = []

    def keep(module: torch.nn.Module, inputs: Any, output: Any) -> Any:
        states.append(output.last_hidden_state.detach().requires_grad_(True))
        output.last_hidden_state = states[0]
        return output

    hook = policy.causal.base_model.register_forward_hook(keep)
    try:
        with torch.enable_grad():
            out = policy.log_probs(replace(part, action_mask=acts), share_prompt=False, **reading)
            gradient, slope = torch.autograd.grad(value(out), [states[0], out.logprobs], materialize_grads=True)
    finally:
        hook.remove()
    size = gradient.abs().amax(-1)[:, :-1]  # (b, T − 1), at t − 1 for token t
    acted = mask[:, 1 : size.shape[1] + 1]
    missed = 0 if expected is None else int((mask & expected & (slope == 0)).sum())
    return Gradients(*(float(torch.where(where, size, 0.0).max()) for where in (~acted, acted)), missed)


# The machine


def machine_check() -> list[Finding]:
    """Cores, memory, GPU, threads, versions and shipped files: is this machine fit for a run?"""
    parts = (_cores, _memory, _gpu, _versions, _files)
    return [Finding(level, part.__name__.strip("_"), message) for part in parts for level, message in [part()]]


def _cores() -> tuple[str, str]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = torch.get_num_threads()
    said = f"{cores} cores ({platform.machine()}), torch uses {threads} of them"
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if threads > cores:
        return "warn", f"{said}; more threads than cores slow each other down, so set OMP_NUM_THREADS={cores}"
    if threads > 1 and load > cores / 2:
        return "warn", f"{said} while other work keeps {load:.1f} busy; set OMP_NUM_THREADS=1, which is faster then"
    return "ok", said


def _memory() -> tuple[str, str]:
    import psutil

    memory = psutil.virtual_memory()
    total, free = memory.total / 2**30, memory.available / 2**30
    said = f"{free:.1f} of {total:.1f} GiB of memory are free"
    return ("ok", said) if free >= 2 else ("warn", f"{said}; the lessons want 2 GiB, so close other programs")


def _gpu() -> tuple[str, str]:
    if not torch.cuda.is_available():
        return "ok", "no GPU; everything made for the tiny policy runs on the CPU"
    shown = torch.cuda.get_device_properties(0)
    numbers = "bfloat16" if shown.major >= 8 else "float16 (no bfloat16 units)"
    return "ok", f"{shown.name}, {shown.total_memory / 2**30:.0f} GiB, trains in {numbers}"


def _versions() -> tuple[str, str]:
    found = {name: package_version(name) for name in STACK}
    wrong = [name for name, least in STACK.items() if _numbers(found[name]) < _numbers(least)]
    if wrong:
        said = ", ".join(f"{name} is {found[name]} and must be at least {STACK[name]}" for name in wrong)
        return "fail", f"{said}; run make setup or pip install -r requirements.txt"
    return "ok", ", ".join([f"Python {platform.python_version()}", *(f"{k} {v}" for k, v in found.items())])


def _numbers(version: str) -> tuple[int, ...]:
    """Major and minor version; (0, 0) for what is not installed."""
    parts = [*version.split("+")[0].split("."), "0"][:2]
    return tuple(int("".join(filter(str.isdigit, part)) or 0) for part in parts)


def _files() -> tuple[str, str]:
    folder = data_root()
    missing = [name for name in SHIPPED if not (folder / name).exists()]
    if missing:
        return "fail", f"{', '.join(missing)} not found in {folder}; remake with python -m agentr1_lite data"
    return "ok", f"shipped policy and logs are in {folder}"


def self_test(policy: Any = None, *, questions: int = 4, group_size: int = 4) -> list[Finding]:
    """Play a few Atlas questions, pass over them as an update would, and examine all of it."""
    from agentr1_lite.policy import QwenPolicy
    from agentr1_lite.rollout import rollout
    from agentr1_lite.tasks import load_task

    try:
        policy = policy or QwenPolicy("atlas-tiny")
        task_set = load_task("atlas", "dev")
    except (PolicyError, OSError, ValueError) as error:
        return [Finding("fail", "self_test", str(error))]
    trajectories = rollout(policy, task_set.env, task_set.tasks[:questions], group_size=group_size, seed=0)
    batch = collate(trajectories)
    with torch.no_grad():
        ratio = policy.log_probs(batch.to(policy.device)).logprobs.cpu() - batch.old_logprobs
    return Doctor(policy).examine(trajectories, batch, {"first_log_ratio_max": float(ratio.abs().max())})
