"""Write and execute the lessons: ``NN_name.py`` (percent format) → ``NN_name.ipynb`` beside it.

    python notebooks/build.py             # all lessons; or name some: 00 03_rollouts_and_masks
    python notebooks/build.py --fast      # executed with FAST=1
    python notebooks/build.py --check     # executes nothing; fails where a notebook is not its source's

In a source two things are filled in here: the code cell tagged ``setup`` gets the text of
``setup_cell.py`` with the repository address of ``pyproject.toml``, and ``{run_seconds}`` in the
prose becomes the time the lesson took. Exercises follow a form that the tests rely on: a cell with
``check("name", function)`` as its last line, and behind it a folded ``<details>`` with the solution
in a fenced ``python`` block.

Building twice gives the same file where outputs are the same: cells are numbered, widget state and
times of execution are left out, and a run time stays until it is off by more than half.
"""

from __future__ import annotations

import argparse
import copy
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, DeadKernelError
from nbformat import NotebookNode

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent
WIDGET = "application/vnd.jupyter.widget-view+json"
METADATA = {
    "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
LARGEST = 3_000_000  # bytes of a notebook with its outputs
SECONDS = "{run_seconds}"
SOLUTION = re.compile(r"<details>.*?```python\n(.*?)```.*?</details>", re.S)


class BuildError(ValueError):
    """A lesson cannot be built, or differs from its source; one sentence with the place."""


def lessons(names: Sequence[str] = ()) -> list[Path]:
    """The sources in order, or those whose names start with one of ``names``."""
    found = sorted(FOLDER.glob("[0-9][0-9]_*.py"))
    if missing := [name for name in names if not any(path.name.startswith(name) for path in found)]:
        raise BuildError(f"no lesson starts with {missing[0]!r}; there are {', '.join(p.stem for p in found)}")
    return [path for path in found if not names or path.name.startswith(tuple(names))]


def setup_code() -> str:
    address = re.search(r'^Repository = "(.+)"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.M)[1]
    code = (FOLDER / "setup_cell.py").read_text(encoding="utf-8").rstrip()
    return code.replace("REPOSITORY", address)


def read(source: Path, run_seconds: int | None = None) -> NotebookNode:
    """A source as a notebook without outputs, its set-up cell and, where known, its run time filled in."""
    notebook = jupytext.read(source, fmt="py:percent")
    for number, cell in enumerate(notebook.cells):
        tags = cell.metadata.get("tags", [])
        cell.metadata = nbformat.from_dict({"tags": tags} if tags else {})
        cell["id"] = f"{source.stem[:2]}-{number:03d}"
        if "setup" in tags:
            cell.source = setup_code()
        elif cell.cell_type == "markdown" and run_seconds is not None:
            cell.source = cell.source.replace(SECONDS, str(run_seconds))
    notebook.metadata = nbformat.from_dict(METADATA)
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    if not any("setup" in cell.metadata.get("tags", []) for cell in notebook.cells):
        raise BuildError(f'{source.name}: no cell is tagged "setup"; write # %% tags=["setup"] before the first code')
    return notebook


def execute(notebook: NotebookNode, *, fast: bool = False) -> list[float]:
    """Run a notebook in its folder, writing outputs into it; returns the seconds of each code cell."""
    spent: list[float] = []

    def started(**_: object) -> None:
        spent.append(-time.monotonic())

    def ended(**_: object) -> None:
        spent[-1] += time.monotonic()

    client = NotebookClient(
        notebook,
        timeout=600,
        kernel_name="python3",
        resources={"metadata": {"path": str(FOLDER)}},
        record_timing=False,
        store_widget_state=False,
        coalesce_streams=True,
        on_cell_execute=started,
        on_cell_executed=ended,
    )
    try:
        client.execute(env={**os.environ, "FAST": str(int(fast))})
    except CellExecutionError as error:
        raise BuildError(str(error).strip()) from None
    return spent


def tidy(notebook: NotebookNode, name: str) -> None:
    """Leave out what changes from run to run or needs a kernel; complain of what a reader should not meet."""
    notebook.metadata = nbformat.from_dict(METADATA)
    for cell in code_cells(notebook):
        where = f"{name}, cell {cell['id']}"
        cell.metadata.pop("execution", None)
        for output in cell.outputs:
            if output.output_type == "stream" and output.name == "stderr":
                raise BuildError(f"{where} writes to standard error: {output.text.strip()[:200]!r}; lessons are quiet")
            if output.output_type in ("display_data", "execute_result"):
                output.metadata = nbformat.from_dict({})
                if output.data.pop(WIDGET, None) is not None and "text/html" not in output.data:
                    raise BuildError(f"{where} shows a widget without a static picture beside it; use views.panel")
        text = nbformat.writes(nbformat.v4.new_notebook(cells=[cell]))
        if found := next((path for path in (str(ROOT), str(Path.home())) if f"{path}/" in text), None):
            raise BuildError(f"{where} shows a path of this machine ({found}); print names without it")


def code_cells(notebook: NotebookNode) -> Iterator[NotebookNode]:
    return (cell for cell in notebook.cells if cell.cell_type == "code")


def with_solutions(notebook: NotebookNode) -> NotebookNode:
    """The same lesson after a diligent learner: before each check the folded solution behind it is run."""
    solved = copy.deepcopy(notebook)
    cells: list[NotebookNode] = []
    for number, cell in enumerate(solved.cells):
        if is_check(cell):
            rest = (SOLUTION.search(c.source) for c in solved.cells[number + 1 :] if c.cell_type == "markdown")
            found = next((match for match in rest if match), None)
            if found is None:
                raise BuildError(f"cell {cell['id']} checks an exercise, and no folded solution comes after it")
            cells.append(nbformat.v4.new_code_cell(found[1]))
        cells.append(cell)
    solved.cells = cells
    return solved


def is_check(cell: NotebookNode) -> bool:
    """Whether a cell checks an exercise: ``check(`` starts its last line."""
    return cell.cell_type == "code" and cell.source.strip().rpartition("\n")[2].startswith("check(")


def build(source: Path, fast: bool = False) -> float:
    """Execute one lesson and write its notebook; returns the seconds it took."""
    target = source.with_suffix(".ipynb")
    notebook = read(source)
    try:
        seconds = sum(execute(notebook, fast=fast))
    except BuildError as error:
        raise BuildError(f"{source.name}: {error}") from None
    tidy(notebook, source.name)
    shown = rounded(seconds, run_seconds(target))
    for cell in notebook.cells:
        cell.source = cell.source.replace(SECONDS, str(shown)) if cell.cell_type == "markdown" else cell.source
    notebook.metadata["agentr1_lite"] = {"run_seconds": shown}
    text = nbformat.writes(notebook) + "\n"
    if len(text) > LARGEST:
        raise BuildError(
            f"{target.name} is {len(text) / 1e6:.1f} MB with its outputs; show less than {LARGEST / 1e6} MB"
        )
    part = target.with_name(target.name + ".part")
    part.write_text(text, encoding="utf-8", newline="\n")
    part.replace(target)
    return seconds


def run_seconds(target: Path) -> int | None:
    """The run time a built notebook names."""
    if not target.exists():
        return None
    return nbformat.read(target, 4).metadata.get("agentr1_lite", {}).get("run_seconds")


def rounded(seconds: float, former: int | None = None) -> int:
    """Seconds for a reader: whole below ten, else in fives; the former figure where it is still about right."""
    if former and former / 1.5 <= seconds <= former * 1.5:
        return former
    return max(1, round(seconds)) if seconds < 10 else 5 * round(seconds / 5)


def check(source: Path) -> None:
    """Raise BuildError where a notebook is missing, not its source's, or not executed."""
    target = source.with_suffix(".ipynb")
    again = f"run make notebooks ARGS={source.stem[:2]}"
    if not target.exists():
        raise BuildError(f"{target.name} does not exist; {again}")
    try:
        built = nbformat.read(target, 4)
    except Exception as error:  # nbformat raises whatever the broken file leads it to
        raise BuildError(f"{target.name} is no notebook ({type(error).__name__}); {again}") from error
    wanted = read(source, run_seconds(target))
    if len(built.cells) != len(wanted.cells):
        raise BuildError(f"{target.name} has {len(built.cells)} cells, {source.name} {len(wanted.cells)}; {again}")
    for number, (mine, theirs) in enumerate(zip(built.cells, wanted.cells, strict=True)):
        if any(mine[key] != theirs[key] for key in ("cell_type", "source", "id", "metadata")):
            raise BuildError(f"{target.name}, cell {number}: differs from {source.name}; {again}")
        if mine.cell_type == "code" and mine.source.strip() and mine.execution_count is None:
            raise BuildError(f"{target.name}, cell {number}: was not executed; {again}")
        if any(output.output_type == "error" for output in mine.get("outputs", ())):
            raise BuildError(f"{target.name}, cell {number}: ended in an error; {again}")
    tidy(built, target.name)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write and execute the lessons' notebooks from their sources.")
    parser.add_argument("names", nargs="*", help="lessons, by the start of their names (default: all)")
    parser.add_argument("--fast", action="store_true", help="execute with FAST=1")
    parser.add_argument("--check", action="store_true", help="execute nothing, compare notebooks with sources")
    args = parser.parse_args(argv)
    status = 0
    try:
        for source in lessons(args.names):
            try:
                seconds = None if args.check else build(source, args.fast)
                check(source)
                print(f"{source.stem}: {'equals its source' if seconds is None else f'{seconds:.1f} s'}", flush=True)
            except (BuildError, OSError, UnicodeError, DeadKernelError) as error:
                print(f"{source.name}: {error}" if not isinstance(error, BuildError) else error, file=sys.stderr)
                status = 1
    except BuildError as error:
        print(error, file=sys.stderr)
        return 2
    return status


if __name__ == "__main__":
    sys.exit(main())
