"""Whether the kit's passes are the model's own: asked of every model once, when a policy is built around it.

An architecture may do what a pass of cached tokens does not know of: change logits behind its output layer, place
tokens by something else than their positions, keep another state than keys and values, draw noise while layers are
recomputed. Nothing else would notice, because sampler and update err alike.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agentr1_lite.cache import SlotCache, shared_attention
from agentr1_lite.forward import Head, Stage, hidden_states, run_backbone
from agentr1_lite.loading import PolicyError, reason
from agentr1_lite.sampling import known_ids

TOKENS, PREFIX = 8, 4
ADVICE = "use another architecture (Qwen, Llama, Gemma, Mistral, Phi-3, Granite and Cohere are followed)"


def checked_head(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str, *, recomputing: bool
) -> tuple[Head, bool]:
    """The model's `Head` and whether it reads shared prefixes, after comparing the kit's passes with its own forward.

    Args:
        tokenizer: which of the model's ids have a token.
        recomputing: whether layers will be recomputed in backward passes, that is run in training mode.

    Raises:
        PolicyError: the two differ, or the model cannot be passed token by token.
    """
    kind = type(model).__name__
    tolerance = (1e-3 if model.device.type == "cpu" else 1e-2) if _exact(model) else 0.1
    try:
        known = known_ids(tokenizer, model.config.get_text_config().vocab_size)
        head = Head(model, torch.from_numpy(known).to(model.device))
        # attention that an architecture does not take from transformers' register knows of no prefix
        for shares in (True, False) if model.config._attn_implementation == "sdpa" else (False,):
            error = _error(model, head, shares, recomputing)
            if error <= tolerance:
                return head, shares
    except torch.OutOfMemoryError:
        raise
    except Exception as problem:  # whatever an unknown architecture does with what it is given
        raise PolicyError(
            f"model {name!r} ({kind}) cannot be passed token by token ({reason(problem)}); {ADVICE}"
        ) from problem
    said = f"its own forward and the kit's passes differ by {error:.2g} of the logits"
    raise PolicyError(f"model {name!r} ({kind}) cannot be followed: {said}; {ADVICE}")


def _exact(model: PreTrainedModel) -> bool:
    return model.dtype is torch.float32 and not getattr(model, "is_quantized", False)


@torch.no_grad()
def _error(model: PreTrainedModel, head: Head, shares: bool, recomputing: bool) -> float:
    """‖kit's logits − own logits‖ / ‖own logits − their mean‖, the largest of all passes; settles ``head.plain``."""
    known = head.known.nonzero()[:, 0]
    ids = known[torch.linspace(0.1, 0.9, TOKENS, device=known.device).mul(len(known)).long()][None]
    layer, given = model.get_output_embeddings(), []
    hook = layer.register_forward_hook(lambda module, inputs, output: given.append(output)) if layer else None
    own = model(input_ids=ids, use_cache=False).logits[0].float()  # (TOKENS, V)
    if hook:
        hook.remove()
    head.plain = len(given) == 1 and torch.equal(given[0][0].float(), own)
    if own.shape[-1] != head.vocabulary:
        raise ValueError(f"{own.shape[-1]} logits for a vocabulary of {head.vocabulary}")
    if not own.isfinite().all():
        return 0.0  # weights that are broken are told of where they are used
    states = [_sampled(model, ids, shares), *_updated(model, ids)]
    if recomputing:
        with torch.random.fork_rng(devices=[ids.device] if ids.is_cuda else []):
            model.train()
            positions = torch.arange(TOKENS, device=ids.device)[None]
            states.append(run_backbone(model.base_model, ids, positions=positions, mask=None, cache=None)[0])
            model.eval()
    scale = (own - own.mean(dim=-1, keepdim=True)).norm().clamp(min=1e-6)
    hidden = torch.cat(states).flip(0)  # an update reads states in any order
    logits = (head.layer(hidden) if head.plain else head.own(hidden)).float().flip(0).view(len(states), *own.shape)
    return float((logits - own).flatten(1).norm(dim=1).max() / scale)


def _updated(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Hidden states (2, TOKENS, H) as an update computes them: two rows that share a prefix."""
    both, first = torch.arange(2, device=ids.device), torch.zeros(1, dtype=torch.long, device=ids.device)
    rows = SimpleNamespace(input_ids=ids.expand(2, -1))
    stages = [Stage(0, PREFIX, first, first, 0 * both), Stage(PREFIX, TOKENS, both, 0 * both, both)]
    states, place = hidden_states(model.base_model, rows, stages)
    return states[place]


def _sampled(model: PreTrainedModel, ids: Tensor, shares: bool) -> Tensor:
    """Hidden states (TOKENS, H) as a rollout computes them: a shared prefix, a chunk behind it, a single token."""
    cache = SlotCache(model.config, 1, TOKENS, dtype=model.dtype, device=ids.device)
    row, positions = torch.zeros(1, dtype=torch.long, device=ids.device), torch.arange(TOKENS, device=ids.device)[None]

    def run(rows: slice | Tensor, start: int, end: int) -> Tensor:
        where = positions[:, start:end]
        mask = cache.begin(rows, where, end)
        extra = {"slots": cache} if shares else {}
        return run_backbone(model.base_model, ids[:, start:end], positions=where, mask=mask, cache=cache, **extra)[0]

    with shared_attention(model.config, shares):
        parts = [run(row, 0, PREFIX)]
        if shares:
            cache.share(0, PREFIX)
        parts.append(run(row, PREFIX, TOKENS - 1))
        cache.set_filled(row, row + TOKENS - 1)
        parts.append(run(slice(0, 1), TOKENS - 1, TOKENS))
    return torch.cat(parts)
