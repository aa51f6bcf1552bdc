"""Lesson 01's exercises, answered as learners answer them: right in another way, and wrong in the typical ways."""

from __future__ import annotations

import itertools

import pytest
import torch

from agentr1_lite.exercises import check
from agentr1_lite.mdp import Segment, Trajectory, Turn

G, E = "generative", "environmental"


def kinds(action_mask, prompt=0, each=False, last=True):
    out = []
    for acted, run in itertools.groupby(action_mask):
        length = len(list(run))
        out += [G] * length if acted else [E] * (length if each else 1)
    if not last and not action_mask[-1]:
        out = out[: -1 if not each else None]
    return out[prompt:]


def kinds_of_every_token(action_mask):
    first = action_mask.index(True)
    return [G if acted else E for acted in action_mask[first:]]


def backup(P, R, V, gamma, over="max", reward=1.0, late=1.0):
    states, actions, _ = P.shape
    q = torch.zeros(states, actions)
    for s, a in itertools.product(range(states), range(actions)):
        q[s, a] = sum(p * (late * reward * r + gamma * v) for p, r, v in zip(P[s, a], R[s, a], V, strict=True))
    return q.max(-1).values if over == "max" else q.mean(-1)


def optimistic(P, R, V, gamma):
    return torch.stack([max(row.flatten()) for row in R + gamma * V])


def rewards(action_mask, turn_ends, process, outcome):
    """The package's own answer."""
    segment = Segment(list(range(len(action_mask))), action_mask, [0.0] * len(action_mask))
    starts = [max(t for t in range(end) if action_mask[t] and (t == 0 or not action_mask[t - 1])) for end in turn_ends]
    turns = [Turn(0, a, b, process_reward=r) for a, b, r in zip(starts, turn_ends, process, strict=True)]
    return Trajectory("", "", [segment], turns, reward=outcome).token_rewards()[0]


def at_the_end(mask, ends, process, outcome):
    out = rewards(mask, ends, process, 0.0)
    out[-1] += outcome
    return out


def assigned(mask, ends, process, outcome):
    out = rewards(mask, ends, process, 0.0)
    out[ends[-1] - 1] = outcome
    return out


def on_the_reply(mask, ends, process, outcome):
    out = rewards(mask, ends, [0.0] * len(ends), outcome)
    for end, reward in zip(ends, process, strict=True):
        out[end] += reward
    return out


@pytest.mark.parametrize(
    ("name", "answer"),
    [("transition_kinds", lambda m: kinds(m, 1)), ("bellman_backup", backup), ("place_rewards", rewards)],
)
def test_right_in_another_way(name, answer):
    assert check(name, lambda *x: answer(*x)) and check(name, lambda *x: answer(*x), seed=3)


@pytest.mark.parametrize(
    ("name", "answer", "words"),
    [
        ("transition_kinds", kinds, "The prompt is the first state"),
        ("transition_kinds", kinds_of_every_token, "for each of its tokens"),
        ("transition_kinds", lambda m: [G if a else E for a in m], "and the prompt's too"),
        ("transition_kinds", lambda m: kinds(m, 1, last=False), "An episode may end on a tool's reply"),
        ("transition_kinds", lambda m: [k for k in kinds(m, 1) if k == E], "Only the replies are listed"),
        ("bellman_backup", lambda P, R, V, gamma: backup(P, R, V, 1.0), "γ is missing"),
        ("bellman_backup", lambda P, R, V, gamma: backup(P, R, V, gamma, late=gamma), "γ discounts the reward too"),
        ("bellman_backup", lambda P, R, V, gamma: backup(P, R, V, gamma, over="mean"), "You average over the actions"),
        ("bellman_backup", lambda P, R, V, gamma: backup(P, R, V, gamma, reward=0.0), "The rewards are missing"),
        ("bellman_backup", optimistic, "You take the best next state"),
        ("place_rewards", at_the_end, "The outcome lies on the very last token"),
        ("place_rewards", assigned, "The outcome replaces"),
        ("place_rewards", on_the_reply, "one token too late"),
        ("place_rewards", lambda m, e, p, o: rewards(m, e, [0.0] * len(e), o), "The process rewards are missing"),
    ],
)
def test_wrong_in_a_typical_way(name, answer, words):
    verdict = check(name, answer)
    assert (verdict.kind, words in verdict.text) == ("mistake", True), str(verdict)
