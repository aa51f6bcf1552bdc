from __future__ import annotations

import gzip
import json
import re
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentr1_lite import tasks as registry
from agentr1_lite.env import ToolEnv
from agentr1_lite.jsonl import DataError, write_rows, write_text
from agentr1_lite.mdp import StopReason
from agentr1_lite.retrieval import BM25
from agentr1_lite.scoring import score_answer
from agentr1_lite.tasks import TaskSet, load_task
from agentr1_lite.tasks.multihop import SYSTEM_PROMPT, find_file, load, load_split
from agentr1_lite.tasks.official import validate
from agentr1_lite.toolcalls import parse_tool_calls

REAL = Path(__file__).parents[2] / "shared" / "data"
BENCHMARKS = ("hotpotqa", "2wiki", "musique")


def hotpot_row(identity: str, **changes):
    row = {
        "_id": identity,
        "question": f"Which sea does the river through {identity} reach?",
        "answer": "North Sea",
        "type": "bridge",
        "level": "easy",
        "supporting_facts": [[f"{identity} (town)", 0], ["Elv", 1]],
        "context": [
            [f"{identity} (town)", ["It lies on the Elv.", " It has a mill."]],
            ["Elv", ["The Elv is a river.", " It reaches the North Sea."]],
            ["Elv", ["Elv is also a surname."]],
        ],
    }
    return {**row, **changes}


def musique_row(identity: str, **changes):
    row = {
        "id": f"2hop__{identity}",
        "question": f"Who leads the club from {identity}?",
        "answer": "Ada Holm",
        "answer_aliases": ["A. Holm", None],
        "answerable": True,
        "paragraphs": [
            {"idx": 0, "title": identity, "paragraph_text": f"{identity} is home of FK Nord.", "is_supporting": True},
            {"idx": 1, "title": "FK Nord", "paragraph_text": "Ada Holm leads FK Nord.", "is_supporting": True},
            {"idx": 2, "title": "FK Nord", "paragraph_text": "FK Nord was founded in 1912.", "is_supporting": False},
        ],
        "question_decomposition": [
            {"id": 1, "question": f"club of {identity}", "answer": "FK Nord", "paragraph_support_idx": 0},
            {"id": 2, "question": "leader of #1", "answer": "Ada Holm", "paragraph_support_idx": 1},
        ],
    }
    return {**row, **changes}


BAD_ROWS = """\
{"id": "a", "question": "Which is older, X or Y?", "answer": "X", "supporting_facts": [["X", 0], ["Y", 0]], "context": [["X", ["X began in 1901."]], ["Y", ["Y began in 1905."]]]}
{"id": "b", "question": "No answer key?"}
{"id": "c", "question": "", "answer": "x", "context": []}
{"id": "a", "question": "Same id, other text?", "answer": "Z", "supporting_facts": [["Z", 0]], "context": [["Z", ["Z."]]]}
{"id": "d", "question": "Title missing?", "answer": "q", "supporting_facts": [["Gone", 0]], "context": [["Here", ["q."]]]}
{"id": "e", "question": "Index past end?", "answer": "q", "supporting_facts": [["Here", 7]], "context": [["Here", ["q."]]]}
{"id": "f", "question": "Number answer?", "answer": 1984, "supporting_facts": [], "context": [["Here", ["1984"]]]}
{"id": "g", "question": "Null answer?", "answer": null, "context": null}
{"id": "h", "question": "Alias none?", "answer": "q", "answer_aliases": null, "context": [["Here", ["q"]]]}
{"question": "no id", "answer": "q"}
{"id": "i", "question": "dup title", "answer": "q", "supporting_facts": [["T", 1]], "context": [["T", ["one."]], ["T", ["one.", "q."]]]}
"""  # noqa: E501


def test_ds03_every_row_that_breaks_a_rule_is_listed_and_sound_rows_stay(tmp_path):
    path = tmp_path / "rows.jsonl"
    write_text(path, BAD_ROWS + '{"id": "cut')
    found = load_split(path, "2wiki", "train")
    assert [(t.id, t.golds, t.evidence) for t in found.tasks] == [
        ("e", ("q",), ("Here",)),
        ("f", ("1984",), ()),
        ("h", ("q",), ()),
        ("i", ("q",), ("T",)),
    ]
    rules = [
        (1, "different questions (lines 1, 4)"),
        (2, "answer is missing"),
        (3, "question is empty"),
        (4, "different questions (lines 1, 4)"),
        (5, "supporting title 'Gone' is not in the context"),
        (6, "sentence 7 of 1"),
        (7, "answer is the number 1984"),
        (8, "answer is missing"),
        (10, "no id: context is missing"),
        (12, "cut off"),
    ]
    assert [p.line for p in found.problems] == [line for line, _ in rules]
    assert all(text in p.reason for (_, text), p in zip(rules, found.problems, strict=True))
    assert [p.line for p in found.problems if p.kept] == [6, 7]
    with pytest.warns(UserWarning, match=r"rows.jsonl: 8 rows left out, the first: line 1: "):
        load(path, "2wiki", "train")


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"answer": True}, "answer is a bool, not text"),
        ({"answer": ["a", "b"]}, "answer is a list, not text"),
        ({"answer": "  "}, "answer is empty"),
        ({"question": None}, "question is missing"),
        ({"question": 7}, "question is a int, not text"),
        ({"context": "Elv"}, "context is text, not a list"),
        ({"context": [["Elv"]]}, "context 0 is not a record of title, sentences"),
        ({"context": [["Elv", [None]]]}, "context needs a title and a list of sentences"),
        ({"context": {"title": ["Elv"], "sentences": []}}, "lists title and sentences of one length"),
        ({"supporting_facts": 3}, "supporting_facts is a int, not a list"),
    ],
)
def test_a_malformed_field_is_named(changes, reason):
    good, problems = validate([(5, hotpot_row("Vik", **changes)), (9, hotpot_row("Lom"))], "hotpotqa", "f.json")
    assert [example.id for example in good] == ["Lom"]
    assert str(problems[0]).startswith("f.json, line 5: id 'Vik': ") and reason in problems[0].reason


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 9) | st.sampled_from(["", " ", "Elv", "[[1]]", "{"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["title", "idx"]), inner, max_size=2),
    max_leaves=5,
)


