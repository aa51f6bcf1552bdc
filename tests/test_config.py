from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import fields, is_dataclass

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from agentr1_lite.config import (
    AGGREGATIONS,
    ALGORITHMS,
    Config,
    ConfigError,
    RewardConfig,
    load_config,
    recipes,
    reward_spec,
)
from agentr1_lite.settings import Above, checked, fold, value_type

OVERVIEW = """
model:    {base_model: "Qwen/Qwen2.5-7B", lora_rank: 64}
training: {algorithm: "PPO", epochs: 3, batch_size: 64, lr: 3e-5, kl_weight: 0.1}
reward:   {task_success: 1.0, step_penalty: -0.01, kl_penalty: 0.05}
rlhf:     {offline_phase: true, offline_data: "data/offline_logs.json", online_rollouts: 10000}
"""


@pytest.fixture
def write(tmp_path):
    def write(content: str | bytes, name: str = "run.yaml"):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


def message(call, *arguments) -> str:
    with pytest.raises(ConfigError) as caught:
        call(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_overview_yaml_loads_as_it_stands(write):
    c = load_config(write(OVERVIEW))
    assert (c.model.base_model, c.model.lora_rank) == ("Qwen/Qwen2.5-7B", 64)
    t = c.training
    assert (t.algorithm, t.epochs, t.batch_size, t.lr, t.kl_weight) == ("PPO", 3, 64, 3e-5, 0.1)
    assert (c.reward.task_success, c.reward.step_penalty, c.reward.kl_penalty) == (1.0, -0.01, 0.05)
    assert (c.rlhf.offline_phase, c.rlhf.offline_data) == (True, "data/offline_logs.json")
    assert c.rlhf.online_rollouts == 10000
    assert reward_spec(c.reward) == {"task_success": 1.0, "step_penalty": -0.01}


def test_pyyaml_itself_reads_the_learning_rate_as_text():
    assert yaml.safe_load("lr: 3e-5") == {"lr": "3e-5"}
    assert Config.from_dict({"training": {"lr": "3e-5"}}).training.lr == 3e-5


@pytest.mark.parametrize(
    ("text", "value"),
    [("3e-5", 3e-5), ("3.0E-5", 3e-5), (".00003", 3e-5), ("'3e-5'", 3e-5), ("0", 0.0), ("1e-2", 0.01), ("+.1", 0.1)],
)
def test_spellings_of_a_number(write, text, value):
    assert load_config(write(f"training: {{lr: {text}}}")).training.lr == value


def test_whole_numbers_keep_their_value(write):
    c = load_config(write("training: {epochs: 010, batch_size: 1e2}\nrlhf: {online_rollouts: none}"))
    assert (c.training.epochs, c.training.batch_size, c.rlhf.online_rollouts) == (10, 100, None)
    assert isinstance(c.training.batch_size, int)


@pytest.mark.parametrize("name", ["dr_grpo", "Dr. GRPO", "DR-GRPO", "drgrpo"])
def test_choices_ignore_case_and_punctuation(name):
    assert Config.from_dict({"training": {"algorithm": name}}).training.algorithm == "Dr. GRPO"
    assert fold("REINFORCE++-baseline") == fold("reinforce_pp_baseline") == fold("reinforce_plusplus_baseline")


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ("training:\n  lr: fast\n", ["line 2", "training.lr", "'fast'", "a number from 0 to 0.1"]),
        ("training: {lr: -1}", ["line 1", "training.lr", "-1", "from 0"]),
        ("training: {lr: .nan}", ["training.lr", ".nan", "a number"]),
        ("training: {lr: 1e999}", ["training.lr", "inf", "a number"]),
        ("training: {lr: }", ["training.lr", "empty", "a number"]),
        ("training: {gamma: 1.5}", ["training.gamma", "1.5", "from 0 to 1"]),
        ("training: {batch_size: 64.5}", ["training.batch_size", "64.5", "a whole number"]),
        ("training: {batch_size: true}", ["training.batch_size", "true", "a whole number"]),
        ("training: {batch_size: 0}", ["training.batch_size", "0", "from 1"]),
        ("training: {batch_size: [64]}", ["training.batch_size", "[64]", "a whole number"]),
        ("training: {algorithm: PPOO}", ["training.algorithm", "'PPOO'", "PPO, ", "GRPO"]),
        ("model: {base_model: 7}", ["model.base_model", "7", "text"]),
        ("model: {quantization: int8}", ["model.quantization", "'int8'", "nf4", "none"]),
        ("rlhf: {offline_phase: 1}", ["rlhf.offline_phase", "1", "true or false"]),
        ("reward: {step_penalty: 0.01}", ["reward.step_penalty", "0.01", "to 0"]),
        ("task: {knobs: 3}", ["task.knobs", "3", "a mapping"]),
        ("model: {quantization: nf4}", ["model.quantization", "lora_rank"]),
        ("training: {mini_batches: 9, batch_size: 2, group_size: 4}", ["training.mini_batches", "9", "8"]),
        ("training: 3", ["line 1", "training", "3", "mapping"]),
        ("training:\n  lrr: 1\n", ["line 2", "training.lrr", "did you mean training.lr?"]),
        ("training: {learning_rate: 1}", ["did you mean training.lr?"]),
        ("training: {task_success: 1}", ["did you mean reward.task_success?"]),
        ("training: {zzz: 1}", ["training.zzz", "expected one of algorithm, epochs"]),
        ("trainin: {lr: 1}", ["'trainin'", "did you mean training?"]),
        ("lr: 1e-5", ["'lr'", "did you mean training.lr?"]),
        ("scheduler: {}", ["'scheduler'", "model, task, environment"]),
        ("1: {}", ["unknown section 1"]),
        ("training: {lr: 1e-5, lr: 1e-6}", ["training.lr", "twice"]),
        ("training: {lr: 1e-5}\nmodel: {}\ntraining: {epochs: 2}", ["line 3", "training", "twice", "line 1"]),
        ("training:\n\tlr: 1e-5\n", ["line 2", "tab", "spaces"]),
        ("training:\n  lr: 1e-5\n\tepochs: 3\n", ["line 3", "tab", "spaces"]),
        ("training: {lr: 1e-5", ["line 1", "not valid YAML"]),
        ("training:\n  lr: 3: 4\n", ["line 2", "not valid YAML"]),
        ("training: {}\n---\nmodel: {}\n", ["line 2", "another document"]),
        ("task: {knobs: &a {x: *a}}", ["line 1", "alias"]),
        ("training: {lr: !!int x}", ["cannot be read"]),
        ("training: {lr: !!python/name:os.system x}", ["line 1", "python/name"]),
        ("task: {knobs: {x: " + "[" * 3000, ["cannot be read"]),
        ("training: {epochs: " + "9" * 5000 + "}", ["cannot be read"]),
        ("- 1\n- 2\n", ["[1, 2]", "sections"]),
        ("hello", ["'hello'", "sections"]),
        ("", ["empty", "sections"]),
        ("# nothing\n", ["empty"]),
        ("training: {lr: 1}\0", ["not a text file"]),
        (bytes(range(256)), ["UTF-8"]),
        ("training: {lr: 1}".encode("utf-16"), ["UTF-8"]),
    ],
)
def test_bad_files_are_one_sentence(write, content, parts):
    text = message(load_config, write(content))
    for part in ["run.yaml", *parts]:
        assert part in text, text


