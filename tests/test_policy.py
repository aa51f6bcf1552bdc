"""Log-probs, values, adapters and files of the policy, against uncached full passes and hand calculation."""

from __future__ import annotations

import json
import os
import shutil
import stat

import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import PeftModel
from transformers import AutoModelForCausalLM, MistralConfig, Qwen2Config

from agentr1_lite import forward, loading
from agentr1_lite.batch import Batch, collate
from agentr1_lite.forward import forwarded_tokens, plan_stages
from agentr1_lite.mdp import Segment, StopReason, Trajectory, Turn
from agentr1_lite.policy import PolicyError, QwenPolicy

PROMPT = 9


def rows(lengths=(20, 14, 17, 20), groups=(0, 0, 1, 1), common=4, seed=0, prompts=None) -> Batch:
    """Rows with two action spans; rows of a group share their prompt, all share ``common`` tokens."""
    random = torch.Generator().manual_seed(seed)
    draw = lambda n: torch.randint(3, 330, (n,), generator=random).tolist()  # noqa: E731
    system = draw(common)
    heads = {g: system + draw((prompts or {}).get(g, PROMPT) - common) for g in set(groups)}
    made = []
    for length, group in zip(lengths, groups, strict=True):
        segment, rest = Segment(), length - len(heads[group])
        segment.extend(heads[group])
        first, seen = rest // 3, rest // 3
        a = segment.extend(draw(first), [-1.0] * first)
        o = segment.extend(draw(seen))
        b = segment.extend(draw(rest - first - seen), [-1.0] * (rest - first - seen))
        turns = [Turn(0, *a, observation_start=o[0], observation_end=o[1], anchor="a"), Turn(0, *b, anchor="b")]
        made.append(Trajectory(f"t{group}", f"g{group}", [segment], turns, stop_reason=StopReason.ANSWER, reward=1.0))
    return collate(made)


def direct(policy: QwenPolicy, batch: Batch, temperature=1.0, model=None) -> torch.Tensor:
    """Log-probs by the model's own forward pass, one row at a time, nothing shared or padded."""
    out = torch.zeros(batch.input_ids.shape)
    for b, length in enumerate(batch.lengths.tolist()):
        logits = (model or policy.model)(batch.input_ids[b : b + 1, :length]).logits[0].float() / temperature
        values = logits[:-1].log_softmax(-1).gather(-1, batch.input_ids[b, 1:length, None])[:, 0]
        out[b, 1:length] = values
    return torch.where(batch.action_mask, out, 0.0)


def gradients(policy: QwenPolicy, loss: torch.Tensor) -> torch.Tensor:
    for p in policy.actor_parameters():
        p.grad = None
    loss.backward()
    return torch.cat([p.grad.flatten() for p in policy.actor_parameters()])


@pytest.fixture(autouse=True)
def sharing_pays(monkeypatch):
    """Rows as small as these are cut into stages only where a stage costs nothing."""
    monkeypatch.setattr(forward, "COPY_COST", 0.0)
    monkeypatch.setattr(forward, "STAGE_COST", 0.0)


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_equal_the_models_own(share, temperature):
    policy, batch = tiny.policy(), rows()
    got = policy.log_probs(batch, temperature=temperature, share_prompt=share).logprobs
    torch.testing.assert_close(got, direct(policy, batch, temperature), atol=1e-5, rtol=0)
    assert (got[~batch.action_mask] == 0).all() and got.shape == batch.input_ids.shape


CASES = {
    "groups": {},
    "one group": {"groups": (0, 0, 0, 0)},
    "one row": {"lengths": (20,), "groups": (0,)},
    "no common start": {"common": 0},
    "all prompts differ": {"groups": (0, 1, 2, 3)},
    "prompt lengths differ": {"prompts": {0: 6, 1: 11}},
    "one prompt token": {"prompts": {0: 1, 1: 1}, "common": 1},
    "grouped heads": {"kv": 2},
}


