"""Does the QLoRA recipe hold on this GPU? One command, no network, random weights of the true shape.

    python tests/gpu/run_gpu_checks.py                       # Qwen2.5-3B in 4 bits, the recipe's settings
    python tests/gpu/run_gpu_checks.py --settings training.batch_size=8 --json checks.json
    python tests/gpu/run_gpu_checks.py --model atlas-tiny --device cpu --small     # the same script without a GPU

Four questions a step instead of the recipe's eight, every row at its full length, so that all rows of a rollout are in
use. For float16, and for bfloat16 where the card has it: load in NF4, one GRPO step, one PPO step, peak memory of each
phase beside the plan, tokens a second of rollout and update, the doctor's findings, and a run that is stopped, resumed
and compared. The weights are random, so nothing is learned; the tools' replies fill every row to its full length.
Prints one table, writes JSON with --json, ends with 1 where a check failed.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import tiny  # noqa: E402

from agentr1_lite import AgentR1Trainer, planner, update  # noqa: E402
from agentr1_lite import trainer as trainer_module  # noqa: E402
from agentr1_lite.config import Config, load_config  # noqa: E402
from agentr1_lite.loading import DTYPES, pick_dtype  # noqa: E402
from agentr1_lite.policy import QwenPolicy  # noqa: E402
from agentr1_lite.random_model import random_policy  # noqa: E402
from agentr1_lite.shapes import shape_of  # noqa: E402
from agentr1_lite.versions import versions  # noqa: E402

GIB = 2**30
WITHIN = 0.10  # how far the measured peak may lie above the plan
SLACK = 0.15  # GiB of kernels that the process loads, which counts for small models only
FIXED = ("model.base_model", "model.device", "model.dtype", "training.algorithm", "run.output")
SMALL = ["training.batch_size=2", "training.group_size=2", "environment.max_turn_tokens=8"]
SMALL += ["environment.max_response_tokens=96", "environment.max_tool_tokens=16", "training.micro_batch_tokens=256"]


@dataclass
class Row:
    """One line of the table; ``ok`` None is a measurement without a verdict."""

    dtype: str
    check: str
    found: str
    expected: str = ""
    ok: bool | None = None


class LongEnv(tiny.ScoredEnv):
    """Replies with as many tokens as a tool may show, until the response budget is used up."""

    def __init__(self, config: Config) -> None:
        limits = config.environment
        super().__init__(1000, limits.max_turn_tokens, limits.max_response_tokens, limits.max_tool_tokens)
        self.config = config

    def fork(self) -> LongEnv:
        return LongEnv(self.config)

    def step(self, text: str, finish_reason: str = "stop") -> tiny.Step:
        step = super().step(text, finish_reason)
        for message in step.observation:
            message["content"] = "the river of the city " * self.max_tool_tokens
        return step

    def finish(self, stop_reason: Any) -> tuple[float, dict[str, float]]:
        reward = self.random.random()  # rollouts of a question must differ in what they earn
        return reward, {"em": reward}


@contextmanager
def peaks(device: str) -> Iterator[dict[str, float]]:
    """GiB at most in each phase of the steps inside: the trainer's own functions mark where one ends."""
    found: dict[str, float] = {}

    def mark(phase: str) -> None:
        if device == "cuda":
            torch.cuda.synchronize()
            found[phase] = max(found.get(phase, 0.0), torch.cuda.max_memory_reserved() / GIB)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            return
        lines = Path("/proc/self/status").read_text().splitlines()
        peak = int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 2**20
        found[phase] = max(found.get(phase, 0.0), peak)
        Path("/proc/self/clear_refs").write_text("5")

    def marking(function: Any, phase: str) -> Any:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            mark(phase)
            return result

        return wrapped

    mark("before")
    with (
        mock.patch.object(trainer_module, "collect", marking(trainer_module.collect, "rollout")),
        mock.patch.object(update, "prepare", marking(update.prepare, "log-prob")),
        mock.patch.object(update, "apply_gradient", marking(update.apply_gradient, "update")),
    ):
        yield found


