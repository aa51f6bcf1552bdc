"""TRL beside the kit: one ToolEnv in its GRPOTrainer, one set of trajectories in its SFT and DPO trainers.

``GRPOTrainer`` (1.16) takes every public function of the environment class for a tool and runs the calls itself. Where
it differs from the kit's own rollout, read from its source:

* A call that its parser cannot read ends the episode (the kit sends the error back to the model); a call of an unknown
  tool is answered by TRL; several calls of one turn run one after another, so each counts as a turn of the ToolEnv.
* The environment never sees the thought before a call, and the last turn only through a reward function.
* Tool text is encoded with special tokens on, and a tool reply that would pass the length limit is dropped.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any, Literal, Union

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from agentr1_lite.bridges.trl_offline import config, lent, run_dpo, run_sft, sft_dataset, silent
from agentr1_lite.mdp import StopReason, Task
from agentr1_lite.preferences import dpo_pairs, dpo_step
from agentr1_lite.toolcalls import ToolCall, render_tool_call

if TYPE_CHECKING:
    from agentr1_lite.env import ToolEnv
    from agentr1_lite.policy import QwenPolicy
    from agentr1_lite.tools import Tool

__all__ = [
    "dpo_pairs",
    "dpo_step",
    "environment_factory",
    "episode_reward",
    "grpo_dataset",
    "grpo_trainer",
    "lent",
    "response_template",
    "run_dpo",
    "run_sft",
    "sft_dataset",
]

_TYPES = {"string": str, "integer": int, "number": float, "boolean": bool, "array": list, "object": dict}
_TYPES |= {"null": type(None)}
_CONTROL = re.compile(r"<\|(\w+)\|>")
_RESERVED = ("reset", "get_reward")  # names TRL gives a meaning of their own


def _hint(schema: Mapping[str, Any]) -> Any:
    """The type hint that says what a JSON schema says, as far as hints can."""
    kinds = schema.get("type", [])
    forms = schema.get("anyOf") or ([{**schema, "type": kind} for kind in kinds] if isinstance(kinds, list) else [])
    if schema.get("enum"):
        return Literal[tuple(schema["enum"])]
    if forms:
        return Union[tuple(_hint(form) for form in forms)]
    if kinds == "array" and schema.get("items"):
        return list[_hint(schema["items"])]
    if kinds == "object" and isinstance(schema.get("additionalProperties"), Mapping):
        return dict[str, _hint(schema["additionalProperties"])]
    return _TYPES.get(kinds or "", Any)


def _tool_method(tool: Tool) -> Callable[..., str]:
    """A method with the signature and docstring from which TRL reads the tool's schema back."""
    if tool.name in _RESERVED or tool.name.startswith("_"):
        raise ValueError(f"tool {tool.name!r}: TRL reserves this name in an environment; rename the tool")

    def call(self, **arguments):
        return self._call(tool.name, arguments)

    properties = tool.parameters.get("properties", {})
    required = tool.parameters.get("required", ())
    hints = {name: _hint(schema) for name, schema in properties.items()}
    call.__name__ = call.__qualname__ = tool.name
    call.__annotations__ = hints
    call.__signature__ = inspect.Signature(
        [inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)]
        + [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                annotation=hint,
                default=inspect.Parameter.empty if name in required else properties[name].get("default"),
            )
            for name, hint in hints.items()
        ]
    )
    notes = {name: " ".join(str(properties[name].get("description", name)).split()) for name in hints}
    arguments = "\n".join(f"    {name}: {note}" for name, note in notes.items())
    call.__doc__ = f"{tool.description}\n\nArgs:\n{arguments}" if hints else tool.description
    return call


