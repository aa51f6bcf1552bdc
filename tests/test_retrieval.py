from __future__ import annotations

import copy
import json
import math
import pickle
import random
import re
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentr1_lite import retrieval
from agentr1_lite.jsonl import DataError, write_rows, write_text
from agentr1_lite.mdp import Task
from agentr1_lite.retrieval import (
    BM25,
    Passage,
    as_passage,
    load_passages,
    make_search_tool,
    read_passages,
    split_contents,
    unique_passages,
    words,
)
from agentr1_lite.retrievers import make_retriever

CORPUS = [
    Passage("Oslo", "Oslo is the capital of Norway."),
    Passage("Norway", "Norway is a country in the north of Europe."),
    Passage("Bergen", "Bergen is a rainy city in Norway."),
    Passage("Lund", "Lund is a city in Sweden."),
]
TASK = Task("t", "Where is Lund?", ("Sweden",))
QUERIES = ["Oslo", "city in Norway", "Sweden", "rainy capital", "country", "Lund"]


def by_hand(corpus: list[str], query: str, k1: float = 1.5, b: float = 0.75) -> list[float]:
    """The formula of the module docstring in plain Python."""
    bags = [words(text) for text in corpus]
    mean = sum(map(len, bags)) / len(bags)
    scores = []
    for bag in bags:
        score = 0.0
        for word in words(query):
            frequency, holders = bag.count(word), sum(word in other for other in bags)
            idf = math.log(1 + (len(bags) - holders + 0.5) / (holders + 0.5))
            if frequency:
                score += idf * frequency / (frequency + k1 * (1 - b + b * len(bag) / mean))
        scores.append(score)
    return scores


def test_scores_of_two_passages_worked_out_by_hand():
    index = BM25(["hello there good man", "windy in london"])
    # "there" and "in" are stop words: lengths 3 and 2, mean 2.5; each query word stands in one of two passages
    expected = 2 * math.log(1 + 1.5 / 1.5) / (1 + 1.5 * (0.25 + 0.75 * 2 / 2.5))
    (best,) = index.search("windy london", 1)
    assert best.text == "windy in london"
    assert best.score == pytest.approx(expected, rel=1e-6)


def test_se03_a_word_in_half_of_the_passages_counts():
    assert [p.text for p in BM25(["hello there good man", "windy in london"]).search("windy london", 5)] == [
        "windy in london"
    ]
    everywhere = BM25(["river north", "river south", "river east"]).search("river", 5)
    assert len(everywhere) == 3 and all(p.score > 0 for p in everywhere)


@pytest.mark.filterwarnings("ignore:BM25.*no word")
@settings(deadline=None)
@given(
    st.lists(st.lists(st.sampled_from("red green blue sea hill of the".split()), max_size=5).map(" ".join), max_size=7),
    st.lists(st.sampled_from("red green blue sea unknown the".split()), max_size=4).map(" ".join),
    st.integers(0, 9),
)
def test_search_is_the_formula_sorted_with_ties_in_corpus_order(corpus, query, k):
    corpus = list(dict.fromkeys(corpus))
    index = BM25(corpus)
    found = index.search(query, k)
    expected = by_hand(corpus, query) if any(words(text) for text in corpus) else [0.0] * len(corpus)
    order = sorted((i for i, s in enumerate(expected) if s > 0), key=lambda i: (-round(expected[i], 5), i))[:k]
    assert [int(p.id) for p in found] == order
    assert [p.score for p in found] == pytest.approx([expected[i] for i in order], rel=1e-5)
    assert index.search_batch([query, query], k) == [found, found]


@pytest.mark.parametrize("query", ["", "   ", "???", "zzzqqq", "the of and", "\x00", "\u200b", None, "the " * 1000])
def test_se01_queries_that_find_nothing(query):
    assert BM25(CORPUS).search(query, 3) == []
    assert BM25([]).search(query, 3) == []
    assert make_search_tool(BM25(CORPUS)).execute({"query": query}).content == "No results."


