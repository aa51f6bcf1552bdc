"""The bytes of a run: what each phase of a step holds in memory, counted from the shape of the model.

In the rollout the weights stand beside the keys and values of every episode; in the log-prob phase the rows pass
without gradient; the update keeps what the backward pass needs. The formulas follow what `forward`, `engine`, `cache`
and `update` do; tests compare them with the tensors that really live, and ``tests/benchmarks/memory.py`` with the
memory of a process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from agentr1_lite.shapes import Shape

GIB = 2**30
PHASES = ("rollout", "log-prob", "update")
PARTS = ("weights", "adapters", "optimiser", "gradients", "activations", "logits", "KV cache", "overhead")
NF4_BYTES = 1 / 2 + 1 / 64 + 4 / (64 * 256)  # a 4-bit code, an 8-bit scale a block of 64, a float32 a 256 of these
CHUNK, KEEP = 2**24, 2**26  # forward.CHUNK_ELEMENTS and KEEP_ELEMENTS
FEED = 4096  # engine.FEED_TOKENS
FIRST, ODD = 512, 8  # cache.FIRST_SLOTS and ODD_SLOTS
OBSERVATION = 256  # tokens of a usual observation
PROMPT = 512  # tokens of a usual prompt
# What Python, torch and a GPU's context take (GiB), and the allocator's share of what comes and goes. The CPU's are
# measured with MALLOC_MMAP_THRESHOLD_=1048576, without which the C library keeps much of what was freed.
BASE = {"cpu": 0.43, "cuda": 0.45}
SHARE = {"cpu": 0.03, "cuda": 0.08}


@dataclass(frozen=True)
class Setting:
    """What decides the memory of a run; ``width`` is the bytes of a number, tokens are those of one row.

    ``rows``: episodes decoded at once; ``flash``: whether grouped heads share keys and values in attention without a
    mask (GPUs from compute capability 8.0, and CPUs), or get copies of them (a T4, `forward.wants_mask`).
    """

    shape: Shape
    device: str = "cuda"
    width: int = 2
    quantized: bool = True
    lora_rank: int = 16
    critic: bool = False
    gradient_checkpointing: bool = True
    optimizer: str = "paged_adamw_8bit"
    micro_batch_tokens: int = 4096
    batch_size: int = 8
    group_size: int = 8
    prompt_tokens: int = PROMPT
    response_tokens: int = 2048
    max_rows: int = 32
    flash: bool = True
    engine_memory: float = 0.0  # bytes that another engine takes

    @property
    def tokens(self) -> int:
        """Tokens of the longest row."""
        return min(self.prompt_tokens + self.response_tokens, self.shape.context)

    @property
    def episodes(self) -> int:
        return self.batch_size * self.group_size

    @property
    def rows(self) -> int:
        return min(self.episodes, self.max_rows)

    @property
    def passed(self) -> tuple[float, float]:
        """(padded tokens, rows) of one micro-batch: its budget, one row at least, all rows at most."""
        tokens = min(max(self.micro_batch_tokens, self.tokens), self.episodes * self.tokens)
        return tokens, tokens / self.tokens

    def forwarded(self, shared: bool) -> float:
        """Tokens that pass for a micro-batch; ``shared``: the prompt of a question once (``forward.plan_stages``)."""
        tokens, rows = self.passed
        prompt = min(self.prompt_tokens, self.tokens)
        return tokens - (rows - rows / min(self.group_size, rows)) * prompt if shared else tokens


Moment = dict[str, float]  # bytes of the parts that come and go, at one time

# Bytes that stay


def weights(s: Setting) -> float:
    """The base; without LoRA also the reference and, where there is one, the critic's backbone: copies of it."""
    if s.lora_rank:
        saved = s.shape.linear_weights * (s.width - NF4_BYTES) if s.quantized else 0
        return s.shape.parameters * s.width - saved
    return (2 * s.shape.parameters + s.critic * s.shape.backbone_weights) * s.width


