"""The course around the lessons: what this machine can run, and the map of the lessons."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from agentr1_lite.checks import Finding
from agentr1_lite.views.theme import Html, esc, part, show


@dataclass(frozen=True)
class Rung:
    """A policy of the ladder: what it needs (GiB of memory, of GPU memory by the plan of its recipe), what it is for.

    ``time`` is an estimate of a first useful run, not a measurement of this machine.
    """

    name: str
    what: str
    memory: float
    gpu: float
    time: str


LADDER = (
    Rung("atlas-tiny", "shipped, 1 M parameters: lessons, demo, tests", 2, 0, "minutes on two cores"),
    Rung("smollm2-135m", "a real pretrained model without a GPU", 10, 0, "an hour or more on a CPU"),
    Rung("qwen2.5-0.5b", "a step up", 8, 4, "an hour on a GPU"),
    Rung("qwen2.5-1.5b", "a step up", 12, 6, "hours on a GPU"),
    Rung("qwen2.5-3b", "the headline recipe: 4 bits and LoRA", 12, 8, "several hours on a GPU"),
)
# number: (file, title, what the learner ends with)
LESSONS = {
    0: ("00_start_here", "Start here", "a checked machine and a first episode, token by token"),
    1: ("01_agent_mdp", "The agent MDP", "state, action, both transitions and rewards, stepped by hand"),
    2: ("02_tools_and_environments", "Tools and environments", "an own tool and environment that survive bad input"),
    3: ("03_rollouts_and_masks", "Rollouts and action masks", "the loop by hand, and what a wrong mask does"),
    4: ("04_rewards_and_credit", "Rewards and credit", "every estimator on one batch, with its bias and variance"),
    5: ("05_masked_losses", "Masked losses", "PPO's clip, KL, entropy, aggregation: the gradient of each token"),
    6: ("06_imitation", "Phase 1: imitation", "a policy taught by demonstrations"),
    7: ("07_offline_rl", "Phase 2: offline RL", "learning from logs: weighted by advantage, and DPO"),
    8: ("08_online_rl", "Phase 3: online RL", "PPO and GRPO, turned by hand while they run"),
    9: ("09_evaluation", "Evaluation", "exact match with intervals, and fair baselines"),
    10: ("10_ablations", "Ablations and the bug museum", "what each part is worth, and how known bugs look"),
    11: ("11_qwen_3b", "Qwen2.5-3B on one GPU", "the 4-bit recipe on HotpotQA"),
    12: ("12_own_task", "Bring your own task", "an environment of your own in under 80 lines"),
    13: ("13_scaling_out", "Scaling out", "the same environment with more processes and other libraries"),
}


def ladder(memory: float, gpu: float) -> list[tuple[Rung, str]]:
    """Each rung and why it does not fit into ``memory`` and ``gpu`` (GiB in all); "" where it does."""

    def short(rung: Rung) -> Iterator[str]:
        if gpu < rung.gpu:
            yield f"needs {rung.gpu:g} GiB on the GPU" if gpu else f"needs a GPU of {rung.gpu:g} GiB"
        if memory < rung.memory:
            yield f"needs {rung.memory:g} GiB of memory"

    return [(rung, " and ".join(short(rung))) for rung in LADDER]


def check_machine() -> Html:
    """Cores, memory, GPU, versions, files and widgets of this machine, and which rungs of the ladder it can run."""
    import psutil
    import torch

    from agentr1_lite.doctor import machine_check
    from agentr1_lite.loading import data_root

    memory = psutil.virtual_memory().total / 2**30
    gpu = torch.cuda.get_device_properties(0).total_memory / 2**30 if torch.cuda.is_available() else 0.0
    words, home = {"ok": "✔ fine", "warn": "△ look", "fail": "✘ mend"}, f"{data_root().parent}/"
    found = [(words[f.level], f.check, f.message.replace(home, "")) for f in [*machine_check(), _widgets()]]
    rungs = [
        (f"✘ {why}" if why else "✔ fits", rung.name, rung.what, "" if why else f"≈ {rung.time}")
        for rung, why in ladder(memory, gpu)
    ]
    checks = _rows(("", "part", "what was found"), found)
    policies = _rows(("this machine", "policy", "what for", "time, an estimate"), rungs)
    return show(part(f"<h4>This machine</h4>{checks}<h4>The ladder of policies</h4>{policies}"), alt="machine check")


def _widgets() -> Finding:
    """Whether controls can move; without them every picture is still there."""
    try:
        return Finding("ok", "widgets", f"ipywidgets {version('ipywidgets')}: controls move")
    except PackageNotFoundError:
        return Finding("warn", "widgets", "no ipywidgets: pictures stand still; pip install ipywidgets brings controls")


def course_map(notebooks: str | Path | None = None) -> Html:
    """The lessons in order with links to those that lie in ``notebooks`` (the clone's folder if not given)."""
    folder = Path(__file__).resolve().parent.parent / "notebooks" if notebooks is None else Path(notebooks)
    rows = []
    for number, (name, title, end) in LESSONS.items():
        link = f"{title} (to come)"
        if (folder / f"{name}.py").exists():
            link = Html(f'<a style="color:var(--ar1-blue)" href="{name}.ipynb">{esc(title)}</a>')
        rows.append((f"{number:02d}", link, end))
    return show(part(_rows(("", "lesson", "you end with"), rows)), alt="map of the course")


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> Html:
    """Rows of any values as a table in the theme of the views, text to the left."""
    return show(part(_rows(columns, rows)))


def _rows(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """An HTML table; a cell that is `Html` stands as it is, anything else is escaped."""
    style = "text-align:left;vertical-align:top;padding:3px 14px 3px 0;border-bottom:1px solid var(--ar1-rule)"
    lines = ["".join(f'<th style="{style}">{esc(name)}</th>' for name in head)]
    for first, *others in rows:
        cells = [f'<td style="{style};white-space:nowrap">{esc(first)}</td>']
        cells += [f'<td style="{style}">{cell.html if isinstance(cell, Html) else esc(cell)}</td>' for cell in others]
        lines.append(f'<tr style="background:none">{"".join(cells)}</tr>')  # notebooks stripe their tables
    return f'<table style="border-collapse:collapse;margin:2px 0 12px;color:inherit">{"".join(lines)}</table>'
