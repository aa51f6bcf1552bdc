"""What a configuration risks on this machine, said before anything long starts."""

from __future__ import annotations

import torch

from agentr1_lite.config import Config, ConfigError
from agentr1_lite.loading import HUB_IDS
from agentr1_lite.planner import plan_for

# A public run with LoRA at 5e-5 fell from 57 % to 2.4 % (HelloAgents#107). Small bases bear more, and need it.
LORA_LR = 2e-5
SMALL_BASES = ("atlas-tiny", "atlas-agent", "smollm2-135m")
HIGHEST_LR = 1e-3


def refuse(config: Config) -> None:
    """Raise `ConfigError` for what would start and lead nowhere."""
    model, training = config.model, config.training
    if training.engine == "vllm":
        from agentr1_lite.bridges import vllm

        vllm.require()
    if model.quantization and model.device == "auto" and not torch.cuda.is_available():
        raise ConfigError(
            f"model.base_model {model.base_model!r} in 4 bits is made for a GPU and torch sees none; take the recipe "
            "smollm2-135m or atlas-tiny here, or set model.device=cpu to run it all the same, at minutes a step"
        )
    if model.dtype == "float16" and not model.lora_rank and (training.lr or config.rlhf.imitation_epochs):
        raise ConfigError(
            "model.dtype is float16 while model.lora_rank is 0: steps of trained weights vanish in its 11 bits; "
            "set lora_rank to 1 or more, or dtype to float32"
        )


def memory(config: Config) -> list[str]:
    """What the memory plan says against this run; ``ConfigError`` where the weights alone do not fit.

    A plan is off by a tenth or so, so a run that may just not fit is started, with a warning.
    """
    try:
        made = plan_for(config)
    except ValueError:  # a shape or device that no plan knows; loading will say what is wrong with it
        return []
    if made.fits:
        return []
    said = " ".join(made.sentences()[:2])
    if made.parts["weights"] > made.memory_gib:
        raise ConfigError(f"model.base_model: {said}")
    return [said]


def advice(config: Config) -> list[str]:
    """Sentences about settings that are known to end badly."""
    model, training, found = config.model, config.training, []
    if model.lora_rank and model.base_model not in SMALL_BASES and training.lr > LORA_LR:
        found.append(
            f"training.lr is {training.lr:g} with LoRA on {model.base_model}: a public run collapsed at 5e-5; "
            f"start from 1e-5, and watch reward and KL above {LORA_LR:g}"
        )
    if model.base_model in HUB_IDS and model.base_model not in SMALL_BASES and not torch.cuda.is_available():
        found.append(
            f"model.base_model {model.base_model} without a GPU takes hours a step; smollm2-135m is made for it"
        )
    if training.lr > HIGHEST_LR:
        found.append(
            f"training.lr is {training.lr:g}: every weight moves by about that much a step; try {HIGHEST_LR:g}"
        )
    return found
