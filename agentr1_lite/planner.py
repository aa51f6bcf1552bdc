"""The memory plan: does a run fit, phase by phase, and what to change if it does not, before anything is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple

from agentr1_lite.advantages import find
from agentr1_lite.config import (
    Config,
    EnvironmentConfig,
    ModelConfig,
    TrainingConfig,
    load_config,
    recipes,
)
from agentr1_lite.footprint import GIB, PARTS, PHASES, PROMPT, Setting, phase_parts
from agentr1_lite.settings import ConfigError, parse_scalar
from agentr1_lite.shapes import SHAPES, Shape, shape_of

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class Change(NamedTuple):
    """Settings that bring the peak to ``peak_gib``, as the configuration calls them."""

    settings: dict[str, Any]
    peak_gib: float

    def __str__(self) -> str:
        said = " ".join(f"{name}={value}" for name, value in self.settings.items())
        return f"{said} brings the peak to {self.peak_gib:.1f} GiB"


@dataclass(frozen=True)
class Plan:
    """Memory by phase and part, in GiB, against ``memory_gib`` of the card or machine."""

    setting: Setting
    memory_gib: float

    @cached_property
    def phases(self) -> dict[str, dict[str, float]]:
        return {p: {k: v / GIB for k, v in phase_parts(self.setting, p).items()} for p in PHASES}

    @cached_property
    def totals(self) -> dict[str, float]:
        return {phase: sum(parts.values()) for phase, parts in self.phases.items()}

    @property
    def highest(self) -> str:
        """The phase that decides."""
        return max(PHASES, key=self.totals.__getitem__)

    @property
    def peak_gib(self) -> float:
        return self.totals[self.highest]

    @property
    def parts(self) -> dict[str, float]:
        """GiB of every part in the highest phase; they sum to ``peak_gib``."""
        return self.phases[self.highest]

    @property
    def fits(self) -> bool:
        return self.peak_gib <= self.memory_gib

    def verdict(self) -> str:
        s, where = self.setting, "GPU" if self.setting.device == "cuda" else "machine"
        said = f"{s.shape.name} needs {self.peak_gib:.1f} GiB in the {self.highest} phase"
        if self.fits:
            return f"It fits: {said} of a {where} with {self.memory_gib:.1f} GiB."
        return f"It does not fit: {said}, the {where} has {self.memory_gib:.1f} GiB."

    def advice(self) -> list[Change]:
        """What to change where it does not fit: each of them is enough, and the first costs least.

        Where none is enough alone, one entry with several together; empty where the model fits in no setting.
        """
        if self.fits:
            return []
        enough = [made for change in CHANGES if (made := _tried(self, change)).fits]
        enough = enough or [made for made in [_together(self)] if made.fits]
        return [Change(_differences(self.setting, made.setting), made.peak_gib) for made in enough]

    def sentences(self) -> list[str]:
        """The verdict, and what to change or how much more would fit."""
        said = [self.verdict()]
        if self.fits:
            found = {name: value for name, value in largest(self).items() if value < _most(self.setting, name)}
            most = ", ".join(f"{NAMES[name]} {value:,}" for name, value in found.items())
            return [
                *said,
                *([f"One at a time, the others as they are, this much would still fit: {most}."] * bool(most)),
            ]
        changes = self.advice()
        if changes:
            return [*said, *(f"{change}." for change in changes)]
        smaller = sorted((x for x in SHAPES.values() if x.parameters < self.setting.shape.parameters), key=_size)
        fitting = [x.name for x in smaller if _together(replace(self, setting=replace(self.setting, shape=x))).fits]
        take = f"take a smaller model, such as {fitting[-1]}" if fitting else "this memory is too small for any model"
        return [*said, f"No setting makes {self.setting.shape.name} fit; {take}."]

    def table(self) -> str:
        """The parts by phase as text."""
        lines = [f"{'GiB':<12}" + "".join(f"{phase:>10}" for phase in PHASES)]
        for part in PARTS:
            if any(self.phases[phase][part] for phase in PHASES):
                lines.append(f"{part:<12}" + "".join(f"{self.phases[phase][part]:>10.2f}" for phase in PHASES))
        return "\n".join([*lines, f"{'in all':<12}" + "".join(f"{self.totals[phase]:>10.2f}" for phase in PHASES)])

    def to_dict(self) -> dict[str, Any]:
        return {
            "model": self.setting.shape.name,
            "setting": asdict(self.setting),
            "memory_gib": self.memory_gib,
            "fits": self.fits,
            "peak_gib": self.peak_gib,
            "phase": self.highest,
            "phases": self.phases,
            "largest": largest(self),
            "advice": [{"settings": change.settings, "peak_gib": change.peak_gib} for change in self.advice()],
        }


def _size(shape: Shape) -> int:
    return shape.parameters


# How the configuration calls a field of a setting
NAMES = {
    "quantized": "model.quantization",
    "lora_rank": "model.lora_rank",
    "gradient_checkpointing": "model.gradient_checkpointing",
    "width": "model.dtype",
    "optimizer": "training.optimizer",
    "micro_batch_tokens": "training.micro_batch_tokens",
    "batch_size": "training.batch_size",
    "group_size": "training.group_size",
    "max_rows": "training.max_rows",
    "response_tokens": "environment.max_response_tokens",
}
# How it calls what `plan` is asked
ASKED = NAMES | {"dtype": NAMES["width"], "quantization": NAMES["quantized"]}
ASKED |= {name: f"training.{name}" for name in ("algorithm", "engine", "engine_memory")}
# Fields whose largest value that fits is looked for, and the bounds of the search
BOUNDS = {
    "micro_batch_tokens": (64, 2**22),
    "max_rows": (1, 4096),
    "group_size": (1, 256),
    "response_tokens": (1, 131072),
}
# What to try where a run does not fit, the cheapest in time and quality first; None stands for the largest that fits
CHANGES: tuple[dict[str, Any], ...] = (
    {"micro_batch_tokens": None},
    {"max_rows": None},
    {"gradient_checkpointing": True},
    {"lora_rank": 16, "width": 2},
    {"lora_rank": 16, "width": 2, "quantized": True, "optimizer": "paged_adamw_8bit"},
    {"response_tokens": None},
)
AFFECTED = {"micro_batch_tokens": ("log-prob", "update"), "max_rows": ("rollout",)}
LEAST = {"micro_batch_tokens": 64, "max_rows": 8, "response_tokens": 512}  # where no value is small enough by itself


def _tried(plan: Plan, change: dict[str, Any]) -> Plan:
    """The plan with a change."""
    setting, fixed = plan.setting, dict(change)
    if setting.device == "cpu":  # float32 is what it computes well, and it has no pages to move
        fixed = {name: value for name, value in fixed.items() if name not in ("width", "optimizer")}
    if setting.lora_rank:
        fixed.pop("lora_rank", None)
    for name, value in fixed.items():
        if value is None:
            most = largest_of(plan, name, AFFECTED.get(name, PHASES)) or LEAST[name]
            value = min(most - most % (64 if most > 64 and name != "max_rows" else 1), getattr(setting, name))
        setting = replace(setting, **{name: value})
    return replace(plan, setting=setting)


def _together(plan: Plan) -> Plan:
    """The plan with one change after the other until it fits: those of kind first, then those of size."""
    for change in sorted(CHANGES, key=lambda change: None in change.values()):
        if plan.fits:
            break
        made = _tried(plan, change)
        plan = made if any(made.totals[phase] < plan.totals[phase] for phase in PHASES) else plan
    return plan


def _differences(old: Setting, new: Setting) -> dict[str, Any]:
    changed = {name: getattr(new, name) for name in NAMES if getattr(new, name) != getattr(old, name)}
    words = {"quantized": "nf4", "width": "auto"}
    return {NAMES[name]: words.get(name, str(value).lower()) for name, value in changed.items()}


def _most(s: Setting, name: str) -> int:
    """Where a search ends: all episodes of a step, the model's context, or a number nobody needs."""
    high = BOUNDS[name][1]
    return {"response_tokens": s.shape.context - s.prompt_tokens, "max_rows": min(high, s.episodes)}.get(name, high)


