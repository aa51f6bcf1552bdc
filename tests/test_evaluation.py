"""Evaluation against hand calculation: scores, groups, intervals, pooling, paired differences, baselines."""

from __future__ import annotations

import json

import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from agentr1_lite import evaluation, tasks
from agentr1_lite.config import Config
from agentr1_lite.env import ToolEnv
from agentr1_lite.evaluation import Report, difference, evaluate, pool, run_baseline
from agentr1_lite.jsonl import DataError
from agentr1_lite.mdp import Segment, StopReason, Task, Trajectory, Turn, TurnKind
from agentr1_lite.pipeline import held_out
from agentr1_lite.tasks import TaskSet, load_task

TASKS = [
    Task("a", "Who wrote Dune?", ("Frank Herbert",), "single", 1, ("Dune",)),
    Task("b", "Where was its author born?", ("Tacoma", "Tacoma, Washington"), "bridge", 2, ("Dune", "Frank Herbert")),
    Task("c", "Are both in Oslo?", ("yes",), "comparison", 2),
]


def search_turn(*titles: str) -> Turn:
    results = [{"content": "…", "success": True, "info": {"titles": list(titles)}}]
    return Turn(0, 2, 4, TurnKind.TOOL_CALL, "search", [{"name": "search", "arguments": {}}], results)


def episode(task: Task, answer: str | None, *turns: Turn, reward: float = 0.0) -> Trajectory:
    segment = Segment()
    segment.extend([1, 2])
    segment.extend([3, 4, 5], [-0.1, -0.2, -0.3])
    stop = StopReason.ANSWER if answer is not None else StopReason.MAX_TURNS
    last = Turn(0, 4, 5, TurnKind.ANSWER, f"<answer>{answer}</answer>")
    return Trajectory(task.id, task.id, [segment], [*turns, last], answer=answer, reward=reward, stop_reason=stop)


class FakeEnv:
    benchmark = "hotpotqa"


@pytest.fixture
def answers(monkeypatch):
    """Let rollout return given episodes; what it was asked with is recorded."""

    def install(*episodes: Trajectory) -> list[dict]:
        asked: list[dict] = []

        def rollout(policy, env, tasks, **options):
            asked.append({"env": env, "tasks": tasks, **options})
            return list(episodes)

        monkeypatch.setattr(evaluation, "rollout", rollout)
        return asked

    return install


def report_of(*scores: float, name: str = "r", seed: int = 0, first: int = 0) -> Report:
    rows = [
        {"id": f"q{i}", "question": "?", "golds": [], "kind": "", "hops": 0, "answer": "", "seed": seed, "em": x}
        | {"cover_em": x, "f1": x, "stop_reason": "answer", "reward": x}
        | dict.fromkeys(("turns", "tool_calls", "action_tokens"), 1)
        | {"recall": None}
        for i, x in enumerate(scores, first)
    ]
    return Report(name, rows, settings={"seed": seed})


def test_rows_by_hand(answers):
    asked = answers(
        episode(TASKS[0], "frank herbert.", search_turn("Dune", "Arrakis"), reward=1.0),
        episode(TASKS[1], "Tacoma in Washington", search_turn("Frank Herbert"), search_turn("Oslo")),
        episode(TASKS[2], None),
    )
    report = evaluate(None, TaskSet("t", "dev", TASKS, FakeEnv()))
    assert asked[0]["greedy"] is True and asked[0]["temperature"] == 1.0
    first, second, third = report.rows
    assert [row["em"] for row in report.rows] == [1.0, 0.0, 0.0]
    # "tacoma in washington" covers "tacoma"; F1 with "tacoma washington" is 2 · 2/3 · 1 / (2/3 + 1)
    assert second["cover_em"] == 1.0 and second["f1"] == pytest.approx(0.8)
    assert (first["recall"], second["recall"], third["recall"]) == (1.0, 0.5, None)
    assert (first["turns"], first["tool_calls"], first["action_tokens"]) == (2, 1, 3)
    assert third["answer"] is None and third["f1"] == 0.0
    assert report.mean("em") == pytest.approx(1 / 3) and report.mean("recall") == 0.75
    assert {k: part.mean("em") for k, part in report.by("hops").items()} == {1: 1.0, 2: 0.0}
    assert {k: len(part) for k, part in report.by("kind").items()} == {"bridge": 1, "comparison": 1, "single": 1}
    assert report.stop_reasons() == {"answer": pytest.approx(2 / 3), "max_turns": pytest.approx(1 / 3)}


