"""The vLLM bridge on a stand-in with vLLM's recorded interface (`fake_vllm`), driven by the tiny policy.

`tests/vllm_check.py` makes the same comparisons with vLLM itself.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import fake_vllm
import pytest
import tiny
import torch

from agentr1_lite.batch import collate
from agentr1_lite.bridges.vllm import VLLMEngine
from agentr1_lite.collect import Engines
from agentr1_lite.config import Config, TrainingConfig
from agentr1_lite.engine import LocalEngine
from agentr1_lite.policy import QwenPolicy
from agentr1_lite.rollout import rollout
from agentr1_lite.sampling import Sampling
from agentr1_lite.trainer import AgentR1Trainer
from agentr1_lite.update import Share

ANSWERS = fake_vllm.RECORD["answers"]


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    monkeypatch.setattr(fake_vllm.LLM, "made", [])
    for name, module in fake_vllm.modules().items():
        monkeypatch.setitem(sys.modules, name, module)


def small(**options) -> QwenPolicy:
    return tiny.policy(layers=1, width=32, **options)


class Env(tiny.EchoEnv):
    """Ends turns at texts that random weights write often: of one token and of several."""

    stop_strings = ("th", "o", "</answer>")


def nudge(policy: QwenPolicy, size: float = 0.05) -> None:
    """An update that changes the weights and, like imitation, not the version."""
    noise = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in policy.actor_parameters():
            p += size * torch.randn(p.shape, generator=noise)


def difference(policy: QwenPolicy, trajectories, temperature: float = 1.0) -> float:
    """Largest |log-prob difference| between the engine and the trainer."""
    batch = collate(trajectories)
    with torch.no_grad():
        found = policy.log_probs(batch, temperature=temperature).logprobs
    return float((found - batch.old_logprobs)[batch.action_mask].abs().max())


def test_the_recorded_answers_keep_the_token_that_ended_them():
    """What the stand-in has to do, seen in vLLM: ids with their end, a log-prob for each id and no other."""
    for name, answer in ANSWERS.items():
        assert [list(place) for place in answer["logprobs"]] == [[str(i)] for i in answer["ids"]], name
    stop, end, length = ANSWERS["stop string"], ANSWERS["end token"], ANSWERS["length"]
    assert "</" in "".join(stop["pieces"]) and "</" not in "".join(stop["pieces"][:-1])
    assert (stop["finish_reason"], end["finish_reason"], length["finish_reason"]) == ("stop", "stop", "length")
    assert end["ids"][-1] == end["stop_reason"] and end["stop_reason"] in fake_vllm.RECORD["end_tokens"]
    assert length["ids"] == end["ids"][:3]


@pytest.mark.parametrize("rank", [0, 4])
def test_greedy_rollouts_equal_the_local_engines(rank):
    policy = small(lora_rank=rank)
    nudge(policy)
    env, tasks = Env(), tiny.tasks(6)
    engine = VLLMEngine(policy, sampling=Sampling(greedy=True), stop_strings=env.stop_strings, max_rows=4)
    mine, theirs = rollout(policy, env, tasks, greedy=True), rollout(policy, env, tasks, engine=engine)
    for a, b in zip(mine, theirs, strict=True):
        assert a.segments[0].token_ids == b.segments[0].token_ids
        assert a.segments[0].action_mask == b.segments[0].action_mask
        assert a.segments[0].logprobs == pytest.approx(b.segments[0].logprobs, abs=1e-4)
        assert a.turns == b.turns and a.stop_reason == b.stop_reason
    reasons = {turn.finish_reason for t in theirs for turn in t.turns}
    assert reasons == {"stop", "length"} and engine.free_rows == 4


@pytest.mark.parametrize("options", [{"stop_strings": ("th",)}, {"stop_strings": ()}, {"limit": 5}])
def test_turns_equal_the_local_engines(options):
    """Row by row, with what ended it: an end token, a stop string, the row's limit; then a second turn."""
    policy = small()
    prompts = [policy.chat.prompt_ids([{"role": "user", "content": task.question}]) for task in tiny.tasks(8)]
    limit = options.pop("limit", 40)
    turns = []
    for kind in (LocalEngine, VLLMEngine):
        engine = kind(policy, sampling=Sampling(greedy=True), max_rows=16, handover=1.0, **options)
        rows = engine.open(prompts, range(8), [len(p) + limit for p in prompts])
        first = engine.next_turns()
        for turn in first:
            engine.extend(turn.row, [5, 6, 7], len(prompts[turn.row]) + len(turn.ids) + 3 + 4)
        second = engine.next_turns()
        assert rows == list(range(8)) and all(len(turn.ids) <= 4 for turn in second)
        turns.append([(t.row, t.ids, t.finish_reason, t.ended_by) for t in first + second])
    assert turns[0] == turns[1]
    assert {ended_by for *_, ended_by in turns[0]} - {None} <= policy.chat.eos_ids


