"""What a configuration risks on this machine, said before anything long starts."""

from __future__ import annotations

import torch

from agentr1_lite.config import Config, ConfigError
from agentr1_lite.loading import HUB_IDS
from agentr1_lite.planner import plan_for
from agentr1_lite.shapes import shape_of

SMALL = 200_000_000  # weights; smaller models bear higher learning rates, and need them
HIGHEST_LR = 1e-3  # for those
# Learning rates above which models that know something lost it: (with LoRA, on every weight). A public run with LoRA
# at 5e-5 fell from 57 % to 2.4 % (HelloAgents#107); Agent-R1 trains every weight at 1e-6.
HIGHEST = {"training.lr": (2e-5, 5e-6), "rlhf.imitation_lr": (3e-4, 3e-5), "rlhf.offline_lr": (1e-4, 1e-5)}


def refuse(config: Config, trains: bool = True) -> None:
    """Raise `ConfigError` for what would start and lead nowhere; ``trains``: more than an evaluation or a chat."""
    model, training = config.model, config.training
    if trains and training.engine == "vllm":
        from agentr1_lite.bridges import vllm

        vllm.require()
    if model.quantization and model.device == "auto" and not torch.cuda.is_available():
        raise ConfigError(
            f"model.base_model {model.base_model!r} in 4 bits is made for a GPU and torch sees none; take the recipe "
            "smollm2-135m or atlas-tiny here, or set model.device=cpu to run it all the same, at minutes a step"
        )
    if trains and model.dtype in ("float16", "bfloat16") and not model.lora_rank:
        raise ConfigError(
            f"model.dtype is {model.dtype} while model.lora_rank is 0: small steps of trained weights vanish in it; "
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
    if is_small(model.base_model):
        if training.lr > HIGHEST_LR:
            found.append(f"training.lr is {training.lr:g}: a weight moves by about that a step; try {HIGHEST_LR:g}")
        return found
    rates = {"training.lr": training.lr} if config.rlhf.online_rollouts != 0 else {}
    rates |= {"rlhf.imitation_lr": config.rlhf.imitation_lr} if config.rlhf.imitation_epochs else {}
    rates |= {"rlhf.offline_lr": config.rlhf.offline_lr} if config.rlhf.offline_phase else {}
    for name, rate in rates.items():
        most = HIGHEST[name][0 if model.lora_rank else 1]
        if rate > most:
            how = "with LoRA on" if model.lora_rank else "on every weight of"
            found.append(f"{name} is {rate:g} {how} {model.base_model}: runs have collapsed so; start at {most / 2:g}")
    if model.base_model.lower() in HUB_IDS and not torch.cuda.is_available():
        found.append(
            f"model.base_model {model.base_model} without a GPU takes hours a step; smollm2-135m is made for it"
        )
    return found


def is_small(base_model: str) -> bool:
    """Whether a base has few weights; of one whose shape cannot be read here nothing is said, as it will not load."""
    try:
        return shape_of(base_model).parameters < SMALL
    except ValueError:
        return True