@pytest.mark.parametrize("path", ["missing.yaml", "", "atlas-tin", "run.yaml/inner", "a" * 3000])
def test_missing_files_name_the_recipes(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text("model: {}")
    text = message(load_config, path)
    assert path in text and ("atlas-tiny" in text or "directory" in text)


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("training.lr=fast", ["training.lr", "'fast'", "a number"]),
        ("training.lr", ["section.key=value"]),
        ("lr=3", ["section.key=value"]),
        ("training.x=3", ["training.x", "expected one of"]),
        ("training.epoch=3", ["did you mean training.epochs?"]),
        ("training.lr.x=3", ["training.lr.x"]),
        ("trainin.lr=3", ["did you mean training?"]),
        ("training.=3", ["training."]),
        ("model.quantization=nf4", ["lora_rank"]),
    ],
)
def test_bad_overrides_are_one_sentence(override, parts):
    text = message(load_config, "atlas-tiny", [override])
    for part in [*parts, "override"]:
        assert part in text, text


def test_overrides_win_and_reach_into_knobs(write):
    path = write("model: {quantization: nf4}\ntask: {knobs: {hops: 2}}")
    c = load_config(
        path,
        (
            "model.lora_rank=16",
            "training.lr = 1e-4",
            "task.knobs.world=[1, 2]",
            "run.output=runs/%x",
            "rlhf.offline_phase=no",
        ),
    )
    assert (c.model.lora_rank, c.training.lr, c.run.output, c.rlhf.offline_phase) == (16, 1e-4, "runs/%x", False)
    assert c.task.knobs == {"hops": 2, "world": [1, 2]}
    assert load_config(path, "model.lora_rank=4").model.lora_rank == 4
    assert Config().task.knobs == {}


