"""The trainer: imitation, offline RL and online RL of one policy, in one run folder.

Every random choice (questions of a step, order of demonstrations, sampling
noise) is a function of the run's seed, the phase and the step, so a run that
was killed continues to the numbers of one that was not.
"""

from __future__ import annotations

import dataclasses
import json
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from tqdm.auto import tqdm

from agentr1_lite import update
from agentr1_lite.batch import collate
from agentr1_lite.checkpoint import load_checkpoint, restore_random_state, save_checkpoint
from agentr1_lite.config import Config, load_config
from agentr1_lite.doctor import Doctor, zero_variance_share
from agentr1_lite.env import ToolEnv
from agentr1_lite.jsonl import write_text
from agentr1_lite.losses import KLController, awr_weights
from agentr1_lite.mdp import StopReason, Task, Trajectory, load_jsonl, save_jsonl
from agentr1_lite.policy import QwenPolicy
from agentr1_lite.rollout import rollout
from agentr1_lite.tasks.scripted import encode_log, load_logs
from agentr1_lite.versions import versions

Metrics = dict[str, float]
PHASES = ("imitation", "offline", "online")


class Callback(Protocol):
    """What a view may listen to; every method is optional."""

    def on_step(self, trainer: AgentR1Trainer, phase: str, step: int, metrics: Metrics) -> None: ...

    def on_trajectories(self, trainer: AgentR1Trainer, step: int, trajectories: Sequence[Trajectory]) -> None: ...

    def on_phase(self, trainer: AgentR1Trainer, phase: str, finished: bool) -> None: ...


