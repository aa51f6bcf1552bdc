from __future__ import annotations

import errno
import json
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentr1_lite.jsonl import DataError, read_numbered, read_rows, write_rows, write_text

TEXT = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=12)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
ROWS = st.lists(st.dictionaries(TEXT, VALUES, max_size=3), max_size=5)

CORRUPT = (
    b"\xef\xbb\xbf"
    b'{"id": "q1", "question": "Who painted The Scream?", "answer": "Edvard Munch"}\r\n'
    b'{"id": "q2", "question": "Where is Lund?", "answer": "Sweden"}\n'
    b'{"id": "q3", "question": "half a li\n'
    b'{"id": "q4", "question": "Year of Eidsvoll?", "answer": "1814"}\n'
    b'{"id": "q5", "question": "a", "answer": "b"} {"id": "q6", "question": "c", "answer": "d"}\n'
    b"\n"
    b'{"id": "q7", "question": "nul \x00 byte", "answer": "x"}\n'
    b"{'id': 'q8', 'question': 'python dict', 'answer': 'x'}\n"
    b'{"id": "q9", "question": "Last whole row?", "answer": "yes"}\n'
    b'{"id": "q10", "question": "cut'
)


def read(tmp_path, data: bytes):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(data)
    return read_rows(path)


def test_ds01_broken_lines_cost_themselves_only(tmp_path):
    rows, problems = read(tmp_path, CORRUPT)
    assert [row["id"] for row in rows] == ["q1", "q2", "q4", "q9"]
    assert [p.line for p in problems] == [3, 5, 7, 8, 10]
    words = ["not JSON", "second value", "NUL", "not JSON", "cut off"]
    assert all(word in p.reason for word, p in zip(words, problems, strict=True))
    assert str(problems[0]).startswith(f"{tmp_path / 'rows.jsonl'}, line 3: ")


