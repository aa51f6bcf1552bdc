"""From a configuration to a trained, evaluated policy and its run folder: what ``train`` does."""

from __future__ import annotations

import json
import os
import random
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from agentr1_lite import evaluation, guards
from agentr1_lite.checkpoint import has_checkpoint
from agentr1_lite.config import Config, ConfigError, reward_spec
from agentr1_lite.jsonl import write_text
from agentr1_lite.policy import QwenPolicy
from agentr1_lite.runlog import holds_run, remove_run
from agentr1_lite.tasks import TaskSet, accepted_knobs, load_task
from agentr1_lite.tasks.experts import EXPERTS
from agentr1_lite.tasks.scripted import load_logs
from agentr1_lite.trainer import AgentR1Trainer
from agentr1_lite.versions import versions

POOL = 1000  # questions made for a choice by seed
BASELINES = ("closed_book", "naive_rag", "scripted_expert")
Say = Callable[[str], None]
Phase = tuple[str, Callable[[], Any]]


def make_policy(config: Config, device: Any = None) -> QwenPolicy:
    """The policy that ``config.model`` names, on ``device`` where the configuration leaves it open."""
    guards.refuse(config, trains=False)
    model = config.model
    device = device if device is not None and model.device == "auto" else model.device
    try:
        return QwenPolicy(
            model.base_model,
            lora_rank=model.lora_rank,
            lora_alpha=model.lora_alpha,
            quantization=model.quantization,
            dtype=model.dtype,
            device=device,
            seed=config.training.seed,
            gradient_checkpointing=model.gradient_checkpointing,
        )
    except RuntimeError as error:  # torch's, for a device that is not there or too small
        raise ConfigError(f"model.base_model {model.base_model!r} on model.device {device!r}: {error}") from error


def make_task(config: Config, split: str, **knobs: Any) -> TaskSet:
    """One split of the task, in the environment that the configuration describes."""
    environment = asdict(config.environment)
    environment["k"] = environment.pop("top_k")
    known = accepted_knobs(config.task.name)
    options = {name: value for name, value in environment.items() if name in known}
    if "rewards" in known:
        options["rewards"] = reward_spec(config.reward) or {"em": 0.0}
    try:
        return load_task(config.task.name, split, **{**options, **config.task.knobs, **knobs})
    except TypeError as error:
        raise ConfigError(f"task.knobs {config.task.knobs}: a value has the wrong type ({error})") from error


def held_out(config: Config) -> TaskSet:
    """The questions of ``config.evaluation``; a test world holds other entities than the train world.

    Seed 0 takes the first of the split, any other seed draws among all of them; of a task that makes as many as it is
    asked for, among `POOL` or twice the number wanted.
    """
    wanted = config.evaluation
    pool = max(POOL, 2 * wanted.questions) if wanted.seed else wanted.questions
    knobs = {"count": pool} if "count" in accepted_knobs(config.task.name) else {}
    task_set = make_task(config, wanted.split, **knobs)
    chosen = range(len(task_set.tasks))[: wanted.questions]
    if wanted.seed:
        chosen = sorted(random.Random(wanted.seed).sample(range(len(task_set.tasks)), len(chosen)))
    task_set.tasks = [task_set.tasks[i] for i in chosen]
    if not task_set.tasks:
        raise ConfigError(
            f"evaluation.split {wanted.split}: task {config.task.name} has no question there; choose another"
        )
    return task_set


def train(
    config: Config,
    *,
    resume: bool = False,
    fresh: bool = False,
    callbacks: Sequence[Any] = (),
    accelerator: Any = None,
    say: Say = print,
) -> dict[str, Any]:
    """Run the phases the configuration asks for, evaluate after each, and write ``summary.json``.

    Of several processes the first one evaluates, writes and returns the summary, the others return {}.
    Nothing is written before everything the run needs was read. Raises ``ConfigError`` where the run folder holds
    another run and neither ``resume`` nor ``fresh`` says what to do.
    """
    folder, started = Path(config.run.output), time.perf_counter()
    guards.refuse(config)
    for sentence in [*guards.memory(config), *guards.advice(config)]:
        warnings.warn(sentence, stacklevel=2)
    _check_folder(folder, resume, fresh)
    accelerator = accelerator or _processes()
    leads = accelerator is None or accelerator.is_main_process
    data, train_set, test_set = read_data(config), make_task(config, "train"), held_out(config)
    policy = make_policy(config, accelerator and accelerator.device)
    trainer = AgentR1Trainer(policy, config, callbacks=callbacks, accelerator=accelerator)
    plan = phases(config, trainer, train_set, data)
    reports: dict[str, evaluation.Report] = {}

    def look(name: str, make: Callable[..., evaluation.Report], now: bool, again: bool = False) -> None:
        """Evaluate where the policy is ``now`` the one to be evaluated; a resumed run reads what it had found."""
        path = folder / "evaluation" / f"{name}.json"
        if now and leads and (again or not path.exists()):
            with tqdm(
                total=len(test_set), desc=f"evaluate {name}", disable=not config.run.progress, leave=False
            ) as bar:
                report = make(seed=config.evaluation.seed, progress=lambda ended, total: bar.update(ended - bar.n))
            report.save(path)
        if path.exists() and leads:
            reports[name] = report = evaluation.Report.load(path)
            say(f"{name:>16}: EM {report.shown()}  n={len(report)}")

    def score(name: str, now: bool, again: bool = False) -> None:
        options = {"name": name, "temperature": config.evaluation.temperature, "max_batch": config.training.max_rows}
        look(name, partial(evaluation.evaluate, policy, test_set, **options), now, again)

    if config.evaluation.every:
        trainer.callbacks.append(Evaluations(test_set))
    if fresh and leads:
        remove_run(folder)
    trainer.resume() if resume else trainer.open()
    seconds = {"setup": time.perf_counter() - started}
    rows = {"max_batch": config.training.max_rows}
    for name in baselines(test_set):
        measure = partial(evaluation.run_baseline, name, policy, test_set, **rows)
        look(name, measure, not trainer.count)
    score("base", not trainer.count)
    trained = False
    for phase, work in plan:
        history = work()
        trained |= bool(history)
        score(phase, trainer.finished[-1:] == [phase] and not trainer.phase, again=bool(history))
    if resume and leads and not trained:
        say(f"Every phase of {folder} had ended, so nothing was trained; a larger rlhf.online_rollouts goes on.")
    if not leads:
        return {}
    summary = {
        "em": {name: reports[name].mean() for name in ("base", *dict(plan)) if name in reports},
        "interval": {name: report.interval() for name, report in reports.items()},
        "n": len(test_set.tasks),
        "baselines": {name: reports[name].mean() for name in BASELINES if name in reports},
        "seconds": _seconds(seconds, trainer, reports),
        "seed": config.training.seed,
        "split": config.evaluation.split,
        "algorithm": config.training.algorithm,
        "versions": versions(),
    }
    policy.save(folder / "policy")
    write_text(folder / "summary.json", json.dumps(summary, indent=1) + "\n")
    return summary


