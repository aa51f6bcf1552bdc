"""The lessons: notebooks equal their sources, run twice in one kernel, and their solutions pass their checks."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from copy import deepcopy
from pathlib import Path
from typing import NamedTuple

import nbformat
import pytest

ROOT = Path(__file__).parents[1]
_spec = importlib.util.spec_from_file_location("build", ROOT / "notebooks" / "build.py")
build = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(build)

SOURCES = build.lessons()
each_lesson = pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
SECONDS = ROOT / "runs" / "lesson_seconds.json"


# The lessons themselves


@pytest.fixture(scope="module")
def runs(request):
    """Futures of the lessons that this session tests, played two at a time; their times are written at the end."""
    selected = {
        getattr(item, "callspec", None) and item.callspec.params.get("source") for item in request.session.items
    }
    seconds: dict[str, list[float]] = {}

    def play(source: Path) -> tuple[list, list]:
        first = build.read(source)
        second = build.with_solutions(deepcopy(first))
        for cell in second.cells:
            cell["id"] = f"again-{cell['id']}"
        both = nbformat.v4.new_notebook(cells=first.cells + second.cells)
        spent = build.execute(both, fast=True)
        count = len(list(build.code_cells(first)))
        seconds[source.stem] = [round(sum(spent[:count]), 1), round(sum(spent[count:]), 1)]
        return first.cells, both.cells[len(first.cells) :]

    with ThreadPoolExecutor(2) as pool:
        yield {source: pool.submit(play, source) for source in SOURCES if source in selected}
    SECONDS.parent.mkdir(exist_ok=True)
    SECONDS.write_text(json.dumps(dict(sorted(seconds.items())), indent=1) + "\n")


def verdicts(cells: list) -> list[str]:
    """What the exercise checks of these cells said."""
    return [
        output.data["text/plain"]
        for cell in cells
        if build.is_check(cell)
        for output in cell.outputs
        if output.output_type == "execute_result"
    ]


@each_lesson
def test_runs_twice_in_one_kernel_with_gaps_and_with_solutions(source: Path, runs: dict[Path, Future]):
    before, after = map(verdicts, runs[source].result())
    checks = sum(build.is_check(cell) for cell in build.read(source).cells)
    assert len(before) == len(after) == checks
    assert [said[:7] for said in before] == ["○ to do"] * checks
    assert [said[:7] for said in after] == ["✔ right"] * checks


@each_lesson
def test_notebook_is_its_source_executed(source: Path):
    build.check(source)
    assert build.run_seconds(source.with_suffix(".ipynb")) <= 180


@each_lesson
def test_page_export_shows_the_pictures_without_a_kernel(source: Path):
    from bs4 import BeautifulSoup
    from nbconvert import HTMLExporter

    notebook = nbformat.read(source.with_suffix(".ipynb"), 4)
    pictures = [
        "".join(output.data["text/html"])
        for cell in build.code_cells(notebook)
        for output in cell.outputs
        if "text/html" in output.get("data", {})
    ]
    page, _ = HTMLExporter().from_notebook_node(notebook)
    pictures = [str(BeautifulSoup(picture, "html.parser")) for picture in pictures]  # as nbconvert writes them
    assert sum('class="ar1' in picture for picture in pictures) >= 2
    assert all(picture in page for picture in pictures)
    assert build.WIDGET not in page


@each_lesson
def test_lesson_has_its_parts(source: Path):
    text = source.read_text(encoding="utf-8")
    prose = "\n".join(cell.source for cell in build.read(source).cells if cell.cell_type == "markdown")
    first = prose.split("\n## ")[0]
    assert re.match(r"# \d\d · ", prose) and "{run_seconds} s to run" in first and "min to read" in first
    for part in ("**Aim", "**Before", "## Summary", "## Where this lives in the package"):
        assert part in prose, part
    links = re.findall(r"\]\((\.\./[^)#]+|[0-9]{2}_[^)#]+)", prose)
    assert [link for link in links if not (source.parent / link).exists()] == []
    assert all(
        len(cell.source.splitlines()) <= 45
        for cell in build.read(source).cells
        if "setup" not in cell.metadata.get("tags", []) and cell.cell_type == "code"
    )
    assert "/work/" not in text and "/root" not in text


# The builder

LESSON = """\
# %% [markdown]
# # 98 · A toy
# ≈ 1 min to read, {run_seconds} s to run

# %% tags=["setup"]

