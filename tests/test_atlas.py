"""The invented world: splits share no entity, answers follow the facts, files are functions of seeds."""

from __future__ import annotations

import json

import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from agentr1_lite.jsonl import DataError
from agentr1_lite.mdp import StopReason, states
from agentr1_lite.scoring import score_answer
from agentr1_lite.tasks import build, load_task
from agentr1_lite.tasks.atlas import RELATIONS, SHARES, SPLITS, TRADES, World, name_words, split_of
from agentr1_lite.tasks.scripted import PLAYERS, check_log, encode_log, find_data, load_logs, record

QUIET = {"failing": 0.0, "count": 60}


@pytest.fixture(scope="module")
def worlds():
    return {(split, seed): World(seed, split) for split in SPLITS for seed in (0, 1, 2)}


def test_no_entity_stands_in_two_splits(worlds):
    names = {split: set() for split in SPLITS}
    for (split, _), world in worlds.items():
        names[split] |= set(world.entities)
        words = [word for name in world.entities for word in name.split()]
        assert len(set(words)) == len(words) == 2 * len(world.entities) == 240  # no word in two names
        assert set(words) <= set(name_words())
    assert not names["train"] & names["dev"] and not names["train"] & names["test"] and not names["dev"] & names["test"]
    assert {split_of(name) for name in names["train"]} == {"train"}


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), split=st.sampled_from(SPLITS), size=st.integers(24, 120))
def test_any_world_is_whole(seed, split, size):
    try:
        world = World(seed, split, size)
    except ValueError as error:
        assert "ask for a smaller world" in str(error) and size > 90
        return
    assert len(world.entities) == len(world.passages) == size
    assert {e.kind for e in world.entities.values()} == set(SHARES)
    passages = dict(world.passages)
    for name, entity in world.entities.items():
        facts = {r.noun: r for r in RELATIONS if r.subject == entity.kind}
        assert entity.facts.keys() == facts.keys() | {"trade"}
        assert entity.facts["trade"] in TRADES[entity.kind] and f" is a {entity.facts['trade']}." in passages[name]
        for noun in facts:
            other = entity.facts[noun]
            assert other != name and world.entities[other].kind == facts[noun].object
            assert facts[noun].sentence.format(other) in passages[name]
    check_questions(world, world.questions(20, seed))


def check_questions(world: World, tasks) -> None:
    assert len({task.question for task in tasks}) == len({task.id for task in tasks}) == len(tasks)
    for task in tasks:
        chains = [[tuple(step) for step in chain] for chain in task.info["chain"]]
        for chain in chains:
            for noun, subject, found in chain:
                assert world.entities[subject].facts[noun] == found
            assert all(a[2] == b[1] for a, b in zip(chain, chain[1:], strict=False))
        ends = [chain[-1][2] for chain in chains]
        if task.kind == "comparison":
            assert task.golds == (("yes" if ends[0] == ends[1] else "no"),) and len(chains) == 2
            assert not {"yes", "no"} & set(task.question.lower().rstrip("?").split())
        else:
            assert task.golds[0] == ends[0] and task.hops == len(chains[0])
            assert not any(gold.lower() in task.question.lower() for gold in task.golds)
            assert task.golds[0] not in [step[1] for step in chains[0]]
        assert list(task.evidence) == [step[1] for chain in chains for step in chain]
        assert chains[0][0][1] in task.question


def test_questions_follow_the_facts_and_the_mix(worlds):
    for world in worlds.values():
        check_questions(world, world.questions(150))
    tasks = worlds["train", 0].questions(400)
    counts = [
        sum(t.kind == "comparison" for t in tasks),
        *(sum(t.hops == h and t.kind != "comparison" for t in tasks) for h in (1, 2, 3)),
    ]
    assert all(abs(count / 400 - share) < 0.08 for count, share in zip(counts, (0.1, 0.25, 0.35, 0.3), strict=True))
    yes = sum(t.golds == ("yes",) for t in tasks if t.kind == "comparison")
    assert 0.3 < yes / counts[0] < 0.7
    assert {t.hops for t in World(3).questions(30, mix=(0, 0, 1, 0))} == {3}


