"""Controls beside a picture: change a number, and the picture is drawn anew in its place.

The picture is one output that is updated through its display handle, so nothing flickers and no output can
land in a wrong cell. Where no widget can work (no ipywidgets, a saved page), the same picture stands with the
values it was made with and a line that says what to edit.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from numbers import Integral, Real
from typing import Any

from agentr1_lite.settings import ConfigError, allowed, checked, value_type
from agentr1_lite.views.theme import Html, esc, part, show, templates

WIDGET = "application/vnd.jupyter.widget-view+json"
WIDEST = {int: 400, float: 10}  # a range up to here gets a slider, a wider one a box for text


@dataclass
class Knob:
    """One control: a slider where there are ``bounds`` (low, high, step), a list of ``choices``, or a box for text."""

    label: str
    value: Any
    bounds: tuple[Any, Any, Any] | None = None
    choices: tuple = ()
    optional: bool = False
    unit: str = ""
    help: str = ""
    edit: str = ""
    read: Callable[[Any], Any] = lambda value: value

    def accepted(self, value: Any) -> Any:
        """The value as this control takes it; raises ``ValueError`` where it cannot."""
        value = self.read(value)
        if self.choices:
            fits, wanted = value in self.choices, f"one of {', '.join(map(str, self.choices))}"
        elif self.bounds is None or value is None and self.optional:
            return value
        else:
            low, high, _ = self.bounds
            whole = all(isinstance(x, Integral) for x in self.bounds)
            fits = isinstance(value, Integral if whole else Real) and low <= value <= high
            wanted = f"a {'whole ' if whole else ''}number from {low:.10g} to {high:.10g}"
        if not fits:
            raise ValueError(f"{self.label} is {value!r:.60}; expected {wanted}")
        return value

    @property
    def stops(self) -> list[Any]:
        """What the slider of a number that may be None offers: "none", then low, low + step, …"""
        low, high, step = self.bounds
        return ["none", *(low + i * step for i in range(int((high - low) / step + 1e-9) + 1))]

    @property
    def held(self) -> Any:
        """The value as its widget holds it: a box holds text, an optional number's slider the nearest of its stops."""
        if self.bounds and self.optional:
            none, *numbers = self.stops
            return none if self.value is None else min(numbers, key=lambda stop: abs(stop - self.value))
        return self.value if self.choices or self.bounds else str(self.value)


class Panel:
    """Knobs and a picture of them; ``draw(values)`` gets every knob's value by name.

    Last in a cell it shows itself. ``set(name, value)`` does from code what a control does. ``static=True`` leaves
    the widgets out.
    """

    def __init__(
        self, knobs: Mapping[str, Knob], draw: Callable[[dict[str, Any]], Any], *, title: str = "", static: bool = False
    ) -> None:
        self.knobs, self.title = dict(knobs), title
        self.static = static or not widgets_work()
        self._draw, self._handles, self._widgets, self._setting = draw, [], {}, False
        self.picture = self._render()

    @property
    def values(self) -> dict[str, Any]:
        return {name: knob.value for name, knob in self.knobs.items()}

    def set(self, name: str, value: Any) -> None:
        """Change a knob, here and in the widget, and draw; an unknown name raises ``ValueError``.

        A value that the knob cannot take leaves it as it was, and the picture says why.
        """
        if name not in self.knobs:
            raise ValueError(f"the panel has no control {name!r}; it has {', '.join(self.knobs)}")
        if self._setting:  # a widget reports what it was just given
            return
        knob = self.knobs[name]
        try:
            knob.value = knob.accepted(value)
            self.picture = self._render()
        except ValueError as error:
            self.picture = _not_drawn(error)
        if name in self._widgets:
            self._setting = True
            self._widgets[name].value = knob.held
            self._setting = False
        for handle in self._handles:
            handle.update(self.picture)

    def _render(self) -> Html:
        try:
            return show(self._draw(self.values), alt=self.title)
        except Exception as error:  # a value may be one that the picture cannot show
            return _not_drawn(error)

    # Showing it

    @property
    def html(self) -> str:
        """The picture as it stands, with the line that says what to edit."""
        return self.note() + self.picture.html

    def note(self) -> str:
        """The values as text, for pages without widgets."""
        return part(templates().drawn(self.title, list(self.knobs.values())))

    def _repr_html_(self) -> str:
        return self.html

    def _ipython_display_(self) -> None:
        from IPython.display import display

        display(bundle(self, self.note(), None if self.static else self._box()), raw=True)
        self._handles = [display(self.picture, display_id=True)]  # a cell run again replaces the former picture

    def __repr__(self) -> str:
        return f"<Panel {', '.join(f'{name}={knob.value!r}' for name, knob in self.knobs.items())}>"

    def _box(self) -> Any:
        import ipywidgets as w

        rows = [w.HTML(f"<b>{esc(self.title)}</b>")] if self.title else []
        for name, knob in self.knobs.items():
            widget = self._widgets[name] = _widget(knob)
            widget.observe(lambda change, name=name: self.set(name, change["new"]), names="value")
            text = " · ".join(filter(None, (esc(knob.unit), esc(knob.help))))
            rows.append(w.HBox([widget, w.HTML(f'<span style="opacity:.7;font-size:12px">{text}</span>')]))
        return w.VBox(rows)


def widgets_work() -> bool:
    return importlib.util.find_spec("ipywidgets") is not None


def bundle(thing: Any, page: str, widget: Any = None) -> dict[str, Any]:
    """What a notebook stores of ``thing``: the widget where there is one, and ``page`` for readers without a kernel."""
    data = {"text/html": page, "text/plain": repr(thing)}
    if widget is not None:
        found = widget._repr_mimebundle_()
        data[WIDGET] = (found[0] if isinstance(found, tuple) else found)[WIDGET]
    return data


