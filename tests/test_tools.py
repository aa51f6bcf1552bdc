"""Tools: schemas from functions, argument checks, and calls that cannot hurt an episode."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import threading
from dataclasses import dataclass
from decimal import Decimal
from enum import Enum
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentr1_lite.mdp import Task
from agentr1_lite.tools import EMPTY_RESULT, MAX_CHARS, MAX_THREADS, FunctionTool, Tool, ToolResult, run_calls, tool


@tool(inline=True)
def search(
    query: str, top_k: int = 3, exact: bool = False, lang: str | None = None, mode: Literal["bm25", "any"] = "any"
):
    """Search the
    corpus.

    More that the model need not read.

    Args:
        query: what to look for,
            in words
        top_k (int): how many passages

    Returns:
        text: never a parameter
    """
    return f"{query} {top_k} {exact} {lang} {mode}"


def test_schema_from_a_function():
    assert search.schema() == {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Search the corpus.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string", "description": "what to look for, in words"},
                    "top_k": {"type": "integer", "description": "how many passages"},
                    "exact": {"type": "boolean"},
                    "lang": {"type": ["string", "null"]},
                    "mode": {"type": "string", "enum": ["bm25", "any"]},
                },
                "required": ["query"],
                "additionalProperties": False,
            },
        },
    }
    assert search("a", 1) == "a 1 False None any" and search.text_parameter == "query"


def test_decorator_says_what_it_cannot_read():
    with pytest.raises(TypeError, match="parameter 'x' needs a type hint"):
        tool(lambda x: x, name="f")

    async def later(x: str):
        return x

    def odd(x: complex):
        return x

    for function, words in ((later, "async"), (odd, "has the type <class 'complex'>; use str")):
        with pytest.raises(TypeError, match=words):
            tool(function)
    with pytest.raises(TypeError, match="it takes name, description, timeout"):
        tool(deadline=3)


@pytest.mark.parametrize(
    ("given_args", "clean"),
    [
        ({"query": 1994}, {"query": "1994"}),
        ({"query": 1.5}, {"query": "1.5"}),
        ({"query": " Oslo "}, {"query": " Oslo "}),
        ({"query": "x", "top_k": "3"}, {"query": "x", "top_k": 3}),
        ({"query": "x", "top_k": 3.0}, {"query": "x", "top_k": 3}),
        ({"query": "x", "exact": "True"}, {"query": "x", "exact": True}),
        ({"query": "x", "top_k": None}, {"query": "x"}),
        ({"query": "x", "lang": None}, {"query": "x", "lang": None}),
    ],
)
def test_documented_coercions(given_args, clean):
    assert search.validate_args(given_args) == (clean, None)


@pytest.mark.parametrize(
    ("args", "fault"),
    [
        ({"query": None}, 'argument "query" must be a string, not null'),
        ({"query": ["Oslo", "Bergen"]}, 'argument "query" must be a string, not ["Oslo", "Bergen"]'),
        ({"query": True}, 'argument "query" must be a string, not true'),
        ({"query": float("nan")}, 'argument "query" must be a string, not NaN'),
        ({}, 'argument "query" is missing'),
        (None, "the arguments must be an object, not null"),
        ([], "the arguments must be an object, not []"),
        ({"query": "   "}, 'argument "query" must not be empty'),
        ({"query": "x", "k": 1}, 'argument "k" is unknown; allowed: query, top_k, exact, lang, mode'),
        ({"query": "x", "top_k": 3.5}, 'argument "top_k" must be an integer, not 3.5'),
        ({"query": "x", "top_k": True}, 'argument "top_k" must be an integer, not true'),
        ({"query": "x", "mode": "dense"}, 'argument "mode" must be one of "bm25", "any", not "dense"'),
        ({"query": {"a": "b" * 90}}, '{"a": "' + "b" * 50 + "..."),
    ],
)
def test_faults_are_one_sentence(args, fault):
    clean, error = search.validate_args(args)
    assert clean == {} and fault in error and error.startswith("Error: search: ") and len(error.splitlines()) == 1


def test_nested_schemas_and_bounds():
    class Book(Tool):
        name = "book"
        parameters = {  # noqa: RUF012
            "type": "object",
            "properties": {
                "seats": {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 9}},
                "who": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
                "price": {"anyOf": [{"type": "number"}, {"enum": ["free"]}]},
                "note": {"type": "string", "minLength": 0, "maxLength": 4},
            },
            "required": ["seats", "note"],
        }

        def execute(self, args):
            return str(args)

    check = Book().validate_args
    good = {"seats": ["1", 2], "who": {"name": 7}, "price": "2.5", "note": "", "extra": 1}
    assert check(good)[0] == {"seats": [1, 2], "who": {"name": "7"}, "price": 2.5, "note": "", "extra": 1}
    for change, words in (
        ({"seats": [1, 12]}, '"seats"[1] must be at least 1 and at most 9, not 12'),
        ({"who": {}}, '"who"."name" is missing'),
        ({"price": "cheap"}, '"price" has no allowed form: "cheap"'),
        ({"note": "too long"}, "0 to 4 characters, not 8"),
    ):
        assert words in check({**good, **change})[1]


@settings(max_examples=100, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(["query", "top_k", "exact", "mode", "zz"]),
        st.none() | st.text() | st.floats() | st.lists(st.booleans()),
    )
)
def test_validation_never_raises_and_never_half_passes(args):
    clean, error = search.validate_args(args)
    assert (error is None) == bool(clean)
    if error is None:
        assert search.validate_args(clean) == (clean, None)
        assert isinstance(clean["query"], str) and clean["query"].strip()


def with_parameters(parameters, **definitions):
    class Made(Tool):
        name = "made"

        def __init__(self):
            self.parameters = {"type": "object", "properties": {"x": parameters}, "required": ["x"], **definitions}

        def execute(self, args):
            return str(args)

    return Made()


CITY = {"type": "object", "properties": {"name": {"$ref": "#/$defs/Name"}}, "required": ["name"]}
REFERRED = {"$defs": {"City": CITY, "Name": {"type": "string", "maxLength": 6}}}


@pytest.mark.parametrize(
    ("parameters", "good", "bad"),
    [
        ({"$ref": "#/$defs/City", "description": "where"}, {"name": "Oslo"}, {"name": "Bergen!!"}),
        ({"$ref": "#/$defs/City"}, {"name": "Oslo"}, {}),
        ({"allOf": [{"$ref": "#/$defs/Name"}], "title": "N"}, "Oslo", "Bergen!!"),
        ({"type": "array", "items": {"$ref": "#/$defs/Name"}, "maxItems": 2}, ["Oslo"], ["Oslo", "Bergen!!"]),
        ({"type": "array", "items": {"$ref": "#/$defs/Name"}, "maxItems": 2}, ["a", "b"], ["a", "b", "c"]),
        ({"anyOf": [{"$ref": "#/$defs/City"}, {"type": "null"}]}, None, {"name": 4.5e9}),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}], "enum": [3, "3"]}, "3", "4"),
        ({"anyOf": [{"minimum": 3}, {"maximum": 1}], "type": "number"}, 0, 2),
        ({"type": "object", "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, {"b": 1}, {"c": 1}),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, {"a": 1}, {"a": "one"}),
        ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}, 0.5, 1),
        ({"type": "string", "pattern": "^[a-z]+$"}, "abc", "Abc"),
        ({"const": "north"}, "north", "south"),
        ({"enum": [1, 2]}, 1, True),
    ],
    ids=range(14),
)
def test_what_a_schema_says_is_checked(parameters, good, bad):
    """The verdicts are those of the ``jsonschema`` package, where it is here."""
    made = with_parameters(parameters, **REFERRED)
    assert made.validate_args({"x": good}) == ({"x": good}, None)
    clean, error = made.validate_args({"x": bad})
    assert clean == {} and "\n" not in error
    assert "$ref" not in json.dumps(made.schema()) and "$defs" not in json.dumps(made.schema())
    jsonschema = pytest.importorskip("jsonschema")
    given_schema = {"type": "object", "properties": {"x": parameters}, **REFERRED}
    for value, valid in ((good, True), (bad, False)):
        assert jsonschema.Draft202012Validator(given_schema).is_valid({"x": value}) is valid
        assert jsonschema.Draft202012Validator(dict(made.parameters)).is_valid({"x": value}) is valid


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"oneOf": [{"type": "string"}]}, "uses 'oneOf', which is not checked here"),
        ({"allOf": [{"type": "string"}, {"minLength": 2}]}, "uses 'allOf'"),
        ({"not": {"type": "string"}}, "uses 'not'"),
        ({"type": "object", "patternProperties": {}}, "uses 'patternProperties'"),
        ({"type": "string", "nullable": True}, "uses 'nullable'"),
        ({"if": {}, "then": {}}, "uses 'if'"),
        ({"type": "array", "items": {"uniqueItems": True}}, '"x", items uses .uniqueItems.'),
        ({"$ref": "#/$defs/Tree"}, "refers to itself by '#/\\$defs/Tree'"),
        ({"$ref": "#"}, "refers to itself by '#'"),
        ({"$ref": "#/$defs/Nobody"}, 'refers to "#/\\$defs/Nobody", which it does not hold'),
        ({"$ref": "https://example.org/city.json"}, "which it does not hold"),
        ({"$ref": 3}, "refers to 3"),
        ({"$ref": "#/$defs/Name", "minLength": 2}, "has 'minLength' beside a reference"),
        ({"type": "str"}, 'has type "str"; give one or several of string'),
        ({"type": ["string", 3]}, "has type .*; give one or several"),
        ({"type": "array", "items": [{"type": "string"}]}, "has items .*; give one schema"),
        ({"anyOf": {"type": "string"}}, "has anyOf .*; give a list"),
        ({"pattern": "("}, "has pattern .*; give a regular expression"),
        ({"minimum": "1"}, "has minimum .*; give a number"),
        (True, "is true; give an object such as"),
    ],
)
def test_what_would_not_be_checked_is_refused_when_the_tool_is_made(parameters, words):
    tree = {"type": "object", "properties": {"left": {"$ref": "#/$defs/Tree"}}}
    definitions = {"$defs": {"Tree": tree, "Name": {"type": "string"}}}
    with pytest.raises(TypeError, match=f"tool 'made': the schema of its arguments.*{words}") as caught:
        with_parameters(parameters, **definitions)
    assert "\n" not in str(caught.value)
    whole = {"type": "object", "properties": {"x": parameters}, **definitions}
    with pytest.raises(TypeError, match=words):
        type("Made", (Tool,), {"name": "made", "parameters": whole, "execute": lambda self, args: ""})
    with pytest.raises(TypeError, match=words):
        FunctionTool(str, "made", "", whole)


def test_the_arguments_of_a_tool_are_an_object():
    for parameters in ({"type": "string"}, None, []):
        with pytest.raises(TypeError, match="tool 'made': the schema of its arguments"):
            FunctionTool(str, "made", "", parameters)
    one_of = {"type": "object", "properties": {}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}
    assert FunctionTool(str, "made", "", one_of).validate_args({"c": 1})[1] == (
        'Error: made: the arguments has no allowed form: {"c": 1}.'
    )


def test_hints_of_containers_are_checked_inside():
    @tool
    def book(seats: dict[str, int], notes: list, prices: dict, when: list[str] | None = None):
        return "ok"

    good = {"seats": {"a": 1}, "notes": [1, "x"], "prices": {"b": 2.5}, "when": None}
    assert book.validate_args(good) == (good, None)
    assert '"seats"."a" must be an integer' in book.validate_args({**good, "seats": {"a": "one"}})[1]
    assert '"when" has no allowed form' in book.validate_args({**good, "when": [[]]})[1]


async def later(x: str):
    return x


async def stream(x: str):
    yield x


def pieces(x: str):
    yield x


class Caller:
    async def __call__(self, x: str):
        return x


@pytest.mark.parametrize("function", [later, stream, partial(later, x="a"), Caller(), pieces, partial(partial(pieces))])
def test_what_gives_no_reply_at_once_is_refused_when_the_tool_is_made(function):
    for build in (lambda: tool(name="late")(function), lambda: FunctionTool(function, "late", "", {})):
        with pytest.raises(TypeError, match="tool 'late' is an async function; write|is a generator function; return"):
            build()
    plain_method = Caller.__call__ if isinstance(function, Caller) else function
    for method in ("execute", "batch_execute", "reset", "validate_args"):
        body = {"name": "late", "execute": lambda self, args: "", method: plain_method}
        with pytest.raises(TypeError, match=f"tool 'late.{method}' is"):
            type("Late", (Tool,), body)


def test_callables_without_a_name_need_one():
    def scaled(x: int, by: int = 2):
        return x * by

    assert run_calls([(tool(name="triple")(partial(scaled, by=3)), {"x": 2})])[0].content == "6"
    with pytest.raises(TypeError, match="got partial without a name of its own; pass name="):
        tool(partial(scaled, by=3))


@dataclass
class Page:
    title: str


class Color(str, Enum):
    RED = "red"


NO_DATA = [
    lambda: later("x"),
    lambda: [later("x")],
    lambda: pieces("x"),
    lambda: {1, 2},
    lambda: {"a": object()},
    lambda: Page("a"),
    lambda: ValueError("returned, not raised"),
    lambda: pd.DataFrame({"a": [1]}),
    lambda: pd.Series([1]),
    lambda: Path("x"),
    lambda: Decimal("1.5"),
    lambda: float("nan"),
    lambda: [1.0, float("inf")],
    lambda: np.float64("nan"),
    lambda: np.array([1, float("nan")]),
    lambda: {("a", "b"): 1},
    lambda: 10**5000,
    lambda: {"content": {1, 2}},
    lambda: ToolResult(Page("a")),
    lambda: len,
    lambda: (n for n in [1]),
]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("inline", [False, True])
@pytest.mark.parametrize("function", NO_DATA, ids=range(len(NO_DATA)))
def test_what_is_no_data_is_an_error_in_a_sentence(function, inline):
    (result,) = run_calls([(make(function, inline=inline), {"x": "1"})])
    assert (result.success, result.flags) == (False, ("raised",))
    assert result.content.startswith("Error: <lambda> failed (TypeError: it returned no data: ")
    assert "0x" not in result.content and len(result.content.splitlines()) == 1


def test_a_tool_inside_a_running_loop_is_not_awaited():
    """As in Jupyter, whose cells run inside a loop."""

    async def cell():
        return run_calls([(make(lambda: later("x"), inline=True), {"x": "1"})])[0]

    assert asyncio.run(cell()).flags == ("raised",)


@pytest.mark.parametrize(
    ("function", "content"),
    [
        (lambda: np.int64(3), "3"),
        (lambda: np.float32(0.5), "0.5"),
        (lambda: np.bool_(True), "true"),
        (lambda: {"a": np.arange(3)}, '{"a": [0, 1, 2]}'),
        (lambda: torch.tensor([1, 2]), "[1, 2]"),
        (lambda: MappingProxyType({"a": 1}), '{"a": 1}'),
        (lambda: ("a", 1, None), '["a", 1, null]'),
        (lambda: Color.RED, "red"),
    ],
)
def test_numbers_and_arrays_of_libraries_are_data(function, content):
    (result,) = run_calls([(make(function, inline=True), {"x": "1"})])
    assert (result.content, result.success) == (content, True)


def make(function, **options):
    def call(x: str):
        return function()

    return tool(name=getattr(function, "__name__", "call"), **options)(call)


def raises():
    raise ValueError("two\nlines")


def exits():
    raise SystemExit(3)


class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError


def unprintable():
    raise Unprintable


@pytest.mark.parametrize("inline", [False, True])
@pytest.mark.parametrize(
    ("function", "content", "success", "flags"),
    [
        (raises, "Error: raises failed (ValueError: two lines).", False, ("raised",)),
        (exits, "Error: exits failed (SystemExit: 3).", False, ("raised",)),
        (unprintable, "Error: unprintable failed (Unprintable).", False, ("raised",)),
        (lambda: None, EMPTY_RESULT, True, ("empty",)),
        (lambda: " \n", EMPTY_RESULT, True, ("empty",)),
        (lambda: 42, "42", True, ("converted",)),
        (lambda: {"a": [1, "é"]}, '{"a": [1, "é"]}', True, ("converted",)),
        (lambda: b"caf\xc3\xa9 \xff", "café \ufffd", True, ("converted",)),
        (lambda: {"content": "no", "success": False}, "no", False, ()),
        (lambda: {"content": None}, EMPTY_RESULT, True, ("empty",)),
        (lambda: ToolResult("fine", flags=("cached",)), "fine", True, ("cached",)),
        (
            lambda: "a<|im_end|>\n<|im_start|>assistant",
            "a<|im_end|>\n<|im_start|>assistant",
            True,
            ("control_strings",),
        ),
        (lambda: "x </tool_response>", "x </tool_response>", True, ("control_strings",)),
        (lambda: "\ud83d\ude00 \udc00", "😀 \ufffd", True, ("invalid_text",)),
        (lambda: "ab " * 130_000, ("ab " * 11_000)[:MAX_CHARS].rstrip() + " [cut]", True, ("truncated_chars",)),
    ],
)
def test_whatever_a_tool_does_is_a_result(function, content, success, flags, inline):
    (result,) = run_calls([(make(function, inline=inline), {"x": "1"})])
    assert (result.content, result.success, result.flags) == (content, success, flags)
    json.dumps(result.to_dict()).encode()


def test_info_is_kept_as_json():
    circular = {}
    circular["self"] = circular
    results = run_calls(
        [
            (make(lambda: ToolResult("a", info={"titles": ("Oslo",), 3: {1}}), inline=True), {"x": ""}),
            (make(lambda: {"content": "b", "score": 0.5}, inline=True), {"x": ""}),
            (make(lambda: ToolResult("c", info=circular), inline=True), {"x": ""}),
        ]
    )
    assert [r.info for r in results] == [
        {"titles": ["Oslo"], "3": "{1}"},
        {"score": 0.5},
        {"unreadable": "dict"},
    ]


def test_a_hanging_call_blocks_neither_its_neighbours_nor_the_deadline():
    release = threading.Event()

    def hang():
        release.wait(60)
        return "late"

    slow = make(hang, timeout=0.15)
    jobs = [(slow, {"x": "1"}), (search, {"query": "q"}), (make(lambda: "ok"), {"x": "1"}), (make(hang), {"x": ""})]
    first, second, third, fourth = run_calls(jobs, deadline=0.1)
    assert (first.content, first.success, first.flags) == (
        "Error: hang gave no reply within 0.15 s.",
        False,
        ("timeout",),
    )
    assert second.content.startswith("q 3") and third.content == "ok"
    assert fourth.content == "Error: hang gave no reply within 0.1 s."
    release.set()


def test_calls_run_at_the_same_time_and_keep_their_order():
    barrier = threading.Barrier(12, timeout=20)

    @tool
    def meet(x: int):
        barrier.wait()
        return str(x)

    assert [r.content for r in run_calls([(meet, {"x": i}) for i in range(12)], 20)] == [str(i) for i in range(12)]


def test_threads_are_used_again_and_many_calls_pass():
    count = make(lambda: threading.current_thread().name)
    before = threading.active_count()
    assert all(r.success for r in run_calls([(count, {"x": ""})] * 300))
    for _ in range(20):
        run_calls([(count, {"x": ""})] * 40)
    assert threading.active_count() <= before + MAX_THREADS


def test_interpreter_exits_while_a_call_hangs():
    program = (
        "import time\nfrom agentr1_lite.tools import run_calls, tool\n"
        "@tool(timeout=0.05)\ndef hang(x: str):\n    time.sleep(1000)\n"
        "print(run_calls([(hang, {'x': 'a'})])[0].flags)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout.strip() == "('timeout',)", done.stderr


class Counter(Tool):
    """A stateful tool that shares its corpus and keeps its own count."""

    name, stateful, shared, inline = "count", True, ("corpus",), True

    def __init__(self):
        self.corpus, self.seen, self.lock = [object()], [], None

    def reset(self, task, rng):
        self.seen = [rng.random()]

    def execute(self, args):
        self.seen.append(1)
        return str(len(self.seen))


def test_fork_copies_state_and_shares_what_is_named():
    original = Counter()
    twin = original.fork()
    twin.reset(Task("t", "q"), random.Random(0))
    twin.execute({})
    assert original.seen == [] and len(twin.seen) == 2 and twin.corpus is original.corpus
    assert search.fork() is search


def test_batched_tools_get_one_request():
    requests = []

    class Batched(Tool):
        name, batched = "batched", True

        def execute(self, args):
            return "single"

        def batch_execute(self, batch):
            requests.append(len(batch))
            if batch[0].get("fail"):
                return [ToolResult("one")]
            return [ToolResult(str(args["x"])) if args["x"] else None for args in batch]

    good, bad = Batched(), Batched()
    jobs = [(good, {"x": 1}), (search, {"query": "q"}), (good, {"x": 0}), (bad, {"fail": 1}), (bad, {"fail": 1})]
    results = run_calls(jobs)
    assert sorted(requests) == [2, 2]
    assert [r.content for r in results[:3]] == ["1", "q 3 False None any", EMPTY_RESULT]
    assert all("gave 1 results for 2 calls" in r.content and r.flags == ("raised",) for r in results[3:])
    assert [r.content for r in Tool.batch_execute(good, [{}, {}])] == ["single", "single"]
