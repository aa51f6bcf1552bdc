"""The trainer: imitation, offline RL and online RL of one policy, in one run folder.

Every random choice (questions of a step, order of demonstrations, sampling
noise) is a function of the run's seed, the phase and the step, so a run that
was killed continues to the numbers of one that was not.

A phase goes on where its last call stopped: steps are counted on, and questions,
epochs and noise follow those of the calls before; data that is new to it begins
with an epoch of its own. Optimiser and reference are those of the phase: they are
made anew where it is entered from another one, and kept by calls that follow each
other. The learning rate of phases 1 and 2 falls over the steps of each call;
warm-ups of phase 3 count the steps of the phase.
"""

from __future__ import annotations

import math
import numbers
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from tqdm.auto import tqdm

from agentr1_lite import update
from agentr1_lite.batch import Batch, collate
from agentr1_lite.checkpoint import Place, interruptible, load_checkpoint, restore_random_state, save_checkpoint
from agentr1_lite.collect import Engines, collect
from agentr1_lite.config import Config, ConfigError, load_config
from agentr1_lite.doctor import Doctor, step_gradient
from agentr1_lite.env import ToolEnv
from agentr1_lite.importance import engine_metrics
from agentr1_lite.losses import KLController, awr_weights
from agentr1_lite.mdp import Task, Trajectory
from agentr1_lite.optimizers import LossScale, make_optimizer, optimizer_name
from agentr1_lite.policy import QwenPolicy
from agentr1_lite.preferences import dpo_pairs, dpo_step
from agentr1_lite.runlog import RunLog, fingerprint
from agentr1_lite.tasks.scripted import encode_log, load_logs