def assert_sharing_is_exact(policy, batch):
    """Log-probs to 1e-5 and gradients to 1e-5 relative; returns the shared pass's log-probs."""
    weights = torch.randn(batch.input_ids.shape, generator=torch.Generator().manual_seed(1))
    found = {}
    for share in (True, False):
        logprobs = policy.log_probs(batch, share_prompt=share).logprobs
        found[share] = logprobs.detach(), gradients(policy, (logprobs * weights).sum())
    torch.testing.assert_close(found[True][0], found[False][0], atol=1e-5, rtol=0)
    assert (found[True][1] - found[False][1]).norm() < 1e-5 * found[False][1].norm()
    return found[True][0]


@pytest.mark.parametrize("case", CASES)
def test_shared_prompts_change_nothing(case):
    options = dict(CASES[case])
    policy = tiny.policy(kv_heads=options.pop("kv", 4))
    batch = rows(**options)
    shared = assert_sharing_is_exact(policy, batch)
    torch.testing.assert_close(shared, direct(policy, batch), atol=1e-5, rtol=0)


def test_prompts_are_forwarded_once():
    policy, batch = tiny.policy(), rows(lengths=(20,) * 8, groups=(0,) * 4 + (1,) * 4)
    fed = []
    hook = policy.causal.base_model.embed_tokens.register_forward_hook(lambda m, i, o: fed.append(i[0].numel()))
    policy.log_probs(batch)
    hook.remove()
    assert fed == [4, 2 * 5, 8 * 11]  # common tokens; two prompts' own; eight responses


tree = st.recursive(st.just([]), lambda children: st.lists(st.tuples(st.integers(0, 3), children), max_size=4))


def leaves(branches, start=()):
    """The paths of a tree of tokens, each once or, where its last token is 3, twice."""
    for token, further in branches:
        path = (*start, token)
        yield from leaves(further, path)
        if not further or token == 2:
            yield from [path] * (2 if token == 3 else 1)


@settings(max_examples=80, deadline=None)
@given(tree.filter(lambda branches: len(branches) > 0))
def test_every_distinct_beginning_is_passed_exactly_once(branches):
    paths = list(leaves(branches)) or [(0,)]
    width = max(map(len, paths))
    ids = torch.tensor([[*path, *[9] * (width - len(path))] for path in paths])
    lengths = torch.tensor([len(path) for path in paths])
    assert forwarded_tokens(ids, lengths) == len({path[: t + 1] for path in paths for t in range(len(path))})
    for start, end, shown, _, node in plan_stages(ids, lengths):
        for row in range(len(paths)):
            if lengths[row] > start:
                assert torch.equal(ids[shown[node[row]], :end], ids[row, :end])


def test_stages_are_cut_where_they_save_more_than_they_cost(monkeypatch):
    batch = rows(lengths=(20,) * 8, groups=(0,) * 4 + (1,) * 4)
    monkeypatch.setattr(forward, "STAGE_COST", 10.0)  # 8 × 20 tokens in one stage, 9 + 8 × 11 + 10 at best in two
    cuts = [(stage.start, stage.end) for stage in plan_stages(batch.input_ids, batch.lengths)]
    assert cuts == [(0, 9), (9, 20)]
    monkeypatch.setattr(forward, "STAGE_COST", 1000.0)
    assert len(plan_stages(batch.input_ids, batch.lengths)) == 1


def test_equal_rows_are_passed_once_and_change_nothing():
    policy, batch = tiny.policy(), rows().select([0, 1, 0, 2, 1, 0])
    assert_sharing_is_exact(policy, batch)
    (stage,) = plan_stages(batch.input_ids, batch.lengths, cached=False)
    assert len(stage.rows) == 3 and torch.equal(batch.input_ids[stage.rows][stage.node], batch.input_ids)


def test_padding_rows_and_masks_do_not_leak():
    policy, batch = tiny.policy(), rows()
    alone = torch.cat([policy.log_probs(batch.select([i])).logprobs for i in range(4)])
    torch.testing.assert_close(policy.log_probs(batch).logprobs, alone, atol=1e-5, rtol=0)
    noisy = batch.select(range(4))
    noisy.input_ids = torch.where(batch.attention_mask, batch.input_ids, 7)
    torch.testing.assert_close(policy.log_probs(noisy).logprobs, policy.log_probs(batch).logprobs, atol=1e-6, rtol=0)


