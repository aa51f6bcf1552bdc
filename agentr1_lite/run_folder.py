"""A run folder read leniently: what is there, and a sentence for everything that is not."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from agentr1_lite.checks import Case, examine
from agentr1_lite.evaluation import Report
from agentr1_lite.jsonl import read_rows, read_text
from agentr1_lite.mdp import Trajectory, load_jsonl
from agentr1_lite.plots import PHASES, Curve, Estimate


@dataclass
class Run:
    """What lies in a run folder; ``missing`` collects what does not, in sentences."""

    folder: Path
    missing: list[str] = field(default_factory=list)

    def _read(self, name: str, read: Any, empty: Any) -> Any:
        path = self.folder / name
        try:
            if path.exists():
                return read(path)
            self.missing.append(f"{name} is not there.")
        except (OSError, ValueError) as error:
            self.missing.append(f"{name} cannot be used: {str(error).replace(str(self.folder), '').lstrip('/')}.")
        return empty

    @cached_property
    def summary(self) -> dict[str, Any]:
        return mapping(self._read("summary.json", lambda path: json.loads(read_text(path)), {}))

    @cached_property
    def versions(self) -> dict[str, Any]:
        return mapping(self._read("versions.json", lambda path: json.loads(read_text(path)), {}))

    @cached_property
    def config(self) -> str:
        return self._read("config.yaml", read_text, "")

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        rows, problems = self._read("metrics.jsonl", read_rows, ([], []))
        self.missing += [f"metrics.jsonl, line {p.line}: {p.reason}." for p in problems]
        return [row for row in rows if number(row.get("step")) is not None]

    @cached_property
    def reports(self) -> dict[str, Report]:
        paths = sorted((self.folder / "evaluation").glob("*.json"))
        if not paths:
            self.missing.append("evaluation/ holds no report, so there is no table by hops and kind.")
        found = {path.stem: self._read(f"evaluation/{path.name}", Report.load, None) for path in paths}
        return {name: report for name, report in found.items() if report is not None and report.rows}

    @cached_property
    def trajectory_files(self) -> list[str]:
        names = sorted(f"trajectories/{path.name}" for path in (self.folder / "trajectories").glob("*.jsonl"))
        if not names:
            self.missing.append("trajectories/ holds no file, so there are no example episodes.")
        return names

    @cached_property
    def last(self) -> list[Trajectory]:
        return self._read(self.trajectory_files[-1], load_jsonl, []) if self.trajectory_files else []

    @cached_property
    def first(self) -> list[Trajectory]:
        return self._read(self.trajectory_files[0], load_jsonl, []) if len(self.trajectory_files) > 1 else []

    @cached_property
    def findings(self) -> list[dict[str, Any]]:
        """What the doctor noted in the run; without notes, what the last step's files show."""
        if (self.folder / "doctor.jsonl").exists():
            rows, _ = self._read("doctor.jsonl", read_rows, ([], []))
            return [row for row in rows if {"check", "level", "message"} <= row.keys()]
        latest = dict(self.metrics[-1]) if self.metrics else {}
        numbers = {k: v for k, v in latest.items() if isinstance(v, int | float)}
        found = examine(Case(self.last, metrics=numbers)) if self.last or numbers else []
        return [vars(f) | {"step": latest.get("step")} for f in found if f.level != "ok"]

    def estimates(self, names: Iterable[str]) -> list[Estimate]:
        """EM of phases or baselines, from the summary, else from the evaluation reports."""
        means = {**mapping(self.summary.get("baselines")), **mapping(self.summary.get("em"))}
        intervals, out = mapping(self.summary.get("interval")), []
        for name in names:
            report, mean, bounds = self.reports.get(name), number(means.get(name)), _interval(intervals.get(name))
            if report is not None:
                mean, bounds = report.mean("em") if mean is None else mean, bounds or report.interval("em")
            if mean is not None:
                out.append(Estimate(name, mean, *(bounds or (None, None))))
        return out

    def curves(self, keys: Sequence[str], phases: Sequence[str] = PHASES) -> list[Curve]:
        """The first of ``keys`` that the metrics hold, one curve a phase; of a repeated step the last row counts."""
        for key in keys:
            out = []
            for phase in phases:
                rows = {r["step"]: number(r.get(key)) for r in self.metrics if r.get("phase") == phase}
                points = sorted((step, value) for step, value in rows.items() if value is not None)
                if points:
                    out.append(Curve(phase, *zip(*points, strict=True)))
            if out:
                return out
        return []


def mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def number(value: Any) -> float | None:
    """A finite number, or that of an evaluation's summary; None for anything else."""
    value = value.get("em") if isinstance(value, dict) else value
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) <= sys.float_info.max:
        return None
    return float(value)


def _interval(value: Any) -> tuple[float, float] | None:
    """The bounds, where they are some; one of no width claims a certainty that no sample gives."""
    found = tuple(map(number, value)) if isinstance(value, list | tuple) else ()
    return found if len(found) == 2 and None not in found and found[0] < found[1] else None
