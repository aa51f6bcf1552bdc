from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
TARGETS = ("setup", "demo", "lab", "test", "notebooks", "bench", "lint")
needs_make = pytest.mark.skipif(os.name == "nt" or shutil.which("make") is None, reason="needs make and sh")

# Stands in for every python: writes down how it was called, and "creates" the environment
FAKE_PYTHON = """#!/bin/sh
echo "$(basename "$(dirname "$0")") $*" >> calls
case "$*" in
  *'version("torch")'*) exit "${NO_TORCH:-0}" ;;
  '-m venv'*) mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
esac
"""


def requirement_lines(name: str) -> list[str]:
    lines = [line.split("#")[0].strip() for line in (ROOT / name).read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if line]


def pyproject_list(key: str) -> list[str]:
    """An array of strings in pyproject.toml (tomllib needs Python 3.11)."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    body = re.search(rf"^{key} = \[(.*?)\]$", text, re.M | re.S).group(1)
    return re.findall(r'"([^"]+)"', body)


def test_requirements_are_the_package_with_its_lab_and_dev_extras():
    wanted = pyproject_list("dependencies") + pyproject_list("lab") + pyproject_list("dev")
    assert requirement_lines("requirements.txt") == wanted
    assert "torch>=2.6" in wanted


def test_the_pinned_torch_fits_and_every_file_asks_for_the_same():
    (pin,) = map(Requirement, requirement_lines("constraints-cpu.txt"))
    version = str(pin.specifier).removeprefix("==")
    torch = Requirement(next(line for line in requirement_lines("requirements.txt") if line.startswith("torch>")))
    assert pin.name == "torch" and version in torch.specifier
    floor = str(torch.specifier).removeprefix(">=")
    conda = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))["dependencies"]
    assert f"pytorch>={floor}" in conda and {"pip": ["-r requirements.txt", "-e ."]} in conda
    assert f"< ({floor.replace('.', ', ')})" in (ROOT / "Makefile").read_text(encoding="utf-8")


def test_set_up_files_name_no_address():
    for name in ("requirements.txt", "constraints-cpu.txt", "environment.yml", "Makefile", ".ci/run"):
        assert "://" not in (ROOT / name).read_text(encoding="utf-8"), name


def test_every_file_of_the_package_travels_with_it():
    package = ROOT / "agentr1_lite"
    listed = {path for pattern in pyproject_list("agentr1_lite") for path in package.glob(pattern)}
    others = {p for p in package.rglob("*") if p.is_file() and p.suffix not in (".py", ".pyc")}
    assert listed == others != set()


def run_make(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess:
    environment = {
        k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "AGENTR1_TORCH")
    }
    return subprocess.run(
        ["make", *arguments], cwd=folder, env={**environment, **variables}, capture_output=True, text=True, timeout=60
    )


@pytest.fixture
def checkout(tmp_path):
    for name in ("Makefile", "requirements.txt", "constraints-cpu.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "python").write_text(FAKE_PYTHON)
    (tmp_path / "base" / "python").chmod(0o755)
    return tmp_path


@needs_make
def test_every_target_creates_and_uses_the_environment(checkout):
    assert {line.split()[1] for line in run_make(checkout, "help").stdout.splitlines()} >= {*TARGETS, "clean"}
    for target in TARGETS:
        output = run_make(checkout, "-n", target).stdout
        assert "-m venv" in output and "requirements.txt" in output and "pip install" in output
        last = output.strip().splitlines()[-1]
        assert ".venv" in last, target


@needs_make
@pytest.mark.parametrize(
    ("variables", "constrained"),
    [
        ({"AGENTR1_TORCH": "cpu", "NO_TORCH": "1"}, True),
        ({"AGENTR1_TORCH": "gpu", "NO_TORCH": "1"}, False),
        ({"AGENTR1_TORCH": "cpu"}, False),
        ({"NO_TORCH": "1", "GPU": "1"}, False),
        ({"NO_TORCH": "1"}, True),
    ],
)
def test_set_up_keeps_torch_and_stays_small_without_a_gpu(checkout, variables, constrained):
    environment = dict(variables)
    if environment.pop("GPU", None):
        shutil.copy(shutil.which("true"), checkout / "base" / "nvidia-smi")
        environment["PATH"] = f"{checkout / 'base'}{os.pathsep}{os.environ['PATH']}"
    elif "AGENTR1_TORCH" not in variables and (shutil.which("nvidia-smi") or Path("/dev/nvidia0").exists()):
        pytest.skip("this machine has an NVIDIA GPU")
    done = run_make(checkout, "setup", "PYTHON=base/python", **environment)
    assert done.returncode == 0, done.stderr
    calls = (checkout / "calls").read_text()
    (install,) = [line for line in calls.splitlines() if "-r requirements.txt" in line]
    assert install.startswith("bin ") and ("constraints-cpu.txt" in install) == constrained
    assert ("--system-site-packages" in calls) == ("NO_TORCH" not in variables)
    assert "Nothing to be done" in run_make(checkout, "setup", "PYTHON=base/python").stdout
    os.utime(checkout / "requirements.txt", (4e9, 4e9))
    run_make(checkout, "setup", "PYTHON=base/python", **environment)
    again = (checkout / "calls").read_text().removeprefix(calls)
    assert "-r requirements.txt" in again and "-m venv" not in again


@needs_make
def test_a_wrong_choice_of_torch_is_one_sentence(checkout):
    done = run_make(checkout, "setup", "PYTHON=base/python", AGENTR1_TORCH="amd", NO_TORCH="1")
    assert done.returncode == 2 and "AGENTR1_TORCH is 'amd': expected cpu, gpu or auto" in done.stderr
    assert not (checkout / ".venv" / ".ready").exists()


def test_ci_runs_the_readme_command_last():
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert "set -euo pipefail" in script and script.strip().splitlines()[-3:] == [
        "make setup",
        "make lint",
        "make test",
    ]
    assert os.name == "nt" or os.access(ROOT / ".ci" / "run", os.X_OK)
