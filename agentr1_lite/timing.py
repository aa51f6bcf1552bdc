"""How long a step will take on a card: an estimate from its data sheet, to be replaced by a measurement.

Decoding a token for R rows reads every weight once, so it is bound by memory traffic; passes over whole rows are bound
by arithmetic. With P weights in linear layers, F the card's 16-bit operations a second, B its bytes a second:

    decoding step  = max(b · P / B, 2 · P · R / (η · F)) + KV bytes / B + launches · 8 µs
    prefill        = 2 · P · tokens fed / (η · F)
    log-prob pass  = 2 · P · tokens / (η · F)           one for the reference
    update         = (2 + 2 + 2) · P · tokens / (η · F) forward, again in the backward pass, and its gradients

P counts the output layer too. A layer takes 80 launches a token (assumed), prompts of a group are fed once, and PPO's
critic doubles the passes of log-prob and update. b is 2 bytes a weight in 16 bits and 4.5 in NF4, whose layers are
written out in 16 bits before each product (0.5 read, 2 written, 2 read). η = 0.3 is what such code usually reaches of a
data sheet, and is assumed.
"""

from __future__ import annotations

from dataclasses import dataclass

from agentr1_lite.planner import Setting

EFFICIENCY = 0.3
LAUNCH = 8e-6  # seconds a kernel costs at least
LAUNCHES = 80  # kernels of a layer with adapters in a decoding step


@dataclass(frozen=True)
class Card:
    """``memory`` in GiB as the driver shows it; of the data sheet dense 16-bit ``tflops`` and ``bandwidth`` in GB/s."""

    name: str
    memory: float
    tflops: float
    bandwidth: float
    bf16: bool = True


CARDS = {
    card.name: card
    for card in (
        Card("T4", 15, 65, 320, bf16=False),
        Card("L4", 22, 121, 300),
        Card("A100", 40, 312, 1555),
        Card("H200", 141, 989, 4800),
    )
}


@dataclass(frozen=True)
class Work:
    """What an average episode of a step holds: tokens it samples, and tokens in all behind its prompt."""

    sampled: int = 300
    response: int = 900


def step_seconds(s: Setting, card: Card, work: Work | None = None) -> dict[str, float]:
    """Seconds of rollout, log-prob and update of one step of ``s.episodes`` episodes on ``card``."""
    work, shape = work or Work(), s.shape
    flops, bandwidth = EFFICIENCY * card.tflops * 1e12, card.bandwidth * 1e9
    weights = shape.linear_weights + shape.vocab * shape.hidden
    a_weight = 4.5 if s.quantized else s.width
    cached = s.rows * (s.prompt_tokens + work.response / 2) * shape.layers * 2 * shape.keys * s.width
    decode = max(a_weight * weights / bandwidth, 2 * weights * s.rows / flops)
    decode += cached / bandwidth + shape.layers * LAUNCHES * LAUNCH
    prompts = s.batch_size * s.prompt_tokens  # of a group once
    fed = prompts + s.episodes * (work.response - work.sampled)
    tokens = s.episodes * (s.prompt_tokens + work.response)
    shared = prompts + s.episodes * work.response
    passes = (3 if s.gradient_checkpointing else 2) * (1 + s.critic)
    return {
        "rollout": s.episodes / s.rows * work.sampled * decode + 2 * weights * fed / flops,
        "log-prob": 2 * weights * shared * (1 + s.critic) / flops,
        "update": 2 * passes * weights * (tokens if s.gradient_checkpointing else shared) / flops,
    }


def expected_curve(step: float, start: float, end: float, half: float) -> float:
    """``end − (end − start) · 2^(−step / half)``: half of the way is gained every ``half`` steps; an assumed shape."""
    return end - (end - start) * 2 ** (-step / half)
