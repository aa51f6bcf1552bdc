"""Lesson 05's exercises, answered as learners answer them: right in another way, and wrong in the typical ways."""

from __future__ import annotations

import pytest
import torch

from agentr1_lite.exercises import check
from agentr1_lite.losses import kl, policy_loss


def clipped(ratio, advantages, clip_low, clip_high):
    out = []
    for r, a in zip(ratio.tolist(), advantages.tolist(), strict=True):
        held = min(max(r, 1 - clip_low), 1 + clip_high)
        out.append(-min(r * a, held * a))
    return torch.tensor(out)


def estimators(logprobs, ref_logprobs):
    return tuple(kl(logprobs, ref_logprobs, name) for name in ("k1", "k2", "k3"))


def swapped(logprobs, ref_logprobs):
    return estimators(ref_logprobs, logprobs)


def token_logprobs(logits, ids, temperature):
    rows = [torch.log_softmax(row / temperature, -1) for row in logits]
    out = torch.zeros(ids.shape)
    for b, row in enumerate(rows):
        for t in range(1, ids.shape[1]):
            out[b, t] = row[t - 1, ids[b, t]]
    return out


def agent(logits, ids, old_logprobs, advantages, action_mask, temperature, **options):
    """The package's own loss is the right answer."""
    return policy_loss(token_logprobs(logits, ids, temperature), old_logprobs, advantages, action_mask, **options)[0]


def over_all(logits, ids, old, advantages, mask, temperature):
    return agent(logits, ids, old, advantages, mask, temperature) * mask.sum() / mask.numel()


def early(values):
    """What ``[:, :-1]`` puts beside the token at t + 1."""
    return torch.cat([torch.zeros_like(values[:, :1]), values[:, :-1]], 1)


def cut_off(logits, ids, old, advantages, mask, temperature):
    return agent(logits, ids, early(old), early(advantages), early(mask), temperature)


def no_ratio(logits, ids, old, advantages, mask, temperature):
    return agent(logits, ids, old, advantages, mask, temperature, kind="reinforce")


@pytest.mark.parametrize(
    ("name", "answer"), [("clipped_loss", clipped), ("kl_estimators", estimators), ("agent_loss", agent)]
)
def test_right_in_another_way(name, answer):
    assert check(name, lambda *x: answer(*x)) and check(name, lambda *x: answer(*x), seed=3)


@pytest.mark.parametrize(
    ("name", "answer", "words"),
    [
        ("clipped_loss", lambda r, a, low, high: -clipped(r, a, low, high), "This is the objective"),
        ("clipped_loss", lambda r, a, low, high: -a * r.clamp(1 - low, 1 + high), "Only the clipped term is left"),
        ("clipped_loss", lambda r, a, low, high: clipped(r, a, low, low), "Both bounds use clip_low"),
        ("kl_estimators", swapped, "The sign of d is turned round"),
        ("kl_estimators", lambda p, q: (q - p, *estimators(p, q)[1:]), "k1 has the wrong sign"),
        ("kl_estimators", lambda p, q: (p - q, (p - q) ** 2, estimators(p, q)[2]), "k2 lacks its factor"),
        ("agent_loss", over_all, "The mean is over all tokens"),
        ("agent_loss", lambda *x: agent(*x[:4], torch.ones_like(x[4]), x[5]), "There is no mask"),
        ("agent_loss", lambda *x: agent(*x[:5], 1.0), "The temperature is missing"),
        ("agent_loss", lambda *x: cut_off(*x), "cut at the wrong end"),
        ("agent_loss", lambda z, i, old, a, m, t: agent(z, i, old, a, early(m), t), "The mask is off by one"),
        ("agent_loss", lambda *x: -agent(*x), "The sign is turned round"),
        ("agent_loss", lambda *x: agent(*x, clip_low=1.0, clip_high=99.0), "The ratio is not clipped"),
        ("agent_loss", lambda *x: agent(*x, aggregation="seq-mean-token-mean"), "Each row is averaged first"),
        ("agent_loss", no_ratio, "without the ratio"),
        ("agent_loss", lambda z, *x: agent(z.roll(-1, 1), *x), "Nothing is shifted"),
    ],
)
def test_wrong_in_a_typical_way(name, answer, words):
    verdict = check(name, answer)
    assert (verdict.kind, words in verdict.text) == ("mistake", True), str(verdict)
