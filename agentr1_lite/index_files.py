"""Search indexes on disk: a folder that appears whole or not at all, and is checked before it is used."""

from __future__ import annotations

import hashlib
import json
import shutil
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from agentr1_lite.jsonl import DataError, Row, parse_row, read_rows, read_text, write_rows, write_text

PASSAGES, MANIFEST = "passages.jsonl", "index.json"  # what every saved index holds


def _digest(path: Path) -> str:
    return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()


def write_index(
    folder: str | Path, kind: str, passages: Iterable[Any], write: Callable[[Path], None], **settings: Any
) -> None:
    """A folder with ``passages.jsonl``, the files that ``write`` puts there, and ``index.json`` with their digests.

    It appears whole or not at all. A former index is replaced; raises
    :class:`DataError` rather than replace anything else.
    """
    from agentr1_lite.storage import replace_folder  # imported late: it brings torch

    folder = Path(folder).expanduser()
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir()) and not (folder / MANIFEST).is_file()):
        raise DataError(f"{folder}: holds something else, which saving the index would replace; give a new folder")
    part = folder.absolute().with_name(f".{uuid.uuid4().hex}.part")
    try:
        part.mkdir(parents=True)
        write_rows(part / PASSAGES, ({"id": p.id, "title": p.title, "text": p.text} for p in passages))
        write(part)
        files = {path.name: _digest(path) for path in sorted(part.iterdir())}
        write_text(part / MANIFEST, json.dumps({"kind": kind, **settings, "files": files}, indent=1) + "\n")
        replace_folder(part, folder.absolute())
    except OSError as error:
        raise DataError(f"{folder}: cannot be written ({error}); check the folder and the free space") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def read_index(folder: Path, kind: str, *needs: str) -> tuple[Row, list[Row]]:
    """Settings (all of ``needs`` among them) and passages of a folder by :func:`write_index`, its files checked."""
    if not (folder / MANIFEST).is_file():
        raise DataError(f"{folder}: holds no {MANIFEST}, so no index was saved here; save one or give a passages file")
    try:
        settings = parse_row(read_text(folder / MANIFEST).strip())
        files, found = dict(settings["files"]), settings["kind"]
        _ = files[PASSAGES], [settings[name] for name in needs if found == kind]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{folder / MANIFEST}: does not describe an index ({error}); save the index again") from error
    if found != kind:
        raise DataError(f"{folder}: holds a {found} index, not a {kind} one; choose that retriever or another folder")
    for name, digest in files.items():
        if not (folder / name).is_file() or _digest(folder / name) != digest:
            raise DataError(f"{folder / name}: is missing, cut off or changed since it was saved; save the index again")
    return settings, read_rows(folder / PASSAGES)[0]
