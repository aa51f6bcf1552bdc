"""Report pages: what they show, what they escape, what they say is missing; charts stay inside their frames."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from agentr1_lite.escape import visible
from agentr1_lite.evaluation import Report, difference
from agentr1_lite.jsonl import DataError
from agentr1_lite.mdp import Segment, StopReason, Trajectory, Turn, TurnKind, save_jsonl
from agentr1_lite.plots import Curve, Estimate, smooth, svg_curves, svg_intervals, svg_stack
from agentr1_lite.report import demo_figure, write_report

HOSTILE = '<script>alert(1)</script><img src=x onerror="a()">&lt;"\'</p></style>\0\ud800'


class Page(HTMLParser):
    """Tags, attributes and text of a page; fails where tags do not balance."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def episode(question="Who rules it?", answer="Oda Rell", said="", reply="1. Oda Rell rules it.") -> Trajectory:
    segment = Segment()
    segment.extend([1, 2])
    segment.extend([3, 4], [-0.1, -0.2])
    call = {"name": "search", "arguments": {"query": said or "ruler of it"}, "flags": []}
    text = f'{said}<tool_call>\n{{"name": "search", "arguments": {{"query": "x"}}}}\n</tool_call>'
    result = {"content": reply, "success": True, "info": {}, "flags": [], "seconds": 0.0}
    turns = [
        Turn(0, 2, 3, TurnKind.TOOL_CALL, text, [call, {"error": "bad_json", "raw": said + "{"}], [result]),
        Turn(0, 3, 4, TurnKind.ANSWER, f"<answer> {answer} </answer>"),
    ]
    return Trajectory("q", "g", [segment], turns, question, ["Oda Rell"], answer, stop_reason=StopReason.ANSWER)


def report(name: str, *scores: float) -> Report:
    rows = [
        {"id": f"q{i}", "question": "?", "golds": ["x"], "kind": "bridge", "hops": 1 + i % 3, "answer": "x", "seed": 0}
        | {"em": x, "cover_em": x, "f1": x, "reward": x, "stop_reason": "answer", "turns": 2, "tool_calls": 1}
        | {"action_tokens": 20, "recall": None}
        for i, x in enumerate(scores)
    ]
    return Report(name, rows)