@pytest.mark.parametrize(
    "line, reason",
    [
        ("[1, 2]", "is a JSON list, not an object"),
        ('"text"', "is a JSON str, not an object"),
        ('{"a": NaN}', "NaN is not JSON"),
        ('{"a": -Infinity}', "-Infinity is not JSON"),
        ('{"a": 1},', "holds other text after the first one"),
        ('{"a": 1}, {"a": 2}', "holds a second value"),
        ('{"a": 1}{"a": 2}', "holds a second value"),
        ('{"a": "\\ud800"}', "holds half of a surrogate pair"),
        ('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", "nested too deeply"),
        ("// a comment", "is not JSON"),
        ("\x00\x00\x00", "holds a NUL byte"),
    ],
)
def test_each_kind_of_broken_line_has_its_reason(tmp_path, line, reason):
    rows, problems = read(tmp_path, f'{{"ok": 1}}\n{line}\n{{"ok": 2}}\n'.encode())
    assert [row["ok"] for row in rows] == [1, 2]
    assert [(p.line, p.kept) for p in problems] == [(2, False)]
    assert reason in problems[0].reason


@pytest.mark.parametrize(
    "data, words",
    [
        ('{"a": "S\u00f8ren"}\n'.encode("latin-1"), ["rows.jsonl", "line 1", "byte offset 8", "0xf8", "Latin-1"]),
        (b'\xef\xbb\xbf{"a": 1}\n{"a": "\xf8"}\n', ["line 2", "byte offset 19", "0xf8"]),
        ('{"a": "S\u00f8ren"}\n'.encode("utf-16"), ["rows.jsonl", "byte offset 0", "UTF-16"]),
        ('{"a": 1}'.encode("utf-16-le"), ["byte offset 0", "UTF-16"]),
        ('[{"a": 1}]'.encode("utf-16-be"), ["byte offset 0", "UTF-16"]),
        ('{"a": 1}'.encode("utf-32"), ["byte offset 0", "UTF-32"]),
    ],
)
def test_ds02_other_encodings_are_named_with_their_byte_offset(tmp_path, data, words):
    with pytest.raises(DataError) as caught:
        read(tmp_path, data)
    assert all(word in str(caught.value) for word in words)
    assert "\n" not in str(caught.value)


def test_ds02_a_byte_order_mark_is_no_part_of_the_first_key(tmp_path):
    rows, problems = read(tmp_path, '\ufeff{"answer": "S\u00f8ren"}\n'.encode())
    assert (rows, problems) == ([{"answer": "S\u00f8ren"}], [])


@settings(deadline=None)
@given(
    rows=ROWS, end=st.sampled_from(["\n", "\r\n", "\r"]), mark=st.booleans(), last=st.booleans(), blank=st.booleans()
)
def test_good_files_are_read_whatever_their_line_ends(tmp_path_factory, rows, end, mark, last, blank):
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    text = end.join(x for line in lines for x in ([line, " "] if blank else [line])) + (end if last else "")
    data = text.encode("utf-8-sig" if mark else "utf-8")
    assert read(tmp_path_factory.mktemp("rows"), data) == (rows, [])


@settings(deadline=None)
@given(
    rows=st.lists(st.dictionaries(TEXT, VALUES, max_size=3), min_size=1, max_size=4),
    indent=st.sampled_from([None, 1, 4]),
)
def test_json_arrays_are_rows_too(tmp_path_factory, rows, indent):
    data = json.dumps(rows, indent=indent, ensure_ascii=False).encode()
    assert read(tmp_path_factory.mktemp("rows"), b"\n " + data + b"\n") == (rows, [])


@settings(deadline=None)
@given(rows=ROWS.filter(bool), data=st.data())
def test_a_cut_file_loses_only_its_last_row(tmp_path_factory, rows, data):
    text = "".join(json.dumps(row) + "\n" for row in rows)
    cut = data.draw(st.integers(0, len(text)))
    found, problems = read(tmp_path_factory.mktemp("rows"), text[:cut].encode())
    assert found == rows[: len(found)]
    assert len(found) >= text[:cut].count("\n")
    assert len(problems) <= 1


def test_array_faults_keep_the_rows_before_them(tmp_path):
    rows, problems = read(tmp_path, b'[\n{"a": 1},\n5,\n{"a": 2},\n{"a": 3')
    assert rows == [{"a": 1}, {"a": 2}]
    assert [(p.line, p.reason[:20]) for p in problems] == [(3, "element 2 of the arr"), (5, "element 4 of the arr")]
    assert read(tmp_path, b'[{"a": 1} {"a": 2}]')[0] == [{"a": 1}]
    assert "follows" in read(tmp_path, b'[{"a": 1}] x')[1][0].reason
    assert read(tmp_path, b"[]") == ([], [])


def test_one_object_over_several_lines_and_numbers_of_lines(tmp_path):
    assert read(tmp_path, json.dumps({"a": [1], "b": 2}, indent=2).encode()) == ([{"a": [1], "b": 2}], [])
    (tmp_path / "n.jsonl").write_text('\n\n{"a": 1}\n\n{"a": 2}')
    assert read_numbered(tmp_path / "n.jsonl")[0] == [(3, {"a": 1}), (5, {"a": 2})]
    (tmp_path / "n.json").write_text('[\n{"a": 1},\n\n{"a": 2}]')
    assert read_numbered(tmp_path / "n.json")[0] == [(2, {"a": 1}), (4, {"a": 2})]


def test_missing_files_and_folders_are_named(tmp_path):
    for path in (tmp_path / "gone.jsonl", tmp_path):
        with pytest.raises(DataError, match="cannot be read"):
            read_rows(path)


@settings(deadline=None)
@given(rows=ROWS)
def test_rows_survive_writing(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("rows") / "new" / "rows.jsonl"
    write_rows(path, rows)
    assert read_rows(path) == (rows, [])
    assert path.read_bytes().count(b"\n") == len(rows)


def failing_rows():
    yield {"a": 1}
    raise RuntimeError("lost")


@pytest.mark.parametrize(
    "rows, error",
    [
        ([{"a": 1}, {"b": float("nan")}], DataError),
        ([{"a": object()}], DataError),
        ([{"a": "\ud800"}], DataError),
        (failing_rows(), RuntimeError),
    ],
)
def test_a_failed_write_leaves_the_former_file_and_nothing_else(tmp_path, rows, error):
    path = tmp_path / "rows.jsonl"
    write_text(path, "before")
    with pytest.raises(error):
        write_rows(path, rows)
    assert path.read_text() == "before"
    assert os.listdir(tmp_path) == ["rows.jsonl"]


def test_a_full_disk_leaves_the_former_file(tmp_path, monkeypatch):
    path = tmp_path / "rows.jsonl"
    write_text(path, "before")

    def full(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DataError, match="No space left on device"):
        write_rows(path, [{"a": 1}])
    assert path.read_text() == "before"
    assert os.listdir(tmp_path) == ["rows.jsonl"]


def test_a_path_that_cannot_be_written_is_named(tmp_path):
    write_text(tmp_path / "file", "x")
    with pytest.raises(DataError, match="cannot be written"):
        write_text(tmp_path / "file" / "below", "x")
