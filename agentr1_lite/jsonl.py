"""Rows of JSON in and out: a reader that names what is broken, writers that leave nothing half-written."""

from __future__ import annotations

import json
import os
import re
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

Row = dict[str, Any]


class DataError(ValueError):
    """Data that cannot be used; the message is one sentence: what, where, what to do."""


@dataclass(frozen=True)
class Problem:
    """One row that broke a rule; ``kept`` says whether it is used all the same."""

    file: str
    line: int
    reason: str
    kept: bool = False

    def __str__(self) -> str:
        return f"{self.file}, line {self.line}: {self.reason}"


# Longest first: the UTF-32 mark begins with the UTF-16 one
WIDE_STARTS = (
    (b"\xff\xfe\x00\x00", "UTF-32"),
    (b"\x00\x00\xfe\xff", "UTF-32"),
    (b"\xff\xfe", "UTF-16"),
    (b"\xfe\xff", "UTF-16"),
    (b"{\x00", "UTF-16"),
    (b"[\x00", "UTF-16"),
    (b"\x00{", "UTF-16"),
    (b"\x00[", "UTF-16"),
)


def decode(data: bytes, name: str) -> str:
    """UTF-8 text, a byte order mark dropped; any other encoding is an error naming the byte offset."""
    for start, encoding in WIDE_STARTS:
        if data.startswith(start):
            raise DataError(f"{name}, byte offset 0: the file is {encoding}, not UTF-8; save it again as UTF-8")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        # utf-8-sig counts from behind the byte order mark
        offset = error.start + (3 if data.startswith(b"\xef\xbb\xbf") else 0)
        line = data.count(b"\n", 0, offset) + 1
        raise DataError(
            f"{name}, line {line}, byte offset {offset}: byte 0x{data[offset]:02x} is not UTF-8 "
            "(Latin-1 or Windows-1252?); save the file again as UTF-8"
        ) from error


def read_text(path: str | Path) -> str:
    """The text of a UTF-8 file; raises :class:`DataError` naming the file."""
    try:
        return decode(Path(path).read_bytes(), str(path))
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); check the path") from error


def _not_json(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


SPACE = re.compile(r"[ \t\r\n]*")
DECODER = json.JSONDecoder(parse_constant=_not_json)


def parse_row(text: str) -> Row:
    """One JSON object; raises ``ValueError`` whose message is the reason."""
    if "\x00" in text:
        raise ValueError("holds a NUL byte")
    try:
        row, end = DECODER.raw_decode(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON (column {error.colno}: {error.msg})") from error
    except RecursionError as error:
        raise ValueError("is nested too deeply") from error
    if text[end:].strip():
        more = "a second value" if text[end:].lstrip(" \t,")[:1] in ("{", "[") else "other text"
        raise ValueError(f"holds {more} after the first one ends at column {end}")
    return check_row(row, text)


def check_row(row: Any, text: str) -> Row:
    """The value if it is an object whose strings can be written as UTF-8."""
    if not isinstance(row, dict):
        raise ValueError(f"is a JSON {type(row).__name__}, not an object")
    if "\\ud" in text.lower():
        try:
            json.dumps(row, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError("holds half of a surrogate pair") from error
    return row


def _lines(text: str, name: str) -> Iterator[tuple[int, Row | Problem]]:
    """Rows of a JSON Lines text with their line numbers, a Problem where there is no row."""
    # str.splitlines would also cut at U+2028 and U+0085, which JSON strings may hold
    lines = text.replace("\r\n", "\n").split("\n") if "\n" in text else text.split("\r")
    for number, line in enumerate(lines, 1):
        line = line.strip(" \t\r")
        if not line:
            continue
        try:
            yield number, parse_row(line)
        except ValueError as error:
            reason = str(error)
            if number == len(lines) and reason.startswith("is not JSON") and line[0] == "{" and line[-1] != "}":
                reason = "is cut off: the file ends inside this row"
            yield number, Problem(name, number, reason)


def _array(text: str, name: str) -> Iterator[tuple[int, Row | Problem]]:
    """Rows of a JSON array with the lines they start on; rows before a fault are kept."""
    position, counted, line, count = text.index("[") + 1, 0, 1, 0
    while True:
        position = SPACE.match(text, position).end()
        line, counted = line + text.count("\n", counted, position), position
        if text[position : position + 1] == "]":
            if text[position + 1 :].strip():
                yield line, Problem(name, line, "text follows the end of the array")
            return
        count += 1
        try:
            value, end = DECODER.raw_decode(text, position)
        except (ValueError, RecursionError) as error:
            reason = f"element {count} of the array is broken or cut off ({getattr(error, 'msg', error)})"
            yield line, Problem(name, line, f"{reason}; the rest is not read")
            return
        try:
            yield line, check_row(value, text[position:end])
        except ValueError as error:
            yield line, Problem(name, line, f"element {count} of the array {error}")
        position = SPACE.match(text, end).end()
        if text[position : position + 1] == ",":
            position += 1
        elif text[position : position + 1] != "]":
            yield line, Problem(name, line, f"no comma or ] after element {count} of the array; the rest is not read")
            return


def read_numbered(path: str | Path) -> tuple[list[tuple[int, Row]], list[Problem]]:
    """Good rows of a JSON Lines file or a JSON array, each with its line number, and the problems."""
    text = read_text(path)
    read = _array if text.lstrip()[:1] == "[" else _lines
    found = list(read(text, str(path)))
    rows = [(line, row) for line, row in found if not isinstance(row, Problem)]
    problems = [row for _, row in found if isinstance(row, Problem)]
    if problems and not rows and read is _lines:
        try:
            return [(1, parse_row(text.strip()))], []  # one object spread over several lines
        except ValueError:
            pass
    return rows, problems


def read_rows(path: str | Path) -> tuple[list[Row], list[Problem]]:
    """Good rows and, for each other non-blank line, a :class:`Problem` with file, line and reason.

    Byte order marks, CRLF and blank lines are fine. Two objects on a line, NUL
    bytes, Python literals, NaN and a cut last line cost that line only. A file
    in another encoding raises :class:`DataError` naming the byte offset.
    """
    rows, problems = read_numbered(path)
    return [row for _, row in rows], problems


def write_text(path: str | Path, text: str) -> None:
    """Write a UTF-8 file that is either whole or, after a failure, what it was before."""
    write_chunks(path, (text,))


def write_rows(path: str | Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write one JSON object a line, whole or not at all."""

    def lines() -> Iterator[str]:
        for number, row in enumerate(rows, 1):
            try:
                yield json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n"
            except (TypeError, ValueError, RecursionError) as error:
                raise DataError(
                    f"{path}: row {number} cannot be written as JSON ({error}); nothing was written"
                ) from error

    write_chunks(path, lines())


def write_chunks(path: str | Path, chunks: Iterable[str]) -> None:
    """Write text to a file beside ``path`` and move it there once it is safely on disk."""
    path = Path(path)
    part = path.with_name(f".{uuid.uuid4().hex}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("x", encoding="utf-8", newline="\n") as file:
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except UnicodeEncodeError as error:
        raise DataError(f"{path}: the text holds half of a surrogate pair; nothing was written") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be written ({error.strerror}); check the folder and the free space") from error
    finally:
        if part.exists():
            part.unlink()
