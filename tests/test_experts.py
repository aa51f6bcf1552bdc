from __future__ import annotations

from pathlib import Path

import pytest

from agentr1_lite.env import ToolEnv
from agentr1_lite.evaluation import run_baseline
from agentr1_lite.jsonl import write_rows
from agentr1_lite.mdp import Task
from agentr1_lite.tasks import TaskSet, load_task
from agentr1_lite.tasks.experts import expert, found_gold, play_out
from agentr1_lite.tasks.scripted import PLAYERS, record
from agentr1_lite.toolcalls import FORMATS

REAL = Path(__file__).parents[2] / "shared" / "data"
CONTEXT = [
    ["Vik", ["Vik is a town on the Elv."]],
    ["Elv", ["The river Elv reaches the North Sea."]],
    ["Moss", ["Moss is a town with a mill."]],
]


def row(identity, question, answer, evidence, context=CONTEXT):
    facts = [[title, 0] for title in evidence]
    return {"_id": identity, "question": question, "answer": answer, "supporting_facts": facts, "context": context}


ROWS = [
    row("bridge", "Which sea does the water of the town Vik reach?", "the North Sea", ["Vik", "Elv"]),
    row("one search", "Which river does the town Vik lie on, Elv?", "Elv", ["Vik", "Elv"]),
    row("yes", "Do both Vik and Moss have a harbour?", "yes", ["Vik", "Moss"]),
    row("not written", "In which country is Vik on the Elv?", "Norway", ["Vik", "Elv"]),
]


@pytest.fixture
def task_set(tmp_path):
    def load(rows=ROWS, **knobs):
        write_rows(tmp_path / "rows.jsonl", rows)
        return load_task("hotpotqa", path=tmp_path / "rows.jsonl", **{"k": 1, **knobs})

    return load


def test_the_expert_searches_what_is_missing_and_answers_what_it_read(task_set):
    found = task_set(rewards={"agent_r1": 1.0, "format": 0.0})
    episode, reward = play_out(found.env, found.tasks[0], expert(found.tasks[0], found.env))
    queries = [call["arguments"]["query"] for turn in episode.turns for call in turn.calls]
    assert queries == [ROWS[0]["question"], "Elv"]
    assert [turn.results[0]["info"]["titles"] for turn in episode.turns[:-1]] == [["Vik"], ["Elv"]]
    assert (episode.answer, reward) == ("the North Sea", 1.0)  # in the paper's format, else it were below


def test_what_the_expert_reaches_is_reported(task_set):
    report = run_baseline("scripted_expert", None, task_set())
    answers = {r["id"]: r["answer"] for r in report.rows}
    assert answers == {"bridge": "the North Sea", "one search": "Elv", "yes": "yes", "not written": "unknown"}
    assert report.mean("em") == 0.75 and report.mean("recall") == 1.0
    assert {r["stop_reason"] for r in report.rows} == {"answer"}


@pytest.mark.parametrize("final_answer", ["tag", "tool"])
@pytest.mark.parametrize("call_format", sorted(FORMATS))
def test_the_ceiling_does_not_depend_on_how_calls_are_written(task_set, call_format, final_answer):
    options = {"call_format": call_format, "final_answer": final_answer}
    rows = [dict(ROWS[0], question="  " + ROWS[0]["question"] + " "), *ROWS[1:]]
    plain, spoken = task_set(rows), task_set(rows, **options)
    found, reports = {}, {}
    for name, made in (("plain", plain), ("spoken", spoken)):
        reports[name] = run_baseline("scripted_expert", None, made)
        found[name] = {r["id"]: (r["answer"], r["recall"], r["reward"], r["stop_reason"]) for r in reports[name].rows}
    assert found["plain"] == found["spoken"] and reports["spoken"].mean("em") == 0.75


@pytest.mark.parametrize("final_answer", ["tag", "tool"])
@pytest.mark.parametrize("call_format", sorted(FORMATS))
def test_players_speak_the_format_of_the_environment(call_format, final_answer):
    plain = load_task("atlas", "dev", count=20)
    spoken = load_task("atlas", "dev", count=20, call_format=call_format, final_answer=final_answer)
    for player in PLAYERS:
        for seed, (task, same) in enumerate(zip(plain.tasks, spoken.tasks, strict=True)):
            logs = record(plain.env, task, player, seed), record(spoken.env, same, player, seed)
            assert logs[0]["answer"] == logs[1]["answer"] and logs[0]["reward"] == logs[1]["reward"]
            assert logs[1]["stop_reason"] == "answer"
    assert run_baseline("scripted_expert", None, spoken).mean("em") == 1.0


