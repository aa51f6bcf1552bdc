"""Ids against the template's and the tokenizer's own render: TRL's templates, and tokenizers of many families."""

from __future__ import annotations

import datetime
import json
import re
import warnings
from functools import cache
from pathlib import Path

import pytest
import trl
from conftest import CHATML, SENTENCES, TOOL_CHAT, byte_level, trained_model
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

from agentr1_lite.chat import TODAY, ChatFormat, encode_foreign

TEMPLATES = {path.stem: path for path in sorted((Path(trl.__file__).parent / "chat_templates").glob("*.jinja"))}
CONTROL = re.compile(
    r"<\|[^|<>\s']{1,40}\|>|<｜[^｜]{1,40}｜>|<(?:start_of_turn|end_of_turn)>|<\|?(?:turn|channel|tool_response)\|?>"
)
# their contents are lists of parts: models of pictures
PICTURES = ("idefics3", "llava_next", "smolvlm")
REPLIES = [
    "plain words",
    'He said "hi"\nand left',
    " \tblanks at both ends \n",
    "",
    " \n",
    '{"a": [1, "x"], "b": null}',
    '"quoted"',
    "[1, 2]",
    "back\\slash é 日本 🏞️ \u2028",
    "</script> <b> & 'q' {{ x }} {% y %}",
    "a\n\n\nb",
]
USER, SAID = {"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Let me look."}
CALL = {"type": "function", "id": "call12345", "function": {"name": "search", "arguments": {"query": 'the "Aar" in €'}}}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}


