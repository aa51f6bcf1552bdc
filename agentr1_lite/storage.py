"""Weights on disk: Hugging Face folders that appear whole or not at all."""

from __future__ import annotations

import copy
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from agentr1_lite.loading import FORMER, PolicyError, quiet, resolve

ADAPTER_FILE = "adapter_model.safetensors"
BASE_FOLDER = "base"  # inside an adapter folder: a base model that has no name
# What saves write: of models, adapters, critics and tokenizers of any kind
WRITTEN = ("*.safetensors", "*.safetensors.index.json", "*config.json", "tokenizer*.json", "*tokens*.json", "*.jinja")
WRITTEN += ("vocab.json", "merges.txt", "tokenizer.model", BASE_FOLDER, "README.md")


def write_tensors(file: Path, weights: Mapping[str, Tensor]) -> None:
    save_file({key: tensor.detach().contiguous() for key, tensor in weights.items()}, file)


def read_tensors(file: Path) -> dict[str, Tensor]:
    try:
        return load_file(file)
    except Exception as error:
        raise PolicyError(f"weights {file} could not be read ({error}); save the policy again") from error


def write_model(folder: Path, model: PreTrainedModel, dtype: torch.dtype | None) -> None:
    """The plain model, without adapters it may carry."""
    weights = {k.replace(".base_layer.", "."): v for k, v in model.state_dict().items() if ".lora_" not in k}
    if dtype is not None:
        weights = {key: tensor.to(dtype) for key, tensor in weights.items()}
    with quiet():
        model.save_pretrained(folder, state_dict=weights)


def write_merged(folder: Path, model: PreTrainedModel, adapter: str, dtype: torch.dtype) -> None:
    """The plain model with an adapter added to its weights, a 4-bit base dequantised."""
    weights = {k: v for k, v in model.state_dict().items() if not any(part in k for part in (".lora_", ".weight."))}
    for name, layer in model.named_modules():
        if hasattr(layer, "get_delta_weight"):
            weights[f"{name}.base_layer.weight"] = dense(layer.base_layer) + layer.get_delta_weight(adapter).float()
    once = {tensor.data_ptr(): key for key, tensor in reversed(weights.items())}  # a tied weight is written once
    weights = {key.replace(".base_layer.", "."): weights[key].to("cpu", dtype) for key in once.values()}
    config = copy.deepcopy(model.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.dtype = dtype
    with torch.device("meta"):
        plain = type(model)(config).to(dtype)
    plain.generation_config = model.generation_config
    with quiet():
        plain.save_pretrained(folder, state_dict=weights)


@torch.no_grad()
def dense(layer: nn.Linear) -> Tensor:
    """A linear layer's weight in float32, (out, in)."""
    state = getattr(layer.weight, "quant_state", None)
    if state is None:
        return layer.weight.float()
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(layer.weight.data, state).float()


def write_adapter(folder: Path, settings: Any, weights: Mapping[str, Tensor], base: str) -> None:
    """Adapter weights as ``peft`` reads them; ``base`` is the name or folder of the model below."""
    settings = type(settings)(**{**settings.to_dict(), "base_model_name_or_path": base, "inference_mode": True})
    settings.save_pretrained(folder)
    write_tensors(folder / ADAPTER_FILE, weights)


def check_target(path: Path) -> None:
    """A save replaces a folder as a whole, so it must be new, empty, or hold what a save wrote and nothing else."""
    if path.exists() and not path.is_dir():
        raise PolicyError(f"{str(path)!r} is a file; give save a folder")
    names = [entry.name for entry in path.iterdir()] if path.is_dir() else []
    others = [name for name in names if not any(fnmatch(name, pattern) for pattern in WRITTEN)]
    if others or names and not any(_describes_model(path / name) for name in ("config.json", "adapter_config.json")):
        held = f"holds {others[0]!r}" if others else "holds other files"
        raise PolicyError(f"folder {str(path)!r} {held}, which a save would remove; give a new folder")


def _describes_model(file: Path) -> bool:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and bool({"model_type", "peft_type"} & found.keys())


def lasting_name(name: str | Path) -> str:
    """How an adapter names its base: a folder by its full path, anything else as it is."""
    return str(Path(name).resolve()) if Path(name).is_dir() else str(name)


def find_base(folder: Path, base: str) -> tuple[str, str]:
    """Where an adapter's base model lies and its lasting name, "" if it lies inside the adapter's folder."""
    if base == BASE_FOLDER and (folder / BASE_FOLDER).is_dir():
        return str(folder / BASE_FOLDER), ""
    return resolve(base), base


def assign(weights: dict[str, nn.Parameter], saved: dict[str, Tensor], where: str) -> None:
    """Copy saved tensors into parameters; names and shapes must agree."""
    wrong = sorted(set(weights) ^ set(saved)) or sorted(k for k in weights if weights[k].shape != saved[k].shape)
    if wrong:
        raise PolicyError(
            f"{where}: weight {wrong[0]!r} does not fit this policy; "
            "load it with the model and lora_rank it was saved with"
        )
    with torch.no_grad():
        for key, parameter in weights.items():
            parameter.copy_(saved[key])


def usual_modes(folder: Path) -> None:
    """Give a temporary folder and its files the modes that others have: they are made for their owner alone."""
    mask = os.umask(0)
    os.umask(mask)
    for entry in (folder, *folder.rglob("*")):
        entry.chmod((0o777 if entry.is_dir() else 0o666) & ~mask)


def write_whole(path: Path, write: Callable[[Path], None]) -> Path:
    """Let ``write`` fill a folder that appears at ``path`` when it is complete; a former one stays until then."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        write(part)
        replace_folder(part, path)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return path


def replace_folder(new: Path, path: Path) -> None:
    usual_modes(new)
    former = path.with_name(path.name + FORMER)
    if path.exists():
        shutil.rmtree(former, ignore_errors=True)
        path.rename(former)
    try:
        new.rename(path)
    except BaseException:
        if former.exists() and not path.exists():
            former.rename(path)
        raise
    shutil.rmtree(former, ignore_errors=True)
