"""Controls: widgets made from the config's fields, a picture drawn anew in its place, and a static page."""

from __future__ import annotations

import importlib.util

import pytest

from agentr1_lite.config import Config, TrainingConfig
from agentr1_lite.views.controls import WIDGET, Panel, panel, sliders

NAMES = dict.fromkeys(["training.gamma", "training.algorithm", "training.dual_clip", "training.whiten"])
NAMES |= {"training.dual_clip": (1, 100, 0.5), "training.group_size": None}


def shown(config: Config) -> str:
    t = config.training
    return f"<p>{t.gamma:g} {t.algorithm} {t.dual_clip} {t.whiten} {t.group_size}</p>"


@pytest.fixture
def displayed(monkeypatch) -> list:
    """What was displayed, and every later update of a display handle."""
    events: list = []

    class Handle:
        def update(self, thing):
            events.append(("update", thing))

    def display(thing, raw=False, display_id=None):
        events.append(("display", thing))
        return Handle() if display_id else None

    monkeypatch.setattr("IPython.display.display", display)
    return events


@pytest.fixture
def shown_panel(displayed) -> tuple[Panel, Config, list]:
    config = Config()
    made = panel(config, shown, NAMES, title="Credit")
    made._ipython_display_()
    return made, config, displayed


def test_widgets_are_made_from_the_fields(shown_panel):
    widgets = shown_panel[0]._widgets
    gamma, algorithm, dual = (widgets[name] for name in list(NAMES)[:3])
    assert (type(gamma).__name__, gamma.min, gamma.max, gamma.value) == ("FloatSlider", 0, 1, 1.0)
    assert gamma.description == "gamma" and "GiGPO" in algorithm.options and algorithm.value == "GRPO"
    assert dual.value == 3.0 and (dual.options[0], dual.options[-1]) == (("none", "none"), ("100", 100.0))
    assert type(widgets["training.whiten"]).__name__ == "Checkbox"
    group = widgets["training.group_size"]
    assert (type(group).__name__, group.min, group.max) == ("IntSlider", 1, 256)


def test_a_moved_slider_draws_in_place_and_changes_the_config(shown_panel):
    made, config, events = shown_panel
    assert [kind for kind, _ in events] == ["display", "display"]
    assert WIDGET in events[0][1] and "Drawn with gamma = 1.0" in events[0][1]["text/html"]
    assert "1 GRPO 3.0 True 8" in events[1][1]
    made._widgets["training.gamma"].value = 0.5
    made._widgets["training.dual_clip"].value = "none"
    made.set("training.algorithm", "RLOO")
    assert [kind for kind, _ in events[2:]] == ["update"] * 3
    assert "0.5 RLOO None True 8" in events[-1][1] and made._widgets["training.algorithm"].value == "RLOO"
    assert (config.training.gamma, config.training.dual_clip, config.training.algorithm) == (0.5, None, "RLOO")


def test_a_section_alone_and_narrowed_bounds():
    made = panel(TrainingConfig(), lambda t: f"{t.lr}", {"lr": (1e-5, 1e-3, 1e-5)}, variable="training")
    made._box()
    assert (made._widgets["lr"].min, made._widgets["lr"].max) == (1e-5, 1e-3)
    assert "training.lr = 0.0005" in made.html


def test_wide_numbers_get_a_box_and_say_what_is_allowed():
    made = panel(TrainingConfig(), lambda t: "", ["micro_batch_tokens"])
    made._box()
    box = made._widgets["micro_batch_tokens"]
    assert type(box).__name__ == "Text" and not box.continuous_update
    assert "from 64 to 4194304" in made.knobs["micro_batch_tokens"].help
    box.value = "512"
    assert made.values["micro_batch_tokens"] == 512
    box.value = "5"
    assert "Not drawn" in made.picture and box.value == "512"


def test_an_optional_number_may_lie_between_the_stops_of_its_slider():
    made = panel(Config(), shown, {"training.dual_clip": (1.5, 6, 0.5)})
    made._box()
    made.set("training.dual_clip", 2.6)
    assert made.values == {"training.dual_clip": 2.6} and made._widgets["training.dual_clip"].value == 2.5
    made.set("training.dual_clip", "none")
    assert made.values == {"training.dual_clip": None} and made._widgets["training.dual_clip"].value == "none"


def test_without_widgets_the_same_picture_says_which_line_to_edit(monkeypatch, displayed):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "ipywidgets" else real(name))
    made = panel(Config(), shown, NAMES)
    made._ipython_display_()
    data = displayed[0][1]
    assert made.static and WIDGET not in data and "config.training.gamma = 1.0" in data["text/html"]
    assert displayed[1][1] == panel(Config(), shown, NAMES).picture
    assert "config.training.gamma = 1.0" in made.html and "1 GRPO 3.0 True 8" in made.html


