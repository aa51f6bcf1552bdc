"""How long does BM25 take on 100,000 passages, and what does it find for the questions of real samples?

    python tests/benchmarks/retrieval.py --data ../shared/data
    python tests/benchmarks/retrieval.py --data ../shared/data --expert

The words of the passages are drawn from ``corpus.jsonl`` in ``--data`` by their frequency, else from Zipf's law over
50,000 made-up words. Recall@k is of the question itself as the query, over the passages of the sample and over
``corpus.jsonl``; ``--expert`` lets the scripted expert search and answer there.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from agentr1_lite.evaluation import run_baseline
from agentr1_lite.retrieval import BM25, WORD, Passage, load_passages
from agentr1_lite.retrievers import recall_at_k
from agentr1_lite.tasks import load_task
from agentr1_lite.tasks.multihop import BENCHMARKS

ZIPF_WORDS, WORDS_A_PASSAGE, QUERY_WORDS = 50_000, 100, 12


def made_passages(count: int, corpus: Path, seed: int = 0) -> list[Passage]:
    """``count`` passages of about 100 words, drawn by frequency."""
    if corpus.is_file():
        counts = Counter(word for p in load_passages(corpus) for word in WORD.findall(p.text))
        vocabulary, shares = list(counts), np.array(list(counts.values()), dtype=float)
    else:
        vocabulary, shares = [f"w{i}" for i in range(ZIPF_WORDS)], 1 / np.arange(1, ZIPF_WORDS + 1)
    rng = np.random.default_rng(seed)
    lengths = rng.poisson(WORDS_A_PASSAGE, count)
    drawn = iter(np.split(rng.choice(len(vocabulary), lengths.sum(), p=shares / shares.sum()), lengths.cumsum()[:-1]))
    return [Passage(f"Page {i}", " ".join(vocabulary[w] for w in ids)) for i, ids in enumerate(drawn)]


def clock(work: Callable[[], Any]) -> tuple[Any, float]:
    start = time.perf_counter()
    return work(), time.perf_counter() - start


def speed(count: int, corpus: Path) -> dict[str, float]:
    """Seconds to index (also of the processor alone), save and load ``count`` passages, and milliseconds a query.

    A query has 12 words and is asked once, so that none comes from the cache.
    """
    passages = made_passages(count, corpus)
    processor = time.process_time()
    index, indexing = clock(lambda: BM25(passages))
    processor = time.process_time() - processor
    with tempfile.TemporaryDirectory() as scratch:
        _, saving = clock(lambda: index.save(Path(scratch) / "index"))
        loaded, loading = clock(lambda: BM25.load(Path(scratch) / "index"))
    queries = [" ".join(p.text.split()[:QUERY_WORDS]) for p in passages[:: max(count // 200, 1)]]
    found, searching = clock(lambda: loaded.search_batch(queries, 5))
    if found != index.search_batch(queries, 5):
        raise AssertionError("the loaded index finds something else than the one that was saved")
    per_query = 1000 * searching / len(queries)
    seconds = {"index_s": indexing, "index_processor_s": processor, "save_s": saving, "load_s": loading}
    return {"passages": count, **seconds, "query_ms": per_query}


def quality(data: Path, benchmark: str, corpus: Path | None, expert: bool, max_turns: int) -> dict[str, Any]:
    """Recall@k of the question, and what the scripted expert reaches by searching."""
    task_set = load_task(benchmark, "train", path=data, corpus=corpus, max_turns=max_turns)
    recall = recall_at_k(task_set.index, task_set.tasks)
    row = {"benchmark": benchmark, "corpus": corpus.name if corpus else "own contexts", "n": len(task_set)}
    row |= {"passages": len(task_set.passages), **{f"recall@{k}": value for k, value in recall.items()}}
    if expert:
        report = run_baseline("scripted_expert", None, task_set)
        row |= {"expert_em": report.mean("em"), "expert_recall": report.mean("recall"), "turns": report.mean("turns")}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder of samples and corpus.jsonl")
    parser.add_argument("--passages", type=int, default=100_000, help="0 leaves the timing out")
    parser.add_argument("--expert", action="store_true", help="also let the scripted expert answer")
    parser.add_argument("--max-turns", type=int, default=5, help="turns the expert has")
    args = parser.parse_args()
    corpus = args.data / "corpus.jsonl"
    rows = [speed(args.passages, corpus)] if args.passages else []
    if corpus.is_file():
        choices = [(name, place) for name in BENCHMARKS for place in (None, corpus)]
        rows += [quality(args.data, name, place, args.expert, args.max_turns) for name, place in choices]
    for row in rows:
        print(json.dumps({key: round(v, 3) if isinstance(v, float) else v for key, v in row.items()}), flush=True)


if __name__ == "__main__":
    main()
