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
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from agentr1_lite.loading import FORMER, PolicyError, adapter_settings, quiet, reason, resolve

if TYPE_CHECKING:
    from peft import LoraConfig

CONFIG_FILE = "adapter_config.json"
# Fields of PEFT's LoraConfig that are kept whatever they say, or where they say one of these; of others the usual value
ANY = object()
_KEPT = """r lora_alpha use_rslora use_dora rank_pattern alpha_pattern target_modules exclude_modules
layers_to_transform layers_pattern fan_in_fan_out lora_dropout inference_mode base_model_name_or_path base
peft_type peft_version auto_mapping"""
FOLLOWED = dict.fromkeys(_KEPT.split(), ANY) | {
    "task_type": ("CAUSAL_LM",),
    "init_lora_weights": ("gaussian", "orthogonal"),  # PiSSA, OLoRA, LoftQ and others change the base's own weights
    "revision": ("main",),
}
PLACE = {"base_model_name_or_path", "inference_mode", "revision"}  # of a saved adapter, not of one that is trained
MERGE_FIRST = "merge the adapter into its base with peft (merge_and_unload) and load the merged model"
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
            weights[f"{name}.base_layer.weight"] = merged(layer, adapter)
        elif hasattr(getattr(layer, "weight", None), "quant_state") and not name.endswith(".base_layer"):
            weights[f"{name}.weight"] = dense(layer)
    once = {tensor.data_ptr(): key for key, tensor in reversed(weights.items())}  # a tied weight is written once
    weights = {key.replace(".base_layer.", "."): weights[key].to("cpu", dtype) for key in once.values()}
    config = copy.deepcopy(model.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.dtype = dtype
    if any(getattr(x, "base_layer", x) is not x for x in (model.get_input_embeddings(), model.get_output_embeddings())):
        config.tie_word_embeddings = False  # one of the two was adapted
    with torch.device("meta"):
        plain = type(model)(config).to(dtype)
    plain.generation_config = model.generation_config
    with quiet():
        plain.save_pretrained(folder, state_dict=weights)


@torch.no_grad()
def merged(layer: nn.Module, adapter: str) -> Tensor:
    """The weight of an adapted layer in float32, as ``peft`` merges it."""
    weight, variant = dense(layer.base_layer), getattr(layer, "lora_variant", {}).get(adapter)
    if variant is None:
        return weight + layer.get_delta_weight(adapter).float()
    return variant.merge_safe(layer, adapter, weight)  # DoRA: columns get a length of their own


@torch.no_grad()
def dense(layer: nn.Linear) -> Tensor:
    """A linear layer's weight in float32, (out, in)."""
    state = getattr(layer.weight, "quant_state", None)
    if state is None:
        return layer.weight.float()
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(layer.weight.data, state).float()


def adapter_config(folder: Path) -> LoraConfig:
    """PEFT's configuration of a saved LoRA adapter, every field as it was saved.

    Raises:
        PolicyError: a field asks for what actor, reference and critic on one base cannot keep: it trains or changes
            weights of the base itself, reads the prompt, or is not known to the installed ``peft``.
    """
    from peft import LoraConfig

    file, settings = folder / CONFIG_FILE, adapter_settings(str(folder))
    if settings.get("peft_type") != "LORA":
        kind = settings.get("peft_type")
        raise PolicyError(f"{file}: an adapter of peft_type {kind!r} cannot be trained here; give a LoRA adapter")
    usual = LoraConfig().to_dict()
    for name, value in settings.items():
        allowed = FOLLOWED.get(name)
        if allowed == ANY or value in (allowed or ()) or value == usual.get(name) or value in (None, False, [], {}):
            continue
        raise PolicyError(f"{file}: {name}={value!r:.60} is not supported; {MERGE_FIRST}")
    for name in ("r", "lora_alpha"):
        if not isinstance(settings.get(name), int | float) or not settings[name] > 0:
            raise PolicyError(f"{file}: {name}={settings.get(name)!r:.60} is no number above 0; save the adapter again")
    try:
        return LoraConfig(**{key: settings[key] for key in FOLLOWED.keys() & usual.keys() & settings.keys() - PLACE})
    except Exception as error:
        raise PolicyError(f"{file} is no LoRA configuration ({reason(error)}); save the adapter again") from error


def read_adapter(folder: Path, model: nn.Module, name: str) -> None:
    """Read an adapter's weights into the adapter ``name`` of a ``peft`` model: all of it and nothing else."""
    from peft import set_peft_model_state_dict
    from peft.utils import load_peft_weights

    file = next((folder / each for each in (ADAPTER_FILE, "adapter_model.bin") if (folder / each).is_file()), None)
    if file is None:
        raise PolicyError(f"adapter folder {str(folder)!r} holds no {ADAPTER_FILE}; save the adapter again")
    try:
        saved = load_peft_weights(str(folder), device="cpu")
    except Exception as error:
        raise PolicyError(f"weights {file} could not be read ({reason(error)}); save the adapter again") from error
    weights = dict(model.named_parameters(remove_duplicate=False))
    mine = {key for key in weights if f".{name}." in f"{key}."}
    for key in saved.keys() & weights.keys():  # peft writes the embedding beside its adapter
        if saved[key].shape == weights[key].shape and torch.equal(saved[key].to(weights[key]), weights[key]):
            del saved[key]
    try:
        result = set_peft_model_state_dict(model, saved, adapter_name=name)
    except (RuntimeError, KeyError, ValueError) as error:
        raise PolicyError(
            f"{file}: weights do not fit the base model ({reason(error)}); name the right base"
        ) from error
    wrong = sorted({*result.unexpected_keys, *(weights.keys() - set(result.missing_keys) ^ mine)})
    if wrong:
        raise PolicyError(f"{file}: weight {wrong[0]!r} does not fit the adapter's configuration; {MERGE_FIRST}")


def write_adapter(folder: Path, model: nn.Module, adapter: str, **fields: Any) -> None:
    """An adapter as ``peft`` saves it, with these fields of its configuration: its base, its dropout."""
    from peft import get_peft_model_state_dict

    settings = copy.copy(model.peft_config[adapter])
    vars(settings).update(fields, inference_mode=True)
    settings.save_pretrained(folder)
    write_tensors(
        folder / ADAPTER_FILE, get_peft_model_state_dict(model, adapter_name=adapter, save_embedding_layers=False)
    )


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
    found = resolve(base)
    if adapter_settings(found) is not None:
        raise PolicyError(
            f"adapter {str(folder)!r} names {base!r} as its base, which is an adapter itself; merge that one"
        )
    return found, base


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
