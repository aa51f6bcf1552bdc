"""The doctor on a healthy rollout, and on the same rollout with one fault at a time."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentr1_lite import checks, doctor
from agentr1_lite.advantages import estimate
from agentr1_lite.batch import collate
from agentr1_lite.checks import CHECKS, LESSONS, Case, Finding, examine, ratio_bound, sampled_mask, zero_variance_share
from agentr1_lite.doctor import Doctor, machine_check, observation_gradient, self_test
from agentr1_lite.losses import policy_loss
from agentr1_lite.mdp import Segment, StopReason, Trajectory, Turn, TurnKind
from agentr1_lite.rollout import rollout
from agentr1_lite.tasks import load_task


@pytest.fixture(scope="module")
def policy():
    return tiny.policy()


@pytest.fixture(scope="module")
def sampled(policy):
    return rollout(policy, tiny.EchoEnv(), tiny.tasks(3), group_size=3, seed=1)


@pytest.fixture
def trajectories(sampled):
    return copy.deepcopy(sampled)


def levels(findings: list[Finding]) -> dict[str, str]:
    return {finding.check: finding.level for finding in findings}


def verdict(name: str, **case) -> str | None:
    found = CHECKS[name][0](Case(**case))
    return found and found[0]


def rewarded(*groups: list[float]) -> list[Trajectory]:
    """Trajectories of one action token that earned the given rewards."""
    return [
        Trajectory(f"q{i}", f"g{i}", [Segment([1, 2], [False, True], [0.0, -0.5])], reward=x)
        for i, group in enumerate(groups)
        for x in group
    ]


def test_a_healthy_step(policy, trajectories):
    batch = collate(trajectories)
    with torch.no_grad():
        ratio = policy.log_probs(batch).logprobs - batch.old_logprobs
    metrics = {"first_log_ratio_max": float(ratio.abs().max()), "loss": 0.1, "grad_norm": 0.5, "clip_fraction": 0.0}
    found = levels(Doctor(policy, has_tools=False).examine(trajectories, batch, metrics))
    exact = ("lengths", "logprobs", "loss_mask", "first_ratio", "observation_gradients", "control_ids")
    assert {name: found[name] for name in (*exact, "rewards_on_actions", "finite")} == dict.fromkeys(
        (*exact, "rewards_on_actions", "finite"), "ok"
    )
    assert "fail" not in found.values()


def test_lost_log_prob(trajectories):
    trajectories[4].segments[0].logprobs.pop()
    assert verdict("lengths", trajectories=trajectories) == "fail"


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), float("inf"), 0.3])
def test_impossible_log_prob(trajectories, value):
    segment = trajectories[0].segments[0]
    segment.logprobs[segment.prompt_length] = value
    assert verdict("logprobs", trajectories=trajectories) == "fail"


def test_log_prob_on_an_observation(trajectories):
    trajectories[0].segments[0].logprobs[0] = -0.1
    assert verdict("logprobs", trajectories=trajectories) == "fail"


def test_other_temperature_shows_in_the_first_ratio(policy, trajectories):
    batch = collate(trajectories)
    with torch.no_grad():
        ratio = policy.log_probs(batch, temperature=0.7).logprobs - batch.old_logprobs
    findings = Doctor().examine(metrics={"first_log_ratio_max": float(ratio.abs().max())})
    assert findings[0].check == "first_ratio" and findings[0].level == "fail" and findings[0].lesson == 3
    assert "temperature" in findings[0].message


def test_ratio_bound_by_number_type():
    assert ratio_bound(None) == ratio_bound(tiny.policy()) == 1e-4
    half = tiny.policy()
    half.causal.to(torch.bfloat16)
    assert ratio_bound(half) == checks.RATIO_BOUNDS["bfloat16"]
    metrics = {"engine_difference_mean": 0.01, "engine_difference_max": 0.9}
    assert verdict("engine_difference", metrics=metrics, policy=half) == "ok"
    assert verdict("engine_difference", metrics=metrics, policy=tiny.policy()) == "warn"
    assert verdict("first_ratio", metrics={"first_log_ratio_max": float("nan")}) == "fail"


@pytest.mark.parametrize("rank", [0, 4])
def test_gradient_on_observations(trajectories, rank):
    """Exactly 0 under the action mask, not 0 when tool tokens are trained on; weights' gradients stay untouched."""
    policy = tiny.policy(lora_rank=rank)
    batch = collate(trajectories)
    good = observation_gradient(policy, batch, rows=9)
    assert good.observations == 0.0 and good.actions > 0
    assert all(p.grad is None for p in policy.actor_parameters())
    response = batch.attention_mask & (torch.arange(batch.input_ids.shape[1]) >= batch.prompt_lengths[:, None])
    wide = replace(batch, action_mask=response)
    bad = observation_gradient(policy, wide, sampled_mask(batch, trajectories), rows=9)
    assert bad.observations > 0
    found = levels(Doctor(policy).examine(trajectories, wide, {"loss": 0.0}))
    assert found["loss_mask"] == found["observation_gradients"] == "fail"


