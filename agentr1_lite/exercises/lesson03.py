"""Exercises of lesson 03: the record of an episode, its two masks, the loss under the action mask."""

from __future__ import annotations

import random

import torch
import torch.nn.functional as F
from torch import Tensor

from agentr1_lite.exercises import exercise, mistake

Piece = tuple[str, list[int], list[float]]
Record = tuple[list[int], list[bool], list[float]]
RECORD, MASKS, LOSS = (
    "Who wrote which token",
    "The mask is not the attention mask",
    "The loss with and without the mask",
)


def _episode(rng: random.Random) -> tuple[list[Piece]]:
    def piece(source: str, least: int = 1) -> Piece:
        ids = [rng.randrange(3, 90) for _ in range(rng.randint(least, 4))]
        return source, ids, [-rng.random() for _ in ids] if source == "action" else []

    turns = [[piece("action", 2), piece("seam"), piece("observation"), piece("seam")] for _ in range(rng.randint(1, 3))]
    return ([piece("prompt"), *sum(turns, []), piece("action", 2)],)


@exercise(3, "join_pieces", inputs=_episode)
def join_pieces(pieces: list[Piece]) -> Record:
    """Pieces (source, ids, log-probs of an action) in order → token ids, action mask and log-probs of one length."""
    ids = [i for _, tokens, _ in pieces for i in tokens]
    mask = [source == "action" for source, tokens, _ in pieces for _ in tokens]
    logprobs = [x for _, tokens, given in pieces for x in (given or [0.0] * len(tokens))]
    return ids, mask, logprobs


def _remasked(pieces: list[Piece], change) -> Record:
    """The right record but for its mask: ``change(source, acted, next_acted)`` at every token."""
    ids, mask, logprobs = join_pieces(pieces)
    sources = [source for source, tokens, _ in pieces for _ in tokens]
    return ids, [change(*x) for x in zip(sources, mask, [*mask[1:], False], strict=True)], logprobs


for says, wrong in (
    (
        "The seam is marked as an action; the loop inserted it, the policy never chose it.",
        lambda pieces: _remasked(pieces, lambda source, acted, following: source in ("action", "seam")),
    ),
    (
        "Everything behind the prompt is marked; the tool's words would be trained on.",
        lambda pieces: _remasked(pieces, lambda source, acted, following: source != "prompt"),
    ),
    (
        "The mask is shifted by one: True belongs on the sampled token, not on the one before.",
        lambda pieces: _remasked(pieces, lambda source, acted, following: following),
    ),
    (
        "The last token of each turn is missing; the policy chose to end there, so it is an action.",
        lambda pieces: _remasked(pieces, lambda source, acted, following: acted and following),
    ),
    (
        "Log-probs stand on sampled tokens only; give every other token 0.0, so that all three have one length.",
        lambda pieces: (*join_pieces(pieces)[:2], [x for _, _, given in pieces for x in given]),
    ),
):
    mistake("join_pieces", says, RECORD)(wrong)


Spans = list[list[tuple[int, int]]]
Masks = tuple[Tensor, Tensor]


def _rows(rng: random.Random) -> tuple[Tensor, list[int], Spans, int]:
    spans, lengths = [], []
    for extra in (2, *[0] * rng.randint(1, 2)):
        a = rng.randint(2, 4)  # prompt, action, observation, action
        b, c = a + rng.randint(1, 3), a + rng.randint(4, 6)
        lengths.append(c + rng.randint(1, 3) + extra)
        spans.append([(a, b), (c, lengths[-1])])
    ids = torch.randint(1, 50, (len(lengths), max(lengths)))
    for row, length in enumerate(lengths):  # a true end of turn has the id that padding has, in the prompt too
        ids[row, [1, spans[row][0][1] - 1]] = 0
        ids[row, length - (length == max(lengths)) :] = 0  # a shorter row's last turn was cut before its end
    return ids, lengths, spans, 0


@exercise(3, "two_masks", inputs=_rows)
def two_masks(ids: Tensor, lengths: list[int], spans: Spans, pad_id: int) -> Masks:
    """``spans[b]`` are the turns [start, end) of row b of ``ids`` (B, T) → attention mask, action mask, (B, T) bool."""
    attention = torch.arange(ids.shape[1]) < torch.tensor(lengths)[:, None]
    action = torch.zeros_like(attention)
    for row, turns in enumerate(spans):
        for start, end in turns:
            action[row, start:end] = True
    return attention, action