def test_only_the_parsed_answer_counts(answers):
    """The gold in a query, in a page or outside the tags earns nothing (ReZero#1)."""
    turn = search_turn("Frank Herbert")
    turn.text, turn.observation = "Frank Herbert", "<answer>Frank Herbert</answer>"
    answers(episode(TASKS[0], "Asimov", turn))
    assert evaluate(None, None, tasks=TASKS[:1], env=FakeEnv()).rows[0]["em"] == 0.0


def test_sampling_and_passed_options(answers):
    asked = answers(episode(TASKS[0], "x"))
    report = evaluate(None, None, tasks=TASKS[:1], env=FakeEnv(), temperature=0.7, seed=3, max_batch=5)
    assert (asked[0]["greedy"], asked[0]["temperature"], asked[0]["seed"]) == (False, 0.7, 3)
    assert asked[0]["max_batch"] == 5 and "progress" not in asked[0]
    assert report.settings == {"temperature": 0.7, "seed": 3}


def test_json_round_trip(answers, tmp_path):
    answers(*(episode(task, "yes") for task in TASKS))
    report = evaluate(None, TaskSet("t", "dev", TASKS, FakeEnv()))
    report.save(tmp_path / "evaluation" / "online.json")
    again = Report.load(tmp_path / "evaluation" / "online.json")
    assert again == report
    stored = json.loads((tmp_path / "evaluation" / "online.json").read_text(encoding="utf-8"))
    assert stored["summary"]["em"]["mean"] == pytest.approx(1 / 3) and stored["summary"]["n"] == 3
    assert list(report.frame()["em"]) == [0.0, 0.0, 1.0]


@pytest.mark.parametrize("text", ["{}", "[]", "not json", '{"name": "x", "rows": 3, "benchmark": "", "settings": {}}'])
def test_a_broken_report_is_named(tmp_path, text):
    (tmp_path / "r.json").write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match=r"r\.json"):
        Report.load(tmp_path / "r.json")


def test_table_says_it_all(answers):
    answers(*(episode(task, "yes", search_turn("Dune")) for task in TASKS))
    table = evaluate(None, TaskSet("atlas", "dev", TASKS, FakeEnv())).table()
    assert table.splitlines()[0] == "base_tool_call · task atlas · split dev · temperature 0.0 · seed 0"
    for words in ("1 hop ", "2 hops", "comparison", "0.333 [", "evidence found 0.75", "answer 100%"):
        assert words in table
    assert Report("none", []).table() == "none: no questions"


def test_interval_equals_the_closed_form():
    """The bootstrap mean of n coin flips is binomial: half-width about 1.96 · sqrt(p(1 − p)/n)."""
    low, high = report_of(*[1.0] * 120 + [0.0] * 80).interval("em")
    half = 1.96 * (0.6 * 0.4 / 200) ** 0.5
    assert low == pytest.approx(0.6 - half, abs=0.01) and high == pytest.approx(0.6 + half, abs=0.01)


def test_pooled_seeds_are_averaged_by_question():
    """Three equal seeds are no more certain than one: the interval is that of the questions."""
    one = report_of(*[1.0, 0.0] * 20)
    three = pool([report_of(*[1.0, 0.0] * 20, seed=s) for s in range(3)], "three")
    assert three.interval("em") == one.interval("em") and len(three) == 120
    assert three.settings == {"seed": [0, 1, 2]} and set(three.by("seed")) == {0, 1, 2}
    other = pool([one, report_of(*[1.0] * 40, first=40)])
    assert other.mean("em") == 0.75 and len(other.per_question("em")) == 80


