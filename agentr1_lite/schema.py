"""The part of JSON schema that tools need: checking arguments, and schemas from type hints.

Checked: ``type`` (one or several), ``properties``, ``required``,
``additionalProperties``, ``enum``, ``const``, ``items``, bounds of numbers,
lengths of texts and lists, ``pattern``, ``anyOf``. ``$ref`` within the schema
and an ``allOf`` of one are put in place when the tool is made; ``description``
and other notes are for the model to read. Whatever would go unchecked, such as
``oneOf`` or a reference to itself, is refused then.

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
import operator
import re
import types
import typing
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any
from urllib.parse import unquote

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
_BOUNDS: dict[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "minimum": ("at least", operator.ge),
    "exclusiveMinimum": ("above", operator.gt),
    "maximum": ("at most", operator.le),
    "exclusiveMaximum": ("below", operator.lt),
}
_SIZES = {"minLength", "maxLength", "minItems", "maxItems"}
_CHECKED = {"type", "properties", "required", "additionalProperties", "enum", "items", "pattern", "anyOf"}
_CHECKED |= {*_BOUNDS, *_SIZES}
_NOTES = {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "format"}
_NOTES |= {"$schema", "$id", "$comment", "$defs", "definitions"}


class SchemaError(TypeError, ValueError):
    """A tool's schema holds what would not be checked; raised when the tool is made."""


def read_schema(schema: Any, label: str) -> dict[str, Any]:
    """A tool's JSON schema with all references put in place; ``SchemaError`` where a part would go unchecked."""
    read = _read(schema, schema, f"tool {label!r}: the schema of its arguments", ())
    if _kinds(read) not in ([], ["object"]):
        raise SchemaError(f"tool {label!r}: the schema of its arguments has type {shown(read['type'])}; give an object")
    return read


def _read(schema: Any, root: Any, where: str, entered: tuple[str, ...]) -> dict[str, Any]:
    if not isinstance(schema, Mapping):
        raise SchemaError(f"{where} is {shown(schema)}; give an object such as {{'type': 'string'}}")
    schema = dict(schema)
    if isinstance(schema.get("allOf"), list) and len(schema["allOf"]) == 1:
        (only,) = schema.pop("allOf")
        schema = _merged(_read(only, root, where, entered), schema, where)
    if "$ref" in schema:
        ref = schema.pop("$ref")
        if ref in entered:
            raise SchemaError(f"{where} refers to itself by {ref!r}, which is not checked here; bound its depth")
        schema = _merged(_read(_target(root, ref, where), root, where, (*entered, ref)), schema, where)
    if "const" in schema:
        schema["enum"] = [schema.pop("const")]
    for key in schema:
        if key not in _CHECKED and key not in _NOTES and not key.startswith("x-"):
            known = ", ".join(sorted(_CHECKED))
            raise SchemaError(f"{where} uses {key!r}, which is not checked here; write it with {known}")
    _check_keywords(schema, where)
    for key in ("$defs", "definitions"):
        schema.pop(key, None)
    if "properties" in schema:
        parts = schema["properties"].items()
        schema["properties"] = {n: _read(s, root, f"{where}, {shown(n)}", entered) for n, s in parts}
    for key in ("items", "additionalProperties"):
        if key in schema and not isinstance(schema[key], bool):
            schema[key] = _read(schema[key], root, f"{where}, {key}", entered)
    if "anyOf" in schema:
        schema["anyOf"] = [_read(form, root, f"{where}, anyOf", entered) for form in schema["anyOf"]]
    return schema