@settings(deadline=None)
@given(st.sampled_from([hotpot_row("Vik"), musique_row("Vik")]), st.data())
def test_no_row_whatever_its_values_raises_or_vanishes(row, data):
    row = json.loads(json.dumps(row))
    place, name = row, data.draw(st.sampled_from(sorted(row)))
    while isinstance(place[name], (list, dict)) and place[name] and data.draw(st.booleans()):
        place = place[name]
        name = data.draw(st.sampled_from(range(len(place)) if isinstance(place, list) else sorted(place)))
    place[name] = data.draw(JSON)
    for benchmark in BENCHMARKS:
        good, problems = validate([(1, row)], benchmark, "f")
        assert len(good) + sum(not problem.kept for problem in problems) == 1
        assert all(isinstance(title, str) for example in good for title in example.task().evidence)
        assert all(isinstance(gold, str) and gold for example in good for gold in example.task().golds)


def test_musique_rules():
    paragraphs = [{**p, "is_supporting": False} for p in musique_row("x")["paragraphs"]]
    rows = [
        musique_row("Vik", answerable=False),
        musique_row("Lom", paragraphs=[]),
        musique_row("Bo", paragraphs=[{"idx": 0, "title": "Bo"}]),
        musique_row("Os", paragraphs=paragraphs[:1]),
        musique_row("Moi"),
        musique_row("Moi"),
    ]
    good, problems = validate(enumerate(rows, 1), "musique", "f")
    assert [example.id for example in good] == ["2hop__Os", "2hop__Moi"]
    reasons = [
        "not answerable",
        "paragraphs are missing",
        "needs a title and a paragraph_text",
        "paragraph 1, which",
        "line 5",
    ]
    assert [p.line for p in problems] == [1, 2, 3, 4, 6]
    assert all(text in p.reason for text, p in zip(reasons, problems, strict=True))


def test_hotpot_rows_become_tasks_with_their_passages(tmp_path):
    write_text(tmp_path / "hotpot.json", json.dumps([hotpot_row("Vik"), hotpot_row("Lom")]))
    found = load_split(tmp_path / "hotpot.json", "hotpotqa", "train")
    task = found.tasks[0]
    assert (task.id, task.golds, task.evidence) == ("Vik", ("North Sea",), ("Vik (town)", "Elv"))
    assert (task.kind, task.hops, task.info) == ("bridge", 2, {"level": "easy"})
    # passages shared by the rows are one; two texts of one title stay two
    assert [p.title for p in found.passages] == ["Vik (town)", "Elv", "Elv", "Lom (town)"]
    assert found.passages[0].text == "It lies on the Elv. It has a mill."
    assert found.problems == []


def test_musique_rows_keep_aliases_decomposition_and_texts_of_one_title(tmp_path):
    write_rows(tmp_path / "musique.jsonl", [musique_row("Vik")])
    (task,) = load(tmp_path / "musique.jsonl", "musique", "train")
    assert task.golds == ("Ada Holm", "A. Holm")
    assert (task.kind, task.hops, task.evidence) == ("2hop", 2, ("Vik", "FK Nord"))
    assert task.info["decomposition"][1] == {"question": "leader of #1", "answer": "Ada Holm", "title": "FK Nord"}
    assert len(load_split(tmp_path / "musique.jsonl", "musique", "train").passages) == 3


def as_columns(row):
    """The shape the hub's HotpotQA has."""
    facts, context = row["supporting_facts"], row["context"]
    return {
        **{name: value for name, value in row.items() if name != "_id"},
        "id": row["_id"],
        "supporting_facts": {"title": [t for t, _ in facts], "sent_id": [i for _, i in facts]},
        "context": {"title": [t for t, _ in context], "sentences": [s for _, s in context]},
    }


def as_text(row):
    """The shape of hub copies that keep nested fields as JSON."""
    return {**row, "supporting_facts": json.dumps(row["supporting_facts"]), "context": json.dumps(row["context"])}


@pytest.mark.parametrize("shape", [as_columns, as_text])
def test_other_shapes_of_the_same_row_give_the_same_task(shape):
    plain, _ = validate([(1, hotpot_row("Vik"))], "2wiki", "f")
    other, problems = validate([(1, shape(hotpot_row("Vik")))], "2wiki", "f")
    assert other == plain and problems == []


# The same rows as tables keep them


