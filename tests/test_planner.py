"""The memory plan: counts by hand and by the real modules, what grows with what, search, advice, picture."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, MixtralConfig

from agentr1_lite import cache as cache_module
from agentr1_lite import engine, footprint, forward, planner, update
from agentr1_lite.__main__ import main
from agentr1_lite.cache import SlotCache
from agentr1_lite.config import ALGORITHMS, Config, load_config
from agentr1_lite.footprint import GIB, PHASES, Setting
from agentr1_lite.optimizers import adamw
from agentr1_lite.planner import plan
from agentr1_lite.random_model import random_model, random_policy
from agentr1_lite.shapes import SHAPES, Shape, shape_of
from agentr1_lite.views import plan_figure, plan_panel

TINY = Shape("tiny", 128, 2, 4, 2, 32, 320, 600, context=1024)

# Published: https://huggingface.co/Qwen model cards and safetensors headers
PARAMETERS = {
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "smollm2-135m": 134_515_008,
}


@pytest.mark.parametrize(("name", "count"), PARAMETERS.items())
def test_parameters_are_the_published_ones(name, count):
    assert SHAPES[name].parameters == count


@pytest.mark.parametrize("name", SHAPES)
def test_parameters_are_those_that_transformers_builds(name):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(SHAPES[name].config())
    assert sum(p.numel() for p in model.parameters()) == SHAPES[name].parameters
    assert sum(p.numel() for p in model.base_model.parameters()) == SHAPES[name].backbone_weights


def test_lora_weights_by_hand():
    # r (in + out): q and o 16 · 4096, k and v 16 · 2304, gate, up and down 16 · 13056; 36 layers
    assert SHAPES["qwen2.5-3b"].lora_weights(16) == 36 * 16 * (2 * 4096 + 2 * 2304 + 3 * 13056) == 29_933_568


def test_nf4_weights_by_hand():
    # 128 · 320 weights: half a byte each, a byte a block of 64, 4 bytes a 256 blocks
    assert footprint.NF4_BYTES * 128 * 320 == 20480 + 640 + 10
    shape = SHAPES["qwen2.5-3b"]
    half = plan(shape, 16).phases["rollout"]["weights"] * GIB
    outside = shape.parameters - shape.linear_weights
    assert half == pytest.approx(2 * outside + shape.linear_weights * 4.127 / 8, rel=1e-4)


@pytest.mark.parametrize(("quantized", "dtype"), [(True, "float32"), (True, "bfloat16"), (False, "bfloat16")])
def test_bytes_of_weights_and_adapters_are_those_of_a_real_policy(quantized, dtype):
    if quantized:
        pytest.importorskip("bitsandbytes", reason="install bitsandbytes, which stores weights in 4 bits")
    policy = random_policy(TINY, quantization="nf4" if quantized else None, dtype=dtype, device="cpu", lora_rank=8)
    policy.freeze_reference()
    policy.add_critic()
    s = Setting(TINY, device="cpu", width=planner.BYTES[dtype], quantized=quantized, lora_rank=8, critic=True)
    weights, lora = 0, 0
    for name, p in policy.model.named_parameters():
        if "lora_" in name:
            lora += p.nbytes
            continue
        weights += p.nbytes
        if quantized and hasattr(p, "quant_state"):
            weights += p.quant_state.absmax.nbytes + p.quant_state.state2.absmax.nbytes
    assert lora == footprint.adapters(s)
    assert weights == pytest.approx(footprint.weights(s), rel=1e-3)  # scales of a block that is not full
    assert [sum(p.numel() for p in policy.actor_parameters())] == footprint.trained(s)[:1]


def test_optimizer_states_are_those_of_adamw():
    weight = torch.nn.Parameter(torch.randn(64, 8))
    weight.grad = torch.ones_like(weight)
    made = adamw([weight])
    made.step()
    states = sum(t.nbytes for t in made.state[weight].values() if t.dim())
    assert states == 8 * weight.numel()
    s = Setting(TINY, lora_rank=8, optimizer="adamw")
    assert footprint.optimizer(s) == 8 * TINY.lora_weights(8)


def kept_bytes(shape: Shape, rank: int, dtype: str) -> int:
    """Bytes of the tensors that autograd saves in a pass over 2 × 48 tokens, the weights left out."""
    policy = random_policy(shape, dtype=dtype, device="cpu", lora_rank=rank)
    ids = torch.arange(96).view(2, 48) % shape.vocab
    mask = torch.zeros(2, 48, dtype=torch.bool)
    mask[:, 1:] = True
    rows = SimpleNamespace(input_ids=ids, action_mask=mask, lengths=torch.tensor([48, 48]))
    own = {p.untyped_storage().data_ptr() for p in policy.model.parameters()}
    found: dict[int, torch.UntypedStorage] = {}

    def note(t: torch.Tensor) -> torch.Tensor:
        found.setdefault(t.untyped_storage().data_ptr(), t.untyped_storage())
        return t

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        kept = policy.log_probs(rows, share_prompt=False).logprobs
    assert kept.requires_grad
    return sum(storage.nbytes() for at, storage in found.items() if at not in own)


@pytest.mark.parametrize(("rank", "dtype"), [(0, "float32"), (8, "float32"), (8, "bfloat16")])
def test_activations_of_a_layer_are_what_autograd_keeps(rank, dtype):
    layer = (kept_bytes(replace(TINY, layers=4), rank, dtype) - kept_bytes(TINY, rank, dtype)) / 2
    s = Setting(TINY, device="cpu", width=planner.BYTES[dtype], quantized=False, lora_rank=rank)
    assert layer / 96 == footprint.kept_per_token(s, shared=False)


@pytest.mark.parametrize("prompt", [100, 800, 900])
def test_slots_grow_as_the_cache_does(prompt):
    s = Setting(TINY, device="cuda", prompt_tokens=prompt, response_tokens=100)
    first = min(TINY.context, 512 + 100)
    cache = SlotCache(TINY.config(), 2, first, dtype=torch.float16, device=torch.device("meta"))
    capacity = highest = cache.capacity
    for tokens in range(s.prompt_tokens, s.tokens + 1):
        cache.reserve(tokens)
        if cache.capacity != capacity:
            capacity, highest = cache.capacity, capacity + cache.capacity
    assert footprint.slots(s) == (capacity, highest)
    assert footprint.slots(replace(s, device="cpu")) == (s.tokens, s.tokens)


def test_what_is_repeated_here_is_as_it_is_there():
    assert (footprint.CHUNK, footprint.KEEP) == (forward.CHUNK_ELEMENTS, forward.KEEP_ELEMENTS)
    assert (footprint.FEED, footprint.FIRST, footprint.ODD) == (
        engine.FEED_TOKENS,
        cache_module.FIRST_SLOTS,
        cache_module.ODD_SLOTS,
    )


def test_parts_sum_to_the_peak():
    made = plan("qwen2.5-3b", 16, algorithm="PPO")
    assert sum(made.parts.values()) == pytest.approx(made.peak_gib) == pytest.approx(max(made.totals.values()))
    assert set(made.phases) == set(PHASES)
    # three adapters of 29,933,568 float32 weights
    assert made.parts["adapters"] == pytest.approx(3 * 4 * 29_933_568 / GIB)
    # 4 bits are not for the CPU's dtype alone: the same plan in float32 is larger
    assert plan("qwen2.5-3b", 16, algorithm="PPO", dtype="float32").peak_gib > made.peak_gib


def test_full_training_counts_copies_and_every_gradient():
    made = plan("qwen2.5-0.5b", 80, lora_rank=0, quantization=None, algorithm="PPO")
    parts, count = made.phases["update"], 494_032_768
    assert parts["weights"] == pytest.approx(3 * 4 * count / GIB)  # actor, reference, critic; the head is tied
    assert parts["optimiser"] == pytest.approx(2 * 8 * count / GIB)
    assert parts["gradients"] >= 4 * count / GIB


GROWING = {
    "micro_batch_tokens": st.integers(64, 32768),
    "max_rows": st.integers(1, 256),
    "batch_size": st.integers(1, 64),
    "lora_rank": st.integers(1, 256),
    "response_tokens": st.integers(64, 8192),
}


@settings(max_examples=150, deadline=None)
@given(st.data(), st.sampled_from(sorted(GROWING)), st.sampled_from(["qwen2.5-3b", "smollm2-135m"]), st.booleans())
def test_more_never_takes_less(data, name, model, checkpointing):
    low, high = sorted((data.draw(GROWING[name]), data.draw(GROWING[name])))
    common = {"gradient_checkpointing": checkpointing, "batch_size": 16}
    small, large = (plan(model, 24, **common | {name: value}) for value in (low, high))
    # longer responses put more of a micro-batch's budget into actions, whose logits are then recomputed, not kept
    phases = PHASES[:2] if name == "response_tokens" else PHASES
    assert all(large.totals[phase] >= small.totals[phase] - 1e-9 for phase in phases)


@pytest.mark.parametrize("name", planner.BOUNDS)
@pytest.mark.parametrize("memory", [6, 8])
def test_the_largest_fits_and_one_more_does_not(name, memory):
    made = plan("qwen2.5-3b", memory, max_rows=16, batch_size=64)
    most = planner.largest(made)[name]
    low, high = planner.BOUNDS[name]

    def fits(value: int) -> bool:
        return replace(made, setting=replace(made.setting, **{name: value})).fits

    assert low <= most <= high or (most == 0 and not fits(low))
    assert not most or fits(most)
    assert most in (0, high) or not fits(most + 1)


@pytest.mark.parametrize("override", ["training.algorithm=GRPO", "training.algorithm=PPO"])
def test_the_recipe_fits_a_t4(override):
    made = planner.plan_for(load_config("qwen2.5-3b", [override]), 14.7)  # what a T4 of 16 GB shows
    assert made.fits
    assert not made.setting.flash
    assert made.setting.width == 2


@pytest.mark.parametrize("memory", [10, 16, 24, 40])
@pytest.mark.parametrize("wrong", [["model.lora_rank=0", "model.quantization=none"], ["training.max_rows=256"]])
def test_advice_that_is_followed_makes_it_fit(memory, wrong):
    wrong = [*wrong, "training.batch_size=64", "model.gradient_checkpointing=false"]
    made = planner.plan_for(planner.config_of("qwen2.5-7b", wrong), memory)
    assert not made.fits
    assert made.advice()
    for change in made.advice():
        follow = [*wrong, *(f"{key}={value}" for key, value in change.settings.items())]
        mended = planner.plan_for(planner.config_of("qwen2.5-7b", follow), memory)
        assert mended.fits
        assert mended.peak_gib == pytest.approx(change.peak_gib, rel=1e-6)


def test_a_model_too_big_at_any_setting():
    made = plan("qwen2.5-7b", 3)
    assert made.advice() == []
    assert made.sentences()[-1].startswith("No setting makes qwen2.5-7b fit; take a smaller model, such as qwen2.5-")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"gpu_memory_gib": -1}, "memory of -1 GiB"),
        ({"gpu_memory_gib": float("nan")}, "memory of nan"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"micro_batch_tokens": 2.5}, "micro_batch_tokens is 2.5"),
        ({"lora_rank": -4}, "lora_rank is -4"),
        ({"lora_rank": 0}, "cannot be trained"),
        ({"dtype": "int3"}, "dtype is 'int3'"),
        ({"algorithm": "SFT"}, "algorithm is 'SFT'"),
        ({"device": "tpu"}, "not for 'tpu'"),
        ({"prompt_tokens": 40_000}, "no room"),
        ({"model": "qwen9"}, "no folder and no known name"),
    ],
)
def test_bad_input_is_one_sentence(options, said):
    with pytest.raises(ValueError, match=re.escape(said)) as caught:
        plan(**{"gpu_memory_gib": 16} | options)
    assert "\n" not in str(caught.value)


def test_shape_of_a_folder_is_read_from_its_config(tmp_path):
    TINY.config().save_pretrained(tmp_path / "own")
    assert shape_of(tmp_path / "own") == replace(TINY, name=str(tmp_path / "own"))
    MixtralConfig(num_hidden_layers=1).save_pretrained(tmp_path / "experts")
    with pytest.raises(ValueError, match="is a 'mixtral'"):
        shape_of(tmp_path / "experts")


def test_the_command_says_it_in_its_exit_code(capsys):
    assert main(["plan", "qwen2.5-3b", "--gpu", "16", "training.algorithm=PPO"]) == 0
    assert "It fits: qwen2.5-3b needs" in capsys.readouterr().out
    assert main(["plan", "qwen2.5-3b", "--gpu", "6", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["fits"]
    assert found["peak_gib"] > 6 > found["advice"][0]["peak_gib"]
    assert main(["plan", "qwen9", "--gpu", "6"]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_random_model_is_stored_and_computes_as_a_loaded_one():
    pytest.importorskip("bitsandbytes", reason="install bitsandbytes, which stores weights in 4 bits")
    plain, small = random_model(TINY, seed=3), random_model(TINY, seed=3, quantization="nf4")
    ids = torch.arange(40)[None]
    with torch.no_grad():
        a, b = plain(ids).logits, small(ids).logits
    assert plain.lm_head.weight is plain.model.embed_tokens.weight
    assert 0 < (a - b).norm() < 0.3 * a.norm()  # 4 bits round, and nothing else differs
    state = small.model.layers[0].mlp.up_proj.weight.quant_state
    assert (state.quant_type, state.blocksize, state.nested) == ("nf4", 64, True)


def test_ids_beyond_the_tokenizer_decode_to_nothing():
    policy = random_policy(replace(TINY, vocab=4096), device="cpu")
    known = policy.tokenizer.encode("Oslo")
    assert policy.chat.decode([4000, *known, 4095]) == "Oslo"


def test_figure_draws_every_phase_to_scale():
    made = plan("qwen2.5-3b", 8, max_rows=64)
    html = plan_figure(made)
    shape = r"<title>([\w ]+): ([\d.]+) GiB</title>\s*<path d=\"M ([\d.]+) ([\d.]+) \nL ([\d.]+)"
    bars = [(name, *map(float, numbers)) for name, *numbers in re.findall(shape, html)]
    left = min(x for _, _, x, _, _ in bars)
    ends = dict.fromkeys(sorted(y for *_, y, _ in bars), left)
    for *_, x, y, end in sorted(bars, key=lambda bar: bar[2]):
        assert x == pytest.approx(ends[y], abs=0.1)  # no gap between the parts of a phase
        ends[y] = end
    assert len(ends) == len(made.totals)
    lengths, totals = [end - left for end in ends.values()], list(made.totals.values())
    assert lengths == pytest.approx([t / totals[0] * lengths[0] for t in totals], abs=1)
    line = float(
        re.search(r'<path d="M ([\d.]+) [\d.]+ \nL \1 [\d.]+ \n"[^>]*stroke-dasharray: [^;]*; stroke-dashoffset', html)[
            1
        ]
    )
    assert (line - left) / lengths[0] == pytest.approx(8 / totals[0], abs=0.01)
    assert "It does not fit" in html
    width = float(re.search(r'viewBox="0 0 ([\d.]+)', html)[1])
    labels = re.findall(
        r'<text style="font-size: (\d+)px;[^"]*text-anchor: (\w+)[^"]*" x="([\d.]+)"[^>]*>(.*?)</text>', html
    )
    assert len(labels) > 10
    for size, anchor, x, text in labels:  # nothing is cut at the right: 0.6 em a letter
        reach = {"start": 1.0, "middle": 0.5, "end": 0.0}[anchor] * 0.6 * float(size) * len(text)
        assert float(x) + reach <= width


def test_panel_redraws_with_its_controls():
    made = plan_panel(static=True, gpu_memory_gib=8)
    assert "GPU: 8.0 GiB" in made.html
    made.set("model", "qwen2.5-0.5b")
    made.set("lora_rank", 0)  # full training in float32
    assert "qwen2.5-0.5b needs" in made.picture.html
    assert "It does not fit" in made.picture.html


@pytest.mark.parametrize(
    "change, said",
    [
        ({"hidden_size": 0}, "hidden_size is 0"),
        ({"num_attention_heads": 0}, "could not be read|num_attention_heads is 0"),
        ({"quantization_config": {"quant_method": "gptq"}}, "stored in gptq"),
        ({"model_type": "mamba"}, "mamba"),
    ],
)
def test_configurations_that_cannot_be_planned(tmp_path, change, said):
    config = {"model_type": "qwen2", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config |= {"num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 100, **change}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=said) as error:
        plan(tmp_path, 16)
    assert "\n" not in str(error.value)


def test_an_adapter_of_itself_and_files_of_weights(tmp_path):
    settings = {"base_model_name_or_path": str(tmp_path), "r": 4, "lora_alpha": 8}
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match="is an adapter itself"):
        plan(tmp_path, 16)
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    with pytest.raises(ValueError, match="GGUF"):
        planner.config_of(str(tmp_path / "x.gguf"), [])


@pytest.mark.parametrize(
    "wrong", [{"engine": "foo"}, {"engine_memory": -1}, {"engine_memory": "x"}, {"gpu_memory_gib": 1e300}]
)
def test_odd_numbers_are_told(wrong):
    with pytest.raises(ValueError):
        plan("qwen2.5-3b", **{"gpu_memory_gib": 16, **wrong})


@pytest.mark.parametrize(
    ("spelt", "meant"),
    [
        ({"algorithm": "ppo"}, {"algorithm": "PPO"}),
        ({"algorithm": "Turn-Level_GAE"}, {"algorithm": "turn-level GAE"}),
        ({"algorithm": "grpo"}, {"algorithm": "GRPO"}),
        ({"algorithm": "reinforce_pp"}, {"algorithm": "REINFORCE++"}),
        ({"quantization": "NF4"}, {"quantization": "nf4"}),
        ({"quantization": "None"}, {"quantization": None}),
        ({"dtype": "BFloat16"}, {"dtype": "bfloat16"}),
        ({"optimizer": "AdamW"}, {"optimizer": "adamw"}),
        ({"optimizer": "Paged-AdamW-8bit"}, {"optimizer": "paged_adamw_8bit"}),
        ({"engine": "VLLM"}, {"engine": "vllm"}),
        ({"model": "Qwen2.5-3B"}, {"model": "qwen2.5-3b"}),
        ({"model": "qwen/qwen2.5-3b-instruct"}, {"model": "qwen2.5-3b"}),
        ({"device": "CPU"}, {"device": "cpu"}),
    ],
)
def test_names_are_read_as_yaml_reads_them(spelt, meant):
    common = {"gpu_memory_gib": 16}
    made = plan(**common | spelt)
    assert made == plan(**common | meant)
    if "model" not in spelt and "device" not in spelt:
        (name, value), (_, wanted) = *spelt.items(), *meant.items()
        config = Config()
        config.set(planner.ASKED[name], value)
        config.set("model.lora_rank", 16)
        assert {key: x for key, _, x in config.walk()}[planner.ASKED[name]] == wanted


def test_a_critic_is_planned_for_whoever_reads_values():
    critics = {name for name in ALGORITHMS if plan("qwen2.5-3b", 16, algorithm=name).setting.critic}
    assert critics == {name for name in ALGORITHMS if update.needs_critic(name)} == {"PPO", "turn-level GAE", "n-step"}


def test_the_command_finds_a_recipe_in_any_case(capsys):
    codes = [main(["plan", name, "--gpu", "16", "--json"]) for name in ("qwen2.5-3b", "Qwen2.5-3B")]
    first, second = capsys.readouterr().out.splitlines()
    assert first == second and codes == [0, 0]


def test_bfloat16_means_a_card_that_has_it():
    assert plan("qwen2.5-3b", 14.7, dtype="bfloat16").setting.flash
    assert not plan("qwen2.5-3b", 14.7).setting.flash


@pytest.mark.parametrize(
    "values", [{"gpu_memory_gib": 141}, {"gpu_memory_gib": None}, {"response_tokens": 20000}, {"lora_rank": 256}]
)
def test_the_panel_takes_what_a_plan_takes(values):
    assert "GiB" in plan_panel(static=True, **values)._repr_html_()


def test_the_panel_says_what_to_type():
    page = plan_panel(static=True, model="qwen2.5-7b")._repr_html_()
    assert "model=&#x27;qwen2.5-7b&#x27;" in page
    with pytest.raises(ValueError, match="DPO"):
        plan_panel(algorithm="DPO")
