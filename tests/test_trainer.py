"""The three phases on a tiny random model: every algorithm by name, run folders, kills and interruptions."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file

from agentr1_lite import advantages, update
from agentr1_lite.collect import collect
from agentr1_lite.config import ALGORITHMS, TrainingConfig
from agentr1_lite.mdp import Segment, StopReason, Trajectory, Turn, load_jsonl, save_jsonl
from agentr1_lite.trainer import AgentR1Trainer


def trainer_for(folder: Path, *, policy=None, rlhf=None, run=None, reward=None, callbacks=(), **training):
    training = {"batch_size": 2, "group_size": 3, "critic_warmup": 0, "lr": 1e-3, "kl_weight": 0.01, **training}
    config = {"training": training, "rlhf": rlhf or {}, "reward": reward or {}}
    config["run"] = {"output": str(folder), "progress": False, **(run or {})}
    return AgentR1Trainer(policy or tiny.policy(), config, callbacks=callbacks)


def weights(policy) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in policy.actor_parameters()]).clone()


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def without_seconds(rows: list[dict]) -> list[dict]:
    return [{key: value for key, value in row.items() if "seconds" not in key} for row in rows]


# Phase 3

VARIANTS = {
    **{name: {"algorithm": name} for name in ALGORITHMS},
    "GSPO": {"ratio": "sequence", "aggregation": "seq-mean-token-mean", "clip_low": 3e-4, "clip_high": 4e-4},
    "CISPO": {"loss": "cispo", "clip_low": 1.0, "clip_high": 4.0},
    **{name: {"algorithm": name} for name in ("opo", "gpg", "grpo_passk", "gspo", "dapo", "cispo")},
    "entropy bonus": {"entropy_weight": 0.05},
    "KL in the reward": {"kl_in": "reward", "kl_weight": 0.1},
    "KL in PPO's loss": {"algorithm": "PPO", "kl_in": "loss", "kl_weight": 0.1},
    "adaptive KL": {"kl_weight": 0.1, "kl_target": 0.01, "updates_per_batch": 2},
    "no loss mask": {"loss_mask": False},
    "no advantage mask": {"algorithm": "PPO", "advantage_mask": False},
    "no mask at all": {"algorithm": "PPO", "loss_mask": False, "advantage_mask": False},
    "GiGPO without masks": {"algorithm": "GiGPO", "loss_mask": False, "advantage_mask": False},
    "several updates": {"updates_per_batch": 2, "mini_batches": 2, "micro_batch_tokens": 400},
    "temperature": {"temperature": 0.7},
    "LoRA": {"lora_rank": 4},
    "LoRA PPO": {"lora_rank": 4, "algorithm": "PPO"},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_one_online_step_by_name(name, tmp_path):
    training = dict(VARIANTS[name])
    policy = tiny.policy(lora_rank=training.pop("lora_rank", 0))
    trainer, before = trainer_for(tmp_path, policy=policy, **training), weights(policy)
    (row,) = trainer.online_rl(tiny.ScoredEnv(), 6, tasks=tiny.tasks(3))
    assert all(math.isfinite(value) for value in row.values())
    assert row["turns"] == 3 and row["grad_norm"] > 0  # two replies stand between the turns
    assert row["first_log_ratio_max"] <= 1e-4
    assert not torch.equal(before, weights(policy))
    assert ("value_loss" in row) == (trainer.config.training.algorithm in ("PPO", "turn-level GAE", "n-step"))
    assert ("entropy" in row) == (trainer.config.training.entropy_weight > 0)
    assert row["frac_reward_zero_std"] < 1 and policy.version == 1


@pytest.mark.parametrize("reads", ["values", "baseline"])
def test_an_estimator_of_ones_own_is_given_what_it_names(reads, monkeypatch, tmp_path):
    """Whatever its function is called: a critic for ``values``, greedy rollouts for ``baseline``."""
    monkeypatch.setattr(advantages, "ESTIMATORS", dict(advantages.ESTIMATORS))
    monkeypatch.setattr(advantages, "_KEYS", dict(advantages._KEYS))
    seen = []
    if reads == "values":

        @advantages.estimator("My own")
        def grpo(rewards, mask, values, *, gamma=1.0):
            seen.append(values)
            return rewards - values, rewards
    else:

        @advantages.estimator("My own")
        def gae(rewards, mask, *, baseline):
            seen.append(baseline)
            return torch.where(mask, rewards.sum(-1, keepdim=True) - baseline[:, None], 0.0), rewards

    trainer = trainer_for(tmp_path, algorithm="my_own")
    (row,) = trainer.online_rl(tiny.ScoredEnv(), 6, tasks=tiny.tasks(3))
    assert len(seen) == 1 and row["grad_norm"] > 0 and ("value_loss" in row) == (reads == "values")
    assert update.kl_place(trainer.config.training) == ("reward" if reads == "values" else "loss")


def test_a_critic_warms_up_alone(tmp_path):
    trainer = trainer_for(tmp_path, algorithm="PPO", critic_warmup=1)
    before = weights(trainer.policy)
    (row,) = trainer.online_rl(tiny.ScoredEnv(), 6, tasks=tiny.tasks(3))
    assert "grad_norm" not in row and row["critic_grad_norm"] > 0
    assert torch.equal(before, weights(trainer.policy)) and trainer.policy.version == 0


class Flat(tiny.ScoredEnv):
    """Pays one question's rollouts alike."""

    def fork(self):
        return Flat(max_turns=1)

    def step(self, text, finish_reason="stop"):
        step = super().step(text, finish_reason)
        if self.question.startswith("Who"):
            step.info["turn"].process_reward = step.info["outcome"] = 0.0
        return step

    def reset(self, task, seed=0):
        self.question = task.question
        return super().reset(task, seed)