Metrics = dict[str, float]
SHOWN = ("reward", "nll", "kl")  # beside the progress bar, where a step has them


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
    ``phase`` is the one that is open ("" between calls), ``step`` the steps of the last one, over all calls of it,
    ``count`` those of the run.
    """

    def __init__(
        self,
        policy: QwenPolicy,
        config: Config | Mapping[str, Any] | str | Path | None = None,
        *,
        callbacks: Sequence[Any] = (),
        accelerator: Any = None,
    ) -> None:
        if config is None or isinstance(config, Mapping):
            config = Config.from_dict(config or {})
        elif not isinstance(config, Config):
            config = load_config(config)
        self.policy, self.config, self.callbacks, self.accelerator = policy, config, list(callbacks), accelerator
        self.run_dir = Path(config.run.output)
        self.log = RunLog(self.run_dir, config)
        self.kl, self._kl_weight = KLController(config.training.kl_weight), config.training.kl_weight
        self.doctor = Doctor(policy)
        self.findings: list[Any] = []
        self.optimizers: dict[str, torch.optim.Optimizer] = {}
        self.loss_scale = LossScale.of(policy.causal.dtype)
        self.phase, self.step, self.count = "", 0, 0
        self.places: dict[str, Place] = {}
        self._entered = ""  # the phase that optimisers and reference belong to
        self.finished: list[str] = []
        self.stop_requested, self._opened = False, False
        self._ended_before: list[str] = []  # phases of a resumed run: the next call of each does nothing
        self._episodes: list[Trajectory] | None = None
        self._engine = Engines(policy, config.training)

    # The three phases

    def pretrain(self, sft_dataset: Sequence[Any] | str | Path, *, epochs: int | None = None) -> list[Metrics]:
        """Phase 1: maximise log π(a*|s) on demonstrations, on action tokens alone.

        ``sft_dataset``: trajectories, message logs, or a file of either. The loop is the kit's own: TRL's
        SFTTrainer takes the same masks (`agentr1_lite.bridges.trl.run_sft`) but costs more than the model here.
        """
        data, rlhf = self.trajectories(sft_dataset), self.config.rlhf
        epochs = _whole("pretrain", "epochs", rlhf.imitation_epochs if epochs is None else epochs)

        def step(chosen: list[int], decay: float) -> Metrics:
            batch = self._collate([data[i] for i in chosen])
            return self._imitate(batch, torch.ones(len(batch)), rlhf.imitation_lr * decay)

        return self._run("imitation", data, epochs * len(data), lambda left: min(left, rlhf.logs_per_step), step)

    def offline_rl(self, logs: Sequence[Any] | str | Path | None = None, *, epochs: int | None = None) -> list[Metrics]:
        """Phase 2: learn from logged trajectories what paid off.

        "awr" weighs log π by exp(A/β) with A = R − mean reward of the question's logs; "dpo" prefers the
        better of two logs of one question (`agentr1_lite.preferences`).
        """
        data, rlhf = self.trajectories(self.config.rlhf.offline_data if logs is None else logs), self.config.rlhf
        epochs = _whole("offline_rl", "epochs", rlhf.offline_epochs if epochs is None else epochs)
        if rlhf.offline_algorithm == "dpo":
            return self._prefer(data, epochs)
        rewards = torch.tensor([t.total_reward for t in data])
        baselines = torch.tensor(update.group_baselines(rewards.tolist(), [t.task_id for t in data]))
        weights = awr_weights(rewards - baselines, rlhf.offline_beta)

        def step(chosen: list[int], decay: float) -> Metrics:
            batch = self._collate([data[i] for i in chosen])
            by_row = weights[chosen][batch.trajectory_index.cpu()]
            metrics = self._imitate(batch, by_row, rlhf.offline_lr * decay)
            return {**metrics, "weight_mean": float(by_row.mean()), "reward": float(rewards[chosen].mean())}

        return self._run("offline", data, epochs * len(data), lambda left: min(left, rlhf.logs_per_step), step)

    def _prefer(self, data: list[Trajectory], epochs: int) -> list[Metrics]:
        rlhf, pairs = self.config.rlhf, dpo_pairs(data)
        if not pairs:
            raise ValueError("offline_rl: no two logs of one question earned differently; DPO needs such pairs")

        def step(chosen: list[int], decay: float) -> Metrics:
            budget = self.config.training.micro_batch_tokens
            picked = [pairs[i] for i in chosen]
            stats = dpo_step(self.policy, picked, beta=rlhf.offline_beta, max_tokens=budget, **self._shared)
            return {**stats, "grad_norm": self._apply("actor", rlhf.offline_lr * decay)}

        def size(left: int) -> int:
            return min(left, max(1, rlhf.logs_per_step // 2))

        return self._run("offline", pairs, epochs * len(pairs), size, step)

    def online_rl(
        self, env: Any, n_rollouts: int | None = None, *, tasks: Sequence[Task] | None = None
    ) -> list[Metrics]:
        """Phase 3: sample, score, estimate, update, by the algorithm that ``config.training`` names.

        ``env``: a `ToolEnv` with tasks, or what `load_task` returns. ``n_rollouts`` is the number of episodes of
        this call, in whole groups; the last step is as small as what is left of it. Without it the configuration
        decides. 0 trains nothing.
        """
        tasks, training = list(tasks if tasks is not None else env.tasks), self.config.training
        env = getattr(env, "env", env)
        if not tasks:
            raise ValueError("online_rl: there is no task to train on; pass tasks=, or load them with load_task")
        total = self.config.rlhf.online_rollouts if n_rollouts is None else n_rollouts
        if total is None:
            questions = min(training.batch_size, len(tasks))
            total = training.epochs * (len(tasks) // questions * questions) * training.group_size
        total = _whole("online_rl", "n_rollouts", total)
        if 0 < total < training.group_size:
            raise ValueError(
                f"online_rl: n_rollouts is {total}, less than one group of training.group_size {training.group_size}; "
                "give at least that many, or 0 to train nothing"
            )
        if not total:
            return []
        if update.needs_critic(training.algorithm):
            self.policy.add_critic()
        self.doctor.has_tools = bool(getattr(env, "tools", True))
        self._engine(training, self._share)

        def size(left: int) -> int:
            return min(training.batch_size, len(tasks), left // training.group_size)

        def step(chosen: list[int], decay: float) -> Metrics:
            return self._online_step(env, tasks, chosen, self.step)

        return self._run("online", tasks, total, size, step)

    # One step of each

    def _imitate(self, batch: Batch, weights: torch.Tensor, lr: float) -> Metrics:
        budget, weights = self.config.training.micro_batch_tokens, weights.to(batch.input_ids.device)
        stats = update.nll_gradient(self.policy, batch, weights, budget, **self._shared)
        return {**stats, "grad_norm": self._apply("actor", lr)}

    def _online_step(self, env: ToolEnv, tasks: list[Task], chosen: list[int], index: int) -> Metrics:
        training, started = self.config.training, time.perf_counter()
        engine = self._engine(training, self._share)
        episodes, baselines = collect(self.policy, env, tasks, chosen, index, training, self._share, engine)
        sampled = time.perf_counter()
        self.kl.target = training.kl_target
        if training.kl_weight != self._kl_weight:  # changed during the run
            self.kl.value = self._kl_weight = training.kl_weight
        experience = update.prepare(
            self.policy,
            episodes,
            training,
            kl_weight=self.kl.value,
            kl_penalty=self.config.reward.kl_penalty,
            baselines=baselines,
        )
        metrics = update.episode_metrics(episodes) | engine_metrics(experience.old_logprobs, experience.batch, training)
        warm = update.needs_critic(training.algorithm) and index < training.critic_warmup
        for sweep in range(training.updates_per_batch):
            seed = update.phase_seed(training.seed, "mini", index, sweep)
            for rows in update.mini_batches(experience, training.mini_batches, seed):
                stats = self._fit(experience, rows, index, warm, env.max_response_tokens)
                if "log_ratio_max" in stats:
                    metrics.setdefault("first_log_ratio_max", stats["log_ratio_max"])
                metrics.update(stats)
        if experience.ref_logprobs is not None:
            mask = experience.batch.action_mask
            metrics["kl"] = float((experience.old_logprobs - experience.ref_logprobs)[mask].mean())
            metrics["kl_weight"] = self.kl.update(metrics["kl"], len(episodes))
        if self.loss_scale.value != 1.0:
            metrics["loss_scale"] = self.loss_scale.value
        self.policy.version += not warm
        metrics["rollout_seconds"] = sampled - started
        metrics["update_seconds"] = time.perf_counter() - sampled
        weights = {"kl_weight": self.kl.value, "max_length": env.max_response_tokens}
        gradient = partial(step_gradient, self.policy, experience, training, **weights)
        self.findings = self.doctor.examine(episodes, experience.batch, metrics, gradient)
        self._episodes = episodes
        return metrics

    def _fit(
        self, experience: update.Experience, rows: torch.Tensor, index: int, warm: bool, max_length: int
    ) -> Metrics:
        """One optimiser step of the critic, where there is one, and of the actor, unless the critic warms up."""
        training, stats = self.config.training, {}
        if experience.values is not None:
            stats = update.critic_gradient(self.policy, experience, rows, training, **self._shared)
            stats["critic_grad_norm"] = self._apply("critic", training.critic_lr)
        if not warm:
            weight = {"kl_weight": self.kl.value, "max_length": max_length}
            stats |= update.actor_gradient(self.policy, experience, rows, training, **weight, **self._shared)
            stats["grad_norm"] = self._apply("actor", update.learning_rate(index, training.lr, training.warmup_steps))
        return {name: value for name, value in stats.items() if name != "tokens"}

    # The loop around a step

    def _run(
        self,
        phase: str,
        data: Sequence[Any],
        total: int,
        size: Callable[[int], int],
        step: Callable[[list[int], float], Metrics],
    ) -> list[Metrics]:
        """Steps of a phase until ``total`` rows (in phase 3 rollouts) of this call are done.

        Args:
            size: rows left → how many of ``data`` the next step takes, 0 at the end.
            step: their numbers, and the factor of a falling learning rate → metrics.
        """
        if not total or not self._begin(phase, data, total, size):
            return []
        place, history, quiet = self.places[phase], [], not (self.config.run.progress and self._leads)
        steps, done = self._steps_left(place, len(data), total, size), place.step - place.begun
        with interruptible(self), tqdm(total=done + steps, desc=phase, initial=done, disable=quiet) as bar:
            while size(total - place.done) and not self._stopping():
                started, worth = time.perf_counter(), self._worth
                chosen, epoch, row = self._draw(place, len(data), size(total - place.done))
                done = place.step - place.begun
                metrics = step(chosen, update.decay(done, done + self._steps_left(place, len(data), total, size)))
                place.epoch, place.row, place.done = epoch, row, place.done + len(chosen) * worth
                metrics["seconds"] = time.perf_counter() - started
                history.append(metrics)
                self._record(metrics)
                bar.update()
                bar.set_postfix({k: f"{metrics[k]:.3f}" for k in SHOWN if k in metrics}, refresh=False)
                if self.config.run.save_every and self.step % self.config.run.save_every == 0:
                    self.save_checkpoint()
            if self._stopping():
                self.save_checkpoint()
                raise KeyboardInterrupt(f"stopped in phase {phase} after step {self.step}; resume continues there")
        self.finished.append(phase)
        self.phase = ""
        self.save_checkpoint()
        self._tell("on_phase", phase, True)
        return history

    def _begin(self, phase: str, data: Sequence[Any], total: int, size: Callable[[int], int]) -> bool:
        """Enter a phase, or go on in it; False where the call had ended before the run was resumed.

        Entered from another phase, its optimiser starts empty and its reference is the policy as it now is.
        """
        place = self.places.setdefault(phase, Place())
        if place.epoch < 0:  # saved by an older version, which kept the number of steps alone
            self._reckon(phase, place, len(data), size(total))
        if phase in self._ended_before:
            self._ended_before.remove(phase)
            last = self.finished[-1] == phase and phase not in self._ended_before and not self.phase
            if not last or not size(total - place.done):
                return False
            self.finished.pop()
            self.phase = phase  # the run ended with this phase, and is asked for more of it
        mark = fingerprint(data)
        if self.phase == phase and place.data not in ("", mark):
            raise ValueError(
                f"phase {phase} of {self.run_dir} stopped after step {place.step} in other data than it is given now; "
                "go on with the former, or start a run of its own"
            )
        if self.phase != phase:
            place.begun, place.done = place.step, 0
            if place.row and (phase != "online" or place.data != mark):
                place.epoch, place.row = place.epoch + 1, 0
        self.open()
        self.phase, self.step, place.data = phase, place.step, mark
        if self._entered != phase:
            self._entered = phase
            self.optimizers.clear()
            self.policy.freeze_reference()
        self.stop_requested, self.findings = False, []
        self._tell("on_phase", phase, False)
        return True

    def _reckon(self, phase: str, place: Place, rows: int, size: int) -> None:
        """Where so many steps of one size have led."""
        place.epoch, at = divmod(place.step, rows // size if phase == "online" else math.ceil(rows / size))
        place.row = at * size
        place.done = place.step * size * self.config.training.group_size
        if phase != "online":
            place.done = place.epoch * rows + place.row

    @property
    def _worth(self) -> int:
        """What a row of the data counts: a question its rollouts, anything else 1."""
        return self.config.training.group_size if self.phase == "online" else 1

    def _draw(self, place: Place, rows: int, size: int) -> tuple[list[int], int, int]:
        """The rows of the next step, and the epoch and row behind them; phase 3 leaves the rest of an epoch out."""
        epoch, row = place.epoch, place.row
        if row + (size if self.phase == "online" else 1) > rows:
            epoch, row = epoch + 1, 0
        seed = update.phase_seed(self.config.training.seed, self.phase, "order")
        chosen = update.epoch_rows(rows, epoch, seed)[row : row + size]
        return chosen, epoch, row + len(chosen)

    def _steps_left(self, place: Place, rows: int, total: int, size: Callable[[int], int]) -> int:
        left, most = (total - place.done) // self._worth, size(total)
        if self.phase == "online":
            return math.ceil(left / most)
        rest = (rows - place.row) % rows  # of the epoch
        return math.ceil(rest / most) + (left - rest) // rows * math.ceil(rows / most)

    def stop(self) -> None:
        """Ask the running phase to stop after its step and save."""
        self.stop_requested = True

    def _stopping(self) -> bool:
        """Whether any process was asked to stop: all of them leave the loop at one step."""
        return any(self._share.gather([self.stop_requested]))

    def _record(self, metrics: Metrics) -> None:
        self.step = self.places[self.phase].step = self.step + 1
        self.count += 1
        episodes, self._episodes = self._episodes, None
        if self._leads:
            place = {"phase": self.phase, "step": self.step, "count": self.count}
            self.log.step(place, metrics, self.config, self.findings, episodes)
        if episodes is not None:
            self._tell("on_trajectories", self.step, episodes)
        self._tell("on_step", self.phase, self.step, metrics)

    def _tell(self, event: str, *args: Any) -> None:
        for callback in self.callbacks:
            method = getattr(callback, event, None)
            if method is not None:
                method(self, *args)

    # Run folder, checkpoints

    def open(self) -> None:
        """Start the run in its folder, with a checkpoint of the first weights; a former run there is moved aside."""
        if self._opened or not self._leads:
            return
        moved = self.log.start(self.config)
        if moved is not None:
            warnings.warn(f"{self.run_dir} held a run; it was moved to {moved}, over an older one there", stacklevel=2)
        self._opened = True
        self.save_checkpoint()

    def save_checkpoint(self) -> Path | None:
        if not self._leads:
            return None
        optimizers = {name: optimizer.state_dict() for name, optimizer in self.optimizers.items()}
        state = {
            "phase": self.phase,
            "step": self.step,
            "count": self.count,
            "finished": self.finished,
            "places": {name: asdict(place) for name, place in self.places.items()},
            "entered": self._entered,
            "version": self.policy.version,
            "kl_weight": self.kl.value,
            "kl_setting": self._kl_weight,
            "loss_scale": asdict(self.loss_scale),
            "optimizer": optimizer_name(self.config.training.optimizer, self.policy),
        }
        tensors = {"policy": self.policy.state_dict(), "optimizers": optimizers}
        return save_checkpoint(self.run_dir, self.count, tensors, state, self.config.run.keep)

    def resume(self) -> AgentR1Trainer:
        """Continue the run in ``config.run.output``: phases that ended are skipped once, the open one goes on."""
        tensors, state, _ = load_checkpoint(self.run_dir)
        self.log.check_same_model(self.config)
        kind = optimizer_name(self.config.training.optimizer, self.policy)
        if kind != state.get("optimizer", kind):
            said = f"run.output: {self.run_dir} was trained by {state['optimizer']}, not {kind}"
            raise ConfigError(f"{said}; resume with training.optimizer={state['optimizer']}")
        self.phase, self.step, self.count = state["phase"], state["step"], state["count"]
        self.finished, self._ended_before = list(state["finished"]), list(state["finished"])
        last = self.phase or "".join(self.finished[-1:])
        began = self.log.resume(self.count, self.config, set(self.finished) - {last})
        self.policy.load_state_dict(tensors["policy"])
        older = {last: {"step": self.step, "epoch": -1}} if last else {}
        self.places = {name: Place(**place) for name, place in state.get("places", older).items()}
        self._entered = state.get("entered", last)
        self.policy.version, self.kl.value = state["version"], state["kl_weight"]
        self.loss_scale = LossScale(**state.get("loss_scale", {}))
        for name, saved in tensors["optimizers"].items():
            self._optimizer(name).load_state_dict(saved)
        restore_random_state(tensors["random"])
        if self._leads:
            self.log.drop_after(self.count)
        self._kl_weight = state.get("kl_setting", began.training.kl_weight)  # another one acts with the next step
        rows = [row for row in self.log.rows() if row["phase"] == "online"]
        self.doctor.history = [{k: v for k, v in row.items() if isinstance(v, int | float)} for row in rows[-100:]]
        self._opened = True
        return self

    # Small parts

    def trajectories(self, data: Sequence[Any] | str | Path) -> list[Trajectory]:
        """Trajectories as they are, message logs encoded once; a path is read first."""
        rows = load_logs(data) if isinstance(data, str | Path) else data
        chat, written = self.policy.chat, self.config.environment.call_format
        encoded = [row if isinstance(row, Trajectory) else encode_log(row, chat, written) for row in rows]
        if not encoded:
            raise ValueError("the data holds no trajectory to learn from; give at least one")
        return encoded

    def _collate(self, trajectories: list[Trajectory]) -> Batch:
        return collate(trajectories, pad_id=self.policy.tokenizer.pad_token_id or 0).to(self.policy.device)

    def _optimizer(self, name: str) -> torch.optim.Optimizer:
        if name not in self.optimizers:
            kind = self.config.training.optimizer
            self.optimizers[name] = make_optimizer(kind, self.policy, self._parameters(name))
        return self.optimizers[name]

    def _parameters(self, name: str) -> list[torch.nn.Parameter]:
        return self.policy.actor_parameters() if name == "actor" else self.policy.critic_parameters()

    def _apply(self, name: str, lr: float) -> float:
        optimizer, training = self._optimizer(name), self.config.training
        for group in optimizer.param_groups:
            group.update(lr=lr, weight_decay=training.weight_decay)
        reduce = None if self._share.size == 1 else lambda g: self.accelerator.reduce(g, "sum")
        scale = self.loss_scale.value
        norm = update.apply_gradient(self._parameters(name), optimizer, training.grad_clip, reduce, scale)
        self.loss_scale.update(norm)
        if not math.isfinite(norm) and scale == 1.0:  # above 1 the scale is what was too large, and it has been halved
            warnings.warn(f"the {name}'s gradient is not finite in step {self.step}, which is left out", stacklevel=2)
        return norm

    @property
    def _shared(self) -> dict[str, Any]:
        """What every gradient function is told: this process's part, and the factor on the loss."""
        return {"share": self._share, "scale": self.loss_scale.value}

    @property
    def _share(self) -> update.Share:
        if self.accelerator is None or self.accelerator.num_processes == 1:
            return update.Share()
        from accelerate.utils import gather_object

        return update.Share(self.accelerator.process_index, self.accelerator.num_processes, gather_object)

    @property
    def _leads(self) -> bool:
        return self._share.rank == 0


def _whole(call: str, name: str, value: Any) -> int:
    """A number of epochs or rollouts; ``ValueError`` where it is none."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not (value >= 0 and value % 1 == 0):
        raise ValueError(f"{call}: {name} is {value!r}; give a whole number, 0 to train nothing")
    return int(value)
