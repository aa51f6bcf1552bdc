"""Models of true shapes with random weights: for measuring memory and speed where no weights can be fetched.

A 3B model in 4 bits fits where its full-precision weights do not, so it is built layer by layer: one linear layer
exists in full at a time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from agentr1_lite import loading
from agentr1_lite.loading import PolicyError
from agentr1_lite.policy import QwenPolicy
from agentr1_lite.shapes import Shape, shape_of


def random_model(
    shape: Shape | str,
    *,
    quantization: str | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> PreTrainedModel:
    """A causal language model whose weights are drawn as training starts from; norms are 1, biases 0.

    Args:
        quantization: "nf4" stores the linear layers as `loading.load_model` would: NF4, double quantisation.
        dtype: of everything else, and of what 4-bit weights are computed in.
    """
    shape, device = shape_of(shape), torch.device(device)
    loading.quantization_config(quantization, dtype)  # says what is wrong, if anything is
    if quantization and device.type == "cpu":
        loading.give_back_freed_memory()
    config = shape.config()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    random = torch.Generator(device).manual_seed(seed)

    def normal(size: torch.Size) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device).normal_(0.0, config.initializer_range, generator=random)

    for name, module in list(model.named_modules()):
        if quantization and isinstance(module, nn.Linear) and name != "lm_head":
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, _nf4(module, normal(module.weight.shape), dtype, device))
            continue
        for key, weight in list(module.named_parameters(recurse=False)):
            flat = torch.zeros if key == "bias" else torch.ones
            made = normal(weight.shape) if weight.dim() > 1 else flat(weight.shape, dtype=dtype, device=device)
            setattr(module, key, nn.Parameter(made))
    model.tie_weights()
    backbone = model.base_model
    backbone.rotary_emb = type(backbone.rotary_emb)(config=config).to(device)  # its frequencies are no weights
    if quantization:
        model.is_loaded_in_4bit = model.is_quantized = True  # what peft asks for
    return loading.without_dropout(model.eval())


def _nf4(linear: nn.Linear, weight: Tensor, dtype: torch.dtype, device: torch.device) -> nn.Module:
    import bitsandbytes as bnb

    made = bnb.nn.Linear4bit(
        linear.in_features, linear.out_features, False, dtype, compress_statistics=True, quant_type="nf4", device="meta"
    )
    made.weight = bnb.nn.Params4bit(weight, requires_grad=False, compress_statistics=True, quant_type="nf4").to(device)
    if linear.bias is not None:
        made.bias = nn.Parameter(torch.zeros(linear.out_features, dtype=dtype, device=device), requires_grad=False)
    made.support_avx512bf16_for_cpu = False  # see `loading.load_model`
    return made


def random_policy(
    shape: Shape | str,
    *,
    quantization: str | None = None,
    dtype: str | torch.dtype = "auto",
    device: torch.device | str = "auto",
    lora_rank: int = 0,
    seed: int = 0,
    tokenizer: PreTrainedTokenizerBase | None = None,
    gradient_checkpointing: bool = False,
) -> QwenPolicy:
    """A policy around `random_model`; the tokenizer is that of atlas-tiny if not given.

    The model samples ids that its tokenizer knows.
    """
    if quantization and not lora_rank:
        raise PolicyError("quantised weights cannot be trained themselves; set lora_rank, for example to 16")
    where = loading.pick_device(device)
    number = loading.pick_dtype(dtype, where, frozen_base=lora_rank > 0)
    model = random_model(shape, quantization=quantization, dtype=number, device=where, seed=seed)
    options: dict[str, Any] = {"lora_rank": lora_rank, "seed": seed, "gradient_checkpointing": gradient_checkpointing}
    tokenizer = tokenizer or loading.load_tokenizer(loading.resolve("atlas-tiny"))
    return QwenPolicy.from_parts(model, tokenizer, name=f"random {shape_of(shape).name}", **options)