def test_gradient_through_the_policy_loss(policy, trajectories):
    """With a real loss, and log-probs whose every other entry is masked out of it."""
    batch = collate(trajectories)

    def loss(logprobs, part):
        return policy_loss(logprobs, part.old_logprobs, torch.ones(len(part)), part.action_mask)[0]

    measured = observation_gradient(policy, batch, loss=loss)
    assert measured.observations == 0.0 and measured.actions > 0
    assert verdict("observation_gradients", gradients=doctor.Gradients(0.0, 0.0)) == "fail"


def test_gradient_is_measured_once_in_a_while(policy, trajectories, monkeypatch):
    calls = []
    monkeypatch.setattr(doctor, "observation_gradient", lambda *a: calls.append(a) or doctor.Gradients(0.0, 1.0))
    batch, looking = collate(trajectories), Doctor(policy, every=3)
    for _ in range(7):
        looking.examine(trajectories, batch, {"loss": 0.0})
    assert len(calls) == 3


def test_forged_turn(policy, trajectories):
    """A control id inside a tool's text (transformers#29279); one the policy wrote itself is another matter."""
    assert verdict("control_ids", trajectories=trajectories, policy=policy) == "ok"
    header = policy.tokenizer.convert_tokens_to_ids("<|im_start|>")
    trajectory = next(t for t in trajectories if len(t.turns) > 1)
    turn = trajectory.turns[0]
    ids = trajectory.segments[0].token_ids
    saved = ids[turn.observation_start], ids[turn.start]
    ids[turn.observation_start] = header
    assert verdict("control_ids", trajectories=trajectories, policy=policy) == "fail"
    ids[turn.observation_start], ids[turn.start] = saved[0], header
    assert verdict("control_ids", trajectories=trajectories, policy=policy) == "warn"


def test_reward_on_a_masked_token(trajectories):
    """tests rl04: a trajectory that ends on a tool reply, the outcome put on its last, masked token."""
    batch = collate(trajectories)
    assert verdict("rewards_on_actions", batch=batch, trajectories=trajectories) == "ok"
    batch.rewards[0, int(batch.prompt_lengths[0]) - 1] = 1.0
    assert verdict("rewards_on_actions", batch=batch, trajectories=trajectories) == "fail"
    lost = Trajectory("q", "g", [Segment([1, 2], [False, False], [0.0, 0.0])], reward=1.0)
    assert verdict("rewards_on_actions", trajectories=[lost]) == "fail"


@pytest.mark.parametrize(
    "groups",
    [[[1.0] * 4], [[0.0] * 4], [[0.7] * 8], [[1.3] * 8], [[10.1] * 8], [[1.0] * 4, [0.0] * 4, [0.7] * 8]],
)
def test_equal_rewards(groups):
    """Case rl01: decided by max and min, not by a float standard deviation."""
    assert zero_variance_share(rewarded(*groups)) == 1.0
    assert verdict("group_variance", trajectories=rewarded(*groups)) == "warn"


@given(st.lists(st.lists(st.sampled_from([0.0, 0.1, 0.3, 1.0]), min_size=2, max_size=5), min_size=1, max_size=8))
@settings(max_examples=50, deadline=None)
def test_group_share_by_counting(groups):
    flat = sum(len(set(group)) == 1 for group in groups)
    assert zero_variance_share(rewarded(*groups)) == flat / len(groups)
    expected = "warn" if flat > 0.7 * len(groups) else "ok"
    assert verdict("group_variance", trajectories=rewarded(*groups)) == expected


SUMS = [0.3, 0.1 + 0.2, 0.1 + 0.1 + 0.1, 0.7 - 0.4, 1.0, 0.1 * 10, sum([0.1] * 10), 1.3]