@pytest.mark.parametrize("share", [True, False])
def test_only_states_before_actions_get_gradient(share):
    policy, batch = tiny.policy(), rows()
    outputs = []

    def keep(module, args, output):
        output.retain_grad()
        outputs.append(output)

    hook = policy.causal.base_model.norm.register_forward_hook(keep)
    policy.log_probs(batch, share_prompt=share).logprobs.sum().backward()
    hook.remove()
    stages = plan_stages(batch.input_ids, batch.lengths, share=share)
    _, place = forward.hidden_states(policy.causal.base_model, batch, stages)
    where, when = batch.action_mask.nonzero(as_tuple=True)
    predicts = torch.zeros(sum(o.shape[0] * o.shape[1] for o in outputs), dtype=torch.bool)
    predicts[place[where, when - 1]] = True
    grad = torch.cat([(torch.zeros_like(o) if o.grad is None else o.grad).flatten(0, 1) for o in outputs])
    assert (grad[~predicts] == 0).all()
    assert (grad[predicts].abs().sum(-1) > 0).all()


def test_chunks_recomputation_and_entropy(monkeypatch):
    policy, batch = tiny.policy(), rows()
    whole = policy.log_probs(batch, entropy=True)
    grad = gradients(policy, whole.logprobs.sum() + whole.entropy.sum())
    monkeypatch.setattr(forward, "KEEP_ELEMENTS", 0)
    parts = policy.log_probs(batch, entropy=True, chunk=3)
    torch.testing.assert_close(parts.logprobs, whole.logprobs, atol=1e-6, rtol=0)
    torch.testing.assert_close(parts.entropy, whole.entropy, atol=1e-5, rtol=0)
    torch.testing.assert_close(
        gradients(policy, parts.logprobs.sum() + parts.entropy.sum()), grad, atol=1e-4, rtol=1e-4
    )
    b, t = batch.action_mask.nonzero()[0].tolist()
    p = policy.model(batch.input_ids[b : b + 1, :t]).logits[0, -1].softmax(-1)
    assert whole.entropy[b, t].item() == pytest.approx(-(p * p.log()).sum().item(), abs=1e-4)
    assert (whole.entropy[~batch.action_mask] == 0).all()
    assert policy.log_probs(batch).entropy is None


def test_an_action_without_a_state_is_refused():
    batch = rows()
    batch.action_mask[0, 0] = True
    with pytest.raises(ValueError, match="first token"):
        tiny.policy().log_probs(batch)


def test_rows_without_actions_give_zeros():
    policy, batch = tiny.policy(), rows()
    batch.action_mask[:] = False
    got = policy.log_probs(batch, entropy=True)
    assert (got.logprobs == 0).all() and (got.entropy == 0).all()
    got.logprobs.sum().backward()


@pytest.mark.parametrize("rank", [0, 4])
def test_reference_is_the_actor_of_the_phase_start(rank):
    policy, batch = tiny.policy(lora_rank=rank), rows()
    with pytest.raises(PolicyError, match="freeze_reference"):
        policy.log_probs(batch, which="reference")
    before = step(policy, batch)  # a policy that is not its base any more
    policy.freeze_reference()
    assert not torch.allclose(before, policy.log_probs(batch).logprobs.detach())
    start = policy.log_probs(batch).logprobs.detach()
    reference = policy.log_probs(batch, which="reference").logprobs
    torch.testing.assert_close(reference, start, atol=1e-6, rtol=0)
    assert not reference.requires_grad
    step(policy, batch)
    torch.testing.assert_close(policy.log_probs(batch, which="reference").logprobs, start, atol=1e-6, rtol=0)
    assert (policy.log_probs(batch).logprobs - start).abs().max() > 1e-4
    policy.freeze_reference()  # the next phase
    torch.testing.assert_close(
        policy.log_probs(batch, which="reference").logprobs,
        policy.log_probs(batch).logprobs.detach(),
        atol=1e-6,
        rtol=0,
    )


