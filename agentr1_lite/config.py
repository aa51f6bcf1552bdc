"""Every setting of a run: dataclasses that explain themselves, read from YAML.

Each field carries ``metadata`` with ``help`` (one sentence), ``min``, ``max``,
``unit`` and ``choices``; the command line, the widget panel and the error
messages are made from it, so a setting is described in one place.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import Field, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from agentr1_lite.settings import ConfigError, checked, dump_yaml, knob, parse_scalar, read_yaml, show

RECIPES = Path(__file__).parent / "recipes"
ALGORITHMS = (
    "PPO",
    "turn-level GAE",
    "n-step",
    "GRPO",
    "Dr. GRPO",
    "REINFORCE++",
    "REINFORCE++-baseline",
    "RLOO",
    "ReMax",
    "GiGPO",
)
OPTIMIZERS = ("auto", "adamw", "paged_adamw_8bit")
ENGINES = ("local", "vllm")
AGGREGATIONS = (
    "token-mean",
    "token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "constant",
)
# What other libraries call the same settings
SYNONYMS = {
    "learning_rate": "lr",
    "lora_r": "lora_rank",
    "num_generations": "group_size",
    "rollouts": "group_size",
    "num_train_epochs": "epochs",
    "beta": "kl_weight",
    "kl_coef": "kl_weight",
    "epsilon": "clip_low",
    "max_grad_norm": "grad_clip",
}


@dataclass
class ModelConfig:
    base_model: str = knob("atlas-tiny", "Policy to start from: a shipped name, a local folder or a hub id.")
    lora_rank: int = knob(0, "Rank of the LoRA adapters; 0 trains every weight.", min=0, max=512)
    lora_alpha: int | None = knob(None, "LoRA scale; none is twice the rank.", min=1, max=2048)
    quantization: str | None = knob(None, "Store the frozen base in 4 bits; needs LoRA.", choices=("nf4",))
    dtype: str = knob("auto", "Number type of the weights.", choices=("auto", "float32", "bfloat16", "float16"))
    device: str = knob("auto", "Where the model runs: auto, cpu, cuda, cuda:1 or mps.")
    gradient_checkpointing: bool = knob(False, "Recompute activations in the backward pass to save memory.")


@dataclass
class TaskConfig:
    name: str = knob("atlas", "Registered task to train on.")
    knobs: dict = knob({}, "Settings of the task itself, such as hops or world size.")


@dataclass
class EnvironmentConfig:
    call_format: str = knob("hermes", "How the policy writes a tool call.", choices=("hermes", "tag"))
    max_turns: int = knob(5, "Turns an episode may take.", min=1, max=100, unit="turns")
    max_turn_tokens: int = knob(1024, "Tokens the policy may write in one turn.", min=1, max=32768, unit="tokens")
    max_response_tokens: int = knob(8192, "Tokens after the prompt in one episode.", min=1, max=131072, unit="tokens")
    max_tool_tokens: int = knob(2048, "Tokens of one tool reply; the rest is cut.", min=16, max=32768, unit="tokens")
    tool_timeout: float = knob(10.0, "Deadline of every tool call.", min=0.01, max=3600, unit="seconds")
    parallel_calls: bool = knob(True, "Run every call of a turn; otherwise only the first.")
    top_k: int = knob(3, "Passages a search returns.", min=1, max=100, unit="passages")
    failing: float = knob(0.0, "Share of tool calls that fail at random.", min=0, max=1)
    noisy: float = knob(0.0, "Share of searches that return unrelated passages.", min=0, max=1)


@dataclass
class TrainingConfig:
    algorithm: str = knob("GRPO", "How rewards become advantages.", choices=ALGORITHMS)
    epochs: int = knob(1, "Passes over the training questions.", min=1, max=1000, unit="epochs")
    batch_size: int = knob(24, "Questions in one step.", min=1, max=4096, unit="questions")
    group_size: int = knob(8, "Rollouts of each question.", min=1, max=256, unit="rollouts")
    lr: float = knob(5e-4, "Learning rate of the policy.", min=0, max=0.1)
    critic_lr: float = knob(1e-3, "Learning rate of the critic (PPO).", min=0, max=0.1)
    optimizer: str = knob(
        "auto", "AdamW, or its paged 8-bit form; auto takes that under a 4-bit base on a GPU.", choices=OPTIMIZERS
    )
    weight_decay: float = knob(0.0, "Weight decay of AdamW.", min=0, max=1)
    warmup_steps: int = knob(0, "Steps over which the learning rate rises.", min=0, max=10000, unit="steps")
    critic_warmup: int = knob(5, "Steps that train the critic alone.", min=0, max=1000, unit="steps")
    temperature: float = knob(1.0, "Sampling temperature, also used in the update.", min=0.01, max=5)
    kl_weight: float = knob(0.001, "Weight of the KL divergence to the reference policy.", min=0, max=10)
    kl_estimator: str = knob(
        "k3", "Estimator of that divergence in the loss; the reward takes k1.", choices=("k1", "k2", "k3", "abs")
    )
    kl_in: str = knob(
        "auto",
        "Where the KL term enters: the reward, the loss, or the usual place of the algorithm.",
        choices=("auto", "reward", "loss"),
    )
    kl_target: float | None = knob(None, "KL that the weight is adapted to; none keeps it fixed.", min=0, max=100)
    clip_low: float = knob(0.2, "How far the ratio may fall below 1.", min=0, max=1)
    clip_high: float = knob(0.2, "How far the ratio may rise above 1.", min=0, max=10)
    dual_clip: float | None = knob(3.0, "Bound on the loss of a bad action; none switches it off.", min=1, max=100)
    ratio: str = knob("token", "Ratio per token, or per sequence as in GSPO.", choices=("token", "sequence"))
    loss: str = knob("ppo", "Policy loss.", choices=("ppo", "cispo", "reinforce"))
    aggregation: str = knob("token-mean", "How token losses become one number.", choices=AGGREGATIONS)
    gamma: float = knob(1.0, "Discount of later rewards.", min=0, max=1)
    lam: float = knob(1.0, "GAE's trade of bias (0) against variance (1).", min=0, max=1)
    n_step: int = knob(4, "Rewards summed before the critic takes over (n-step).", min=1, max=4096, unit="tokens")
    step_weight: float = knob(1.0, "Weight of the step advantage (GiGPO).", min=0, max=100)
    whiten: bool = knob(True, "Whiten advantages over action tokens where the algorithm does.")
    entropy_weight: float = knob(0.0, "Weight of the entropy bonus.", min=0, max=1)
    value_clip: float | None = knob(0.5, "Clip of a value update; none switches it off.", min=0, max=100)
    grad_clip: float = knob(1.0, "Largest gradient norm.", min=0, max=1000)
    updates_per_batch: int = knob(1, "Passes over the rollouts of a step.", min=1, max=64, unit="passes")
    mini_batches: int = knob(1, "Optimiser steps in one such pass.", min=1, max=64, unit="steps")
    max_rows: int = knob(256, "Episodes decoded at once; bounds the memory of their cache.", min=1, max=4096)
    micro_batch_tokens: int = knob(16384, "Tokens in one forward pass.", min=64, max=4194304, unit="tokens")
    loss_mask: bool = knob(True, "Train on the policy's own tokens alone; off shows what a wrong mask does.")
    advantage_mask: bool = knob(True, "Estimate over the policy's own tokens alone; off shows the difference.")
    resample_zero_variance: bool = knob(False, "Draw new questions where every rollout earned the same.")
    engine: str = knob("local", "What samples the rollouts; vllm needs the extra of that name.", choices=ENGINES)
    engine_memory: float = knob(0.4, "Share of the GPU's memory that vLLM takes.", min=0.05, max=0.95)
    importance_cap: float | None = knob(
        2.0, "Cap of the weights that correct vLLM's log-probs; none switches them off.", min=1, max=1000
    )
    seed: int = knob(0, "Seed of weights, questions and samples.", min=0, max=2**31 - 1)


@dataclass
class RewardConfig:
    task_success: float = knob(1.0, "For an exactly right answer.", min=0, max=100)
    f1: float = knob(0.0, "Times the token F1 of the answer.", min=0, max=100)
    cover_em: float = knob(0.0, "For an answer that contains the right one.", min=0, max=100)
    format: float = knob(0.0, "Times the format score, 0 to 1.", min=0, max=100)
    agent_r1: float = knob(0.0, "Times Agent-R1's reward: EM in the right format, else format - 1.", min=0, max=100)
    no_answer: float = knob(0.0, "For an episode without an answer (at most 0).", min=-100, max=0)
    cut: float = knob(0.0, "For an episode that a token or turn limit ended (at most 0).", min=-100, max=0)
    cost: float = knob(0.0, "Times the costs that tools report (at most 0).", min=-100, max=0)
    step_penalty: float = knob(0.0, "For every turn (at most 0).", min=-100, max=0)
    evidence: float = knob(0.0, "For each gold passage when it is first found.", min=0, max=100)
    tool_success: float = knob(0.0, "For each tool call that works.", min=0, max=100)
    tool_error: float = knob(0.0, "For each tool call that fails (at most 0).", min=-100, max=0)
    tool_reward: float = knob(0.0, "Times the rewards that tools report.", min=0, max=100)
    repeated_call: float = knob(0.0, "For each call made before, word for word (at most 0).", min=-100, max=0)
    shaping: float = knob(0.0, "Times the shaped reward r_final * shaping_gamma^(T-t).", min=0, max=100)
    shaping_gamma: float = knob(0.9, "Discount of the shaped reward.", min=0, max=1)
    kl_penalty: float = knob(0.0, "KL penalty per token inside the reward, beside kl_weight.", min=0, max=10)


@dataclass
class RLHFConfig:
    imitation_data: str | None = knob(None, "Demonstrations (JSON Lines); none takes the task's own.")
    logs_per_step: int = knob(
        32, "Logged trajectories in a step of phases 1 and 2.", min=1, max=4096, unit="trajectories"
    )
    imitation_epochs: int = knob(1, "Passes over the demonstrations; 0 skips phase 1.", min=0, max=1000, unit="epochs")
    imitation_lr: float = knob(1e-3, "Learning rate of phase 1.", min=0, max=0.1)
    offline_phase: bool = knob(True, "Learn from logged trajectories before going online.")
    offline_data: str = knob("data/offline_logs.json", "Logged trajectories for phase 2.")
    offline_algorithm: str = knob("awr", "Advantage-weighted learning or DPO.", choices=("awr", "dpo"))
    offline_epochs: int = knob(1, "Passes over the logs.", min=1, max=1000, unit="epochs")
    offline_lr: float = knob(5e-4, "Learning rate of phase 2.", min=0, max=0.1)
    offline_beta: float = knob(0.5, "Temperature of the weights (awr) or beta (dpo).", min=1e-4, max=100)
    online_rollouts: int | None = knob(
        None, "Rollouts of phase 3; none lets training.epochs decide.", min=0, max=10**9, unit="rollouts"
    )


@dataclass
class EvaluationConfig:
    split: str = knob("dev", "Questions to evaluate on.", choices=("train", "dev", "test"))
    questions: int = knob(200, "How many of them.", min=1, max=1000000, unit="questions")
    every: int = knob(0, "Steps between evaluations; 0 evaluates at the end only.", min=0, max=100000, unit="steps")
    temperature: float = knob(0.0, "Sampling temperature; 0 is greedy.", min=0, max=5)
    seed: int = knob(0, "Seed of the choice of questions (0: the first) and of samples.", min=0, max=2**31 - 1)


@dataclass
class RunConfig:
    output: str = knob("runs/latest", "Folder for metrics, trajectories and checkpoints.")
    save_every: int = knob(10, "Steps between checkpoints; 0 saves at the end only.", min=0, max=100000, unit="steps")
    keep: int = knob(2, "Checkpoints kept.", min=1, max=1000, unit="checkpoints")
    progress: bool = knob(True, "Show progress bars.")


@dataclass
class Config:
    """All settings of a run, in the sections of the YAML file."""

    model: ModelConfig = field(default_factory=ModelConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    rlhf: RLHFConfig = field(default_factory=RLHFConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    run: RunConfig = field(default_factory=RunConfig)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], source: str = "config") -> Config:
        """Defaults with ``data`` laid over them; raises ``ConfigError`` at the first wrong setting."""
        config = cls()
        config.update(data, source)
        config.check(source)
        return config

    def update(self, data: Any, source: str = "config", lines: Mapping[tuple, int] | None = None) -> None:
        """Lay the sections of ``data`` over these settings; ``lines`` says where each key stands in ``source``."""
        lines = lines or {}

        def where(*path: Any) -> str:
            line = lines.get(tuple(map(str, path)))
            return f"{source}, line {line}" if line else source

        if not isinstance(data, Mapping):
            what = "is empty" if data is None else f"holds {show(data)}"
            raise ConfigError(f"{source}: {what}; expected sections such as model: and training:")
        for section, values in data.items():
            _section(self, section, where(section))
            if not isinstance(values, Mapping | None):
                raise ConfigError(f"{where(section)}: {section} is {show(values)}; expected a mapping of settings")
            for name, value in (values or {}).items():
                self._assign(section, str(name), value, where(section, name))

    def set(self, key: str, value: Any, where: str = "config") -> None:
        """Set ``section.name``, or ``section.name.entry`` of a mapping, after checking the value."""
        section, _, rest = key.partition(".")
        name, _, entry = rest.partition(".")
        if entry and isinstance(getattr(_section(self, section, where), name, None), dict):
            value, rest = {**getattr(getattr(self, section), name), entry: value}, name
        self._assign(section, rest, value, where)

    def _assign(self, section: str, name: str, value: Any, where: str) -> None:
        part = _section(self, section, where)
        known = {item.name: item for item in fields(part)}
        if name not in known:
            raise ConfigError(f"{where}: unknown key {section}.{name}; {_suggest(section, name, list(known))}")
        setattr(part, name, checked(part, known[name], value, f"{where}: {section}.{name}"))

    def check(self, source: str = "config") -> None:
        """Check every value again (it may have been assigned), and those that must fit each other."""
        for key, _, value in list(self.walk()):
            self._assign(*key.split("."), value, source)
        if self.model.quantization and not self.model.lora_rank:
            raise ConfigError(
                f"{source}: model.quantization is {self.model.quantization!r} while model.lora_rank is 0; "
                "a base in 4 bits cannot be trained itself, so set lora_rank to 1 or more"
            )
        rollouts = self.training.batch_size * self.training.group_size
        if self.training.mini_batches > rollouts:
            raise ConfigError(
                f"{source}: training.mini_batches is {self.training.mini_batches}; "
                f"expected at most batch_size * group_size = {rollouts}"
            )

    def walk(self) -> Iterator[tuple[str, Field, Any]]:
        """Every setting as ``("training.lr", its field, its value)``, in the order of the file."""
        for section in fields(self):
            part = getattr(self, section.name)
            for item in fields(part):
                yield f"{section.name}.{item.name}", item, getattr(part, item.name)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def to_yaml(self) -> str:
        """The whole configuration as YAML; ``load_config`` gives back an equal one."""
        return dump_yaml(self.to_dict())

    def save(self, path: str | Path) -> None:
        """Write the YAML; a former file stays whole until the new one is."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(path.name + ".part")
        try:
            with part.open("w", encoding="utf-8", newline="\n") as file:
                file.write(self.to_yaml())
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)


