"""Search by dense vectors: an encoder from sentence-transformers, exact inner products, FAISS where it is installed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from agentr1_lite.index_files import as_path, read_index, saved_folder, write_index
from agentr1_lite.jsonl import DataError
from agentr1_lite.retrieval import BatchRetriever, Passage, RetrievalError, one_line, unique_passages

ENCODER = "BAAI/bge-small-en-v1.5"
BGE = ("Represent this sentence for searching relevant passages: ", "")
# By a part of the encoder's name: what its authors put before a query and before a passage
PREFIXES = {"bge-small-en": BGE, "bge-base-en": BGE, "bge-large-en": BGE, "e5-": ("query: ", "passage: ")}
Encode = Callable[[list[str]], Any]


def load_encoder(name: str, device: str | None = None, batch_size: int = 64) -> Encode:
    """A sentence-transformers model by name or folder, as a function from N texts to (N, D) vectors."""
    try:
        from sentence_transformers import SentenceTransformer  # an optional extra, and slow to import
    except ImportError as error:
        raise DataError(
            f"dense retriever: encoder {name!r} needs sentence-transformers ({error}); install the extra: "
            "pip install 'agentr1_lite[dense]'"
        ) from error
    try:
        model = SentenceTransformer(name, device=device)
    except Exception as error:  # the hub client raises dozens of types
        raise DataError(
            f"dense retriever: encoder {name!r} cannot be loaded ({one_line(error)}); "
            "check name and network, or give the folder of a downloaded model"
        ) from error
    return partial(model.encode, batch_size=batch_size, convert_to_numpy=True, show_progress_bar=False)


class Dense(BatchRetriever):
    """Exact search over normalised vectors: score(q, d) = q · d / (|q| |d|), by FAISS where it is installed.

    Agent-R1 encoded with ``bge-large-en-v1.5`` (335 M parameters, D = 1,024). The default is the smallest of that
    family: a tenth of the parameters to run beside the policy, D = 384, so that 100,000 passages are 154 MB.

    Args:
        passages: as for BM25; each is encoded once, as ``title``, a line break, ``text``.
        encoder: a sentence-transformers name or folder, or a function from N texts to (N, D) numbers.
        instruction: text put before a query; None is what the family of ``encoder`` was trained with.
        device: of a named encoder; None lets sentence-transformers choose.
    """

    timeout = 60.0  # a CPU encodes a batch of queries in seconds

    def __init__(
        self,
        passages: Iterable[Any] = (),
        *,
        encoder: str | Encode = ENCODER,
        instruction: str | None = None,
        device: str | None = None,
        vectors: np.ndarray | None = None,
    ):
        if not isinstance(encoder, str) and not callable(encoder):
            raise DataError(f"dense retriever: encoder {encoder!r} is neither a model's name nor a function; give one")
        super().__init__(unique_passages(passages))
        self.encoder = encoder if isinstance(encoder, str) else ""
        own = next((pair for word, pair in PREFIXES.items() if word in self.encoder.lower()), ("", ""))
        self.instruction, passage_prefix = own[0] if instruction is None else instruction, own[1]
        self.encode = load_encoder(encoder, device) if isinstance(encoder, str) else encoder
        if vectors is None and self.passages:
            vectors = self._unit([f"{passage_prefix}{p.title}\n{p.text}".strip() for p in self.passages])
        self.vectors = np.zeros((0, 0), np.float32) if vectors is None else vectors  # (N, D)
        self._top = _searcher(self.vectors) if self.passages else None

    def __len__(self) -> int:
        return len(self.passages)

    def _unit(self, texts: list[str]) -> np.ndarray:  # (N, D)
        """The texts' vectors, each of length 1."""
        found = np.asarray(self.encode(texts), dtype=np.float32)
        if found.ndim != 2 or len(found) != len(texts) or not np.isfinite(found).all():
            raise RetrievalError(f"encoder gave {found.shape} numbers for {len(texts)} texts; expected finite (N, D)")
        return found / np.maximum(np.linalg.norm(found, axis=1, keepdims=True), 1e-12)

    def find(self, queries: list[str], k: int) -> list[list[Passage]]:
        if not self.passages:
            return [[] for _ in queries]
        asked = self._unit([self.instruction + query for query in queries])
        if asked.shape[1] != self.vectors.shape[1]:
            raise RetrievalError(
                f"encoder gives vectors of {asked.shape[1]} numbers and the index holds {self.vectors.shape[1]}; "
                "search with the encoder it was made with"
            )
        scores, places = self._top(asked, min(k, len(self.passages)))
        found = []
        for row, ids in zip(scores.tolist(), places.tolist(), strict=True):
            best = sorted(zip(row, ids, strict=True), key=lambda hit: (-hit[0], hit[1]))  # ties in corpus order
            found.append([replace(self.passages[i], score=score) for score, i in best])
        return found

    def save(self, folder: str | Path) -> None:
        """Write passages, vectors and the encoder's name into ``folder``, whole or not at all."""

        def write(part: Path) -> None:
            np.save(part / "vectors.npy", self.vectors)

        write_index(folder, "dense", self.passages, write, encoder=self.encoder, instruction=self.instruction)

    @classmethod
    def load(cls, folder: str | Path, encoder: str | Encode | None = None, device: str | None = None) -> Dense:
        """What :meth:`save` wrote; ``encoder`` None is the one it was made with."""
        folder = saved_folder(folder) or as_path(folder, "path")
        settings, rows = read_index(folder, "dense", "encoder", "instruction")
        made_with = settings["encoder"]
        if encoder is None and not made_with:
            raise DataError(f"{folder}: was made with an encoder of your own; pass it as encoder")
        if isinstance(encoder, str) and encoder != made_with:
            raise DataError(f"{folder}: was made with encoder {made_with!r}, not {encoder!r}; index the passages again")
        vectors = np.load(folder / "vectors.npy")
        encoder = made_with if encoder is None else encoder
        return cls(rows, encoder=encoder, instruction=settings["instruction"], device=device, vectors=vectors)


def _searcher(vectors: np.ndarray) -> Callable[[np.ndarray, int], tuple[np.ndarray, np.ndarray]]:
    """(Q, D) queries, k → (Q, k) inner products and places: FAISS's exact index, or the product itself."""

    def product(queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        scores = queries @ vectors.T
        places = np.argsort(-scores, axis=1, kind="stable")[:, :k]
        return np.take_along_axis(scores, places, 1), places

    try:
        import faiss
    except ImportError:
        return product
    index = faiss.IndexFlatIP(vectors.shape[1])
    index.add(vectors)
    return index.search