def step(policy: QwenPolicy, batch: Batch) -> torch.Tensor:
    """One large gradient step of the actor; returns the log-probs before it."""
    parameters = policy.actor_parameters()
    for p in parameters:
        p.grad = None
    logprobs = policy.log_probs(batch).logprobs
    logprobs.sum().backward()
    with torch.no_grad():
        for p in parameters:
            p -= 0.1 * p.grad / (p.grad.norm() + 1e-6)
    for p in parameters:
        p.grad = None
    return logprobs.detach()


@pytest.mark.parametrize("rank", [0, 4])
def test_critic_learns_apart_from_the_actor(rank):
    policy, batch = tiny.policy(lora_rank=rank), rows()
    step(policy, batch)
    with pytest.raises(PolicyError, match="add_critic"):
        policy.values(batch)
    policy.add_critic()
    policy.freeze_reference()
    assert (policy.values(batch) == 0).all()  # the head starts at zero
    torch.nn.init.normal_(policy.value_head.weight)
    actor = policy.log_probs(batch).logprobs
    values = policy.values(batch)
    assert (values[~batch.action_mask] == 0).all() and (values[batch.action_mask] != 0).all()
    torch.testing.assert_close(values, policy.values(batch, share_prompt=False), atol=1e-4, rtol=0)
    (values**2).sum().backward()
    assert all(p.grad is None for p in policy.actor_parameters())
    assert any(p.grad.any() for p in policy.critic_parameters() if p.grad is not None)
    for p in policy.critic_parameters():
        p.grad = None
    actor.sum().backward()  # the actor's graph was built before the critic's pass
    assert all(p.grad is None for p in policy.critic_parameters())
    assert any(p.grad is not None and p.grad.any() for p in policy.actor_parameters())
    mine, theirs = ({id(p) for p in ps} for ps in (policy.actor_parameters(), policy.critic_parameters()))
    assert not mine & theirs


def test_value_is_of_the_state_before_the_token():
    policy, batch = tiny.policy(), rows(lengths=(20,), groups=(0,))
    policy.add_critic()
    torch.nn.init.normal_(policy.value_head.weight)
    t = int(batch.action_mask[0].nonzero()[0])
    hidden = policy._critic(batch.input_ids[:, :t]).last_hidden_state[0, -1]
    assert policy.values(batch)[0, t].item() == pytest.approx(policy.value_head(hidden).item(), abs=1e-4)


def test_lora_trains_adapters_only_and_the_base_stays():
    policy, batch = tiny.policy(lora_rank=4), rows()
    policy.add_critic()
    policy.freeze_reference()
    trained = {n for n, p in policy.model.named_parameters() if p.requires_grad}
    assert trained and all(".actor." in n or ".critic." in n for n in trained)
    policy.log_probs(batch, which="reference")
    policy.values(batch)
    assert {n for n, p in policy.model.named_parameters() if p.requires_grad} == trained
    torch.testing.assert_close(policy.log_probs(batch).logprobs, direct(tiny.policy(), batch), atol=1e-5, rtol=0)


@pytest.mark.parametrize("rank", [0, 4])
def test_checkpointed_layers_give_the_same_gradient(rank):
    found = []
    for checkpointing in (False, True):
        policy, batch = tiny.policy(lora_rank=rank, gradient_checkpointing=checkpointing), rows()
        policy.add_critic()
        torch.nn.init.normal_(policy.value_head.weight, generator=torch.Generator().manual_seed(0))
        torch.manual_seed(0)
        for p in policy.actor_parameters() + policy.critic_parameters() if rank else []:
            torch.nn.init.normal_(p, std=0.05)
        logprobs, values = policy.log_probs(batch).logprobs, policy.values(batch)
        (logprobs.sum() + (values**2).sum()).backward()
        found.append([p.grad for p in policy.actor_parameters() + policy.critic_parameters()])
        assert not policy.causal.training
    for plain, recomputed in zip(*found, strict=True):
        assert (recomputed - plain).norm() <= 1e-5 * plain.norm() + 1e-5
        assert recomputed.any()