def through_parquet(row):
    """As ``pandas`` reads a Parquet file: NumPy arrays and numbers."""
    row = row if "paragraphs" in row else as_columns(row)  # which lists of a text and a number cannot be
    frame = pd.DataFrame([row, {**row, "answer": None}])
    return pd.read_parquet(pa.BufferReader(frame.to_parquet())).to_dict("records")[0]


def through_columns(row):
    """As the hub keeps lists of records: a list for each of their fields."""
    return {
        name: {key: [record[key] for record in value] for key in value[0]}
        if isinstance(value, list) and value and isinstance(value[0], dict)
        else value
        for name, value in row.items()
    }


def through_csv(row):
    """As a table of texts keeps it: nested fields as JSON."""
    return {name: value if isinstance(value, str) else json.dumps(value) for name, value in row.items()}


def numbers_as(kind):
    def change(value):
        if isinstance(value, dict):
            return {key: change(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [change(inner) for inner in value]
        return kind(value) if isinstance(value, int) else value  # True is one too

    return change


TABLES = [through_parquet, through_columns, through_csv]
TABLES += [numbers_as(kind) for kind in (float, np.float32, np.int64, lambda x: str(float(x)))]
TABLES += [lambda row: numbers_as(float)(through_columns(row)), lambda row: numbers_as(np.array)(row)]


@pytest.mark.parametrize("change", TABLES)
@pytest.mark.parametrize("benchmark", ["hotpotqa", "musique"])
def test_tables_make_of_a_row_the_same_task(benchmark, change):
    row = musique_row("Vik", answer_aliases=["A. Holm"]) if benchmark == "musique" else hotpot_row("Vik")
    plain, _ = validate([(1, row)], benchmark, "f")
    found, problems = validate([(1, change(row))], benchmark, "f")
    assert found == plain and problems == []


NOTHING = [
    None,
    float("nan"),
    np.nan,
    np.float64("nan"),
    pd.NA,
    pd.NaT,
    "nan",
    "None",
    "NaN",
    "<NA>",
    "",
    [],
    np.array([]),
]


@pytest.mark.parametrize("nothing", NOTHING, ids=repr)
def test_a_key_without_a_value_hides_no_other(nothing):
    for others in (
        {"golds": ["Oslo"]},
        {"answers": ["Oslo"]},
        {"golden_answers": np.array(["Oslo"], dtype=object)},
        {"answer_aliases": ["Oslo"]},
        {"aliases": "Oslo"},
        {"target": ["Oslo"], "golds": nothing},
        {"reward_model": {"style": "rule", "ground_truth": {"target": ["Oslo"]}}},
    ):
        (row,), problems = validate([(1, hotpot_row("Vik", **{"answer": nothing, **others}))], "hotpotqa", "f")
        assert row.golds == ["Oslo"] and problems == []
    found, problems = validate([(1, hotpot_row("Vik", answer=nothing))], "hotpotqa", "f")
    assert found == [] and "answer " in problems[0].reason
    (row,), _ = validate([(1, {**hotpot_row("Vik", answer_aliases=nothing), "_id": nothing, "id": 12.0})], "2wiki", "f")
    assert (row.id, row.golds) == ("12", ["North Sea"])
    (row,), problems = validate([(1, {**hotpot_row("Vik"), "_id": nothing})], "2wiki", "f")
    assert row.id == "row-1" and "id is missing" in problems[0].reason
    paragraphs = [
        {**p, "is_supporting": nothing} if i == 2 else p for i, p in enumerate(musique_row("x")["paragraphs"])
    ]
    steps = [{**step, "paragraph_support_idx": nothing} for step in musique_row("x")["question_decomposition"]]
    row = musique_row("Vik", answerable=nothing, paragraphs=paragraphs, question_decomposition=steps)
    (row,), problems = validate([(1, row)], "musique", "f")
    assert row.evidence == ["x", "FK Nord"] and problems == []
    assert [step["title"] for step in row.info["decomposition"]] == ["", ""]


@pytest.mark.parametrize(
    "no", [False, 0, 0.0, "false", "False", "FALSE", "0", "0.0", np.bool_(False), np.int64(0)], ids=repr
)
def test_false_is_false_in_any_writing(no):
    found, problems = validate([(1, musique_row("Vik", answerable=no))], "musique", "f")
    assert found == [] and "not answerable" in problems[0].reason
    yes = "True" if isinstance(no, str) else type(no)(1)
    paragraphs = [{**p, "is_supporting": yes if p["is_supporting"] else no} for p in musique_row("Vik")["paragraphs"]]
    (row,), problems = validate([(1, musique_row("Vik", answerable=yes, paragraphs=paragraphs))], "musique", "f")
    assert row.evidence == ["Vik", "FK Nord"] and problems == []


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"answerable": "perhaps"}, "answerable is 'perhaps', neither true nor false"),
        ({"answerable": 2}, "answerable is 2, neither"),
        ({"answer_aliases": [["A. Holm"]]}, "answer_aliases holds ['A. Holm'], a list and no text"),
        ({"answer_aliases": {"a": 1}}, "answer_aliases is a dict with the keys ['a'], not a list of texts"),
        ({"answer_aliases": [True]}, "answer_aliases holds True, a bool and no text"),
        ({"answer": None, "golds": [["Ada"]]}, "golds holds ['Ada'], a list and no text"),
        ({"answer": float("inf")}, "answer holds inf"),
        (
            {"paragraphs": [{"idx": 0.5, "title": "a", "paragraph_text": "b", "is_supporting": 1}]},
            "idx 0.5, not a whole",
        ),
        (
            {"paragraphs": [{"idx": True, "title": "a", "paragraph_text": "b", "is_supporting": 1}]},
            "idx True, not a whole",
        ),
        (
            {"paragraphs": [{"idx": 0, "title": "a", "paragraph_text": "b", "is_supporting": "x"}]},
            "is_supporting is 'x'",
        ),
    ],
)
def test_what_a_table_cannot_have_meant_is_named(changes, reason):
    found, problems = validate([(1, musique_row("Vik", **changes))], "musique", "f")
    assert found == [] and reason in problems[0].reason


