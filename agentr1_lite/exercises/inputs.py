"""Random inputs that several lessons draw."""

from __future__ import annotations

import random

import torch
from torch import Tensor


def turns(rng: random.Random) -> list[bool]:
    """The action mask of an episode: a prompt, then turns with a reply behind each but sometimes the last."""
    mask = [False] * rng.randint(2, 4)
    for _ in range(rng.randint(1, 3)):
        mask += [True] * rng.randint(1, 4) + [False] * rng.randint(2, 4)
    return mask + [True] * rng.choice([0, 0, 3])


def model_output(rng: random.Random) -> tuple[Tensor, Tensor, Tensor]:
    """Logits (B, T, V), ids and action mask (B, T), with action tokens of unequal number in the rows."""
    rows, width, vocabulary = rng.randint(2, 3), rng.randint(5, 8), rng.randint(4, 9)
    mask = torch.rand(rows, width) < 0.5
    mask[:, 0], mask[:, 2], mask[0, 3:] = False, True, True
    return torch.randn(rows, width, vocabulary), torch.randint(0, vocabulary, (rows, width)), mask