def _behind_prompt(ids: Tensor, spans: Spans) -> Tensor:
    return torch.arange(ids.shape[1]) >= torch.tensor([turns[0][0] for turns in spans])[:, None]


for says, wrong in (
    (
        "The action mask went into attention: the policy no longer sees what it was asked.",
        lambda ids, lengths, spans, pad_id: (two_masks(ids, lengths, spans, pad_id)[1],) * 2,
    ),
    (
        "Tool output is hidden from attention; it is masked in the loss only, the policy must read it.",
        lambda ids, lengths, spans, pad_id: (
            ~_behind_prompt(ids, spans) | two_masks(ids, lengths, spans, pad_id)[1],
            two_masks(ids, lengths, spans, pad_id)[1],
        ),
    ),
    (
        "Padding is told by its id, so a true end of turn with the same id is lost; use the lengths.",
        lambda ids, lengths, spans, pad_id: (ids != pad_id, two_masks(ids, lengths, spans, pad_id)[1]),
    ),
    (
        "Padding begins at the first pad_id for you, but that is an end of turn in the prompt, and all behind it is "
        "lost; use the lengths.",
        lambda ids, lengths, spans, pad_id: (
            F.pad((ids[:, :-1] != pad_id).cumprod(1), (1, 0), value=1).bool(),
            two_masks(ids, lengths, spans, pad_id)[1],
        ),
    ),
    (
        "Padding is told by its id in both masks, so the true end of turn is never trained; use lengths and spans.",
        lambda ids, lengths, spans, pad_id: (
            ids != pad_id,
            two_masks(ids, lengths, spans, pad_id)[1] & (ids != pad_id),
        ),
    ),
    (
        "The action mask holds everything behind the prompt, the tool's words included.",
        lambda ids, lengths, spans, pad_id: (
            two_masks(ids, lengths, spans, pad_id)[0],
            two_masks(ids, lengths, spans, pad_id)[0] & _behind_prompt(ids, spans),
        ),
    ),
):
    mistake("two_masks", says, MASKS)(wrong)


def _model_output(rng: random.Random) -> tuple[Tensor, Tensor, Tensor]:
    rows, width, vocabulary = rng.randint(2, 3), rng.randint(5, 8), rng.randint(4, 9)
    mask = torch.rand(rows, width) < 0.5
    mask[:, 0], mask[:, 2], mask[0, 3:] = False, True, True
    return torch.randn(rows, width, vocabulary).requires_grad_(), torch.randint(0, vocabulary, (rows, width)), mask


def _nll(logits: Tensor, ids: Tensor) -> Tensor:
    """−log π of tokens 1 .. T − 1; (B, T − 1)."""
    return F.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")


@exercise(3, "masked_loss", inputs=_model_output)
def masked_loss(logits: Tensor, ids: Tensor, action_mask: Tensor) -> Tensor:
    """Mean of −log π(token) over action tokens; logits (B, T, V), ids and mask (B, T) → scalar."""
    return _nll(logits, ids)[action_mask[:, 1:]].mean()


for says, wrong in (
    ("There is no mask: prompt and tool output are trained on.", lambda z, ids, mask: _nll(z, ids).mean()),
    (
        "The mean is over all tokens; divide by the number of action tokens.",
        lambda z, ids, mask: (_nll(z, ids) * mask[:, 1:]).mean(),
    ),
    (
        "Nothing is shifted: the logits at position t belong to the token at t + 1.",
        lambda z, ids, mask: F.cross_entropy(z[mask], ids[mask]),
    ),
    (
        "The mask is off by one: cut it as you cut the ids, action_mask[:, 1:].",
        lambda z, ids, mask: _nll(z, ids)[mask[:, :-1]].mean(),
    ),
    (
        "The sign is turned round: a loss is what goes down, so it is minus the log-prob.",
        lambda z, ids, mask: -masked_loss(z, ids, mask),
    ),
    (
        "Each row is averaged first, so a token of a short row counts more; average once.",
        lambda z, ids, mask: ((_nll(z, ids) * mask[:, 1:]).sum(-1) / mask[:, 1:].sum(-1)).mean(),
    ),
):
    mistake("masked_loss", says, LOSS)(wrong)