def test_whole_numbers_are_written_without_a_point():
    steps = [{"question": "q", "answer": 1912.0, "paragraph_support_idx": 2.0}]
    row = musique_row("Vik", answer=1994.0, answer_aliases=[94.0, np.float64(1.5), None], question_decomposition=steps)
    (row,), problems = validate([(1, row)], "musique", "f")
    assert row.golds == ["1994", "94", "1.5"] and [p.kept for p in problems] == [True]
    assert row.info["decomposition"] == [{"question": "q", "answer": "1912", "title": "FK Nord"}]
    for idx in (2.5, True, 9.0, "2.5"):
        steps = [{"question": "q", "answer": "a", "paragraph_support_idx": idx}]
        (row,), problems = validate([(1, musique_row("Vik", question_decomposition=steps))], "musique", "f")
        assert f"points to paragraph {idx}, which is not there" in problems[0].reason
        assert row.info["decomposition"][0]["title"] == ""


def test_evidence_in_other_writing_is_found_in_its_row():
    context = [["Beyonce\u0301", ["She sings."]], ["Simon &amp; Garfunkel", ["They sing."]]]
    facts = [["Beyonc\u00e9", 0], ["Simon & Garfunkel", 0], ["Simon &amp; Garfunkel", 0]]
    (row,), problems = validate([(1, hotpot_row("Vik", context=context, supporting_facts=facts))], "hotpotqa", "f")
    assert row.evidence == [title for title, _ in context] and problems == []
    found, problems = validate([(1, hotpot_row("Vik", supporting_facts=[["ELV", 0]]))], "hotpotqa", "f")
    assert found == [] and "'ELV' is not in the context" in problems[0].reason


# Full-wiki rows: the evidence lies in the corpus


def fullwiki_rows():
    facts = [["Vik (town)", 0], ["Elv", 7]]
    yield hotpot_row("Vik", context=[["Moss", ["A town."]]], supporting_facts=facts)
    yield hotpot_row("Lom", context=[], supporting_facts=[["Vik_(town)", 0]])
    yield hotpot_row("Moi", context=None, supporting_facts=[["Gone", 0]])


@pytest.mark.parametrize("saved", [False, True])
def test_evidence_that_is_not_in_a_row_is_looked_up_in_the_corpus(tmp_path, saved):
    write_rows(tmp_path / "rows.jsonl", fullwiki_rows())
    corpus = [{"title": title, "text": f"{title} is here."} for title in ("Vik (town)", "Elv", "Moss")]
    write_rows(tmp_path / "corpus.jsonl", corpus)
    BM25(corpus).save(tmp_path / "index")
    with pytest.warns(UserWarning, match="1 rows left out.*'Gone' is not in the context nor in the corpus"):
        found = load_task(
            "hotpotqa", path=tmp_path / "rows.jsonl", corpus=tmp_path / ("index" if saved else "corpus.jsonl")
        )
    assert [(task.id, task.evidence) for task in found.tasks] == [
        ("Vik", ("Vik (town)", "Elv")),
        ("Lom", ("Vik_(town)",)),
    ]
    with pytest.raises(DataError, match="no usable hotpotqa row among 3"):
        load_task("hotpotqa", path=tmp_path / "rows.jsonl")


def test_a_corpus_that_no_row_needs_is_read_once(tmp_path, monkeypatch):
    write_rows(tmp_path / "rows.jsonl", [hotpot_row("Vik"), *fullwiki_rows()])
    write_rows(tmp_path / "corpus.jsonl", [{"title": t, "text": "x"} for t in ("Vik (town)", "Elv", "Gone")])
    calls = []
    monkeypatch.setattr(
        "agentr1_lite.tasks.multihop.make_retriever", lambda *a, **b: calls.append(b) or BM25.load(b["path"])
    )
    with pytest.warns(UserWarning, match="repeats the row on line 1"):
        load_task("hotpotqa", path=tmp_path / "rows.jsonl", corpus=tmp_path / "corpus.jsonl")
    assert len(calls) == 1


# Packed files and folders of the hub


def write_table(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)


def test_folders_of_the_hub_are_read_by_split(tmp_path):
    for folder, share in (("distractor", "a"), ("fullwiki", "f")):
        for split, count in (("train", 2), ("validation", 1)):
            for number in range(count):
                rows = [as_columns(hotpot_row(f"{share}-{split}-{number}-{row}")) for row in range(2)]
                write_table(tmp_path / "hub" / folder / f"{split}-0000{number}-of-0000{count}.parquet", rows)
    for place in ("hub", "hub/distractor"):
        train = load(tmp_path / place, "hotpotqa", "train")
        assert [t.id for t in train] == [f"a-train-{n}-{row}" for n in range(2) for row in range(2)]
        assert [t.id for t in load(tmp_path / place, "hotpotqa", "dev")] == ["a-validation-0-0", "a-validation-0-1"]
    assert len(load(tmp_path / "hub/distractor/train-00001-of-00002.parquet", "hotpotqa")) == 2
    assert len(load(tmp_path / "hub/distractor/train-*.parquet", "hotpotqa")) == 4
    (tmp_path / "hub/distractor/train-00000-of-00002.parquet").unlink()
    with pytest.raises(DataError, match=r"train-\*-of-00002.parquet: 1 of 2 files are there"):
        load(tmp_path / "hub", "hotpotqa", "train")