def largest_of(plan: Plan, name: str, phases: Sequence[str] = PHASES) -> int:
    """The largest value of one field with which ``phases`` fit, the others as they are; 0 if none does."""

    def fits(value: int) -> bool:
        made = replace(plan, setting=replace(plan.setting, **{name: value}))
        return all(made.totals[phase] <= plan.memory_gib for phase in phases)

    low, high = BOUNDS[name][0], _most(plan.setting, name)
    if name == "group_size":  # a larger group shares more prompts, so that memory need not grow with it
        return next((value for value in range(high, 0, -1) if fits(value)), 0)
    if not fits(low):
        return 0
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def largest(plan: Plan) -> dict[str, int]:
    """The largest micro-batch, number of rows, group and response that fit, each with the others as they are."""
    return {name: largest_of(plan, name) for name in BOUNDS}


# What plans are made from


def plan(
    model: str | Path | Shape = "qwen2.5-3b",
    gpu_memory_gib: float | None = None,
    *,
    device: str = "auto",
    dtype: str = "auto",
    quantization: str | None = "nf4",
    lora_rank: int = 16,
    algorithm: str = "GRPO",
    gradient_checkpointing: bool = True,
    optimizer: str = "auto",
    micro_batch_tokens: int = 4096,
    batch_size: int = 8,
    group_size: int = 8,
    prompt_tokens: int = PROMPT,
    response_tokens: int = 2048,
    max_rows: int = 32,
    engine: str = "local",
    engine_memory: float = 0.4,
) -> Plan:
    """Does it fit, by phase and part? ``plan(...).fits``, ``.peak_gib``, ``.parts``, ``.advice()``.

    Args:
        model: a name of `shapes.SHAPES`, a folder or a hub id; only its ``config.json`` is read.
        gpu_memory_gib: of a card that need not be there (a T4 sold as 16 GB shows 14.7); the card that is there if not
            given, or the machine's memory. With ``device="cpu"`` it is the machine's memory.
        prompt_tokens, response_tokens: of the longest row, cut at the model's context.
        max_rows: episodes decoded at once. The others are settings of the same names, with the values that YAML takes.

    Raises:
        ValueError: one sentence on the number or name that makes no sense.
    """
    given, config = dict(locals()), Config()
    for name in ASKED.keys() & given.keys():
        config.set(ASKED[name], given[name], "plan")
    m, t, shape = config.model, config.training, shape_of(model)
    if type(prompt_tokens) is not int or prompt_tokens < 1:
        raise ConfigError(f"prompt_tokens is {prompt_tokens!r}; give a whole number of 1 or more")
    if prompt_tokens >= shape.context:
        raise ConfigError(
            f"prompts of {prompt_tokens} tokens leave no room in {shape.name}'s context of {shape.context}"
        )
    if m.quantization and not m.lora_rank:
        raise ConfigError("quantised weights cannot be trained themselves; set lora_rank to 1 or more")
    kind, memory, capability = _machine(device, gpu_memory_gib)
    if m.dtype == "bfloat16":  # whoever asks for it has a card with units for it
        capability = max(capability, 8.0)
    if m.dtype == "auto":
        m.dtype = "float32" if kind == "cpu" or not m.lora_rank else "bfloat16" if capability >= 8 else "float16"
    if t.optimizer == "auto":
        t.optimizer = "paged_adamw_8bit" if m.quantization and kind == "cuda" else "adamw"
    setting = Setting(
        shape,
        device=kind,
        width=BYTES[m.dtype],
        quantized=m.quantization is not None,
        lora_rank=m.lora_rank,
        critic="values" in signature(find(t.algorithm)).parameters,
        gradient_checkpointing=m.gradient_checkpointing,
        optimizer=t.optimizer,
        micro_batch_tokens=t.micro_batch_tokens,
        batch_size=t.batch_size,
        group_size=t.group_size,
        prompt_tokens=prompt_tokens,
        response_tokens=config.environment.max_response_tokens,
        max_rows=t.max_rows,
        flash=kind == "cpu" or capability >= 8,
        engine_memory=t.engine_memory * memory * GIB if t.engine == "vllm" else 0.0,
    )
    return Plan(setting, memory)