def test_equal_ids_with_other_texts_stay_apart():
    report = report_of(1.0, 0.0)
    report.rows[1] |= {"id": "q0", "question": "another"}
    assert len(report.per_question("em")) == 2


def test_paired_difference():
    a, b = report_of(*[1.0] * 30 + [0.0] * 10), report_of(*[1.0] * 20 + [0.0] * 20)
    found = difference(a, b)
    assert found.mean == pytest.approx(0.25) and found.n == 40 and 0 < found.low < 0.25 < found.high
    # both answered alike: p = q = 1/42, so ± 1.96 · sqrt(2/42/42) by hand
    assert difference(a, a)[:3] == pytest.approx((0.0, -0.0660, 0.0660), abs=5e-5)
    with pytest.raises(ValueError, match="40 questions with em, 'r' 2, 2 in common"):
        difference(a, report_of(1.0, 0.0))


def test_pool_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match="no reports"):
        pool([])
    with pytest.raises(ValueError, match="hotpotqa, musique"):
        pool([report_of(1.0), Report("m", [], "musique")])


@given(st.lists(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=4, max_size=4), min_size=1, max_size=4))
@settings(max_examples=20, deadline=None)
def test_pooled_mean_is_the_mean_of_means(seeds):
    """Every seed answered the same questions, so the order of averaging does not matter."""
    reports = [report_of(*scores, seed=i) for i, scores in enumerate(seeds)]
    pooled = pool(reports)
    assert pooled.mean("em") == pytest.approx(sum(r.mean("em") for r in reports) / len(reports))
    low, high = pooled.interval("em")
    assert low <= pooled.mean("em") + 1e-12 and high >= pooled.mean("em") - 1e-12


# Baselines


@pytest.fixture(scope="module")
def atlas() -> TaskSet:
    return load_task("atlas", "dev", count=12, max_turn_tokens=8, max_response_tokens=400)


def test_baselines_with_a_random_policy(atlas):
    """Every baseline plays every question with a real engine; a random policy knows nothing."""
    policy = tiny.policy()
    for name in ("closed_book", "naive_rag", "base_tool_call"):
        report = run_baseline(name, policy, atlas, tasks=atlas.tasks[:3])
        assert [row["id"] for row in report.rows] == [task.id for task in atlas.tasks[:3]]
        assert report.name == name and report.mean("em") == 0.0 and report.settings["policy"] == "tiny"
        assert report.rows[0]["question"] == atlas.tasks[0].question
        if name != "base_tool_call":
            assert {row["turns"] for row in report.rows} == {1}


def test_what_the_reading_baselines_ask(atlas, answers):
    task = atlas.tasks[0]
    asked = answers(episode(task, task.golds[0]))
    report = run_baseline("naive_rag", None, atlas, tasks=[task])
    messages = asked[0]["env"].prompt(asked[0]["tasks"][0])
    first, second = atlas.index.search(task.question, 2)
    assert messages == [
        {"role": "system", "content": "Read, then reply <answer> name </answer>."},
        {"role": "user", "content": f"1. {first.text}\n2. {second.text}\n{task.question}"},
    ]
    assert asked[0]["env"].tool_schemas == [] and report.mean("em") == 1.0
    assert report.rows[0]["recall"] == len({first.title, second.title} & set(task.evidence)) / len(task.evidence)
    run_baseline("closed_book", None, atlas, tasks=[task])
    assert asked[1]["env"].prompt(asked[1]["tasks"][0])[1] == {"role": "user", "content": task.question}


