"""The machine check and the map of the course."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

from agentr1_lite import course, doctor, planner
from agentr1_lite.__main__ import COMMANDS
from agentr1_lite.checks import CHECKS, LESSONS, Finding
from agentr1_lite.config import Config, load_config
from agentr1_lite.report import write_report

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
PACKAGE = Path(course.__file__).parent


@pytest.mark.parametrize(
    ("memory", "gpu", "fits"),
    [
        (8, 0, ["atlas-tiny"]),
        (24, 0, ["atlas-tiny", "smollm2-135m"]),
        (12.7, 7.8, ["atlas-tiny", "smollm2-135m", "qwen2.5-0.5b", "qwen2.5-1.5b"]),
        (12.7, 14.7, ["atlas-tiny", "smollm2-135m", "qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-3b"]),
        (8, 24, ["atlas-tiny", "qwen2.5-0.5b"]),
    ],
)
def test_ladder_of_a_machine(memory, gpu, fits):
    found = course.ladder(memory, gpu)
    assert [rung.name for rung, why in found if not why] == fits
    assert all("needs" in why for rung, why in found if rung.name not in fits)


@pytest.mark.parametrize("rung", [rung for rung in course.LADDER if rung.gpu], ids=lambda rung: rung.name)
@pytest.mark.parametrize("algorithm", ["GRPO", "PPO"])
def test_the_ladder_asks_for_what_the_plan_says(rung, algorithm):
    plan = planner.plan_for(load_config(rung.name, [f"training.algorithm={algorithm}"]), rung.gpu)
    assert plan.fits and rung.gpu - plan.peak_gib < 2


def test_machine_check_shows_every_finding_and_no_path(monkeypatch):
    nasty = Finding("warn", "cores", f"<b>{course.Path(course.__file__).resolve().parent.parent}/data")
    monkeypatch.setattr(doctor, "machine_check", lambda: [nasty])
    page = course.check_machine()
    assert "△ look" in page and "&lt;b&gt;data" in page and "atlas-tiny" in page and "ipywidgets" in page


def test_map_names_the_lessons_and_links_those_that_exist(tmp_path):
    (tmp_path / "00_start_here.py").touch()
    page = course.course_map(tmp_path)
    assert page.count("<a ") == 1 and 'href="00_start_here.ipynb">Start here</a>' in page
    assert page.count("(to come)") == len(course.LESSONS) - 1
    assert all(course.LESSONS[number][1] == title for number, title in LESSONS.items())
    known = {name for name, _, _ in course.LESSONS.values()}
    assert {path.stem for path in NOTEBOOKS.glob("[0-9]*.py")} <= known


def _sentences() -> list[tuple[str, str, bool]]:
    """(file, text, whether it is a docstring) of every string of the package, pieces of formatted ones included."""
    found = []
    for path in PACKAGE.rglob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        docs = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        texts = [node for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
        found += [(path.name, node.value, id(node) in docs) for node in texts]
    return found


def test_nobody_is_sent_to_what_does_not_exist():
    """Lessons, commands, targets of make and settings that a sentence of the package names."""
    lessons = {int(path.name[:2]) for path in NOTEBOOKS.glob("[0-9]*.py")}
    targets = set(re.findall(r"^([a-z]+):", (PACKAGE.parent / "Makefile").read_text(), re.M))
    assert set(LESSONS) <= lessons and {lesson for _, lesson in CHECKS.values()} <= lessons
    settings = {name for name, _, _ in Config().walk()} | {"task.knobs"}
    sections = "|".join({name.split(".")[0] for name in settings})
    for file, text, doc in _sentences():
        assert {int(n) for n in re.findall(r"\b[Ll]essons? (\d+)", text)} <= lessons, (file, text)
        assert set(re.findall(r"python -m agentr1_lite ([a-z]+)", text)) <= set(COMMANDS), (file, text)
        assert set(re.findall(r"\bmake ([a-z]+)\b(?= or pip|;|$)", text)) <= targets, (file, text)
        named = re.findall(rf"(?<![\w.])(?:{sections})\.[a-z_]+(?![\w(])", text)
        assert doc or set(named) <= settings, (file, text)


def test_a_note_of_a_former_version_names_no_lesson(tmp_path):
    """Older runs hold notes that point at lessons which were planned."""
    assert str(Finding("warn", "entropy_level", "low", 8)) == "warn  entropy_level: low"
    rows = [{"check": f"c{n}", "level": "warn", "message": "x", "lesson": n} for n in (3, 8, None)]
    (tmp_path / "doctor.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = write_report(tmp_path).read_text(encoding="utf-8")
    assert re.findall(r"<td>(03|08|00|–)</td>", page) == ["03", "–", "–"]