def _machine(device: str, memory: float | None) -> tuple[str, float, float]:
    """("cpu" or "cuda", GiB, compute capability); a card that is only named counts as a T4 below 20 GiB."""
    kind = str(device).lower().partition(":")[0]
    if kind not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"memory is known for devices cpu and cuda, not for {device!r}")
    if memory is not None and not (isinstance(memory, int | float) and 0 < memory <= 100_000):
        raise ConfigError(f"a memory of {memory!r} GiB makes no sense; give a number above 0, such as 16")
    if memory is not None and kind != "cpu":
        return "cuda", float(memory), 7.5 if memory < 20 else 8.0
    if memory is None and kind != "cpu":
        import torch

        if torch.cuda.is_available():
            card = torch.cuda.get_device_properties(0)
            return "cuda", card.total_memory / GIB, card.major + card.minor / 10
        if kind == "cuda":
            raise ConfigError("torch sees no GPU here; say how much memory the card has that you plan for")
    if memory is None:
        import psutil

        memory = psutil.virtual_memory().total / GIB
    return "cpu", float(memory), 0.0


def plan_for(config: Config, gpu_memory_gib: float | None = None, *, prompt_tokens: int = PROMPT) -> Plan:
    """The plan of a configuration; the length of prompts is the task's, so it is not among the settings."""
    from agentr1_lite.tasks import default_knobs

    model, training = config.model, config.training
    response = config.environment.max_response_tokens or default_knobs(config.task.name)["max_response_tokens"]
    same = ("algorithm", "optimizer", "micro_batch_tokens", "batch_size", "group_size", "max_rows")
    return plan(
        model.base_model,
        gpu_memory_gib,
        device="auto" if gpu_memory_gib else model.device,
        dtype=model.dtype,
        quantization=model.quantization,
        lora_rank=model.lora_rank,
        gradient_checkpointing=model.gradient_checkpointing,
        prompt_tokens=prompt_tokens,
        response_tokens=response,
        engine=training.engine,
        engine_memory=training.engine_memory,
        **{name: getattr(training, name) for name in same},
    )


def config_of(name: str, overrides: list[str]) -> Config:
    """A recipe or file of settings; the name of a model gives the settings of `plan`."""
    name = name.lower() if name.lower() in recipes() else name
    if name in recipes() or Path(name).is_file() and not name.endswith(".gguf"):
        return load_config(name, overrides)
    shape_of(name)
    config = Config(
        model=ModelConfig(name, lora_rank=16, quantization="nf4", gradient_checkpointing=True),
        training=TrainingConfig(micro_batch_tokens=4096, batch_size=8, max_rows=32),
        environment=EnvironmentConfig(max_response_tokens=2048),
    )
    for text in overrides:
        key, _, value = text.partition("=")
        config.set(key.strip(), parse_scalar(value.strip()), f"override {text!r}")
    config.check(name)
    return config