@pytest.fixture
def folder(tmp_path):
    """A small run as the trainer leaves it."""
    run = tmp_path / "demo"
    run.mkdir()
    scores = {"base": [0.0] * 20 + [1.0] * 10, "imitation": [0.0] * 15 + [1.0] * 15, "online": [1.0] * 28 + [0.0] * 2}
    for name, values in {**scores, "naive_rag": [0.0] * 27 + [1.0] * 3}.items():
        report(name, *values).save(run / "evaluation" / f"{name}.json")
    rows = [{"phase": "imitation", "step": i, "nll": 1 / i, "grad_norm": 1.0} for i in range(1, 9)]
    rows += [
        {"phase": "online", "step": i, "reward": i / 20, "reward/em": i / 20, "entropy_estimate": 0.3, "grad_norm": 0.5}
        | {"stop/answer": 0.75, "stop/no_call": 0.25, "kl": 0.01 * i}
        for i in range(1, 13)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    save_jsonl(run / "trajectories" / "000001.jsonl", [episode(answer="unknown")])
    save_jsonl(run / "trajectories" / "000012.jsonl", [episode(), episode(answer="Tor Lund")])
    note = {"phase": "online", "level": "warn", "check": "cut_short", "message": "half were cut", "lesson": 3}
    (run / "doctor.jsonl").write_text("".join(json.dumps({**note, "step": s}) + "\n" for s in (2, 5)), encoding="utf-8")
    (run / "config.yaml").write_text("training:\n  lr: 5e-4\n", encoding="utf-8")
    summary = {
        "em": {"base": 1 / 3, "imitation": 0.5, "online": 28 / 30},
        "interval": {"base": [0.17, 0.5], "online": [0.83, 1.0]},
        "n": 30,
        "baselines": {"naive_rag": 0.1},
        "seconds": {"online": 164.25, "total": 200},
        "seed": 7,
        "algorithm": "GRPO",
        "versions": {"torch": "2.13.0"},
    }
    (run / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    return run


def test_page_of_a_whole_run(folder):
    path = write_report(folder)
    assert path == folder / "report.html"
    page = Page(path.read_text(encoding="utf-8"))
    for words in (
        "0.333",
        "0.933",
        "GRPO · seed 7",
        "0.933 [0.830, 1.000]",  # from the summary
        "0.500 [0.332, 0.668]",  # not in the summary: Wilson's of 15 of 30 from the evaluation report
        "Naive RAG",
        "Answers to 30 questions",
        "+0.433",  # online − imitation: 28/30 − 15/30
        "imitation",
        "half were cut",
        "2 to 5, 2 times",
        "search(query = ",
        "✓ Oda Rell",
        "✗ Tor Lund",
        "wrong, at the first step",
        "164.2",
        "lr: 5e-4",
        "2.13.0",
    ):
        assert words in page.text, words
    assert "What this folder lacks" not in page.text
    assert page.tags.count("svg") == 8 and page.tags.count("article") == 3


def test_nothing_from_outside_and_no_machine_path(folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    text = write_report(folder).read_text(encoding="utf-8")
    page = Page(text)
    assert not {"script", "link", "img", "iframe", "object", "base"} & set(page.tags)
    assert not [a for a in page.attributes if a[0] in ("src", "href", "action") or a[0].startswith("on")]
    assert "@import" not in text and "url(" not in text and "http" not in text
    assert str(folder.parent) not in text and "train demo/config.yaml run.output=demo-again" in text


def test_light_dark_and_paper(folder):
    text = write_report(folder).read_text(encoding="utf-8")
    assert "prefers-color-scheme:dark" in text and "@media print" in text and "color-scheme:light dark" in text
    used = set(re.findall(r"var\(--([\w-]+)\)", text))
    for block in re.findall(r":root\{(.*?)\}", text):
        assert used - {"share"} <= set(re.findall(r"--([\w-]+):", block))


def test_same_folder_same_page(folder):
    first = write_report(folder).read_bytes()
    assert write_report(folder, folder / "again.html").read_bytes() == first


def test_hostile_text_stays_text(folder):
    clean = write_report(folder).read_text(encoding="utf-8")
    hostile = HOSTILE.replace("\ud800", "")
    save_jsonl(
        folder / "trajectories" / "000012.jsonl",
        [episode(hostile, "Oda Rell", hostile, hostile), episode(answer=hostile)],
    )
    (folder / "config.yaml").write_text(f"a: {hostile}", encoding="utf-8")
    (folder / "summary.json").write_text(json.dumps({"versions": {HOSTILE: HOSTILE}, "algorithm": HOSTILE}))
    (folder / "doctor.jsonl").write_text(json.dumps({"check": hostile, "level": hostile, "message": hostile}) + "\n")
    row = {"phase": "online", "step": 1, "reward": 1.0, f"stop/{hostile[:40]}": 1.0}
    (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    page = Page(write_report(folder).read_text(encoding="utf-8"))
    assert set(page.tags) <= set(Page(clean).tags)
    assert not [a for a in page.attributes if a[0].startswith("on")]
    assert page.text.count("<script>alert(1)</script>") >= 9


@given(st.text(max_size=60), st.text(max_size=60))
@settings(max_examples=25, deadline=None)
def test_any_words_of_tools_and_models(tmp_path_factory, said, reply):
    run = tmp_path_factory.mktemp("run")
    save_jsonl(run / "trajectories" / "1.jsonl", [episode(said, "Oda Rell", said, reply)])
    page = Page(write_report(run).read_bytes().decode())
    assert page.tags.count("article") == 1
    assert visible(reply) in page.text


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("summary.json", "{", "summary.json cannot be used"),
        ("summary.json", "[1]", "Run demo"),
        ("summary.json", '{"em": [1], "interval": 3, "baselines": "x", "seconds": null, "n": "many"}', "0.93"),
        (
            "metrics.jsonl",
            '{"phase": "online", "step": 1, "reward": 1.0}\n{"step": 2, "rew',
            "metrics.jsonl, line 2: is cut",
        ),
        ("metrics.jsonl", '{"phase": "online", "step": 1, "reward": NaN}\n', "NaN is not JSON"),
        ("evaluation/online.json", "{}", "online.json: not an evaluation report"),
        ("trajectories/000012.jsonl", '{"task_id": 3}\n', "000012.jsonl, line 1: not a trajectory"),
        (
            "doctor.jsonl",
            '{"check": "x", "level": "warn", "message": 3, "step": [], "lesson": "?"}\n',
            "'doctor' cannot be drawn",
        ),
    ],
)
def test_broken_pieces_are_said(folder, name, text, words):
    (folder / name).write_text(text, encoding="utf-8")
    found = Page(write_report(folder).read_text(encoding="utf-8")).text
    assert words in found and str(folder) not in found


def test_versions_of_a_run_without_summary(folder):
    (folder / "summary.json").unlink()
    (folder / "versions.json").write_text('{"torch": "9.9.9"}', encoding="utf-8")
    assert "9.9.9" in Page(write_report(folder).read_text(encoding="utf-8")).text


def test_empty_folder(tmp_path):
    text = Page(write_report(tmp_path).read_text(encoding="utf-8")).text
    for name in ("summary.json", "metrics.jsonl", "config.yaml", "evaluation/", "trajectories/"):
        assert name in text
    with pytest.raises(DataError, match="no such run folder"):
        write_report(tmp_path / "nowhere")


def test_repeated_steps_of_a_resumed_run(folder):
    with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"phase": "online", "step": 12, "reward": 0.9}) + "\n")
    page = write_report(folder).read_text(encoding="utf-8")
    assert max(float(x) for x in re.findall(r">(\d+)</text>", page)) < 100


def test_without_notes_the_doctor_looks_again(folder):
    (folder / "doctor.jsonl").unlink()
    assert "earned the same in every rollout" in Page(write_report(folder).read_text(encoding="utf-8")).text