@pytest.mark.parametrize("chosen", [[0, 1], [0, 3], [0, 1, 2, 3]])
def test_a_question_without_variance_is_replaced_by_another(chosen):
    policy, tasks = tiny.policy(), tiny.tasks(4)  # questions 0 and 3 begin with "Who"
    for resample in (False, True):
        config = TrainingConfig(group_size=3, algorithm="ReMax", resample_zero_variance=resample)
        found, greedy = collect(policy, Flat(), tasks, chosen, 0, config)
        assert len(found) == len(greedy) == 3 * len(chosen)
        groups = [found[i : i + 3] for i in range(0, len(found), 3)]
        played = [{t.task_id for t in group} for group in groups]
        assert all(len({t.group_id for t in group}) == 1 for group in groups)
        replaced = [f"t{i}" not in ids for i, ids in zip(chosen, played, strict=True)]
        assert replaced == ([i in (0, 3) and len(chosen) == 2 for i in chosen] if resample else [False] * len(chosen))
        assert [g == 0 for g in greedy[::3]] == [ids <= {"t0", "t3"} for ids in played]


def test_rollouts_are_counted_in_whole_steps(tmp_path):
    trainer = trainer_for(tmp_path, batch_size=64, group_size=2)
    assert len(trainer.online_rl(tiny.ScoredEnv(max_turns=1), 4, tasks=tiny.tasks(3))) == 1
    assert len(load_jsonl(tmp_path / "trajectories" / "000001.jsonl")) == 4
    trainer.config.training.batch_size = 1
    assert len(trainer.online_rl(tiny.ScoredEnv(max_turns=1), 5, tasks=tiny.tasks(3))) == 2
    trainer.config.training.epochs = 2
    assert len(trainer.online_rl(tiny.ScoredEnv(max_turns=1), tasks=tiny.tasks(3))) == 6
    assert trainer.finished == ["online"] * 3 and trainer.count == 9
    with pytest.raises(ValueError, match="no task to train on"):
        trainer.online_rl(tiny.ScoredEnv())


def played(folder: Path) -> list[tuple[str, int]]:
    """Question and seed of every rollout of a run, in order."""
    files = sorted((folder / "trajectories").iterdir())
    return [(t.task_id, t.seed) for path in files for t in load_jsonl(path)]


ENV = {"max_turns": 2}


@pytest.mark.parametrize("algorithm", ["GRPO", "PPO"])
def test_calls_that_follow_each_other_are_one_phase(algorithm, tmp_path):
    """Three calls of 6 rollouts are one of 18: questions, seeds, step numbers and weights."""
    options = {"algorithm": algorithm, "kl_target": 0.01, "critic_warmup": 1, "warmup_steps": 2}
    whole = trainer_for(tmp_path / "whole", **options)
    history = whole.online_rl(tiny.ScoredEnv(**ENV), 18, tasks=tiny.tasks(5))
    parts = trainer_for(tmp_path / "parts", **options)
    found = [parts.online_rl(tiny.ScoredEnv(**ENV), n_rollouts=6, tasks=tiny.tasks(5)) for _ in range(3)]
    assert [len(rows) for rows in found] == [1, 1, 1] and len(history) == 3
    assert played(tmp_path / "parts") == played(tmp_path / "whole")
    assert len({task for task, _ in played(tmp_path / "parts")}) == 4 and len(set(played(tmp_path / "parts"))) == 18
    rows, wanted = (without_seconds(rows_of(tmp_path / name / "metrics.jsonl")) for name in ("parts", "whole"))
    assert rows == wanted and [row["step"] for row in rows] == [1, 2, 3]
    assert torch.equal(weights(parts.policy), weights(whole.policy))


