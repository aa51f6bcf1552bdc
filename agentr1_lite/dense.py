"""Search by dense vectors: an encoder from sentence-transformers, exact inner products, FAISS where it is installed."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from agentr1_lite.index_files import as_path, read_index, saved_folder, write_index
from agentr1_lite.jsonl import DataError
from agentr1_lite.retrieval import BatchRetriever, Passage, RetrievalError, one_line, unique_passages

ENCODER = "BAAI/bge-small-en-v1.5"
BGE = ("Represent this sentence for searching relevant passages: ", "")
TASK = "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery:"
# By the encoder's name, the first that fits: what its authors say to put before a query and before a passage. For
# encoders whose own settings name no prompt
PREFIXES = {
    r"qwen3-embedding": (TASK, ""),
    r"\be5-.*instruct|gte-qwen2.*instruct": (f"{TASK} ", ""),
    r"\be5-": ("query: ", "passage: "),
    r"bge-(small|base|large)-en|mxbai-embed-large|arctic-embed-(?!.*v2)": BGE,
    r"arctic-embed": ("query: ", ""),
    r"nomic-embed-text": ("search_query: ", "search_document: "),
}
PROMPT_NAMES = {"query": ("query",), "document": ("document", "passage", "corpus")}  # as sentence-transformers has them
Encode = Callable[[list[str]], Any]


def own_prompts(model: Any, name: str) -> tuple[str, str]:
    """What goes before a query and before a passage: the prompts in the model's own settings, else a guess by its name.

    Warns on a guess, and on a prompt chosen among several that are not simply called query or document.
    """
    prompts = {key: text for key, text in (getattr(model, "prompts", None) or {}).items() if text}
    if not prompts:
        guess = next((pair for form, pair in PREFIXES.items() if re.search(form, name.lower())), ("", ""))
        if guess != ("", ""):
            said = f"{guess[0]!r} before a query and {guess[1]!r} before a passage are guessed by its name"
            warnings.warn(f"dense retriever: encoder {name!r} names no prompts, so {said}", stacklevel=4)
        return guess
    found = []
    for side, words in PROMPT_NAMES.items():
        fitting = [key for key in prompts if any(word in key.lower() for word in words)]
        default = getattr(model, "default_prompt_name", None)
        fitting.sort(
            key=lambda key: (key not in words, key != default, not re.search("retriev|search|s2p", key.lower()))
        )
        if len(fitting) > 1 and fitting[0] not in words:
            said = f"{fitting[0]!r} of its prompts {', '.join(fitting)} is put before each {side}"
            warnings.warn(f"dense retriever: encoder {name!r}: {said}", stacklevel=4)
        found.append(prompts[fitting[0]] if fitting else "")
    return found[0], found[1]


def encoding(encoder: Any, side: str, batch_size: int = 64) -> Callable[[list[str], str], Any]:
    """(N texts, prompt) → (N, D): the model's own way to encode a query or a document, else the prompt before a text.

    The prompt is always named, so that a model's default prompt never comes on top of it.
    """
    options = {"batch_size": batch_size, "convert_to_numpy": True, "show_progress_bar": False}
    own = getattr(encoder, f"encode_{side}", None)
    if own is not None:
        return lambda texts, prompt: own(texts, prompt=prompt, **options)
    if hasattr(encoder, "prompts"):
        return lambda texts, prompt: encoder.encode(texts, prompt=prompt, **options)
    if hasattr(encoder, "encode"):
        return lambda texts, prompt: encoder.encode([prompt + text for text in texts], **options)
    return lambda texts, prompt: encoder([prompt + text for text in texts])


def load_encoder(name: str, device: str | None = None) -> Any:
    """A sentence-transformers model by name or folder."""
    try:
        from sentence_transformers import SentenceTransformer  # an optional extra, and slow to import
    except ImportError as error:
        raise DataError(
            f"dense retriever: encoder {name!r} needs sentence-transformers ({error}); install the extra: "
            "pip install 'agentr1_lite[dense]'"
        ) from error
    try:
        return SentenceTransformer(name, device=device)
    except Exception as error:  # the hub client raises dozens of types
        raise DataError(
            f"dense retriever: encoder {name!r} cannot be loaded ({one_line(error)}); "
            "check name and network, or give the folder of a downloaded model"
        ) from error


class Dense(BatchRetriever):
    """Exact search over normalised vectors: score(q, d) = q · d / (|q| |d|), by FAISS where it is installed.

    Agent-R1 encoded with ``bge-large-en-v1.5`` (335 M parameters, D = 1,024). The default is the smallest of that
    family: a tenth of the parameters to run beside the policy, D = 384, so that 100,000 passages are 154 MB.

    Args:
        passages: as for BM25; each is encoded once, as ``title``, a line break, ``text``.
        encoder: a sentence-transformers name or folder, or a function from N texts to (N, D) numbers.
        instruction: text put before a query; None is the prompt that ``encoder`` names, see :func:`own_prompts`.
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
        self.encode = load_encoder(encoder, device) if isinstance(encoder, str) else encoder
        own = own_prompts(self.encode, self.encoder) if instruction is None or vectors is None else ("", "")
        self.instruction = own[0] if instruction is None else instruction
        if vectors is None and self.passages:
            vectors = self._unit([f"{p.title}\n{p.text}".strip() for p in self.passages], "document", own[1])
        self.vectors = np.zeros((0, 0), np.float32) if vectors is None else vectors  # (N, D)
        self._top = _searcher(self.vectors) if self.passages else None

    def __len__(self) -> int:
        return len(self.passages)

    def _unit(self, texts: list[str], side: str, prompt: str) -> np.ndarray:  # (N, D)
        """The vectors of queries or documents, each of length 1."""
        found = np.asarray(encoding(self.encode, side)(texts, prompt), dtype=np.float32)
        if found.ndim != 2 or len(found) != len(texts) or not np.isfinite(found).all():
            raise RetrievalError(f"encoder gave {found.shape} numbers for {len(texts)} texts; expected finite (N, D)")
        return found / np.maximum(np.linalg.norm(found, axis=1, keepdims=True), 1e-12)

    def find(self, queries: list[str], k: int) -> list[list[Passage]]:
        if not self.passages:
            return [[] for _ in queries]
        asked = self._unit(queries, "query", self.instruction)
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