class Keep:
    """A callback that keeps the last episodes and what the doctor found, and stops a run after so many steps."""

    def __init__(self, stop_after: int = 0) -> None:
        self.episodes: list[Any] = []
        self.findings: dict[str, Any] = {}
        self.stop_after = stop_after

    def on_trajectories(self, trainer: AgentR1Trainer, step: int, trajectories: list[Any]) -> None:
        self.episodes = list(trajectories)

    def on_step(self, trainer: AgentR1Trainer, phase: str, step: int, metrics: dict[str, float]) -> None:
        self.findings |= {f.check: f for f in trainer.findings if f.check not in self.findings or f.level == "fail"}
        if step == self.stop_after:
            trainer.stop()


def settings(args: argparse.Namespace, algorithm: str, dtype: str, folder: Path) -> Config:
    overrides = [*(SMALL if args.small else ["training.batch_size=4"]), *args.settings]
    overrides += [
        f"training.algorithm={algorithm}",
        f"model.dtype={dtype}",
        f"model.device={args.device}",
        f"model.base_model={args.model}",
    ]
    overrides += [f"run.output={folder}", "run.progress=false", "training.critic_warmup=0"]
    return load_config(args.recipe, overrides)


def make(args: argparse.Namespace, config: Config) -> QwenPolicy:
    model = config.model
    return random_policy(
        args.model,
        quantization=model.quantization,
        dtype=model.dtype,
        device=args.device,
        lora_rank=model.lora_rank,
        gradient_checkpointing=model.gradient_checkpointing,
    )


def steps(config: Config, policy: QwenPolicy, count: int, keep: Keep, resume: bool = False) -> AgentR1Trainer:
    trainer = AgentR1Trainer(policy, config, callbacks=[keep])
    if resume:
        trainer.resume()
    training = config.training
    env, tasks = LongEnv(config), tiny.tasks(training.batch_size)
    trainer.online_rl(env, count * training.batch_size * training.group_size, tasks=tasks)
    return trainer


def check_step(args: argparse.Namespace, algorithm: str, dtype: str, folder: Path) -> list[Row]:
    """One step after a first one that settles allocations: memory against the plan, speed, what the doctor says."""
    config = settings(args, algorithm, dtype, folder / f"{algorithm}-{dtype}")
    rows: list[Row] = []
    started = time.perf_counter()
    policy, keep = make(args, config), Keep()
    rows.append(Row(dtype, f"{algorithm}: load", f"{time.perf_counter() - started:.0f} s"))
    with peaks(args.device) as found:
        trainer = steps(config, policy, 2, keep)
    plan = plan_of(config, keep)
    for phase in planner.PHASES:
        said = plan.totals[phase]
        off = max(found[phase] - SLACK, 0.0) / said - 1
        rows.append(
            Row(dtype, f"{algorithm}: memory, {phase}", f"{found[phase]:.2f} GiB", f"{said:.2f} GiB", off <= WITHIN)
        )
    metrics = trainer.log.rows()[-1]
    sampled = sum(t.num_actions for t in keep.episodes)
    total = sum(t.num_tokens for t in keep.episodes)
    rows.append(Row(dtype, f"{algorithm}: rollout", f"{sampled / metrics['rollout_seconds']:.0f} sampled tokens/s"))
    rows.append(Row(dtype, f"{algorithm}: update", f"{total / metrics['update_seconds']:.0f} tokens/s"))
    rows.append(Row(dtype, f"{algorithm}: step", f"{metrics['seconds']:.1f} s, {sampled} of {total} tokens sampled"))
    moved = metrics["grad_norm"] > 0
    rows.append(Row(dtype, f"{algorithm}: gradient norm", f"{metrics['grad_norm']:.3g}", "above 0, finite", moved))
    frozen = [n for n, p in policy.causal.named_parameters() if p.grad is not None and ".lora_" not in n]
    rows.append(Row(dtype, f"{algorithm}: weights with a gradient", "adapters", "adapters only", not frozen))
    for finding in keep.findings.values():
        if finding.level == "fail" or finding.check in ("first_ratio", "observation_gradients"):
            rows.append(Row(dtype, f"{algorithm}: {finding.check}", finding.message, "", finding.level != "fail"))
    return rows


def plan_of(config: Config, keep: Keep) -> planner.Plan:
    """The plan for the rows that were really played."""
    prompt = max(t.segments[0].prompt_length for t in keep.episodes)
    rows = replace(config.environment, max_response_tokens=max(t.num_tokens for t in keep.episodes) - prompt)
    return planner.plan_for(replace(config, environment=rows), prompt_tokens=prompt)