def test_ids_go_in_as_they_came_out():
    """The second request of a row is its first prompt, the sampled ids and the observation's, nothing encoded again."""
    policy = small()
    engine = VLLMEngine(policy, max_rows=2)
    asked = engine._llm.llm_engine.asked
    engine.open([[9, 8, 7]], [3], [8])
    (turn,) = engine.next_turns()
    engine.extend(turn.row, [20, 21], 12)
    engine.next_turns()
    (first, parameters, _), (second, others, _) = asked
    assert first == [9, 8, 7] and second == [9, 8, 7, *turn.ids, 20, 21]
    assert parameters.max_tokens == 5 and others.max_tokens == 12 - len(second)
    assert parameters.seed != others.seed
    assert parameters.ignore_eos and set(parameters.stop_token_ids) == policy.chat.eos_ids
    assert (parameters.top_p, parameters.top_k, parameters.repetition_penalty) == (1.0, 0, 1.0)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
def test_log_probs_are_of_the_distribution_that_was_sampled(temperature):
    policy, env = small(), Env()
    engine = VLLMEngine(policy, sampling=Sampling(temperature), stop_strings=env.stop_strings)
    found = rollout(policy, env, tiny.tasks(3), group_size=3, seed=4, engine=engine)
    assert difference(policy, found, temperature) < 1e-4
    assert difference(policy, found, temperature * 1.2) > 0.01
    again = rollout(policy, env, tiny.tasks(3), group_size=3, seed=4, engine=engine)
    assert [t.segments for t in again] == [t.segments for t in found]  # rows have seeds of their own
    assert len({tuple(t.segments[0].token_ids) for t in found[:3]}) == 3


def folders() -> list[Path]:
    return sorted(Path(path) for path in {request.lora_path for *_, request in fake_vllm.LLM.made[0].llm_engine.asked})


def test_an_adapter_is_loaded_after_every_change_of_its_weights():
    policy, env = small(lora_rank=4), Env()
    engine = VLLMEngine(policy, stop_strings=env.stop_strings)
    inner = engine._llm.llm_engine

    def play():
        return rollout(policy, env, tiny.tasks(2), group_size=2, seed=4, engine=engine)

    first, same = play(), play()
    assert [t.segments for t in first] == [t.segments for t in same] and list(inner.adapters) == [1]
    nudge(policy)
    assert difference(policy, same) > 0.05
    assert difference(policy, play()) < 1e-4
    policy.version += 1
    play()
    assert list(inner.adapters) == [3]  # the former ones are let go
    former, _, last = folders()
    assert not former.exists() and last.is_dir()
    assert {request.lora_int_id: request.lora_name for *_, request in inner.asked} == {
        1: "actor-1",
        2: "actor-2",
        3: "actor-3",
    }


def test_full_weights_are_loaded_after_every_change():
    policy, env = small(), Env()
    engine = VLLMEngine(policy, stop_strings=env.stop_strings)

    def play():
        return rollout(policy, env, tiny.tasks(2), group_size=2, seed=4, engine=engine)

    assert difference(policy, play()) < 1e-4 and engine._llm.reloads == 0
    nudge(policy, 0.02)
    found = play()
    assert difference(policy, found) < 1e-4 and engine._llm.reloads == 1
    assert engine._llm.llm_engine.asked[-1][2] is None


