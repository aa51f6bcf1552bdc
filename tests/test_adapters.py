"""Adapters that ``peft`` saved: the same numbers here, after a save, merged and resumed; or a refusal."""

from __future__ import annotations

import json
import re
from pathlib import Path

import peft
import pytest
import tiny
import torch
from test_policy import direct, one_sentence, rows, step
from transformers import AutoModelForCausalLM

from agentr1_lite.bridges.vllm import UNREAD
from agentr1_lite.policy import PolicyError, QwenPolicy
from agentr1_lite.storage import FOLLOWED, adapter_config

ATTENTION = ["q_proj", "v_proj"]
# fields of LoraConfig that change what the adapter computes or where it stands
KEPT = {
    "plain": {},
    "rslora": {"use_rslora": True, "lora_alpha": 16},
    "dora": {"use_dora": True},
    "dora and rslora": {"use_dora": True, "use_rslora": True},
    "ranks": {"rank_pattern": {"q_proj": 2, r"layers\.1\.self_attn\.v_proj": 8}, "use_rslora": True},
    "alphas": {"alpha_pattern": {"v_proj": 64}},
    "some layers": {"layers_to_transform": [1], "layers_pattern": "layers"},
    "excluded": {"target_modules": "all-linear", "exclude_modules": ["down_proj"]},
    "a pattern of modules": {"target_modules": r".*layers\.0.*\.(k_proj|up_proj)"},
    "embeddings": {"target_modules": ["q_proj", "embed_tokens"]},
    "output layer": {"target_modules": ["q_proj", "lm_head"]},
    "dropout": {"lora_dropout": 0.5},
    "dora and dropout": {"use_dora": True, "lora_dropout": 0.5},
    "first weights": {"init_lora_weights": "gaussian"},
}


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return tiny.policy().save(tmp_path_factory.mktemp("adapters") / "base")


def saved(base: Path, folder: Path, tokenizer: bool = True, **fields) -> Path:
    """An adapter with weights far from zero, as ``peft`` saves it."""
    torch.manual_seed(1)
    given = {"r": 4, "lora_alpha": 8, "target_modules": ATTENTION, "task_type": "CAUSAL_LM", **fields}
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), peft.LoraConfig(**given))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_" in name:
                p += 0.2 * torch.randn_like(p)
    model.save_pretrained(folder)
    if tokenizer:
        tiny.tokenizer().save_pretrained(folder)
    return folder


def right(base: Path, folder: Path, batch) -> torch.Tensor:
    model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder).eval()
    return direct(None, batch, model=model).detach()


def same(policy: QwenPolicy, batch, expected: torch.Tensor, which: str = "actor") -> None:
    found = policy.log_probs(batch, which=which).logprobs.detach()
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("case", KEPT)
def test_an_adapter_is_what_peft_makes_of_it(base, tmp_path, case):
    folder, batch = saved(base, tmp_path / "adapter", **KEPT[case]), rows()
    expected = right(base, folder, batch)
    assert (direct(tiny.policy(), batch) - expected).abs().max() > 0.1
    policy = QwenPolicy(folder, device="cpu", gradient_checkpointing="dropout" in case)
    same(policy, batch, expected)
    policy.freeze_reference()
    policy.add_critic()
    same(policy, batch, expected, which="reference")
    start = right(base, policy.save(tmp_path / "copy"), batch)
    torch.testing.assert_close(start, expected, atol=1e-6, rtol=0)
    step(policy, batch)
    same(policy, batch, expected, which="reference")
    again = right(base, policy.save(tmp_path / "again"), batch)  # read by peft alone
    assert (again - expected).abs().max() > 1e-4
    same(policy, batch, again)
    merged = AutoModelForCausalLM.from_pretrained(policy.merge(tmp_path / "merged"))
    torch.testing.assert_close(direct(None, batch, model=merged).detach(), again, atol=1e-4, rtol=0)
    resumed = QwenPolicy(folder, device="cpu")
    resumed.load_state_dict({key: value.clone() for key, value in policy.state_dict().items()})
    same(resumed, batch, again)
    same(resumed, batch, expected, which="reference")
    mine, theirs = (json.loads((f / "adapter_config.json").read_text()) for f in (tmp_path / "again", folder))
    for name in set(theirs) - {"base_model_name_or_path", "target_modules", "exclude_modules"}:
        assert mine[name] == theirs[name], name
    for name in ("target_modules", "exclude_modules"):
        assert mine[name] == theirs[name] or set(mine[name]) == set(theirs[name])


def test_every_adapted_weight_is_trained_in_actor_and_critic(base, tmp_path):
    policy = QwenPolicy(saved(base, tmp_path / "adapter", use_dora=True, target_modules=["q_proj", "embed_tokens"]))
    policy.add_critic()
    named = dict(policy.model.named_parameters())
    trained = {name for name, p in named.items() if p.requires_grad}
    assert trained == {name for name in named if re.search(r"lora_.*\.(actor|critic)(\.|$)", name)}
    assert any("magnitude" in name for name in trained) and any("embedding_A" in name for name in trained)
    assert len(policy.actor_parameters()) == len(trained) // 2


@pytest.mark.parametrize("fields", [{"use_rslora": True}, {"use_dora": True}, {"rank_pattern": {"q_proj": 2}}])
def test_four_bit_bases_keep_the_fields(base, tmp_path, fields):
    pytest.importorskip("bitsandbytes")
    folder, batch = saved(base, tmp_path / "adapter", **fields), rows()
    policy = QwenPolicy(folder, quantization="nf4", device="cpu")
    model = AutoModelForCausalLM.from_pretrained(base, quantization_config=policy.causal.config.quantization_config)
    expected = direct(None, batch, model=peft.PeftModel.from_pretrained(model, folder).eval()).detach()
    same(policy, batch, expected)
    merged = AutoModelForCausalLM.from_pretrained(policy.merge(tmp_path / "merged"))
    torch.testing.assert_close(direct(None, batch, model=merged).detach(), expected, atol=1e-4, rtol=0)


