"""Online steps of the kit against TRL's GRPOTrainer: same model, tasks, group size and limits, in one process.

    python tests/benchmarks/vs_trl.py --json

An online step is a rollout of questions x group episodes and one GRPO update on them. The steps of the two sides
alternate, so that a change in the machine's load meets both. TRL gets the kit's ToolEnv through `environment_factory`
and a configuration that wastes nothing: float32, one generation for the whole batch, passes of `--trl-rows` rows (as
fast as one pass, and it fits in memory), no gradient checkpointing, no reference model, no logging, no saving. The
learning rate is tiny on both sides: the two policies stay the same, so both sample equally many tokens up to chance.
Warm-up steps are left out; medians count. `--micro-tokens` and `--trl-rows` set the size of a pass on either side.

The last line is one JSON object. `rollout_over_bare_pass` is the kit's rollout time over a forward pass of the plain
model over the same tokens, `update_over_bare_pass` its update time over a forward and backward pass of them.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a benchmark waits for no network
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
sys.path.append(str(Path(__file__).resolve().parents[2]))  # a checkout that is not installed

import torch
import transformers
import trl
from transformers import PrinterCallback, TrainerCallback

from agentr1_lite import update
from agentr1_lite.batch import Batch, micro_batches
from agentr1_lite.bridges.trl import grpo_trainer
from agentr1_lite.config import TrainingConfig
from agentr1_lite.env import ToolEnv
from agentr1_lite.mdp import StopReason, Task, Trajectory
from agentr1_lite.policy import QwenPolicy
from agentr1_lite.rollout import rollout
from agentr1_lite.tasks import load_task

LR = 1e-6


@dataclass
class Side:
    """What one side did in its timed steps."""

    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    reward: list[float] = field(default_factory=list)

    def add(self, seconds: float, tokens: float, reward: float) -> None:
        self.seconds.append(seconds)
        self.tokens.append(round(tokens))
        self.reward.append(reward)


class TrlRules(ToolEnv):
    """The environment with TRL's rules, so that both sides sample the same turns.

    TRL's generation stops at EOS only, and a call that it cannot parse ends the episode.
    """

    stop_strings = ()

    def _read(self, text: str, finish_reason: str) -> Any:
        plan = super()._read(text, finish_reason)
        broken = any("error" in call for call in plan.turn.calls)
        return plan._replace(stop=StopReason.NO_CALL, replies=[], jobs=[]) if broken and plan.stop is None else plan


@dataclass
class Ours:
    """The kit's online step, in the parts that its trainer is made of."""

    policy: QwenPolicy
    env: ToolEnv
    config: TrainingConfig

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.AdamW(self.policy.actor_parameters(), lr=LR, weight_decay=0.0)

    def rollout(self, tasks: list[Task], seed: int) -> list[Trajectory]:
        size = self.config.group_size
        return rollout(self.policy, self.env, tasks, group_size=size, temperature=1.0, seed=seed)

    def update(self, trajectories: list[Trajectory]) -> Batch:
        experience = update.prepare(self.policy, trajectories, self.config)
        rows = torch.arange(len(experience.batch))
        update.actor_gradient(self.policy, experience, rows, self.config)
        update.apply_gradient(self.policy.actor_parameters(), self.optimizer, self.config.grad_clip)
        return experience.batch

    def bare_pass(self, batch: Batch, backward: bool) -> None:
        """The plain model over every row of the batch; backward from the mean log-loss of the action tokens."""
        with torch.set_grad_enabled(backward):
            for rows in micro_batches(batch, self.config.micro_batch_tokens, share_prompt=False):
                width = int(batch.lengths[rows].max())
                ids, seen = batch.input_ids[rows, :width], batch.attention_mask[rows, :width]
                logits = self.policy.causal(input_ids=ids, attention_mask=seen.long(), use_cache=False).logits
                if backward:
                    labels = ids.masked_fill(~batch.action_mask[rows, :width], -100)
                    torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()).backward()
        self.policy.causal.zero_grad(set_to_none=True)


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