def recipes() -> list[str]:
    """Names of the shipped configurations."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def load_config(path: str | Path, overrides: Iterable[str] = ()) -> Config:
    """Read a YAML file, or a recipe by name, and lay ``("training.lr=1e-4", …)`` over it.

    Raises:
        ConfigError: one sentence with the file, the line or key, the value and what is allowed.
    """
    source = str(path)
    file = RECIPES / f"{source}.yaml" if source in recipes() else Path(path)
    if not os.path.exists(file):
        raise ConfigError(f"{source}: no such file, and no recipe of that name; recipes are {', '.join(recipes())}")
    data, lines = read_yaml(file, source)
    overrides = [overrides] if isinstance(overrides, str) else list(overrides)
    config = Config()
    config.update(data, source, lines)
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals or "." not in key:
            raise ConfigError(f"override {text!r} is not section.key=value, as in training.lr=1e-4")
        config.set(key.strip(), parse_scalar(value.strip()), f"override {text!r}")
    config.check(f"{source} with overrides" if overrides else source)
    return config


def reward_spec(reward: RewardConfig) -> dict[str, Any]:
    """The parts an environment adds up, ``{"em": 1.0, "step_penalty": -0.01}``; zero weights are left out."""
    weights = asdict(reward)
    gamma = weights.pop("shaping_gamma")
    del weights["kl_penalty"]  # the trainer's: an environment knows no reference policy
    spec: dict[str, Any] = {"em": weights.pop("task_success"), **weights}
    spec = {name: weight for name, weight in spec.items() if weight}
    if "shaping" in spec:
        spec["shaping"] = {"weight": spec["shaping"], "gamma": gamma}
    return spec


def _section(config: Config, name: Any, where: str) -> Any:
    known = [item.name for item in fields(config)]
    if name in known:
        return getattr(config, name)
    everywhere = [key for key, _, _ in config.walk() if key.endswith(f".{name}")]
    close = everywhere or difflib.get_close_matches(str(name), known, 1)
    hint = f"did you mean {close[0]}?" if close else "expected one of " + ", ".join(known)
    raise ConfigError(f"{where}: unknown section {show(name)}; {hint}")


def _suggest(section: str, name: str, known: list[str]) -> str:
    """The same setting under its name here, the nearest key of the section, or all of them."""
    name = SYNONYMS.get(name.lower(), name.lower())
    elsewhere = [key for key, _, _ in Config().walk() if key.endswith(f".{name}")]
    close = [f"{section}.{key}" for key in difflib.get_close_matches(name, known, 1)]
    best = [f"{section}.{name}"] if name in known else elsewhere or close
    return f"did you mean {best[0]}?" if best else f"expected one of {', '.join(known)}"
