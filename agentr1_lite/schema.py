"""The part of JSON schema that tools need: checking arguments, and schemas from type hints.

Read: ``type`` (one or several), ``properties``, ``required``,
``additionalProperties: false``, ``enum``, ``items``, ``minimum``, ``maximum``,
``minLength``, ``maxLength``, ``anyOf``. Everything else in a schema is for the
model to read and not checked.

Coercions, the only ones, each from what small models write:

- a number where text is wanted: ``1994`` → ``"1994"`` (never a boolean);
- digits as text where a number is wanted: ``"3"`` → ``3``; ``3.0`` → ``3``;
- ``"true"`` / ``"false"`` where a boolean is wanted;
- ``null`` for an optional argument that may not be null: the argument is left out.

A required string must hold a visible character unless its schema says
``"minLength": 0``.
"""

from __future__ import annotations

import inspect
import json
import math
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

_PYTHON = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "array": list,
    "object": Mapping,
    "null": type(None),
}
_ARTICLE = {"integer": "an integer", "array": "a list", "object": "an object", "null": "null"}
_HINTS = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}
_HINTS |= {type(None): "null"}
_INTEGER = re.compile(r"[+-]?\d{1,18}")


class SchemaMismatch(ValueError):
    """One clause: which argument is wrong and what is wanted."""