def environment_factory(env: ToolEnv, tasks: Iterable[Task], prefill: str = "") -> type:
    """The class whose instances TRL's ``environment_factory`` interface drives: ``reset(**row)`` and one method a tool.

    Every call becomes a turn of a fork of ``env``: schema checks, deadlines, cuts and process rewards are the kit's.
    TRL runs several calls of one turn one after another, so each counts as a turn here, and it ends the episode at
    the first turn without a call that it can parse. ``prefill`` is what the chat template begins a turn with.
    """
    by_id = {task.id: task for task in tasks}
    seeds = count()

    class Episode:
        def __init__(self) -> None:
            self._env: ToolEnv | None = None
            self._done = False

        def reset(self, **row: Any) -> None:
            """Start the episode of the row's ``task_id``; the prompt is the row's own."""
            self._env = env.fork()
            self._env.reset(by_id[row["task_id"]], seed=next(seeds))
            self._done = False

        def _step(self, text: str) -> str:
            step = self._env.step(text)
            self._done = step.done
            return "\n".join(message["content"] for message in step.observation)

        def _call(self, name: str, arguments: dict[str, Any]) -> str:
            if self._done:
                return "The episode is over."
            reply = self._step(render_tool_call(ToolCall(name, arguments), env.call_format))
            # TRL encodes tool text with special tokens on: a control string in it would become a control id
            return _CONTROL.sub(r"<| \1 |>", reply)

        def _score(self, completion: Sequence[dict[str, Any]]) -> float:
            """Total reward of the episode, after the last turn of ``completion`` (its messages) is handed over."""
            last = completion[-1] if completion else {}
            if not self._done and last.get("role") == "assistant" and not last.get("tool_calls"):
                self._step(prefill + (last.get("content") or ""))
            self._env.finish(StopReason.LENGTH)
            self._done = True
            return self._env.total_reward

    for tool in env.tools:
        setattr(Episode, tool.name, _tool_method(tool))
    return Episode


def episode_reward(completions: Sequence[Any], environments: Sequence[Any], **_: Any) -> list[float]:
    """Reward function for ``GRPOTrainer(reward_funcs=…)``: the finished episode's total reward."""
    return [episode._score(completion) for episode, completion in zip(environments, completions, strict=True)]


def grpo_dataset(env: ToolEnv, tasks: Iterable[Task]) -> Dataset:
    """One row a task: the environment's own first messages and the id by which ``reset`` finds the task."""
    return Dataset.from_list([{"prompt": env.fork().reset(task), "task_id": task.id} for task in tasks])


def response_template(env: ToolEnv) -> dict[str, Any]:
    """How TRL finds calls in a turn, for tokenizers whose chat template it does not know."""
    if env.call_format == "hermes":
        call = {"open": "<tool_call>", "close_pattern": r"</tool_call>\s*", "content": "json"}
        function: Any = "{content}"
    else:
        keys = {tool.text_parameter for tool in env.tools}
        if len(keys) != 1:
            raise ValueError(f"call format {env.call_format!r}: TRL needs one argument name for all tools, got {keys}")
        names = "|".join(re.escape(tool.name) for tool in env.tools)
        call = {"open_pattern": f"<(?P<name>{names})>", "close_pattern": rf"</({names})>\s*", "content": "text"}
        function = {"name": "{name}", "arguments": {keys.pop(): "{content}"}}
    return {
        "defaults": {"role": "assistant"},
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "tool_calls": call | {"repeats": True, "transform": {"type": "function", "function": function}},
            "content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"},
        },
    }


def grpo_trainer(policy: QwenPolicy, env: ToolEnv, tasks: Sequence[Task], folder: str, **arguments: Any) -> GRPOTrainer:
    """TRL's ``GRPOTrainer`` on the policy's model and the kit's environment; ``arguments`` are ``GRPOConfig`` fields.

    The trainer keeps its hands on the model: train with a policy of its own.
    """
    policy.tokenizer.response_template = response_template(env)
    options = {name: value for name, value in policy.template_options.items() if name != "strftime_now"}
    arguments = {"chat_template_kwargs": options or None, **arguments}
    trainer = silent(GRPOTrainer)(
        model=policy.causal,
        args=config(GRPOConfig, policy, folder, max_tool_calling_iterations=env.max_turns - 1, **arguments),
        train_dataset=grpo_dataset(env, tasks),
        reward_funcs=[episode_reward],
        environment_factory=environment_factory(env, tasks, policy.chat.prefill),
        processing_class=policy.tokenizer,
    )
    # TRL renders the prompt from Python signatures, which cannot say all a JSON schema can
    trainer._env_tools = {None: list(env.tool_schemas)}
    return trainer
