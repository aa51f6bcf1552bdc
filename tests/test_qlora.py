"""A 4-bit base with adapters, on a CPU, through all that the GPU recipes do."""

from __future__ import annotations

import json
import math

import pytest
import tiny
import torch
from transformers import AutoModelForCausalLM

from agentr1_lite import AgentR1Trainer, QwenPolicy, update
from agentr1_lite.batch import collate
from agentr1_lite.checkpoint import load_checkpoint
from agentr1_lite.config import Config, TrainingConfig
from agentr1_lite.optimizers import LossScale, choose, make_optimizer
from agentr1_lite.rollout import rollout

pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed; make setup installs it")

ALGORITHMS = ("GRPO", "PPO")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny.policy().save(tmp_path_factory.mktemp("qlora") / "base")


def load(base, **options) -> QwenPolicy:
    return QwenPolicy(base, lora_rank=4, quantization="nf4", device="cpu", gradient_checkpointing=True, **options)


def settings(folder, algorithm: str, **training) -> Config:
    training = {"algorithm": algorithm, "batch_size": 2, "group_size": 3, "micro_batch_tokens": 512, **training}
    training |= {"lr": 1e-3, "critic_lr": 1e-3, "critic_warmup": 0}
    return Config.from_dict({"training": training, "run": {"output": str(folder), "progress": False, "save_every": 1}})


def frozen(policy: QwenPolicy) -> dict[str, torch.Tensor]:
    return {k: p.detach().clone() for k, p in policy.causal.named_parameters() if ".lora_" not in k}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_step_moves_adapters_and_nothing_else(base, tmp_path, algorithm):
    policy = load(base)
    kept, actor = frozen(policy), [p.detach().clone() for p in policy.actor_parameters()]
    trainer = AgentR1Trainer(policy, settings(tmp_path / "run", algorithm, optimizer="paged_adamw_8bit"))
    (metrics,) = trainer.online_rl(tiny.ScoredEnv(), 6, tasks=tiny.tasks(2))
    assert math.isfinite(metrics["loss"]) and metrics["grad_norm"] > 0
    assert metrics["first_log_ratio_max"] < 1e-4  # sampler and trainer agree through the 4-bit base
    assert any((p != old).any() for p, old in zip(policy.actor_parameters(), actor, strict=True))
    for key, p in policy.causal.named_parameters():
        if key in kept:
            assert not p.requires_grad and p.grad is None and torch.equal(p, kept[key]), key
    if algorithm == "PPO":
        assert metrics["critic_grad_norm"] > 0 and "explained_variance" in metrics


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("optimizer", ["adamw", "paged_adamw_8bit"])
def test_a_resumed_run_equals_an_uninterrupted_one(base, tmp_path, algorithm, optimizer):
    env, tasks = tiny.ScoredEnv(), tiny.tasks(4)

    def run(name: str, rollouts: int, resume: bool = False) -> QwenPolicy:
        trainer = AgentR1Trainer(load(base), settings(tmp_path / name, algorithm, optimizer=optimizer))
        (trainer.resume() if resume else trainer).online_rl(env, rollouts, tasks=tasks)
        return trainer.policy

    whole = run("whole", 18)
    stopped = AgentR1Trainer(load(base), settings(tmp_path / "cut", algorithm, optimizer=optimizer))
    stopped.callbacks.append(
        type("Stop", (), {"on_step": lambda self, t, phase, step, m: t.stop() if step == 1 else 0})()
    )
    with pytest.raises(KeyboardInterrupt):
        stopped.online_rl(env, 18, tasks=tasks)
    resumed = run("cut", 18, resume=True)
    for a, b in zip(whole.state_dict().items(), resumed.state_dict().items(), strict=True):
        assert a[0] == b[0] and torch.equal(a[1], b[1]), a[0]


def test_a_checkpoint_holds_adapters_only(base, tmp_path):
    policy = load(base)
    AgentR1Trainer(policy, settings(tmp_path / "run", "PPO")).online_rl(tiny.ScoredEnv(), 6, tasks=tiny.tasks(2))
    tensors, _, _ = load_checkpoint(tmp_path / "run")
    assert set(tensors["optimizers"]) == {"actor", "critic"} and "random" in tensors
    assert all(".lora_" in key or key.startswith("critic.value_head") for key in tensors["policy"])


