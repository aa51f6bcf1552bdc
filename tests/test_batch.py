"""Tensors and micro-batches of trajectories, by hand calculation and properties."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentr1_lite.batch import collate, micro_batches
from agentr1_lite.forward import numbered_rows
from agentr1_lite.mdp import Segment, Trajectory, Turn


def trajectory(prompt, spans, group="g", reward=0.0, anchors=None, process=0.0) -> Trajectory:
    """``spans``: (ids sampled, ids observed) a turn."""
    segment, turns = Segment(), []
    segment.extend(prompt)
    for i, (said, seen) in enumerate(spans):
        start, end = segment.extend(said, [-0.5] * len(said))
        o = segment.extend(seen)
        anchor = (anchors or [str(i)] * len(spans))[i]
        turns.append(
            Turn(0, start, end, observation_start=o[0], observation_end=o[1], anchor=anchor, process_reward=process)
        )
    return Trajectory("t", group, [segment], turns, reward=reward)


def test_collate_by_hand():
    batch = collate(
        [
            trajectory([5, 6], [([2, 2], [7]), ([8], [9, 9])], reward=1.0, process=0.5),
            trajectory([5, 6, 7], [([4], [])], group="h", reward=-1.0),
        ],
        pad_id=2,
    )
    assert batch.input_ids.tolist() == [[5, 6, 2, 2, 7, 8, 9, 9], [5, 6, 7, 4, 2, 2, 2, 2]]
    assert batch.attention_mask.int().tolist() == [[1] * 8, [1, 1, 1, 1, 0, 0, 0, 0]]
    assert batch.action_mask.int().tolist() == [[0, 0, 1, 1, 0, 1, 0, 0], [0, 0, 0, 1, 0, 0, 0, 0]]
    # the episode ended on a tool reply: the outcome stands on the last action
    assert batch.rewards.tolist() == [[0, 0, 0, 0.5, 0, 1.5, 0, 0], [0, 0, 0, -1, 0, 0, 0, 0]]
    assert batch.old_logprobs.tolist() == [[0, 0, -0.5, -0.5, 0, -0.5, 0, 0], [0, 0, 0, -0.5, 0, 0, 0, 0]]
    assert batch.turn_ids.tolist() == [[-1, -1, 0, 0, -1, 1, -1, -1], [-1, -1, -1, 0, -1, -1, -1, -1]]
    assert batch.prompt_lengths.tolist() == [2, 3] and batch.lengths.tolist() == [8, 4]
    assert batch.group_ids.tolist() == [0, 1] and batch.trajectory_index.tolist() == [0, 1]


def test_masks_come_from_lengths_when_pad_is_eos():
    """tk07: pad is missing or equals EOS; the true end of turn stays in both masks."""
    batch = collate([trajectory([5], [([6, 2], [])]), trajectory([7], [([2], [])])], pad_id=2)
    assert batch.attention_mask.int().tolist() == [[1, 1, 1], [1, 1, 0]]
    assert batch.action_mask.int().tolist() == [[0, 1, 1], [0, 1, 0]]


def test_anchors_are_equal_within_a_group_only():
    batch = collate(
        [
            trajectory([1], [([2], [3]), ([4], [])], anchors=["start", "page"]),
            trajectory([1], [([2], [3]), ([4], [])], anchors=["start", "start"]),
            trajectory([1], [([2], [3]), ([4], [])], anchors=["start", "page"], group="h"),
        ]
    )
    a = batch.anchor_ids[:, [1, 3]].tolist()
    assert a[0][0] == a[1][0] == a[1][1] != a[0][1]
    assert not {*a[0], *a[1]} & {*a[2]}
    assert (batch.anchor_ids[:, [0, 2]] == -1).all()


def test_segments_are_rows_of_one_trajectory():
    one = trajectory([1, 2], [([3], [4])], reward=1.0)
    extra = Segment()
    extra.extend([1, 9])
    at = extra.extend([5, 6], [-0.1, -0.2])
    one.segments.append(extra)
    one.turns.append(Turn(1, *at, anchor="x"))
    batch = collate([one, trajectory([1], [([2], [])], group="h")])
    assert batch.trajectory_index.tolist() == [0, 0, 1] and batch.group_ids.tolist() == [0, 0, 1]
    assert batch.turn_ids[1].tolist() == [-1, -1, 1, 1]
    assert batch.rewards.sum(dim=1).tolist() == [0, 1, 0]


def test_select_and_empty():
    batch = collate([trajectory([1], [([2], [])]), trajectory([1, 2, 3], [([2], [4, 4])])])
    part = batch.select(torch.tensor([1]))
    assert len(part) == 1 and part.input_ids.shape[1] == batch.input_ids.shape[1]
    assert part.to("cpu").lengths.tolist() == [6]
    with pytest.raises(ValueError, match="no trajectory"):
        collate([])
    with pytest.raises(ValueError, match="no trajectory"):
        collate([Trajectory("t", "g", [Segment()])])
    broken = trajectory([1], [([2], [])])
    broken.segments[0].logprobs.pop()
    with pytest.raises(ValueError, match="one length"):
        collate([broken])


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda t: t.segments[0].action_mask.__setitem__(4, True), r"turn 0 observation span: token 4 is marked as"),
        (lambda t: t.segments[0].logprobs.__setitem__(2, float("-inf")), "segment 0 token 2 has the log-prob -inf"),
        (lambda t: setattr(t, "reward", float("nan")), "segment 0 token 5 has the reward nan"),
        (lambda t: setattr(t.turns[0], "process_reward", float("inf")), "segment 0 token 3 has the reward inf"),
        (lambda t: vars(t).update(segments=[Segment([1], [True], [-1.0])], turns=[]), "token 0 is marked as sampled"),
    ],
)
def test_what_must_not_be_trained_on_is_refused(harm, words):
    whole = trajectory([1, 2], [([3, 4], [5]), ([6], [])], reward=1.0)
    assert len(collate([whole])) == 1
    harm(whole)
    with pytest.raises(ValueError, match=f"trajectory of task 't': .*{words}"):
        collate([whole])


row = st.tuples(st.integers(1, 12), st.integers(1, 30), st.integers(0, 4))


@settings(max_examples=60, deadline=None)
@given(st.lists(row, min_size=1, max_size=25), st.integers(5, 200), st.booleans())
def test_micro_batches_partition_the_rows_within_the_budget(shapes, budget, share):
    batch = collate([trajectory([g + 1] * p, [([9] * r, [])], group=str(g)) for p, r, g in shapes])
    parts = micro_batches(batch, budget, share_prompt=share)
    assert sorted(torch.cat(parts).tolist()) == list(range(len(shapes)))
    for part in parts:
        passed = len(set(numbered_rows(batch.input_ids[part]).tolist())) if share else len(part)
        assert passed == 1 or passed * int(batch.lengths[part].max()) <= budget


def test_groups_stay_together_where_prompts_are_long_and_their_own():
    rows = [
        trajectory(list(range(100 * g, 100 * g + 60)), [([9] * (4 + k), [])], group=str(g))
        for k in range(4)
        for g in range(1, 4)
    ]
    batch = collate(rows)
    parts = micro_batches(batch, 4 * 67)
    assert all(len(set(batch.group_ids[part].tolist())) == 1 for part in parts)


def test_lengths_go_together_where_all_share_a_prompt():
    rows = [trajectory([1] * 60, [([9 + k] * (4 if k % 2 else 40), [])], group=str(k // 4)) for k in range(16)]
    batch = collate(rows)
    parts = micro_batches(batch, 8 * 100)
    assert sorted(set(batch.lengths[p].tolist()) == {100} for p in parts) == [False, True]