class AgentR1Trainer:
    """Train a policy by ``pretrain``, ``offline_rl`` and ``online_rl``, in any order and number.

    Args:
        policy: the policy to train.
        config: a `Config`, a mapping, a YAML path or a recipe name.
        callbacks: objects with methods of `Callback`.
        accelerator: an `accelerate.Accelerator`; with several processes each does its share of every batch.

    Settings are read at every step, so changing ``trainer.config.training.lr`` takes effect on the next one.
    """

    def __init__(
        self,
        policy: QwenPolicy,
        config: Config | Mapping[str, Any] | str | Path | None = None,
        *,
        callbacks: Sequence[Any] = (),
        accelerator: Any = None,
    ) -> None:
        if config is None:
            config = Config()
        elif isinstance(config, Mapping):
            config = Config.from_dict(config)
        elif not isinstance(config, Config):
            config = load_config(config)
        self.policy, self.config, self.callbacks, self.accelerator = policy, config, list(callbacks), accelerator
        self.run_dir = Path(config.run.output)
        self.kl = KLController(config.training.kl_weight, config.training.kl_target)
        self.doctor = Doctor(policy)
        self.findings: list[Any] = []
        self.optimizers: dict[str, torch.optim.Optimizer] = {}
        self.phase, self.step, self.count, self.finished = "", 0, 0, []
        self.stop_requested = False
        self._seen = dataclasses.asdict(config)
        self._pending: dict[str, Any] = {}

    # The three phases

    def pretrain(self, sft_dataset: Sequence[Any] | str | Path, *, epochs: int | None = None) -> list[Metrics]:
        """Phase 1: maximise log π(a*|s) on demonstrations, on action tokens alone.

        ``sft_dataset``: trajectories, message logs, or a file of either. The loop is the kit's own: TRL's
        SFTTrainer takes the same masks (`agentr1_lite.bridges.trl.run_sft`) but costs more than the model here.
        """
        data = self.trajectories(sft_dataset)
        rlhf = self.config.rlhf
        size = rlhf.logs_per_step
        epochs = rlhf.imitation_epochs if epochs is None else epochs
        steps = epochs * -(-len(data) // size)

        def step(index: int) -> Metrics:
            batch = collate([data[i] for i in self._slice(len(data), size, index)]).to(self.policy.device)
            weights = torch.ones(len(batch), device=batch.input_ids.device)
            return self._imitate(batch, weights, rlhf.imitation_lr, index, steps)

        return self._run("imitation", steps, step)

    def offline_rl(self, logs: Sequence[Any] | str | Path | None = None, *, epochs: int | None = None) -> list[Metrics]:
        """Phase 2: learn from logged trajectories what paid off.

        "awr" weighs log π by exp(A/β) with A = R − mean reward of the question's logs; "dpo" prefers the
        better of two logs of one question (`agentr1_lite.bridges.trl.run_dpo`).
        """
        data = self.trajectories(self.config.rlhf.offline_data if logs is None else logs)
        rlhf = self.config.rlhf
        size = rlhf.logs_per_step
        epochs = rlhf.offline_epochs if epochs is None else epochs
        if rlhf.offline_algorithm == "dpo":
            return self._dpo(data, epochs)
        rewards = [t.total_reward for t in data]
        baselines = update.group_baselines(rewards, [t.task_id for t in data])
        advantages = torch.tensor(rewards) - torch.tensor(baselines)
        weights = awr_weights(advantages, rlhf.offline_beta)
        steps = epochs * -(-len(data) // size)

        def step(index: int) -> Metrics:
            chosen = self._slice(len(data), size, index)
            batch = collate([data[i] for i in chosen]).to(self.policy.device)
            by_row = weights[chosen].to(batch.input_ids.device)[batch.trajectory_index]
            metrics = self._imitate(batch, by_row, rlhf.offline_lr, index, steps)
            return {
                **metrics,
                "weight_mean": float(by_row.mean()),
                "reward": float(torch.tensor(rewards)[chosen].mean()),
            }

        return self._run("offline", steps, step)

    def online_rl(
        self, env: Any, n_rollouts: int | None = None, *, tasks: Sequence[Task] | None = None
    ) -> list[Metrics]:
        """Phase 3: sample, score, estimate, update, by the algorithm that ``config.training`` names.

        ``env``: a `ToolEnv` with tasks, or what `load_task` returns. ``n_rollouts`` is the number of episodes
        in all; without it the configuration decides.
        """
        tasks = list(tasks if tasks is not None else env.tasks)
        env = getattr(env, "env", env)
        training = self.config.training
        if not tasks:
            raise ValueError("online_rl: there is no task to train on; pass tasks=, or load them with load_task")
        total = self.config.rlhf.online_rollouts if n_rollouts is None else n_rollouts
        per_step = training.batch_size * training.group_size
        steps = (
            max(1, total // per_step)
            if total is not None
            else training.epochs * max(1, len(tasks) // training.batch_size)
        )
        if update.needs_critic(training.algorithm):
            self.policy.add_critic()
        return self._run("online", steps, lambda index: self._online_step(env, tasks, index))

    # One step of each

    def _imitate(self, batch: Any, weights: torch.Tensor, lr: float, index: int, steps: int) -> Metrics:
        decay = max(0.1, 1.0 - index / max(steps, 1))  # linear to a tenth: logs are seen a few times only
        stats = update.nll_gradient(
            self.policy, batch, weights, self.config.training.micro_batch_tokens, share=self._share
        )
        return {**stats, "grad_norm": self._apply("actor", lr * decay)}

    def _online_step(self, env: ToolEnv, tasks: list[Task], index: int) -> Metrics:
        training, started = self.config.training, time.perf_counter()
        chosen = [tasks[i] for i in self._slice(len(tasks), training.batch_size, index)]
        trajectories, baselines = self._sample(env, chosen, index)
        sampled = time.perf_counter()
        experience = update.prepare(
            self.policy,
            trajectories,
            training,
            kl_weight=self.kl.value,
            kl_penalty=self.config.reward.kl_penalty,
            baselines=baselines,
        )
        metrics = episode_metrics(trajectories)
        warm = update.needs_critic(training.algorithm) and index < training.critic_warmup
        for sweep in range(training.updates_per_batch):
            seed = update.phase_seed(training.seed, "mini", index, sweep)
            for number, rows in enumerate(update.mini_batches(experience, training.mini_batches, seed)):
                first = sweep == number == 0
                if update.needs_critic(training.algorithm):
                    metrics.update(update.critic_gradient(self.policy, experience, rows, training, share=self._share))
                    metrics["critic_grad_norm"] = self._apply("critic", training.critic_lr)
                if warm:
                    continue
                stats = update.actor_gradient(
                    self.policy,
                    experience,
                    rows,
                    training,
                    kl_weight=self.kl.value,
                    max_length=env.max_response_tokens,
                    share=self._share,
                )
                if first:
                    metrics["first_log_ratio_max"] = stats.pop("log_ratio_max", 0.0)
                rate = update.learning_rate(index, training.lr, training.warmup_steps)
                metrics.update({k: v for k, v in stats.items() if k != "tokens"}, grad_norm=self._apply("actor", rate))
        if experience.ref_logprobs is not None:
            mask = experience.batch.action_mask
            metrics["kl"] = float((experience.old_logprobs - experience.ref_logprobs)[mask].mean())
            metrics["kl_weight"] = self.kl.update(metrics["kl"], len(trajectories))
        self.policy.version += 1
        metrics["rollout_seconds"] = sampled - started
        metrics["update_seconds"] = time.perf_counter() - sampled
        self.findings = self.doctor.examine(trajectories, experience.batch, metrics)
        self._pending["trajectories"] = trajectories
        return metrics

    def _sample(self, env: ToolEnv, tasks: list[Task], index: int) -> tuple[list[Trajectory], list[float] | None]:
        """Rollouts of the step's questions, and each question's greedy return where ReMax asks for it."""
        training = self.config.training
        seed = update.phase_seed(training.seed, "rollout", index)
        options = {"temperature": training.temperature, "seed": seed}
        mine = tasks[self._share.rank :: self._share.size]
        found = rollout(self.policy, env, mine, group_size=training.group_size, **options)
        if training.resample_zero_variance:
            found = self._resampled(env, mine, found, options)
        greedy: list[float] | None = None
        if update.find(training.algorithm).__name__ == "remax":
            best = {t.task_id: t.total_reward for t in rollout(self.policy, env, mine, greedy=True, seed=seed)}
            greedy = [best[t.task_id] for t in found]
        if self._share.size > 1:
            from accelerate.utils import gather_object

            found = gather_object(found)
            greedy = gather_object(greedy) if greedy is not None else None
        return found, greedy

    def _resampled(self, env: ToolEnv, tasks: list[Task], found: list[Trajectory], options: dict) -> list[Trajectory]:
        """Groups that all earned the same teach nothing: their questions are sampled once more with other noise."""
        size = self.config.training.group_size
        groups = [found[i : i + size] for i in range(0, len(found), size)]
        flat = [i for i, group in enumerate(groups) if len({t.total_reward for t in group}) == 1]
        if flat:
            options = {**options, "seed": options["seed"] + 1}
            fresh = rollout(self.policy, env, [tasks[i] for i in flat], group_size=size, **options)
            for place, i in enumerate(flat):
                groups[i] = fresh[place * size : (place + 1) * size]
        return [t for group in groups for t in group]

    def _dpo(self, data: list[Trajectory], epochs: int) -> list[Metrics]:
        """TRL runs the steps; a run that is killed here starts the phase again from the checkpoint before it."""
        from agentr1_lite.bridges.trl import dpo_pairs, run_dpo

        if "offline" in self.finished:
            return []
        rlhf, history = self.config.rlhf, []
        self.phase = ""
        self._begin("offline")

        def on_step(metrics: Metrics) -> bool:
            numbers = {k: float(v) for k, v in metrics.items() if isinstance(v, int | float) and k != "step"}
            history.append(numbers)
            self.step += 1
            self.count += 1
            self._record("offline", numbers)
            return not self.stop_requested

        with self._interruptible():
            run_dpo(
                self.policy,
                dpo_pairs(data),
                beta=rlhf.offline_beta,
                lr=rlhf.offline_lr,
                epochs=epochs,
                batch_size=max(1, rlhf.logs_per_step // 2),
                seed=self.config.training.seed,
                on_step=on_step,
            )
        if self.stop_requested:
            raise KeyboardInterrupt("stopped in the DPO phase; `resume` starts it again")
        self._end("offline")
        return history

    # The loop around a step

    def _run(self, phase: str, steps: int, step: Callable[[int], Metrics]) -> list[Metrics]:
        if phase in self.finished:
            return []
        self._begin(phase)
        history = []
        bar = tqdm(range(steps), desc=phase, initial=self.step, disable=not self.config.run.progress or not self._leads)
        with self._interruptible(), bar:
            while self.step < steps and not self.stop_requested:
                started = time.perf_counter()
                metrics = step(self.step)
                metrics["seconds"] = time.perf_counter() - started
                history.append(metrics)
                self.step += 1
                self.count += 1
                self._record(phase, metrics)
                bar.update()
                bar.set_postfix(
                    {k: f"{metrics[k]:.3f}" for k in ("reward", "nll", "kl") if k in metrics}, refresh=False
                )
                if self.config.run.save_every and self.step % self.config.run.save_every == 0:
                    self.save_checkpoint()
        if self.stop_requested:
            self.save_checkpoint()
            raise KeyboardInterrupt(f"stopped in phase {phase} after step {self.step}; `resume` continues there")
        self._end(phase)
        return history

    def _begin(self, phase: str) -> None:
        """Enter a phase, or go on in it: its optimiser starts empty, its reference is the policy as it now is."""
        if self.phase != phase:
            self.phase, self.step = phase, 0
            self.optimizers.clear()
            self.policy.freeze_reference()
        self.stop_requested = False
        if self._leads:
            self.run_dir.mkdir(parents=True, exist_ok=True)
            if not (self.run_dir / "config.yaml").exists():
                self.config.save(self.run_dir / "config.yaml")
                write_text(self.run_dir / "versions.json", json.dumps(versions(), indent=1))
        self._tell("on_phase", phase, False)

    def _end(self, phase: str) -> None:
        self.finished.append(phase)
        self.phase = ""
        self.save_checkpoint()
        self._tell("on_phase", phase, True)

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        """The first Ctrl-C finishes the step and saves; a second one stops at once."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def ask(signum: int, frame: Any) -> None:
            if self.stop_requested:
                raise KeyboardInterrupt
            self.stop_requested = True
            tqdm.write("Stopping after this step and saving; press Ctrl-C again to stop at once.")

        former = signal.signal(signal.SIGINT, ask)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, former)

    def stop(self) -> None:
        """Ask the running phase to stop after its step and save."""
        self.stop_requested = True

    def _record(self, phase: str, metrics: Metrics) -> None:
        trajectories = self._pending.pop("trajectories", None)
        if self._leads:
            self._log_changes()
            row = {"phase": phase, "step": self.step, **metrics}
            with (self.run_dir / "metrics.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            if trajectories is not None:
                save_jsonl(self.run_dir / "trajectories" / f"{self.step:06d}.jsonl", trajectories)
            for finding in self.findings:
                if finding.level != "ok":
                    self._note_finding(finding)
        if trajectories is not None:
            self._tell("on_trajectories", self.step, trajectories)
        self._tell("on_step", phase, self.step, metrics)

    def _note_finding(self, finding: Any) -> None:
        row = {"phase": self.phase, "step": self.step, **dataclasses.asdict(finding)}
        with (self.run_dir / "doctor.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def _log_changes(self) -> None:
        """A setting that was changed during the run is part of its record."""
        now = dataclasses.asdict(self.config)
        for section, values in now.items():
            for name, value in values.items():
                if value != self._seen[section][name]:
                    row = {"phase": self.phase, "step": self.step, "setting": f"{section}.{name}", "value": value}
                    with (self.run_dir / "changes.jsonl").open("a", encoding="utf-8") as file:
                        file.write(json.dumps(row) + "\n")
        self._seen = now

    def _tell(self, event: str, *args: Any) -> None:
        for callback in self.callbacks:
            method = getattr(callback, event, None)
            if method is not None:
                method(self, *args)

    # Run folder, checkpoints

    def save_checkpoint(self) -> Path | None:
        if not self._leads:
            return None
        tensors = {
            "policy": self.policy.state_dict(),
            "optimizers": {name: optimizer.state_dict() for name, optimizer in self.optimizers.items()},
        }
        state = {
            "phase": self.phase,
            "step": self.step,
            "count": self.count,
            "finished": self.finished,
            "version": self.policy.version,
            "kl_weight": self.kl.value,
            "training_seed": self.config.training.seed,
        }
        return save_checkpoint(self.run_dir, self.count, tensors, state, self.config.run.keep)

    def resume(self) -> AgentR1Trainer:
        """Continue the run in ``config.run.output``: phases that ended are skipped, the open one goes on."""
        tensors, state, _ = load_checkpoint(self.run_dir)
        self.policy.load_state_dict(tensors["policy"])
        self.phase, self.step, self.count = state["phase"], state["step"], state["count"]
        self.finished, self.policy.version = list(state["finished"]), state["version"]
        self.kl.value = state["kl_weight"]
        for name, saved in tensors["optimizers"].items():
            self._optimizer(name).load_state_dict(saved)
        restore_random_state(tensors["random"])
        self._drop_records_after(self.count)
        return self

    def _drop_records_after(self, count: int) -> None:
        """Steps after the checkpoint are run again, so their rows go."""
        file = self.run_dir / "metrics.jsonl"
        if self._leads and file.exists():
            lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
            write_text(file, "".join(lines[:count]))

    # Small parts

    def trajectories(self, data: Sequence[Any] | str | Path) -> list[Trajectory]:
        """Trajectories as they are, message logs encoded once; a path is read first."""
        if isinstance(data, str | Path):
            path = Path(data)
            data = load_jsonl(path) if path.suffix == ".jsonl" and _holds_trajectories(path) else load_logs(path)
        encoded = [d if isinstance(d, Trajectory) else encode_log(d, self.policy.chat) for d in data]
        if not encoded:
            raise ValueError("there is no trajectory to learn from; give at least one")
        return encoded

    def _slice(self, total: int, size: int, index: int) -> list[int]:
        """Indices of step ``index``: a fresh permutation every epoch, drawn from seed, phase and epoch."""
        per_epoch = -(-total // size)
        epoch, place = divmod(index, per_epoch)
        seed = update.phase_seed(self.config.training.seed, self.phase, "order", epoch)
        order = torch.randperm(total, generator=torch.Generator().manual_seed(seed)).tolist()
        return order[place * size : (place + 1) * size]

    def _optimizer(self, name: str) -> torch.optim.Optimizer:
        if name not in self.optimizers:
            parameters = self.policy.actor_parameters() if name == "actor" else self.policy.critic_parameters()
            decay = self.config.training.weight_decay
            self.optimizers[name] = torch.optim.AdamW(parameters, lr=0.0, betas=(0.9, 0.95), weight_decay=decay)
        return self.optimizers[name]

    def _apply(self, name: str, lr: float) -> float:
        optimizer = self._optimizer(name)
        for group in optimizer.param_groups:
            group["lr"] = lr
        parameters = self.policy.actor_parameters() if name == "actor" else self.policy.critic_parameters()
        reduce = None if self._share.size == 1 else lambda g: self.accelerator.reduce(g, "sum")
        norm = update.apply_gradient(parameters, optimizer, self.config.training.grad_clip, reduce)
        if norm != norm:
            warnings.warn(
                f"the {name}'s gradient is not finite at step {self.step}; the step was left out", stacklevel=2
            )
        return norm

    @property
    def _share(self) -> update.Share:
        if self.accelerator is None:
            return update.Share()
        return update.Share(self.accelerator.process_index, self.accelerator.num_processes)

    @property
    def _leads(self) -> bool:
        return self._share.rank == 0


def episode_metrics(trajectories: Sequence[Trajectory]) -> Metrics:
    """Means over episodes, for curves: reward and its parts, turns, tokens, shares of the stop reasons."""
    count = len(trajectories)
    metrics = {
        "reward": sum(t.total_reward for t in trajectories) / count,
        "turns": sum(len(t.turns) for t in trajectories) / count,
        "action_tokens": sum(t.num_actions for t in trajectories) / count,
        "tokens": sum(t.num_tokens for t in trajectories) / count,
        "tool_calls": sum(len(turn.calls) for t in trajectories for turn in t.turns) / count,
    }
    for part in sorted({name for t in trajectories for name in t.reward_parts}):
        metrics[f"reward/{part}"] = sum(t.reward_parts.get(part, 0.0) for t in trajectories) / count
    for reason in StopReason:
        share = sum(t.stop_reason is reason for t in trajectories) / count
        if share:
            metrics[f"stop/{reason.value}"] = share
    metrics["frac_reward_zero_std"] = zero_variance_share(trajectories)
    logprobs = [
        x for t in trajectories for s in t.segments for x, a in zip(s.logprobs, s.action_mask, strict=True) if a
    ]
    metrics["entropy_estimate"] = -sum(logprobs) / max(len(logprobs), 1)
    return metrics


def _holds_trajectories(path: Path) -> bool:
    with path.open(encoding="utf-8") as file:
        return '"segments"' in file.readline()
