"""Evaluation: held-out questions answered greedily, with intervals, beside baselines.

A question is scored from ``trajectory.answer`` alone, which holds what the policy
itself wrote: neither its searches nor the pages it read can earn anything.
Rows of one question under several seeds are averaged first, so that an interval
speaks of questions and three seeds do not pass for three times as many.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from agentr1_lite.env import ToolEnv
from agentr1_lite.jsonl import DataError, read_text, write_text
from agentr1_lite.mdp import Task, Trajectory
from agentr1_lite.rewards import Episode
from agentr1_lite.rollout import rollout
from agentr1_lite.scoring import (
    bootstrap_interval,
    mean_interval,
    normalize,
    paired_difference_interval,
    score_answer,
    three_digits,
    with_interval,
)

__all__ = ["BASELINES", "Difference", "Report", "baseline", "difference", "evaluate", "pool", "run_baseline"]
__all__ += ["bootstrap_interval", "normalize", "paired_difference_interval", "score_answer"]

SCORES = ("em", "cover_em", "f1")
EFFORT = ("turns", "tool_calls", "action_tokens", "recall", "reward")
READ_PROMPT = "Answer the question. Reply with the answer alone, between <answer> and </answer>."
Row = dict[str, Any]


class Difference(NamedTuple):
    """mean(a − b) over ``n`` questions and its 95 % interval, None where unknown; beyond chance when 0 lies outside."""

    mean: float
    low: float | None
    high: float | None
    n: int

    @property
    def interval(self) -> tuple[float, float] | None:
        return None if self.low is None or self.high is None else (self.low, self.high)

    def __str__(self) -> str:
        return with_interval(self.mean, self.interval, sign=True)


@dataclass
class Report:
    """What an agent reached on a set of questions.

    ``rows`` holds one dict a question (and seed): id, question, golds, kind, hops,
    seed, answer, em, cover_em, f1, reward, stop_reason, turns, tool_calls,
    action_tokens and recall (share of the gold evidence that its searches showed;
    None where unknown).
    """

    name: str
    rows: list[Row]
    benchmark: str = "hotpotqa"
    settings: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    def __len__(self) -> int:
        return len(self.rows)

    def per_question(self, metric: str) -> dict[tuple[str, str], float]:
        """(id, question) → its score, averaged over seeds; ids alone may repeat in a data set."""
        found: dict[tuple[str, str], list[float]] = {}
        for row in self.rows:
            if row[metric] is not None:
                found.setdefault((row["id"], row["question"]), []).append(float(row[metric]))
        return {key: sum(values) / len(values) for key, values in found.items()}

    def mean(self, metric: str = "em") -> float | None:
        """Mean over questions; None where no row has the value."""
        scores = list(self.per_question(metric).values())
        return sum(scores) / len(scores) if scores else None

    def interval(self, metric: str = "em", **options: Any) -> tuple[float, float] | None:
        """95 % interval of :meth:`mean` over questions, see `mean_interval`; None where it is unknown."""
        scores = list(self.per_question(metric).values())
        return mean_interval(scores, **options) if scores else None

    def shown(self, metric: str = "em") -> str:
        """Mean and interval as text: ``0.955 [0.917, 0.976]``."""
        return with_interval(self.mean(metric), self.interval(metric))

    def by(self, key: str) -> dict[Any, Report]:
        """The report split by a column such as ``hops``, ``kind`` or ``seed``, in sorted order."""
        values = sorted({row[key] for row in self.rows}, key=lambda value: (isinstance(value, str), value))
        return {v: replace(self, rows=[row for row in self.rows if row[key] == v]) for v in values}

    def stop_reasons(self) -> dict[str, float]:
        """Share of episodes by why they ended, the most frequent first."""
        return {k: n / len(self.rows) for k, n in Counter(row["stop_reason"] for row in self.rows).most_common()}

    def summary(self) -> dict[str, Any]:
        """The figures as plain JSON values."""
        out: dict[str, Any] = {"n": len(self.per_question("em")), "stop_reasons": self.stop_reasons()}
        for metric in SCORES:
            out[metric] = {"mean": self.mean(metric), "interval": self.interval(metric)}
        out |= {metric: self.mean(metric) for metric in EFFORT}
        for key in ("hops", "kind"):
            out[f"by_{key}"] = {
                str(value): {"n": len(part.per_question("em")), "em": part.mean("em"), "interval": part.interval("em")}
                for value, part in self.by(key).items()
            }
        return out

    def to_dict(self) -> dict[str, Any]:
        head = {"name": self.name, "benchmark": self.benchmark, "settings": self.settings, "seconds": self.seconds}
        return {**head, "summary": self.summary() if self.rows else {}, "rows": self.rows}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Report:
        return cls(**{key: data[key] for key in ("name", "rows", "benchmark", "settings", "seconds")})

    def save(self, path: str | Path) -> None:
        """Write JSON, whole or not at all."""
        write_text(path, json.dumps(self.to_dict(), ensure_ascii=False, indent=1, allow_nan=False) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Report:
        """Read what :meth:`save` wrote; raises ``DataError`` naming the file."""
        try:
            report = cls.from_dict(json.loads(read_text(path)))
            for metric in (*SCORES, *EFFORT):
                report.mean(metric)
            _ = report.by("hops"), report.by("kind"), report.stop_reasons()
            return report
        except DataError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{path}: not an evaluation report ({error!r}); write it with Report.save") from error

    def frame(self) -> Any:
        """The rows as a pandas DataFrame."""
        import pandas as pd

        return pd.DataFrame(self.rows)

    def table(self) -> str:
        """The report as text: scores with intervals, by kind and hops, effort, stop reasons."""
        if not self.rows:
            return f"{self.name}: no questions"
        head = " · ".join([self.name, *(f"{k} {v}" for k, v in self.settings.items())])
        lines = [head, f"{'':<16}{'n':>5}  " + "".join(f"{name:<22}" for name in ("EM", "cover EM", "F1")).rstrip()]
        parts = {"all": self, **{_words(k): p for k, p in self.by("kind").items()}}
        parts |= {_words(k, "hop"): p for k, p in self.by("hops").items()}
        for label, part in parts.items():
            cells = "".join(f"{part.shown(m):<22}" for m in SCORES)
            lines.append(f"{label:<16}{len(part.per_question('em')):>5}  {cells}".rstrip())
        effort = {name: self.mean(name) for name in EFFORT}
        words = {name: "evidence found" if name == "recall" else name.replace("_", " ") for name in effort}
        lines.append(" · ".join(f"{words[name]} {three_digits(x)}" for name, x in effort.items() if x is not None))
        stops = ", ".join(f"{k} {100 * v:.4g}%" for k, v in self.stop_reasons().items())
        return "\n".join([*lines, f"stopped by: {stops}"])


def _words(value: Any, unit: str = "") -> str:
    """A group's label: ``2 hops``, ``bridge``; what a data set leaves open is said."""
    if not value:
        return f"unknown {unit or 'kind'}"
    return f"{value} {unit}{'s' * (value != 1)}" if unit else str(value)