def test_everything_is_a_function_of_its_seeds(tmp_path):
    def told(**knobs):
        found = load_task("atlas", "dev", **{**QUIET, **knobs})
        return [t.to_dict() for t in found.tasks], [(p.title, p.text) for p in found.passages]

    assert told() == told() and told(seed=1) != told() and told(size=60)[1] != told()[1]
    assert told(count=30)[0] == told()[0][:30]
    written = []
    for name in ("one", "two"):
        for maker in ("worlds", "demonstrations", "offline-logs"):
            build.MAKERS[maker](tmp_path / name)
        files = {p.relative_to(tmp_path / name): p.read_bytes() for p in (tmp_path / name).rglob("*") if p.is_file()}
        written.append(files)
    assert written[0] == written[1] and len(written[0]) == 8
    logs = json.loads((tmp_path / "one" / "offline_logs.json").read_text())
    assert {log["policy"] for log in logs} == set(build.LOG_PLAYERS)
    assert len(load_logs(tmp_path / "one" / "demonstrations.jsonl")) == build.DEMONSTRATIONS


@pytest.mark.parametrize("split", SPLITS)
def test_the_expert_solves_everything_that_does_not_fail(split):
    found = load_task("atlas", split, **QUIET)
    for task in found.tasks:
        log = record(found.env, task, "expert")
        assert log["reward"] == score_answer(log["answer"], task.golds)["em"] == 1.0, task.question
        assert log["stop_reason"] == "answer"
        assert sum(m["role"] == "assistant" for m in log["messages"]) == 1 + sum(map(len, task.info["chain"]))
    failing = load_task("atlas", split, failing=0.3, count=60)
    rewards = [record(failing.env, task, "expert", seed)["reward"] for seed, task in enumerate(failing.tasks)]
    assert 0.75 < sum(rewards) / len(rewards) <= 1


def test_every_player_plays_as_its_habits_say():
    found = load_task("atlas", "train", count=150, failing=0.2)
    means = {}
    for player in PLAYERS:
        logs = [record(found.env, task, player, seed) for seed, task in enumerate(found.tasks)]
        for log in logs:
            check_log(json.loads(json.dumps(log)))
        assert logs[:5] == [record(found.env, task, player, seed) for seed, task in enumerate(found.tasks[:5])]
        means[player] = sum(log["reward"] for log in logs) / len(logs)
    assert means["expert"] == max(means.values()) and means["guesser"] == min(means.values())


# Logs


def test_a_log_is_masked_as_its_roles_say():
    found, chat = load_task("atlas", "train", **QUIET, rewards={"em": 1.0, "step_penalty": -0.125}), tiny.policy().chat
    for number, task in enumerate(found.tasks[:12]):
        log = json.loads(json.dumps(record(found.env, task, "expert", number)))
        trajectory = encode_log(log, chat)
        trajectory.check()
        (segment,), spoken = trajectory.segments, [m["content"] for m in log["messages"] if m["role"] == "assistant"]
        assert [turn.text for turn in trajectory.turns] == spoken
        acted = set()
        for turn in trajectory.turns:
            ids = segment.token_ids[turn.start : turn.end]
            assert ids[-1] in chat.eos_ids and chat.decode(ids[:-1]) == turn.text
            acted |= set(range(turn.start, turn.end))
        assert acted == {i for i, a in enumerate(segment.action_mask) if a} and set(segment.logprobs) == {0.0}
        for turn in trajectory.turns[:-1]:
            shown = chat.decode(segment.token_ids[turn.observation_start : turn.observation_end])
            assert shown.strip() == turn.observation.strip() != ""
        whole = tiny.tokenizer().apply_chat_template(log["messages"], tools=log["tools"] or None, tokenize=False)
        assert chat.decode(segment.token_ids) == whole.removesuffix("\n")
        assert (
            trajectory.total_reward == pytest.approx(1.0 - 0.125 * len(spoken)) and trajectory.answer == task.golds[0]
        )
        assert sum(action is not None for _, action, _ in states(trajectory)) == trajectory.num_actions


def test_a_persons_reply_in_a_log_is_an_observation():
    chat = tiny.policy().chat
    messages = [("user", "Who?"), ("assistant", "Whom do you mean?"), ("user", "The mayor."), ("assistant", "Ada.")]
    log = {"policy": "p", "task": {"id": "t", "question": "Who?", "golds": []}, "reward": 1, "stop_reason": "no_call"}
    log["messages"] = [dict(zip(("role", "content"), m, strict=True)) for m in messages]
    check_log(log)
    trajectory = encode_log(log, chat)
    (segment,) = trajectory.segments
    said = chat.decode([i for i, acted in zip(segment.token_ids, segment.action_mask, strict=True) if acted])
    assert said == "Whom do you mean?<|im_end|>Ada.<|im_end|>" and trajectory.turns[0].observation == "The mayor."
    assert trajectory.stop_reason is StopReason.NO_CALL


