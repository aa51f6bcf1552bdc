"""What a setting may be, and how YAML is read: the machinery under ``config.py``.

YAML is read as YAML 1.2 reads scalars: ``3e-5`` is a number and ``010`` is ten
(PyYAML alone gives the text "3e-5" and the number 8), and a key written twice
is an error instead of a silent loss.
"""

from __future__ import annotations

import functools
import math
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import Field, field
from pathlib import Path
from typing import Any

import yaml


class ConfigError(ValueError):
    """A setting is wrong: one sentence with its place, its value and what is allowed."""


class Above(float):
    """A lower bound that is itself not allowed."""


class Names(Sequence[str]):
    """Choices that a registry holds: ``shown`` ones first, then what was registered besides, read whenever asked.

    Args:
        registered: the names of the registry; imported when a name is not among ``shown``.
        resolve: any name that the registry knows, an alias included → the one of these that means the same.
    """

    def __init__(
        self,
        shown: Sequence[str],
        registered: Callable[[], Sequence[str]],
        resolve: Callable[[str], str | None] = lambda name: None,
    ) -> None:
        self.shown, self.registered, self.resolve = tuple(shown), registered, resolve

    def __iter__(self) -> Iterator[str]:
        yield from self.shown
        known = {fold(name) for name in self.shown}
        yield from (name for name in self.registered() if fold(name) not in known)

    def __getitem__(self, place: Any) -> Any:
        return tuple(iter(self))[place]

    def __len__(self) -> int:
        return len(tuple(iter(self)))  # without iter, tuple asks for the length first

    def __bool__(self) -> bool:
        return True


def knob(
    default: Any, help: str, *, min: Any = None, max: Any = None, unit: str = "", choices: Sequence[str] = ()
) -> Any:
    """A dataclass field with the metadata that panels and error messages are made from."""
    metadata = {"help": help, "min": min, "max": max, "unit": unit, "choices": choices}
    if isinstance(default, dict):
        return field(default_factory=lambda: dict(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@functools.cache
def _types(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def value_type(section: Any, name: str) -> tuple[type, bool]:
    """The type of a setting (bool, int, float, str or dict) and whether it may be none."""
    hint = _types(section if isinstance(section, type) else type(section))[name]
    if isinstance(hint, types.UnionType):
        return next(t for t in hint.__args__ if t is not type(None)), True
    return hint, False


def allowed(section: Any, item: Field) -> str:
    """What a setting accepts, in words: ``a number from 0 to 0.1``."""
    kind, optional = value_type(section, item.name)
    low, high, choices = (item.metadata[k] for k in ("min", "max", "choices"))
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "text", dict: "a mapping"}[kind]
    if choices:
        words = ("one of " if len(choices) > 1 else "") + ", ".join(choices)
    elif low is not None:
        words += f" {'above' if isinstance(low, Above) else 'from'} {low:.10g} to {high:.10g}"
    return words + (" or none" if optional else "")


def checked(section: Any, item: Field, value: Any, where: str) -> Any:
    """The value in the type of its field; ``ConfigError`` when it has another one or is out of range."""
    kind, optional = value_type(section, item.name)
    if optional and (value is None or (isinstance(value, str) and value.lower() in ("none", "null", "~"))):
        return None
    low, high, choices = (item.metadata[k] for k in ("min", "max", "choices"))
    try:
        result = _CONVERT[kind](value)
        if choices:
            return choice(choices, result)
        if low is not None and (not low <= result <= high or isinstance(low, Above) and result == low):
            raise ValueError
    except (TypeError, ValueError, OverflowError, RecursionError):
        raise ConfigError(f"{where} is {show(value)}; expected {allowed(section, item)}") from None
    return result


def choice(choices: Sequence[str], name: str) -> str:
    """The one of ``choices`` that ``name`` means, whatever its case and punctuation; ``ValueError`` for none."""
    found = next((one for one in choices if fold(one) == fold(name)), None)
    found = choices.resolve(name) if found is None and isinstance(choices, Names) else found
    return _wrong() if found is None else found


def _bool(value: Any) -> bool:
    words = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
    if isinstance(value, bool):
        return value
    return words[value.lower()] if isinstance(value, str) and value.lower() in words else _wrong()


def _float(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)) or not math.isfinite(float(value)):
        _wrong()
    return float(value)


def _int(value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    number = _float(value)
    return int(number) if number == int(number) else _wrong()


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip() or "\0" in value:
        _wrong()
    value.encode()  # a lone surrogate could not be saved
    return value


def _mapping(value: Any) -> dict[str, Any]:
    return {_text(key): _plain(item) for key, item in value.items()} if isinstance(value, Mapping) else _wrong()


def _plain(value: Any) -> Any:
    """A value that YAML gives back equal."""
    if isinstance(value, Mapping):
        return _mapping(value)
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, str):
        value.encode()
        return value
    return value if value is None or isinstance(value, (bool, int)) else _float(value)


def _wrong() -> typing.NoReturn:
    raise ValueError


_CONVERT = {bool: _bool, int: _int, float: _float, str: _text, dict: _mapping}


def fold(choice: str) -> str:
    """``Dr. GRPO``, ``dr_grpo`` and ``DR-GRPO`` name one choice; so do ``REINFORCE++`` and ``reinforce_pp``."""
    return re.sub(r"[\W_]", "", choice.casefold().replace("+", "p")).replace("plusplus", "pp")


def show(value: Any) -> str:
    """A value as it stands in an error message."""
    if value is None or isinstance(value, bool):
        return "empty" if value is None else str(value).lower()
    try:
        text = repr(value)
    except RecursionError:
        text = "nested too deeply"
    return text if len(text) <= 80 else text[:77] + "..."


class _Loader(yaml.SafeLoader):
    """YAML 1.2 numbers; no dates, octal numbers, base 60 or aliases."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()
            raise yaml.MarkedYAMLError(None, None, "aliases are not used here", event.start_mark)
        return super().compose_node(parent, index)


class _Dumper(yaml.SafeDumper):
    """Quotes what ``_Loader`` would not read as text."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_INT, _FLOAT = "tag:yaml.org,2002:int", "tag:yaml.org,2002:float"
_KEPT = ("tag:yaml.org,2002:bool", "tag:yaml.org,2002:null")
for _class in (_Loader, _Dumper):
    _class.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in pairs if tag in _KEPT]
        for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    _class.add_implicit_resolver(_INT, re.compile(r"[-+]?[0-9]+$"), list("-+0123456789"))
    _class.add_implicit_resolver(
        _FLOAT, re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$"), list("-+.0123456789")
    )