def test_an_environment_without_search_is_no_ceiling(task_set):
    task = task_set().tasks[0]
    with pytest.raises(ValueError, match=r"the environment has no tool search\(query\)"):
        expert(task, ToolEnv())


def test_without_all_evidence_the_gold_is_not_said(task_set, tmp_path):
    write_rows(
        tmp_path / "corpus.jsonl", [{"title": "Vik", "text": "On the North Sea."}, {"title": "Moss", "text": "x"}]
    )
    with pytest.warns(UserWarning, match="another dump"):
        found = task_set(corpus=tmp_path / "corpus.jsonl")
    report = run_baseline("scripted_expert", None, found)
    assert {r["id"]: (r["answer"], r["recall"]) for r in report.rows} == {
        "bridge": ("unknown", 0.5),
        "one search": ("unknown", 0.5),
        "yes": ("yes", 1.0),
        "not written": ("unknown", 0.5),
    }


def test_the_expert_keeps_to_the_turns_it_has(task_set):
    many = [[f"T{i}", [f"Page {i}."]] for i in range(6)]
    found = task_set([row("far", "Nothing of these?", "page", [t for t, _ in many], many)], max_turns=4)
    (only,) = run_baseline("scripted_expert", None, found).rows
    assert (only["turns"], only["tool_calls"], only["stop_reason"]) == (4, 3, "answer")
    assert (only["answer"], only["recall"]) == ("unknown", 2 / 6)


def test_a_failing_search_ends_in_no_gold(task_set):
    report = run_baseline("scripted_expert", None, task_set(failing=1.0))
    assert report.mean("em") == 0.0 and report.mean("recall") == 0.0


def test_a_gold_counts_as_read_with_all_its_words():
    task = Task("t", "?", ("The Red Fox Inn", "Fox Inn"), evidence=("A",))
    assert found_gold(task, "A: a red fox at an inn") == "The Red Fox Inn"
    assert found_gold(task, "A: the fox inn.") == "Fox Inn"
    assert found_gold(task, "A: foxes inn") == found_gold(task, "B: the red fox inn, A: x") == "unknown"


def test_tasks_that_do_not_say_what_is_to_be_found_cannot_be_scripted(task_set):
    env = task_set().env
    for task in (Task("x", "?"), Task("x", "?", ("a",)), Task("x", "?", evidence=("A",))):
        with pytest.raises(ValueError, match="task 'x' has no info.'chain'. and no evidence with golds"):
            run_baseline("scripted_expert", None, TaskSet("plain", "dev", [task], env))


@pytest.mark.parametrize(
    "benchmark, em, recall", [("hotpotqa", 0.92, 0.95), ("2wiki", 0.92, 0.95), ("musique", 0.75, 0.92)]
)
def test_task_retriever_and_scorer_hang_together_on_real_rows(benchmark, em, recall):
    if not REAL.is_dir():
        pytest.skip("the real samples are not beside this checkout; the made-up rows above cover the expert")
    found = load_task(benchmark, path=REAL, limit=100)
    report = run_baseline("scripted_expert", None, found)
    assert report.mean("em") >= em and report.mean("recall") >= recall


def test_titles_in_other_writing_are_evidence_everywhere(task_set, tmp_path):
    found = task_set([row("bridge", "Which river?", "the North Sea", ["Vik", "Elv"])])
    same = [["Vik\u00a0", "Vik is a town on the Elv."], ["E\u200blv", "The river Elv reaches the North Sea."]]
    write_rows(tmp_path / "corpus.jsonl", [{"title": title, "text": text} for title, text in same])
    other = task_set([row("bridge", "Which river?", "the North Sea", ["Vik", "Elv"])], corpus=tmp_path / "corpus.jsonl")
    for each in (found, other):
        (one,) = run_baseline("scripted_expert", None, each).rows
        assert (one["answer"], one["recall"]) == ("the North Sea", 1.0)
    assert {p.title for p in other.passages} == {title for title, _ in same}
