"""One escape for pages and terminals: every view, the report and the command line show what hides, and obey nothing."""

from __future__ import annotations

import json
import re
import sys
import unicodedata
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import agentr1_lite.rollout  # noqa: F401  (its module, whose name the package gives to a function)
from agentr1_lite import pipeline, plots
from agentr1_lite.__main__ import main
from agentr1_lite.escape import esc, visible
from agentr1_lite.exercises.judge import Verdict
from agentr1_lite.mdp import Segment, StopReason, Trajectory, Turn, TurnKind, save_jsonl
from agentr1_lite.report import write_report
from agentr1_lite.tasks import load_task
from agentr1_lite.views import figure, show, trajectory_html

# a colour and a cursor sequence, one in C1 form, a bell, overrides and isolates of direction, and letters of no width
SLY = "\x1b[31mred\x1b[2K\x9b1A\a\b\r\u202egnp.exe\u2066\u2069\u200f\u200b\ufeff\u2028\U000e0041"
HIDDEN = set(SLY) - set("[31mred2KAgnp.ex")


def clean(text: str) -> bool:
    return not HIDDEN & set(text)


@given(st.text())
def test_what_is_left_is_seen_or_a_space(text):
    """Against the Unicode database: no control, surrogate or directional character stays but tab and newline."""
    for c in visible(text):
        assert c in "\t\n" or unicodedata.category(c) not in ("Cc", "Cs", "Zl", "Zp")
        assert unicodedata.bidirectional(c) not in ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")


@pytest.mark.parametrize("text", ["Škoda, 東京, नमस्ते, שלום", "👨\u200d👩\u200d👧 ❤️", "क्\u200dष", "tab\tand\nline"])
def test_what_people_write_stays(text):
    assert visible(text) == text


def test_numbers_stand_for_what_hides():
    assert visible("a\x1b[0m\u202eb") == "a⟨001B⟩[0m⟨202E⟩b" and visible("\U000e0041") == "⟨E0041⟩"
    assert esc('<\x1b"') == "&lt;⟨001B⟩&quot;"


def sly_episode() -> Trajectory:
    segment = Segment()
    segment.extend([1, 2])
    segment.extend([3], [-0.1])
    call = {"name": "search" + SLY, "arguments": {"query": SLY}, "flags": []}
    turn = Turn(0, 2, 3, TurnKind.TOOL_CALL, SLY, [call], [{"content": SLY, "success": False}], flags=[SLY])
    return Trajectory("q", "g", [segment], [turn], SLY, [SLY], SLY, stop_reason=StopReason.ANSWER)


def _words(data: object) -> list[object]:
    """Every key and value of parsed JSON."""
    if isinstance(data, dict):
        return [*data, *(word for value in data.values() for word in _words(value))]
    return [word for value in data for word in _words(value)] if isinstance(data, list) else [data]


def test_no_page_holds_it(tmp_path):
    save_jsonl(tmp_path / "trajectories" / "1.jsonl", [sly_episode()])
    rows = [{"phase": "online", "step": i, f"stop/{SLY}": 0.5, "reward": 1.0} for i in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "summary.json").write_text(json.dumps({"em": {"base": 0.5}, "split": SLY, "algorithm": SLY}))
    (tmp_path / "doctor.jsonl").write_text(json.dumps({"check": SLY, "level": "warn", "message": SLY}) + "\n")
    assert clean(write_report(tmp_path).read_bytes().decode())
    t = sly_episode()
    t.info["pieces"] = [[SLY, SLY, SLY]]
    page = trajectory_html(t, title=SLY, quantities={SLY: [1.0, 2.0, 3.0]}, id=SLY)
    data = re.search(r'<script type="application/json">(.*?)</script>', page, re.S)[1]
    assert clean(page) and clean("".join(map(str, _words(json.loads(data))))), "the script would write it"
    fig, axes = figure()
    axes.set_title(SLY.replace("\U000e0041", ""))
    assert clean(show(fig, alt=SLY))
    charts = [plots.svg_stack([plots.Curve(SLY, [1], [1.0])], SLY), plots.legend([SLY])]
    charts += [plots.svg_intervals([(SLY, [plots.Estimate(SLY, 0.5)])], SLY)]
    assert all(map(clean, charts))
    assert clean(Verdict("wrong", SLY, SLY, reread=SLY)._repr_html_())


def test_no_terminal_obeys_it(monkeypatch, capsys):
    """What a policy writes, what a tool answers and what a message quotes."""
    turn = Turn(0, 0, 0, TurnKind.TOOL_CALL, SLY, results=[{"content": SLY}])
    turn.observation = SLY
    monkeypatch.setattr(pipeline, "make_policy", lambda config, *rest: None)
    found = Trajectory("q", "g", [], [turn], answer=SLY)
    monkeypatch.setattr(sys.modules["agentr1_lite.rollout"], "collect_trajectory", lambda *args, **options: found)
    assert main(["chat", "--question", "Who?"]) == 0
    out = capsys.readouterr().out
    assert clean(out) and "⟨001B⟩[31mred" in out and out.count("\n") == 3
    task_set = load_task("atlas", "dev", count=2)
    task_set.tasks[0] = replace(task_set.tasks[0], question=SLY)
    monkeypatch.setattr(pipeline, "make_task", lambda config, split: task_set)
    monkeypatch.setattr("builtins.input", lambda prompt: "quit")
    assert main(["play"]) == 0 and clean(capsys.readouterr().out)
    assert main(["train", f"run.output={SLY}", f"nonsense.{SLY}=1"]) == 2
    assert clean(capsys.readouterr().err)
