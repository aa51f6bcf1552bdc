"""Lesson 03's exercises, answered as learners answer them: right in another way, and wrong in the typical ways."""

from __future__ import annotations

import pytest
import torch

from agentr1_lite.exercises import check


def join(pieces, *, learn=("action",), drop=0, zeros=True):
    ids, mask, logprobs = [], [], []
    for source, tokens, given in pieces:
        for n, token in enumerate(tokens):
            ids.append(token)
            mask.append(source in learn and n < len(tokens) - drop)
            if given:
                logprobs.append(given[n])
            elif zeros:
                logprobs.append(0.0)
    return ids, mask, logprobs


def masks(ids, lengths, spans, pad_id):
    attention = torch.tensor([[t < length for t in range(ids.shape[1])] for length in lengths])
    action = torch.tensor([[any(a <= t < b for a, b in turns) for t in range(ids.shape[1])] for turns in spans])
    return attention, action


def tool_hidden(ids, lengths, spans, pad_id):
    attention, action = masks(ids, lengths, spans, pad_id)
    for row, turns in enumerate(spans):
        for (_, end), (start, _) in zip(turns, turns[1:], strict=False):
            attention[row, end:start] = False
    return attention, action


def until_first_pad(ids, lengths, spans, pad_id):
    attention, action = masks(ids, lengths, spans, pad_id)
    attention[:, 1:] = (ids[:, :-1] != pad_id).cumprod(1)
    return attention, action


def until_last_token(ids, lengths, spans, pad_id):
    lengths = [max(t for t, token in enumerate(row) if token != pad_id) + 2 for row in ids.tolist()]
    return masks(ids, lengths, spans, pad_id)


def loss(logits, ids, action_mask, shift=1, sign=-1.0, rows=False):
    total, count, means = 0.0, 0, []
    for row in range(len(ids)):
        picked = [
            sign * torch.log_softmax(logits[row, t - shift], -1)[ids[row, t]]
            for t in range(1, ids.shape[1])
            if action_mask[row, t]
        ]
        total, count = total + sum(picked), count + len(picked)
        means.append(sum(picked) / len(picked))
    return sum(means) / len(means) if rows else total / count


def over_all(logits, ids, action_mask):
    logp = logits.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1)
    return -(logp * action_mask[:, 1:]).mean()


@pytest.mark.parametrize(("name", "answer"), [("join_pieces", join), ("two_masks", masks), ("masked_loss", loss)])
def test_right_in_another_way(name, answer):
    assert check(name, answer)


@pytest.mark.parametrize(
    ("name", "answer", "words"),
    [
        ("join_pieces", lambda p: join(p, learn=("action", "seam")), "The seam is marked as an action"),
        ("join_pieces", lambda p: join(p, learn=("action", "seam", "observation")), "Everything behind the prompt"),
        ("join_pieces", lambda p: join(p, drop=1), "The last token of each turn is missing"),
        ("join_pieces", lambda p: join(p, zeros=False), "all three have one length"),
        ("two_masks", lambda *x: (masks(*x)[1], masks(*x)[1]), "The action mask went into attention"),
        ("two_masks", tool_hidden, "Tool output is hidden from attention"),
        ("two_masks", lambda i, n, s, p: (i.ne(p), masks(i, n, s, p)[1]), "Padding is told by its id, so"),
        ("two_masks", until_first_pad, "Padding begins at the first pad_id for you"),
        ("masked_loss", over_all, "The mean is over all tokens"),
        ("masked_loss", lambda z, i, m: loss(z, i, m, shift=0), "Nothing is shifted"),
        ("masked_loss", lambda z, i, m: loss(z, i, m, sign=1.0), "The sign is turned round"),
        ("masked_loss", lambda z, i, m: loss(z, i, m, rows=True), "Each row is averaged first"),
        ("masked_loss", lambda z, i, m: loss(z, i, torch.ones_like(m)), "There is no mask"),
    ],
)
def test_wrong_in_a_typical_way(name, answer, words):
    verdict = check(name, answer)
    assert (verdict.kind, words in verdict.text) == ("mistake", True), str(verdict)


@pytest.mark.parametrize("seed", range(5))
def test_padding_cannot_be_guessed_from_ids(seed):
    assert not check("two_masks", until_first_pad, seed) and not check("two_masks", until_last_token, seed)