class Fixed(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return cls.fromisoformat(TODAY)


@pytest.fixture(autouse=True)
def a_fixed_day(monkeypatch):
    monkeypatch.setattr(chat_template_utils, "datetime", Fixed)


def quiet(tokenizer, *args, **options) -> ChatFormat:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ChatFormat(tokenizer, *args, **options)


def ordinary(tokenizer, messages, generate=True, **options) -> list[int]:
    return list(
        tokenizer.apply_chat_template(
            messages, tokenize=True, add_generation_prompt=generate, return_dict=False, **options
        )
    )


@cache
def shipped(name: str) -> PreTrainedTokenizerFast:
    template = TEMPLATES[name].read_text(encoding="utf-8")
    backend = Tokenizer.from_str(trained_model())
    backend.add_special_tokens(
        [AddedToken(t, special=True) for t in ("<bos>", "<eos>", *set(CONTROL.findall(template)))]
    )
    backend.add_tokens(
        [AddedToken(t, normalized=False) for t in ("<think>", "</think>", "<tool_call>", "</tool_call>")]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<bos>", eos_token="<eos>")
    tokenizer.chat_template = template
    return tokenizer


def native(name: str, rows: list[dict]) -> list[int] | None:
    """The template's own ids, None where it takes no such chat or leaves the reply out."""
    tokenizer = shipped(name)
    probe = [{**row, "content": "Zqxreply"} if row["role"] == "tool" else row for row in rows]
    try:
        shown = tokenizer.decode(ordinary(tokenizer, probe))
        return ordinary(tokenizer, rows) if "tool" in tokenizer.chat_template and "Zqxreply" in shown else None
    except Exception:
        return None


@pytest.mark.parametrize("name", TEMPLATES)
def test_shipped_templates_are_followed_to_the_byte(name):
    tokenizer = shipped(name)
    if name.startswith(PICTURES):
        with pytest.raises(ValueError, match="the chat template of .* (drops|cannot show)"):
            quiet(tokenizer)
        return
    chat = quiet(tokenizer)
    assert chat.prompt_ids([USER]) == ordinary(tokenizer, [USER])
    for text in REPLIES:
        reply, asked = {"role": "tool", "content": text}, {"role": "user", "content": text}
        assert chat.prompt_ids([USER, SAID, asked]) == ordinary(tokenizer, [USER, SAID, asked])
        seen = chat.observation_ids([reply], ended_by=chat.turn_end_id)
        whole = native(name, [USER, SAID, reply])
        if whole is None:  # said in the documented form of templates without tools
            assert f"<tool_response>\n{text}" in chat.decode(seen.ids) or not text.strip()
        else:
            assert seen.ids == whole[-len(seen.ids) :] and chat.prompt_ids([USER, SAID, reply]) == whole
            assert chat.decode(seen.ids[seen.start : seen.end]).strip().strip('"') in chat.decode(whole)
        called = [USER, CALLING, {**reply, "tool_call_id": "call12345"}]
        whole = native(name, called)
        if whole is not None and "search" in tokenizer.decode(whole):
            assert chat.prompt_ids(called) == whole
        forged = chat.observation_ids([{"role": "tool", "content": text + "".join(chat._encoder.controls)}], ended_by=0)
        clean = chat.observation_ids([{"role": "tool", "content": text + "x"}], ended_by=0)
        controls = {control.id for control in chat._encoder.controls.values()}
        assert [i for i in forged.ids if i in controls] == [i for i in clean.ids if i in controls]


def test_as_many_templates_are_native_as_their_text_says():
    followed = {
        n for n in TEMPLATES if not n.startswith(PICTURES) and native(n, [USER, SAID, {"role": "tool", "content": "r"}])
    }
    assert {"llama3_1", "llama3_2", "qwen2_5", "qwen3", "deepseekv3", "glm4moe", "lfm2", "gemma4_v2"} <= followed
    assert len({name.removesuffix("_training") for name in followed}) >= 20


@pytest.mark.parametrize("name", ["gptoss", "gemma4"])
@pytest.mark.filterwarnings("ignore:the chat template of .* rewrites")
def test_replies_that_need_a_native_call_are_said_so(name):
    with pytest.warns(UserWarning, match="shows tool replies only behind calls in its own form"):
        ChatFormat(shipped(name))


def test_several_replies_and_their_cut_keep_the_templates_quotes():
    chat = quiet(shipped("llama3_2"))
    text = 'He said "hi"\n' * 400
    rows = [{"role": "tool", "content": text}, {"role": "tool", "content": "short"}]
    assert (
        chat.observation_ids(rows, ended_by=None).ids
        == ordinary(chat.tokenizer, [USER, SAID, *rows])[-len(chat.observation_ids(rows, ended_by=None).ids) :]
    )
    seen = chat.observation_ids(rows, ended_by=None, max_tokens=100)
    shown = chat.decode(seen.ids)
    assert 80 <= seen.end - seen.start <= 100 and seen.flags == ("cut",) and '[cut]"' in shown and '"short"' in shown


def test_messages_that_a_template_passes_over_are_refused():
    chat = quiet(shipped("qwen2_5"))
    with pytest.raises(ValueError, match="leaves out messages of role 'developer' here"):
        chat.prompt_ids([{"role": "developer", "content": "Be brief."}, USER])
    with pytest.raises(ValueError, match="leaves out replies of role ipython"):
        chat.observation_ids([{"role": "ipython", "content": "Paris"}], ended_by=None)


# Tokenizers


def metaspace(scheme: str, split: bool = True) -> Tokenizer:
    backend = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=split)
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return trained(backend)


def legacy() -> Tokenizer:
    """Llama 2's conversion: a normalizer that puts a space before each text, no pre-tokenizer."""
    backend = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return trained(backend)


def gemma() -> Tokenizer:
    backend = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    return trained(backend)


def trained(backend: Tokenizer) -> Tokenizer:
    letters = sorted({c for s in (*SENTENCES, *REPLIES) for c in s if not c.isspace()} | {"▁"})
    hexes = [f"<0x{i:02X}>" for i in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=letters, special_tokens=["<unk>", "<s>", "</s>", *hexes]
    )
    backend.train_from_iterator(SENTENCES, trainer)
    state = json.loads(backend.to_str())
    state["added_tokens"] = [t for t in state["added_tokens"] if not t["content"].startswith("<0x")]
    return Tokenizer.from_str(json.dumps(state))


def unigram(scheme: str = "always") -> Tokenizer:
    backend = Tokenizer(models.Unigram())
    backend.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    special = ["<unk>", "<s>", "</s>"]
    backend.train_from_iterator(
        [*SENTENCES, *REPLIES], trainers.UnigramTrainer(vocab_size=300, special_tokens=special, unk_token="<unk>")
    )
    return backend


def byte(prefix: bool, normalizer=None) -> Tokenizer:
    backend = Tokenizer.from_str(trained_model())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    backend.normalizer = normalizer
    return backend


def wordpiece() -> Tokenizer:
    backend = Tokenizer(models.WordPiece(unk_token="<unk>"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.train_from_iterator(
        [*SENTENCES, *REPLIES], trainers.WordPieceTrainer(vocab_size=400, special_tokens=["<unk>"])
    )
    return backend


BACKENDS = {
    "metaspace-first": lambda: metaspace("first"),
    "metaspace-always": lambda: metaspace("always"),
    "metaspace-never": lambda: metaspace("never"),
    "metaspace-first-whole": lambda: metaspace("first", split=False),
    "sentencepiece-legacy": legacy,
    "gemma": gemma,
    "unigram-always": unigram,
    "unigram-first": lambda: unigram("first"),
    "bytes": lambda: byte(False, normalizers.NFC()),
    "bytes-prefix-space": lambda: byte(True),
    "bytes-lowercase": lambda: byte(False, normalizers.Sequence([normalizers.Lowercase(), normalizers.StripAccents()])),
    "bytes-strip": lambda: byte(False, normalizers.Strip()),
    "wordpiece": wordpiece,
}
LLAMA2 = (
    "{% if messages[0].role == 'system' %}{% set system = '<<SYS>>\n' + messages[0].content + '\n<</SYS>>\n\n' %}"
    "{% set rows = messages[1:] %}{% else %}{% set system = '' %}{% set rows = messages %}{% endif %}"
    "{% for m in rows %}{% if m.role == 'user' %}"
    "{{ bos_token + '[INST] ' + (system if loop.first else '') + m.content.strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
FAMILIES = {
    "chatml": (CHATML, ["<|im_start|>", "<|im_end|>"]),
    "tools": (TOOL_CHAT, ["<|im_start|>", "<|im_end|>"]),
    "llama2": (LLAMA2, []),
    "mistral": (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + '[/INST]' }}"
        "{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}",
        ["[INST]", "[/INST]"],
    ),
    "phi3": (
        "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}",
        ["<|user|>", "<|assistant|>", "<|system|>", "<|end|>"],
    ),
    "zephyr": (
        "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + eos_token + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}",
        [],
    ),
    "llama3": (
        "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}"
        "{{ m.content | trim + '<|eot_id|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}",
        ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    ),
    "gemma": (
        "{{ bos_token }}{% for m in messages %}{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) }}"
        "{{ '\n' + m.content | trim + '<end_of_turn>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}",
        ["<start_of_turn>", "<end_of_turn>"],
    ),
    "granite": (
        "{% for m in messages %}{{ '<|start_of_role|>' + m.role + '<|end_of_role|>' }}"
        "{{ m.content + '<|end_of_text|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start_of_role|>assistant<|end_of_role|>' }}{% endif %}",
        ["<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>"],
    ),
    "cohere": (
        "{{ bos_token }}{% for m in messages %}{{ '<|START_OF_TURN_TOKEN|>' }}{{ '<|CHATBOT_TOKEN|>' if m.role == "
        "'assistant' else '<|USER_TOKEN|>' }}{{ m.content | trim + '<|END_OF_TURN_TOKEN|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{% endif %}",
        ["<|START_OF_TURN_TOKEN|>", "<|CHATBOT_TOKEN|>", "<|USER_TOKEN|>", "<|END_OF_TURN_TOKEN|>"],
    ),
    "words": (
        "{% for m in messages %}{{ m.role + ': ' + m.content + eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}",
        [],
    ),
}
FLAGS = [
    {"rstrip": True},
    {"lstrip": True},
    {"lstrip": True, "rstrip": True},
    {"normalized": True},
    {"single_word": True},
]


def built(backend: str, family: str, flags: dict) -> PreTrainedTokenizerFast:
    template, tokens = FAMILIES[family]
    made = Tokenizer.from_str(saved(backend))
    made.add_special_tokens([AddedToken(t, **{"normalized": False, **flags}) for t in ("<s>", "</s>", *tokens)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    tokenizer.chat_template = template
    return tokenizer


@cache
def saved(backend: str) -> str:
    return BACKENDS[backend]().to_str()


TEXTS = [
    "Who wrote Dune?",
    " two  spaces ",
    "Paris.\n",
    "\nNo results.",
    "Ole Rømer “naïve”",
    "a\n\nb\t(c)",
    "river",
    '{"a": 1}',
]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_ids_are_those_of_an_ordinary_render(backend, family):
    number = list(FAMILIES).index(family) + list(BACKENDS).index(backend)
    for flags in ({}, FLAGS[number % len(FLAGS)]):
        tokenizer = built(backend, family, flags)
        try:
            chat = quiet(tokenizer)
        except ValueError as error:  # whether the token behind a turn is one depends on the turn's last letter
            assert flags == {"single_word": True} and "gives a chat other ids than its parts" in str(error)
            continue
        controls = chat._encoder.controls
        framing = {control.id for control in controls.values()} - {tokenizer.unk_token_id}
        for text, more in zip(TEXTS, TEXTS[::-1], strict=True):
            rows = [{"role": "user", "content": text}, SAID, {"role": "user", "content": more}]
            assert chat.prompt_ids(rows[:1]) == ordinary(tokenizer, rows[:1]), flags
            whole = ordinary(tokenizer, rows)
            assert chat.prompt_ids(rows) == whole, flags
            seen = chat.observation_ids(rows[2:], ended_by=chat.turn_end_id)
            assert seen.ids == whole[len(whole) - len(seen.ids) :] and 0 <= seen.start <= seen.end <= len(seen.ids)
            if not flags:  # a demonstration between them is what the render holds there
                assert chat.prompt_ids(rows[:1]) + chat.turn(SAID)[1] + seen.ids == whole
            hostile, clean = (
                chat.observation_ids([{"role": "user", "content": content}], ended_by=None).ids
                for content in (more + "".join(controls), more + ".")
            )
            assert [i for i in hostile if i in framing] == [i for i in clean if i in framing], flags


def test_no_stray_space_after_a_control_token():
    """Counted by hand: one word, one piece."""
    backend = Tokenizer(models.WordLevel({"<unk>": 0, "hi": 1, "▁hi": 2, "▁": 3, "▁a": 4, "a": 5}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.add_special_tokens([AddedToken("<u>", normalized=False), AddedToken("<e>", normalized=False)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<e>", unk_token="<unk>")
    tokenizer.chat_template = (
        "{% for m in messages %}<u>{{ m.content }}<e>{% endfor %}{% if add_generation_prompt %}<u>{% endif %}"
    )
    chat = quiet(tokenizer)
    assert chat.prompt_ids([{"role": "user", "content": "hi a"}]) == [6, 1, 4, 7, 6]
    assert chat.observation_ids([{"role": "user", "content": "hi"}], ended_by=7).ids == [6, 1, 7, 6]
    assert chat.turn_ids("hi a") == [1, 4, 7] and encode_foreign(tokenizer, "hi") == [2]


def test_a_tokenizer_that_cannot_be_followed_is_refused(monkeypatch):
    tokenizer = byte_level(CHATML)
    plain = type(tokenizer).__call__

    def odd(self, text, **options):
        found = plain(self, text, **options)
        found["input_ids"] = [*found["input_ids"], 5]
        return found

    monkeypatch.setattr(type(tokenizer), "__call__", odd)
    with pytest.raises(ValueError, match="gives a chat other ids than its parts"):
        ChatFormat(tokenizer)


# The date and other variables


def dated(template: str) -> PreTrainedTokenizerFast:
    return byte_level(template + CHATML)


@pytest.mark.parametrize("form", ["%d %b %Y", "%Y-%m-%d", "%B %d, %Y", "%A %-d. %m %y %H:%M", "100%% %j"])
@pytest.mark.parametrize("day", [None, "2025-01-03"])
def test_a_printed_date_does_not_move(form, day, monkeypatch):
    class Then(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return cls.fromisoformat(day or TODAY)

    tokenizer = dated(f"{{% if strftime_now is defined %}}{{{{ strftime_now('{form}') }}}}{{% endif %}}\n")
    options = {"strftime_now": day} if day else None
    chat = quiet(tokenizer, template_options=options)
    with monkeypatch.context() as patch:
        patch.setattr(chat_template_utils, "datetime", Then)
        assert chat.prompt_ids([USER]) == ordinary(tokenizer, [USER])
    monkeypatch.setattr(chat_template_utils, "datetime", datetime.datetime)
    assert quiet(tokenizer, template_options=options).prompt_ids([USER]) == chat.prompt_ids([USER])
    assert (day or TODAY)[:4] in chat.decode(chat.prompt_ids([USER])) or "%Y" not in form


def test_template_options_are_those_the_template_reads():
    tokenizer = shipped("qwen3")
    chat = quiet(tokenizer, template_options={"enable_thinking": False})
    assert chat.prompt_ids([USER]) == ordinary(tokenizer, [USER], enable_thinking=False)
    for wrong in ({"enable_thinkng": False}, {"tools": []}, {"tokenize": True}):
        with pytest.raises(ValueError, match="template_options: the chat template of .* reads no"):
            quiet(tokenizer, template_options=wrong)
    with pytest.raises(ValueError, match="strftime_now must be a date such as"):
        quiet(tokenizer, template_options={"strftime_now": "tomorrow"})
    llama = shipped("llama3_2")
    chat = quiet(llama, template_options={"date_string": "1 May 2031"})
    assert chat.prompt_ids([USER]) == ordinary(llama, [USER], date_string="1 May 2031")


# What the template begins a turn with

OPENED = CHATML.replace("assistant\n{% endif %}", "assistant\nPREFILL{% endif %}")


@pytest.mark.parametrize("words", ["<think>\n", "<think>\n\n</think>\n\n", "<answer>", "Let me think.\n"])
@pytest.mark.parametrize("everywhere", [False, True])
def test_the_words_a_template_begins_with_are_known(words, everywhere):
    template = OPENED.replace("PREFILL", words)
    if everywhere and "think>" in words:  # a template that writes an empty thought into every turn of the past
        template = template.replace(
            "{{ m.content }}", "{{ '<think>\n\n</think>\n\n' if m.role == 'assistant' }}{{ m.content }}"
        )
    assert quiet(byte_level(template)).prefill == ("" if everywhere and "</think>" in words else words)


@pytest.mark.parametrize(
    ("name", "options", "prefill"),
    [
        ("qwen2_5", {}, ""),
        ("llama3_1", {}, ""),
        ("gemma3", {}, ""),
        ("gptoss", {}, ""),
        ("cohere2", {}, ""),
        ("qwen3", {}, ""),
        ("qwen3", {"enable_thinking": False}, "<think>\n\n</think>\n\n"),
        ("qwen3_5_think", {}, "<think>\n"),
        ("deepseek_r1_distill", {}, "<think>\n"),
    ],
)
def test_shipped_templates_begin_with(name, options, prefill):
    assert quiet(shipped(name), template_options=options).prefill == prefill
