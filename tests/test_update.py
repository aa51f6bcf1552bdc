"""One learning step: the gradient against splits, processes and masks, and the parts of `update.py` by hand."""

from __future__ import annotations

import math
import os
from dataclasses import replace

import pytest
import tiny
import torch

from agentr1_lite import update
from agentr1_lite.batch import collate
from agentr1_lite.config import TrainingConfig
from agentr1_lite.mdp import Segment, StopReason, Trajectory, Turn
from agentr1_lite.rollout import rollout
from agentr1_lite.trainer import AgentR1Trainer

SETTINGS = {
    "grpo": {"algorithm": "GRPO", "kl_weight": 0.1, "entropy_weight": 0.01},
    "grpo-sequences": {"algorithm": "GRPO", "kl_weight": 0.1, "aggregation": "seq-mean-token-mean"},
    "gspo": {"algorithm": "GRPO", "ratio": "sequence", "aggregation": "seq-mean-token-mean", "kl_weight": 0.0},
    "ppo": {"algorithm": "PPO", "kl_weight": 0.1, "gamma": 0.99, "lam": 0.95},
}


def settings(name: str, **more) -> TrainingConfig:
    return TrainingConfig(**{**SETTINGS[name], **more})


@pytest.fixture(scope="module")
def policy():
    return trained()


def trained(**options):
    """A policy whose reference, critic and sampler differ from its present weights."""
    policy = tiny.policy(**options)
    policy.freeze_reference()
    policy.add_critic()
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in [*policy.actor_parameters(), *policy.critic_parameters()]:
            p += 0.01 * torch.randn(p.shape, generator=random)
    return policy


@pytest.fixture(scope="module")
def episodes(policy):
    """Three questions with three rollouts each; three turns with replies of different lengths between them."""
    return rollout(policy, tiny.ScoredEnv(), tiny.tasks(3), group_size=3, seed=5)


def gradient(policy, which, experience, config, share=update.ALONE, reduce=None):
    parameters = policy.actor_parameters() if which == "actor" else policy.critic_parameters()
    for p in parameters:
        p.grad = None
    function = update.actor_gradient if which == "actor" else update.critic_gradient
    rows = torch.arange(len(experience.batch))
    stats = function(policy, experience, rows, config, share=share)
    found = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    return torch.cat([(reduce(g) if reduce else g).flatten() for g in found]), stats


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize(("name", "which"), [(n, "actor") for n in SETTINGS] + [("ppo", "critic")])
def test_any_token_budget_gives_one_gradient(policy, episodes, name, which):
    experience = update.prepare(policy, episodes, settings(name))
    whole, stats = gradient(policy, which, experience, settings(name, micro_batch_tokens=10**6))
    assert whole.norm() > 1e-3
    for budget in (64, 400, 900):
        config = settings(name, micro_batch_tokens=budget)
        part, found = gradient(policy, which, experience, config)
        assert distance(part, whole) <= 1e-6
        assert found == pytest.approx(stats, rel=1e-4, abs=1e-6)


# Two processes


def two_processes(rank: int, port: int, folder: str) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1")
    os.environ.update(MASTER_PORT=str(port), ACCELERATE_USE_CPU="true")
    torch.set_num_threads(1)
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    policy = trained()
    episodes = rollout(policy, tiny.ScoredEnv(), tiny.tasks(3), group_size=3, seed=5)
    share = AgentR1Trainer(policy, accelerator=accelerator)._share
    out = {"processes": accelerator.num_processes}
    for name, which, budget in (
        *((n, "actor", 400) for n in SETTINGS),
        ("ppo", "critic", 400),
        ("grpo", "actor", 10**6),
    ):
        config = settings(name, micro_batch_tokens=budget)
        experience = update.prepare(policy, episodes, config)
        alone, one = gradient(policy, which, experience, config)
        ours, two = gradient(policy, which, experience, config, share, lambda g: accelerator.reduce(g, "sum"))
        out[name, which, budget] = distance(ours, alone), one, two
    training = {"algorithm": "PPO", "batch_size": 3, "group_size": 2, "micro_batch_tokens": 300, "critic_warmup": 0}
    run = {"output": folder, "progress": False}
    trainer = AgentR1Trainer(tiny.policy(), {"training": training, "run": run}, accelerator=accelerator)
    out["imitation"] = trainer.pretrain(episodes, epochs=2)
    out["online"] = trainer.online_rl(tiny.ScoredEnv(), 12, tasks=tiny.tasks(4))
    out["weights"] = torch.cat([p.detach().flatten() for p in trainer.policy.actor_parameters()])
    torch.save(out, f"{folder}-{rank}.pt")


