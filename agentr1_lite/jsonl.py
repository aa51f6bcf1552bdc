"""Rows in and out: a reader that names what is broken, writers that leave nothing half-written.

Rows are read from JSON Lines, JSON, CSV, Parquet and Arrow, packed or not, and written as JSON Lines.
"""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import re
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

Row = dict[str, Any]


class DataError(ValueError):
    """Data that cannot be used; the message is one sentence: what, where, what to do."""


class NotJson(DataError, TypeError):
    """A row that cannot be written, because JSON has no form for it."""


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
        if b"\x00" in data[:4096]:
            raise DataError(f"{name}: is a binary file, not text; give {FORMS}") from error
        line = data.count(b"\n", 0, offset) + 1
        raise DataError(
            f"{name}, line {line}, byte offset {offset}: byte 0x{data[offset]:02x} is not UTF-8 "
            "(Latin-1 or Windows-1252?); save the file again as UTF-8"
        ) from error


def read_text(path: str | Path) -> str:
    """The text of a UTF-8 file; raises :class:`DataError` naming the file."""
    return decode(read_data(Path(path))[0], str(path))


FORMS = "JSON Lines, JSON, CSV, Parquet or Arrow, plain or packed as .gz, .bz2, .xz or .zst"
COLUMNS = (".parquet", ".arrow", ".feather")
SUFFIXES = (".json", ".jsonl", ".csv", ".tsv", *COLUMNS)
PACKED = (".gz", ".bz2", ".xz", ".zst")


def _unpack_zst(data: bytes) -> bytes:
    import pyarrow  # imported late: it is slow

    return pyarrow.CompressedInputStream(pyarrow.py_buffer(data), "zstd").read()


UNPACK: dict[bytes, Callable[[bytes], bytes]] = {
    b"\x1f\x8b": gzip.decompress,
    b"BZh": bz2.decompress,
    b"\xfd7zXZ\x00": lzma.decompress,
    b"\x28\xb5\x2f\xfd": _unpack_zst,
}
FOREIGN = {b"PK\x03\x04": "a zip archive", b"7z\xbc\xaf": "a 7z archive", b"SQLite format 3": "a database"}
TABLES = {b"PAR1": ".parquet", b"ARROW1": ".arrow", b"\xff\xff\xff\xff": ".arrow"}


def form_of(path: Path) -> str:
    """The suffix of a file's name, packed or not, in small letters."""
    return (path.with_suffix("") if path.suffix in PACKED else path).suffix.lower()


