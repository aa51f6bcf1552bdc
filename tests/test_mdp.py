"""The central types: nothing is lost in JSON Lines, a replay visits every token, rewards lie on actions."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentr1_lite import mdp
from agentr1_lite.mdp import Action, Segment, State, StopReason, Task, Trajectory, Turn, TurnKind

TEXT = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=8)
NUMBER = st.floats(-5, 0, width=32)
PLAIN = st.dictionaries(TEXT, TEXT | st.integers(-9, 9) | st.booleans() | st.none() | st.lists(NUMBER), max_size=2)


@st.composite
def trajectories(draw, segments: int = 3):
    """Episodes as a rollout makes them: prompt, then turns, each perhaps followed by a seam and an observation."""
    ids = st.lists(st.integers(0, 400), max_size=4)
    found, turns = [], []
    for index in range(draw(st.integers(1, segments))):
        segment = Segment()
        segment.extend(draw(ids) + [7])
        for _ in range(draw(st.integers(0, 3))):
            sampled = draw(ids) + [2]
            turn = Turn(
                index, *segment.extend(sampled, [draw(NUMBER) for _ in sampled]), draw(st.sampled_from(TurnKind))
            )
            start, _ = segment.extend(draw(ids))
            turn.observation_start, turn.observation_end = start, len(segment)
            turn.text, turn.observation, turn.anchor = draw(TEXT), draw(TEXT), draw(TEXT)
            turn.calls, turn.results = [draw(PLAIN)], [draw(PLAIN)]
            turn.process_reward, turn.flags = draw(NUMBER), draw(st.lists(TEXT, max_size=2))
            turns.append(turn)
        found.append(segment)
    return Trajectory(
        draw(TEXT),
        draw(TEXT),
        found,
        turns,
        question=draw(TEXT),
        golds=draw(st.lists(TEXT, max_size=2)),
        answer=draw(TEXT | st.none()),
        reward=draw(st.floats(allow_nan=False, allow_infinity=False)),
        reward_parts=draw(st.dictionaries(TEXT, NUMBER, max_size=2)),
        stop_reason=draw(st.sampled_from(StopReason)),
        policy_version=draw(st.integers(0, 9)),
        seed=draw(st.integers(0, 2**53)),
        info=draw(PLAIN),
    )


@settings(max_examples=60, deadline=None)
@given(found=st.lists(trajectories(), max_size=3))
def test_json_lines_lose_nothing(found, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "new" / "episodes.jsonl"
    mdp.save_jsonl(path, found)
    again = mdp.load_jsonl(path)
    assert again == found
    for trajectory in again:
        trajectory.check()
        assert all(type(x) is bool for s in trajectory.segments for x in s.action_mask)
        assert all(isinstance(turn.kind, TurnKind) for turn in trajectory.turns)
    mdp.save_jsonl(path, again)
    assert len(path.read_bytes().splitlines()) == path.read_bytes().count(b"\n") == len(found)


@settings(max_examples=60, deadline=None)
@given(trajectory=trajectories(segments=1))
def test_a_replay_visits_every_state(trajectory):
    (segment,) = trajectory.segments
    steps = list(mdp.states(trajectory))
    actions = [(state, action) for state, action, _ in steps if action is not None]
    assert [a.token for _, a in actions] == [
        t for t, acted in zip(segment.token_ids, segment.action_mask, strict=True) if acted
    ]
    places = [i for i, acted in enumerate(segment.action_mask) if acted]
    assert [list(state.token_ids) for state, _ in actions] == [segment.token_ids[:i] for i in places]
    assert [i + 1 for i, (_, a) in zip(places, actions, strict=True) if a.completes_turn] == [
        t.end for t in trajectory.turns
    ]
    for (_, _, after), (before, _, _) in zip(steps, steps[1:], strict=False):
        assert after == before
    if steps:
        assert list(steps[-1][2].token_ids) == segment.token_ids
        assert len(steps[-1][2].turns) == sum(action is None for _, action, _ in steps)


def test_several_contexts_have_no_single_replay():
    with pytest.raises(ValueError, match="have several"):
        list(mdp.states(Trajectory("t", "g", [Segment(), Segment()])))


def test_the_two_transitions():
    start = State(Task("t", "q"), (1, 2), tools=("search",))
    said = mdp.generative_transition(mdp.generative_transition(start, Action(3)), Action(4, completes_turn=True))
    assert said.partial == (3, 4) and said.token_ids == (1, 2, 3, 4) and start.partial == ()
    seen = mdp.environmental_transition(said, [5, 6], environment={"door": "open"}, memory=("a",))
    assert seen.turns == (((3, 4), (5, 6)),) and seen.partial == () and seen.token_ids == (1, 2, 3, 4, 5, 6)
    assert seen.environment == {"door": "open"} and seen.memory == ("a",) and seen.tools == ("search",)
    assert mdp.environmental_transition(seen, []).environment == {"door": "open"}


@settings(max_examples=60, deadline=None)
@given(trajectory=trajectories())
def test_rewards_lie_on_sampled_tokens_and_add_up(trajectory):
    rewards = trajectory.token_rewards()
    for segment, row in zip(trajectory.segments, rewards, strict=True):
        assert all(acted or reward == 0 for acted, reward in zip(segment.action_mask, row, strict=True))
    if trajectory.num_actions:
        assert sum(map(sum, rewards)) == pytest.approx(trajectory.total_reward, rel=1e-6, abs=1e-6)


def test_the_outcome_lies_on_the_last_action_also_behind_a_reply():
    first, second = Segment(), Segment()
    first.extend([1, 2])
    turns = [Turn(0, *first.extend([3, 4], [-1.0, -1.0]), process_reward=0.5)]
    first.extend([5, 6])
    turns.append(Turn(0, *first.extend([7], [-1.0]), process_reward=0.25))
    first.extend([8, 9])  # the episode ends on a tool's reply
    second.extend([1, 2])
    turns.append(Turn(1, 2, 2, process_reward=4.0))  # nothing was sampled in this one
    found = Trajectory("t", "g", [first, second], turns, reward=1.0)
    assert found.token_rewards() == [[0, 0, 0, 0.5, 0, 0, 1.25, 0, 0], [0, 0]]
    assert found.total_reward == 5.75 and (found.num_tokens, found.num_actions) == (11, 3)
    assert first.prompt_length == 2 and second.prompt_length == 2


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda t: t.segments[0].logprobs.pop(), r"segment 0 has 6 token_ids, 6 action_mask and 5 logprobs"),
        (lambda t: t.segments[0].logprobs.__setitem__(0, -0.5), r"segment 0 token 0 has log-prob -0.5"),
        (lambda t: t.segments[0].logprobs.__setitem__(3, float("nan")), r"segment 0 token 3 has log-prob nan"),
        (lambda t: setattr(t.turns[0], "segment", 1), r"turn 0 points to segment 1 of 1"),
        (lambda t: setattr(t.turns[0], "end", 7), r"turn 0 span \[2, 7\) lies outside its segment of 6"),
        (lambda t: setattr(t.turns[0], "observation_start", 9), r"observation span \[9, 0\)"),
    ],
)
def test_an_inconsistent_trajectory_is_named(harm, said):
    segment = Segment()
    segment.extend([1, 2])
    turn = Turn(0, *segment.extend([3, 4], [-1.0, -2.0]))
    segment.extend([5, 6])
    trajectory = Trajectory("t7", "g", [segment], [turn])
    trajectory.check()
    harm(trajectory)
    with pytest.raises(ValueError, match=rf"trajectory of task 't7': .*{said}"):
        trajectory.check()


def two_turns() -> Trajectory:
    """Tokens 0-1 prompt, 2-3 turn 0, 4 seam, 5-6 its observation, 7 seam, 8-9 turn 1, 11 its own."""
    segment, turns = Segment(), []
    segment.extend([1, 2])
    for seen in (2, 1):
        turn = Turn(0, *segment.extend([3, 4], [-1.0, -2.0]))
        segment.extend([5])
        turn.observation_start, turn.observation_end = segment.extend([6] * seen)
        segment.extend([7])
        turns.append(turn)
    other = Segment()
    other.extend([1, 2])
    turns.append(Turn(1, *other.extend([3], [0.0])))
    return Trajectory("t7", "g", [segment, other], turns)


def put(segment, token, acted):
    def harm(t):
        t.segments[segment].action_mask[token] = acted
        t.segments[segment].logprobs[token] = 0.0

    return harm


def spans(turn, **places):
    return lambda t: vars(t.turns[turn]).update(places)


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (put(0, 5, True), r"turn 0 observation span: token 5 is marked as sampled"),
        (put(0, 6, True), r"turn 0 observation span: token 6 is marked as sampled"),
        (put(0, 11, True), r"turn 1 observation span: token 11 is marked as sampled"),
        (put(0, 0, True), r"turn 0, before its span: token 0 is marked as sampled"),
        (put(0, 1, True), r"turn 0, before its span: token 1 is marked as sampled"),
        (put(0, 4, True), r"turn 0, before its observation span: token 4 is marked as sampled"),
        (put(0, 7, True), r"turn 1, before its span: token 7 is marked as sampled"),
        (put(1, 1, True), r"turn 2, before its span: token 1 is marked as sampled"),
        (put(0, 3, False), r"turn 0 span: token 3 is not marked as sampled"),
        (put(1, 2, False), r"turn 2 span: token 2 is not marked as sampled"),
        (lambda t: t.turns.reverse(), r"turn 1 points to segment 0, behind which turn 0 lies"),
        (lambda t: t.turns.insert(0, t.turns.pop(1)), r"turn 0, before its span: token 2 is marked as sampled"),
        (lambda t: t.turns.append(t.turns[2]), r"turn 3 span \[2, 3\) begins before token 3"),
        (spans(1, start=3), r"turn 1 span \[3, 10\) begins before token 7"),
        (spans(0, observation_start=0, observation_end=1), r"observation span \[0, 1\) begins before token 4"),
        (spans(0, observation_start=3), r"turn 0 observation span \[3, 7\) begins before token 4"),
        (spans(0, observation_end=9), r"turn 0 observation span: token 8 is marked as sampled"),
        (spans(0, end=5), r"turn 0 span: token 4 is not marked as sampled"),
        (spans(0, end=3), r"turn 0, before its observation span: token 3 is marked as sampled"),
        (spans(2, start=3, process_reward=1.0), r"turn 2 has process_reward 1.0 and no sampled token"),
        (lambda t: t.segments[0].logprobs.__setitem__(2, 0.5), r"segment 0 token 2 has log-prob 0.5"),
        (lambda t: t.segments[1].logprobs.__setitem__(2, float("inf")), r"segment 1 token 2 has log-prob inf"),
        (lambda t: t.segments[0].logprobs.__setitem__(5, -1.0), r"segment 0 token 5 has log-prob -1.0"),
    ],
)
def test_the_mask_is_that_of_the_turns(harm, said):
    trajectory = two_turns()
    trajectory.check()
    harm(trajectory)
    with pytest.raises(ValueError, match=rf"trajectory of task 't7': .*{said}"):
        trajectory.check()


@settings(max_examples=100, deadline=None)
@given(trajectory=trajectories(), data=st.data())
def test_a_token_of_the_world_is_never_trained_on(trajectory, data):
    trajectory.check()
    worlds = [
        (turn.segment, t)
        for turn in trajectory.turns
        for t in (*range(turn.observation_start, turn.observation_end), *range(turn.start))
        if not trajectory.segments[turn.segment].action_mask[t]
    ]
    if worlds:
        put(*data.draw(st.sampled_from(worlds)), True)(trajectory)
        with pytest.raises(ValueError, match="is marked as sampled"):
            trajectory.check()


def test_broken_rows_and_odd_lengths_are_named(tmp_path):
    path = tmp_path / "episodes.jsonl"
    mdp.save_jsonl(path, [Trajectory("t", "g")])
    whole = path.read_text()
    for row in ("{", '{"task_id": "t"}', whole.strip().replace('"interrupted"', '"tired"'), "[]"):
        path.write_text(whole + "\n" + row + "\n")
        with pytest.raises(ValueError, match=r"episodes\.jsonl, line 3: not a trajectory"):
            mdp.load_jsonl(path)
    with pytest.raises(ValueError, match="2 token ids came with 1 log-probs"):
        Segment().extend([1, 2], [-1.0])


def test_a_failed_save_leaves_the_former_file(tmp_path):
    path = tmp_path / "episodes.jsonl"
    mdp.save_jsonl(path, [Trajectory("t", "g")])
    with pytest.raises(TypeError):
        mdp.save_jsonl(path, [Trajectory("u", "g"), Trajectory("v", "g", info={"odd": object()})])
    assert [t.task_id for t in mdp.load_jsonl(path)] == ["t"]


ODD = st.floats() | st.text(max_size=3) | st.integers() | st.none() | st.booleans() | st.lists(st.text(max_size=2))


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(["task_id", "reward", "info", "reward_parts", "golds", "answer", "seed", "question"]), st.data())
def test_what_is_saved_is_loaded_and_else_nothing_is_left(tmp_path_factory, name, data):
    folder = tmp_path_factory.mktemp("episodes")
    keys = st.text(max_size=2) | st.integers(0, 1)
    value = data.draw(ODD | st.dictionaries(keys, ODD | st.dictionaries(keys, ODD, max_size=2), max_size=2))
    made = Trajectory("t", "g")
    setattr(made, name, value)
    try:
        mdp.save_jsonl(folder / "new" / "episodes.jsonl", [Trajectory("u", "g"), made])
    except ValueError as error:
        assert "episodes.jsonl: row 2 " in str(error) and "nothing was written" in str(error)
        assert list(folder.iterdir()) == []
    else:
        found = mdp.load_jsonl(folder / "new" / "episodes.jsonl")
        assert found[1].to_dict() == {**made.to_dict(), "golds": [str(gold) for gold in mdp.gold_list(made.golds)]}


@pytest.mark.parametrize(
    "harm, said",
    [
        ({"reward": float("nan")}, "row 1 is no trajectory .reward is nan"),
        ({"reward": float("-inf")}, "row 1 is no trajectory .reward is -inf"),
        ({"task_id": 5}, "row 1 is no trajectory .task_id is 5"),
        ({"stop_reason": "tired"}, "row 1 is no trajectory .'tired' is not a valid StopReason"),
        ({"answer": "\ud800"}, "row 1 cannot be written as JSON"),
        ({"info": {"x": [float("nan")]}}, "row 1 cannot be written as JSON"),
        ({"info": {1: "a", "1": "b"}}, "row 1 cannot be written as JSON .the key 1 is a int, not text"),
    ],
)
def test_a_trajectory_that_would_not_load_is_not_saved(tmp_path, harm, said):
    made = Trajectory("t", "g")
    vars(made).update(harm)
    with pytest.raises(ValueError, match=said):
        mdp.save_jsonl(tmp_path / "episodes.jsonl", [made])
    assert list(tmp_path.iterdir()) == []