@pytest.mark.parametrize("quantization", [None, "nf4"])
def test_merged_is_what_was_trained(base, tmp_path, quantization):
    policy = QwenPolicy(base, lora_rank=4, quantization=quantization, device="cpu")
    torch.manual_seed(0)
    for p in policy.actor_parameters():
        torch.nn.init.normal_(p, std=0.1)
    batch = collate(rollout(policy, tiny.EchoEnv(), tiny.tasks(2)))
    folder = policy.merge(tmp_path / "merged")
    plain = AutoModelForCausalLM.from_pretrained(folder)  # as any other program would, without peft or bitsandbytes
    assert not hasattr(plain, "peft_config") and "quantization_config" not in json.loads(
        (folder / "config.json").read_text()
    )
    logits = plain(batch.input_ids).logits.log_softmax(-1)[:, :-1]
    right = logits.gather(-1, batch.input_ids[:, 1:, None])[..., 0]
    found, mask = policy.log_probs(batch).logprobs[:, 1:], batch.action_mask[:, 1:]
    torch.testing.assert_close(found[mask], right[mask], atol=1e-4, rtol=0)
    half = AutoModelForCausalLM.from_pretrained(policy.merge(tmp_path / "half", dtype=torch.float16))
    assert half.dtype is torch.float16


def test_optimizer_by_memory():
    assert choose("auto", quantized=True, device="cuda") == "paged_adamw_8bit"
    assert choose("auto", quantized=False, device="cuda") == choose("auto", quantized=True, device="cpu") == "adamw"
    assert choose("adamw", quantized=True, device="cuda") == "adamw"
    policy = tiny.policy(lora_rank=32)
    optimizer = make_optimizer("paged_adamw_8bit", policy, policy.actor_parameters())
    for p in policy.actor_parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    moments = [optimizer.state[p]["state1"] for p in policy.actor_parameters() if p.numel() >= 4096]
    assert moments and all(m.dtype is torch.uint8 for m in moments)


# float16


def test_loss_scale_halves_on_overflow_and_grows_after_quiet_steps():
    scale = LossScale.of(torch.float16)
    assert scale.value == 4096 and LossScale.of(torch.bfloat16).value == 1
    scale.update(math.inf)
    assert scale.value == 2048
    for _ in range(199):
        scale.update(1.0)
    assert scale.value == 2048
    scale.update(1.0)
    assert scale.value == 4096
    single = LossScale.of(torch.float32)
    single.update(math.nan)
    assert single.value == 1


def test_float16_gradients_need_the_scale(base):
    """The mean over very many tokens has a gradient that float16 cannot hold; scaled, it is float32's."""
    found = {}
    for dtype, scale in (("float32", 1.0), ("float16", 1.0), ("float16", 4096.0)):
        policy = QwenPolicy(base, lora_rank=4, dtype=dtype, device="cpu")
        torch.manual_seed(0)
        for p in policy.actor_parameters():
            torch.nn.init.normal_(p, std=0.05)
        batch = collate(rollout(tiny.policy(), tiny.EchoEnv(), tiny.tasks(2)))
        weights = torch.full((len(batch),), 1e-5)  # what a share of 100,000 tokens is
        update.nll_gradient(policy, batch, weights, 4096, scale=scale)
        optimizer = torch.optim.SGD(policy.actor_parameters(), lr=0.0)
        gradients = torch.cat([p.grad.flatten().float() for p in policy.actor_parameters()]) / scale
        norm = update.apply_gradient(policy.actor_parameters(), optimizer, 0.0, scale=scale)
        found[dtype, scale] = gradients, norm
    exact, norm = found["float32", 1.0]
    errors = {key: float((g - exact).norm() / exact.norm()) for key, (g, _) in found.items()}
    assert errors["float16", 4096.0] < 0.02 < errors["float16", 1.0]
    assert found["float16", 4096.0][1] == pytest.approx(norm, rel=0.02)


def test_an_overflowing_step_is_left_out(base, tmp_path):
    policy = QwenPolicy(base, lora_rank=4, dtype="float16", device="cpu")
    trainer = AgentR1Trainer(policy, settings(tmp_path / "run", "GRPO"))
    trainer.loss_scale.value = 2.0**40
    before = [p.detach().clone() for p in policy.actor_parameters()]
    (metrics,) = trainer.online_rl(tiny.ScoredEnv(), 6, tasks=tiny.tasks(2))
    assert not math.isfinite(metrics["grad_norm"]) and trainer.loss_scale.value == 2.0**39
    assert all(torch.equal(p, old) for p, old in zip(policy.actor_parameters(), before, strict=True))
    assert not [f for f in trainer.findings if f.check == "finite" and f.level == "fail"]
    assert load_checkpoint(tmp_path / "run")[1]["loss_scale"]["value"] == 2.0**39


def test_training_config_names_the_optimizers():
    from agentr1_lite.config import OPTIMIZERS as named
    from agentr1_lite.optimizers import OPTIMIZERS

    assert set(named) == {"auto", *OPTIMIZERS} and TrainingConfig().optimizer == "auto"