@pytest.mark.filterwarnings("ignore:BM25.*no word")
def test_se01_empty_corpora():
    for corpus in ([], ["the of"], ["", "?!"]):
        index = BM25(corpus)
        assert index.search("Oslo", 3) == []
        assert index.search_batch(["Oslo", ""], 3) == [[], []]
        assert make_search_tool(index).execute({"query": "Oslo"}).content == "No results."


def test_se02_k_larger_than_the_corpus():
    assert len(BM25(["a b", "c d"]).search("a", 10)) <= 2
    assert [p.text for p in BM25(["x b", "c d", "x e"]).search("x", 10)] == ["x b", "x e"]
    assert BM25(CORPUS).search("Norway", 0) == BM25(CORPUS).search("Norway", -1) == []


@pytest.mark.parametrize("k", [1, 2, 3, 50])
def test_ties_keep_corpus_order_at_every_cut(k):
    index = BM25([Passage(f"T{i}", "same words") for i in range(40)] + [Passage("best", "same same words words")])
    found = index.search("same words", k)
    assert [p.title for p in found] == (["best"] + [f"T{i}" for i in range(40)])[:k]


def test_ds04_one_title_with_several_texts_stays_several_passages():
    rows = [
        {"title": "Southampton", "text": "The university was founded in 1862."},
        {"title": "Southampton", "text": "Southampton is a port city in Hampshire."},
    ]
    assert len(BM25(rows)) == 2
    assert len(BM25(rows + rows)) == 2
    assert BM25(rows).search("university founded", 1)[0].text == rows[0]["text"]
    assert [p.id for p in unique_passages([*rows, {"title": "Hull", "text": "A port.", "id": 7}])] == ["0", "1", "7"]


def test_titles_are_searched_and_words_are_folded():
    index = BM25([Passage("STRASSE", "x1"), Passage("Beyonc\u00e9's song", "x2"), Passage("", "\uff35\uff33\uff21")])
    assert [p.text for p in index.search("stra\u00dfe")] == ["x1"]
    assert [p.text for p in index.search("Beyonce\u0301")] == ["x2"]
    assert [p.text for p in index.search("usa")] == ["\uff35\uff33\uff21"]


@settings(deadline=None)
@given(st.text(max_size=40), st.integers(-2, 6))
def test_no_query_raises(query, k):
    found = BM25(CORPUS).search(query, k)
    assert len(found) <= max(k, 0)
    assert found == sorted(found, key=lambda p: -p.score)


def test_results_do_not_leak_into_the_cache():
    index = BM25(CORPUS)
    index.search("Norway", 2).clear()
    assert len(index.search("Norway", 2)) == 2
    assert all(p.score == 0 for p in index.passages)


@pytest.fixture
def not_indexed_again(monkeypatch):
    """Call it, and from then on nothing can be indexed."""
    return lambda: monkeypatch.setattr(retrieval, "_numbered_words", None)


@pytest.mark.filterwarnings("ignore:BM25.*no word")
def test_save_and_load(tmp_path, not_indexed_again):
    index, empty = BM25(CORPUS, k1=1.2, b=0.5), [BM25([]), BM25(["", "?!"])]
    index.save(tmp_path / "index")
    for place, nothing in enumerate(empty):
        nothing.save(tmp_path / f"empty-{place}")
    assert BM25.load(tmp_path / "index" / "passages.jsonl").passages == index.passages
    not_indexed_again()
    for other in (BM25.load(tmp_path / "index"), pickle.loads(pickle.dumps(index))):
        assert (other.passages, other.k1, other.b) == (index.passages, 1.2, 0.5)
        assert other.search_batch(QUERIES) == index.search_batch(QUERIES)
    assert copy.deepcopy(index) is index
    for place, nothing in enumerate(empty):
        loaded = BM25.load(tmp_path / f"empty-{place}")
        assert loaded.passages == nothing.passages and loaded.search("Oslo") == []


def test_passages_survive_on_disk_whatever_they_hold(tmp_path):
    odd = [
        Passage("a\u2028b", "x\r\ny\x85z", id="p"),
        Passage("", "\U0001f600 caf\u00e9"),
        Passage("t", ""),
        Passage("\ufeff", "0"),
    ]
    BM25(odd).save(tmp_path / "index")
    assert BM25.load(tmp_path / "index").passages == unique_passages(odd)