def test_a_picture_that_fails_is_a_sentence(shown_panel):
    made, _, events = shown_panel
    made.set("training.group_size", 0)
    assert made.knobs["training.group_size"].value == 8
    failing = sliders(lambda n: 1 / n, n=(0, 3, 1, 1))
    assert "Not drawn" in failing.picture  # a number is no picture
    failing.set("n", 0)
    assert "Not drawn: division by zero" in failing.picture and "Traceback" not in failing.picture


@pytest.mark.parametrize("name", ["training.gama", "gamma", "task.knobs", "training.gamma.x"])
def test_an_unknown_setting_is_one_sentence(name):
    with pytest.raises(ValueError, match=name):
        panel(Config(), shown, [name])


def test_free_values_become_controls():
    made = sliders(lambda **v: f"<i>{v}</i>", gamma=(0, 1, 0.05, 0.95), size=(1, 8, 1, 4), mask=True, name=["a", "b"])
    made._box()
    kinds = {name: type(widget).__name__ for name, widget in made._widgets.items()}
    assert kinds == {"gamma": "FloatSlider", "size": "IntSlider", "mask": "Checkbox", "name": "Dropdown"}
    assert made.values == {"gamma": 0.95, "size": 4, "mask": True, "name": "a"}
    made._widgets["size"].value = 6
    assert made.values["size"] == 6 and "6" in made.picture
    assert "gamma=(0, 1, 0.05, 0.95)" in made.html


@pytest.mark.parametrize(
    "given",
    [(0, 1), (0, 1, 0.1, 2), [], "x", [(1, 2), (3, 4)], (None, 1, 1, 1), (0, float("nan"), 1, 0), (0, 1, 0, 1), [None]],
)
def test_a_wrong_knob_is_one_sentence(given):
    with pytest.raises(ValueError, match="sliders: x="):
        sliders(lambda x: "", x=given)
    with pytest.raises(ValueError, match="no control 'y'; it has x"):
        sliders(lambda x: "", x=True).set("y", 1)


def test_help_and_labels_are_escaped():
    made = sliders(lambda x: "", x=["<script>", "b"], title="<b>")
    assert "&lt;script&gt;" in made.note() and "<script>" not in made.note() and "&lt;b&gt;" in made.note()


@pytest.fixture(params=[True, False], ids=["widgets", "static"])
def two(request) -> tuple[Panel, Config]:
    config = Config()
    made = panel(config, lambda c: f"<p>{c.training.gamma:g} {c.training.lr:g}</p>", ["training.gamma", "training.lr"])
    if request.param:
        made._box()
    return made, config


@pytest.mark.parametrize("value", [7, float("nan"), float("inf"), "x", None, [1], 10**400])
def test_a_refused_value_leaves_the_knob_and_says_why(two, value):
    made, config = two
    made.set("training.gamma", value)
    assert "Not drawn: training.gamma is" in made.picture and "a number from 0 to 1" in made.picture
    assert made.values["training.gamma"] == config.training.gamma == 1.0 and "gamma = 1.0" in made.note()
    assert all(w.value == 1.0 for name, w in made._widgets.items() if name == "training.gamma")
    made.set("training.lr", 3e-4)
    assert config.training.lr == 3e-4 and "1 0.0003" in made.picture
    made.set("training.gamma", "0.5")
    assert config.training.gamma == made.values["training.gamma"] == 0.5


@pytest.mark.parametrize("boxed", [True, False])
def test_free_values_are_refused_with_and_without_widgets(boxed):
    made = sliders(lambda **v: f"<i>{v}</i>", x=(0, 1, 0.1, 0.5), n=(0, 4, 1, 2), name=["a", "b"], on=True)
    if boxed:
        made._box()
    before = made.values
    for name, value in (("x", 2), ("x", float("nan")), ("x", "0.5"), ("n", 1.5), ("name", "c"), ("on", 3)):
        made.set(name, value)
        assert made.values == before and f"Not drawn: {name} is" in made.picture
    made.set("name", "b")
    assert "&#x27;b" in made.picture or "'b'" in made.picture


@pytest.mark.parametrize(
    "bounds", [(0, 0.5, 0.1), (0, 5, 0.1), (-1, 1, 0.1), (1, 0, 0.1), (0, 1), "ab", (0, 1, 0), (None, 1, 1)]
)
def test_bounds_hold_the_value_and_lie_inside_the_fields(bounds):
    with pytest.raises(ValueError, match=r"training\.gamma"):
        panel(Config(), shown, {"training.gamma": bounds})


def test_narrowed_bounds_refuse_what_the_field_would_take():
    made = panel(Config(), shown, {"training.gamma": (0.5, 1, 0.1)})
    made.set("training.gamma", 0.1)
    assert made.values["training.gamma"] == 1.0 and "from 0.5 to 1" in made.picture


def test_one_name_may_stand_alone():
    assert list(panel(Config(), shown, "training.gamma").knobs) == ["training.gamma"]
