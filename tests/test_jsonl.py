from __future__ import annotations

import bz2
import errno
import gzip
import io
import json
import lzma
import os
import tarfile
import zipfile

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
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


@pytest.mark.parametrize(
    "row",
    [
        {"a": float("inf")},
        {"a": [{"b": float("nan")}]},
        {"a": {1: "x", "1": "y"}},
        {"a": [{None: 1}]},
        {("a", "b"): 1},
        {"\ud800": 1},
        {"a": {1, 2}},
        {"a": 10**5000},
    ],
)
@pytest.mark.parametrize("before", [(), ({"ok": 1},)])
def test_what_would_be_read_otherwise_is_refused_and_nothing_is_left(tmp_path, row, before):
    with pytest.raises(DataError, match=f"rows.jsonl: row {len(before) + 1} cannot be written as JSON") as caught:
        write_rows(tmp_path / "new" / "deep" / "rows.jsonl", [*before, row])
    assert isinstance(caught.value, TypeError) and list(tmp_path.iterdir()) == []


WRITABLE = st.recursive(
    VALUES | st.floats() | st.text(max_size=3) | st.just(b"x"),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2) | st.integers(0, 2), inner, max_size=2)
    ),
    max_leaves=5,
)


@settings(deadline=None)
@given(rows=st.lists(st.dictionaries(st.text(max_size=3), WRITABLE, max_size=2), min_size=1, max_size=3))
def test_whatever_is_written_is_read_back_equal(tmp_path_factory, rows):
    folder = tmp_path_factory.mktemp("rows")
    try:
        write_rows(folder / "rows.jsonl", rows)
    except DataError:
        assert list(folder.iterdir()) == []
    else:
        assert read_rows(folder / "rows.jsonl") == (rows, [])


# Packed files, tables and folders of them

TABLE = [{"id": "q1", "golds": ["Oslo", "Christiania"], "n": 1}, {"id": "q2", "golds": [], "n": None}]


def as_lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def as_parquet(rows):
    file = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), file)
    return file.getvalue()


def as_arrow(rows, form=pa.ipc.new_file):
    table, file = pa.Table.from_pylist(rows), io.BytesIO()
    with form(file, table.schema) as writer:
        writer.write_table(table)
    return file.getvalue()


PACK = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}


@pytest.mark.parametrize("pack", PACK)
@pytest.mark.parametrize(
    "name, made", [("rows.jsonl", as_lines), ("rows.json", lambda rows: json.dumps(rows).encode())]
)
def test_packed_files_are_read_by_what_they_hold(tmp_path, pack, name, made):
    for path in (tmp_path / (name + pack), tmp_path / name):  # with a name that tells it and with one that does not
        path.write_bytes(PACK[pack](made(TABLE)))
        assert read_rows(path) == (TABLE, [])


def test_zstandard_is_read(tmp_path):
    with pa.OSFile(str(tmp_path / "rows.jsonl.zst"), "wb") as file, pa.CompressedOutputStream(file, "zstd") as out:
        out.write(as_lines(TABLE))
    assert read_rows(tmp_path / "rows.jsonl.zst") == (TABLE, [])


@pytest.mark.parametrize(
    "name, data",
    [
        ("rows.parquet", as_parquet(TABLE)),
        ("rows.arrow", as_arrow(TABLE)),
        ("data-00000-of-00001.arrow", as_arrow(TABLE, pa.ipc.new_stream)),
        ("rows.feather", as_arrow(TABLE)),
        ("rows.parquet.gz", gzip.compress(as_parquet(TABLE))),
        ("no-name", as_parquet(TABLE)),
    ],
)
def test_tables_are_rows(tmp_path, name, data):
    (tmp_path / name).write_bytes(data)
    assert read_numbered(tmp_path / name) == ([(1, TABLE[0]), (2, TABLE[1])], [])


def test_csv_holds_texts(tmp_path):
    frame = pd.DataFrame([{"title": "Oslo, a city", "text": 'It is "old".\nIt is grey.', "n": "007"}])
    for name, cut in (("rows.csv", ","), ("rows.tsv", "\t"), ("rows.csv.gz", ",")):
        frame.to_csv(tmp_path / name, sep=cut, index=False)
        assert read_rows(tmp_path / name) == (frame.to_dict("records"), [])
    (tmp_path / "nulls.csv").write_text("a,b\nNone,\nnan,1.0\n")
    assert read_rows(tmp_path / "nulls.csv")[0] == [{"a": "None", "b": ""}, {"a": "nan", "b": "1.0"}]


def zipped():
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("rows.jsonl", as_lines(TABLE))
    return file.getvalue()


def tarred():
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("rows.jsonl"))
    return file.getvalue()


@pytest.mark.parametrize(
    "name, data, reason",
    [
        ("rows.jsonl.gz", gzip.compress(as_lines(TABLE * 99))[:-20], "is cut off or damaged"),
        ("rows.jsonl.gz", gzip.compress(as_lines(TABLE * 99))[:40] + b"x" * 40, "is cut off or damaged"),
        ("rows.jsonl.bz2", bz2.compress(as_lines(TABLE * 99))[:-20], "is cut off or damaged"),
        ("rows.jsonl.xz", lzma.compress(as_lines(TABLE * 99))[:-20], "is cut off or damaged"),
        ("rows.jsonl.gz", b"", "is empty"),
        ("rows.parquet", b"", "is empty"),
        ("rows.parquet", as_parquet(TABLE)[:-9], "cannot be read as parquet"),
        ("rows.parquet", b"<html>", "cannot be read as parquet"),
        ("rows.arrow", as_arrow(TABLE)[:99], "cannot be read as arrow"),
        ("rows.csv", b'a,b\n1,2\n1,2,3,4\n"', "cannot be read as csv"),
        ("rows.jsonl", zipped(), "is a zip archive, not rows"),
        ("rows.tar.gz", gzip.compress(tarred()), "is a tar archive, not rows"),
        ("rows.db", b"SQLite format 3\x00" + bytes(200), "is a database, not rows"),
        ("rows.npy", b"\x93NUMPY\x01\x00v\x00", "is a binary file, not text; give JSON Lines, JSON, CSV"),
    ],
)
def test_what_cannot_be_read_is_said_by_its_name(tmp_path, name, data, reason):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError) as caught:
        read_rows(tmp_path / name)
    said = str(caught.value)
    assert said.startswith(f"{tmp_path / name}: {reason}") and "\n" not in said and "Latin" not in said


def test_numbered_files_are_one_and_none_may_be_missing(tmp_path):
    for number in range(3):
        (tmp_path / f"wiki-0000{number}-of-00003.parquet").write_bytes(as_parquet([{"n": number}, {"n": -number}]))
    wanted = [(line, {"n": n}) for line, n in enumerate([0, 0, 1, -1, 2, -2], 1)]
    for path in (tmp_path, tmp_path / "wiki-*-of-00003.parquet", tmp_path / "*.parquet"):
        assert read_numbered(path) == (wanted, [])
    with pytest.raises(DataError, match=r"none-\*.parquet: no file fits"):
        read_numbered(tmp_path / "none-*.parquet")
    (tmp_path / "dev-00000-of-00001.jsonl").write_bytes(as_lines(TABLE))
    with pytest.raises(DataError, match=r"holds dev-\*-of-00001.jsonl, wiki-.*; give one of them"):
        read_numbered(tmp_path)
    (tmp_path / "wiki-00001-of-00003.parquet").unlink()
    with pytest.raises(DataError, match=r"wiki-\*-of-00003.parquet: 2 of 3 files are there"):
        read_numbered(tmp_path)