def saved_files(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("change", ["removed", "cut off", "other"])
def test_a_saved_index_of_which_anything_is_gone_is_one_sentence(tmp_path, change):
    BM25(CORPUS).save(tmp_path / "whole")
    for name in saved_files(tmp_path / "whole"):
        folder = tmp_path / f"without-{name}"
        BM25(CORPUS).save(folder)
        path = folder / name
        data = path.read_bytes()
        path.unlink()
        if change != "removed":
            path.write_bytes(data[:-10] if change == "cut off" else data.replace(b"3", b"4").replace(b"a", b"b") + b" ")
        with pytest.raises(DataError) as caught:
            BM25.load(folder)
        assert str(folder) in str(caught.value) and "sav" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("manifest", ["", "[]", "{}", '{"kind": "bm25", "files": {}}', '{"kind": "bm25", "files": 3}'])
def test_a_foreign_folder_is_one_sentence(tmp_path, manifest):
    with pytest.raises(DataError, match="holds no index.json, so no index was saved here"):
        BM25.load(tmp_path)
    write_text(tmp_path / "index.json", manifest)
    with pytest.raises(DataError, match="index.json: does not describe an index .*; save the index again"):
        BM25.load(tmp_path)
    rows = {"kind": "bm25", "files": {"passages.jsonl": "0"}}
    write_text(tmp_path / "index.json", json.dumps(rows))
    with pytest.raises(DataError, match="does not describe an index .'k1'"):
        BM25.load(tmp_path)


def test_saving_replaces_an_index_and_nothing_else(tmp_path):
    (tmp_path / "notes").mkdir()
    write_text(tmp_path / "notes" / "diary.txt", "mine")
    for path in (tmp_path / "notes", tmp_path / "notes" / "diary.txt"):
        with pytest.raises(DataError, match="holds something else .*, which saving the index would replace"):
            BM25(CORPUS).save(path)
    BM25(CORPUS).save(tmp_path / "index")
    BM25(CORPUS[:2]).save(tmp_path / "index")
    assert BM25.load(tmp_path / "index").passages == unique_passages(CORPUS[:2])

    class Full:
        def save(self, *args, **options):
            raise OSError(28, "No space left on device")

    broken = BM25(CORPUS)
    broken.index = Full()
    for folder in ("index", "new"):
        with pytest.raises(DataError, match="cannot be written .*No space left on device"):
            broken.save(tmp_path / folder)
    assert len(BM25.load(tmp_path / "index")) == 2
    assert saved_files(tmp_path) == ["index", "notes"]


def everything(folder):
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@pytest.mark.parametrize(
    "manifest",
    ['{"my": "web"}', "{", "[1]", '{"kind": "bm25"}', '{"kind": 3, "files": {"passages.jsonl": "0"}}'],
)
def test_an_index_json_of_somebody_else_is_not_replaced(tmp_path, manifest):
    write_text(tmp_path / "site" / "index.json", manifest)
    write_text(tmp_path / "site" / "main.js", "mine")
    before = everything(tmp_path)
    for _ in range(2):
        with pytest.raises(DataError, match=r"site: holds something else \((index.json|main.js)\), which saving"):
            BM25(CORPUS).save(tmp_path / "site")
        assert everything(tmp_path) == before
        (tmp_path / "site" / "main.js").unlink(missing_ok=True)  # alone the file is foreign all the same
        before = everything(tmp_path)


@pytest.mark.parametrize("name", ["a note.txt", ".hidden", "z/inner/diary.txt", "vectors.npy"])
@pytest.mark.parametrize("place", ["index", "index.former"])
def test_what_a_user_put_into_a_saved_index_is_not_removed(tmp_path, name, place):
    BM25(CORPUS).save(tmp_path / place)
    write_text(tmp_path / place / name, "mine")
    before = everything(tmp_path)
    with pytest.raises(DataError, match=rf"{place}: holds something else \({name.split('/')[0]}\)"):
        BM25(CORPUS[:1]).save(tmp_path / "index")
    assert everything(tmp_path) == before
    assert len(BM25.load(tmp_path / "index")) == len(CORPUS)  # which reads past it


def test_the_former_index_of_a_killed_save_is_loaded_and_a_damaged_one_saved_anew(tmp_path):
    BM25(CORPUS).save(tmp_path / "index")
    (tmp_path / "index").rename(tmp_path / "index.former")
    for load in (BM25.load, lambda path: make_retriever("bm25", path=str(path))):
        assert load(tmp_path / "index").passages == unique_passages(CORPUS)
    BM25(CORPUS[:2]).save(tmp_path / "index")
    assert len(BM25.load(tmp_path / "index")) == 2 and saved_files(tmp_path) == ["index"]
    (tmp_path / "index" / "passages.jsonl").unlink()
    BM25(CORPUS[:3]).save(tmp_path / "index")
    assert len(BM25.load(tmp_path / "index")) == 3


@pytest.mark.parametrize(
    "row, title, text",
    [
        ({"contents": '"Oslo"\nA city.'}, "Oslo", "A city."),
        ({"contents": "Oslo\nA city.\nOld."}, "Oslo", "A city.\nOld."),
        ({"contents": "one line"}, "", "one line"),
        ({"title": "Oslo", "contents": '"Oslo"\nA city.'}, "Oslo", "A city."),
        ({"title": "Oslo", "contents": "A city.\nOld."}, "Oslo", "A city.\nOld."),
        ({"title": "Oslo", "text": "A city.", "contents": "no"}, "Oslo", "A city."),
        ({"title": float("nan"), "text": None, "contents": '"Oslo"\nA city.'}, "Oslo", "A city."),
        ({"title": '"Heroes"', "contents": '"Heroes"\nA song.'}, '"Heroes"', "A song."),
        ({"title": "Simon & Garfunkel", "contents": '"Simon &amp; Garfunkel"\nA duo.'}, "Simon & Garfunkel", "A duo."),
    ],
)
def test_passages_of_corpora_that_keep_contents(tmp_path, row, title, text):
    assert as_passage({"id": 3.0, **row}, 0) == Passage(title, text, id="3")
    row = {name: value for name, value in row.items() if value == value}
    write_rows(tmp_path / "wiki.jsonl", [{"id": 3, **row}])
    assert read_passages(tmp_path / "wiki.jsonl") == ([Passage(title, text, id="3")], [])


def test_broken_corpora_are_named(tmp_path):
    path = tmp_path / "corpus.jsonl"
    write_rows(
        path, [{"title": "A", "text": "a1"}, {"title": "B"}, {"title": 3, "text": "c"}, {"title": None, "text": "d"}]
    )
    passages, problems = read_passages(path)
    assert [p.text for p in passages] == ["a1", "d"]
    assert [p.line for p in problems] == [2, 3]
    with pytest.raises(DataError, match=r"corpus.jsonl, line 2: has no text"):
        BM25.load(path)
    with pytest.raises(DataError, match="passage 0: expected a title and a text"):
        BM25([{"title": 3, "text": "x"}])
    with pytest.raises(ValueError, match="k1 0 must be above 0"):
        BM25(CORPUS, k1=0)


def episode(tool, seed, queries=QUERIES):
    mine = tool.fork()
    mine.reset(TASK, random.Random(seed))
    return [mine.execute({"query": query}) for query in queries]


def test_the_tool_shows_titles_and_is_shared_where_it_is_deterministic():
    tool = make_search_tool(BM25(CORPUS), k=2)
    result = tool.execute({"query": "Bergen rainy"})
    assert result.content == "Bergen: Bergen is a rainy city in Norway."
    assert result.info == {"titles": ["Bergen"], "ids": ["2"]} and result.success
    assert len(tool.execute({"query": "Norway"}).info["titles"]) == 2
    assert tool.fork() is tool
    assert tool.validate_args({"query": "x"})[1] is None
    assert tool.validate_args({})[1]
    short = make_search_tool(BM25(CORPUS), render=lambda passages: " | ".join(p.title for p in passages))
    assert short.execute({"query": "Lund"}).content == "Lund"


def test_a_stochastic_episode_is_a_function_of_its_seed():
    tool = make_search_tool(BM25(CORPUS), k=2, failing=0.3, noisy=0.3)
    assert tool.fork() is not tool and tool.fork().index is tool.index
    assert episode(tool, 1) == episode(tool, 1)
    assert len({str(episode(tool, seed)) for seed in range(8)}) > 4
    # episodes that run side by side do not disturb each other
    alone = [episode(tool, seed, QUERIES * 20) for seed in range(4)]
    together = [None] * 4

    def work(seed):
        together[seed] = episode(tool, seed, QUERIES * 20)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == alone


def test_shares_of_failures_and_noise():
    index = BM25(CORPUS)
    broken = episode(make_search_tool(index, failing=1.0), 0)
    assert all(not r.success and r.flags == ("failed",) and r.info["titles"] == [] for r in broken)
    results = episode(make_search_tool(index, failing=0.25), 0, ["Oslo"] * 4000)
    assert sum(not r.success for r in results) / 4000 == pytest.approx(0.25, abs=0.03)
    results = episode(make_search_tool(index, k=1, noisy=0.4), 0, ["Oslo"] * 4000)
    # noise draws from the whole corpus, so a quarter of it shows the right passage again
    assert sum("noisy" in r.flags for r in results) / 4000 == pytest.approx(0.4 * 3 / 4, abs=0.03)
    shown = {title for r in results for title in r.info["titles"]}
    assert shown == {"Oslo", "Norway", "Bergen", "Lund"}
    clean = make_search_tool(index, noisy=0.4, k=1).execute({"query": "???"})
    assert clean.content == "No results."


def test_bad_settings_of_the_tool_are_named():
    for name, values in (("failing", (1.5, "x", None)), ("noisy", (-0.1, [0])), ("k", (0, "3", 2.5, True, None))):
        for value in values:
            with pytest.raises(ValueError, match=re.escape(f"search tool: {name} {value!r} ")):
                make_search_tool(BM25(CORPUS), **{name: value})
    assert make_search_tool(BM25(CORPUS), k=np.int64(2)).k == 2


QUOTED = ['"Heroes" (David Bowie album)', '"Heroes"', '"Love" and "Hate"', 'The "Chirping" Crickets', 'Live "at last"']
TITLES = ["Oslo", '7" Single', '5" and 7"', "\u201cHeroes\u201d", "Rock 'n' Roll", 'One"', "AC/DC \\m/"]


@pytest.mark.parametrize("title", QUOTED + TITLES)
def test_only_the_quotes_that_enclose_a_title_go(title):
    served = {
        "plain": f'"{title}"',
        "as a table doubles them": '"' + title.replace('"', '""') + '"',
        "with backslashes": '"' + title.replace('"', '\\"') + '"',
    }
    for form in served.values():
        assert split_contents(f"{form}\nThe text.") == split_contents(f"{form}\r\nThe text.") == (title, "The text.")
    if title != '"Heroes"':  # which bare looks as the served Heroes does
        assert split_contents(f"{title}\nThe text.") == (title, "The text.")


@pytest.mark.parametrize(
    "contents, title, text",
    [
        ('"Oslo"', "", '"Oslo"'),
        ('"Oslo"\n', "Oslo", ""),
        ('"Oslo"\n \n', "Oslo", " \n"),
        ("Oslo\n", "", "Oslo\n"),
        ('""\nThe text.', "", "The text."),
        ('"\nThe text.', '"', "The text."),
        ('"Oslo\nThe text.', '"Oslo', "The text."),
        ("", "", ""),
    ],
)
def test_contents_without_a_whole_title(contents, title, text):
    assert split_contents(contents) == (title, text)


def test_titles_in_other_writing_are_one_passage_and_other_texts_are_not():
    rows = [
        ("Beyonc\u00e9", "x"),
        ("Beyonce\u0301", "x"),
        ("Beyonc&eacute;", "x"),
        ("Beyonc\u00e9", "y"),
        ("Beyonce", "x"),
    ]
    assert [p.title for p in unique_passages(Passage(*row) for row in rows)] == [
        "Beyonc\u00e9",
        "Beyonc\u00e9",
        "Beyonce",
    ]


WORLD = {
    "東京": "東京都は日本の首都である。",
    "北京": "北京是中华人民共和国的首都。",
    "猫": "猫是一种动物。",
    "カメラ": "写真を撮る機械",
    "กรุงเทพ": "เมืองหลวงของประเทศไทย",
    "ភ្នំពេញ": "រាជធានីនៃកម្ពុជា",
    "ວຽງຈັນ": "ນະຄອນຫຼວງຂອງລາວ",
    "ရန်ကုန်": "မြန်မာနိုင်ငံမြို့တော်",
    "서울": "서울은 대한민국의 수도이다.",
    "Oslo": "Oslo is the capital of Norway.",
}


@pytest.mark.parametrize("title", [title for title in WORLD if title != "Oslo"])
def test_scripts_without_spaces_are_searched_by_their_parts(title):
    index = BM25([Passage(*row) for row in WORLD.items()])
    text = WORLD[title].rstrip("。.")
    for query in (title, f"{title}?", text[: len(text) // 2], text[-4:]):
        assert index.search(query, 1)[0].title == title, query
    if title == "서울":  # Korean writes the case at the end of a word
        assert index.search("수도", 1)[0].title == title


def test_a_name_in_brackets_does_not_make_an_english_passage_longer():
    plain, glossed = (
        f"Tokyo {name}is the capital of Japan, a country in Asia." for name in ("", "(\u6771\u4eac\u90fd) ")
    )
    index = BM25([glossed, "Oslo is a city."])
    assert (
        index.search("Tokyo")[0].score
        == BM25([plain.replace("is", "x is"), "Oslo is a city."]).search("Tokyo")[0].score
    )
    assert index.search("\u6771\u4eac\u90fd")[0].text == glossed  # and is found by it


STOP_NAMES = ["The The", "It", "Them (film)", "To Be", "If", "It (film)", "These", "Not There", "A"]


def test_names_of_stop_words_find_themselves():
    corpus = [Passage(name, "An album by an English band of the eighties.") for name in STOP_NAMES]
    corpus.append(Passage("Oslo", "It is the capital, and this is not a name: the the, to be."))
    index = BM25(corpus)
    for name in STOP_NAMES:
        for query in (name, name.lower(), f"{name}?"):
            assert index.search(query, 1)[0].title == name
    assert [p.title for p in index.search("the capital")] == ["Oslo"]  # beside other words they count nothing
    assert index.search("of and with", 3) == []


def test_passages_without_a_word_are_told_at_once():
    with pytest.warns(UserWarning, match="BM25: 2 of 3 passages hold no word, .* the first is '0' with the text '!!!'"):
        BM25(["!!!", "Oslo", "\U0001f600"])


@pytest.mark.parametrize(
    "query, flags", [("???", ("no_words",)), ("", ("no_words",)), (None, ("no_words",)), ("zzz", ())]
)
def test_a_query_without_a_word_is_flagged(query, flags):
    result = make_search_tool(BM25(CORPUS)).execute({"query": query})
    assert (result.content, result.flags, result.success) == ("No results.", flags, True)


def test_a_corpus_may_lie_in_numbered_files_but_not_be_empty(tmp_path):
    for number, passage in enumerate(CORPUS):
        row = {"id": passage.title, "title": passage.title, "text": passage.text}
        write_rows(tmp_path / "wiki" / f"wiki-0000{number}-of-00004.jsonl", [row])
    index = make_retriever("bm25", path=tmp_path / "wiki")
    assert [p.id for p in index.passages] == [p.title for p in CORPUS]
    assert index.search("rainy", 1)[0].title == "Bergen"
    write_text(tmp_path / "empty.jsonl", "")
    with pytest.raises(DataError, match=r"empty.jsonl: holds no passages \(0\)"):
        load_passages(tmp_path / "empty.jsonl")