@pytest.mark.parametrize(("rank", "method", "times"), [(4, "add_lora", 2), (4, "remove_lora", 1), (0, "load", 2)])
def test_a_reload_that_failed_is_tried_again_before_anything_is_sampled(rank, method, times, monkeypatch):
    policy, env = small(lora_rank=rank), Env()
    engine = VLLMEngine(policy, stop_strings=env.stop_strings)
    rollout(policy, env, tiny.tasks(2), engine=engine)
    nudge(policy, 0.02)
    inner = engine._llm.llm_engine
    asked = len(inner.asked)

    def broken(*_):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(inner, method, broken)
        for _ in range(times):
            with pytest.raises(RuntimeError, match="out of memory"):
                rollout(policy, env, tiny.tasks(2), engine=engine)
    assert len(inner.asked) == asked
    assert difference(policy, rollout(policy, env, tiny.tasks(2), engine=engine)) < 1e-4


def test_half_a_reload_does_not_pass_for_the_former_weights(monkeypatch):
    """The adapter is gone, the new one did not load, and the policy goes back to its last checkpoint."""
    policy, env = small(lora_rank=4), Env()
    nudge(policy)
    engine = VLLMEngine(policy, stop_strings=env.stop_strings)
    rollout(policy, env, tiny.tasks(2), engine=engine)
    checkpoint = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    nudge(policy)
    with monkeypatch.context() as patch:
        patch.setattr(engine._llm.llm_engine, "add_lora", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            rollout(policy, env, tiny.tasks(2), engine=engine)
    policy.load_state_dict(checkpoint)
    assert difference(policy, rollout(policy, env, tiny.tasks(2), engine=engine)) < 1e-4


def test_rows_do_not_outlive_an_update():
    policy = small()
    engine = VLLMEngine(policy, max_rows=4)
    engine.open([[9, 8, 7]], [3], [8])
    engine.next_turns()
    policy.version += 1
    for call in (engine.next_turns, lambda: engine.open([[5]], [1], [4])):
        with pytest.raises(ValueError, match="updated while rows are open"):
            call()
    engine.close(0)
    assert engine.open([[9, 8, 7]], [3], [8]) == [0]


def test_a_closed_row_is_given_up():
    policy = small()
    engine = VLLMEngine(policy, max_rows=3, handover=0.3)
    engine.open([[9, 8], [9, 7], [9, 6]], [1, 2, 3], [3, 40, 40])
    assert [turn.row for turn in engine.next_turns()] == [0]
    inner = engine._llm.llm_engine
    assert len(inner.requests) == 2
    for row in range(3):
        engine.close(row)
    assert not inner.requests and engine.free_rows == 3


def test_a_start_that_fails_says_what_to_change(monkeypatch):
    def full(*_, **options):
        raise ValueError(f"Free memory on device is less than {options['gpu_memory_utilization']}\nlong advice")

    monkeypatch.setattr(sys.modules["vllm"], "LLM", full)
    with pytest.raises(ValueError) as error:
        VLLMEngine(small(), memory=0.4)
    assert str(error.value) == (
        "vLLM could not start (Free memory on device is less than 0.4); "
        "change training.engine_memory, or set training.engine to local"
    )


def test_misuse_is_one_sentence():
    policy = small()
    engine = VLLMEngine(policy, max_rows=2)
    engine.open([[9, 8]], [1], [6])
    with pytest.raises(ValueError, match="2 rows do not fit, 1 of 2 are free"):
        engine.open([[1], [2]], [0, 0], [9, 9])
    with pytest.raises(ValueError, match="a prompt has no tokens"):
        engine.open([[]], [0], [9])
    with pytest.raises(ValueError, match="row 0 has not ended its turn"):
        engine.extend(0, [1], 9)
    with pytest.raises(ValueError, match="1 rows are open"):
        engine.using(Sampling(), ())
    with pytest.raises(ValueError, match="top_p must be 1"):
        VLLMEngine(policy, sampling=Sampling(top_p=0.9))
    assert engine.open([], [], []) == []


def test_what_vllm_is_told():
    engine = VLLMEngine(small(lora_rank=12), max_rows=7, memory=0.3, max_model_len=512)
    options = engine._llm.llm_engine.options
    assert options["max_lora_rank"] == 16 and options["max_num_seqs"] == 7 and options["max_model_len"] == 512
    assert options["gpu_memory_utilization"] == 0.3 and options["dtype"] == "float32"
    assert options["enable_prefix_caching"] and options["logprobs_mode"] == "processed_logprobs"
    with pytest.raises(TypeError, match="no_such_option"):
        VLLMEngine(small(), no_such_option=1)


@pytest.mark.parametrize("fields", [{"use_dora": True}, {"rank_pattern": {"q": 2}}, {"alpha_pattern": {"v": 4}}])
def test_adapters_that_vllm_would_misread_are_refused(fields):
    policy = small(lora_rank=4)
    vars(policy.model.peft_config["actor"]).update(fields)
    with pytest.raises(ValueError, match=f"does not read the {next(iter(fields))}.*training.engine"):
        VLLMEngine(policy)


def test_an_adapter_reaches_vllm_with_its_scale(tmp_path):
    policy = small(lora_rank=4)
    folder = policy.save(tmp_path / "adapter")
    file = folder / "adapter_config.json"
    file.write_text(file.read_text().replace('"use_rslora": false', '"use_rslora": true'))
    policy, env = QwenPolicy(folder, device="cpu"), Env()
    nudge(policy, 0.1)
    engine = VLLMEngine(policy, stop_strings=env.stop_strings)
    assert difference(policy, rollout(policy, env, tiny.tasks(2), engine=engine)) < 1e-4


def settings(folder: Path, **training) -> Config:
    training = {"engine": "vllm", "batch_size": 3, "group_size": 3, "micro_batch_tokens": 600, **training}
    return Config.from_dict({"training": training, "run": {"output": str(folder), "progress": False}})


@pytest.mark.parametrize("rank", [0, 4])
def test_a_run_samples_from_the_weights_of_each_step(rank, tmp_path):
    policy = small(lora_rank=rank)
    trainer = AgentR1Trainer(policy, settings(tmp_path, kl_weight=0.1, lr=0.01))
    history = trainer.online_rl(tiny.ScoredEnv(max_turns=2), 18, tasks=tiny.tasks(4))
    assert len(history) == 2 and len(fake_vllm.LLM.made) == 1
    for metrics in history:
        assert metrics["engine_difference_max"] < 1e-3 and metrics["importance_capped"] == 0.0
        assert metrics["first_log_ratio_max"] < 1e-5
    levels = {finding.check: finding.level for finding in trainer.findings}
    assert levels["engine_difference"] == levels["first_ratio"] == "ok"


def test_remax_plays_its_greedy_baselines_on_the_same_engine(tmp_path):
    trainer = AgentR1Trainer(small(), settings(tmp_path, algorithm="ReMax", kl_weight=0.0))
    trainer.online_rl(tiny.ScoredEnv(), 9, tasks=tiny.tasks(3))
    asked = fake_vllm.LLM.made[0].llm_engine.asked
    assert {parameters.temperature for _, parameters, _ in asked} == {0.0, 1.0}
    assert len(fake_vllm.LLM.made) == 1


def test_several_processes_are_refused():
    with pytest.raises(ValueError, match="serves one process and 2 run"):
        Engines(small(), TrainingConfig(engine="vllm"))(TrainingConfig(engine="vllm"), Share(0, 2))


def test_without_vllm_one_sentence_comes_before_the_run(monkeypatch, tmp_path):
    monkeypatch.delitem(sys.modules, "vllm")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    calls: list[Callable] = [
        lambda: AgentR1Trainer(small(), settings(tmp_path / "run")),
        lambda: VLLMEngine(small()),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r'pip install "agentr1_lite\[vllm\]"'):
            call()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("version", "old"), [("0.10.1", True), ("0.9.2+cpu", True), ("0.10.2", False), ("1.0", False)])
def test_versions_whose_log_probs_lack_the_temperature_are_refused(version, old, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", fake_vllm.modules(version)["vllm"])
    if old:
        with pytest.raises(
            ValueError, match=f"vllm {version.replace('+', '.')} gives log-probs without the temperature"
        ):
            VLLMEngine(small())
    else:
        assert VLLMEngine(small()).free_rows == 256