def _not_drawn(error: Exception) -> Html:
    said = " ".join(str(error).split()) or type(error).__name__
    return show(part(f'<p class="bad">Not drawn: {esc(said)}</p>'))


def _widget(knob: Knob) -> Any:
    import ipywidgets as w

    if knob.bounds and knob.optional:
        names = [stop if isinstance(stop, str) else f"{stop:.6g}" for stop in knob.stops]
        made = w.SelectionSlider(options=list(zip(names, knob.stops, strict=True)), value=knob.held)
    else:
        given = knob.value if isinstance(knob.value, bool) else list(knob.choices) or knob.bounds or knob.held
        made = w.interactive.widget_from_abbrev(given, knob.held)
    made.description, made.style.description_width, made.layout.width = knob.label, "140px", "400px"
    if isinstance(made, w.Text):
        made.continuous_update = False
    elif isinstance(made, w.FloatSlider):
        made.readout_format = ".3g"
    return made


def panel(
    config: Any,
    draw: Callable[[Any], Any],
    names: str | Sequence[str] | Mapping[str, tuple],
    *,
    title: str = "",
    static: bool = False,
    variable: str = "config",
) -> Panel:
    """Controls for settings of a config dataclass; ``draw(config)`` gives HTML or a figure.

    Labels, bounds, units, choices and help come from the fields. The given config is changed in place, so that
    later cells use what was chosen.

    Args:
        config: a ``Config``, whose names are ``section.name``, or one of its sections.
        names: which settings; a mapping narrows the bounds: ``{"training.lr": (1e-5, 1e-3, 1e-5)}``.
        variable: what the config is called in the cell, for the line that says what to edit.
    """
    narrowed = names if isinstance(names, Mapping) else dict.fromkeys([names] if isinstance(names, str) else names)
    knobs = {name: _knob(config, name, bounds) for name, bounds in narrowed.items()}
    for name, knob in knobs.items():
        knob.edit = f"{variable}.{name} = {knob.value!r}"

    def draw_config(values: dict[str, Any]) -> Any:
        for name, value in values.items():
            section, item = _field(config, name)
            setattr(section, item.name, value)
        return draw(config)

    return Panel(knobs, draw_config, title=title, static=static)


def _field(config: Any, name: str) -> tuple[Any, Any]:
    *sections, last = name.split(".")
    for section in sections:
        config = getattr(config, section, None)
    found = [item for item in fields(config) if item.name == last] if is_dataclass(config) else []
    if not found or "help" not in found[0].metadata:
        raise ConfigError(f"{name!r} is not a setting of the config; name them as in 'training.gamma'")
    return config, found[0]


def _knob(config: Any, name: str, bounds: tuple | None) -> Knob:
    section, item = _field(config, name)
    kind, optional = value_type(section, item.name)
    low, high, help = (item.metadata[key] for key in ("min", "max", "help"))
    if kind is dict:
        raise ConfigError(f"{name} is a mapping; a panel has no control for it")
    if bounds is not None:
        inside = _is_range(bounds) and (low is None or low <= bounds[0] and bounds[1] <= high)
        if kind not in (int, float) or not inside:
            wanted = f"(low, high, step) of {allowed(section, item)}"
            raise ConfigError(f"{name}: the bounds {bounds!r:.60} are not {wanted}")
        bounds = tuple(kind(x) for x in bounds)
    elif low is not None and high - low <= WIDEST[kind]:
        bounds = (kind(low), kind(high), 1 if kind is int else (high - low) / 100)
    elif low is not None:  # what is allowed at all is no range to slide over
        help = f"{help} ({allowed(section, item)})"
    choices = (True, False) if kind is bool else tuple(item.metadata["choices"])
    choices += (None,) if choices and optional else ()
    made = Knob(item.name.replace("_", " "), None, bounds, choices, optional, item.metadata["unit"], help)
    made.read = lambda value: checked(section, item, value, name)
    try:
        made.value = made.accepted(getattr(section, item.name))
    except ValueError as error:
        raise ConfigError(f"{name} does not fit its control: {error}") from None
    return made


def _is_range(given: Any) -> bool:
    """Whether it is (low, high, step, …) of finite numbers."""
    numbers = isinstance(given, (tuple, list)) and all(isinstance(x, Real) and abs(x) < math.inf for x in given)
    return numbers and len(given) > 2 and given[0] < given[1] and given[2] > 0


def sliders(draw: Callable[..., Any], *, title: str = "", static: bool = False, **knobs: Any) -> Panel:
    """Controls for free values; ``draw(**values)`` gives HTML or a figure.

    A knob is ``(min, max, step, value)``, a list of choices (the first is taken), or True or False.
    """
    made = {}
    for name, given in knobs.items():
        if isinstance(given, bool):
            value, bounds, choices = given, None, (True, False)
        elif isinstance(given, list) and given and all(isinstance(x, (str, int, float)) for x in given):
            value, bounds, choices = given[0], None, tuple(given)
        elif isinstance(given, tuple) and len(given) == 4 and _is_range(given) and given[0] <= given[3] <= given[1]:
            whole = all(isinstance(x, Integral) for x in given)
            value, bounds, choices = given[3], given[:3] if whole else tuple(map(float, given[:3])), ()
        else:
            raise ValueError(
                f"sliders: {name}={given!r:.80} is not (min, max, step, value), a list of choices, True or False"
            )
        made[name] = Knob(name.replace("_", " "), value, bounds, choices, edit=f"{name}={given!r}")
    return Panel(made, lambda values: draw(**values), title=title, static=static)