def test_steps_of_any_size_go_through_the_questions_in_turn(tmp_path):
    """Other batch sizes, calls and phases between them: no question comes twice before all have come."""
    trainer = trainer_for(tmp_path, batch_size=2, group_size=2)
    env, tasks = tiny.ScoredEnv(max_turns=1), tiny.tasks(7)
    trainer.online_rl(env, 4, tasks=tasks)
    trainer.pretrain(logs(2), epochs=1)
    trainer.config.training.batch_size = 3
    trainer.online_rl(env, 6, tasks=tasks)
    trainer.online_rl(env, 5, tasks=tasks)  # two whole groups
    asked = [task for task, _ in played(tmp_path)][::2]
    assert sorted(asked) == [f"t{i}" for i in range(7)]
    rows = rows_of(tmp_path / "metrics.jsonl")
    assert [(row["phase"], row["step"]) for row in rows] == [
        ("online", 1),
        ("imitation", 1),
        ("online", 2),
        ("online", 3),
    ]
    trainer.online_rl(env, 8, tasks=tasks[:4])  # other questions: an epoch of their own
    assert sorted(task for task, _ in played(tmp_path)[14:][::2]) == ["t0", "t1", "t2", "t3"]


def test_a_phase_takes_what_it_was_given_in_this_call(tmp_path):
    """Every epoch of every call sees each of its rows once, in orders that go on."""
    seen = []
    trainer = trainer_for(tmp_path, rlhf={"logs_per_step": 4})
    trainer._imitate = lambda batch, w, lr: seen.append((batch.input_ids[:, -1].tolist(), lr)) or {"nll": 0.0}
    first, second = ([log(f"t{i}", GOOD[:5] + [70 + i], 1.0, i) for i in range(a, b)] for a, b in ((0, 6), (6, 16)))
    trainer.pretrain(first, epochs=2)
    trainer.pretrain(second, epochs=1)
    trainer.pretrain(first, epochs=1)
    ids = [[i for batch, _ in seen[a:b] for i in batch] for a, b in ((0, 2), (2, 4), (4, 7), (7, 9))]
    assert [sorted(epoch) for epoch in ids] == [list(range(70, 76))] * 2 + [list(range(76, 86)), list(range(70, 76))]
    assert len({tuple(epoch) for epoch in ids}) == 4
    assert [row["step"] for row in rows_of(tmp_path / "metrics.jsonl")] == list(range(1, 10))
    rate = trainer.config.rlhf.imitation_lr  # falls over the steps of each call
    assert [lr / rate for _, lr in seen] == pytest.approx([1, 0.75, 0.5, 0.25, 1, 2 / 3, 1 / 3, 1, 0.5])


def test_nothing_is_trained_where_nothing_is_asked_for(tmp_path):
    trainer, before = trainer_for(tmp_path / "run", rlhf={"online_rollouts": 0}), None
    before = weights(trainer.policy)
    env, tasks = tiny.ScoredEnv(max_turns=1), tiny.tasks(3)
    assert trainer.online_rl(env, 0, tasks=tasks) == trainer.online_rl(env, tasks=tasks) == []
    assert trainer.pretrain(logs(2), epochs=0) == trainer.offline_rl(logs(2), epochs=0) == []
    trainer.config.rlhf.offline_algorithm = "dpo"
    assert trainer.offline_rl(logs(2), epochs=0) == []
    assert torch.equal(before, weights(trainer.policy)) and not (tmp_path / "run").exists()
    assert trainer.finished == [] and trainer.policy.version == 0
    for wrong in (-1, 2.5, math.nan, math.inf, True, "6"):
        with pytest.raises(ValueError, match="n_rollouts is .*; give a whole number, 0 to train nothing"):
            trainer.online_rl(env, wrong, tasks=tasks)
        for call in (trainer.pretrain, trainer.offline_rl):
            with pytest.raises(ValueError, match="epochs is .*; give a whole number"):
                call(logs(2), epochs=wrong)
    with pytest.raises(ValueError, match="n_rollouts is 2, less than one group of training.group_size 3"):
        trainer.online_rl(env, 2, tasks=tasks)
    assert len(trainer.online_rl(env, 3.0, tasks=tasks)) == 1 and len(played(tmp_path / "run")) == 3


