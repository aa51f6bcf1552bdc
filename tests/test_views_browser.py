"""The viewer in Chromium: keys, hover, selector, themes, paper, no script. Skipped without Playwright or Chromium."""

from __future__ import annotations

import shutil

import pytest
from test_views_html import hostile
from test_views_tokens import episode
from tiny import tokenizer

from agentr1_lite.views import compare_html, credit_html, group_html, trajectory_html

sync_api = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on the path")

NUMBERS = {"advantage": [0.0, 0.0, 1.5, 1.5, 0.0, 0.0, 0.0, 0.0, -0.5], "value": [0.1 * i for i in range(9)]}


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as play:
        started = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def page(browser):
    made = browser.new_page(viewport={"width": 900, "height": 800})
    made.problems = []
    made.on("pageerror", lambda error: made.problems.append(str(error)))
    made.on("dialog", lambda dialog: (made.problems.append(dialog.message), dialog.dismiss()))
    yield made
    assert made.problems == []
    made.close()


def load(page, body, host="<body>"):
    page.set_content(f'<!doctype html><meta charset="utf-8">{host}{body}')


def focused(page):
    return page.evaluate("document.activeElement.textContent.trim()")


def test_keys_move_by_token_and_turn(page):
    load(page, trajectory_html(episode(), quantities=NUMBERS))
    page.locator(".flow .t").nth(2).click()
    steps = [("ArrowRight", "4"), ("ArrowLeft", "3"), ("PageDown", "9"), ("ArrowUp", "3"), ("ArrowUp", "1")]
    steps += [("ArrowLeft", "1"), ("End", "9"), ("ArrowDown", "9"), ("Home", "1"), ("ArrowDown", "3")]
    for key, token in steps:
        page.keyboard.press(key)
        assert focused(page) == token, key
    assert "token 2, id 3, action, turn 1" in page.inner_text(".info")
    assert "advantage\n1.5" in page.inner_text(".info")


@pytest.mark.parametrize(
    ("body", "found"),
    [
        (credit_html(episode(), NUMBERS, rows=("advantage",)), "token 8, id 9, action, turn 2"),
        (compare_html(episode(), episode(), quantities=(NUMBERS, NUMBERS)), "left, token 8, id 9, action, turn 2"),
    ],
    ids=["credit", "compare"],
)
def test_keys_move_by_turn_in_every_view_and_stay_on_their_side(page, body, found):
    load(page, body)
    page.locator('.flow .t[tabindex="0"]').click()
    at = page.inner_text(".info p")
    page.keyboard.press("ArrowDown")
    assert found in page.inner_text(".info p")
    page.keyboard.press("ArrowUp")
    assert page.inner_text(".info p") == at


def test_a_folded_turn_is_stepped_over(page):
    load(page, trajectory_html(episode(), quantities=NUMBERS))
    page.locator("summary").nth(1).click()
    page.locator(".flow .t").nth(1).click()
    page.keyboard.press("ArrowRight")
    assert focused(page) == "9"


def test_hover_and_tap_show_numbers(page):
    load(page, trajectory_html(episode(), quantities=NUMBERS))
    page.locator(".flow .t").nth(8).hover()
    assert "token 8, id 9" in page.inner_text(".info") and "−0.5" in page.inner_text(".info")
    page.mouse.move(5, 5)
    assert "token 2, id 3" in page.inner_text(".info")


def test_the_selector_repaints_without_a_kernel(page):
    load(page, trajectory_html(episode(), quantities=NUMBERS))
    token = page.locator(".flow .t").nth(8)
    assert token.get_attribute("class") == "t n"
    page.select_option("select", "value")
    assert token.get_attribute("class") == "t p"
    assert page.locator(".legend:visible").get_attribute("data-q") == "value"
    page.select_option("select", "source")
    assert token.get_attribute("class") == "t sa"
    page.select_option("select", "advantage")
    look = """ts => ts.map(t => {
        const kind = ["p", "n", "z"].find(k => t.classList.contains(k));
        return kind ? kind + t.style.getPropertyValue("--m") : "";
    })"""
    by_script = page.locator(".flow .t").evaluate_all(look)
    load(page, trajectory_html(episode(), quantities=NUMBERS))
    assert page.locator(".flow .t").evaluate_all(look) == by_script == ["", "", "p1.00", "p1.00", *[""] * 4, "n0.33"]


def test_spaces_on_request(page):
    tok = tokenizer()
    load(page, trajectory_html(hostile(), tokenizer=tok))
    before = page.locator(".flow").inner_text()
    page.check(".blank")
    assert "·" in page.locator(".flow").inner_text()
    page.uncheck(".blank")
    assert page.locator(".flow").inner_text() == before


def test_hostile_text_runs_nothing(page):
    load(page, trajectory_html(hostile(), tokenizer=tokenizer(), title="<script>alert(3)</script>"))
    assert page.locator("img").count() == 0  # and no dialog opened: see the fixture
    assert "<script>alert(1)</script>" in page.inner_text(".flow")


def luminance(page, selector, what):
    color = page.eval_on_selector(selector, f"e => getComputedStyle(e).{what}")
    return sum(float(x) for x in color[color.index("(") + 1 : -1].split(",")[:3]) / 3


@pytest.mark.parametrize(
    ("host", "system", "dark"),
    [
        ("<body>", "light", False),
        ("<body>", "dark", True),
        ('<body data-jp-theme-light="false">', "light", True),
        ('<body data-jp-theme-light="true">', "dark", False),
        ('<body class="vscode-dark">', "light", True),
        ('<html theme="dark"><body>', "light", True),
    ],
)
def test_the_host_decides_the_theme(page, host, system, dark):
    page.emulate_media(color_scheme=system)
    load(page, trajectory_html(episode(), quantities=NUMBERS), host)
    assert (luminance(page, ".ar1", "color") > 128) == dark


def test_paper_is_light_whole_and_without_controls(page):
    page.emulate_media(color_scheme="dark", media="print")
    load(page, trajectory_html(hostile(), tokenizer=tokenizer()))
    assert luminance(page, ".ar1", "color") < 128
    assert not page.locator(".tools").is_visible() and not page.locator(".info").is_visible()
    flow = page.eval_on_selector(".flow", "e => [e.scrollHeight, e.clientHeight]")
    assert flow[0] == flow[1]


def test_it_reads_without_its_script(browser):
    page = browser.new_context(java_script_enabled=False).new_page()
    load(page, trajectory_html(episode(), quantities=NUMBERS))
    assert page.locator(".flow .t").nth(2).is_visible() and not page.locator(".tools").is_visible()
    assert page.locator(".legend").first.is_visible() or page.locator(".legend").nth(3).is_visible()
    page.context.close()


def test_a_narrow_window_does_not_scroll_sideways(page):
    page.set_viewport_size({"width": 360, "height": 700})
    one, two = episode(), episode()
    two.reward = 0.0
    load(page, group_html([one, two]) + compare_html(one, two))
    assert page.evaluate("document.documentElement.scrollWidth") <= 360


def test_a_row_of_the_group_opens_its_viewer(page):
    one, two = episode(), episode()
    two.reward = 0.0
    load(page, group_html([one, two]))
    assert not page.locator(".roll .tools").first.is_visible()
    page.locator(".roll > summary").nth(1).focus()
    page.keyboard.press("Enter")
    assert page.locator(".roll .tools").nth(1).is_visible()
    page.locator(".roll").nth(1).locator(".flow .t").nth(3).click()
    assert "advantage\n−0.7071" in page.locator(".roll .info").nth(1).inner_text()