def _recall(task: Task, trajectory: Trajectory | Episode) -> float | None:
    if not task.evidence:
        return None
    results = [result for turn in trajectory.turns for result in turn.results]
    shown = {title for result in results for title in (result.get("info") or {}).get("titles", ())}
    return len(shown & set(task.evidence)) / len(set(task.evidence))


def _row(task: Task, answer: str | None, benchmark: str, **found: Any) -> Row:
    return {
        "id": task.id,
        "question": task.question,
        "golds": list(task.golds),
        "kind": task.kind,
        "hops": task.hops,
        "answer": answer,
        **score_answer(answer, task.golds, benchmark),
        **found,
    }


def _trajectory_row(task: Task, trajectory: Trajectory, benchmark: str, seed: int) -> Row:
    return _row(
        task,
        trajectory.answer,
        benchmark,
        seed=seed,
        reward=trajectory.total_reward,
        stop_reason=trajectory.stop_reason.value,
        turns=len(trajectory.turns),
        tool_calls=sum(len(turn.calls) for turn in trajectory.turns),
        action_tokens=trajectory.num_actions,
        recall=_recall(task, trajectory),
    )


def evaluate(
    policy: Any,
    task_set: Any,
    *,
    tasks: Sequence[Task] | None = None,
    temperature: float = 0.0,
    seed: int = 0,
    benchmark: str | None = None,
    max_batch: int | None = None,
    progress: Any = None,
    name: str = "base_tool_call",
    env: ToolEnv | None = None,
    ask: Callable[[Task], str] | None = None,
    on_trajectory: Callable[[Trajectory], None] | None = None,
) -> Report:
    """Let the policy answer every question once and score it.

    Args:
        task_set: gives ``tasks`` and ``env`` where these are not passed.
        temperature: 0 is greedy.
        benchmark: whose scorer is used; None takes the environment's.
        ask: the text put to the policy for a task; None is its question.
        max_batch, progress, on_trajectory: see ``rollout``.
    """
    tasks, env = list(task_set.tasks if tasks is None else tasks), env or task_set.env
    benchmark = benchmark or getattr(env, "benchmark", "hotpotqa")
    asked = tasks if ask is None else [replace(task, question=ask(task)) for task in tasks]
    options = {"max_batch": max_batch, "progress": progress, "on_trajectory": on_trajectory}
    options = {key: value for key, value in options.items() if value is not None}
    start = time.perf_counter()
    greedy = temperature == 0
    sampled = rollout(
        policy, env, asked, temperature=1.0 if greedy else temperature, greedy=greedy, seed=seed, **options
    )
    rows = [_trajectory_row(task, t, benchmark, seed) for task, t in zip(tasks, sampled, strict=True)]
    return Report(name, rows, benchmark, _settings(policy, task_set, temperature, seed), time.perf_counter() - start)


