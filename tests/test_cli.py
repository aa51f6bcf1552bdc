"""The command line: wrong input is one sentence and exit code 2, and the overview's interface runs as written."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import torch
import yaml

from agentr1_lite import AgentR1Trainer, QwenPolicy, collect_trajectory, compute_gae, compute_returns, load_task
from agentr1_lite.__main__ import main
from agentr1_lite.checkpoint import load_checkpoint
from agentr1_lite.config import load_config
from agentr1_lite.mdp import load_jsonl
from agentr1_lite.tasks.scripted import record

COMMANDS = ("train", "evaluate", "chat", "plan", "play", "merge", "data", "doctor", "report")
SMALL = {
    "environment.max_turns": 2,
    "environment.max_turn_tokens": 8,
    "environment.max_response_tokens": 300,
    "environment.max_tool_tokens": 32,
    "training.batch_size": 1,
    "training.group_size": 2,
    "evaluation.questions": 2,
    "task.knobs.count": 6,
    "rlhf.imitation_data": "demonstrations.jsonl",
    "rlhf.offline_data": "logs.json",
    "rlhf.online_rollouts": 4,
    "run.progress": "false",
}


@pytest.fixture(scope="module")
def template(tmp_path_factory) -> Path:
    """A folder with a tiny model and message logs."""
    folder = tmp_path_factory.mktemp("template")
    tiny.policy().save(folder / "model")
    found = load_task("atlas", "train", count=3, seed=1)
    logs = [record(found.env, t, p, n) for n, t in enumerate(found.tasks) for p in ("expert", "guesser")]
    (folder / "demonstrations.jsonl").write_text("".join(json.dumps(log) + "\n" for log in logs[::2]))
    (folder / "logs.json").write_text(json.dumps(logs))
    return folder


@pytest.fixture
def work(template, tmp_path) -> Path:
    for path in template.iterdir():
        (shutil.copytree if path.is_dir() else shutil.copy)(path, tmp_path / path.name)
    return tmp_path


def small(**more: object) -> list[str]:
    settings = {"model.base_model": "model", "run.output": "run", **SMALL}
    settings |= {key.replace("__", "."): value for key, value in more.items()}
    return [f"{key}={value}" for key, value in settings.items()]


def test_help_of_every_command_is_quick_and_needs_no_torch(tmp_path):
    code = (
        "import sys\nfrom agentr1_lite.__main__ import main\n"
        "try: main(sys.argv[1:])\nexcept SystemExit as e: print(e.code, sorted({'torch', 'numpy'} & set(sys.modules)))"
    )
    for words in ([], *([name] for name in COMMANDS)):
        run = subprocess.run([sys.executable, "-c", code, *words, "--help"], capture_output=True, text=True, timeout=20)
        assert run.stdout.endswith("0 []\n") and run.stderr == "", words
        assert all(name in run.stdout for name in words or COMMANDS)


# Wrong input


def harm_line(work: Path) -> None:
    rows = (work / "demonstrations.jsonl").read_text().splitlines()
    (work / "demonstrations.jsonl").write_text("\n".join([rows[0], rows[1][:-9], rows[2]]))


def harm_log(work: Path) -> None:
    (work / "demonstrations.jsonl").write_text('{"policy": "p"}\n')


def harm_latin(work: Path) -> None:
    (work / "logs.json").write_bytes('[{"policy": "é"}]'.encode("latin-1"))


def harm_weights(work: Path) -> None:
    file = work / "model" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:500])


def former_run(work: Path) -> None:
    (work / "run").mkdir()
    (work / "run" / "metrics.jsonl").write_text("")


def write(name: str, text: str):
    return lambda work: (work / name).write_text(text)


def nothing(work: Path) -> None:
    pass


TRAIN = ["train"]
WRONG = {
    "no such file": (nothing, ["train", "mine.yaml"], ["mine.yaml", "no such file", "atlas-tiny"]),
    "malformed YAML": (write("a.yaml", "training:\n  lr: [1"), ["train", "a.yaml"], ["a.yaml, line 2"]),
    "unknown section": (write("a.yaml", "trainig: {lr: 1}\n"), ["train", "a.yaml"], ["line 1", "trainig", "training"]),
    "unknown key": (
        write("a.yaml", "training:\n  learning_rate: 1\n"),
        ["train", "a.yaml"],
        ["a.yaml, line 2", "training.learning_rate", "training.lr"],
    ),
    "wrong value": (
        write("a.yaml", "training: {algorithm: PPPO}\n"),
        ["train", "a.yaml"],
        ["a.yaml, line 1", "training.algorithm", "'PPPO'", "GRPO"],
    ),
    "value out of range": (nothing, TRAIN + ["training.lr=7"], ["training.lr is 7", "a number from 0 to 0.1"]),
    "no override": (nothing, TRAIN + ["training.lr=1e-4", "fast"], ["'fast'", "section.key=value"]),
    "unknown option": (nothing, TRAIN + ["--quick"], ["--quick", "--help"]),
    "an option that other commands have": (nothing, ["doctor", "training.lr=1"], ["training.lr=1"]),
    "unknown command": (nothing, ["trian"], ["trian", "train"]),
    "no command": (nothing, [], ["required"]),
    "unknown task": (nothing, TRAIN + small(task__name="atlsa"), ["'atlsa'", "did you mean 'atlas'"]),
    "unknown knob": (nothing, TRAIN + small(task__knobs__hop=2), ["no knob 'hop'", "size"]),
    "wrong knob": (nothing, TRAIN + small(task__knobs__size="big"), ["size is 'big'", "whole number"]),
    "wrong knob of the environment": (nothing, TRAIN + small(task__knobs__max_tool_errors="x"), ["task.knobs", "'x'"]),
    "too many questions": (nothing, TRAIN + small(evaluation__questions=10**6), ["fewer than 1000000"]),
    "missing data": (nothing, TRAIN + small(rlhf__offline_data="none.json"), ["none.json", "no such file"]),
    "broken line": (harm_line, TRAIN + small(), ["demonstrations.jsonl, line 2", "not JSON"]),
    "broken log": (harm_log, TRAIN + small(), ["demonstrations.jsonl, line 1", "has no 'task'"]),
    "no logs": (write("logs.json", "[]"), TRAIN + small(), ["logs.json", "no trajectory"]),
    "other encoding": (harm_latin, TRAIN + small(), ["logs.json, line 1", "not UTF-8"]),
    "data is a folder": (nothing, TRAIN + small(rlhf__offline_data="model"), ["model", "directory"]),
    "no model folder": (nothing, TRAIN + small(model__base_model="./nowhere"), ["./nowhere", "no folder"]),
    "broken weights": (harm_weights, TRAIN + small(), ["model", "could not be loaded"]),
    "broken model config": (write("model/config.json", "{"), TRAIN + small(), ["model", "could not be loaded"]),
    "no tokenizer": (lambda work: (work / "model/tokenizer.json").unlink(), TRAIN + small(), ["holds no tokenizer"]),
    "unknown device": (nothing, TRAIN + small(model__device="tpu9"), ["device 'tpu9'"]),
    "absent device": (nothing, TRAIN + small(model__device="mps"), ["model.device 'mps'"]),
    "quantised without LoRA": (nothing, TRAIN + small(model__quantization="nf4"), ["model.lora_rank is 0"]),
    "a run is there": (former_run, TRAIN + small(), ["run holds a run already", "--resume", "--fresh"]),
    "nothing to resume": (nothing, TRAIN + small() + ["--resume"], ["run holds no checkpoint"]),
    "resume and fresh": (nothing, TRAIN + small() + ["--resume", "--fresh"], ["exclude each other"]),
    "run folder is a file": (write("run", ""), TRAIN + small(), ["run is a file"]),
    "unknown baseline": (nothing, ["evaluate", *small(), "--baseline", "oracle"], ["'oracle'", "naive_rag"]),
    "unknown policy": (nothing, ["evaluate", *small(), "--policy", "gone"], ["'gone'"]),
    "unknown split": (nothing, ["chat", *small(), "--split", "tset"], ["--split", "'tset'", "test"]),
    "question out of range": (nothing, ["play", *small(), "--number", "999"], ["--number 999", "questions 0 to"]),
    "question is no number": (nothing, ["play", *small(), "--number", "x"], ["--number", "'x'"]),
    "unknown data": (nothing, ["data", "words"], ["'words'", "worlds"]),
    "data into a file": (write("taken", ""), ["data", "worlds", "--output", "taken"], ["taken"]),
    "no run folder": (nothing, ["report", "gone"], ["gone is not a run folder"]),
    "an empty folder": (lambda work: (work / "empty").mkdir(), ["report", "empty"], ["empty is not a run folder"]),
    "a figure nowhere": (former_run, ["report", "run", "--figure", "gone/x.png"], ["gone/x.png", "that exists"]),
    "a figure that is a folder": (former_run, ["report", "run", "--figure", "run"], ["--figure run", ".png"]),
    "an empty question": (nothing, ["chat", *small(), "--question", " "], ["--question is empty"]),
    "a path that cannot be": (nothing, [*TRAIN, *small(), "run.output=/proc/x/y"], ["/proc/x", "can be written"]),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_input_is_one_sentence(name, work):
    harm, arguments, wanted = WRONG[name]
    harm(work)
    before = {path: path.stat().st_mtime_ns for path in work.rglob("*")}
    code, out, err = tiny.cli(*arguments, folder=work)
    assert code == 2, err
    assert out == "" and "Traceback" not in err
    (sentence,) = err.splitlines()
    assert all(word in sentence for word in wanted), sentence
    after = {path: path.stat().st_mtime_ns for path in work.rglob("*") if path.name not in ("out.txt", "err.txt")}
    assert {p: t for p, t in after.items() if p != work} == {p: t for p, t in before.items() if p != work}


# Right input


def test_a_run_from_the_command_line(work):
    (work / "a.yaml").write_text("rlhf: {offline_algorithm: dpo}\nevaluation: {every: 1}\n")
    code, out, err = tiny.cli("train", "a.yaml", "training.lr=1e-3", "--report", *small(), folder=work)
    assert code == 0, err
    run = work / "run"
    summary = json.loads((run / "summary.json").read_text())
    assert set(summary["em"]) == {"base", "imitation", "offline", "online"} and summary["n"] == 2
    assert set(summary["baselines"]) == {"closed_book", "naive_rag", "scripted_expert"}
    assert set(summary["interval"]) == set(summary["em"]) | set(summary["baselines"])
    assert {"imitation", "offline", "online", "evaluation", "total"} <= set(summary["seconds"])
    assert "offline: EM" in out
    assert load_config(run / "config.yaml").training.lr == 1e-3
    evaluations = [json.loads(line) for line in (run / "evaluations.jsonl").read_text().splitlines()]
    assert [row["step"] for row in evaluations] == [1, 2]
    assert (run / "report.html").is_file() and len(load_jsonl(next((run / "trajectories").iterdir()))) == 2
    assert QwenPolicy(run / "policy").name.endswith("policy")
    shown = tiny.cli("evaluate", *small(), "--policy", "run/policy", "--output", "new/report.json", folder=work)
    assert shown[0] == 0 and "EM" in shown[1] and (work / "new" / "report.json").is_file()
    code, out, err = tiny.cli("chat", *small(), "--policy", "run/policy", "--question", "Who rules Belu?", folder=work)
    assert code == 0 and "agent> " in out and "] answer: " in out, err
    code, out, err = tiny.cli("train", *small(), "--fresh", "rlhf.online_rollouts=0", folder=work)
    assert code == 0 and "online" not in json.loads((run / "summary.json").read_text())["em"], err
    assert not (run / "evaluations.jsonl").exists() and not (run / "report.html").exists()


def test_a_person_plays_an_episode(work, monkeypatch, capsys):
    monkeypatch.chdir(work)
    task = load_task("atlas", "dev", count=6).tasks[2]
    (noun, subject, _), *_ = task.info["chain"][0]
    typed = iter(["", f"{noun} of {subject}", f"answer: {task.golds[0]}", "never reached"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(typed))
    assert main(["play", "task.knobs.count=6", "--number", "2", "environment.max_turns=4"]) == 0
    said = capsys.readouterr().out
    assert task.question in said and f"world> 1. {subject} is" in said
    assert "[reward +0.00]" in said and "[reward +1.00, end: answer]" in said and f"right: {task.golds[0]}" in said
    monkeypatch.setattr("builtins.input", lambda prompt: "quit")
    assert main(["play", "task.knobs.count=6"]) == 0


OVERVIEW = """
model:    {base_model: "Qwen/Qwen2.5-7B", lora_rank: 64}
training: {algorithm: "PPO", epochs: 3, batch_size: 64, lr: 3e-5, kl_weight: 0.1}
reward:   {task_success: 1.0, step_penalty: -0.01, kl_penalty: 0.05}
rlhf:     {offline_phase: true, offline_data: "data/offline_logs.json", online_rollouts: 10000}
"""


def test_the_overviews_interface_runs_as_written(work, monkeypatch):
    monkeypatch.chdir(work)
    Path("config.yaml").write_text(OVERVIEW)
    config = load_config("config.yaml")
    assert (config.model.base_model, config.model.lora_rank) == ("Qwen/Qwen2.5-7B", 64)
    assert (config.training.algorithm, config.training.lr, config.training.kl_weight) == ("PPO", 3e-5, 0.1)
    assert (config.reward.step_penalty, config.reward.kl_penalty, config.rlhf.online_rollouts) == (-0.01, 0.05, 10000)
    given = yaml.safe_load(OVERVIEW)
    given["model"]["base_model"] = "model"
    config = {**given, "run": {"output": "overview", "progress": False}}
    config["training"]["lr"] = 3e-5
    name, sft_dataset, logs = "model", "demonstrations.jsonl", "logs.json"
    env = load_task("atlas", count=8, max_turns=2, max_turn_tokens=8, max_response_tokens=300).env

    policy = QwenPolicy(name)
    trainer = AgentR1Trainer(policy, config)
    trainer.pretrain(sft_dataset)
    trainer.offline_rl(logs)
    trainer.online_rl(env, n_rollouts=16)
    policy.save("agent")

    trajectory = collect_trajectory(env, policy)
    rewards, values, gamma, lam = [0.0, 0.0, 1.0], [0.5, 0.25, 0.5], 0.5, 0.5
    assert compute_returns(rewards, gamma) == [0.25, 0.5, 1.0]
    assert compute_gae(values, rewards, gamma, lam) == pytest.approx([-0.34375, 0.125, 0.5])
    assert trajectory.turns and trainer.finished == ["imitation", "offline", "online"]
    assert QwenPolicy("agent").model.num_parameters() == policy.model.num_parameters()
    rows = [json.loads(line) for line in Path("overview/metrics.jsonl").read_text().splitlines()]
    assert [row["phase"] for row in rows] == ["imitation", "offline", "online"]
    assert len(load_jsonl("overview/trajectories/000003.jsonl")) == 16


# Runs that ended, and their policies


def test_a_run_that_ended_can_be_asked_for_more(work, monkeypatch, capsys):
    """Its last phase goes on: the same weights as a run that was as long from the start."""
    monkeypatch.chdir(work)
    settings = {"rlhf__imitation_epochs": 0, "rlhf__offline_phase": "false"}
    assert main(["train", *small(**settings, rlhf__online_rollouts=8, run__output="long")]) == 0
    assert main(["train", *small(**settings)]) == 0
    assert main(["train", *small(**settings), "--resume"]) == 0
    assert "nothing was trained" in capsys.readouterr().out
    assert main(["train", *small(**settings, rlhf__online_rollouts=8), "--resume"]) == 0
    assert "nothing was trained" not in capsys.readouterr().out
    long, short = (load_checkpoint(work / name)[0]["policy"] for name in ("long", "run"))
    assert all(torch.equal(long[key], short[key]) for key in long)
    assert len((work / "run" / "metrics.jsonl").read_text().splitlines()) == 4


def test_a_policy_brings_the_settings_of_its_run(work, monkeypatch, capsys):
    monkeypatch.chdir(work)
    assert main(["train", *small(rlhf__online_rollouts=0, environment__max_turns=3)]) == 0
    capsys.readouterr()
    seen = []
    monkeypatch.setattr("agentr1_lite.pipeline.make_task", lambda config, split, **knobs: seen.append(config) or 1 / 0)
    for name in ("run", "run/policy"):
        with pytest.raises(ZeroDivisionError):
            main(["chat", "--policy", name, "--question", "who?"])
        assert seen[-1].environment.max_turns == 3
        assert Path(seen[-1].model.base_model).absolute() == work / "run" / "policy"
    with pytest.raises(ZeroDivisionError):
        main(["chat", "--policy", "model", "--question", "who?"])
    assert seen[-1].environment.max_turns == load_config("atlas-tiny").environment.max_turns


def test_a_run_that_has_not_ended_holds_no_policy(work, monkeypatch, capsys):
    monkeypatch.chdir(work)
    (work / "run").mkdir()
    load_config("atlas-tiny").save(work / "run" / "config.yaml")
    assert main(["merge", "run", "--output", "plain"]) == 2
    assert "train --resume run.output=" in capsys.readouterr().err and not (work / "plain").exists()


@pytest.mark.parametrize(
    "setting", ["model.base_model=other", "model.lora_rank=2", "training.optimizer=paged_adamw_8bit"]
)
def test_a_run_is_not_resumed_as_another(work, monkeypatch, capsys, setting):
    monkeypatch.chdir(work)
    settings = {"rlhf__imitation_epochs": 0, "rlhf__offline_phase": "false"}
    assert main(["train", *small(**settings)]) == 0
    tiny.policy(model_seed=5).save(work / "other")
    shutil.copytree(work / "run", work / "before")
    capsys.readouterr()
    assert main(["train", *small(**settings, rlhf__online_rollouts=8), setting, "--resume"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "resume with" in said
    for name in ("metrics.jsonl", "config.yaml"):
        assert (work / "run" / name).read_bytes() == (work / "before" / name).read_bytes()


# Data and settings of a resumed run

ONLINE = {"rlhf__imitation_epochs": 0, "rlhf__offline_phase": "false"}


def other_answers(work: Path) -> None:
    """The same questions and passages behind the same path, one answer another."""
    rows = json.loads((work / "dev.json").read_text())
    rows[0]["answer"] = "Nobody"
    (work / "dev.json").write_text(json.dumps(rows))


def other_page(work: Path) -> None:
    text = (work / "dev.json").read_text()
    (work / "dev.json").write_text(text.replace("lies on the river", "lies by the river"))


def other_log(work: Path) -> None:
    rows = (work / "logs.json").read_text()
    (work / "logs.json").write_text(rows.replace('"policy": "expert"', '"policy": "novice"', 1))


def other_demonstration(work: Path) -> None:
    rows = (work / "demonstrations.jsonl").read_text().splitlines()
    (work / "demonstrations.jsonl").write_text("\n".join(rows[::-1]) + "\n")


def hotpot(work: Path, **settings: object) -> list[str]:
    """Questions from a file: two of the official shape."""
    context = [[f"Arda {i}", ["Arda lies on the river Oslo.", " It is old."]] for i in range(3)]
    row = {"question": "Where does Arda lie?", "answer": "Oslo", "type": "bridge", "level": "easy", "context": context}
    rows = [{**row, "_id": str(i), "supporting_facts": [["Arda 0", 0]], "question": f"Where {i}?"} for i in range(2)]
    if not (work / "dev.json").exists():
        (work / "dev.json").write_text(json.dumps(rows))
    chosen = [text for text in small(task__name="HotpotQA", **settings) if "task.knobs.count" not in text]
    return [*chosen, "task.knobs.path=dev.json"]


CHANGED = {
    "answers": (other_answers, {}, "training questions and passages"),
    "passages": (other_page, {}, "training questions and passages"),
    "logs": (other_log, {}, "logs"),
    "demonstrations": (other_demonstration, {}, "demonstrations"),
    "number of questions": (nothing, {"evaluation__questions": 1}, "questions, passages and temperature of the eval"),
    "temperature": (nothing, {"evaluation__temperature": 0.7}, "questions, passages and temperature of the evaluation"),
}


@pytest.mark.parametrize("name", CHANGED)
def test_a_run_is_not_resumed_with_other_data(name, work, monkeypatch, capsys):
    change, settings, said = CHANGED[name]
    monkeypatch.chdir(work)
    assert main(["train", *hotpot(work)]) == 0
    assert set(json.loads((work / "run" / "data.json").read_text())) >= {"demonstrations", "logs"}
    capsys.readouterr()
    change(work)
    before = {path: path.read_bytes() for path in (work / "run").rglob("*") if path.is_file()}
    assert main(["train", *hotpot(work, rlhf__online_rollouts=8, **settings), "--resume"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and f"the {said}" in error and "are not those that run began with" in error
    assert {path: path.read_bytes() for path in (work / "run").rglob("*") if path.is_file()} == before


def test_a_run_of_an_older_version_goes_on_with_a_word(work, monkeypatch, capsys):
    """Without fingerprints, and with the defaults of its time written into its settings."""
    monkeypatch.chdir(work)
    settings = {key: value for key, value in SMALL.items() if key != "environment.max_turns"}
    monkeypatch.setitem(globals(), "SMALL", settings)
    assert main(["train", *small(**ONLINE, environment__max_turns=1)]) == 0
    (work / "run" / "data.json").unlink()
    with pytest.warns(UserWarning, match="run was begun by a version that kept no fingerprint of its data"):
        assert main(["train", *small(**ONLINE, rlhf__online_rollouts=8), "--resume"]) == 0
    files = sorted((work / "run" / "trajectories").iterdir())
    assert len(files) == 4 and all(len(t.turns) == 1 for path in files for t in load_jsonl(path))
    assert not (work / "run" / "changes.jsonl").exists() or "max_turns" not in (work / "run/changes.jsonl").read_text()
    other = load_config(work / "run" / "config.yaml").task.knobs
    assert main(["train", *small(**ONLINE, task__knobs__seed=other.get("seed", 0) + 1), "--resume"]) == 2
    assert "are not those that run began with" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"rlhf__imitation_epochs": 0}, "stopped in phase imitation, which is left out now"),
        ({"rlhf__imitation_lr": 0.01}, ""),
    ],
)
def test_the_open_phase_of_a_run_is_not_passed_over(settings, said, work, monkeypatch, capsys):
    from agentr1_lite.trainer import AgentR1Trainer

    monkeypatch.chdir(work)
    record_step = AgentR1Trainer._record
    with monkeypatch.context() as patch:
        patch.setattr(AgentR1Trainer, "_record", lambda self, metrics: (record_step(self, metrics), self.stop()))
        assert main(["train", *small(rlhf__imitation_epochs=2)]) == 130
    assert main(["train", *small(**{"rlhf__imitation_epochs": 2, **settings}), "--resume"]) == (2 if said else 0)
    assert said in capsys.readouterr().err


def test_a_phase_is_not_put_before_an_open_one(work, monkeypatch, capsys):
    from agentr1_lite.trainer import AgentR1Trainer

    monkeypatch.chdir(work)
    record_step = AgentR1Trainer._record
    with monkeypatch.context() as patch:
        patch.setattr(AgentR1Trainer, "_record", lambda self, metrics: (record_step(self, metrics), self.stop()))
        assert main(["train", *small(**ONLINE)]) == 130
    assert main(["train", *small(rlhf__offline_phase="true"), "--resume"]) == 2
    assert "stopped in phase online, which is to follow on offline, which was left out now" in capsys.readouterr().err
    assert main(["train", *small(**ONLINE, rlhf__online_rollouts=1)]) == 2
    assert "run holds a run already" in capsys.readouterr().err
    assert main(["train", *small(**ONLINE, rlhf__online_rollouts=1), "--fresh"]) == 2
    assert "rlhf.online_rollouts is 1; expected 0, or at least training.group_size 2" in capsys.readouterr().err
