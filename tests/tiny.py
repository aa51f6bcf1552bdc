"""Small stand-ins for tests: a random Qwen2, a byte-level tokenizer with Qwen's control tokens, an echo environment."""

from __future__ import annotations

import functools
import multiprocessing
import os
import random
import socket
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from agentr1_lite.mdp import StopReason, Task, Turn, TurnKind
from agentr1_lite.policy import QwenPolicy

TEMPLATE = """{%- if tools %}{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- '# Tools\\n' }}{%- for tool in tools %}{{- (tool | tojson) + '\\n' }}{%- endfor %}{{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) or message.role == 'assistant' %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

TEXT = (
    "Who founded the city of Arda? search the river and the company; the answer is yes or no. "
    "<search>query</search> <answer>Oslo</answer> <tool_response> </tool_response> system user assistant tools "
) * 3


@functools.cache
def tokenizer() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(
        [TEXT],
        trainers.BpeTrainer(
            vocab_size=340,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
            show_progress=False,
        ),
    )
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    made.chat_template = TEMPLATE
    return made


def model(layers: int = 2, width: int = 64, heads: int = 4, kv_heads: int = 4, seed: int = 0) -> Qwen2ForCausalLM:
    """Random weights, larger than usual, so that the distributions are far from flat."""
    torch.manual_seed(seed)
    made = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer()),
            hidden_size=width,
            intermediate_size=2 * width,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            max_position_embeddings=1024,
            tie_word_embeddings=True,
            initializer_range=0.15,
            eos_token_id=tokenizer().eos_token_id,
            bos_token_id=None,
        )
    )
    made.generation_config.eos_token_id = [tokenizer().eos_token_id, tokenizer().pad_token_id]
    return made.eval()


def policy(**options: Any) -> QwenPolicy:
    shape = {k: options.pop(k) for k in ("layers", "width", "heads", "kv_heads") if k in options}
    return QwenPolicy.from_parts(model(seed=options.pop("model_seed", 0), **shape), tokenizer(), name="tiny", **options)


class Step(NamedTuple):
    observation: list[dict[str, str]]
    reward: float
    done: bool
    info: dict[str, Any]


class EchoEnv:
    """Answers every turn with words, of a number its seed decides, until ``max_turns`` or an <answer>."""

    stop_strings: tuple[str, ...] = ("</search>", "</answer>")
    tool_schemas: list[dict[str, Any]] = []
    tasks: list[Task] = []
    task: Task | None = None

    def __init__(self, max_turns=3, max_turn_tokens=12, max_response_tokens=300, max_tool_tokens=40) -> None:
        self.max_turns, self.max_turn_tokens = max_turns, max_turn_tokens
        self.max_response_tokens, self.max_tool_tokens = max_response_tokens, max_tool_tokens
        self.seen: list[tuple[str, str]] = []
        self.batches: list[int] = []

    def fork(self) -> EchoEnv:
        twin = EchoEnv(self.max_turns, self.max_turn_tokens, self.max_response_tokens, self.max_tool_tokens)
        twin.stop_strings, twin.batches = self.stop_strings, self.batches
        return twin

    def reset(self, task: Task, seed: int = 0) -> list[dict[str, str]]:
        self.random, self.count = random.Random(seed), 0
        return [{"role": "system", "content": "the answer is yes or no"}, {"role": "user", "content": task.question}]

    def step(self, text: str, finish_reason: str = "stop") -> Step:
        self.seen.append((text, finish_reason))
        self.count += 1
        answered = "</answer>" in text and finish_reason == "stop"
        done = answered or self.count >= self.max_turns
        kind = TurnKind.ANSWER if answered else TurnKind.TOOL_CALL
        turn = Turn(0, 0, 0, kind, text=text, finish_reason=finish_reason, anchor=f"a{self.count}", process_reward=0.25)
        if done:
            reason = StopReason.ANSWER if answered else StopReason.MAX_TURNS
            info = {"turn": turn, "stop_reason": reason, "answer": "yes" if answered else None}
            info |= {"outcome": 1.0, "reward_parts": {"em": 1.0}}
            return Step([], 1.25, True, info)
        words = " ".join(self.random.choice(TEXT.split()) for _ in range(self.random.randint(1, 12)))
        turn.observation = words
        return Step([{"role": "tool", "content": words}], 0.25, False, {"turn": turn, "stop_reason": None})

    @staticmethod
    def batch_step(envs: list[EchoEnv], texts: list[str], finish_reasons: list[str]) -> list[Step]:
        envs[0].batches.append(len(envs))
        return [env.step(*args) for env, *args in zip(envs, texts, finish_reasons, strict=True)]

    def finish(self, stop_reason: StopReason) -> tuple[float, dict[str, float]]:
        return -1.0, {"length": -1.0}


def tasks(count: int) -> list[Task]:
    questions = ["Who founded the city of Arda?", "search the river", "Is the company in the city, yes or no?"]
    return [Task(f"t{i}", questions[i % len(questions)] + " x" * (i // 3), ("yes",)) for i in range(count)]


class ScoredEnv(EchoEnv):
    """Pays for what a turn says, so that rollouts of one question earn differently."""

    def fork(self) -> ScoredEnv:
        twin = ScoredEnv(self.max_turns, self.max_turn_tokens, self.max_response_tokens, self.max_tool_tokens)
        twin.batches = self.batches
        return twin

    def step(self, text: str, finish_reason: str = "stop") -> Step:
        step = super().step(text, finish_reason)
        step.info["turn"].process_reward = 0.125 * (len(text) % 3)
        if step.done:
            step.info["outcome"] = 0.25 * (sum(map(ord, text)) % 5)
        return step


def run_cli(arguments: list[str], folder: str) -> None:
    """The command line in a process of its own; what it prints goes to ``out.txt`` and ``err.txt``."""
    os.chdir(folder)
    sys.stdout, sys.stderr = (open(name, "w", buffering=1, encoding="utf-8") for name in ("out.txt", "err.txt"))
    torch.set_num_threads(1)
    from agentr1_lite.__main__ import main

    sys.exit(main(arguments))


def start_cli(*arguments: str, folder: Path) -> multiprocessing.process.BaseProcess:
    """Start ``python -m agentr1_lite ARGUMENTS`` from a server that has imported it: a start costs no import."""
    process = processes().Process(target=run_cli, args=(list(arguments), str(folder)))
    process.start()
    return process


@functools.cache
def processes() -> multiprocessing.context.BaseContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tiny", "agentr1_lite.pipeline", "agentr1_lite.report"])
    return context


def cli(*arguments: str, folder: Path) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of the command line."""
    process = start_cli(*arguments, folder=folder)
    process.join(120)
    return process.exitcode, *((folder / name).read_text(encoding="utf-8") for name in ("out.txt", "err.txt"))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
