"""The files in ``data/``, remade by ``python -m agentr1_lite data``.

Worlds, demonstrations and logs are functions of fixed seeds and come out byte
for byte; the weights of `atlas-tiny` and `atlas-agent` come out equal on one machine
and equal in what they score on others.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path

from agentr1_lite.jsonl import write_rows, write_text
from agentr1_lite.tasks import load_task
from agentr1_lite.tasks.scripted import record

DEMONSTRATIONS, LOGGED_QUESTIONS = 400, 240
LOG_PLAYERS = ("annotator", "annotator", "annotator", "annotator", "hasty")


def worlds(folder: Path) -> list[Path]:
    """The default world of each split: ``atlas/train-passages.jsonl``, ``atlas/train-questions.jsonl``, …"""
    written = []
    for split, count in (("train", 400), ("dev", 200), ("test", 200)):
        task_set = load_task("atlas", split, count=count)
        passages, questions = (folder / "atlas" / f"{split}-{kind}.jsonl" for kind in ("passages", "questions"))
        write_rows(passages, [{"title": p.title, "text": p.text} for p in task_set.passages])
        write_rows(questions, [task.to_dict() for task in task_set.tasks])
        written += [passages, questions]
    return written


def demonstrations(folder: Path) -> list[Path]:
    """What a novice left: right where the way is short, given up where a search fails."""
    train = load_task("atlas", "train", count=DEMONSTRATIONS, seed=1)
    path = folder / "demonstrations.jsonl"
    write_rows(path, [record(train.env, task, "novice", seed) for seed, task in enumerate(train.tasks)])
    return [path]


def offline_logs(folder: Path) -> list[Path]:
    """Logs of mixed quality: each question played by several players, each log naming its player."""
    train = load_task("atlas", "train", count=LOGGED_QUESTIONS, seed=2)
    logs = [
        record(train.env, task, player, 10 * number + place)
        for number, task in enumerate(train.tasks)
        for place, player in enumerate(LOG_PLAYERS)
    ]
    path = folder / "offline_logs.json"
    rows = ",\n".join(json.dumps(log, ensure_ascii=False) for log in logs)
    write_text(path, f"[\n{rows}\n]\n")
    return [path]


def atlas_tiny(folder: Path) -> list[Path]:
    """Tokenizer and weights of the tiny policy (about 40 minutes on two cores)."""
    from agentr1_lite.tasks.atlas_tiny import pretrain

    pretrain(folder / "atlas-tiny")
    return sorted((folder / "atlas-tiny").iterdir())


def atlas_agent(folder: Path) -> list[Path]:
    """The shipped `atlas-tiny` after the three phases of its recipe (about three minutes on two cores)."""
    from agentr1_lite import pipeline
    from agentr1_lite.config import load_config
    from agentr1_lite.policy import QwenPolicy

    with tempfile.TemporaryDirectory() as scratch:
        pipeline.train(load_config("atlas-tiny", [f"run.output={scratch}/run"]))
        QwenPolicy(Path(scratch) / "run" / "policy").save(folder / "atlas-agent", critic=False)
    return sorted((folder / "atlas-agent").iterdir())


MAKERS: dict[str, Callable[[Path], list[Path]]] = {
    "worlds": worlds,
    "demonstrations": demonstrations,
    "offline-logs": offline_logs,
    "atlas-tiny": atlas_tiny,
    "atlas-agent": atlas_agent,
}