def test_recipes_load_and_are_listed():
    assert "atlas-tiny" in recipes()
    for name in recipes():
        assert load_config(name).training.epochs >= 1


def test_every_field_explains_itself():
    for key, item, value in Config().walk():
        section = getattr(Config(), key.split(".")[0])
        assert is_dataclass(section) and set(item.metadata) == {"help", "min", "max", "unit", "choices"}, key
        assert item.metadata["help"].endswith(".") and "\n" not in item.metadata["help"], key
        kind, _ = value_type(section, item.name)
        if kind in (int, float):
            assert item.metadata["min"] < item.metadata["max"], key
        assert checked(section, item, value, key) == value


def test_names_are_those_of_the_other_modules():
    advantages = pytest.importorskip("agentr1_lite.advantages")
    losses = pytest.importorskip("agentr1_lite.losses")
    for name in ALGORITHMS:
        advantages.find(name)
    assert set(AGGREGATIONS) == set(losses.AGGREGATIONS)


def test_reward_spec_names_registered_parts():
    rewards = pytest.importorskip("agentr1_lite.rewards")
    low = {f.name: 0.5 if f.metadata["max"] > 0 else -0.5 for f in fields(RewardConfig)}
    spec = reward_spec(RewardConfig(**low))
    assert spec["shaping"] == {"weight": 0.5, "gamma": 0.5} and spec["em"] == 0.5 and spec["cut"] == -0.5
    rewards.Rewards(spec)
    assert set(rewards.names()) == set(spec)
    assert reward_spec(RewardConfig()) == {"task_success": 1.0}


def test_every_reward_of_the_yaml_is_the_part_of_its_name():
    rewards = pytest.importorskip("agentr1_lite.rewards")
    for item in fields(RewardConfig):
        if item.name not in ("shaping_gamma", "kl_penalty"):
            weight = 0.5 if item.metadata["max"] > 0 else -0.5
            off = {"task_success": 0.0, item.name: weight}
            expected = {"weight": weight, "gamma": 0.9} if item.name == "shaping" else weight
            spec = reward_spec(Config.from_dict({"reward": off}).reward)
            assert spec == {item.name: expected}
            assert list(rewards.Rewards(spec).weights) == [item.name]


@pytest.fixture
def registered():
    """Parts and estimators of one's own, gone again behind the test."""
    from agentr1_lite import advantages, losses, rewards

    held = (rewards.OUTCOME_PARTS, rewards.PROCESS_PARTS, advantages.ESTIMATORS, advantages._KEYS, losses.KINDS)
    before = [dict(registry) for registry in held]

    @advantages.estimator("Моя Mine")
    def mine(rewards, mask, values):
        return rewards - values, rewards

    @losses.policy_kind("my_loss")
    def my_loss(ratio, logprobs, advantages, **_):
        return -advantages * ratio, ratio > 9, ratio > 9

    @rewards.outcome_part
    def polite(episode):
        return 1.0

    @rewards.process_part
    def brief(episode, turn):
        return 1.0

    yield mine
    for registry, former in zip(held, before, strict=True):
        registry.clear()
        registry.update(former)