def read_data(path: Path) -> tuple[bytes, str]:
    """A file's bytes, unpacked, and the suffix of the format they are in; their first bytes count more than the name.

    Raises :class:`DataError` on a file that cannot be read, a damaged one, and an archive.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); check the path") from error
    kind = form_of(path)
    if not data and (path.suffix in PACKED or kind in COLUMNS):
        raise DataError(f"{path}: is empty; download or write it again")
    unpack = next((found for start, found in UNPACK.items() if data.startswith(start)), bytes)
    try:
        data = unpack(data)
    except (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError) as error:
        raise DataError(f"{path}: is cut off or damaged ({error}); download or pack it again") from error
    tar = data[257:262] == b"ustar" and b"\x00" in data[:257]
    if tar or any(data.startswith(start) for start in FOREIGN):
        found = next((what for start, what in FOREIGN.items() if data.startswith(start)), "a tar archive")
        raise DataError(f"{path}: is {found}, not rows; take the data file out of it: {FORMS}")
    return data, next((suffix for start, suffix in TABLES.items() if data.startswith(start)), kind)


def _table(data: bytes, kind: str, path: Path) -> list[Row]:
    """The rows of a CSV, Parquet or Arrow file; those of CSV hold text only."""
    try:
        if kind in (".csv", ".tsv"):
            import pandas as pd  # imported late, as pyarrow is: they are slow and JSON does not need them

            text, cut = io.StringIO(decode(data, str(path))), "," if kind == ".csv" else "\t"
            return pd.read_csv(text, sep=cut, dtype=str, keep_default_na=False).to_dict("records")
        import pyarrow as pa
        import pyarrow.parquet as pq

        if kind == ".parquet":
            return pq.read_table(pa.BufferReader(data)).to_pylist()
        opened = pa.ipc.open_file if data.startswith(b"ARROW1") else pa.ipc.open_stream
        return opened(data).read_all().to_pylist()
    except DataError:
        raise
    except Exception as error:  # pandas and pyarrow raise types of their own
        said = " ".join(str(error).split())[:200]
        raise DataError(f"{path}: cannot be read as {kind[1:]} ({said}); download or write it again") from error


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
    """Good rows of a data file, each with the number of its line (in a table: of the row), and the problems.

    A name with a star, such as ``train-*.parquet``, stands for all files it fits, read in order and counted through;
    a folder for the numbered files in it.
    """
    path = Path(path)
    if path.is_dir() and (sets := shards(path)):
        if len(sets) > 1:
            raise DataError(f"{path}: holds {', '.join(p.name for p in sets)}; give one of them as {sets[0]}")
        path = sets[0]
    if "*" in path.name and not path.exists():
        return _read_all(path)
    data, kind = read_data(path)
    if kind in SUFFIXES[2:]:
        return list(enumerate(_table(data, kind, path), 1)), []
    text = decode(data, str(path))
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


def _read_all(pattern: Path) -> tuple[list[tuple[int, Row]], list[Problem]]:
    """:func:`read_numbered` of every file that fits ``pattern``."""
    rows, problems, files = [], [], sorted(pattern.parent.glob(pattern.name))
    if not files:
        raise DataError(f"{pattern}: no file fits this name; check the path")
    for file in files:
        found, broken = read_numbered(file)
        start = max((line for line, _ in rows), default=0)
        rows += [(start + line, row) for line, row in found]
        problems += broken
    return rows, problems


def shards(folder: Path) -> list[Path]:
    """The data sets of a folder that lie in numbered files as on the hub, each as a name with a star.

    ``train-00000-of-00002.parquet`` and its sister are ``train-*-of-00002.parquet``. Raises :class:`DataError` where
    one of the files is missing.
    """
    found: dict[Path, int] = {}
    for path in sorted(folder.iterdir()):
        if form_of(path) in SUFFIXES and (numbered := re.search(r"-(\d+)-of-(\d+)(?=\.)", path.name)):
            name = f"{path.name[: numbered.start(1)]}*{path.name[numbered.end(1) :]}"
            found[folder / name] = found.get(folder / name, 0) + 1
    for pattern, count in found.items():
        wanted = int(re.search(r"-of-(\d+)\.", pattern.name)[1])
        if count != wanted:
            raise DataError(f"{pattern}: {count} of {wanted} files are there; download the others too")
    return list(found)


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
    """Write one JSON object a line, whole or not at all; raises :class:`NotJson` on a row that would be read otherwise.

    Such are NaN and infinity, half of a surrogate pair, keys that are not text, and values that are no JSON.
    """

    def lines() -> Iterator[str]:
        for number, row in enumerate(rows, 1):
            try:
                line = row_line(row)
            except (TypeError, ValueError, RecursionError) as error:
                raise NotJson(
                    f"{path}: row {number} cannot be written as JSON ({error}); nothing was written"
                ) from error
            yield line

    write_chunks(path, lines())


def row_line(row: Mapping[str, Any]) -> str:
    """A row as a line of JSON that reads as the same row; raises ``TypeError`` or ``ValueError`` where none does."""
    _check_keys(row)
    line = json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n"
    line.encode()  # half of a surrogate pair is no UTF-8
    return line


def _check_keys(value: Any) -> None:
    """Raise ``TypeError`` on a key that JSON would turn into text: 1 and "1" would become one."""
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"the key {key!r} is a {type(key).__name__}, not text")
        value = value.values()
    for inner in value:
        if isinstance(inner, (Mapping, list, tuple)):
            _check_keys(inner)


def write_chunks(path: str | Path, chunks: Iterable[str]) -> None:
    """Write text to a file beside ``path`` and move it there once it is safely on disk."""
    path = Path(path)
    part = path.with_name(f".{uuid.uuid4().hex}.part")
    new = [folder for folder in path.parents if not folder.exists()]
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
        if not path.exists():
            for folder in new:  # the inmost first
                with suppress(OSError):
                    folder.rmdir()