LOG = {
    "policy": "p",
    "task": {"id": "t", "question": "q", "golds": ["a"]},
    "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}],
    "reward": 1.0,
}
HARM = {
    "has no 'messages'": lambda log: log.pop("messages"),
    "has no 'reward'": lambda log: log.pop("reward"),
    "has no 'golds'": lambda log: log["task"].pop("golds"),
    "task is 3": lambda log: log.update(task=3),
    "odd": lambda log: log["task"].update(odd=1),
    "reward is 'much'": lambda log: log.update(reward="much"),
    "reward is True": lambda log: log.update(reward=True),
    "message 0 is 'hello'": lambda log: log.update(messages="hello"),
    "message 1 is": lambda log: log["messages"][1].update(content=None),
    "no assistant turn": lambda log: log["messages"].pop(),
    "two assistant turns": lambda log: log["messages"].append({"role": "assistant", "content": "b"}),
    "'tired' is not a valid StopReason": lambda log: log.update(stop_reason="tired"),
    "policy is 3": lambda log: log.update(policy=3),
}


@pytest.mark.parametrize("said", HARM)
@pytest.mark.parametrize("array", [False, True])
def test_a_broken_log_is_named_with_its_line(said, array, tmp_path):
    good, bad = json.dumps(LOG), json.loads(json.dumps(LOG))
    HARM[said](bad)
    path = tmp_path / "logs.json"
    path.write_text(f"[{good},\n\n{json.dumps(bad)}]" if array else f"{good}\n\n{json.dumps(bad)}\n")
    with pytest.raises(DataError, match=r"logs\.json, line 3: ") as caught:
        load_logs(path)
    assert said in str(caught.value) and "mend or remove the row" in str(caught.value)


def test_shipped_files_are_found_from_anywhere(tmp_path, monkeypatch):
    (tmp_path / "shipped").mkdir()
    (tmp_path / "shipped" / "offline_logs.json").write_text(json.dumps([LOG]))
    monkeypatch.setenv("AGENTR1_DATA", str(tmp_path / "shipped"))
    monkeypatch.chdir(tmp_path)
    assert load_logs("data/offline_logs.json") == [LOG]
    for name in ("mine/offline_logs.json", "data/other.json"):
        with pytest.raises(DataError, match="no such file, here or in"):
            find_data(name)


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        ({"split": "tset"}, "split 'tset' is unknown; use one of train, dev, test"),
        ({"count": 0}, "count is 0; expected a whole number of at least 1"),
        ({"count": 10**5}, "has fewer than 100000 such questions"),
        ({"count": "many"}, "count is 'many'"),
        ({"size": 3}, "size is 3; expected a whole number of at least 24"),
        ({"size": 1000}, "size 1000 is out of range"),
        ({"distractors": 2}, "distractors is 2; expected a share from 0 to 1"),
        ({"mix": [1, 2]}, "expected four weights"),
        ({"mix": "abcd"}, "expected four weights"),
        ({"k": 0}, "k is 0"),
        ({"hop": 3}, "has no knob 'hop'"),
    ],
)
def test_a_wrong_knob_is_one_sentence(knobs, said):
    with pytest.raises(ValueError, match="^(atlas|task 'atlas')") as caught:
        load_task("atlas", **{"split": "train", **knobs})
    assert said in str(caught.value)


@pytest.mark.parametrize("name", ["atlas", "ATLAS"])
def test_a_configuration_without_settings_asks_for_the_same_world(name):
    """One default, whoever asks: YAML, Python, and the planner that reads the longest row."""
    from agentr1_lite.config import Config
    from agentr1_lite.pipeline import make_task
    from agentr1_lite.planner import plan_for

    config = Config.from_dict({"task": {"name": name}})
    asked, loaded = make_task(config, "dev"), load_task("atlas", "dev")

    def world(task_set):
        tool = task_set.env.tools[0]
        plain = {k: v for k, v in vars(task_set.env).items() if isinstance(v, (bool, int, float, str))}
        return plain, task_set.tasks, task_set.passages, (tool.k, tool.failing, tool.noisy)

    assert world(asked) == world(loaded) and asked.env.max_turns == 7
    assert plan_for(config).setting.response_tokens == loaded.env.max_response_tokens
    config.environment.max_turns = 5  # what is said counts, whatever it is
    assert make_task(config, "dev").env.max_turns == 5