def test_a_data_set_saved_to_disk_is_read(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = {split: [as_columns(hotpot_row(f"{split}{n}")) for n in range(2)] for split in ("train", "validation")}
    made = datasets.DatasetDict({split: datasets.Dataset.from_list(found) for split, found in rows.items()})
    made.save_to_disk(tmp_path / "disk", num_shards={"train": 2, "validation": 1})
    assert [t.id for t in load(tmp_path / "disk", "hotpotqa", "train")] == ["train0", "train1"]
    assert [t.id for t in load(tmp_path / "disk", "hotpotqa", "dev")] == ["validation0", "validation1"]


def test_packed_files_are_found_and_folders_without_data_are_told(tmp_path):
    (tmp_path / "hotpot_train_v1.1.json.gz").write_bytes(gzip.compress(json.dumps([hotpot_row("Vik")]).encode()))
    write_text(tmp_path / "README.md", "train")
    assert [t.id for t in load(tmp_path, "hotpotqa", "train")] == ["Vik"]
    (tmp_path / "empty" / "train").mkdir(parents=True)
    with pytest.raises(
        DataError, match=r"empty: expected one file of hotpotqa train, found no file of JSON Lines, JSON"
    ):
        load(tmp_path / "empty", "hotpotqa", "train")


@pytest.fixture(autouse=True)
def network(monkeypatch):
    monkeypatch.setattr("agentr1_lite.tasks.multihop.hub_reachable", lambda: True)


def test_an_absent_network_is_told_before_anything_is_tried(monkeypatch):
    monkeypatch.setattr("agentr1_lite.tasks.multihop.hub_reachable", lambda: False)
    monkeypatch.setattr("datasets.load_dataset", lambda *_, **__: pytest.fail("the hub was asked"))
    with pytest.raises(DataError, match="owner/absent.*cannot be reached.*local file"):
        load("owner/absent", "hotpotqa", limit=3)


def test_the_hub_is_asked_for_its_own_names(monkeypatch):
    import datasets

    asked = []

    def fake(repository, config, split):
        asked.append((repository, config, split))
        return [musique_row("Vik")] if "MuSiQue" in repository else [as_columns(hotpot_row("Vik"))]

    monkeypatch.setattr(datasets, "load_dataset", fake)
    for benchmark in BENCHMARKS:
        assert len(load("hub", benchmark, "dev")) == 1
    load("somebody/hotpot-copy", "hotpotqa", "train")
    assert asked == [
        ("hotpotqa/hotpot_qa", "distractor", "validation"),
        ("framolfese/2WikiMultihopQA", None, "validation"),
        ("dgslibisey/MuSiQue", None, "validation"),
        ("somebody/hotpot-copy", None, "train"),
    ]

    def offline(*args, **options):
        raise ConnectionError("no network\nat all")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(DataError, match="ConnectionError: no network at all.*give a local file") as caught:
        load("hub", "musique", "train")
    assert "\n" not in str(caught.value)


def test_only_the_rows_that_are_wanted_are_streamed(monkeypatch):
    import datasets

    asked, read = [], []

    def stream():
        for number in range(1000):
            read.append(number)
            yield as_columns(hotpot_row(f"q{number}"))

    def fake(repository, config, split, streaming=False):
        asked.append((repository, split, streaming))
        return stream()

    monkeypatch.setattr(datasets, "load_dataset", fake)
    found = load_split("hub", "hotpotqa", "validation", limit=5)
    assert [t.id for t in found.tasks] == [f"q{n}" for n in range(5)] and read == list(range(5))
    assert (
        len(load("hub", "hotpotqa", "train", limit=5, dev_share=0.5)) == 5
    )  # which rows are train's is known by reading
    assert asked == [("hotpotqa/hotpot_qa", "validation", True), ("hotpotqa/hotpot_qa", "train", False)]


def test_without_a_network_a_former_download_is_read(monkeypatch):
    import datasets

    def fake(repository, config, split, streaming=False):
        if streaming:
            raise ConnectionError("no network")
        return (as_columns(hotpot_row(f"q{n}")) for n in range(1000))

    monkeypatch.setattr(datasets, "load_dataset", fake)
    assert [t.id for t in load("hub", "hotpotqa", "train", limit=2)] == ["q0", "q1"]


@pytest.mark.parametrize("limit", [None, 3])
@pytest.mark.parametrize("while_reading", [False, True])
@pytest.mark.parametrize(
    "error, advice",
    [
        (ConnectionError("Couldn't reach 'x' on the Hub (LocalEntryNotFoundError)"), "connect to the network"),
        (
            RuntimeError("Dataset 'x' is a gated dataset on the Hub. You must be authenticated"),
            "accept its terms on the hub",
        ),
        (
            FileNotFoundError(2, "No such file or directory", "/cache/hotpot-train.arrow"),
            "half-downloaded: remove it from /",
        ),
        (EOFError("Ran out of input"), "half-downloaded: remove it from /"),
        (json.JSONDecodeError("Expecting value", "", 0), "half-downloaded: remove it from /"),
        (ValueError("Unknown split \"test\". Should be one of ['train', 'validation']."), "choose a split that it has"),
        (ValueError("Bad split: test. Available splits: ['train']"), "choose a split that it has"),
        (RuntimeError("Dataset 'x' doesn't exist on the Hub"), "check its name"),
    ],
)
def test_what_the_hub_cannot_give_is_one_sentence(monkeypatch, limit, while_reading, error, advice):
    import datasets

    def broken():
        yield as_columns(hotpot_row("q0"))
        raise error

    def fake(*args, **options):
        if while_reading:
            return broken()
        raise error

    monkeypatch.setattr(datasets, "load_dataset", fake)
    with pytest.raises(DataError) as caught:
        load("hub", "hotpotqa", "train", limit=limit)
    text = str(caught.value)
    assert (
        advice in text and type(error).__name__ in text and text.endswith("or give a local file") and "\n" not in text
    )


def test_files_of_a_folder_are_found_by_their_official_names(tmp_path):
    names = ["hotpot_train_v1.1.json", "hotpot_dev_distractor_v1.json", "hotpot_dev_fullwiki_v1.json", "corpus.jsonl"]
    names += ["musique_ans_v1.0_dev.jsonl", "musique_full_v1.0_dev.jsonl", "2wikimultihopqa_train.jsonl", "README.md"]
    for name in names:
        write_text(tmp_path / name, "")
    for benchmark, split, name in [
        ("hotpotqa", "train", names[0]),
        ("hotpotqa", "dev", names[1]),
        ("musique", "dev", names[4]),
        ("2wiki", "train", names[6]),
    ]:
        assert find_file(tmp_path, benchmark, split).name == name
    with pytest.raises(DataError, match="expected one file of hotpotqa test, found .*give the file's path"):
        find_file(tmp_path, "hotpotqa", "test")
    (tmp_path / "wiki").mkdir()
    for name in ("train.json", "dev.json", "test.json", "id_aliases.json"):
        write_text(tmp_path / "wiki" / name, "")
    assert find_file(tmp_path / "wiki", "2wiki", "dev").name == "dev.json"


def test_2wiki_aliases_beside_the_file_are_golds(tmp_path):
    write_rows(tmp_path / "dev.jsonl", [hotpot_row("Vik", answer_id="Q1"), hotpot_row("Lom", answer_id=None)])
    write_rows(tmp_path / "id_aliases.json", [{"Q_id": "Q1", "aliases": ["German Ocean"], "demonyms": ["North Sea"]}])
    first, second = load(tmp_path, "2wiki", "validation")
    assert first.golds == ("North Sea", "German Ocean") and second.golds == ("North Sea",)
    assert score_answer("german ocean", first.golds, "2wiki")["em"] == 1


@pytest.mark.parametrize(
    "fields, golds",
    [
        ({"aliases": "NYC"}, ("NYC",)),
        ({"aliases": ["", None, 5, " ", " NYC "]}, ("5", "NYC")),
        ({"aliases": None, "demonyms": "New Yorker"}, ("New Yorker",)),
        ({"aliases": [1.5, "North Sea"], "demonyms": []}, ("1.5",)),
        ({}, ()),
    ],
)
def test_aliases_are_names_as_in_the_rows(tmp_path, fields, golds):
    write_rows(tmp_path / "dev.jsonl", [hotpot_row("Vik", answer_id="Q1")])
    write_rows(tmp_path / "id_aliases.json", [{"Q_id": "Q1", **fields}])
    (task,) = load(tmp_path / "dev.jsonl", "2wiki", "dev")
    assert task.golds == ("North Sea", *golds)


@pytest.mark.parametrize(
    "row, reason",
    [
        ({"Q_id": "Q2", "aliases": 5}, "aliases is a int, not a list of names"),
        ({"Q_id": "Q2", "demonyms": 0}, "demonyms is a int, not a list of names"),
        ({"Q_id": "Q2", "aliases": {"a": "b"}}, "aliases is a dict, not a list of names"),
        ({"Q_id": "Q2", "aliases": ["a", ["b"]]}, "aliases holds a list, not only names"),
        ({"Q_id": "Q2", "demonyms": [True]}, "demonyms holds a bool, not only names"),
        ({"Q_id": ["Q2"], "aliases": []}, "Q_id is missing or not text"),
        ({"Q_id": " "}, "Q_id is missing or not text"),
        ({"a": 1}, "Q_id is missing or not text"),
        (hotpot_row("Lom"), "Q_id is missing or not text"),
    ],
)
def test_a_row_of_aliases_that_is_none_is_named(tmp_path, row, reason):
    write_rows(tmp_path / "dev.jsonl", [hotpot_row("Vik", answer_id="Q1")])
    write_rows(tmp_path / "other.jsonl", [{"Q_id": "Q1", "aliases": []}, row])
    with pytest.raises(DataError, match=rf"other.jsonl, line 2: {reason}; repair the alias file"):
        load(tmp_path / "dev.jsonl", "2wiki", "dev", aliases=str(tmp_path / "other.jsonl"))


def test_aliases_of_other_questions_are_pointed_out(tmp_path):
    write_rows(tmp_path / "dev.jsonl", [hotpot_row("Vik"), hotpot_row("Lom", answer_id="Q1")])
    write_rows(tmp_path / "id_aliases.json", [{"Q_id": "Q2", "aliases": ["x"]}])
    with pytest.warns(UserWarning, match="id_aliases.json: none of the 2 questions has an answer_id among its 1"):
        load(tmp_path / "dev.jsonl", "2wiki", "dev")
    write_rows(tmp_path / "id_aliases.json", [{"Q_id": "Q1", "aliases": ["x"]}])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load(tmp_path / "dev.jsonl", "2wiki", "dev", limit=1)[0].golds == ("North Sea",)


def test_what_cannot_be_loaded_is_said_in_one_sentence(tmp_path):
    write_rows(tmp_path / "rows.jsonl", [musique_row("Vik")])
    write_text(tmp_path / "empty.jsonl", "")
    for path, benchmark, split, words in [
        (tmp_path / "gone.json", "hotpotqa", "train", "gone.json: no such file or folder"),
        ("./gone", "hotpotqa", "train", "no such file or folder"),
        (tmp_path / "rows.jsonl", "hotpotqa", "train", "no usable hotpotqa row among 1; the first problem: line 1"),
        (tmp_path / "empty.jsonl", "hotpotqa", "train", "no usable hotpotqa row among 0"),
        (tmp_path / "rows.jsonl", "nq", "train", "benchmark 'nq' is unknown; choose one of hotpotqa, 2wiki, musique"),
        (tmp_path / "rows.jsonl", "musique", "trian", "split 'trian' is unknown; choose one of train, dev"),
    ]:
        with pytest.raises(DataError) as caught:
            load(path, benchmark, split)
        assert words in str(caught.value) and "\n" not in str(caught.value)
    for knob, values in (
        ("limit", (0, -1, "x", "3", 2.5, 2.0, True, [1])),
        ("dev_share", (1, 1.5, -0.1, float("nan"), "x", None, True)),
        ("aliases", (5, ["a"], True)),
    ):
        for value in values:
            with pytest.raises(DataError, match=re.escape(f"{knob} {value!r} ")) as caught:
                load(tmp_path / "rows.jsonl", "musique", **{knob: value})
            assert "; " in str(caught.value) or "must be" in str(caught.value)
    for path in (5, None, ["rows.jsonl"]):
        with pytest.raises(DataError, match=re.escape(f"path {path!r} is a {type(path).__name__}, not a path; give")):
            load(path, "musique")


@settings(deadline=None)
@given(st.sets(st.text("abcdef0123456789", min_size=6, max_size=12), min_size=1, max_size=30), st.floats(0.01, 0.99))
def test_a_file_divided_by_dev_share_leaks_no_question(tmp_path_factory, ids, share):
    path = tmp_path_factory.mktemp("rows") / "train.jsonl"
    write_rows(path, [hotpot_row(identity) for identity in sorted(ids)])
    found, empty = {"train": set(), "dev": set()}, []
    for split in found:
        try:
            found[split] = {t.id for t in load_split(path, "hotpotqa", split, dev_share=share).tasks}
            assert found[split]
        except DataError as error:  # never an empty split
            assert f"none of its {len(ids)} questions falls to {split} with dev_share {share}; choose" in str(error)
            empty.append(split)
    assert found["train"] | found["dev"] == ids and not found["train"] & found["dev"] and len(empty) < 2


def test_a_file_of_another_split_is_pointed_out(tmp_path):
    write_rows(tmp_path / "hotpot_train_v1.1.json", [hotpot_row("Vik")])
    with pytest.warns(UserWarning, match="is loaded as dev; dev_share=0.2"):
        load(tmp_path / "hotpot_train_v1.1.json", "hotpotqa", "dev")


def test_load_task_gives_an_environment_that_answers_and_pays(tmp_path):
    write_rows(tmp_path / "rows.jsonl", [musique_row(name) for name in ("Vik", "Lom", "Moi")])
    found = load_task("musique", path=tmp_path / "rows.jsonl", k=1, limit=2, max_turns=3, rewards={"em": 1.0})
    assert isinstance(found, TaskSet) and len(found) == 2 and found.split == "train"
    assert found.env.benchmark == "musique" and found.env.max_turns == 3
    assert len(found.passages) == len(found.index) == 4
    env = found.env.fork()
    env.reset(found.tasks[0], seed=0)
    call = {"name": "search", "arguments": {"query": "home of Vik"}}
    step = env.step(f"<tool_call>\n{json.dumps(call)}\n</tool_call>")
    assert step.observation == [{"role": "tool", "content": "Vik: Vik is home of FK Nord."}]
    assert step.info["turn"].results[0]["info"]["titles"] == ["Vik"]
    step = env.step("<answer>A. Holm</answer>")
    assert (step.reward, step.done, step.info["stop_reason"]) == (1.0, True, StopReason.ANSWER)


def test_a_stochastic_episode_in_the_environment_is_a_function_of_its_seed(tmp_path):
    write_rows(tmp_path / "rows.jsonl", [musique_row(name) for name in ("Vik", "Lom", "Moi")])
    found = load_task("musique", path=tmp_path / "rows.jsonl", failing=0.4, noisy=0.4, max_turns=9)
    calls = "".join(
        f'<tool_call>\n{{"name": "search", "arguments": {{"query": "{q}"}}}}\n</tool_call>'
        for q in ("Vik", "Lom", "Vik")
    )

    def observations(seeds):
        envs = [found.env.fork() for _ in seeds]
        for env, seed in zip(envs, seeds, strict=True):
            env.reset(found.tasks[0], seed=seed)
        return [[s.observation for s in ToolEnv.batch_step(envs, [calls] * len(envs))] for _ in range(3)]

    together = observations([0, 1, 2, 3])
    for place in range(4):
        assert [turn[place] for turn in together] == [turn[0] for turn in observations([place])]
    assert together[0][0] != together[0][1] or together[1][0] != together[1][1]


def test_the_corpus_may_be_a_file_or_a_saved_index(tmp_path, monkeypatch):
    write_rows(tmp_path / "rows.jsonl", [musique_row("Vik")])
    corpus = [{"title": t, "text": f"{t} is here."} for t in ("Vik", "FK Nord", "Moss")]
    write_rows(tmp_path / "corpus.jsonl", corpus)
    BM25(corpus, k1=0.9).save(tmp_path / "index")
    for place in ("corpus.jsonl", "index"):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = load_task("musique", path=tmp_path / "rows.jsonl", corpus=tmp_path / place)
        assert [p.title for p in found.passages] == ["Vik", "FK Nord", "Moss"]
        assert found.env.tools[0].execute({"query": "moss"}).content == "Moss: Moss is here."
    assert found.index.k1 == 0.9
    for place, reason in (("gone", "gone: cannot be read"), ("", "holds no index.json")):
        with pytest.raises(DataError, match=reason):
            load_task("musique", path=tmp_path / "rows.jsonl", corpus=tmp_path / place)


def test_a_corpus_of_another_dump_is_pointed_out(tmp_path):
    write_rows(tmp_path / "rows.jsonl", [musique_row("Vik"), musique_row("Lom")])  # evidence: Vik, Lom, FK Nord
    titles = tmp_path / "corpus.jsonl"
    write_rows(titles, [{"title": t, "text": "x"} for t in ("Vik", "Moss")])
    with pytest.warns(
        UserWarning, match="corpus: 33% of the 3 titles that prove the answers are among .* another dump"
    ):
        load_task("musique", path=tmp_path / "rows.jsonl", corpus=titles)
    for rows, reason in (
        ([{"title": "Moss", "text": "x"}], r"0% of the 3 .* its passages \(1\)"),
        ([], r"passages \(0\)"),
    ):
        write_rows(titles, rows)
        with pytest.raises(DataError, match=reason):
            load_task("musique", path=tmp_path / "rows.jsonl", corpus=titles)


def test_the_prompt_shows_the_forms_that_the_environment_reads(tmp_path):
    write_rows(tmp_path / "rows.jsonl", [musique_row("Vik")])
    path = tmp_path / "rows.jsonl"
    for knobs in ({}, {"system_prompt": None}, {"call_format": "hermes", "max_turns": 3}):
        assert load_task("musique", path=path, **knobs).env.system_prompt == SYSTEM_PROMPT
    assert load_task("musique", path=path, system_prompt="Answer.").env.system_prompt == "Answer."
    assert load_task("musique", path=path, system_prompt="").env.system_prompt == ""
    for knobs in ({"call_format": "tag"}, {"final_answer": "tool"}):
        own = load_task("musique", path=path, **knobs).env
        assert own.system_prompt == own.default_prompt() != SYSTEM_PROMPT
    (call,) = parse_tool_calls(SYSTEM_PROMPT)
    assert (call.name, call.arguments) == ("search", {"query": "..."})


def test_unknown_tasks_and_knobs_are_named(tmp_path):
    with pytest.raises(
        DataError, match=r"'hotpot_qa' is unknown \(did you mean 'hotpotqa'\?\); choose one of 2wiki, atlas"
    ):
        load_task("hotpot_qa")
    with pytest.raises(DataError, match=r"no knob 'pth' \(did you mean 'path'\?\); it takes path, k, .*max_turns"):
        load_task("musique", pth="x")
    assert set(BENCHMARKS) <= set(registry.names())


def test_an_own_task_is_one_decorated_function(monkeypatch):
    monkeypatch.setattr(registry, "_BUILDERS", dict(registry._BUILDERS))

    @registry.task("mine")
    def build(split, size=1):
        return TaskSet("mine", split, [], ToolEnv([]))

    assert load_task("mine", "dev", size=2).split == "dev"
    assert load_task("mine").passages == []
    with pytest.raises(DataError, match="no knob 'max_turns'; it takes size"):
        load_task("mine", max_turns=2)


@pytest.mark.parametrize(
    "benchmark, rows, passages, noted", [("hotpotqa", 408, 4018, 0), ("2wiki", 240, 1600, 4), ("musique", 100, 1890, 0)]
)
def test_real_training_samples(benchmark, rows, passages, noted):
    if not REAL.is_dir():
        pytest.skip("the real samples are not beside this checkout; the made-up rows above cover the formats")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = load_split(REAL, benchmark, "train")
    assert (len(found.tasks), len(found.passages), len(found.problems)) == (rows, passages, noted)
    assert all(problem.kept for problem in found.problems)
    titles = {p.title for p in found.passages}
    for task in found.tasks:
        assert task.question and task.golds and task.kind
        assert task.evidence and titles.issuperset(task.evidence)
        assert score_answer(task.golds[0], task.golds, benchmark)["em"] == 1
