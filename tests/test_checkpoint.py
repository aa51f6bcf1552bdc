"""Checkpoints: whole or not there, whatever happens while one is written."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from agentr1_lite import checkpoint
from agentr1_lite.checkpoint import CheckpointError, has_checkpoint, load_checkpoint, save_checkpoint


def save(folder, number, keep=2):
    tensors = {"policy": {"w": torch.full((300,), float(number))}, "optimizers": {}}
    return save_checkpoint(folder, number, tensors, {"step": number}, keep)


def saved(folder) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def test_the_newest_is_loaded_and_older_ones_go(tmp_path):
    assert not has_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        load_checkpoint(tmp_path)
    for number in (0, 3, 10, 1_000_000):
        assert save(tmp_path, number).name == f"{number:06d}"
    (tmp_path / "checkpoints" / "notes").mkdir()
    tensors, state, folder = load_checkpoint(tmp_path)
    assert state == {"step": 1_000_000} and folder.name == "1000000"
    assert torch.equal(tensors["policy"]["w"], torch.full((300,), 1e6))
    assert saved(tmp_path) == ["000010", "1000000", "notes"]
    save(tmp_path, 1_000_000)  # once more in its own place
    assert saved(tmp_path) == ["000010", "1000000", "notes"]


class Full:
    """torch.save on a disk that is full after some bytes."""

    def __init__(self, error):
        self.error, self.save = error, torch.save

    def __call__(self, what, file):
        file.write(b"half of it")
        raise self.error


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("[enforce fail] write")])
def test_a_full_disk_costs_the_new_checkpoint_alone(error, tmp_path, monkeypatch):
    save(tmp_path, 1)
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint.torch, "save", Full(error))
        with pytest.raises(CheckpointError, match=r"000002 could not be written .*the former checkpoint is whole"):
            save(tmp_path, 2)
    assert saved(tmp_path) == ["000001"] and load_checkpoint(tmp_path)[1] == {"step": 1}
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint.torch, "save", Full(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            save(tmp_path, 1)
    assert saved(tmp_path) == ["000001"] and load_checkpoint(tmp_path)[1] == {"step": 1}


def test_a_failed_rename_leaves_the_former_one(tmp_path, monkeypatch):
    save(tmp_path, 1)
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "write_text", lambda *a: (_ for _ in ()).throw(OSError(5, "Input/output error")))
        with pytest.raises(CheckpointError, match="Input/output error"):
            save(tmp_path, 2)
    assert saved(tmp_path) == ["000001"]
    (tmp_path / "checkpoints" / ".part-left").mkdir()  # by a kill
    save(tmp_path, 2)
    assert saved(tmp_path) == ["000001", "000002"]


@pytest.mark.parametrize("keep", [1, 2, 3])
@pytest.mark.parametrize("harm", ["truncated", "empty", "no state", "no tensors"])
def test_a_damaged_checkpoint_is_named_and_passed_over(harm, keep, tmp_path):
    for number in (1, 2):
        save(tmp_path, number)
    folder = tmp_path / "checkpoints" / "000002"
    file = folder / "tensors.pt"
    if harm == "truncated":
        file.write_bytes(file.read_bytes()[:-700])
    elif harm == "empty":
        file.write_bytes(b"")
    else:
        (folder / ("state.json" if harm == "no state" else "tensors.pt")).unlink()
    with pytest.warns(UserWarning, match=r"000002 is damaged .*the one before it is used"):
        assert load_checkpoint(tmp_path)[1] == {"step": 1}
    save(tmp_path, 1, keep)  # the run that goes on from there must not lose to the damaged one
    assert load_checkpoint(tmp_path)[1] == {"step": 1} and saved(tmp_path) == ["000001"]


def test_random_numbers_continue(tmp_path):
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    random.gauss(0, 1), np.random.normal(), torch.randn(1)
    save(tmp_path, 1)

    def draw():
        return random.gauss(0, 1), random.random(), np.random.normal(), np.random.rand(), torch.randn(3).tolist()

    wanted = draw()
    random.seed(9), np.random.seed(9), torch.manual_seed(9)
    checkpoint.restore_random_state(load_checkpoint(tmp_path)[0]["random"])
    assert draw() == wanted