_Loader.add_constructor(_INT, lambda loader, node: int(loader.construct_scalar(node)))
_Loader.add_constructor(_FLOAT, lambda loader, node: float(loader.construct_scalar(node)))


def dump_yaml(data: Mapping[str, Any]) -> str:
    """YAML that ``read_yaml`` gives back equal."""
    text = yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
    if re.search("[\x85\u2028\u2029\ufeff]", text):  # PyYAML leaves these bare and reads them as line breaks
        text = yaml.dump(data, Dumper=_Dumper, sort_keys=False, width=120)
    return text


def parse_scalar(text: str) -> Any:
    """The value of an override, read as YAML where that works."""
    try:
        return yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, RecursionError, ValueError, LookupError, TypeError, AttributeError):
        return text


def read_yaml(path: Path, source: str) -> tuple[Any, dict[tuple, int]]:
    """What a file holds, and the line of every key by its path, ``("training", "lr")``."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{source}: cannot be read ({error.strerror}); expected a YAML file") from None
    except ValueError:
        raise ConfigError(f"{source}: not text in UTF-8; expected a YAML file") from None
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        lines = _key_lines(node, source)
        data = loader.construct_document(node) if node else None
    except yaml.YAMLError as error:
        raise ConfigError(_yaml_message(error, source, text)) from None
    except ConfigError:
        raise
    except (RecursionError, ValueError, LookupError, TypeError, AttributeError):  # depth, or a tag such as !!int x
        raise ConfigError(f"{source}: holds a value that cannot be read; expected plain settings") from None
    return data, lines


def _key_lines(node: yaml.Node | None, source: str, path: tuple = ()) -> dict[tuple, int]:
    """Line of every key; one written twice in a mapping is an error, since YAML would drop the first."""
    lines: dict[tuple, int] = {}
    for pair in node.value if isinstance(node, (yaml.MappingNode, yaml.SequenceNode)) else ():
        if not isinstance(pair, tuple):
            _key_lines(pair, source, path)
            continue
        place, line = (*path, str(pair[0].value)), pair[0].start_mark.line + 1
        if place in lines:
            twice = f"{'.'.join(place)} is given twice, first on line {lines[place]}; keep one"
            raise ConfigError(f"{source}, line {line}: {twice}")
        lines[place] = line
        lines.update(_key_lines(pair[1], source, place))
    return lines


def _yaml_message(error: yaml.YAMLError, source: str, text: str) -> str:
    """PyYAML's report of many lines as one sentence."""
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return f"{source}: not a text file ({getattr(error, 'reason', error)}); expected YAML"
    rows = text.splitlines()
    row = rows[mark.line] if mark.line < len(rows) else ""
    where = f"{source}, line {mark.line + 1}"
    if "\\t" in (error.problem or ""):
        return f"{where}: a tab stands where YAML allows only spaces in {show(row)}; use spaces"
    return f"{where}: not valid YAML in {show(row.strip())} ({error.problem}); expected key: value"
