"""How the next token is drawn: temperature, inverse CDF, a row's own random numbers, stop strings."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    ``top_p`` < 1 is for evaluation and chat only: the recorded log-probs are
    those of the whole distribution, so that a ratio to them would be off by the
    kept mass (trl#6789); rollouts that train use temperature alone.
    """

    temperature: float = 1.0
    greedy: bool = False
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(
                f"temperature is {self.temperature}; it must be above 0 (greedy=True takes the likeliest token)"
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; it must lie in (0, 1]")

    def choose(self, logits: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens (n,) and their log-probs (n,) from float32 logits (n, V), by inverse CDF at ``uniforms`` (n,).

        ``log p = z − max z − log Σ exp(z − max z)`` with z = logits / temperature.
        """
        z = logits if self.temperature == 1.0 else logits / self.temperature
        top, best = z.max(dim=-1, keepdim=True)
        weights = (z - top).exp_()
        total = weights.sum(dim=-1)
        if self.greedy:
            ids = best[:, 0]
        elif self.top_p < 1.0:
            ids = self._nucleus(weights, uniforms)
        else:
            # uniforms have 23 bits, so u · total < total even after rounding: no token of weight 0 is drawn
            cdf = weights.cumsum(dim=-1)
            ids = torch.searchsorted(cdf, (uniforms * cdf[:, -1])[:, None], right=True)[:, 0]
            ids.clamp_(max=cdf.shape[-1] - 1)  # of logits that are not numbers, which the caller sees in the log-probs
        return ids, z.gather(-1, ids[:, None])[:, 0] - top[:, 0] - total.log()

    def _nucleus(self, weights: Tensor, uniforms: Tensor) -> Tensor:
        ordered, order = weights.sort(dim=-1, descending=True)
        before = ordered.cumsum(dim=-1) - ordered
        cdf = ordered.masked_fill(before >= self.top_p * weights.sum(dim=-1, keepdim=True), 0.0).cumsum(dim=-1)
        place = torch.searchsorted(cdf, (uniforms * cdf[:, -1])[:, None], right=True)
        return order.gather(-1, place.clamp_(max=cdf.shape[-1] - 1))[:, 0]


def uniforms(seeds: np.ndarray, counters: np.ndarray) -> np.ndarray:
    """u(seed, counter) in [0, 1), float32: SplitMix64 (Steele et al., 2014) at any place of its sequence.

    A row's draws depend on its own seed and on how many tokens it has sampled,
    never on the rows beside it.
    """
    with np.errstate(over="ignore"):
        z = seeds + (counters.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
    return (z >> np.uint64(41)).astype(np.float32) * np.float32(2.0**-23)


def known_ids(tokenizer: PreTrainedTokenizerBase, vocabulary: int) -> np.ndarray:
    """(V,) True for ids that have a token; a model may have more rows than its tokenizer, behind it and in gaps."""
    known = np.zeros(vocabulary, dtype=bool)
    known[[i for i in tokenizer.get_vocab().values() if i < vocabulary]] = True
    return known


@functools.lru_cache(maxsize=8)
def stop_candidates(tokenizer: PreTrainedTokenizerBase, stop_strings: tuple[str, ...], vocabulary: int) -> np.ndarray:
    """(V,) True for tokens that can complete a stop string: those that hold the last character of one.

    Only after such a token is a row's recent text looked at. Part of a
    character (shown as U+FFFD) can complete any that is not ASCII.
    """
    found = known_ids(tokenizer, vocabulary)
    texts = tokenizer.batch_decode(
        [[i] for i in np.flatnonzero(found).tolist()], skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
    last = {stop[-1] for stop in stop_strings}
    broken = any(not c.isascii() for c in last)
    found[found] = [any(c in text for c in last) or (broken and "\ufffd" in text) for text in texts]
    return found