def check_object(value: Any, schema: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return ``value`` with the documented coercions, or raise :class:`SchemaMismatch`."""
    if not isinstance(value, Mapping):
        raise SchemaMismatch(f"{where or 'the arguments'} must be an object, not {shown(value)}")
    known, required = schema.get("properties") or {}, schema.get("required") or ()
    prefix = f"{where}." if where else "argument "
    for name in required:
        if name not in value:
            raise SchemaMismatch(f"{prefix}{shown(name)} is missing")
    clean = {}
    for name, item in value.items():
        if name not in known:
            if schema.get("additionalProperties", True) is False:
                allowed = ", ".join(known) or "none"
                raise SchemaMismatch(f"{prefix}{shown(name)} is unknown; allowed: {allowed}")
            clean[name] = item
            continue
        if item is None and name not in required and not _may_be_null(known[name]):
            continue
        clean[name] = _check(item, known[name], f"{prefix}{shown(name)}")
        blank = isinstance(clean[name], str) and not clean[name].strip()
        if blank and name in required and known[name].get("minLength") != 0:
            raise SchemaMismatch(f"{prefix}{shown(name)} must not be empty")
    return clean


def shown(value: Any) -> str:
    """A value as one short line of JSON, safe to put into a message."""
    try:
        text = " ".join(json.dumps(value, ensure_ascii=False, default=str).split())
    except (TypeError, ValueError, RecursionError):
        text = type(value).__name__
    return text if len(text) <= 60 else text[:57] + "..."


def _kinds(schema: Mapping[str, Any]) -> list[str]:
    kinds = schema.get("type", [])
    return [kinds] if isinstance(kinds, str) else list(kinds)


def _may_be_null(schema: Mapping[str, Any]) -> bool:
    kinds = _kinds(schema)
    return "null" in kinds or (not kinds and not schema.get("anyOf")) or any(map(_may_be_null, schema.get("anyOf", ())))


def _is(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    if isinstance(value, float) and not math.isfinite(value):
        return False
    return isinstance(value, _PYTHON.get(kind, object))


def _coerce(value: Any, kinds: list[str]) -> Any:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if number and isinstance(value, float) and not math.isfinite(value):
        return value
    if "integer" in kinds and isinstance(value, float) and value.is_integer():
        return int(value)
    if "string" in kinds and number:
        return str(value)
    if isinstance(value, str):
        text = value.strip()
        if "boolean" in kinds and text.lower() in ("true", "false"):
            return text.lower() == "true"
        if ("integer" in kinds or "number" in kinds) and _INTEGER.fullmatch(text):
            return int(text)
        if "number" in kinds:
            try:
                return float(text)
            except ValueError:
                return value
    return value


def _check(value: Any, schema: Mapping[str, Any], where: str) -> Any:
    forms = schema.get("anyOf")
    if forms:
        for form in forms:
            try:
                return _check(value, form, where)
            except SchemaMismatch:
                continue
        raise SchemaMismatch(f"{where} has no allowed form: {shown(value)}")
    kinds = _kinds(schema)
    if kinds and not any(_is(value, kind) for kind in kinds):
        value = _coerce(value, kinds)
        if not any(_is(value, kind) for kind in kinds):
            wanted = " or ".join(_ARTICLE.get(kind, f"a {kind}") for kind in kinds)
            raise SchemaMismatch(f"{where} must be {wanted}, not {shown(value)}")
    if "enum" in schema and value not in schema["enum"]:
        raise SchemaMismatch(f"{where} must be one of {', '.join(map(shown, schema['enum']))}, not {shown(value)}")
    _check_bounds(value, schema, where)
    if isinstance(value, list) and "items" in schema:
        return [_check(item, schema["items"], f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, Mapping) and "properties" in schema:
        return check_object(value, schema, where)
    return value


def _check_bounds(value: Any, schema: Mapping[str, Any], where: str) -> None:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if value < schema.get("minimum", -math.inf) or value > schema.get("maximum", math.inf):
            bounds = " and ".join(
                f"at {w} {schema[k]}" for k, w in (("minimum", "least"), ("maximum", "most")) if k in schema
            )
            raise SchemaMismatch(f"{where} must be {bounds}, not {shown(value)}")
    if isinstance(value, str):
        if not schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", math.inf):
            low, high = schema.get("minLength", 0), schema.get("maxLength", "any number of")
            raise SchemaMismatch(f"{where} must have {low} to {high} characters, not {len(value)}")


def parameters_of(function: Callable[..., Any], label: str) -> tuple[str, dict[str, Any]]:
    """``(description, JSON schema)`` from a function's docstring and type hints."""
    summary, notes = _read_docstring(inspect.getdoc(function) or "")
    hints = typing.get_type_hints(function)
    properties, required = {}, []
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise TypeError(f"tool {label!r}: parameter {name!r} must be an ordinary named parameter")
        if name not in hints:
            raise TypeError(f"tool {label!r}: parameter {name!r} needs a type hint, for example {name}: str")
        properties[name] = _schema_of(hints[name], f"tool {label!r}: parameter {name!r}")
        if name in notes:
            properties[name]["description"] = notes[name]
        if parameter.default is parameter.empty:
            required.append(name)
    schema = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return summary, schema


def _schema_of(hint: Any, where: str) -> dict[str, Any]:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return {}
    if hint in _HINTS:
        return {"type": _HINTS[hint]}
    if origin is typing.Annotated:
        return _schema_of(inner[0], where)
    if origin is typing.Literal:
        kinds = list(dict.fromkeys(_HINTS[type(x)] for x in inner))
        return {"type": kinds[0] if len(kinds) == 1 else kinds, "enum": list(inner)}
    if origin is list:
        return {"type": "array", "items": _schema_of(inner[0], where)}
    if origin is dict:
        return {"type": "object"}
    if origin in (typing.Union, types.UnionType):
        forms = [_schema_of(x, where) for x in inner]
        plain = all(set(form) == {"type"} for form in forms)
        return {"type": [form["type"] for form in forms]} if plain else {"anyOf": forms}
    raise TypeError(f"{where} has the type {hint}; use str, int, float, bool, list, dict, Literal or a union of them")


def _read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """First paragraph and the ``name: text`` lines of the ``Args:`` section (Google style)."""
    summary = " ".join(re.split(r"\n\s*\n|\n\s*Args:", text, maxsplit=1)[0].split())
    section = re.search(r"^[ \t]*Args:[ \t]*\n((?:[ \t]+.*(?:\n|$)|\s*\n)*)", text, re.MULTILINE)
    notes: dict[str, str] = {}
    name, base = "", 0
    for line in section.group(1).splitlines() if section else ():
        start = re.match(r"\s+\*{0,2}(\w+)(?:\s*\([^)]*\))?:\s*(.*)", line)
        indent = len(line) - len(line.lstrip())
        if start and (not notes or indent <= base):
            name, base = start.group(1), indent
            notes[name] = start.group(2).strip()
        elif name and line.strip():
            notes[name] += " " + line.strip()
    return summary, notes
