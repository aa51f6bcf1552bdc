"""Search indexes on disk: a folder that appears whole or not at all, and is checked before it is used."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from agentr1_lite.jsonl import DataError, Row, parse_row, read_rows, read_text, shards, write_rows, write_text

PASSAGES, MANIFEST = "passages.jsonl", "index.json"  # what every saved index holds


def as_path(value: str | Path, name: str) -> Path:
    """The path a user gave as ``name``, with ``~`` written out; raises :class:`DataError` where it is none."""
    if not isinstance(value, (str, Path)):
        raise DataError(f"{name} {value!r} is a {type(value).__name__}, not a path; give a file or a folder as text")
    try:
        return Path(value).expanduser()
    except RuntimeError as error:  # ~name of nobody
        raise DataError(f"{name} {str(value)!r}: {error}; write the folder out") from error


def saved_folder(path: str | Path) -> Path | None:
    """The folder at ``path``, or its former one where a save was killed between its two renames; None where neither."""
    path = as_path(path, "path")
    if path.exists():
        return path if path.is_dir() and ((path / MANIFEST).exists() or not shards(path)) else None
    former = _former(path)
    return former if former.is_dir() else None


def _former(folder: Path) -> Path:
    from agentr1_lite.loading import FORMER  # imported late: it brings torch

    return folder.absolute().with_name(folder.absolute().name + FORMER)


def _digest(path: Path) -> str:
    return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()


def write_index(
    folder: str | Path, kind: str, passages: Iterable[Any], write: Callable[[Path], None], **settings: Any
) -> None:
    """A folder with ``passages.jsonl``, the files that ``write`` puts there, and ``index.json`` with their digests.

    It appears whole or not at all. A former index is replaced; raises
    :class:`DataError` rather than remove a file that no index wrote.
    """
    from agentr1_lite.storage import write_whole  # imported late: it brings torch

    folder = as_path(folder, "folder")
    for place in (folder, _former(folder)):  # a save removes both
        if foreign := _foreign(place):
            raise DataError(
                f"{place}: holds something else ({foreign}), which saving the index would replace; give a new folder"
            )

    def fill(part: Path) -> None:
        write_rows(part / PASSAGES, ({"id": p.id, "title": p.title, "text": p.text} for p in passages))
        write(part)
        files = {path.name: _digest(path) for path in sorted(part.iterdir())}
        write_text(part / MANIFEST, json.dumps({"kind": kind, **settings, "files": files}, indent=1) + "\n")

    try:
        write_whole(folder.absolute(), fill)
    except OSError as error:
        raise DataError(f"{folder}: cannot be written ({error}); check the folder and the free space") from error


def _foreign(place: Path) -> str:
    """The name of what lies at ``place`` and no index wrote, "" where nothing does."""
    if not place.is_dir():
        return place.name if place.exists() else ""
    try:
        ours = {MANIFEST, *_described(place)[1]}
    except DataError:
        ours = set()
    return next((p.name for p in sorted(place.iterdir()) if p.name not in ours or not p.is_file()), "")


def _described(folder: Path, *needs: str) -> tuple[Row, dict[str, str]]:
    """Settings and digests of the files of a saved index."""
    try:
        settings = parse_row(read_text(folder / MANIFEST).strip())
        files = dict(settings["files"])
        if not isinstance(settings["kind"], str):
            raise TypeError("its kind is no text")
        _ = files[PASSAGES], [settings[name] for name in needs]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{folder / MANIFEST}: does not describe an index ({error}); save the index again, in a new folder"
        ) from error
    return settings, files


def read_index(folder: Path, kind: str, *needs: str) -> tuple[Row, list[Row]]:
    """Settings (all of ``needs`` among them) and passages of a folder by :func:`write_index`, its files checked."""
    if not (folder / MANIFEST).is_file():
        raise DataError(f"{folder}: holds no {MANIFEST}, so no index was saved here; save one or give a passages file")
    found = _described(folder)[0]["kind"]
    if found != kind:
        raise DataError(f"{folder}: holds a {found} index, not a {kind} one; choose that retriever or another folder")
    settings, files = _described(folder, *needs)
    for name, digest in files.items():
        if not (folder / name).is_file() or _digest(folder / name) != digest:
            raise DataError(f"{folder / name}: is missing, cut off or changed since it was saved; save the index again")
    return settings, read_rows(folder / PASSAGES)[0]