@given(st.lists(st.lists(st.sampled_from(SUMS), min_size=2, max_size=4), min_size=1, max_size=5))
@settings(max_examples=60, deadline=None)
def test_doctor_and_estimators_agree_which_rewards_are_equal(groups):
    """0.1 + 0.2 and 0.3 are one reward: no advantage, no fault where the gradient is 0, and questions drawn anew."""
    trajectories = rewarded(*groups)
    batch = collate(trajectories)
    found = estimate("dr_grpo", batch.rewards, batch.action_mask, group_ids=batch.group_ids).advantages
    rows = found.abs().sum(-1).tolist()
    flat = sum(sum(rows.pop(0) for _ in group) == 0 for group in groups)
    assert flat == sum(len({round(x, 9) for x in group}) == 1 for group in groups)
    assert zero_variance_share(trajectories) == flat / len(groups)
    level = verdict("gradient_size", metrics={"grad_norm": 0.0}, trajectories=trajectories)
    assert level == ("ok" if flat == len(groups) else "fail")


def test_rewards_that_cancel_are_equal_up_to_their_size():
    """1e6 − 1e6 + 0.25 against 0.25 is compared at the size of what was summed, as the estimators do."""
    plain, summed = rewarded([0.25, 0.25])
    turns = [Turn(0, 1, 2, TurnKind.ANSWER, process_reward=1e6), Turn(0, 1, 2, TurnKind.ANSWER, process_reward=-1e6)]
    summed = replace(summed, turns=turns, reward=0.25 + 1e-9)
    assert zero_variance_share([plain, summed]) == 1.0 and zero_variance_share(rewarded([0.25, 0.25 + 1e-6])) == 0.0


def test_groups_of_one():
    assert verdict("group_variance", trajectories=rewarded([1.0], [0.0])) == "warn"
    assert verdict("group_variance", trajectories=[]) is None


@pytest.mark.parametrize(("cut", "level"), [(0, "ok"), (24, "ok"), (25, "warn"), (100, "warn")])
@pytest.mark.parametrize("reason", [StopReason.LENGTH, StopReason.MAX_TURNS])
def test_a_quarter_cut(cut, level, reason):
    episodes = rewarded([0.0] * 100)
    for i, t in enumerate(episodes):
        t.stop_reason = reason if i < cut else StopReason.ANSWER
    assert verdict("cut_short", trajectories=episodes) == level


def test_turns_are_read():
    episodes = rewarded([0.0] * 4)
    assert verdict("tool_use", trajectories=episodes) == "warn"
    assert verdict("tool_use", trajectories=episodes, has_tools=False) is None
    for t in episodes:
        t.turns = [Turn(0, 1, 2, TurnKind.TOOL_CALL, "…", [{"name": "search"}]), Turn(0, 1, 2, TurnKind.ANSWER)]
    assert [verdict(n, trajectories=episodes) for n in ("tool_use", "malformed_calls", "invented_replies")] == [
        "ok"
    ] * 3
    for t in episodes:
        t.turns[0].kind, t.turns[1].text = TurnKind.INVALID, "<tool_response>\nOslo\n</tool_response>"
    assert [verdict(n, trajectories=episodes) for n in ("malformed_calls", "invented_replies")] == ["warn"] * 2


@pytest.mark.parametrize(
    ("name", "history", "metrics", "level"),
    [
        ("finite", [], {"loss": float("nan")}, "fail"),
        ("finite", [], {"grad_norm": float("inf"), "loss": 1.0}, "fail"),
        ("finite", [], {"loss": 1.0, "turns": 3}, "ok"),
        ("engine_difference", [], {"engine_difference_mean": 2e-3, "engine_difference_max": 0.1}, "warn"),
        ("engine_difference", [], {"engine_difference_mean": 4e-7, "engine_difference_max": 0.1}, "ok"),
        ("engine_difference", [], {"engine_difference_mean": float("nan"), "engine_difference_max": 0.1}, "warn"),
        ("engine_difference", [], {"first_log_ratio_max": 9.0}, None),
        ("clipping", [], {"clip_fraction": 0.31}, "warn"),
        ("clipping", [], {"clip_fraction": 0.02}, "ok"),
        ("kl_size", [], {"kl": 1.5}, "warn"),
        ("kl_size", [{"kl": 0.01}] * 9, {"kl": 0.2}, "warn"),
        ("kl_size", [{"kl": 0.001}] * 9, {"kl": 0.02}, "ok"),
        ("kl_size", [{"kl": -0.001}] * 9, {"kl": -0.002}, "ok"),
        ("entropy_level", [{"entropy": 1.0}] * 9, {"entropy": 0.05}, "warn"),
        ("entropy_level", [{"entropy_estimate": 1.0}] * 9, {"entropy_estimate": 0.5}, "ok"),
        ("entropy_level", [{"entropy": 1.0}] * 2, {"entropy": 0.05}, "ok"),
        ("critic_fit", [{"explained_variance": -0.5}] * 12, {"explained_variance": -0.1}, "warn"),
        ("critic_fit", [{"explained_variance": -0.5}] * 3, {"explained_variance": -0.1}, "ok"),
        ("gradient_size", [{"grad_norm": 1.0}] * 6, {"grad_norm": 30.0}, "warn"),
        ("gradient_size", [], {"grad_norm": 30.0}, "ok"),
        ("gradient_size", [], {}, None),
    ],
)
def test_numbers_of_the_update(name, history, metrics, level):
    assert verdict(name, history=history, metrics=metrics) == level


