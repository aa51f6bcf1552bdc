"""Truncated importance sampling: by hand, exactly neutral where the engines agree, and right on a bandit."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import tiny
import torch

from agentr1_lite import losses, update
from agentr1_lite.config import TrainingConfig
from agentr1_lite.importance import engine_metrics, importance_weights
from agentr1_lite.rollout import rollout


def test_weights_by_hand():
    trainer = torch.tensor([[-1.0, math.log(0.6), math.log(0.5), math.nan]])
    engine = torch.tensor([[-1.0, math.log(0.4), math.log(0.1), 0.0]])
    mask = torch.tensor([[True, True, True, False]])
    found = importance_weights(trainer.requires_grad_(True), engine, mask, 2.0)
    torch.testing.assert_close(found, torch.tensor([[1.0, 1.5, 2.0, 1.0]]))  # 0.5 / 0.1 = 5 is cut to 2
    assert not found.requires_grad


def test_weights_multiply_each_tokens_loss():
    logprobs = torch.tensor([[-1.0, -2.0, -0.5]], requires_grad=True)
    advantages, mask = torch.tensor([[1.0, -1.0, 2.0]]), torch.tensor([[True, True, False]])
    weights = torch.tensor([[0.5, 2.0, math.inf]])
    loss, _ = losses.policy_loss(logprobs, logprobs.detach(), advantages, mask, weights=weights)
    loss.backward()
    assert loss.item() == (-1.0 * 0.5 + 1.0 * 2.0) / 2  # ratio 1: −w·A, mean over the two tokens
    assert logprobs.grad.tolist() == [[-0.25, 1.0, 0.0]]


SETTINGS = [{}, {"dual_clip": 3.0}, {"kind": "cispo"}, {"kind": "reinforce"}, {"ratio": "sequence"}]


@pytest.mark.parametrize("options", SETTINGS, ids=str)
def test_where_the_engines_agree_nothing_changes(options):
    """Bit for bit, loss and gradient."""
    random = torch.Generator().manual_seed(0)
    new, old, advantages = torch.randn((3, 4, 9), generator=random)
    mask = torch.rand((4, 9), generator=random) > 0.3

    def run(**more):
        logprobs = (-new.abs()).requires_grad_(True)
        loss, _ = losses.policy_loss(logprobs, -old.abs(), advantages, mask, **options, **more)
        loss.backward()
        return loss.detach(), logprobs.grad

    plain, weighed = run(), run(weights=importance_weights(-old.abs(), -old.abs(), mask, 2.0))
    assert torch.equal(plain[0], weighed[0]) and torch.equal(plain[1], weighed[1])


@pytest.mark.parametrize("kind", ["ppo", "cispo", "reinforce"])
def test_the_gradient_on_a_bandit_is_that_of_the_trainers_policy(kind):
    """Four actions, one token: E_engine over all actions against ∇ E_π[r] = π (r − E_π[r]), both exact."""
    logits = torch.tensor([0.3, -0.2, 1.0, 0.1])
    rewards = torch.tensor([1.0, 0.0, 0.2, -0.5])
    engine = torch.tensor([0.35, 0.15, 0.3, 0.2])  # another distribution: π is [0.22, 0.13, 0.45, 0.18]
    policy = logits.softmax(-1)
    exact = policy * (rewards - (policy * rewards).sum())
    mask, once = torch.ones((4, 1), dtype=torch.bool), torch.arange(4)

    def expected(cap: float | None) -> torch.Tensor:
        z = logits.clone().requires_grad_(True)
        logprobs = z.log_softmax(-1)[once][:, None]
        old = logprobs.detach()
        weights = importance_weights(old, engine.log()[:, None], mask, cap) if cap else None
        weighed = engine * rewards  # an action's share of the expectation; the loss is linear in the advantage
        loss, _ = losses.policy_loss(logprobs, old, weighed, mask, kind=kind, aggregation="token-sum", weights=weights)
        (-loss).backward()
        return z.grad

    def error(cap: float | None) -> float:
        return float((expected(cap) - exact).norm() / exact.norm())

    torch.testing.assert_close(expected(10.0), exact)
    assert error(10.0) < 1e-5 < error(1.3) < error(None)
    assert error(None) > 0.1


@pytest.fixture(scope="module")
def policy():
    return tiny.policy()


@pytest.fixture(scope="module")
def episodes(policy):
    return rollout(policy, tiny.ScoredEnv(), tiny.tasks(3), group_size=3, seed=5)


def shifted(episodes, by: float):
    """The same episodes as another engine would report them: every log-prob lower by ``by``."""
    return [
        replace(
            t,
            segments=[
                replace(s, logprobs=[x - by if m else x for x, m in zip(s.logprobs, s.action_mask, strict=True)])
                for s in t.segments
            ],
        )
        for t in episodes
    ]


def config(**options) -> TrainingConfig:
    return TrainingConfig(algorithm="GRPO", kl_weight=0.0, micro_batch_tokens=600, **options)


@pytest.mark.parametrize(
    ("by", "cap", "weight"), [(0.25, 2.0, math.exp(0.25)), (2.0, 2.0, 2.0), (-0.5, 2.0, math.exp(-0.5))]
)
def test_prepare_takes_the_trainers_log_probs_and_weighs_the_engines(policy, episodes, by, cap, weight):
    found = update.prepare(policy, shifted(episodes, by), config(engine="vllm", importance_cap=cap))
    mask = found.batch.action_mask
    local = update.prepare(policy, episodes, config())
    assert local.importance is None
    torch.testing.assert_close(found.old_logprobs, local.old_logprobs, atol=2e-5, rtol=0)
    torch.testing.assert_close(found.importance, torch.where(mask, weight, 1.0), atol=1e-4, rtol=0)
    torch.testing.assert_close(found.advantages, local.advantages)
    metrics = engine_metrics(found.old_logprobs, found.batch, config(engine="vllm", importance_cap=cap))
    assert metrics["engine_difference_mean"] == pytest.approx(abs(by), abs=1e-4)
    assert metrics["engine_difference_max"] == pytest.approx(abs(by), abs=1e-4)
    assert metrics["importance_capped"] == float(by > math.log(cap))
    assert engine_metrics(local.old_logprobs, local.batch, config()) == {}


def test_without_a_cap_the_first_ratio_is_still_1(policy, episodes):
    found = update.prepare(policy, shifted(episodes, 0.5), config(engine="vllm", importance_cap=None))
    assert found.importance is None
    stats = update.actor_gradient(policy, found, torch.arange(len(found.batch)), config(engine="vllm"))
    assert stats["log_ratio_max"] < 1e-5 and stats["ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    for p in policy.actor_parameters():
        p.grad = None


def test_the_actors_gradient_scales_with_the_weights(policy, episodes):
    """One weight on every token is a factor of the whole gradient."""

    def gradient(episodes, **options) -> torch.Tensor:
        experience = update.prepare(policy, episodes, config(**options))
        update.actor_gradient(policy, experience, torch.arange(len(experience.batch)), config(**options))
        flat = torch.cat([p.grad.flatten() for p in policy.actor_parameters()])
        for p in policy.actor_parameters():
            p.grad = None
        return flat

    plain, weighed = gradient(episodes), gradient(shifted(episodes, 0.25), engine="vllm")
    assert float(plain.norm()) > 0
    torch.testing.assert_close(weighed, plain * math.exp(0.25), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    "masks", [{"loss_mask": False}, {"advantage_mask": False}, {"loss_mask": False, "advantage_mask": False}]
)
def test_with_a_mask_off_observations_keep_weight_1(policy, episodes, masks):
    found = update.prepare(policy, shifted(episodes, 0.25), config(engine="vllm", **masks))
    local = update.prepare(policy, episodes, config(**masks))
    sampled = found.batch.turn_ids >= 0
    torch.testing.assert_close(found.old_logprobs, local.old_logprobs, atol=2e-5, rtol=0)
    assert found.importance[~sampled].unique().tolist() == [1.0]
    metrics = engine_metrics(found.old_logprobs, found.batch, config(engine="vllm"))
    assert metrics["engine_difference_max"] == pytest.approx(0.25, abs=1e-4)
