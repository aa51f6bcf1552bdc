"""Checkpoints: everything a run needs to continue to the same numbers.

A checkpoint is a folder ``checkpoints/000012`` with ``tensors.pt`` (weights of
actor, reference and critic, optimiser states, random state) and ``state.json``
(phase, step, coefficients). It is written beside its place and renamed when it
is whole, and the former one is removed only after that: a full disk or a kill
while saving costs the new checkpoint, never the old one.
"""

from __future__ import annotations

import ast
import json
import os
import random
import shutil
import signal
import tempfile
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm.auto import tqdm

from agentr1_lite.jsonl import DataError, write_text
from agentr1_lite.storage import usual_modes


@dataclass
class Place:
    """How far a phase has come, over all calls of it in a run.

    Attributes:
        step: optimiser steps so far.
        epoch, row: where the next step starts in the order of the data.
        data: `agentr1_lite.runlog.fingerprint` of that data; "" where an older version saved the run.
        begun: ``step`` when the last call began; done: rows (trajectories, pairs, rollouts) that call has had.
    """

    step: int = 0
    epoch: int = 0
    row: int = 0
    data: str = ""
    begun: int = 0
    done: int = 0


class CheckpointError(OSError):
    """A checkpoint cannot be written or read: one sentence with the folder and what to do."""


def random_state() -> dict[str, Any]:
    """The state of every generator a run may draw from."""
    kind, keys, *rest = np.random.get_state()
    state: dict[str, Any] = {
        "python": repr(random.getstate()),
        "numpy": [kind, torch.from_numpy(keys.astype(np.int64)), *rest],
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def restore_random_state(state: dict[str, Any]) -> None:
    random.setstate(ast.literal_eval(state["python"]))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])


def save_checkpoint(
    run_dir: str | Path, number: int, tensors: dict[str, Any], state: dict[str, Any], keep: int = 2
) -> Path:
    """Write checkpoint ``number`` of a run and drop all but the newest ``keep``."""
    root = Path(run_dir) / "checkpoints"
    final = root / f"{number:06d}"
    part = None
    try:
        root.mkdir(parents=True, exist_ok=True)
        for stale in root.glob(".part-*"):  # a save that was killed
            shutil.rmtree(stale, ignore_errors=True)
        part = Path(tempfile.mkdtemp(prefix=".part-", dir=root))
        with (part / "tensors.pt").open("wb") as file:
            torch.save({**tensors, "random": random_state()}, file)
            file.flush()
            os.fsync(file.fileno())
        write_text(part / "state.json", json.dumps(state, indent=1))
        usual_modes(part)
        if final.exists():
            shutil.rmtree(final)
        part.rename(final)
    except (OSError, RuntimeError, DataError) as error:
        raise CheckpointError(
            f"checkpoint {final} could not be written ({error}); free some space, the former checkpoint is whole"
        ) from error
    finally:
        if part is not None:
            shutil.rmtree(part, ignore_errors=True)
    folders = _folders(run_dir)
    for old in folders[folders.index(final) + keep :] + folders[: folders.index(final)]:
        # a checkpoint of a later step belongs to a future that a resumed run has left
        shutil.rmtree(old, ignore_errors=True)
    return final


def load_checkpoint(run_dir: str | Path) -> tuple[dict[str, Any], dict[str, Any], Path]:
    """The newest checkpoint that reads: ``(tensors, state, folder)``; a broken one is named and passed over."""
    for folder in _folders(run_dir):
        try:
            state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
            return torch.load(folder / "tensors.pt", map_location="cpu", weights_only=True), state, folder
        except Exception as error:  # torch raises many kinds for a damaged file
            warnings.warn(f"checkpoint {folder} is damaged ({error}); the one before it is used", stacklevel=2)
    raise CheckpointError(f"{run_dir} holds no checkpoint that can be read; start the run again with `train`")


@contextmanager
def interruptible(run: Any) -> Iterator[None]:
    """The first Ctrl-C sets ``run.stop_requested``: the step is finished and saved; a second one stops at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ask(signum: int, frame: Any) -> None:
        if run.stop_requested:
            raise KeyboardInterrupt
        run.stop_requested = True
        tqdm.write("Stopping after this step and saving; press Ctrl-C again to stop at once.")

    former = signal.signal(signal.SIGINT, ask)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, former)


def has_checkpoint(run_dir: str | Path) -> bool:
    return bool(_folders(run_dir))


def _folders(run_dir: str | Path) -> list[Path]:
    """Checkpoint folders, newest first."""
    found = [path for path in Path(run_dir).glob("checkpoints/*") if path.name.isdecimal()]
    return sorted(found, key=lambda path: int(path.name), reverse=True)