def test_no_gradient_although_rewards_differ():
    """None of the inputs require grad (trl#2671): said, unless no group could teach anything."""
    assert verdict("gradient_size", metrics={"grad_norm": 0.0}, trajectories=rewarded([0.0, 1.0])) == "fail"
    assert verdict("gradient_size", metrics={"grad_norm": 0.0}, trajectories=rewarded([1.0, 1.0])) == "ok"


def test_broken_weight():
    policy = tiny.policy()
    with torch.no_grad():
        policy.actor_parameters()[3].view(-1)[0] = float("nan")
    assert verdict("finite", policy=policy, metrics={"loss": 0.0}) == "fail"


def test_history_is_kept_by_the_doctor():
    looking = Doctor()
    for _ in range(6):
        assert levels(looking.examine(metrics={"entropy": 1.0})) == {"finite": "ok", "entropy_level": "ok"}
    worst = looking.examine(metrics={"entropy": 0.01})[0]
    assert (worst.check, worst.level) == ("entropy_level", "warn")
    assert str(worst).endswith("(lesson 05, Masked losses)") and "\n" not in str(worst)


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_any_extra_token_in_the_loss_is_seen(data):
    """Whatever masks the rollout recorded: the loss mask is wrong iff it holds a token that was not sampled."""
    row = st.lists(st.booleans(), min_size=2, max_size=8)
    written = [[False, *mask] for mask in data.draw(st.lists(row, min_size=1, max_size=4))]
    episodes = [
        Trajectory(f"q{i}", "g", [Segment([1] * len(m), m, [-0.5 if x else 0.0 for x in m])])
        for i, m in enumerate(written)
    ]
    batch = collate(episodes)
    assert torch.equal(sampled_mask(batch, episodes), batch.action_mask)
    width = batch.input_ids.shape[1]
    used = torch.tensor([data.draw(st.lists(st.booleans(), min_size=width, max_size=width)) for _ in written])
    expected = "fail" if bool((used & ~batch.action_mask).any()) else "ok"
    assert verdict("loss_mask", batch=replace(batch, action_mask=used), trajectories=episodes) == expected


def test_every_check_names_a_lesson():
    assert {lesson for _, lesson in CHECKS.values()} <= set(LESSONS)
    assert examine(Case()) == []


def test_machine_check(monkeypatch, tmp_path):
    found = levels(machine_check())
    assert list(found) == ["cores", "memory", "gpu", "versions", "files"] and found["versions"] == "ok"
    monkeypatch.setenv("AGENTR1_DATA", str(tmp_path))
    assert levels(machine_check())["files"] == "fail"
    monkeypatch.setitem(doctor.STACK, "peft", "99.0")
    monkeypatch.setitem(doctor.STACK, "no-such-package", "1.0")
    versions = next(f for f in machine_check() if f.check == "versions")
    assert versions.level == "fail" and "must be at least 99.0" in versions.message
    assert "no-such-package is not installed" in versions.message


def test_self_test_on_atlas(policy, monkeypatch, tmp_path):
    """Without its files it says so; with any policy every invariant is exact."""
    found = levels(self_test(policy, questions=2, group_size=2))
    assert {found[n] for n in ("lengths", "first_ratio", "observation_gradients", "loss_mask", "control_ids")} == {"ok"}
    monkeypatch.setenv("AGENTR1_DATA", str(tmp_path))
    (missing,) = self_test()
    assert missing.level == "fail" and "atlas-tiny" in missing.message


def test_the_loaded_task_gives_tools():
    assert load_task("atlas", "dev", count=2).env.tool_schemas