def _settings(policy: Any, task_set: Any, temperature: float, seed: int) -> dict[str, Any]:
    found = {"policy": getattr(policy, "name", None), "version": getattr(policy, "version", None)}
    found |= {"task": getattr(task_set, "name", None), "split": getattr(task_set, "split", None)}
    return {
        key: value for key, value in {**found, "temperature": temperature, "seed": seed}.items() if value is not None
    }


def pool(reports: Iterable[Report], name: str | None = None) -> Report:
    """Several seeds as one report: all rows, settings that differ listed, seconds added."""
    reports = list(reports)
    if not reports:
        raise ValueError("pool: no reports were given; give at least one")
    if len(benchmarks := {report.benchmark for report in reports}) > 1:
        raise ValueError(f"pool: reports were scored as {', '.join(sorted(benchmarks))}; score all as one benchmark")
    settings: dict[str, Any] = {}
    for key in dict.fromkeys(key for report in reports for key in report.settings):
        values = list(dict.fromkeys(report.settings.get(key) for report in reports))
        settings[key] = values[0] if len(values) == 1 else values
    rows = [row for report in reports for row in report.rows]
    seconds = sum(report.seconds for report in reports)
    return Report(name or reports[0].name, rows, reports[0].benchmark, settings, seconds)


def difference(report_a: Report, report_b: Report, metric: str = "em", **options: Any) -> Difference:
    """mean(a − b) with a paired interval: both answered the same questions, whose difficulty cancels out."""
    a, b = report_a.per_question(metric), report_b.per_question(metric)
    if a.keys() != b.keys() or not a:
        raise ValueError(
            f"difference: {report_a.name!r} has {len(a)} questions with {metric}, {report_b.name!r} {len(b)}, "
            f"{len(a.keys() & b.keys())} in common; evaluate both on the same ones"
        )
    first, second = list(a.values()), [b[key] for key in a]
    mean = float(np.mean(np.subtract(first, second)))
    low, high = paired_difference_interval(first, second, **options) or (None, None)
    return Difference(mean, low, high, len(a))


# Baselines

Baseline = Callable[..., Report]
BASELINES: dict[str, Baseline] = {}


