"""Ids without a token, behind the tokenizer's last one and in gaps: never sampled, and no share of the distribution."""

from __future__ import annotations

import sys

import fake_vllm
import pytest
import tiny
import torch
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from agentr1_lite.batch import collate
from agentr1_lite.bridges.vllm import VLLMEngine
from agentr1_lite.engine import LocalEngine
from agentr1_lite.policy import PolicyError, QwenPolicy
from agentr1_lite.rollout import rollout
from agentr1_lite.sampling import Sampling, known_ids, stop_candidates

SIZE = len(tiny.tokenizer())
SPARE = 60  # rows behind the tokenizer's last one


def padded(**options) -> QwenPolicy:
    """A model whose spare rows take a large share: copies of the rows of common tokens."""
    made = tiny.model()
    made.resize_token_embeddings(SIZE + SPARE, mean_resizing=False)
    with torch.no_grad():
        rows = made.get_input_embeddings().weight
        rows[SIZE:] = 1.2 * rows[3 : 3 + SPARE]
    return QwenPolicy.from_parts(made, tiny.tokenizer(), **options)


def right(policy: QwenPolicy, batch, temperature: float, model=None) -> torch.Tensor:
    """log softmax of the model's own logits over the ids that have a token."""
    with torch.no_grad():
        logits = (model or policy.causal)(batch.input_ids).logits[:, :-1, :SIZE].float() / temperature
    found = logits.log_softmax(-1).gather(-1, batch.input_ids[:, 1:, None])[..., 0]
    return torch.where(batch.action_mask[:, 1:], found, 0.0)


@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("temperature", [1.0, 0.2, 3.0])
def test_spare_rows_are_never_sampled_and_have_no_share(rank, temperature):
    policy = padded(lora_rank=rank)
    policy.freeze_reference()
    played = rollout(policy, tiny.EchoEnv(), tiny.tasks(3), group_size=4, seed=1, temperature=temperature)
    batch = collate(played)
    expected = right(policy, batch, temperature)
    assert int(batch.input_ids.max()) < SIZE
    whole = policy.causal(batch.input_ids).logits.softmax(-1)[..., SIZE:].sum(-1)
    assert whole[batch.action_mask].mean() > 0.1  # of the plain softmax
    torch.testing.assert_close(batch.old_logprobs[:, 1:], expected, atol=2e-5, rtol=1e-5)
    for which in ("actor", "reference"):
        out = policy.log_probs(batch, temperature=temperature, which=which, entropy=True)
        torch.testing.assert_close(out.logprobs[:, 1:].detach(), expected, atol=2e-5, rtol=1e-5)
        assert out.entropy.isfinite().all()
    row, t = batch.action_mask.nonzero()[0].tolist()
    p = (policy.causal(batch.input_ids[row : row + 1, :t]).logits[0, -1, :SIZE] / temperature).softmax(-1).detach()
    assert float(out.entropy[row, t].detach()) == pytest.approx(float(-(p * p.log()).nansum()), abs=1e-4)


def test_gradients_are_finite_and_reach_no_spare_row():
    policy = padded()
    batch = collate(rollout(policy, tiny.EchoEnv(), tiny.tasks(2), seed=1))
    out = policy.log_probs(batch, entropy=True)
    (out.logprobs.sum() + out.entropy.sum()).backward()
    gradient = policy.causal.get_input_embeddings().weight.grad
    assert gradient.isfinite().all() and gradient[:SIZE].any() and not gradient[SIZE:].any()


@pytest.mark.parametrize("options", [{"greedy": True}, {"top_p": 0.9}])
def test_greedy_and_nucleus_take_no_spare_row(options):
    played = rollout(padded(), tiny.EchoEnv(), tiny.tasks(3), group_size=2, seed=1, **options)
    assert all(token < SIZE for t in played for token in t.segments[0].token_ids)


def test_choices_end_with_the_last_token():
    policy = padded()
    engine = LocalEngine(policy, max_rows=1)
    (row,) = engine.open([[70, 71]], [0], [9])
    choices = engine.top_choices(row, SIZE + SPARE)
    assert sorted(token for token, _ in choices) == list(range(SIZE))
    assert sum(share for _, share in choices) == pytest.approx(1.0, abs=1e-5)


def test_an_action_without_a_token_is_refused():
    policy = padded()
    batch = collate(rollout(policy, tiny.EchoEnv(), tiny.tasks(1), seed=1))
    row, t = batch.action_mask.nonzero()[0].tolist()
    batch.input_ids[row, t] = SIZE + 3
    with pytest.raises(PolicyError, match=f"hold {SIZE + 3} as an action"):
        policy.log_probs(batch)
    batch.action_mask[row, t] = False
    policy.log_probs(batch)


def gapped() -> PreTrainedTokenizerFast:
    """A tokenizer of five tokens whose ids are not the first five."""
    vocabulary = {"<unk>": 0, "a": 1, "b>": 4, "<|im_end|>": 5, "c": 9}
    made = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>")))
    made.eos_token = made.pad_token = "<|im_end|>"
    return made


def test_gaps_count_too():
    known = known_ids(gapped(), 8)
    assert known.tolist() == [True, True, False, False, True, True, False, False]
    assert stop_candidates(gapped(), (">",), 12).nonzero()[0].tolist() == [0, 4, 5]
    assert known_ids(gapped(), 12).nonzero()[0].tolist() == [0, 1, 4, 5, 9]


def test_where_every_id_has_a_token_nothing_is_touched():
    policy = tiny.policy()
    hidden = torch.randn(3, 64)
    assert policy.head.known.all()
    assert torch.equal(policy.head(hidden), policy.causal.lm_head(hidden))


@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_vllm_is_told_to_leave_them_out(rank, temperature, monkeypatch):
    for name, module in fake_vllm.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    policy, env = padded(lora_rank=rank), tiny.EchoEnv(max_turns=2)
    engine = VLLMEngine(policy, sampling=Sampling(temperature), stop_strings=env.stop_strings)
    batch = collate(rollout(policy, env, tiny.tasks(3), group_size=3, engine=engine))
    assert int(batch.input_ids.max()) < SIZE
    torch.testing.assert_close(batch.old_logprobs[:, 1:], right(policy, batch, temperature), atol=1e-4, rtol=0)
    assert engine._llm.llm_engine.asked[0][1].logit_bias == dict.fromkeys(range(SIZE, SIZE + SPARE), -100.0)


def test_a_saved_model_keeps_its_rows(tmp_path):
    policy = padded()
    folder = policy.save(tmp_path / "policy")
    assert AutoModelForCausalLM.from_pretrained(folder).config.vocab_size == SIZE + SPARE
    again = QwenPolicy(folder, device="cpu")
    assert torch.equal(again.head.known, policy.head.known) and int(again.head.known.sum()) == SIZE