def _merged(target: dict[str, Any], beside: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A referred schema with the notes that stand beside the reference."""
    if other := [key for key in beside if key not in _NOTES]:
        raise SchemaError(f"{where} has {other[0]!r} beside a reference, which is not checked here; put it behind that")
    return {**target, **beside}


def _target(root: Any, ref: Any, where: str) -> Any:
    found = root
    try:
        if ref != "#" and not ref.startswith("#/"):
            raise KeyError(ref)
        for step in ref.split("/")[1:]:
            found = found[int(step) if isinstance(found, list) else unquote(step).replace("~1", "/").replace("~0", "~")]
    except (KeyError, IndexError, TypeError, ValueError, AttributeError):
        raise SchemaError(f"{where} refers to {shown(ref)}, which it does not hold; define it under $defs") from None
    return found


def _check_keywords(schema: Mapping[str, Any], where: str) -> None:
    """Whether the keywords hold what they are to be checked with."""
    lists, names = (list, tuple), ", ".join(_PYTHON)
    wanted: dict[str, tuple[str, Callable[[Any], Any]]] = {
        "type": (f"one or several of {names}", lambda x: x and all(kind in tuple(_PYTHON) for kind in _kinds(schema))),
        "properties": ("an object", lambda x: isinstance(x, Mapping)),
        "required": ("a list of names", lambda x: isinstance(x, lists) and all(isinstance(name, str) for name in x)),
        "enum": ("a list", lambda x: isinstance(x, lists)),
        "anyOf": ("a list of schemas", lambda x: isinstance(x, lists) and x),
        "items": ("one schema", lambda x: isinstance(x, Mapping)),
        "pattern": ("a regular expression", _is_pattern),
        **{key: ("a number", lambda x: _is(x, "number")) for key in (*_BOUNDS, *_SIZES)},
    }
    for key, (words, fits) in wanted.items():
        if key in schema and not fits(schema[key]):
            raise SchemaError(f"{where} has {key} {shown(schema[key])}; give {words}")


def _is_pattern(text: Any) -> bool:
    try:
        return bool(re.compile(text))
    except (re.error, TypeError):
        return False


class SchemaMismatch(ValueError):
    """One clause: which argument is wrong and what is wanted."""


def check_object(value: Any, schema: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return ``value`` with the documented coercions, or raise :class:`SchemaMismatch`."""
    if not isinstance(value, Mapping):
        raise SchemaMismatch(f"{where or 'the arguments'} must be an object, not {shown(value)}")
    value = _any_form(value, schema, where or "the arguments")
    known, required = schema.get("properties") or {}, schema.get("required") or ()
    others = schema.get("additionalProperties", True)
    prefix = f"{where}." if where else "argument "
    for name in required:
        if name not in value:
            raise SchemaMismatch(f"{prefix}{shown(name)} is missing")
    clean = {}
    for name, item in value.items():
        if name not in known:
            if others is False:
                allowed = ", ".join(known) or "none"
                raise SchemaMismatch(f"{prefix}{shown(name)} is unknown; allowed: {allowed}")
            clean[name] = _check(item, others, f"{prefix}{shown(name)}") if isinstance(others, Mapping) else item
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
    return list(kinds) if isinstance(kinds, (list, tuple)) else [kinds]


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


def _any_form(value: Any, schema: Mapping[str, Any], where: str) -> Any:
    """``value`` as the first form of ``anyOf`` that takes it as it is, else the first that takes it at all."""
    found = []
    for form in schema.get("anyOf", ()):
        try:
            found.append(_check(value, form, where))
        except SchemaMismatch:
            continue
    if "anyOf" in schema and not found:
        raise SchemaMismatch(f"{where} has no allowed form: {shown(value)}")
    return next((x for x in found if x == value and type(x) is type(value)), found[0]) if found else value


def _check(value: Any, schema: Mapping[str, Any], where: str) -> Any:
    kinds = _kinds(schema)
    is_object = isinstance(value, Mapping) and schema.keys() & {"properties", "required", "additionalProperties"}
    if not is_object:
        value = _any_form(value, schema, where)
    if kinds and not any(_is(value, kind) for kind in kinds):
        value = _coerce(value, kinds)
        if not any(_is(value, kind) for kind in kinds):
            wanted = " or ".join(_ARTICLE.get(kind, f"a {kind}") for kind in kinds)
            raise SchemaMismatch(f"{where} must be {wanted}, not {shown(value)}")
    if not any(x == value and isinstance(x, bool) is isinstance(value, bool) for x in schema.get("enum", [value])):
        raise SchemaMismatch(f"{where} must be one of {', '.join(map(shown, schema['enum']))}, not {shown(value)}")
    _check_bounds(value, schema, where)
    if isinstance(value, list) and "items" in schema:
        return [_check(item, schema["items"], f"{where}[{i}]") for i, item in enumerate(value)]
    return check_object(value, schema, where) if is_object else value


def _check_bounds(value: Any, schema: Mapping[str, Any], where: str) -> None:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        bounds = [(words, fits, schema[key]) for key, (words, fits) in _BOUNDS.items() if key in schema]
        if not all(fits(value, bound) for _, fits, bound in bounds):
            said = " and ".join(f"{words} {bound}" for words, _, bound in bounds)
            raise SchemaMismatch(f"{where} must be {said}, not {shown(value)}")
    for kind, noun, unit in ((str, "Length", "characters"), (list, "Items", "items")):
        low, high = schema.get(f"min{noun}", 0), schema.get(f"max{noun}", "any number of")
        if isinstance(value, kind) and not low <= len(value) <= schema.get(f"max{noun}", math.inf):
            raise SchemaMismatch(f"{where} must have {low} to {high} {unit}, not {len(value)}")
    if isinstance(value, str) and "pattern" in schema and not re.search(schema["pattern"], value):
        raise SchemaMismatch(f"{where} must match the pattern {schema['pattern']}, not {shown(value)}")


def parameters_of(function: Callable[..., Any], label: str) -> tuple[str, dict[str, Any]]:
    """``(description, JSON schema)`` from a function's docstring and type hints."""
    inner = function
    while isinstance(inner, partial):
        inner = inner.func
    inner = inner if inspect.isroutine(inner) or inspect.isclass(inner) else inner.__call__
    summary, notes = _read_docstring(inspect.getdoc(inner) or "")
    hints = typing.get_type_hints(inner)
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
    if origin is typing.Literal and all(type(x) in _HINTS for x in inner):
        kinds = list(dict.fromkeys(_HINTS[type(x)] for x in inner))
        return {"type": kinds[0] if len(kinds) == 1 else kinds, "enum": list(inner)}
    if origin in (list, dict) and inner:
        part = _schema_of(inner[-1], where)
        return {"type": "array", "items": part} if origin is list else {"type": "object", "additionalProperties": part}
    if origin in (list, dict):
        return {"type": _HINTS[origin]}
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