def test_a_larger_batch_on_resume_acts(tmp_path):
    """Two steps of 2 questions, then steps of 4 for what is left: 24 rollouts all in all, no question twice."""
    tasks = tiny.tasks(8)

    def fresh(stop=None, **training):
        return trainer_for(tmp_path, callbacks=[TurnDown(stop)], **training)

    with pytest.raises(KeyboardInterrupt):
        fresh(2, lr=1e-4).online_rl(tiny.ScoredEnv(max_turns=1), 24, tasks=tasks)
    resumed = fresh(batch_size=4, lr=1e-4).resume()
    history = resumed.online_rl(tiny.ScoredEnv(max_turns=1), 24, tasks=tasks)
    found = played(tmp_path)
    assert len(history) == 1 and len(found) == 24
    assert sorted(task for task, _ in found[::3]) == [f"t{i}" for i in range(8)]
    changes = rows_of(tmp_path / "changes.jsonl")
    assert [(row["setting"], row["value"], row["count"]) for row in changes] == [("training.batch_size", 4, 3)]


def test_more_logs_in_a_step_on_resume_act(tmp_path):
    data = [log(f"t{i}", GOOD, 1.0, i) for i in range(10)]

    def fresh(stop=None, **rlhf):
        return trainer_for(tmp_path, rlhf=rlhf, callbacks=[TurnDown(stop)])

    with pytest.raises(KeyboardInterrupt):
        fresh(2, logs_per_step=2).pretrain(data, epochs=2)
    assert (
        len(fresh(logs_per_step=5).resume().pretrain(data, epochs=2)) == 2 + 2
    )  # 6 of the first epoch, 10 of the next


def test_what_is_asked_for_on_resume_counts(tmp_path):
    """Against a change made by hand during the run, and for the KL weight, which a controller holds."""
    trainer_for(tmp_path, callbacks=[Listener()]).online_rl(tiny.ScoredEnv(**ENV), 12, tasks=tiny.tasks(3))
    assert {row["setting"] for row in rows_of(tmp_path / "changes.jsonl")} == {"training.lr", "training.kl_weight"}
    same = trainer_for(tmp_path).resume()
    assert (same.config.training.lr, same.kl.value) == (0.0, 0.5)
    other = trainer_for(tmp_path, lr=2e-3, kl_weight=0.25).resume()
    (row,) = other.online_rl(tiny.ScoredEnv(**ENV), 18, tasks=tiny.tasks(3))
    assert other.config.training.lr == 2e-3 and row["kl_weight"] == 0.25 and row["grad_norm"] > 0


def test_a_setting_of_a_phase_that_has_ended_is_refused(tmp_path):
    def fresh(**rlhf):
        return trainer_for(tmp_path, rlhf={"logs_per_step": 6, **rlhf})

    run = fresh()
    run.pretrain(logs(2), epochs=1)
    run.online_rl(tiny.ScoredEnv(**ENV), 6, tasks=tiny.tasks(3))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(
        ValueError, match=r"rlhf.imitation_lr is 0.01 and was 0.001, but phase imitation of .* has ended"
    ):
        fresh(imitation_lr=0.01).resume()
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    fresh(offline_lr=0.01).resume()