def test_dropout_never_acts():
    model = tiny.model()
    model.config.attention_dropout = 0.5
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    policy, batch = QwenPolicy.from_parts(model, tiny.tokenizer(), gradient_checkpointing=True), rows()
    torch.testing.assert_close(policy.log_probs(batch).logprobs, policy.log_probs(batch).logprobs, atol=0, rtol=0)


@pytest.mark.parametrize("rank", [0, 4])
def test_save_and_load(tmp_path, rank):
    policy, batch = tiny.policy(lora_rank=rank), rows()
    step(policy, batch)
    policy.add_critic()
    torch.nn.init.normal_(policy.value_head.weight)
    folder = policy.save(tmp_path / "run" / "policy")
    assert [p.name for p in folder.parent.iterdir()] == ["policy"]
    loaded = QwenPolicy(folder, device="cpu")
    assert loaded.lora_rank == rank and loaded.chat.eos_ids == policy.chat.eos_ids
    torch.testing.assert_close(loaded.log_probs(batch).logprobs, policy.log_probs(batch).logprobs, atol=1e-6, rtol=0)
    loaded.add_critic()
    torch.testing.assert_close(loaded.values(batch), policy.values(batch), atol=1e-5, rtol=0)
    again = QwenPolicy(loaded.save(folder), device="cpu")  # over itself, from a loaded one
    torch.testing.assert_close(again.log_probs(batch).logprobs, policy.log_probs(batch).logprobs, atol=1e-6, rtol=0)


def test_half_precision_files_load_as_float32(tmp_path):
    policy = tiny.policy()
    loaded = QwenPolicy(policy.save(tmp_path / "half", dtype=torch.float16), device="cpu")
    assert {p.dtype for p in loaded.model.parameters()} == {torch.float32}
    for mine, saved in zip(loaded.actor_parameters(), policy.actor_parameters(), strict=True):
        assert torch.equal(mine, saved.half().float())


@pytest.mark.parametrize("rank", [0, 4])
def test_the_former_checkpoint_survives_a_failure(tmp_path, rank, monkeypatch):
    policy, batch = tiny.policy(lora_rank=rank), rows()
    policy.add_critic()
    folder = policy.save(tmp_path / "policy")
    before = step(policy, batch)

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("agentr1_lite.storage.save_file", full)
        with pytest.raises(OSError, match="No space"):
            policy.save(folder)
    assert [p.name for p in tmp_path.iterdir()] == ["policy"]
    torch.testing.assert_close(QwenPolicy(folder, device="cpu").log_probs(batch).logprobs, before, atol=1e-6, rtol=0)
    folder.rename(tmp_path / "policy.former")  # killed between the two renames
    torch.testing.assert_close(QwenPolicy(folder, device="cpu").log_probs(batch).logprobs, before, atol=1e-6, rtol=0)


@pytest.mark.parametrize("rank", [0, 4])
def test_state_dict_restores_actor_reference_and_critic(rank):
    policy, batch = tiny.policy(lora_rank=rank), rows()
    policy.freeze_reference()
    policy.add_critic()
    step(policy, batch)
    torch.nn.init.normal_(policy.value_head.weight)
    state = {k: v.clone() for k, v in policy.state_dict().items()}
    fresh = tiny.policy(lora_rank=rank, model_seed=0)
    fresh.load_state_dict(state)
    for which in ("actor", "reference"):
        torch.testing.assert_close(
            fresh.log_probs(batch, which=which).logprobs, policy.log_probs(batch, which=which).logprobs, atol=0, rtol=0
        )
    torch.testing.assert_close(fresh.values(batch), policy.values(batch), atol=0, rtol=0)
    with pytest.raises(PolicyError, match="does not fit"):
        tiny.policy(lora_rank=rank + 2).load_state_dict(state)