def test_two_processes_give_the_gradient_of_one(policy, episodes, tmp_path):
    port = tiny.free_port()
    started = [tiny.processes().Process(target=two_processes, args=(r, port, str(tmp_path / "run"))) for r in (0, 1)]
    for process in started:
        process.start()
    for process in started:
        process.join(120)
    first, second = (torch.load(tmp_path / f"run-{rank}.pt", weights_only=False) for rank in (0, 1))
    assert first["processes"] == 2
    for key in [key for key in first if isinstance(key, tuple)]:
        far, one, two = first[key]
        assert far <= 1e-6, key
        assert two == pytest.approx(one, rel=1e-4, abs=1e-6)
    assert torch.equal(first["weights"], second["weights"])
    for phase in ("imitation", "online"):
        ours, theirs = ([without_seconds(row) for row in found[phase]] for found in (first, second))
        assert ours == theirs and len(ours) == 2
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 4
    run = {"output": str(tmp_path / "alone"), "progress": False}
    alone = AgentR1Trainer(tiny.policy(), {"training": {"micro_batch_tokens": 300}, "run": run})
    for row, two in zip(alone.pretrain(episodes, epochs=2), first["imitation"], strict=True):
        assert without_seconds(row) == pytest.approx(without_seconds(two), rel=1e-4)


def without_seconds(row):
    return {key: value for key, value in row.items() if "seconds" not in key}


# Masks


def state_gradients(policy, body, batch, run):
    """Largest gradient of each token's last hidden state, (B, T); token t's logits come from the state at t − 1."""
    seen = []

    def keep(module, inputs, output):
        output.last_hidden_state.retain_grad()
        seen.append((inputs, output.last_hidden_state))

    hook = body.register_forward_hook(keep)
    try:
        run()
    finally:
        hook.remove()
    assert len(seen) == len(batch)  # one row a pass
    out, order = torch.zeros(batch.input_ids.shape), torch.argsort(batch.lengths, descending=True, stable=True)
    for row, (_, states) in zip(order.tolist(), seen, strict=True):
        size = states.grad[0].abs().amax(-1)
        out[row, 1 : len(size)] = size[:-1]
    return out


ALONE_ROWS = {"micro_batch_tokens": 64}


@pytest.mark.parametrize("what", ["grpo", "gspo", "ppo", "critic", "imitation"])
def test_the_gradient_off_the_action_mask_is_exactly_zero(policy, episodes, what):
    config = settings("ppo" if what in ("critic", "imitation") else what, entropy_weight=0.01, **ALONE_ROWS)
    experience = update.prepare(policy, episodes, config)
    batch, rows = experience.batch, torch.arange(len(episodes))
    runs = {
        "critic": lambda: update.critic_gradient(policy, experience, rows, config),
        "imitation": lambda: update.nll_gradient(policy, batch, torch.ones(len(batch)), 64),
    }
    body = policy._critic if what == "critic" else policy.causal.base_model
    run = runs.get(what, lambda: update.actor_gradient(policy, experience, rows, config))
    found = state_gradients(policy, body, batch, run)
    acted = torch.zeros_like(batch.action_mask)
    for row, episode in enumerate(episodes):  # from the turns, not from the mask
        for turn in episode.turns:
            acted[row, turn.start : turn.end] = True
    assert sum(len(episode.turns) for episode in episodes) > len(episodes)
    assert (found[~acted] == 0).all()
    assert (found[acted] > 0).float().mean() > 0.9


@pytest.mark.parametrize("advantage_mask", [True, False])
def test_without_the_loss_mask_observations_are_trained_on(policy, episodes, advantage_mask):
    config = TrainingConfig(
        algorithm="GRPO", kl_weight=0, loss_mask=False, advantage_mask=advantage_mask, whiten=False, **ALONE_ROWS
    )
    experience = update.prepare(policy, episodes, config)
    rows = torch.arange(len(episodes))
    found = state_gradients(
        policy,
        policy.causal.base_model,
        experience.batch,
        lambda: update.actor_gradient(policy, experience, rows, config),
    )
    for row, episode in enumerate(episodes):
        if experience.advantages[row].any():
            for turn in episode.turns[:-1]:
                assert (found[row, turn.observation_start : turn.observation_end] > 0).all()
        assert (found[row, : episode.segments[0].prompt_length] == 0).all()


