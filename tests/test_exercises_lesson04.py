"""Lesson 04's exercises, answered as learners answer them: right in another way, and wrong in the typical ways."""

from __future__ import annotations

import pytest
import torch

from agentr1_lite.advantages import compute_returns, estimate
from agentr1_lite.exercises import check


def returns(rewards, action_mask, gamma):
    """The package's own answer."""
    return estimate("reinforce_pp", rewards, action_mask, gamma=gamma, whiten=False).returns


def every_token_a_step(rewards, action_mask, gamma):
    return compute_returns(rewards, gamma) * action_mask


def reset_at_replies(rewards, action_mask, gamma):
    out = torch.zeros_like(rewards)
    for b, row in enumerate(action_mask.tolist()):
        running = 0.0
        for t in range(len(row) - 1, -1, -1):
            running = float(rewards[b, t]) + gamma * running if row[t] else 0.0
            out[b, t] = running
    return out


def from_the_left(rewards, action_mask, gamma):
    out = torch.zeros_like(rewards)
    for b, row in enumerate(action_mask.tolist()):
        running = 0.0
        for t, acted in enumerate(row):
            if acted:
                running = float(rewards[b, t]) + gamma * running
                out[b, t] = running
    return out


def unmasked(rewards, action_mask, gamma):
    out = torch.zeros_like(rewards)
    for b, row in enumerate(action_mask.tolist()):
        running = 0.0
        for t in range(len(row) - 1, -1, -1):
            running = float(rewards[b, t]) + gamma * running if row[t] else running
            out[b, t] = running
    return out


def grouped(returns, group_ids):
    """The package's own answer."""
    return estimate("grpo", returns[:, None], torch.ones(len(returns), 1), group_ids=group_ids).advantages[:, 0]


def by_hand(returns, group_ids, biased=False, alone=0.0):
    out = torch.empty_like(returns)
    for g in set(group_ids.tolist()):
        own = returns[group_ids == g]
        std = own.std(correction=0 if biased else 1) if len(own) > 1 else torch.tensor(0.0)
        out[group_ids == g] = (own - own.mean()) / (std + 1e-6) if len(own) > 1 else alone
    return out


def over_the_batch(returns, group_ids):
    return (returns - returns.mean()) / (returns.std() + 1e-6)


def centred(returns, group_ids):
    return estimate("dr_grpo", returns[:, None], torch.ones(len(returns), 1), group_ids=group_ids).advantages[:, 0]


def shaped(rewards, potentials, gamma, end=0.0, take=1.0):
    ahead = [*potentials.tolist()[1:], end]
    pairs = zip(rewards.tolist(), potentials.tolist(), ahead, strict=True)
    return torch.tensor([r + gamma * after - take * before for r, before, after in pairs])


def last_untouched(rewards, potentials, gamma):
    out = shaped(rewards, potentials, gamma)
    out[-1] = rewards[-1]
    return out


@pytest.mark.filterwarnings("ignore:.*hold a single rollout")
@pytest.mark.parametrize(
    ("name", "answer"), [("returns_to_go", returns), ("group_advantage", grouped), ("potential_shaping", shaped)]
)
def test_right_in_another_way(name, answer):
    assert check(name, lambda *x: answer(*x)) and check(name, lambda *x: answer(*x), seed=3)


@pytest.mark.filterwarnings("ignore:.*hold a single rollout")
@pytest.mark.parametrize(
    ("name", "answer", "words"),
    [
        ("returns_to_go", every_token_a_step, "decays on observation tokens"),
        ("returns_to_go", reset_at_replies, "starts anew at each observation"),
        ("returns_to_go", lambda r, m, gamma: returns(r, m, 1.0), "γ is missing"),
        ("returns_to_go", unmasked, "Off the mask it must be 0; yours goes on"),
        ("returns_to_go", lambda r, m, gamma: compute_returns(r, gamma), "yours decays on them"),
        ("returns_to_go", from_the_left, "what was earned before"),
        ("returns_to_go", lambda r, m, gamma: r.sum(-1, keepdim=True) * m, "the whole episode's sum"),
        ("group_advantage", by_hand, "Equal returns do not give 0: the mean's rounding"),
        ("group_advantage", lambda r, g: by_hand(r, g, biased=True), "and the std divides by n"),
        ("group_advantage", lambda r, g: by_hand(r, g, alone=float("nan")), "A group of one gives nan, since"),
        ("group_advantage", over_the_batch, "those of the whole batch"),
        ("group_advantage", centred, "The std is missing"),
        ("potential_shaping", last_untouched, "The last turn keeps its potential"),
        ("potential_shaping", lambda r, p, gamma: shaped(r, p, gamma, end=float(p[-1])), "Behind the end stands"),
        ("potential_shaping", lambda r, p, gamma: shaped(r, p, 1.0), "γ is missing before"),
        ("potential_shaping", lambda r, p, gamma: r - (shaped(r, p, gamma) - r), "The sign is turned round"),
        ("potential_shaping", lambda r, p, gamma: shaped(r, p, gamma, take=0.0), "a bonus for each good state"),
        ("potential_shaping", lambda r, p, gamma: r + p, "pays for its change"),
    ],
)
def test_wrong_in_a_typical_way(name, answer, words):
    verdict = check(name, answer)
    assert (verdict.kind, words in verdict.text) == ("mistake", True), str(verdict)


def test_a_tight_group_is_not_an_equal_one():
    def flat(returns, group_ids):
        out = by_hand(returns, group_ids)
        for g in group_ids.unique():
            own = group_ids == g
            out[own] = out[own] if own.sum() > 1 and returns[own].std() >= 0.1 else 0.0
        return out

    assert check("group_advantage", flat).kind == "value"