def test_a_phase_does_not_go_on_in_other_data(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        trainer_for(tmp_path, callbacks=[TurnDown(1)]).online_rl(tiny.ScoredEnv(**ENV), 12, tasks=tiny.tasks(5))
    others = tiny.tasks(4) + [replace(tiny.tasks(5)[4], golds=("no",))]
    with pytest.raises(ValueError, match="phase online of .* stopped after step 1 in other data"):
        trainer_for(tmp_path).resume().online_rl(tiny.ScoredEnv(**ENV), 12, tasks=others)
    assert len(trainer_for(tmp_path).resume().online_rl(tiny.ScoredEnv(**ENV), 12, tasks=tiny.tasks(5))) == 1


# Phases 1 and 2


def log(task: str, words: list[int], reward: float, seed: int) -> Trajectory:
    """A prompt, a turn, a reply, a turn."""
    draw = torch.Generator().manual_seed(seed)
    segment = Segment()
    segment.extend([1, 40, 41, 42])
    turns = [Turn(0, *segment.extend(words[:3], [0.0] * 3))]
    segment.extend(torch.randint(3, 300, (5,), generator=draw).tolist())
    turns.append(Turn(0, *segment.extend(words[3:], [0.0] * (len(words) - 3))))
    return Trajectory(task, task, [segment], turns, reward=reward, stop_reason=StopReason.ANSWER)


GOOD, BAD = [50, 51, 52, 53, 54, 2], [60, 61, 62, 63, 64, 2]


def logs(count: int = 6) -> list[Trajectory]:
    return [log(f"t{i}", words, reward, i) for i in range(count) for words, reward in ((GOOD, 1.0), (BAD, 0.0))]


def scores(policy) -> tuple[float, float]:
    from agentr1_lite.batch import collate

    batch = collate([log("x", GOOD, 1.0, 99), log("x", BAD, 0.0, 99)])
    with torch.no_grad():
        return tuple(policy.log_probs(batch).logprobs.sum(-1).tolist())


def test_imitation_learns_what_was_shown(tmp_path):
    shown = {"imitation_lr": 5e-3, "logs_per_step": 4}
    trainer = trainer_for(tmp_path, rlhf=shown)
    before = scores(trainer.policy)
    history = trainer.pretrain([log(f"t{i}", GOOD, 1.0, i) for i in range(8)], epochs=4)
    assert len(history) == 8 and history[-1]["nll"] < 0.3 * history[0]["nll"]
    assert history[0]["loss"] == pytest.approx(history[0]["nll"], rel=1e-5)
    after = scores(trainer.policy)
    assert after[0] > before[0] + 5 and after[0] > after[1] + 5


@pytest.mark.parametrize("algorithm", ["awr", "dpo"])
@pytest.mark.parametrize("rank", [0, 4])
def test_offline_learning_prefers_what_paid(algorithm, rank, tmp_path):
    rlhf = {"offline_algorithm": algorithm, "offline_lr": 3e-3, "logs_per_step": 6, "offline_beta": 0.3}
    trainer = trainer_for(tmp_path, policy=tiny.policy(lora_rank=rank), rlhf=rlhf)
    before = scores(trainer.policy)
    history = trainer.offline_rl(logs(), epochs=4)
    after = scores(trainer.policy)
    assert after[0] - after[1] > before[0] - before[1] + 1 and len(history) == 8
    if algorithm == "dpo":
        assert history[-1]["margin"] > 0.5 and history[0]["loss"] == pytest.approx(math.log(2), rel=1e-4)
    else:
        assert [row["reward"] for row in history] != [] and history[0]["weight_mean"] > 1


def test_data_that_cannot_be_learned_from_is_named(tmp_path):
    trainer = trainer_for(tmp_path / "run", rlhf={"offline_algorithm": "dpo"})
    with pytest.raises(ValueError, match="DPO needs such pairs"):
        trainer.offline_rl([log("a", GOOD, 1.0, 0), log("b", BAD, 0.0, 1)])
    with pytest.raises(ValueError, match="holds no trajectory"):
        trainer.pretrain([])
    save_jsonl(tmp_path / "logs.jsonl", logs(2))
    assert trainer.trajectories(tmp_path / "logs.jsonl") == logs(2)
    with (tmp_path / "logs.jsonl").open("a") as file:
        file.write('{"segments": 3}\n')
    with pytest.raises(ValueError, match=r"logs\.jsonl, line 5: "):
        trainer.trajectories(str(tmp_path / "logs.jsonl"))
    assert not (tmp_path / "run").exists()


# The run folder


class Listener:
    def __init__(self):
        self.heard = []

    def on_step(self, trainer, phase, step, metrics):
        self.heard.append((phase, step))
        if (phase, step) == ("online", 1):
            trainer.config.training.lr, trainer.config.training.kl_weight = 0.0, 0.5

    def on_trajectories(self, trainer, step, trajectories):
        self.heard.append(len(trajectories))

    def on_phase(self, trainer, phase, finished):
        self.heard.append((phase, finished))


def test_a_run_is_told_to_its_folder_and_its_listeners(tmp_path):
    listener = Listener()
    trainer = trainer_for(tmp_path / "run", callbacks=[listener, object()], rlhf={"logs_per_step": 6})
    trainer.pretrain(logs(6), epochs=1)
    trainer.online_rl(tiny.ScoredEnv(max_turns=2), 12, tasks=tiny.tasks(3))
    steps = [("imitation", 1), ("imitation", 2)], [6, ("online", 1), 6, ("online", 2)]
    ends = [[(phase, False), (phase, True)] for phase in ("imitation", "online")]
    assert listener.heard == [ends[0][0], *steps[0], ends[0][1], ends[1][0], *steps[1], ends[1][1]]
    folder = tmp_path / "run"
    rows = rows_of(folder / "metrics.jsonl")
    assert [(r["phase"], r["step"], r["count"]) for r in rows] == [
        ("imitation", 1, 1),
        ("imitation", 2, 2),
        ("online", 1, 3),
        ("online", 2, 4),
    ]
    assert rows[3]["kl_weight"] == 0.5 and rows[2]["kl_weight"] == 0.01
    changes = {(row["setting"], row["value"], row["count"]) for row in rows_of(folder / "changes.jsonl")}
    assert changes == {("training.lr", 0.0, 4), ("training.kl_weight", 0.5, 4)}
    assert [path.name for path in sorted((folder / "trajectories").iterdir())] == ["000003.jsonl", "000004.jsonl"]
    assert {"config.yaml", "versions.json", "doctor.jsonl"} <= {path.name for path in folder.iterdir()}
    assert len(list((folder / "checkpoints").iterdir())) == trainer.config.run.keep
    (folder / "mine.txt").write_text("stays")
    with pytest.warns(UserWarning, match="held a run; it was moved to"):
        trainer_for(folder).pretrain(logs(2), epochs=1)
    assert len(rows_of(folder / "metrics.jsonl")) == 1 and len(rows_of(tmp_path / "run.former/metrics.jsonl")) == 4
    assert (folder / "mine.txt").exists() and [p.name for p in sorted((folder / "checkpoints").iterdir())][
        -1
    ] == "000001"


def test_a_gradient_that_is_not_finite_leaves_the_weights_alone(tmp_path):
    trainer = trainer_for(tmp_path)
    before = weights(trainer.policy)
    demonstrations = logs(1)
    with torch.no_grad():
        trainer.policy.causal.get_input_embeddings().weight[GOOD[0]] = math.inf
    poisoned = weights(trainer.policy)
    with pytest.warns(UserWarning, match="gradient is not finite"):
        trainer.pretrain(demonstrations, epochs=1)
    assert torch.equal(poisoned, weights(trainer.policy)) and not torch.equal(before, poisoned)
    (row,) = rows_of(tmp_path / "metrics.jsonl")
    assert row["grad_norm"] is None


# Stops and kills


def script(trainer: AgentR1Trainer) -> AgentR1Trainer:
    trainer.pretrain(logs(6), epochs=1)
    trainer.offline_rl(logs(6), epochs=1)
    trainer.online_rl(tiny.ScoredEnv(max_turns=2), 24, tasks=tiny.tasks(5))
    return trainer


class TurnDown:
    """A setting changed by hand during the run, and a stop at a step."""

    def __init__(self, stop=None):
        self.stop = stop

    def on_step(self, trainer, phase, step, metrics):
        if trainer.count == 7:
            trainer.config.training.lr, trainer.config.training.kl_weight = 2e-4, 0.5
        if trainer.count == self.stop:
            trainer.stop()


OPTIONS = {
    "algorithm": "PPO",
    "critic_warmup": 1,
    "kl_target": 0.01,
    "rlhf": {"logs_per_step": 4, "offline_algorithm": "dpo"},
    "run": {"save_every": 2},
}


@pytest.mark.parametrize("rank", [0, 4])
def test_a_stopped_run_continues_to_the_same_numbers(rank, tmp_path):
    def fresh(folder, stop=None):
        policy = tiny.policy(lora_rank=rank)
        return trainer_for(tmp_path / folder, policy=policy, callbacks=[TurnDown(stop)], **OPTIONS)

    whole = script(fresh("whole"))
    assert whole.count == 3 + 3 + 4
    for count in (1, 4, 8):
        with pytest.raises(KeyboardInterrupt, match=f"after step {[1, 1, 2][(1, 4, 8).index(count)]}; resume"):
            run = fresh("parts", count)
            script(run if count == 1 else run.resume())
    parts = script(fresh("parts").resume())
    assert torch.equal(weights(parts.policy), weights(whole.policy))
    found, wanted = (without_seconds(rows_of(tmp_path / name / "metrics.jsonl")) for name in ("parts", "whole"))
    assert found == wanted
    for name in (p.name for p in (tmp_path / "whole" / "trajectories").iterdir()):
        assert (tmp_path / "parts/trajectories" / name).read_text() == (
            tmp_path / "whole/trajectories" / name
        ).read_text()
    again = fresh("parts").resume()
    assert again.pretrain(logs(2)) == [] and again.phase == ""
    assert len(again.pretrain(logs(2), epochs=1)) == 1  # a second imitation phase is a new one


def calls(trainer: AgentR1Trainer) -> AgentR1Trainer:
    """A run of several calls of each phase, with other data between them."""
    env = tiny.ScoredEnv(max_turns=2)
    trainer.pretrain(logs(4), epochs=1)
    trainer.pretrain(logs(3), epochs=1)
    trainer.online_rl(env, 12, tasks=tiny.tasks(5))
    trainer.online_rl(env, 6, tasks=tiny.tasks(5))
    trainer.offline_rl(logs(3), epochs=1)
    trainer.online_rl(env, 12, tasks=tiny.tasks(4))
    return trainer


@pytest.mark.parametrize("older", [False, True])
def test_a_run_of_several_calls_continues_to_the_same_numbers(older, tmp_path):
    """Stopped in every call; a checkpoint of an older version knows the steps of the open call alone."""

    def fresh(folder, stop=None):
        return trainer_for(tmp_path / folder, callbacks=[TurnDown(stop)], **OPTIONS)

    run = script if older else calls
    whole = run(fresh("whole"))
    assert whole.count == (10 if older else 2 + 2 + 2 + 1 + 2 + 2)
    for count in (1, 2, 3, 5, 6, 8, 9):  # a setting changes behind step 7
        with pytest.raises(KeyboardInterrupt):
            run(fresh("parts", count) if count == 1 else fresh("parts", count).resume())
        for path in (tmp_path / "parts" / "checkpoints").glob("*/state.json") if older else ():
            state = json.loads(path.read_text())
            path.write_text(json.dumps({k: v for k, v in state.items() if k not in ("places", "entered")}))
    parts = run(fresh("parts").resume())
    assert torch.equal(weights(parts.policy), weights(whole.policy))
    found, wanted = (without_seconds(rows_of(tmp_path / name / "metrics.jsonl")) for name in ("parts", "whole"))
    assert found == wanted and played(tmp_path / "parts") == played(tmp_path / "whole")


def command(folder: Path, model: Path) -> list[str]:
    """A run of three phases with many steps in seconds; its rewards, entropy and KL terms keep gradients alive."""
    settings = {
        "model.base_model": model,
        "environment.max_turns": 2,
        "environment.max_turn_tokens": 8,
        "environment.max_response_tokens": 300,
        "environment.max_tool_tokens": 32,
        "training.algorithm": "PPO",
        "training.batch_size": 2,
        "training.group_size": 2,
        "training.critic_warmup": 1,
        "training.entropy_weight": 0.01,
        "training.kl_weight": 0.05,
        "reward.no_answer": -0.5,
        "reward.cut": -0.25,
        "rlhf.imitation_data": "demonstrations.jsonl",
        "rlhf.offline_data": "logs.jsonl",
        "rlhf.imitation_epochs": 3,
        "rlhf.offline_epochs": 3,
        "rlhf.logs_per_step": 2,
        "rlhf.online_rollouts": 40,
        "evaluation.questions": 2,
        "task.knobs.count": 12,
        "run.output": folder,
        "run.save_every": 3,
        "run.progress": "false",
    }
    return ["train", *(f"{key}={value}" for key, value in settings.items())]


@pytest.fixture(scope="module")
def work(tmp_path_factory) -> Path:
    """A folder with a tiny model, demonstrations and logs, in which the command line runs."""
    folder = tmp_path_factory.mktemp("work")
    tiny.policy().save(folder / "model")
    save_jsonl(folder / "demonstrations.jsonl", logs(2)[::2] + logs(4)[::2])
    save_jsonl(folder / "logs.jsonl", logs(3))
    return folder


def wait_for(process, metrics: Path, rows: int) -> None:
    """Until the run has recorded so many steps, or ended."""
    while process.is_alive() and not (metrics.exists() and metrics.read_bytes().count(b"\n") >= rows):
        time.sleep(0.002)


def assert_same_run(found: Path, wanted: Path) -> None:
    ours, theirs = (without_seconds(rows_of(folder / "metrics.jsonl")) for folder in (found, wanted))
    assert ours == theirs
    for name in ("model.safetensors", "critic.safetensors"):
        ours, theirs = (load_file(folder / "policy" / name) for folder in (found, wanted))
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)
    ours, theirs = (json.loads((folder / "summary.json").read_text()) for folder in (found, wanted))
    assert ours["em"] == theirs["em"] and ours["interval"] == theirs["interval"]


