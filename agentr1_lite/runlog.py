"""What a run writes into its folder, step by step; `run_folder` reads it.

Every row carries ``count``, the steps of the run so far, so that a resumed run
can drop what the killed one wrote after its last checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from agentr1_lite.config import Config, ConfigError, load_config
from agentr1_lite.jsonl import read_rows, row_line, write_rows, write_text
from agentr1_lite.mdp import Task, Trajectory, save_jsonl
from agentr1_lite.versions import versions

ROWS = ("metrics.jsonl", "doctor.jsonl", "changes.jsonl", "evaluations.jsonl")
DATA = "data.json"
FILES = (*ROWS, "config.yaml", DATA, "versions.json", "summary.json", "report.html")
FOLDERS = ("checkpoints", "trajectories", "evaluation", "policy")
FORMER = ".former"


def holds_run(folder: Path) -> bool:
    return any((folder / name).exists() for name in (*FILES, *FOLDERS))


def remove_run(folder: Path) -> None:
    """Remove a run's files and nothing else: ``run.output`` may be a folder with other things in it."""
    for name in FILES:
        (folder / name).unlink(missing_ok=True)
    for name in FOLDERS:
        shutil.rmtree(folder / name, ignore_errors=True)


def fingerprint(rows: Iterable[Any]) -> str:
    """A checksum of what a run learns from or is measured by: other rows, or another order, give another."""
    digest = hashlib.sha256()
    for row in rows:
        if isinstance(row, Task):
            row = row.question, row.golds, row.evidence
        elif isinstance(row, Trajectory):
            row = row.task_id, row.total_reward, [(s.token_ids, s.action_mask) for s in row.segments]
        elif isinstance(row, tuple):  # a pair of trajectories
            row = fingerprint(row)
        digest.update(f"{row!r}\n".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()[:16]


class RunLog:
    """Appends to ``metrics.jsonl``, ``doctor.jsonl``, ``changes.jsonl`` and ``trajectories/`` of a run folder."""

    def __init__(self, folder: Path, config: Config) -> None:
        self.folder = folder
        self._seen = _settings(config)

    def start(self, config: Config) -> Path | None:
        """Begin a new run; a former one in the folder is moved to ``<folder>.former``, which is returned."""
        moved = None
        if holds_run(self.folder):
            moved = self.folder.with_name(self.folder.name + FORMER)
            remove_run(moved)
            moved.mkdir(parents=True, exist_ok=True)
            for name in (*FILES, *FOLDERS):
                if (self.folder / name).exists():
                    (self.folder / name).replace(moved / name)
        self.folder.mkdir(parents=True, exist_ok=True)
        config.save(self.folder / "config.yaml")
        write_text(self.folder / "versions.json", json.dumps(versions(), indent=1))
        return moved

    def add(self, file: str, row: Mapping[str, Any]) -> None:
        """Append a row; a number that JSON does not know (NaN), however deep, becomes null."""
        line = row_line(json.loads(json.dumps(row), parse_constant=lambda _: None))
        with (self.folder / file).open("a", encoding="utf-8", newline="\n") as out:
            out.write(line)

    def step(
        self,
        place: Mapping[str, Any],
        metrics: Mapping[str, float],
        config: Config,
        findings: Iterable[Any] = (),
        trajectories: Sequence[Trajectory] | None = None,
    ) -> None:
        """Record a step: ``place`` is its phase, step and count; settings changed since the last one are noted."""
        now = _settings(config)
        for setting, value in now.items():
            if value != self._seen.get(setting):
                self.add("changes.jsonl", {**place, "setting": setting, "value": value})
        self._seen = now
        if trajectories is not None:
            save_jsonl(self.folder / "trajectories" / f"{place['count']:06d}.jsonl", trajectories)
        for finding in findings:
            if finding.level != "ok":
                self.add("doctor.jsonl", {**place, **asdict(finding)})
        self.add("metrics.jsonl", {**place, **metrics})

    def rows(self, file: str = "metrics.jsonl") -> list[dict[str, Any]]:
        """What a file holds so far; a row that a kill cut off is left out."""
        path = self.folder / file
        return read_rows(path)[0] if path.exists() else []

    def check_same_model(self, config: Config) -> None:
        """Raise ``ConfigError`` where a run would go on with another model: its weights would fit, and mean nothing."""
        began = load_config(self.folder / "config.yaml")
        for name in ("base_model", "lora_rank", "lora_alpha", "quantization"):
            former, now = getattr(began.model, name), getattr(config.model, name)
            if former != now:
                said = f"run.output: {self.folder} began with model.{name} {former}, not {now}"
                raise ConfigError(f"{said}; resume with the former, or start a run of its own")

    def check_same_data(self, marks: Mapping[str, str], keep: bool = True) -> None:
        """Keep the `fingerprint` of each data set of the run; ``ConfigError`` where it began with others."""
        path = self.folder / DATA
        former = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        for name, mark in marks.items():
            if former.get(name, mark) != mark:
                raise ConfigError(
                    f"run.output: the {name} are not those that {self.folder} began with, so its steps and scores "
                    "would not belong together; put the former back, or start a run of its own"
                )
        if keep:
            write_text(path, json.dumps({**marks, **former}, indent=1) + "\n")

    def resume(self, count: int, config: Config, ended: Iterable[str] = ()) -> Config:
        """Make the changes again that the run's settings had seen up to step ``count``, but for what is now asked for.

        What ``config`` sets otherwise than the run began with is noted as a change with the next step; a setting of a
        phase that has ``ended`` could not act and raises ``ConfigError``. Returns the settings of step ``count``.
        """
        began = load_config(self.folder / "config.yaml")
        first, now = _settings(began), _settings(config)
        asked = {name for name, value in now.items() if value != first.get(name)}
        for name, phase in ((name, phase) for name in sorted(asked) for phase in ended):
            if name.startswith(f"rlhf.{phase}_"):
                said = f"{name} is {now[name]} and was {first[name]}, but phase {phase} of {self.folder} has ended"
                raise ConfigError(f"{said}; resume with the former, or start a run of its own")
        for row in self.rows("changes.jsonl"):
            if row["count"] <= count:
                for changed in [began] if row["setting"] in asked else [began, config]:
                    changed.set(row["setting"], row["value"], f"{self.folder / 'changes.jsonl'}")
        self._seen = _settings(began)
        return began

    def drop_after(self, count: int) -> None:
        """Forget what was recorded after step ``count``: those steps are run again."""
        for name in ROWS:
            if (self.folder / name).exists():
                write_rows(self.folder / name, [row for row in self.rows(name) if row["count"] <= count])
        for path in (self.folder / "trajectories").glob("*.jsonl*"):
            if not path.stem.isdigit() or int(path.stem) > count:
                path.unlink()


def _settings(config: Config) -> dict[str, Any]:
    """Every setting that may change a run's numbers, by its name: those of ``run:`` do not."""
    return {name: value for name, _, value in config.walk() if not name.startswith("run.")}
