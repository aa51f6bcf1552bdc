"""Lessons in a real browser: JupyterLab runs all cells, a slider redraws its picture, the viewer obeys the keyboard.

Screenshots are left in ``runs/browser``.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
import tiny

ROOT = Path(__file__).parents[2]
_spec = importlib.util.spec_from_file_location("build", ROOT / "notebooks" / "build.py")
build = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(build)
SCREENSHOTS = ROOT / "runs" / "browser"
LESSONS = (("00", "light"), ("03", "dark"), ("04", "light"))
PATIENCE = 240_000  # ms; a lesson's cells on a busy machine
SETTINGS = {
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False, "doNotDisturbMode": True},
    "notebook-extension/tracker": {"windowingMode": "none"},  # else cells that are out of sight are not in the page
    "docmanager-extension/plugin": {"autosave": False},
}


@pytest.fixture(scope="module")
def browser() -> Iterator:
    """Debian's Chromium through Playwright."""
    if importlib.util.find_spec("playwright") is None:
        pytest.skip("playwright is not installed; pip install playwright (no browser download is needed)")
    if (program := shutil.which("chromium")) is None:
        pytest.skip("chromium is not installed; apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield found
        found.close()


class Lab:
    """A JupyterLab of its own: a folder with the lessons, without outputs, and settings that open no dialog."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, tiny.free_port()
        for name, _ in LESSONS:
            (source,) = build.lessons([name])
            nbformat.write(build.read(source), folder / f"{source.stem}.ipynb")
        self.theme("light")
        places = ("JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR", "JUPYTERLAB_WORKSPACES_DIR", "IPYTHONDIR")
        paths = {name: str(folder / ".jupyter" / name) for name in places}
        paths |= {"JUPYTERLAB_SETTINGS_DIR": str(folder / ".settings"), "PYTHONPATH": str(ROOT)}
        paths |= {"FAST": "1", "OMP_NUM_THREADS": "1"}
        options = [f"--port={self.port}", "--no-browser", "--allow-root", "--IdentityProvider.token=", "--ip=127.0.0.1"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "jupyterlab", *options, f"--ServerApp.root_dir={folder}"],
            env={**os.environ, **paths},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        said = []
        for line in self.process.stderr:
            said.append(line)
            if "is running at" in line:
                return
        raise RuntimeError("JupyterLab did not start: " + "".join(said[-5:]))

    def theme(self, theme: str) -> None:
        for name, values in {**SETTINGS, "apputils-extension/themes": {"theme": f"JupyterLab {theme.title()}"}}.items():
            path = self.folder / ".settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(values))


@pytest.fixture(scope="module")
def lab(browser, tmp_path_factory) -> Iterator[Lab]:
    made = Lab(tmp_path_factory.mktemp("lab"))
    drain = subprocess.Popen(["cat"], stdin=made.process.stderr, stdout=subprocess.DEVNULL)
    yield made
    made.process.terminate()
    made.process.wait(20)
    drain.terminate()


EXECUTED = """() => {
  const prompts = [...document.querySelectorAll('.jp-Notebook .jp-CodeCell .jp-InputArea-prompt')];
  return prompts.length > 5 && prompts.every((prompt) => /\\[\\d+\\]:/.test(prompt.textContent));
}"""


@pytest.fixture(params=LESSONS, ids=lambda lesson: f"{lesson[0]}-{lesson[1]}")
def lesson(request, lab, browser) -> Iterator:
    """The page of a lesson with all cells run."""
    name, theme = request.param
    lab.theme(theme)
    (path,) = lab.folder.glob(f"{name}_*.ipynb")
    page = browser.new_page(viewport={"width": 1200, "height": 1000})
    page.faults = []
    page.on("pageerror", lambda error: page.faults.append(str(error)))
    # asked where "Run" comes before the kernel is there
    kernel = page.get_by_role("button", name="Select", exact=True)
    page.add_locator_handler(page.locator(".jp-Dialog"), lambda: kernel.click())
    page.goto(f"http://127.0.0.1:{lab.port}/lab/tree/{path.name}?reset")
    page.wait_for_selector(".jp-Notebook .jp-CodeCell", timeout=60_000)
    page.get_by_text("Python 3 (ipykernel) | Idle").wait_for(timeout=60_000)
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
    page.wait_for_function(EXECUTED, timeout=PATIENCE)
    page.lesson = name
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    yield page
    height = page.evaluate("document.querySelector('.jp-WindowedPanel-outer').scrollHeight")
    page.set_viewport_size({"width": 1200, "height": min(int(height) + 120, 16_000)})
    page.screenshot(path=SCREENSHOTS / f"{name}_{theme}.png")
    page.close()


def test_lesson_in_jupyterlab(lesson):
    assert lesson.locator('[data-mime-type="application/vnd.jupyter.error"]').count() == 0
    assert lesson.locator('[data-mime-type="application/vnd.jupyter.stderr"]').count() == 0
    assert lesson.locator("text=Error displaying widget").count() == 0
    if lesson.locator(".widget-slider").count():
        moves_a_slider(lesson)
    else:
        assert lesson.lesson == "03"
    uses_the_viewer(lesson)
    if lesson.lesson == "00":
        plays(lesson)
    assert lesson.faults == []


def moves_a_slider(page) -> None:
    """The picture below the first slider is drawn anew when the slider is moved by key."""
    cell = page.locator(".jp-CodeCell", has=page.locator(".widget-slider")).first
    picture = cell.locator(".ar1").last
    before = picture.inner_html()
    knob = cell.locator(".noUi-handle").first
    knob.scroll_into_view_if_needed()
    knob.focus()
    for _ in range(3):
        page.keyboard.press("ArrowLeft")
    page.wait_for_function(
        "([cell, before]) => [...cell.querySelectorAll('.ar1')].at(-1).innerHTML !== before",
        arg=[cell.element_handle(), before],
        timeout=30_000,
    )
    assert "Not drawn" not in picture.inner_html()


def uses_the_viewer(page) -> None:
    """Arrow keys move by token and turn, and another quantity paints other colours."""
    view = page.locator(".ar1-view.live:visible").first
    assert view.count() == 1, "the viewer's script did not run"
    view.scroll_into_view_if_needed()
    view.locator('.flow .t[tabindex="0"]').click()
    token, info = "document.activeElement", view.locator(".info")
    first, said = page.evaluate(f"{token}.textContent"), info.inner_text()
    page.keyboard.press("ArrowRight")
    assert info.inner_text() != said
    page.keyboard.press("ArrowLeft")
    assert (page.evaluate(f"{token}.textContent"), info.inner_text()) == (first, said)
    page.keyboard.press("ArrowDown")
    assert "turn 2" in info.inner_text()
    painted = (
        "(view) => [...view.querySelectorAll('.flow .t')].map((t) => t.className + t.getAttribute('style')).join()"
    )
    before = view.evaluate(painted)
    choices = view.locator("select option").evaluate_all("(all) => all.map((option) => option.value)")
    view.locator("select").select_option("source" if "source" not in before else choices[1])
    view.locator("select").select_option(
        next(c for c in choices if c in ("sampled_logprob", "advantage", "action_mask"))
    )
    assert view.evaluate(painted) != before


def plays(page) -> None:
    """A button of the step player takes its token, and undo takes it back."""
    cell = page.locator(".jp-CodeCell", has=page.get_by_role("button", name="Undo")).last
    tokens = cell.locator(".ar1 .t.sa")
    count = tokens.count()
    cell.get_by_role("button", name="1 · ").click()
    page.wait_for_function(
        "([cell, count]) => cell.querySelectorAll('.ar1 .t.sa').length === count + 1",
        arg=[cell.element_handle(), count],
    )
    cell.get_by_role("button", name="Undo").click()
    page.wait_for_function(
        "([cell, count]) => cell.querySelectorAll('.ar1 .t.sa').length === count",
        arg=[cell.element_handle(), count],
    )
