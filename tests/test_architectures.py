"""Every architecture that loads: sampled log-probs = update's log-probs = ``model(...).logits``; others are refused.

Tiny random models whose logits are far from flat, so that a soft cap or a scale left out would show.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import tiny
import torch
import transformers as hf
from test_policy import direct, gradients

from agentr1_lite import forward, loading
from agentr1_lite.batch import collate
from agentr1_lite.policy import PolicyError, QwenPolicy
from agentr1_lite.rollout import rollout

SIZES = {
    "vocab_size": len(tiny.tokenizer()),
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": tiny.tokenizer().eos_token_id,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
GPT = {"num_key_value_heads": None, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 1024, "n_inner": 96}
HEAD, SLIDING = {"head_dim": 16}, {"sliding_window": 512}
LLAMA_3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA_3["original_max_position_embeddings"] = 64
# model_type → what its configuration says besides
FOLLOWED = {
    "qwen2": {},
    "qwen3": {"head_dim": 32},
    "llama": {"rope_parameters": LLAMA_3},
    "smollm3": {},
    "gemma": HEAD,
    "gemma2": {"final_logit_softcapping": 4.0, "attn_logit_softcapping": 2.0, **HEAD, **SLIDING},
    "gemma3_text": {"final_logit_softcapping": 4.0, **HEAD, **SLIDING},
    "mistral": {"sliding_window": None},
    "mixtral": {"num_local_experts": 4, "sliding_window": None},
    "phi": {},
    "phi3": {"sliding_window": None},
    "granite": {"logits_scaling": 0.5, "embedding_multiplier": 2.0, "attention_multiplier": 0.3},
    "granitemoe": {"logits_scaling": 2.0, "num_local_experts": 4},
    "cohere": {"logit_scale": 2.0},
    "cohere2": {"logit_scale": 2.0, **HEAD, **SLIDING},
    "olmo2": {},
    "stablelm": {},
    "qwen3_moe": {**EXPERTS, **HEAD},
    "starcoder2": {"sliding_window": None},
    "hyperclovax": {"logits_scaling": 2.0},
    "gpt_oss": {"num_local_experts": 4, **HEAD},
    "gpt_neox": {"num_key_value_heads": None},
    "gpt2": GPT,
    "opt": {"num_key_value_heads": None, "ffn_dim": 96, "word_embed_proj_dim": 64},
    "falcon": {"num_key_value_heads": None, "alibi": False, "new_decoder_architecture": False, "multi_query": False},
}
CHANGED = {"gemma2", "gemma3_text", "granite", "granitemoe", "cohere", "cohere2", "hyperclovax"}  # behind the head
MISSING = [kind for kind in FOLLOWED if kind not in hf.CONFIG_MAPPING]  # in older transformers


def model(kind: str, **more) -> hf.PreTrainedModel:
    torch.manual_seed(0)
    config = hf.AutoConfig.for_model(kind, **{**SIZES, **FOLLOWED.get(kind, {}), **more})
    made = hf.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for p in made.parameters():
            if p.dim() > 1:
                p.normal_(0, 0.15)
    return made


def build(kind: str, lora_rank: int = 0, **more) -> QwenPolicy:
    return QwenPolicy.from_parts(model(kind, **more), tiny.tokenizer(), name=kind, lora_rank=lora_rank)


def play(policy: QwenPolicy, temperature: float = 1.0):
    """Rows of several lengths, with tool turns in between."""
    env = tiny.EchoEnv(max_turns=3)
    batch = collate(rollout(policy, env, tiny.tasks(3), group_size=2, seed=1, temperature=temperature))
    assert len(set(batch.lengths.tolist())) > 3 and int(batch.turn_ids.max()) > 0
    return batch


@pytest.mark.parametrize("kind", [kind for kind in FOLLOWED if kind not in MISSING])
def test_sampler_update_and_the_models_own_forward_agree(kind, monkeypatch):
    monkeypatch.setattr(forward, "STAGE_COST", 0.0)  # rows as short as these are worth sharing only then
    policy = build(kind)
    batch = play(policy, temperature=0.8)
    with torch.no_grad():
        right = direct(policy, batch, 0.8)
        for share in (True, False):
            found = policy.log_probs(batch, temperature=0.8, share_prompt=share).logprobs
            torch.testing.assert_close(found, right, atol=1e-5, rtol=0)
    torch.testing.assert_close(batch.old_logprobs, right, atol=1e-5, rtol=0)
    assert policy.head.plain == (kind not in CHANGED)
    if kind in CHANGED:  # the layer alone gives something else
        policy.head.plain = True
        assert (policy.log_probs(batch, temperature=0.8).logprobs - right).abs().max() > 0.1


@pytest.mark.parametrize("kind", ["gemma2", "cohere", "granite"])
@pytest.mark.parametrize("rank", [0, 4])
def test_reference_entropy_and_gradient_follow_the_changed_logits(kind, rank, monkeypatch):
    policy = build(kind, lora_rank=rank)
    policy.freeze_reference()
    batch = play(policy)
    own = direct(policy, batch)
    reference = policy.log_probs(batch, which="reference").logprobs
    torch.testing.assert_close(reference, own.detach(), atol=1e-5, rtol=0)
    right = gradients(policy, own.sum())
    monkeypatch.setattr(forward, "KEEP_ELEMENTS", 0)  # the logits are computed again in the backward pass
    out = policy.log_probs(batch, entropy=True, chunk=7)
    found = gradients(policy, out.logprobs.sum())
    assert (found - right).norm() < 1e-4 * right.norm()
    row, t = batch.action_mask.nonzero()[0].tolist()
    p = policy.model(batch.input_ids[row : row + 1, :t]).logits[0, -1].softmax(-1)
    assert float(out.entropy[row, t].detach()) == pytest.approx(float(-(p * p.log()).sum().detach()), abs=1e-4)


def test_a_saved_model_is_followed_too(tmp_path):
    policy = QwenPolicy(build("gemma2").save(tmp_path / "gemma"), device="cpu")
    batch = play(policy)
    torch.testing.assert_close(batch.old_logprobs, direct(policy, batch).detach(), atol=1e-5, rtol=0)


REFUSED = {
    "recurrent_gemma": {},
    "bloom": {"num_key_value_heads": None},
    "mamba": {"state_size": 8},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "gpt_bigcode": GPT,
}


@pytest.mark.parametrize("kind", [kind for kind in REFUSED if kind in hf.CONFIG_MAPPING])
def test_other_architectures_are_refused_by_name(kind):
    made = model(kind, **REFUSED[kind])
    with pytest.raises(PolicyError, match=type(made).__name__) as error:
        QwenPolicy.from_parts(made, tiny.tokenizer(), name="mine")
    assert "\n" not in str(error.value) and "'mine'" in str(error.value)


class Odd(hf.Qwen2ForCausalLM):
    """Its own forward does what no configuration tells: turns positions round, or masks by chance in training."""

    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        out.logits = out.logits.roll(1, dims=1)
        return out


class Noisy(hf.Qwen2ForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        layer = self.model.layers[0]
        inner = layer.forward
        noise = lambda x: x + torch.randn_like(x) if layer.training else x  # noqa: E731
        layer.forward = lambda states, *args, **kwargs: noise(inner(states, *args, **kwargs))


def test_what_the_passes_cannot_know_is_refused():
    config = tiny.model().config
    with pytest.raises(PolicyError, match="Odd.* cannot be followed"):
        QwenPolicy.from_parts(Odd(config).eval(), tiny.tokenizer())
    QwenPolicy.from_parts(Noisy(config).eval(), tiny.tokenizer())  # noise of a mode that is never entered
    with pytest.raises(PolicyError, match="Noisy.* cannot be followed"):
        QwenPolicy.from_parts(Noisy(config).eval(), tiny.tokenizer(), gradient_checkpointing=True)


def test_the_check_draws_nothing_from_the_global_stream():
    made = tiny.model()
    state = torch.get_rng_state()
    QwenPolicy.from_parts(made, tiny.tokenizer(), gradient_checkpointing=True)
    assert torch.equal(torch.get_rng_state(), state)


# Frequencies that depend on the length

SHORT, LONG = [1.0] * 8, [4.0 + i for i in range(8)]
LONGROPE = {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG, "rope_theta": 1e4}
LONGROPE |= {"original_max_position_embeddings": 128}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 128}


@pytest.mark.parametrize(
    ("kind", "rope"), [("phi3", LONGROPE), ("llama", LONGROPE), ("llama", DYNAMIC), ("qwen2", DYNAMIC)]
)
def test_rows_end_before_frequencies_change(kind, rope):
    original = {loading.ORIGINAL: rope[loading.ORIGINAL]}
    made = model(kind, rope_parameters=dict(rope), max_position_embeddings=512, sliding_window=None, **original)
    with pytest.warns(UserWarning, match="rows longer than 128 tokens"):
        policy = QwenPolicy.from_parts(made, tiny.tokenizer())
    assert policy.context_length == 128
    ids = torch.randint(3, 300, (1, 140), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        full = {n: made(ids[:, :n]).logits[0, 100] for n in (101, 128, 129)}
    assert torch.allclose(full[101], full[128], atol=1e-4)  # up to the limit a token's logits are one thing
    assert rope is DYNAMIC or not torch.allclose(full[128], full[129], atol=1e-2)
    batch = collate(rollout(policy, tiny.EchoEnv(max_turns=8), tiny.tasks(3), group_size=3, seed=1))
    assert 100 < int(batch.lengths.max()) <= 128
    torch.testing.assert_close(batch.old_logprobs, direct(policy, batch).detach(), atol=1e-5, rtol=0)


@pytest.mark.filterwarnings("ignore:this model has rotary")
@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"max_position_embeddings": 512, "rope_scaling": {"type": "su", "factor": 1}}, 512),
        ({"rope_scaling": {"type": "su"}, "original_max_position_embeddings": 96}, 96),
        ({"rope_parameters": {"full_attention": DYNAMIC, "sliding_attention": {"rope_type": "default"}}}, 128),
        ({"rope_parameters": {"rope_type": "yarn", "original_max_position_embeddings": 64}}, 512),
        ({"layer_types": ["chunked_attention", "full_attention"], "attention_chunk_size": 80}, 80),
        ({"attention_layers": ["global", "local"], "window_size": 70}, 70),
        ({"layer_types": ["sliding_attention", "full_attention"], "sliding_window": None}, 512),
    ],
)
def test_context_length_of_configurations(config, expected):
    made = SimpleNamespace(**{"max_position_embeddings": 512, **config})
    made.get_text_config = lambda: made
    assert loading.context_length(made) == expected


@pytest.mark.parametrize("kind", ["gemma2", "gemma3_text", "cohere2"])
def test_layers_that_slide_bound_the_context(kind):
    assert build(kind).context_length == 512
    made = model(kind, sliding_window=90)
    policy = QwenPolicy.from_parts(made, tiny.tokenizer())
    batch = collate(rollout(policy, tiny.EchoEnv(max_turns=8), tiny.tasks(3), group_size=3, seed=1))
    assert policy.context_length == 90 and 60 < int(batch.lengths.max()) <= 90
    torch.testing.assert_close(batch.old_logprobs, direct(policy, batch).detach(), atol=1e-5, rtol=0)