def test_what_is_registered_is_accepted(registered, tmp_path):
    from agentr1_lite.advantages import find

    data = {
        "training": {"algorithm": "моя mine", "loss": "MY-LOSS", "kl_estimator": "low_var_kl"},
        "reward": {"polite": 0.25, "brief": -2, "evidence": 0.5},
    }
    c = Config.from_dict(data)
    assert find(c.training.algorithm) is registered and c.training.loss == "my_loss"
    assert c.training.kl_estimator == "k3"
    assert reward_spec(c.reward).items() >= {"polite": 0.25, "brief": -2.0, "evidence": 0.5}.items()
    c.set("reward.polite", "0.75")
    c.save(tmp_path / "c.yaml")
    assert load_config(tmp_path / "c.yaml") == c and c.reward.polite == 0.75
    assert {"reward.polite", "reward.brief"} <= {key for key, _, _ in c.walk()}
    assert RewardConfig() == Config().reward  # another configuration is not touched
    assert "did you mean reward.polite?" in message(Config.from_dict, {"reward": {"polit": 1}})
    assert "reward.polite is 'much'; expected a number" in message(Config.from_dict, {"reward": {"polite": "much"}})


def test_every_estimator_is_an_algorithm_by_any_of_its_names():
    from agentr1_lite import advantages

    for name in advantages.names():
        config = Config.from_dict({"training": {"algorithm": name.upper().replace("_", "-")}})
        assert advantages.find(config.training.algorithm) is advantages.find(name), name
    assert Config.from_dict({"training": {"algorithm": "gae"}}).training.algorithm == "PPO"
    assert "opo" in message(Config.from_dict, {"training": {"algorithm": "opoo"}})


@pytest.mark.parametrize("setting", ["loss", "algorithm"])
def test_a_loss_preset_is_the_policy_loss_of_that_name(setting):
    """The settings that come out give what ``policy_loss(**PRESETS[name])`` gives."""
    import torch

    from agentr1_lite import losses
    from agentr1_lite.config import preset

    torch.manual_seed(0)
    new, old, advantages = torch.randn(3, 3, 7) - 1
    mask, names = torch.rand(3, 7) < 0.6, []
    for name, options in losses.PRESETS.items():
        if not preset(setting, name):
            continue
        names.append(name)
        t = Config.from_dict({"training": {setting: name.upper(), "clip_high": 0.5}}).training
        assert t.clip_high == 0.5 and t.algorithm == "GRPO"  # what stands beside it counts
        t = Config.from_dict({"training": {"aggregation": "constant", "lr": 0.01}})
        t.set(f"training.{setting}", name)
        t = t.training
        found, _ = losses.policy_loss(
            new,
            old,
            advantages,
            mask,
            clip_low=t.clip_low,
            clip_high=t.clip_high,
            dual_clip=t.dual_clip,
            ratio=t.ratio,
            kind=t.loss,
            aggregation=t.aggregation,
        )
        assert torch.equal(found, losses.policy_loss(new, old, advantages, mask, **options)[0]), name
    assert {"gspo", "dapo"} <= set(names) and ("cispo" in names) == (setting == "algorithm")


def test_a_preset_does_not_undo_what_is_given_beside_it(write):
    path = write("training: {clip_high: 0.3, loss: gspo}")
    assert load_config(path).training.clip_high == 0.3
    t = load_config(path, ["training.clip_low=0.1", "training.algorithm=dapo"]).training
    assert (t.clip_low, t.ratio) == (0.1, "token")
    c = Config()
    c.training.loss = "gspo"  # assigned, as a panel or a cell does
    c.check()
    assert (c.training.loss, c.training.ratio, c.training.clip_high) == ("ppo", "sequence", 4e-4)