@pytest.fixture(scope="module")
def uninterrupted(work) -> Path:
    code, out, err = tiny.cli(*command(work / "whole", work / "model"), folder=work)
    assert code == 0, err
    phases = [row["phase"] for row in rows_of(work / "whole" / "metrics.jsonl")]
    assert phases == ["imitation"] * 9 + ["offline"] * 9 + ["online"] * 10
    assert sorted(json.loads((work / "whole/summary.json").read_text())["em"]) == [
        "base",
        "imitation",
        "offline",
        "online",
    ]
    return work / "whole"


def test_killed_runs_continue_to_the_same_numbers(work, uninterrupted):
    """SIGKILL inside each phase, at a random step and place within it, each time in the run that was resumed."""
    seed = int(os.environ.get("AGENTR1_KILL_SEED", time.time_ns() % 10**6))
    dice, arguments = random.Random(seed), command(work / "killed", work / "model")
    places = [dice.randint(1, 8), dice.randint(10, 17), dice.randint(19, 22), dice.randint(23, 27)]
    for number, rows in enumerate(places):
        process = tiny.start_cli(*arguments, *["--resume"] * bool(number), folder=work)
        wait_for(process, work / "killed" / "metrics.jsonl", rows)
        time.sleep(dice.random() * 0.1)
        os.kill(process.pid, signal.SIGKILL)
        process.join(60)
        assert process.exitcode == -signal.SIGKILL, (seed, places, (work / "err.txt").read_text())
    code, _, err = tiny.cli(*arguments, "--resume", folder=work)
    assert code == 0, (seed, places, err)
    assert_same_run(work / "killed", uninterrupted)