def test_other_tasks_get_the_general_prompt(atlas, answers):
    asked = answers(episode(atlas.tasks[0], "x"))
    plain = TaskSet("plain", "dev", atlas.tasks[:1], atlas.env, atlas.index)
    run_baseline("naive_rag", None, plain, k=1)
    assert asked[0]["env"].system_prompt == evaluation.READ_PROMPT
    assert asked[0]["tasks"][0].question.count("\n") == 1


def test_scripted_expert_is_the_ceiling():
    atlas = load_task("atlas", "dev", count=20, failing=0.0)
    report = run_baseline("scripted_expert", None, atlas)
    assert report.mean("em") >= 0.9 and report.mean("turns") == report.mean("tool_calls") + 1
    assert Report.from_dict(json.loads(json.dumps(report.to_dict()))) == report
    assert "action tokens" not in report.table()


def test_what_a_baseline_cannot_do_is_said(atlas):
    with pytest.raises(ValueError, match="closed_book"):
        run_baseline("oracle", None, atlas)
    with pytest.raises(ValueError, match="no info"):
        run_baseline("scripted_expert", None, atlas, tasks=[Task("x", "?")])
    with pytest.raises(ValueError, match="has no passages"):
        run_baseline("naive_rag", None, TaskSet("shop", "dev", [], atlas.env))


# Which questions a run is evaluated on


def chosen(task: str = "atlas", **knobs: object) -> list[Task]:
    seed, questions = knobs.pop("seed", 0), knobs.pop("questions", 20)
    config = Config.from_dict({"task": {"name": task, "knobs": knobs}})
    config.evaluation.seed, config.evaluation.questions = seed, questions
    return held_out(config).tasks


def test_seed_zero_takes_the_first_questions_and_others_draw():
    first, again, other = chosen(), chosen(seed=3), chosen(seed=4)
    assert first == load_task("atlas", "dev", count=20).tasks
    assert again == chosen(seed=3) and len({t.id for t in again}) == len({t.id for t in other}) == 20
    assert again != other and again != first != other
    every = {task.id: task for task in load_task("atlas", "dev", count=1000).tasks}
    assert all(every[task.id] == task for task in again + other), "questions of the same world"


def test_a_task_with_a_fixed_number_of_questions_is_drawn_from(monkeypatch):
    def build(split: str) -> TaskSet:
        return TaskSet("fixed", split, [Task(f"q{i}", f"Number {i}?", (str(i),)) for i in range(50)], ToolEnv([]))

    monkeypatch.setitem(tasks._BUILDERS, "fixed", build)
    ids = [[t.id for t in chosen("fixed", seed=seed)] for seed in (0, 1, 1, 2)]
    assert ids[0] == [f"q{i}" for i in range(20)] and ids[1] == ids[2] != ids[3]
    assert {t.id for t in chosen("fixed", seed=1, questions=80)} == {f"q{i}" for i in range(50)}
    seen = {t.id for seed in range(1, 30) for t in chosen("fixed", seed=seed)}
    assert len(seen) == 50, "a sample of the whole split"


def test_samples_of_an_evaluation_follow_its_seed(atlas):
    policy = tiny.policy()
    answers = {}
    for seed in (1, 1, 2):
        report = evaluate(policy, atlas, tasks=atlas.tasks[:4], temperature=1.0, seed=seed)
        tokens = tuple((row["action_tokens"], row["turns"], row["answer"]) for row in report.rows)
        assert answers.setdefault(seed, tokens) == tokens and report.settings["seed"] == seed
    texts = [[t.turns[0].text for t in found] for found in (sampled(policy, atlas, s) for s in (1, 1, 2))]
    assert texts[0] == texts[1] != texts[2]


def sampled(policy, atlas: TaskSet, seed: int) -> list[Trajectory]:
    kept: list[Trajectory] = []
    evaluate(policy, atlas, tasks=atlas.tasks[:4], temperature=1.0, seed=seed, on_trajectory=kept.append)
    return sorted(kept, key=lambda t: t.task_id)