def trained(s: Setting) -> list[int]:
    """Weights that are trained: the actor's, and the critic's if there is one."""
    if s.lora_rank:
        return [s.shape.lora_weights(s.lora_rank)] * (1 + s.critic)
    return [s.shape.parameters, s.shape.backbone_weights][: 1 + s.critic]


def adapters(s: Setting) -> float:
    """Actor, reference and, where there is one, critic; peft keeps them in float32 under any base."""
    return 4 * s.shape.lora_weights(s.lora_rank) * (2 + s.critic)


def optimizer(s: Setting) -> float:
    """Two moments a trained weight, in its number type or in 8 bits with a float32 scale a block of 256."""
    return (2 * _trained_width(s) if s.optimizer == "adamw" else 2 + 8 / 256) * sum(trained(s))


def _trained_width(s: Setting) -> int:
    return 4 if s.lora_rank else s.width


def gradients(s: Setting) -> float:
    """Actor and critic are updated one after the other, so one gradient lives at a time."""
    return float(_trained_width(s) * max(trained(s)))


# Bytes that come and go


def kept_per_token(s: Setting, shared: bool) -> float:
    """What the backward pass reads again of one token in one layer.

    Under a frozen base: the inputs of both norms in float32, the inputs of adapters (a float32 copy each where the base
    computes in 16 bits), queries, keys, values and the attention's output, gate, up, and their activation and product.
    """
    h, q, k, i, w = s.shape.hidden, s.shape.queries, s.shape.keys, s.shape.intermediate, s.width
    masked = (shared or not s.flash) and q > k  # then attention reads keys and values repeated for every head
    kv = 2 * w * (q + k if masked else k)
    small = 8 + 4 * s.shape.heads
    if not s.lora_rank:
        return (8 + 4 * w) * h + 2 * w * q + kv + 4 * w * i + small
    copies = (8, 0) if w == 4 else (20, 4)
    return (8 + copies[0]) * h + (2 * w + copies[1]) * q + kv + (3 * w + 4) * i + 28 * s.lora_rank + small


def passing_per_token(s: Setting) -> float:
    """What one token needs while it passes a layer without gradient: the MLP's or the attention's, the larger."""
    h, q, k, i, w = s.shape.hidden, s.shape.queries, s.shape.keys, s.shape.intermediate, s.width
    cast = 4 if s.lora_rank and w < 4 else 0
    mlp = (2 * w + 8 if s.lora_rank else 3 * w) * i
    attention = (3 * q + 4 * k) * w + (0 if s.flash else 2 * q * w)
    return max(mlp, attention) + (4 * w + cast) * h + 2 * s.shape.head_dim * w


def dequantized(s: Setting) -> float:
    """The largest 4-bit layer in the numbers it computes in: one exists at a time, with its scales."""
    return max(a * b for a, b in s.shape.linears().values()) * (s.width + 4 / 64) if s.quantized else 0.0


def prompt_cache(s: Setting) -> float:
    """Keys and values that prompts hand on to their rows in a pass without gradient, and one layer's, repeated."""
    tokens, _ = s.passed
    return 2 * s.width * tokens * (s.shape.keys * s.shape.layers + s.shape.queries)