def test_a_save_replaces_nothing_but_checkpoints(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    for name, text in {"web": '{"my": "project"}', "noted": '{"model_type": "qwen2"}'}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(text)
    (tmp_path / "noted" / "notes.txt").write_text("x")
    for name in ("mine", "file", "web", "noted"):
        with pytest.raises(PolicyError) as error:
            tiny.policy().save(tmp_path / name)
        assert "folder" in one_sentence(error)
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "x"
    base = tiny.policy().save(tmp_path / "empty")
    with pytest.raises(PolicyError, match="base of this adapter"):
        QwenPolicy(base, lora_rank=4, device="cpu").save(base)


def test_an_adapter_names_its_base(tmp_path):
    base = tiny.policy().save(tmp_path / "base model")
    policy, batch = QwenPolicy(base, lora_rank=4, device="cpu"), rows()
    step(policy, batch)
    folder = policy.save(tmp_path / "adapter")
    assert json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"] == str(base)
    assert not (folder / "base").exists()
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)  # as any other program would
    right = direct(policy, batch, model=loaded)
    torch.testing.assert_close(policy.log_probs(batch).logprobs, right, atol=1e-5, rtol=0)


def test_four_bit_base_with_adapters(tmp_path):
    pytest.importorskip("bitsandbytes")
    base = tiny.policy().save(tmp_path / "base")
    policy, batch = QwenPolicy(base, lora_rank=4, quantization="nf4", device="cpu"), rows()
    with policy.inference() as causal:  # passes of a rollout come first
        causal(batch.input_ids)
    step(policy, batch)
    policy.log_probs(batch).logprobs.sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in policy.actor_parameters())
    again = QwenPolicy(policy.save(tmp_path / "adapter"), quantization="nf4", device="cpu")
    torch.testing.assert_close(again.log_probs(batch).logprobs, policy.log_probs(batch).logprobs, atol=1e-5, rtol=0)


def one_sentence(error: pytest.ExceptionInfo) -> str:
    text = str(error.value)
    assert "\n" not in text and len(text) < 600, text
    return text


def test_bad_names_and_folders_are_told_in_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setenv("AGENTR1_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(PolicyError) as error:
        QwenPolicy("atlas-tiny")
    assert "AGENTR1_DATA" in one_sentence(error)
    with pytest.raises(PolicyError) as error:
        QwenPolicy("atlas-tinny")
    assert "atlas-tiny" in one_sentence(error) and "qwen2.5-3b" in str(error.value)
    (tmp_path / "empty").mkdir()
    with pytest.raises(PolicyError) as error:
        QwenPolicy(tmp_path / "empty")
    assert "config.json" in one_sentence(error)
    (tmp_path / "file.json").write_text("{}")
    with pytest.raises(PolicyError) as error:
        QwenPolicy(tmp_path / "file.json")
    assert "folder" in one_sentence(error)


def test_an_absent_network_is_told_at_once(monkeypatch, tmp_path):
    def unknown(*args):
        raise OSError(-2, "Name or service not known")

    monkeypatch.setattr("socket.getaddrinfo", unknown)
    monkeypatch.setattr("urllib.request.getproxies", dict)
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: None)
    with pytest.raises(PolicyError) as error:
        QwenPolicy("qwen2.5-3b")
    assert "Qwen/Qwen2.5-3B-Instruct" in one_sentence(error) and "network" in str(error.value)
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: "config.json")
    assert loading.hub_options("Qwen/Qwen2.5-3B-Instruct") == {"local_files_only": True}
    assert loading.hub_options(str(tmp_path)) == {}


BREAK = {
    "no weights": lambda f: (f / "model.safetensors").unlink(),
    "cut weights": lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:5000]),
    "bad config": lambda f: (f / "config.json").write_text("{"),
    "unknown architecture": lambda f: (f / "config.json").write_text(json.dumps({"model_type": "nonesuch"})),
    "other size": lambda f: (f / "config.json").write_text(
        (f / "config.json")
        .read_text()
        .replace('"num_hidden_layers": 2', '"num_hidden_layers": 3')
        .replace('"full_attention"\n', '"full_attention",\n"full_attention"\n', 1)
    ),
    "no tokenizer": lambda f: [p.unlink() for p in f.glob("tokenizer*")],
}


@pytest.mark.parametrize("fault", BREAK)
def test_broken_folders(tmp_path, fault):
    folder = tiny.policy().save(tmp_path / "policy")
    BREAK[fault](folder)
    with pytest.raises(PolicyError) as error:
        QwenPolicy(folder, device="cpu")
    assert "policy" in one_sentence(error)