def test_the_advantage_mask_decides_what_the_estimator_and_the_critic_see(policy, episodes):
    batch = collate(episodes)
    for loss_mask, advantage_mask in ((True, True), (True, False), (False, True), (False, False)):
        config = settings("ppo", loss_mask=loss_mask, advantage_mask=advantage_mask)
        experience = update.prepare(policy, episodes, config)
        everything = update.response_mask(batch)
        assert torch.equal(experience.batch.action_mask, batch.action_mask if loss_mask else everything)
        assert torch.equal(experience.estimated, batch.action_mask if advantage_mask else everything)
        assert torch.equal(experience.old_logprobs[batch.action_mask], batch.old_logprobs[batch.action_mask])
        gap = everything & ~batch.action_mask
        assert bool((experience.values[gap] != 0).any()) == (not (loss_mask and advantage_mask))
        assert bool((experience.returns[gap] != 0).any()) == (not advantage_mask)


def test_an_observation_takes_the_advantage_of_the_turn_before_it():
    x = torch.tensor([[0.0, 5.0, 6.0, 0.0, 0.0, 7.0, 0.0]])
    mask = torch.tensor([[0, 1, 1, 0, 0, 1, 0]]).bool()
    assert update.last_on_mask(x, mask).tolist() == [[0, 5, 6, 6, 6, 7, 7]]


# The parts by hand


def episode(rewards: list[float], group="g", logprob=-1.0) -> Trajectory:
    """A prompt of three tokens; one turn of two sampled tokens for each process reward, a reply between them."""
    segment, turns = Segment(), []
    segment.extend([5, 6, 7])
    for number, reward in enumerate(rewards):
        if number:
            segment.extend([8, 9])
        turns.append(Turn(0, *segment.extend([10, 11], [logprob] * 2), process_reward=reward, anchor=str(number)))
    return Trajectory(group, group, [segment], turns, stop_reason=StopReason.ANSWER)


def test_the_kl_term_goes_into_the_reward_or_the_loss(policy, episodes):
    for algorithm, place in (("PPO", "reward"), ("REINFORCE++", "reward"), ("GRPO", "loss"), ("RLOO", "loss")):
        assert update.kl_place(TrainingConfig(algorithm=algorithm)) == place
        assert update.kl_place(TrainingConfig(algorithm=algorithm, kl_in="loss")) == "loss"
        assert update.kl_place(TrainingConfig(algorithm=algorithm, kl_weight=0)) == ""
    config = TrainingConfig(algorithm="REINFORCE++", whiten=False, kl_weight=0.5)
    experience = update.prepare(policy, episodes, config, kl_penalty=0.25)
    batch = collate(episodes)
    reference = policy.log_probs(batch, which="reference").logprobs
    charged = 0.75 * ((batch.old_logprobs - reference) * batch.action_mask).sum(-1)
    paid = torch.tensor([e.total_reward for e in episodes])
    first = batch.action_mask.float().argmax(-1)
    assert torch.allclose(experience.returns[torch.arange(len(batch)), first], paid - charged, atol=1e-4)
    other = update.prepare(policy, episodes, config, kl_weight=0.0, kl_penalty=0.25)
    assert not torch.allclose(other.returns, experience.returns)


def test_temperature_enters_sampling_and_update_alike(policy):
    found = rollout(policy, tiny.ScoredEnv(), tiny.tasks(2), group_size=2, temperature=0.7, seed=3)
    config = settings("grpo", temperature=0.7)
    experience = update.prepare(policy, found, config)
    _, stats = gradient(policy, "actor", experience, config)
    assert stats["log_ratio_max"] <= 1e-4
    _, wrong = gradient(policy, "actor", experience, replace(config, temperature=1.0))
    assert wrong["log_ratio_max"] > 0.1


def test_remax_subtracts_each_questions_greedy_return(policy):
    found = [episode([1.0], "a"), episode([0.0], "a"), episode([1.0, 1.0], "b")]
    experience = update.prepare(
        policy, found, TrainingConfig(algorithm="ReMax", kl_weight=0), baselines=[0.5, 0.5, 2.0]
    )
    at = [(0, 3), (1, 3), (2, 3), (2, 7)]
    assert [experience.advantages[b, t].item() for b, t in at] == [0.5, -0.5, 0.0, -1.0]


