"""The script for GPUs runs without one, on a small model, so that it does not rot."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parent / "gpu" / "run_gpu_checks.py"


def run(*arguments: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, env=environment)


def test_the_script_on_a_cpu(tmp_path):
    done = run("--model", "atlas-tiny", "--device", "cpu", "--small", "--json", str(tmp_path / "found.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    checks = {row["check"]: row for row in rows}
    for algorithm in ("GRPO", "PPO"):
        for name in ("memory, rollout", "memory, log-prob", "memory, update", "first_ratio", "observation_gradients"):
            assert checks[f"{algorithm}: {name}"]["ok"], name
    assert checks["resume after a stop"]["found"] == "equal bit for bit"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here; CUDA_VISIBLE_DEVICES= hides it")
def test_without_a_gpu_it_says_what_to_do():
    done = run()
    assert done.returncode == 2 and "--device cpu" in done.stderr and done.stderr.count("\n") == 1


WRONG = (
    ["--model", "nonesuch"],
    ["--recipe", "nonesuch"],
    ["--dtypes", "float32,"],
    ["--dtypes", "float8"],
    ["--settings", "training.lr=x"],
    ["--settings", "model.device=cuda"],
    ["--settings", "training.engine=vllm"],
    ["--json", "no/such/folder.json"],
)


@pytest.mark.parametrize("arguments", WRONG, ids=" ".join)
def test_wrong_arguments_are_told_before_anything_is_built(monkeypatch, capsys, arguments):
    monkeypatch.setattr(sys, "argv", ["run_gpu_checks.py", "--device", "cpu", "--model", "atlas-tiny", *arguments])
    script = runpy.run_path(str(SCRIPT), run_name="checks")
    assert script["main"]() == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and len(said) < 400
