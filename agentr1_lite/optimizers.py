"""Optimisers by name, and the loss scale that keeps float16 gradients from vanishing."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from agentr1_lite.policy import QwenPolicy
from agentr1_lite.settings import ConfigError

BETAS = (0.9, 0.95)
FIRST_SCALE = 2.0**12
GROW_AFTER = 200  # steps without an overflow

Maker = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]


def adamw(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """Two float32 moments a weight: 8 bytes."""
    return torch.optim.AdamW(parameters, lr=0.0, betas=BETAS)


def paged_adamw_8bit(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """Moments in 8 bits, 2 bytes a weight, that move to main memory when the GPU is full (QLoRA, arXiv 2305.14314).

    A CPU has no pages to move; there the moments are in 8 bits only.
    """
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ConfigError(
            "training.optimizer paged_adamw_8bit needs the package bitsandbytes; install it, or choose adamw"
        )
    from bitsandbytes.optim import AdamW8bit, PagedAdamW8bit

    kind = PagedAdamW8bit if parameters[0].device.type == "cuda" else AdamW8bit
    return kind(parameters, lr=0.0, betas=BETAS)


OPTIMIZERS: dict[str, Maker] = {"adamw": adamw, "paged_adamw_8bit": paged_adamw_8bit}


def choose(name: str, *, quantized: bool, device: str) -> str:
    """``auto``: 8 bits where memory is what lacks, under a 4-bit base on a GPU; else plain AdamW."""
    if name != "auto":
        return name
    return "paged_adamw_8bit" if quantized and device == "cuda" else "adamw"


def optimizer_name(name: str, policy: QwenPolicy) -> str:
    """Which optimiser ``training.optimizer`` means for a policy."""
    return choose(name, quantized=policy.quantized, device=policy.device.type)


def make_optimizer(name: str, policy: QwenPolicy, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimiser that ``training.optimizer`` names over some of a policy's parameters."""
    return OPTIMIZERS[optimizer_name(name, policy)](parameters)


@dataclass
class LossScale:
    """A factor on the loss that is taken off the gradient again (Micikevicius et al., arXiv 1710.03740).

    A token's share of a mean over thousands of tokens is below 6e-8, the smallest float16: its gradient would be 0.
    The factor is 1 for other number types. It halves when a gradient overflows, whose step is left out, and doubles
    after ``GROW_AFTER`` steps without.
    """

    value: float = 1.0
    good: int = 0

    @classmethod
    def of(cls, dtype: torch.dtype) -> LossScale:
        return cls(FIRST_SCALE if dtype is torch.float16 else 1.0)

    def update(self, norm: float) -> None:
        """Take note of the gradient norm of a step."""
        if self.value == 1.0:
            return
        self.good = self.good + 1 if math.isfinite(norm) else 0
        if not math.isfinite(norm):
            self.value = max(self.value / 2, 2.0)
        elif self.good % GROW_AFTER == 0:
            self.value = min(self.value * 2, 2.0**24)