def slots(s: Setting) -> tuple[int, int]:
    """Slots a row has in the end, and at most where its cache grows (old and new together): `rollout.row_slots`."""
    if s.device == "cpu":  # untouched slots take no memory
        return s.tokens, s.tokens
    capacity = highest = min(s.shape.context, FIRST + s.response_tokens) + ODD
    while capacity < s.tokens:  # a prompt longer than usual
        grown = max(min(s.prompt_tokens, s.tokens), capacity * 3 // 2) + ODD
        capacity, highest = grown, capacity + grown
    return capacity, highest


def rollout(s: Setting) -> list[Moment]:
    """The cache while it grows; prompts and observations passing the layers; the logits of a decoding step."""
    if s.engine_memory:
        return [{"KV cache": s.engine_memory}]
    shape, w = s.shape, s.width
    a_slot = s.rows * shape.layers * 2 * shape.keys * w
    usual, growing = (float(a_slot * count) for count in slots(s))
    fed = min(FEED, s.rows * max(min(s.prompt_tokens, s.tokens), OBSERVATION))
    together = min(s.rows, FEED // OBSERVATION)  # rows whose observations are fed in one pass
    gathered = together * s.tokens * w * (2 * shape.keys + 2 * shape.queries + OBSERVATION)
    fed = fed * passing_per_token(s) + gathered + dequantized(s)
    return [
        {"KV cache": growing},
        {"KV cache": usual, "activations": fed},
        {"KV cache": usual, "activations": dequantized(s), "logits": 12.0 * s.rows * shape.vocab},
    ]


def log_prob(s: Setting) -> list[Moment]:
    """The rows in a layer, beside what their prompts hand on; the logits of a chunk."""
    states = s.forwarded(True) * s.width * s.shape.hidden
    layer = s.forwarded(True) * passing_per_token(s) + (prompt_cache(s) if s.group_size > 1 else 0.0) + dequantized(s)
    return [{"activations": layer}, {"activations": 2 * states, "logits": 8.0 * _chunk(s)}]


def update(s: Setting) -> list[Moment]:
    """The backward pass at the logits (of a large and of a small micro-batch) and in a layer; the optimiser's step."""
    shape, w, recomputed = s.shape, s.width, s.gradient_checkpointing
    shared = not recomputed and s.group_size > 1
    tokens, grads = s.forwarded(shared), gradients(s)
    kept = tokens * shape.layers * (w * shape.hidden if recomputed else kept_per_token(s, shared))
    head = 0 if s.lora_rank else w * shape.vocab * shape.hidden  # the output layer's gradient before it is added
    actions = _actions(s) * shape.vocab
    smaller = min(1.0, KEEP / actions)  # a micro-batch so much smaller keeps all its logits
    # around a layer: position embeddings, the states of the end, and what its own backward pass makes
    copies = 4 if w == 4 or not s.lora_rank else 9
    around = 2 * shape.head_dim * w + 2 * w * shape.intermediate + copies * shape.hidden + w * shape.hidden
    around += 0 if s.flash else 2 * w * shape.queries
    layer = tokens * (around + (kept_per_token(s, shared) if recomputed else 0)) + dequantized(s)
    step = grads if s.device == "cuda" and s.optimizer == "adamw" else 0.0
    ends = kept + 5 * tokens * w * shape.hidden
    logits = 16.0 * _chunk(s) + head + 4.0 * smaller * actions
    moments = [{"gradients": grads, "activations": smaller * ends, "logits": logits}]
    if smaller < 1:
        moments += [{"gradients": grads, "activations": ends, "logits": 12.0 * _chunk(s) + head}]
    return [
        *moments,
        {"gradients": grads, "activations": kept + layer},
        {"gradients": grads + step},
    ]


def _actions(s: Setting) -> float:
    """Tokens of a micro-batch whose log-probs are read: at most all after the prompt."""
    return s.passed[1] * min(s.response_tokens, s.tokens)


def _chunk(s: Setting) -> float:
    """Logits that exist at once (`forward.token_log_probs`)."""
    return min(max(CHUNK // s.shape.vocab, 1), _actions(s)) * s.shape.vocab


def phase_parts(s: Setting, phase: str) -> dict[str, float]:
    """Bytes of every part at the highest moment of a phase."""
    stay = {"weights": weights(s), "adapters": adapters(s), "optimiser": optimizer(s)}
    moment = max(MOMENTS[phase](s), key=lambda found: sum(found.values()))
    found = {part: stay.get(part, 0.0) + moment.get(part, 0.0) for part in PARTS}
    moving = sum(found[part] for part in ("activations", "logits", "KV cache"))
    return found | {"overhead": BASE[s.device] * GIB + SHARE[s.device] * moving}


MOMENTS: dict[str, Callable[[Setting], list[Moment]]] = {"rollout": rollout, "log-prob": log_prob, "update": update}