def test_ctrl_c_saves_and_the_run_continues(work, uninterrupted):
    arguments = command(work / "asked", work / "model")
    process = tiny.start_cli(*arguments, folder=work)
    wait_for(process, work / "asked" / "metrics.jsonl", 20)
    os.kill(process.pid, signal.SIGINT)
    process.join(60)
    assert process.exitcode == 130
    said = (work / "err.txt").read_text()
    assert "stopped in phase online after step" in said and "Traceback" not in said
    step = int(said.split("after step ")[1].split(";")[0])
    assert (work / "asked" / "checkpoints" / f"{18 + step:06d}").is_dir()
    # without settings the run goes on with those it began with
    code, _, err = tiny.cli("train", "--resume", f"run.output={work / 'asked'}", folder=work)
    assert code == 0, err
    assert_same_run(work / "asked", uninterrupted)


def two_of(rank: int, port: int, arguments: list[str], folder: str) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1")
    os.environ.update(MASTER_PORT=str(port), ACCELERATE_USE_CPU="true")
    tiny.run_cli(arguments, folder)


def test_the_command_line_under_accelerate(work, uninterrupted):
    """What `accelerate launch` sets up for two processes; both learn alike and the first one writes."""
    arguments = [*command(work / "two", work / "model"), "rlhf.online_rollouts=8", "reward.no_answer=-0.4"]
    for rank in (0, 1):
        (work / str(rank)).mkdir()
        for name in ("demonstrations.jsonl", "logs.jsonl"):
            (work / str(rank) / name).write_bytes((work / name).read_bytes())
    port = tiny.free_port()
    make = tiny.processes().Process
    started = [make(target=two_of, args=(rank, port, arguments, str(work / str(rank)))) for rank in (0, 1)]
    for process in started:
        process.start()
    for process in started:
        process.join(120)
    said = [(work / str(rank) / "out.txt").read_text() for rank in (0, 1)]
    assert [process.exitcode for process in started] == [0, 0], [(work / f"{r}/err.txt").read_text() for r in (0, 1)]
    assert "online: EM" in said[0] and said[1] == ""
    rows, alone = (rows_of(folder / "metrics.jsonl") for folder in (work / "two", uninterrupted))
    assert [row["count"] for row in rows] == list(range(1, 21)) and (work / "two" / "summary.json").exists()
    for name in ("nll", "loss", "grad_norm"):
        two, one = ([row[name] for row in found[:18]] for found in (rows, alone))
        assert two == pytest.approx(one, rel=1e-3), name