def check_resume(args: argparse.Namespace, dtype: str, folder: Path) -> list[Row]:
    """Three steps at once against one step, a stop, and two more in a fresh policy."""
    config = settings(args, "GRPO", dtype, folder / f"whole-{dtype}")
    whole = steps(config, make(args, config), 3, Keep()).policy.state_dict()
    cut = settings(args, "GRPO", dtype, folder / f"cut-{dtype}")
    try:
        steps(cut, make(args, cut), 3, Keep(stop_after=1))
    except KeyboardInterrupt:
        free()
    resumed = steps(cut, make(args, cut), 3, Keep(), resume=True).policy.state_dict()
    off = max(float((whole[k] - resumed[k]).abs().max()) for k in whole)
    size = max(float(w.abs().max()) for w in whole.values())
    found = "equal bit for bit" if off == 0 else f"largest difference {off:.1e} of {size:.1e}"
    # kernels of a GPU may add in another order; a wrong state would be off by a learning rate
    return [Row(dtype, "resume after a stop", found, "within a tenth of lr", off <= 0.1 * config.training.lr)]


def free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def dtypes(args: argparse.Namespace) -> list[str]:
    if args.dtypes:
        return args.dtypes.split(",")
    if args.device == "cpu":
        return ["float32"]
    return ["float16", "bfloat16"] if torch.cuda.get_device_capability()[0] >= 8 else ["float16"]


def show(rows: list[Row]) -> None:
    cells = [("dtype", "check", "found", "expected", "")]
    cells += [(r.dtype, r.check, r.found, r.expected, {True: "ok", False: "FAIL", None: ""}[r.ok]) for r in rows]
    widths = [min(max(len(c[i]) for c in cells), 60) for i in range(5)]
    for line in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def check_arguments(args: argparse.Namespace) -> None:
    """Everything that could fail after minutes, looked at before the first of them."""
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("torch sees no GPU here; --device cpu --model atlas-tiny --small runs the same checks")
    shape_of(args.model)
    if args.json and not Path(args.json).absolute().parent.is_dir():
        raise ValueError(f"--json {args.json}: its folder does not exist; make it first")
    for dtype in dtypes(args):
        if dtype not in DTYPES:
            raise ValueError(f"--dtypes {dtype!r} is not known; choose among {', '.join(DTYPES)}")
        pick_dtype(dtype, torch.device(args.device), frozen_base=True)
        found = settings(args, "GRPO", dtype, Path("unused"))
        if found.training.engine != "local":
            raise ValueError("training.engine: these checks are of the local engine; leave it out")
    fixed = [text for text in args.settings if text.split("=")[0] in FIXED]
    if fixed:
        raise ValueError(f"--settings {fixed[0]}: the options --model, --device and --dtypes decide that")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen2.5-3b", help="shape to build (default: qwen2.5-3b)")
    parser.add_argument("--recipe", default="qwen2.5-3b", help="recipe whose settings are used")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--dtypes", help="for example float16,bfloat16 (default: what the device has)")
    parser.add_argument("--settings", nargs="*", default=[], metavar="section.key=value", help="laid over the recipe")
    parser.add_argument("--small", action="store_true", help="short rows and few of them")
    parser.add_argument("--json", help="write the table here too")
    args = parser.parse_args()
    try:
        check_arguments(args)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    card = torch.cuda.get_device_properties(0) if args.device == "cuda" else None
    machine = f"{card.name}, {card.total_memory / GIB:.1f} GiB" if card else platform.processor() or platform.machine()
    print(f"{machine} · {shape_of(args.model).name}, {shape_of(args.model).parameters:,} weights", flush=True)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        for dtype in dtypes(args):
            for work in (
                lambda: check_step(args, "GRPO", dtype, Path(name)),  # noqa: B023
                lambda: check_step(args, "PPO", dtype, Path(name)),  # noqa: B023
                lambda: check_resume(args, dtype, Path(name)),  # noqa: B023
            ):
                rows += work()
                free()
    show(rows)
    failed = [row for row in rows if row.ok is False]
    print(f"{len(failed)} of {sum(row.ok is not None for row in rows)} checks failed")
    if args.json:
        found = {"machine": machine, "model": args.model, "versions": versions(), "rows": [asdict(r) for r in rows]}
        Path(args.json).write_text(json.dumps(found, indent=1) + "\n")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