class Alternate(TrainerCallback):
    """After every step of TRL's, one of the kit's on the same questions."""

    def __init__(self, ours: Ours, tasks: list[Task], questions: int, warmup: int):
        self.ours, self.tasks, self.questions, self.warmup = ours, tasks, questions, warmup
        self.kit, self.trl = Side(), Side()
        self.parts: dict[str, list[float]] = {"rollout": [], "update": [], "bare_forward": [], "bare_backward": []}
        self.trainer: Any = None
        self.start = 0.0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.start = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        seconds = time.perf_counter() - self.start
        step, counted = state.global_step, state.global_step > self.warmup
        if counted:
            metrics = self.trainer._metrics["train"]  # mean over the batch of tokens whose tool_mask is 1
            episodes = self.questions * self.ours.config.group_size
            self.trl.add(seconds, metrics["completions/mean_length"][-1] * episodes, metrics["reward"][-1])
        self.kit_step(self.tasks[(step - 1) * self.questions : step * self.questions], step, counted)
        self.start = time.perf_counter()

    def kit_step(self, tasks: list[Task], seed: int, counted: bool) -> None:
        rolling, trajectories = timed(lambda: self.ours.rollout(tasks, seed))
        updating, batch = timed(lambda: self.ours.update(trajectories))
        forward, _ = timed(lambda: self.ours.bare_pass(batch, backward=False))
        backward, _ = timed(lambda: self.ours.bare_pass(batch, backward=True))
        if counted:
            sampled = sum(trajectory.num_actions for trajectory in trajectories)
            reward = statistics.fmean(trajectory.total_reward for trajectory in trajectories)
            self.kit.add(rolling + updating, sampled, reward)
            for name, value in zip(self.parts, (rolling, updating, forward, backward), strict=True):
                self.parts[name].append(value)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    steps = args.warmup + args.steps
    episodes = args.questions * args.group
    task_set = load_task(args.task, args.split)
    tasks = [task_set.tasks[i % len(task_set.tasks)] for i in range(steps * args.questions)]
    env = task_set.env
    env.__class__, env.lenient = TrlRules, False
    env.max_response_tokens = env.max_turn_tokens = args.max_tokens  # TRL has one budget for an episode
    config = TrainingConfig(algorithm="GRPO", kl_weight=0.0, group_size=args.group)
    if args.micro_tokens:
        config.micro_batch_tokens = args.micro_tokens
    ours = Ours(QwenPolicy(args.model, device="cpu"), env, config)
    alternate = Alternate(ours, tasks, args.questions, args.warmup)
    rows = math.gcd(episodes, args.trl_rows) if args.trl_rows else episodes
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = grpo_trainer(
            QwenPolicy(args.model, device="cpu"),
            env,
            tasks,
            folder,
            learning_rate=LR,
            max_steps=steps,
            per_device_train_batch_size=rows,
            gradient_accumulation_steps=episodes // rows,
            num_generations=args.group,
            max_completion_length=args.max_tokens,
            temperature=1.0,
            shuffle_dataset=False,
            logging_strategy="no",
        )
        alternate.trainer = trainer
        trainer.add_callback(alternate)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return report(alternate, episodes, args)


def report(alternate: Alternate, episodes: int, args: argparse.Namespace) -> dict[str, Any]:
    rates = {
        name: episodes / statistics.median(side.seconds)
        for name, side in (("ours", alternate.kit), ("trl", alternate.trl))
    }
    parts = {name: statistics.median(values) for name, values in alternate.parts.items()}
    return {
        "ratio_trajectories_per_second": rates["ours"] / rates["trl"],
        "ours_trajectories_per_second": rates["ours"],
        "trl_trajectories_per_second": rates["trl"],
        "sampled_tokens": {"ours": sum(alternate.kit.tokens), "trl": sum(alternate.trl.tokens)},
        "mean_reward": {
            "ours": statistics.fmean(alternate.kit.reward),
            "trl": statistics.fmean(alternate.trl.reward),
        },
        "rollout_over_bare_pass": parts["rollout"] / parts["bare_forward"],
        "update_over_bare_pass": parts["update"] / parts["bare_backward"],
        "seconds": {
            "ours_step": statistics.median(alternate.kit.seconds),
            "trl_step": statistics.median(alternate.trl.seconds),
            **parts,
        },
        "steps": args.steps,
        "episodes_per_step": episodes,
        "group_size": args.group,
        "micro_batch_tokens": alternate.ours.config.micro_batch_tokens,
        "trl_rows": alternate.trainer.args.per_device_train_batch_size,
        "threads": torch.get_num_threads(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "trl": trl.__version__,
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print the JSON line only")
    parser.add_argument("--model", default="atlas-tiny", help="policy name or folder")
    parser.add_argument("--task", default="atlas")
    parser.add_argument("--split", default="train")
    parser.add_argument("--questions", type=int, default=12, help="questions a step")
    parser.add_argument("--group", type=int, default=8, help="rollouts a question")
    parser.add_argument("--steps", type=int, default=5, help="timed steps")
    parser.add_argument("--warmup", type=int, default=1, help="steps before the clock counts")
    parser.add_argument("--max-tokens", type=int, default=900, help="budget of an episode behind its prompt")
    parser.add_argument(
        "--micro-tokens", type=int, default=4096, help="tokens of a pass of the kit's update; 0: its default"
    )
    parser.add_argument("--trl-rows", type=int, default=16, help="rows of a TRL pass; 0: all episodes of a step")
    parser.add_argument("--threads", type=int, default=0, help="torch threads; 0: torch's choice")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    result = measure(args)
    if not args.json:
        print(
            f"kit {result['ours_trajectories_per_second']:.1f} and TRL {result['trl_trajectories_per_second']:.1f} "
            f"trajectories/s: {result['ratio_trajectories_per_second']:.1f} x; rollout "
            f"{result['rollout_over_bare_pass']:.1f} x and update {result['update_over_bare_pass']:.1f} x a bare pass"
        )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