def test_broken_adapters(tmp_path):
    good = tiny.policy(lora_rank=4).save(tmp_path / "good")
    for name, harm in {
        "weights": lambda f: (f / "adapter_model.safetensors").write_bytes(b"xx"),
        "settings": lambda f: (f / "adapter_config.json").write_text("[]"),
        "base": lambda f: shutil.rmtree(f / "base"),
    }.items():
        folder = shutil.copytree(good, tmp_path / name)
        harm(folder)
        with pytest.raises(PolicyError) as error:
            QwenPolicy(folder, device="cpu")
        one_sentence(error)


def test_options_are_checked(tmp_path):
    folder = tiny.policy().save(tmp_path / "policy")
    for options, word in [
        ({"dtype": "float12"}, "float32"),
        ({"device": "tpu9"}, "cuda"),
        ({"quantization": "nf4"}, "lora_rank"),
        ({"quantization": "int3", "lora_rank": 4}, "nf4"),
    ]:
        with pytest.raises(PolicyError, match=word) as error:
            QwenPolicy(folder, **options)
        one_sentence(error)
    with pytest.raises(PolicyError, match="which"):
        tiny.policy().log_probs(rows(), which="critic")


def test_number_formats_follow_the_device(monkeypatch):
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    for capability, right in (((7, 5), torch.float16), ((8, 0), torch.bfloat16), ((9, 0), torch.bfloat16)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_, c=capability: c)
        assert loading.pick_dtype("auto", gpu, frozen_base=True) is right
        assert loading.pick_dtype("auto", gpu, frozen_base=False) is torch.float32
    assert loading.pick_dtype("auto", cpu, frozen_base=True) is torch.float32
    assert loading.pick_dtype("bfloat16", cpu, frozen_base=False) is torch.bfloat16


def test_sliding_windows_bound_the_context():
    config = tiny.model().config
    assert loading.context_length(config) == 1024
    config.layer_types, config.sliding_window = ["full_attention", "sliding_attention"], 128
    assert loading.context_length(config) == 128


def test_a_mask_where_it_could_be_left_out_changes_nothing(monkeypatch):
    policy, batch = tiny.policy(kv_heads=2), rows()
    without = policy.log_probs(batch, share_prompt=False).logprobs
    monkeypatch.setattr(forward, "wants_mask", lambda device: True)
    torch.testing.assert_close(policy.log_probs(batch, share_prompt=False).logprobs, without, atol=1e-5, rtol=0)
    torch.testing.assert_close(policy.log_probs(batch).logprobs, without, atol=1e-5, rtol=0)


def test_a_merge_never_replaces_an_adapter(tmp_path):
    policy = tiny.policy(lora_rank=4)
    folder = policy.save(tmp_path / "adapter")
    with pytest.raises(PolicyError, match="holds an adapter"):
        QwenPolicy(folder, device="cpu").merge(folder)
    assert (folder / "adapter_model.safetensors").is_file()
    again = policy.merge(policy.merge(tmp_path / "plain"))
    assert (again / "model.safetensors").is_file()


def test_saved_files_can_be_read_by_others(tmp_path):
    former = os.umask(0o022)
    try:
        folder = tiny.policy(lora_rank=4).save(tmp_path / "policy")
    finally:
        os.umask(former)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755
    assert {stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir() if file.is_file()} == {0o644}


@pytest.mark.parametrize("device", ["meta", "vulkan", "nonesuch"])
def test_devices_that_run_nothing(device):
    with pytest.raises(PolicyError, match="device"):
        loading.pick_device(device)


@pytest.mark.parametrize(
    "config, expected",
    [
        (MistralConfig(max_position_embeddings=512, sliding_window=100), 100),
        (MistralConfig(max_position_embeddings=512, sliding_window=None), 512),
        (Qwen2Config(max_position_embeddings=512, sliding_window=100, use_sliding_window=False), 512),
    ],
)
def test_a_sliding_window_counts_as_its_width(config, expected):
    assert loading.context_length(config) == expected