# %%
print(6 * 7)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of lessons with one toy in it."""
    monkeypatch.setattr(build, "FOLDER", tmp_path)
    monkeypatch.setattr(build, "setup_code", lambda: "import os\nFAST = os.environ['FAST'] == '1'")
    (tmp_path / "98_toy.py").write_text(LESSON)
    return tmp_path


def test_build_fills_in_and_repeats_byte_for_byte(folder):
    assert build.main([]) == 0
    notebook = folder / "98_toy.ipynb"
    first = notebook.read_bytes()
    cells = nbformat.read(notebook, 4).cells
    assert "1 s to run" in cells[0].source and "FAST" in cells[1].source
    assert cells[2].outputs[0].text == "42\n" and [cell["id"] for cell in cells] == ["98-000", "98-001", "98-002"]
    assert build.main([]) == 0 and notebook.read_bytes() == first
    assert build.main(["--check"]) == 0


def test_check_names_the_lesson_and_the_cell(folder, capsys):
    assert build.main(["--check"]) == 1
    assert "98_toy.ipynb does not exist; run make notebooks" in capsys.readouterr().err
    notebook = build.read(folder / "98_toy.py", 1)
    notebook.metadata["agentr1_lite"] = {"run_seconds": 1}
    nbformat.write(notebook, folder / "98_toy.ipynb")
    assert build.main(["--check"]) == 1
    assert "98_toy.ipynb, cell 1: was not executed" in capsys.readouterr().err
    for cell in build.code_cells(notebook):
        cell.execution_count = 1
    nbformat.write(notebook, folder / "98_toy.ipynb")
    assert build.main(["--check"]) == 0
    notebook.cells[2].outputs = [nbformat.v4.new_output("error", ename="KeyError", evalue="x", traceback=[])]
    nbformat.write(notebook, folder / "98_toy.ipynb")
    assert build.main(["--check"]) == 1
    assert "98_toy.ipynb, cell 2: ended in an error" in capsys.readouterr().err
    (folder / "98_toy.ipynb").write_text("[]")
    assert build.main(["--check"]) == 1
    assert "98_toy.ipynb is no notebook" in capsys.readouterr().err
    notebook.cells[2].outputs = []
    nbformat.write(notebook, folder / "98_toy.ipynb")
    (folder / "98_toy.py").write_text(LESSON.replace("6 * 7", "6 * 8"))
    assert build.main(["--check"]) == 1
    assert "98_toy.ipynb, cell 2: differs from 98_toy.py" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("1 / 0", "ZeroDivisionError"),
        ("import sys\nprint('oh', file=sys.stderr)", "cell 98-002 writes to standard error: 'oh'"),
        ("import os\nprint(os.path.expanduser('~/x'))", "shows a path of this machine"),
        ("import ipywidgets\nipywidgets.IntSlider()", "shows a widget without a static picture"),
    ],
)
def test_build_refuses_what_a_reader_should_not_meet(folder, code, words, capsys):
    (folder / "98_toy.py").write_text(LESSON.replace("print(6 * 7)", code))
    assert build.main([]) == 1
    assert words in capsys.readouterr().err and not (folder / "98_toy.ipynb").exists()


def test_widget_state_is_not_saved(folder):
    code = (
        "import ipywidgets\nfrom IPython.display import display\nslider = ipywidgets.IntSlider()\n"
        "display({'text/html': '<b>static</b>', **slider._repr_mimebundle_()}, raw=True)"
    )
    (folder / "98_toy.py").write_text(LESSON.replace("print(6 * 7)", code))
    assert build.main([]) == 0
    text = (folder / "98_toy.ipynb").read_text()
    assert "<b>static</b>" in text and "widget-view" not in text and "widget-state" not in text


def test_an_unknown_lesson_and_a_check_without_solution_are_sentences(folder, capsys):
    assert build.main(["77"]) == 2 and "no lesson starts with '77'; there are 98_toy" in capsys.readouterr().err
    (folder / "98_toy.py").write_text(LESSON.replace("print(6 * 7)", 'check("x", f)'))
    with pytest.raises(build.BuildError, match="no folded solution"):
        build.with_solutions(build.read(folder / "98_toy.py"))
    (folder / "98_toy.py").write_text(LESSON.replace(' tags=["setup"]', ""))
    with pytest.raises(build.BuildError, match='no cell is tagged "setup"'):
        build.read(folder / "98_toy.py")


@pytest.mark.parametrize(("given", "former", "shown"), [(0.2, None, 1), (7.6, None, 8), (22, None, 20), (22, 30, 30)])
def test_run_time_is_steady(given, former, shown):
    assert build.rounded(given, former) == shown


# The first cell of every lesson


class Done(NamedTuple):
    returncode: int


def run_setup(folder: Path, monkeypatch, hidden: tuple[str, ...] = (), colab: bool = False) -> tuple[list, dict]:
    """Run the set-up cell in ``folder`` where the modules ``hidden`` do not exist; returns the commands it ran."""
    real, commands = importlib.util.find_spec, []
    monkeypatch.chdir(folder)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in hidden else real(name))
    monkeypatch.setattr(subprocess, "run", lambda command, **_: commands.append(command) or Done(0))
    monkeypatch.setattr(sys, "path", list(sys.path))
    if colab:
        monkeypatch.setitem(sys.modules, "google.colab", object())
    names: dict = {}
    exec(compile(build.setup_code(), "setup_cell", "exec"), names)
    return commands, names


@pytest.mark.parametrize("place", [".", "notebooks", "tests/golden"])
def test_set_up_finds_the_clone_from_anywhere_in_it(place, monkeypatch, capsys):
    commands, names = run_setup(ROOT / place, monkeypatch)
    assert commands == [] and names["clone"] == ROOT and str(ROOT) in sys.path
    assert capsys.readouterr().out == "agentr1_lite: the clone around this notebook\n"


def test_set_up_takes_an_installed_package(tmp_path, monkeypatch, capsys):
    assert run_setup(tmp_path, monkeypatch)[0] == []
    assert "installed in this Python" in capsys.readouterr().out


def test_set_up_clones_from_the_address_in_pyproject(tmp_path, monkeypatch, capsys):
    commands, _ = run_setup(tmp_path, monkeypatch, hidden=("agentr1_lite", "trl"), colab=True)
    address = re.search(r'Repository = "(.+)"', (ROOT / "pyproject.toml").read_text())[1]
    assert commands[0] == ["git", "clone", "-q", "--depth", "1", address, str(tmp_path / "agentr1_lite")]
    assert commands[1][1:6] == ["-m", "pip", "install", "-q", "-e"] and len(commands) == 2
    assert capsys.readouterr().out == "agentr1_lite: cloned here; installed trl\n"


def test_set_up_in_a_wrong_kernel_names_the_command(monkeypatch):
    with pytest.raises(ImportError, match="trl missing in this Python: run `make setup`"):
        run_setup(ROOT, monkeypatch, hidden=("trl",))