def test_bounds_are_those_of_the_functions_behind_them():
    """A value at either bound passes every function that reads it; one that they refuse is refused here."""
    import torch

    from agentr1_lite import losses
    from agentr1_lite.advantages import estimate

    for name in ("kl_target", "value_clip"):
        assert f"training.{name} is 0" in message(Config.from_dict, {"training": {name: 0}})
    for value in (0, 1, 0.5):
        assert "training.dual_clip is" in message(Config.from_dict, {"training": {"dual_clip": value}})
    assert Config.from_dict({"training": {"dual_clip": 1.0001}}).training.dual_clip == 1.0001
    new, old, mask = torch.tensor([[-0.5, -1.0]]), torch.tensor([[-1.0, -0.5]]), torch.ones(1, 2, dtype=torch.bool)
    advantages = torch.tensor([[1.0, -1.0]])
    known = {item.name: item.metadata for item in fields(Config().training)}

    def at(name, bound):
        value = known[name][bound]
        return math.nextafter(value, math.inf) if isinstance(value, Above) else value

    for bound in ("min", "max"):
        for name in ("clip_low", "clip_high", "dual_clip"):
            assert losses.policy_loss(new, old, advantages, mask, **{name: at(name, bound)})[0].isfinite()
        assert losses.value_loss(new, old, advantages, mask, clip=at("value_clip", bound))[0].isfinite()
        assert losses.KLController(0.1, at("kl_target", bound)).update(0.5, 8) > 0
        read = {name: at(name, bound) for name in ("gamma", "lam", "step_weight")} | {"n": at("n_step", bound)}
        inputs = {"values": old, "group_ids": ["a"], "anchor_ids": [[0, 1]], "baseline": [0.0]}
        for name in ALGORITHMS:
            with pytest.warns(UserWarning) if name in SINGLE else nullcontext():
                assert estimate(name, advantages, mask, **inputs, **read).advantages.isfinite().all()


SINGLE = ("GRPO", "Dr. GRPO", "RLOO", "GiGPO", "REINFORCE++-baseline")  # warn of a group of one


def test_check_sees_values_assigned_later():
    c = Config()
    c.training.lr = "1e-4"
    c.check()
    assert c.training.lr == 1e-4
    c.training.lr = 7
    assert "training.lr" in message(c.check, "panel")


def test_a_failed_save_leaves_the_former_file(tmp_path, monkeypatch):
    path = tmp_path / "sub" / "config.yaml"
    Config().save(path)
    before = path.read_bytes()
    c = Config.from_dict({"training": {"lr": 0.01}})

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        c.save(path)
    assert path.read_bytes() == before and [p.name for p in path.parent.iterdir()] == ["config.yaml"]


def values(section, item):
    kind, optional = value_type(section, item.name)
    low, high, choices = (item.metadata[k] for k in ("min", "max", "choices"))
    text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=12)
    plain = st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.floats(allow_nan=False, allow_infinity=False)
    word = (
        text | st.sampled_from(["3e-5", "010", "1:30", "2026-11-29", "null", "yes", "~", "1_0", "<<", "#", "a\x85b"])
    ).filter(lambda s: s.strip() and not (optional and s.lower() in ("none", "null", "~")))
    base = {
        bool: st.booleans(),
        int: st.integers(low, high) if kind is int else None,
        float: st.floats(low, high, exclude_min=isinstance(low, Above)) if kind is float else None,
        str: st.sampled_from(choices) if choices else word,
        dict: st.dictionaries(word, plain | word | st.lists(plain | word, max_size=2), max_size=3),
    }[kind]
    return base | st.none() if optional else base


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_round_trip_is_lossless(tmp_path_factory, data):
    c = Config()
    for key, item, _ in list(c.walk()):
        if data.draw(st.integers(0, 3), label="change") == 0:
            section = getattr(c, key.split(".")[0])
            setattr(section, item.name, data.draw(values(section, item), label=key))
    c.model.lora_rank = c.model.lora_rank or 8
    c.training.mini_batches = 1
    path = tmp_path_factory.getbasetemp() / "round.yaml"
    c.save(path)
    assert load_config(path) == c
