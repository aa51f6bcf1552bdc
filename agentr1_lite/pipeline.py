"""From a configuration to a trained, evaluated policy and its run folder: what ``train`` does."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from agentr1_lite import evaluation
from agentr1_lite.checkpoint import has_checkpoint
from agentr1_lite.config import Config, ConfigError, reward_spec
from agentr1_lite.jsonl import DataError, write_text
from agentr1_lite.loading import data_root
from agentr1_lite.policy import QwenPolicy
from agentr1_lite.tasks import TaskSet, accepted_knobs, load_task
from agentr1_lite.trainer import AgentR1Trainer
from agentr1_lite.versions import versions

BASELINES = ("closed_book", "naive_rag", "scripted_expert")
Say = Callable[[str], None]


def make_policy(config: Config) -> QwenPolicy:
    """The policy that ``config.model`` names."""
    model = config.model
    return QwenPolicy(
        model.base_model,
        lora_rank=model.lora_rank,
        lora_alpha=model.lora_alpha,
        quantization=model.quantization,
        dtype=model.dtype,
        device=model.device,
        seed=config.training.seed,
        gradient_checkpointing=model.gradient_checkpointing,
    )


def make_task(config: Config, split: str, **knobs: Any) -> TaskSet:
    """One split of the task, in the environment that the configuration describes."""
    environment = asdict(config.environment)
    environment["k"] = environment.pop("top_k")
    known = accepted_knobs(config.task.name)
    options = {name: value for name, value in environment.items() if name in known}
    if "rewards" in known:
        options["rewards"] = reward_spec(config.reward) or {"em": 0.0}
    return load_task(config.task.name, split, **{**options, **config.task.knobs, **knobs})


def held_out(config: Config) -> TaskSet:
    """The questions of ``config.evaluation``; a test world holds other entities than the train world."""
    wanted = config.evaluation
    knobs = {"count": wanted.questions} if "count" in accepted_knobs(config.task.name) else {}
    task_set = make_task(config, wanted.split, **knobs)
    task_set.tasks = task_set.tasks[: wanted.questions]
    return task_set


def data_file(name: str) -> Path:
    """A file of the configuration, as it stands or beside the package's own data."""
    path = Path(name)
    beside = data_root() / Path(name).name
    if not path.exists() and beside.exists():
        return beside
    if not path.exists():
        raise DataError(f"{name}: no such file, here or in {data_root()}; remake it with `python -m agentr1_lite data`")
    return path


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

    Raises ``ConfigError`` where the run folder holds another run and neither ``resume`` nor ``fresh`` says what to do.
    """
    folder = Path(config.run.output)
    if has_checkpoint(folder) and not (resume or fresh):
        raise ConfigError(f"run.output: {folder} holds a run already; pass --resume, --fresh or another run.output")
    if resume and not has_checkpoint(folder):
        raise ConfigError(f"run.output: {folder} holds no checkpoint to resume from; start without --resume")
    if fresh and folder.exists():
        shutil.rmtree(folder)
    started = time.perf_counter()
    policy = make_policy(config)
    task_set, test_set = make_task(config, "train"), held_out(config)
    trainer = AgentR1Trainer(policy, config, callbacks=callbacks, accelerator=accelerator)
    if resume:
        trainer.resume()
    seconds = _load_seconds(folder)
    seconds.setdefault("setup", time.perf_counter() - started)

    def measured(name: str, work: Callable[[], Any]) -> None:
        began = time.perf_counter()
        work()
        if name not in seconds:
            seconds[name] = time.perf_counter() - began

    reports: dict[str, evaluation.Report] = {}

    def look(name: str, make: Callable[[], evaluation.Report]) -> None:
        """Evaluate once; a resumed run reads what it had found."""
        path = folder / "evaluation" / f"{name}.json"
        if path.exists():
            reports[name] = evaluation.Report.load(path)
        else:
            measured(f"evaluate {name}", lambda: reports.update({name: make()}))
            reports[name].save(path)
        low, high = reports[name].interval()
        say(f"{name:>16}: EM {reports[name].mean():.3f}  [{low:.3f}, {high:.3f}]  n={len(reports[name])}")

    options = {"seed": config.evaluation.seed}
    for name in BASELINES if not trainer.finished and not trainer.phase else ():
        if task_set.index is not None:
            look(name, lambda name=name: evaluation.run_baseline(name, policy, test_set, **options))
    for name in BASELINES:
        if name not in reports and (folder / "evaluation" / f"{name}.json").exists():
            look(name, lambda: None)

    def score(name: str) -> None:
        temperature = config.evaluation.temperature
        look(name, lambda: evaluation.evaluate(policy, test_set, name=name, temperature=temperature, **options))

    if not trainer.finished and not trainer.phase or (folder / "evaluation" / "base.json").exists():
        score("base")
    for phase, work in phases(config, trainer, task_set):
        done_before = phase in trainer.finished
        measured(phase, work)
        if not done_before or (folder / "evaluation" / f"{phase}.json").exists():
            score(phase)
        _save_seconds(folder, seconds)
    policy.save(folder / "policy")
    summary = {
        "em": {name: reports[name].mean() for name in ("base", "imitation", "offline", "online") if name in reports},
        "interval": {name: list(reports[name].interval()) for name in reports},
        "n": len(test_set.tasks),
        "baselines": {name: reports[name].mean() for name in BASELINES if name in reports},
        "seconds": {**seconds, "total": sum(seconds.values())},
        "seed": config.training.seed,
        "split": config.evaluation.split,
        "algorithm": config.training.algorithm,
        "versions": versions(),
    }
    write_text(folder / "summary.json", json.dumps(summary, indent=1) + "\n")
    return summary


def phases(config: Config, trainer: AgentR1Trainer, task_set: TaskSet) -> list[tuple[str, Callable[[], Any]]]:
    """The phases that the configuration switches on, in order."""
    rlhf, out = config.rlhf, []
    if rlhf.imitation_epochs:
        data = data_file(rlhf.imitation_data or "data/demonstrations.jsonl")
        out.append(("imitation", lambda: trainer.pretrain(data)))
    if rlhf.offline_phase:
        logs = data_file(rlhf.offline_data)
        out.append(("offline", lambda: trainer.offline_rl(logs)))
    if rlhf.online_rollouts != 0:
        out.append(("online", lambda: trainer.online_rl(task_set)))
    return out


def _load_seconds(folder: Path) -> dict[str, float]:
    path = folder / "seconds.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def _save_seconds(folder: Path, seconds: dict[str, float]) -> None:
    write_text(folder / "seconds.json", json.dumps(seconds, indent=1) + "\n")