def read_data(config: Config) -> dict[str, list[Any]]:
    """The episodes of phases 1 and 2, where the configuration switches them on."""
    rlhf, files = config.rlhf, {}
    if rlhf.imitation_epochs:
        files["imitation"] = rlhf.imitation_data or "data/demonstrations.jsonl"
    if rlhf.offline_phase:
        files["offline"] = rlhf.offline_data
    return {phase: load_logs(file) for phase, file in files.items()}


def phases(config: Config, trainer: AgentR1Trainer, task_set: TaskSet, data: dict[str, list[Any]]) -> list[Phase]:
    """The phases to run, in order; the logs are encoded here."""
    work = {"imitation": trainer.pretrain, "offline": trainer.offline_rl}
    encoded = {phase: trainer.trajectories(rows) for phase, rows in data.items()}
    out: list[Phase] = [(phase, lambda phase=phase: work[phase](encoded[phase])) for phase in encoded]
    if config.rlhf.online_rollouts != 0:
        out.append(("online", lambda: trainer.online_rl(task_set)))
    return out


def baselines(task_set: TaskSet) -> list[str]:
    """Those of `BASELINES` that the task can be measured by: with passages, and with questions an expert can play."""
    scripted = all(any(fits(task) for fits, _ in EXPERTS) for task in task_set.tasks)
    return [name for name in BASELINES if task_set.index is not None and (scripted or name != "scripted_expert")]


class Evaluations:
    """A callback that evaluates every ``evaluation.every`` steps of phase 3 and appends to ``evaluations.jsonl``."""

    def __init__(self, task_set: TaskSet) -> None:
        self.task_set = task_set

    def on_step(self, trainer: AgentR1Trainer, phase: str, step: int, metrics: dict[str, float]) -> None:
        wanted = trainer.config.evaluation
        share = trainer.accelerator
        if phase != "online" or not wanted.every or step % wanted.every or not (share is None or share.is_main_process):
            return
        options = {"temperature": wanted.temperature, "seed": wanted.seed}
        options["max_batch"] = trainer.config.training.max_rows
        report = evaluation.evaluate(trainer.policy, self.task_set, **options)
        low, high = report.interval() or (None, None)
        row = {"phase": phase, "step": step, "count": trainer.count, "n": len(report)}
        trainer.log.add("evaluations.jsonl", {**row, "em": report.mean(), "low": low, "high": high})


def _check_folder(folder: Path, resume: bool, fresh: bool) -> None:
    if resume and fresh:
        raise ConfigError("--resume and --fresh exclude each other; the one continues a run, the other removes it")
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"run.output: {folder} is a file; give the folder that the run is to be written into")
    if resume and not has_checkpoint(folder):
        raise ConfigError(f"run.output: {folder} holds no checkpoint to resume from; start without --resume")
    if holds_run(folder) and not (resume or fresh):
        raise ConfigError(f"run.output: {folder} holds a run already; pass --resume, --fresh or another run.output")


def _processes() -> Any:
    """An Accelerator where ``accelerate launch`` or ``torchrun`` started several processes."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return None
    from accelerate import Accelerator

    return Accelerator()


def _seconds(
    setup: dict[str, float], trainer: AgentR1Trainer, reports: dict[str, evaluation.Report]
) -> dict[str, float]:
    """Seconds of every part: set-up of this process, steps by phase, evaluations; a resumed run's add up."""
    seconds = dict(setup)
    for row in trainer.log.rows():
        seconds[row["phase"]] = seconds.get(row["phase"], 0.0) + row["seconds"]
    seconds["baselines"] = sum(reports[name].seconds for name in BASELINES if name in reports)
    seconds["evaluation"] = sum(report.seconds for name, report in reports.items() if name not in BASELINES)
    return {**seconds, "total": sum(seconds.values())}
