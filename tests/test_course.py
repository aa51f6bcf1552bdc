"""The machine check and the map of the course."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentr1_lite import course, doctor, planner
from agentr1_lite.checks import LESSONS, Finding
from agentr1_lite.config import load_config

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"


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
