"""Exercises of lesson 03: the record of an episode, its two masks, the loss under the action mask."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from agentr1_lite.exercises import exercise, wrong_versions
from agentr1_lite.exercises.inputs import model_output

Piece = tuple[str, list[int], list[float]]
Record = tuple[list[int], list[bool], list[float]]


def _episode(rng: random.Random) -> tuple[list[Piece]]:
    turns = ["action", "seam", "observation", "seam"] * rng.randint(1, 3)
    pieces = []
    for source in ("prompt", *turns, "action"):
        ids = [rng.randrange(3, 90) for _ in range(rng.randint(2, 4))]
        pieces.append((source, ids, [-rng.random() for _ in ids] if source == "action" else []))
    return (pieces,)


@exercise(3, inputs=_episode)
def join_pieces(pieces: list[Piece]) -> Record:
    """Pieces (source, ids, log-probs of an action) in order → token ids, action mask and log-probs of one length."""
    ids = [i for _, tokens, _ in pieces for i in tokens]
    mask = [source == "action" for source, tokens, _ in pieces for _ in tokens]
    logprobs = [x for _, tokens, given in pieces for x in (given or [0.0] * len(tokens))]
    return ids, mask, logprobs


def _remasked(pieces: list[Piece], change: Callable[[str, bool, bool], bool]) -> Record:
    """The right record but for its mask: ``change(source, acted, next_acted)`` at every token."""
    ids, mask, logprobs = join_pieces(pieces)
    sources = [source for source, tokens, _ in pieces for _ in tokens]
    return ids, list(map(change, sources, mask, [*mask[1:], False])), logprobs


@wrong_versions(join_pieces, reread="Who wrote which token")
class WrongRecords:
    def seam_learned(pieces):
        """The seam is marked as an action; the loop inserted it, the policy never chose it."""
        return _remasked(pieces, lambda source, acted, following: source in ("action", "seam"))

    def all_behind_the_prompt(pieces):
        """Everything behind the prompt is marked; the tool's words would be trained on."""
        return _remasked(pieces, lambda source, acted, following: source != "prompt")

    def shifted(pieces):
        """The mask is shifted by one: True belongs on the sampled token, not on the one before."""
        return _remasked(pieces, lambda source, acted, following: following)

    def last_token_missing(pieces):
        """The last token of each turn is missing; the policy chose to end there, so it is an action."""
        return _remasked(pieces, lambda source, acted, following: acted and following)

    def short_logprobs(pieces):
        """Log-probs stand on sampled tokens only; give every other token 0.0, so that all three have one length."""
        return *join_pieces(pieces)[:2], [x for _, _, given in pieces for x in given]


Spans = list[list[tuple[int, int]]]


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


@exercise(3, inputs=_rows)
def two_masks(ids: Tensor, lengths: list[int], spans: Spans, pad_id: int) -> tuple[Tensor, Tensor]:
    """``spans[b]`` are the turns [start, end) of row b of ``ids`` (B, T) → attention mask, action mask, (B, T) bool."""
    attention = torch.arange(ids.shape[1]) < torch.tensor(lengths)[:, None]
    action = torch.zeros_like(attention)
    for row, turns in enumerate(spans):
        for start, end in turns:
            action[row, start:end] = True
    return attention, action


def _behind_prompt(ids: Tensor, spans: Spans) -> Tensor:
    return torch.arange(ids.shape[1]) >= torch.tensor([turns[0][0] for turns in spans])[:, None]


@wrong_versions(two_masks, reread="The mask is not the attention mask")
class WrongMasks:
    def action_as_attention(*given):
        """The action mask went into attention: the policy no longer sees what it was asked."""
        return (two_masks(*given)[1],) * 2

    def tool_hidden(ids, lengths, spans, pad_id):
        """Tool output is hidden from attention; it is masked in the loss only, the policy must read it."""
        action = two_masks(ids, lengths, spans, pad_id)[1]
        return action | ~_behind_prompt(ids, spans), action

    def padding_by_id(ids, lengths, spans, pad_id):
        """Padding is told by its id, so a true end of turn with the same id is lost; use the lengths."""
        return ids != pad_id, two_masks(ids, lengths, spans, pad_id)[1]

    def first_pad(ids, lengths, spans, pad_id):
        """Padding begins at the first pad_id for you, but that is an end of turn in the prompt, and all behind it is
        lost; use the lengths."""
        attention = F.pad((ids[:, :-1] != pad_id).cumprod(1), (1, 0), value=1).bool()
        return attention, two_masks(ids, lengths, spans, pad_id)[1]

    def padding_by_id_in_both(ids, lengths, spans, pad_id):
        """Padding is told by its id in both masks, so the true end of turn is never trained; use lengths and spans."""
        return ids != pad_id, two_masks(ids, lengths, spans, pad_id)[1] & (ids != pad_id)

    def all_behind_the_prompt(ids, lengths, spans, pad_id):
        """The action mask holds everything behind the prompt, the tool's words included."""
        attention = two_masks(ids, lengths, spans, pad_id)[0]
        return attention, attention & _behind_prompt(ids, spans)


def _logits(rng: random.Random) -> tuple[Tensor, Tensor, Tensor]:
    logits, ids, mask = model_output(rng)
    return logits.requires_grad_(), ids, mask


def _nll(logits: Tensor, ids: Tensor) -> Tensor:
    """−log π of tokens 1 .. T − 1; (B, T − 1)."""
    return F.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")


@exercise(3, inputs=_logits)
def masked_loss(logits: Tensor, ids: Tensor, action_mask: Tensor) -> Tensor:
    """Mean of −log π(token) over action tokens; logits (B, T, V), ids and mask (B, T) → scalar."""
    return _nll(logits, ids)[action_mask[:, 1:]].mean()


@wrong_versions(masked_loss, reread="The loss with and without the mask")
class WrongLosses:
    def no_mask(logits, ids, mask):
        """There is no mask: prompt and tool output are trained on."""
        return _nll(logits, ids).mean()

    def mean_over_all(logits, ids, mask):
        """The mean is over all tokens; divide by the number of action tokens."""
        return (_nll(logits, ids) * mask[:, 1:]).mean()

    def unshifted(logits, ids, mask):
        """Nothing is shifted: the logits at position t belong to the token at t + 1."""
        return F.cross_entropy(logits[mask], ids[mask])

    def mask_off_by_one(logits, ids, mask):
        """The mask is off by one: cut it as you cut the ids, action_mask[:, 1:]."""
        return _nll(logits, ids)[mask[:, :-1]].mean()

    def wrong_sign(logits, ids, mask):
        """The sign is turned round: a loss is what goes down, so it is minus the log-prob."""
        return -masked_loss(logits, ids, mask)

    def rows_first(logits, ids, mask):
        """Each row is averaged first, so a token of a short row counts more; average once."""
        return ((_nll(logits, ids) * mask[:, 1:]).sum(-1) / mask[:, 1:].sum(-1)).mean()