def baseline(name: str) -> Callable[[Baseline], Baseline]:
    """Register a baseline: ``(policy, task_set, **options of evaluate) → Report``."""

    def register(function: Baseline) -> Baseline:
        BASELINES[name] = function
        return function

    return register


def run_baseline(name: str, policy: Any, task_set: Any, **options: Any) -> Report:
    if name not in BASELINES:
        raise ValueError(f"no baseline is called {name!r}; choose one of {', '.join(BASELINES)}")
    return BASELINES[name](policy, task_set, **options)


@baseline("base_tool_call")
def base_tool_call(policy: Any, task_set: Any, **options: Any) -> Report:
    """The policy with the task's tools, as it comes: what training starts from."""
    return evaluate(policy, task_set, name="base_tool_call", **options)


def _reading_env(task_set: Any) -> ToolEnv:
    """One turn without tools, under the prompt that asks for the answer alone."""
    prompt, env = getattr(task_set, "read_prompt", "") or READ_PROMPT, task_set.env
    limits = {"max_turn_tokens": env.max_turn_tokens, "max_response_tokens": env.max_response_tokens}
    return ToolEnv([], system_prompt=prompt, benchmark=env.benchmark, max_turns=1, **limits)


@baseline("closed_book")
def closed_book(policy: Any, task_set: Any, **options: Any) -> Report:
    """The question alone: what the weights hold in memory."""
    return evaluate(policy, task_set, name="closed_book", env=_reading_env(task_set), **options)


@baseline("naive_rag")
def naive_rag(policy: Any, task_set: Any, *, k: int | None = None, **options: Any) -> Report:
    """One search with the question itself, its best ``k`` passages put before the question.

    ``k`` None takes as many as one call of the task's search tool shows.
    """
    if task_set.index is None:
        raise ValueError(f"naive_rag: task {task_set.name!r} has no passages to search; it needs a task with an index")
    count = k or next((tool.k for tool in task_set.env.tools if hasattr(tool, "k")), 5)

    def found(task: Task) -> list[Any]:
        return task_set.index.search(task.question, count)

    def ask(task: Task) -> str:
        texts = [p.text if p.text.startswith(p.title) else f"{p.title}: {p.text}" for p in found(task)]
        return "\n".join([*(f"{i}. {text}" for i, text in enumerate(texts, 1)), task.question])

    report = evaluate(policy, task_set, name="naive_rag", env=_reading_env(task_set), ask=ask, **options)
    tasks = options.get("tasks")
    for row, task in zip(report.rows, task_set.tasks if tasks is None else tasks, strict=True):
        titles = {p.title for p in found(task)}
        row["recall"] = len(titles & set(task.evidence)) / len(set(task.evidence)) if task.evidence else None
    return report


@baseline("scripted_expert")
def scripted_expert(
    policy: Any,
    task_set: Any,
    *,
    tasks: Sequence[Task] | None = None,
    seed: int = 0,
    benchmark: str | None = None,
    **_: Any,
) -> Report:
    """A script that knows what must be found but has to search for it: the ceiling that retrieval sets.

    See ``tasks/experts.py``; raises ``ValueError`` on a task that no script can play.
    """
    from agentr1_lite.tasks.experts import expert, play_out

    tasks = list(task_set.tasks if tasks is None else tasks)
    benchmark, start = benchmark or task_set.env.benchmark, time.perf_counter()
    scripts = [expert(task, task_set.env, seed) for task in tasks]
    rows = []
    for task, script in zip(tasks, scripts, strict=True):
        episode, reward = play_out(task_set.env, task, script, seed)
        calls = sum(len(turn.calls) for turn in episode.turns)
        effort = {"turns": len(episode.turns), "tool_calls": calls, "action_tokens": None}
        found = {"seed": seed, "reward": reward, "stop_reason": episode.stop_reason.value, **effort}
        rows.append(_row(task, episode.answer, benchmark, recall=_recall(task, episode), **found))
    settings = _settings(None, task_set, 0.0, seed)
    return Report("scripted_expert", rows, benchmark, settings, time.perf_counter() - start)
