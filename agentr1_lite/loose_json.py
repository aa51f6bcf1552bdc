"""JSON as small models write it: decoded where it is whole, repaired where that needs no guess.

``decode`` reads strict JSON first. The repair translates Python literals
(``'…'``, ``True``, ``None``), trailing commas and raw newlines in strings into
JSON; text that never closes its brackets or quotes is never completed. Every
function is linear in the length of the text.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any

from agentr1_lite.tools import clean_text

MAX_DEPTH = 32
MAX_BITS = 1024  # of an integer: Python refuses to print much longer ones


class BadValue(ValueError):
    """What is wrong with a value, as a ``reason`` to count and a clause for the model."""

    def __init__(self, reason: str, message: str):
        super().__init__(message)
        self.reason = reason


class _Repeated(dict):
    """A JSON object in which a key stood twice; the last one counts."""


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    return found if len(found) == len(pairs) else _Repeated(found)


_DECODER = json.JSONDecoder(object_pairs_hook=_pairs)
_LOOSE_DECODER = json.JSONDecoder(object_pairs_hook=_pairs, strict=False)
_SPACE = re.compile(r"\s*")
_BETWEEN = re.compile(r"[\s,;]*")


def decode_all(
    text: str, repair: bool, stop: Callable[[int], int]
) -> tuple[list[tuple[Any, int, int, bool]], int, BadValue | None]:
    """``([(value, start, end, repaired), …], end, error)``: the value ``text`` begins with and, with ``repair``, the
    objects behind it, up to the first that cannot be read; ``stop(place)`` bounds a repair that begins at ``place``.
    """
    values, end = [], 0
    while True:
        start = end
        try:
            value, end, repaired = decode(text, repair, stop(start), start)
        except BadValue as error:
            return values, start, error
        values.append((value, start, end, repaired))
        following = _BETWEEN.match(text, end).end()
        if not repair or not text.startswith("{", following):
            return values, end, None
        end = following


def decode(text: str, repair: bool, stop: int | None = None, start: int = 0) -> tuple[Any, int, bool]:
    """``(value, end, repaired)`` of the value at ``start``; a repair reads no further than ``stop``.

    ``text`` should hold little else: an error costs a look at all of it.
    """
    start = _SPACE.match(text, start).end()
    try:
        return *_DECODER.raw_decode(text, start), False
    except json.JSONDecodeError as error:
        where = f"{error.msg.removesuffix(' at')} at character {error.pos - start + 1}"
    except (ValueError, RecursionError):
        where = "a number is too long or the nesting too deep"
    found = _as_json(text, start, len(text) if stop is None else stop) if repair else None
    if found:
        try:
            return _LOOSE_DECODER.decode(found[0]), found[1], True
        except (ValueError, RecursionError):
            pass
    raise BadValue("malformed_json", f"not valid JSON: {where}")


_TOKEN = re.compile(
    r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|[{}\[\]'\",]|\b(?:True|False|None)\b|\s+|[^'\"{}\[\],\sTFN]+|.",
    re.DOTALL,
)
_WORDS = {"True": "true", "False": "false", "None": "null"}
_ESCAPE = re.compile(r"\\x([0-9a-fA-F]{2})|\\u[0-9a-fA-F]{4}|\\(.)|\"", re.DOTALL)


def _as_json(text: str, start: int, stop: int) -> tuple[str, int] | None:
    """The object or list at ``start``, written with Python literals, as ``(JSON, end)``; None if it never closes."""
    depth, out, comma = 0, [], False
    for match in _TOKEN.finditer(text, start, stop):
        token = match.group()
        if token in ("'", '"') or not (out or token in "{["):
            return None
        if token[0] in "'\"":
            token = f'"{_ESCAPE.sub(_escape, token[1:-1])}"'
        if comma and not token.isspace():
            out += [] if token in ("}", "]") else [","]
            comma = False
        if token == ",":
            comma = True
            continue
        depth += (token in ("{", "[")) - (token in ("}", "]"))
        out.append(_WORDS.get(token, token))
        if not depth:
            return "".join(out), match.end()
    return None


def _escape(match: re.Match[str]) -> str:
    """One escape of a Python string as JSON writes it."""
    hexadecimal, plain = match.groups()
    if hexadecimal:
        return f"\\u00{hexadecimal}"
    if plain is None:
        return '\\"' if match.group() == '"' else match.group()
    if plain in "'\n":
        return plain.strip()
    return match.group() if plain in '"\\/bfnrt' else f"\\\\{plain}"


def plain(value: Any, flags: set[str], depth: int = 0) -> Any:
    """``value`` as plain data that can be saved and rendered again, or :class:`BadValue`."""
    if depth > MAX_DEPTH:
        raise BadValue("too_deep", f"nested deeper than {MAX_DEPTH} levels")
    if isinstance(value, dict):
        if isinstance(value, _Repeated):
            flags.add("duplicate_key")
        return {clean_text(key): plain(item, flags, depth + 1) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item, flags, depth + 1) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        raise BadValue("not_finite", "not valid JSON: NaN and infinite numbers do not exist there")
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise BadValue("number_too_long", "not usable: a number has more than 300 digits")
    return clean_text(value) if isinstance(value, str) else value