def test_mini_batches_hold_every_trajectory_once_and_whole(policy):
    silent = Trajectory("x", "x", [Segment()])
    two = episode([1.0])
    two.segments.append(Segment([5, 6, 10], [False, False, True], [0.0, 0.0, -1.0]))
    found = [two, silent, episode([0.0]), episode([1.0]), episode([2.0])]
    experience = update.prepare(policy, found, settings("ppo", kl_weight=0))
    parts = update.mini_batches(experience, 2, seed=1)
    assert sorted(torch.cat(parts).tolist()) == [0, 1, 2, 3, 4] and all(len(part) for part in parts)
    assert any({0, 1} <= set(part.tolist()) for part in parts)
    assert [p.tolist() for p in update.mini_batches(experience, 2, 1)] == [p.tolist() for p in parts]
    assert any(
        [p.tolist() for p in update.mini_batches(experience, 2, s)] != [p.tolist() for p in parts] for s in (2, 3)
    )
    assert [part.tolist() for part in update.mini_batches(experience, 1, 0)] == [[0, 1, 2, 3, 4]]


def test_a_gradient_is_clipped_and_one_that_is_not_finite_is_left_out():
    p, idle = torch.nn.Parameter(torch.tensor([1.0, 2.0])), torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([p, idle], lr=1.0)
    p.grad = torch.tensor([3.0, 4.0])
    assert update.apply_gradient([p, idle], optimizer, 1.0) == pytest.approx(5.0)
    assert p.tolist() == pytest.approx([0.4, 1.2]) and p.grad is None
    p.grad = torch.tensor([math.nan, 1.0])
    assert math.isnan(update.apply_gradient([p, idle], optimizer, 1.0))
    p.grad = torch.tensor([math.inf, 1.0])
    assert not math.isfinite(update.apply_gradient([p, idle], optimizer, 0.0))
    assert p.tolist() == pytest.approx([0.4, 1.2])
    p.grad, calls = torch.tensor([0.5, 0.0]), []
    update.apply_gradient([p, idle], optimizer, 0.0, lambda g: calls.append(g.tolist()) or 2 * g)
    assert calls == [[0.5, 0.0], [0.0]] and p.tolist() == pytest.approx([-0.6, 1.2])


def test_small_functions_by_hand():
    assert update.group_baselines([1.0, 0.0, 1.0, 0.0], ["a", "a", "b", "c"]) == [0.5, 0.5, 0.5, 0.5]
    assert update.group_baselines([1.0, 1.0, 4.0], ["a", "a", "b"]) == [1.0, 1.0, 2.0]
    assert [update.learning_rate(i, 1.0, 3) for i in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert [update.decay(i, 4) for i in range(4)] == [1.0, 0.75, 0.5, 0.25] and update.decay(99, 100) == 0.1
    assert update.phase_seed(0, "rollout", 3, 0) == 726581897  # crc32 of "(0,'rollout',3,0)" & 0x7FFFFFFF
    epoch = [update.step_rows(7, 3, i, seed=4) for i in range(3)]
    assert sorted(sum(epoch, [])) == list(range(7)) and [len(rows) for rows in epoch] == [3, 3, 1]
    assert update.step_rows(7, 3, 3, seed=4) != epoch[0]
    assert [len(update.step_rows(7, 3, i, 4, whole=True)) for i in range(4)] == [3] * 4


def test_episode_metrics_are_means_over_episodes():
    one, two = episode([0.5, 0.25], logprob=-2.0), episode([1.0], logprob=-1.0)
    one.reward, one.reward_parts, one.stop_reason = 1.0, {"em": 1.0}, StopReason.LENGTH
    found = update.episode_metrics([one, two])
    assert found["reward"] == pytest.approx((1.75 + 1.0) / 2) and found["reward/em"] == 0.5
    assert (found["turns"], found["action_tokens"], found["tokens"]) == (1.5, 3.0, 7.0)
    assert found["stop/length"] == found["stop/answer"] == 0.5 and "stop/no_call" not in found
    assert found["entropy_estimate"] == pytest.approx((4 * 2.0 + 2 * 1.0) / 6)
    assert found["frac_reward_zero_std"] == 0.0