# Charts

NUMBERS = st.floats(-1e6, 1e6, allow_nan=False)


def inside(svg: str) -> None:
    """Every coordinate lies in the view box."""
    width, height = map(float, re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg).groups())
    drawn = re.sub(r"<defs>.*?</defs>", "", svg, flags=re.S)  # marks are defined around 0 and stand where they are used
    points = [
        tuple(map(float, p)) for d in re.findall(r' d="([^"]+)', drawn) for p in re.findall(r"(\S+) (\S+) ?\n", d)
    ]
    points += [tuple(map(float, p)) for p in re.findall(r'<(?:use|text)[^>]* x="([-\d.e]+)" y="([-\d.e]+)"', drawn)]
    assert len(points) > 10 and all(-0.1 <= x <= width + 0.1 and -0.1 <= y <= height + 0.1 for x, y in points)


@given(st.lists(NUMBERS, min_size=1, max_size=30), st.lists(NUMBERS, min_size=1, max_size=30))
@settings(max_examples=15, deadline=None)
def test_curves_stay_inside(first, second):
    curves = [Curve("imitation", range(1, len(first) + 1), first), Curve("online", range(1, len(second) + 1), second)]
    inside(svg_curves(curves, "x"))
    inside(svg_curves(curves[:1], "x"))


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=6))
@settings(max_examples=15, deadline=None)
def test_intervals_stay_inside(shares):
    rows = [Estimate("online", m, lo, hi) for lo, m, hi in map(sorted, shares)] + [Estimate("closed_book", 0.1)]
    inside(svg_intervals([("Phases", rows)], "exact match"))


def test_stack_stays_inside():
    layers = [Curve("answer", [1, 2, 3], [0.2, 0.5, 1.0]), Curve("length", [1, 2, 3], [0.8, 0.5, 0.0])]
    inside(svg_stack(layers, "x"))
    inside(svg_stack([Curve("answer", [4], [1.0])], "x"))


def test_charts_say_their_numbers_and_names():
    rows = [Estimate("online", 0.5, 0.25, 0.75), Estimate("closed_book", 0.1)]
    svg = svg_intervals([("Phases", rows)], "exact $match$ $")
    for words in ("Phases", "Closed book", rows[0].text, "exact $match$ $", "<title>3 · Online RL: 0.5"):
        assert words in svg, words
    svg = svg_curves([Curve("online", range(1, 41), [i / 40 for i in range(40)])], "reward")
    assert [x for x in ("0", "10", "20", "30", "40") if f">{x}</text>" in svg] == ["0", "10", "20", "30", "40"]
    assert "<title>answer</title>" in svg_stack([Curve("answer", [1, 2], [1.0, 1.0])], "why")


def test_smooth():
    assert smooth([2.0] * 40) == pytest.approx([2.0] * 40)
    assert smooth([1.0, 3.0], window=3) == [1.0, pytest.approx(7 / 3)]  # keep = ½: (½·1 + 3) / 1½
    assert smooth([1.0, 5.0, 2.0]) == [1.0, 5.0, 2.0]


def test_figure_for_the_readme(folder, tmp_path):
    picture = Image.open(demo_figure(folder, tmp_path / "run.png"))
    assert picture.size[0] > 1500 and picture.size[0] / picture.size[1] == pytest.approx(10.6 / 4.3, rel=0.01)
    assert len(picture.convert("RGB").getcolors(1 << 20)) > 50
    (tmp_path / "empty").mkdir()
    assert demo_figure(tmp_path / "empty", tmp_path / "none.png").stat().st_size > 1000


def test_no_share_is_rounded_and_no_interval_is_a_point(folder):
    """191 of 200, 0 of 200: in the table, on the page, and in an older run whose summary held a point."""
    scores = {"base": [0.0] * 200, "online": [1.0] * 191 + [0.0] * 9}
    for name, values in scores.items():
        report(name, *values).save(folder / "evaluation" / f"{name}.json")
    old = {"em": {"base": 0.0, "online": 0.955}, "interval": {"base": [0.0, 0.0], "online": [0.925, 0.98]}}
    (folder / "summary.json").write_text(json.dumps(old))
    text = Page(write_report(folder).read_text(encoding="utf-8")).text
    for words in ("0.000→0.955", "0.000 [0.000, 0.019]", "0.955 [0.925, 0.980]", "0.955 [0.917, 0.976]"):
        assert words in text.replace("\n", ""), words
    assert "0.96" not in text and "[0.000, 0.000]" not in text
    stored = json.loads((folder / "evaluation" / "base.json").read_text())["summary"]
    assert (
        stored["em"]["interval"] == [0.0, pytest.approx(0.0188453, abs=1e-7)]
        and stored["by_kind"]["bridge"]["interval"][1] > 0
    )
    assert "0.955 [0.917, 0.976]" in report("r", *scores["online"]).table()
    assert str(difference(report("a", *scores["base"]), report("b", *scores["base"]))) == "+0.000 [-0.014, +0.014]"