def test_a_folder_without_a_tokenizer_takes_its_bases(base, tmp_path):
    folder = saved(base, tmp_path / "adapter", tokenizer=False)
    assert QwenPolicy(folder, device="cpu").chat.eos_ids == QwenPolicy(base, device="cpu").chat.eos_ids


def test_weights_as_bin_are_read(base, tmp_path):
    folder, batch = saved(base, tmp_path / "adapter"), rows()
    expected = right(base, folder, batch)
    torch.save(peft.utils.load_peft_weights(str(folder), device="cpu"), folder / "adapter_model.bin")
    (folder / "adapter_model.safetensors").unlink()
    same(QwenPolicy(folder, device="cpu"), batch, expected)


def changed(folder: Path, **fields) -> Path:
    file = folder / "adapter_config.json"
    settings = json.loads(file.read_text()) | fields
    file.write_text(json.dumps({name: value for name, value in settings.items() if value != "missing"}))
    return folder


REFUSED = {
    "modules_to_save": ["lm_head"],
    "bias": "all",
    "lora_bias": True,
    "init_lora_weights": "pissa",
    "layer_replication": [[0, 2], [1, 2]],
    "trainable_token_indices": [3, 4],
    "target_parameters": ["mlp.experts.gate_up_proj"],
    "alora_invocation_tokens": [5],
    "task_type": "SEQ_CLS",
    "revision": "v2",
    "a_field_of_tomorrow": {"rank": 3},
    "r": "four",
    "lora_alpha": None,
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_kept_is_refused_by_name(base, tmp_path, name):
    folder = changed(saved(base, tmp_path / "adapter"), **{name: REFUSED[name]})
    with pytest.raises(PolicyError, match=name) as error:
        QwenPolicy(folder, device="cpu")
    assert "adapter_config.json" in one_sentence(error)


@pytest.mark.parametrize("kind", ["IA3", "PROMPT_TUNING", "LOHA", "ADALORA", "missing", 7])
def test_other_kinds_of_adapters_are_refused(base, tmp_path, kind):
    folder = changed(saved(base, tmp_path / "adapter"), peft_type=kind)
    with pytest.raises(PolicyError, match="peft_type") as error:
        QwenPolicy(folder, device="cpu")
    one_sentence(error)


@pytest.mark.parametrize("given", [None, "missing", "", "  ", 3, ["a/b"], {}])
def test_a_base_without_a_name_is_a_sentence(base, tmp_path, given):
    folder = changed(saved(base, tmp_path / "adapter"), base_model_name_or_path=given)
    with pytest.raises(PolicyError, match="base_model_name_or_path") as error:
        QwenPolicy(folder, device="cpu")
    assert "adapter_config.json" in one_sentence(error)


def test_adapters_on_adapters_are_refused(base, tmp_path):
    folder = saved(base, tmp_path / "adapter")
    with pytest.raises(PolicyError, match="adapter itself") as error:
        QwenPolicy(changed(saved(base, tmp_path / "second"), base_model_name_or_path=str(folder)), device="cpu")
    one_sentence(error)
    model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)
    for given in (model, model.base_model.model):
        with pytest.raises(PolicyError, match="carries an adapter") as error:
            QwenPolicy.from_parts(given, tiny.tokenizer())
        one_sentence(error)


def test_modules_that_the_base_lacks_are_a_sentence(base, tmp_path):
    with pytest.raises(PolicyError, match="right base") as error:
        QwenPolicy(changed(saved(base, tmp_path / "adapter"), target_modules=["c_attn"]), device="cpu")
    one_sentence(error)


WRONG = {
    "one is missing": lambda w: w.pop(next(iter(w))),
    "another rank": lambda w: w.update({k: v[:2] for k, v in w.items() if "lora_A" in k}),
    "a base weight": lambda w: w.update({"base_model.model.model.norm.weight": torch.full((64,), 2.0)}),
    "nonsense": lambda w: w.update({"base_model.model.nowhere.lora_A.weight": torch.ones(4, 64)}),
}


@pytest.mark.parametrize("fault", WRONG)
def test_weights_that_do_not_fit_are_refused(base, tmp_path, fault):
    folder = saved(base, tmp_path / "adapter")
    weights = peft.utils.load_peft_weights(str(folder), device="cpu")
    WRONG[fault](weights)
    (folder / "adapter_model.safetensors").unlink()
    torch.save(weights, folder / "adapter_model.bin")
    with pytest.raises(PolicyError, match="fit") as error:
        QwenPolicy(folder, device="cpu")
    one_sentence(error)


def test_every_field_that_peft_saves_is_kept_or_named(base, tmp_path):
    """Fields of the installed ``peft`` that are not followed: whatever unusual they say is refused."""
    folder, usual = saved(base, tmp_path / "adapter"), peft.LoraConfig().to_dict()
    for name in json.loads((folder / "adapter_config.json").read_text()).keys() & usual.keys() - FOLLOWED.keys():
        with pytest.raises(PolicyError, match=name):
            adapter_config(changed(folder, **{name: "unusual"}))
        changed(folder, **{name: usual[name]})
    assert set(UNREAD) <= FOLLOWED.keys()
