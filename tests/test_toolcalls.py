"""Reading calls and answers out of text: public failures, hand-written variants, properties."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentr1_lite.toolcalls import (
    ToolCall,
    ToolCallError,
    get_format,
    parse_answer,
    parse_tool_calls,
    read_turn,
    render_tool_call,
)


def hermes(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


def search(query: str) -> str:
    return hermes(json.dumps({"name": "search", "arguments": {"query": query}}, ensure_ascii=False))


def only_call(text: str, **options) -> ToolCall:
    (call,) = parse_tool_calls(text, **options)
    assert isinstance(call, ToolCall), call
    return call


def only_error(text: str, **options) -> ToolCallError:
    (error,) = parse_tool_calls(text, **options)
    assert isinstance(error, ToolCallError), error
    assert error.message and "\n" not in error.message
    return error


TC01 = (
    "<tool_call>\n{'name': 'search', 'arguments': {'query': \"who founded Lund's cathedral school\", 'top_k': 3, "
    "'exact': True, 'lang': None}}\n</tool_call>"
)


def test_python_literals_are_repaired_or_an_error():
    call = only_call(TC01)
    assert call.name == "search" and "repaired" in call.flags
    assert call.arguments == {
        "query": "who founded Lund's cathedral school",
        "top_k": 3,
        "exact": True,
        "lang": None,
    }
    assert only_error(TC01, lenient=False).reason == "malformed_json"


@pytest.mark.parametrize(
    ("body", "query"),
    [
        (r"{'name': 'search', 'arguments': {'query': 'who wrote \'Kes\''}}", "who wrote 'Kes'"),
        (r"{'name': 'search', 'arguments': {'query': 'say \"hi\" {1}'}}", 'say "hi" {1}'),
        (r"{'name': 'search', 'arguments': {'query': 'caf\xe9 \u00d8 a\\b \d'}}", "café Ø a\\b \\d"),
        ('{"name": "search", "arguments": {"query": "trailing comma",},}', "trailing comma"),
        ('{"name": "search", "arguments": {"query": "two\nlines"}}', "two\nlines"),
        ("{'name': 'search', 'arguments': {'query': 'True, None and False'}}", "True, None and False"),
        ("{'name': 'search', 'arguments': {'query': 'a, }b'}} I will read it.", "a, }b"),
    ],
)
def test_repairs(body, query):
    call = only_call(hermes(body))
    assert call.arguments == {"query": query} and "repaired" in call.flags
    assert only_error(hermes(body), lenient=False).reason == "malformed_json"


def test_trailing_text_is_flagged():
    text = hermes('{"name": "search", "arguments": {"query": "Aare river source"}}\nI will read the first hit next.')
    call = only_call(text)
    assert (call.name, call.arguments, call.flags) == ("search", {"query": "Aare river source"}, ("trailing_text",))


def test_missing_close_is_flagged():
    text = (
        "<think>need the birthplace</think>\n<tool_call>\n"
        '{"name": "search", "arguments": {"query": "birthplace of Ole Rømer"}}<|im_end|>'
    )
    call = only_call(text)
    assert (call.arguments, call.flags) == ({"query": "birthplace of Ole Rømer"}, ("unclosed",))


@pytest.mark.parametrize(
    "tail",
    [
        '<tool_call>\n{"name": "search", "arguments": {"query": "population of the munici',
        '<tool_call>\n{"name": "search", "arguments": {"query": "population"}}',
        "<tool_call>\n{'name': 'search', 'arguments': {'query': 'popu",
        "<tool_call>",
        '```json\n{"name": "search", "arguments": {"query": "population"}}',
    ],
)
def test_a_call_cut_by_length_is_never_a_call(tail):
    assert only_error(tail, finish_reason="length").reason == "truncated"
    if tail.startswith("<"):
        first, cut = parse_tool_calls(search("director of Kes") + "\n" + tail, finish_reason="length")
        assert first.arguments == {"query": "director of Kes"} and cut.reason == "truncated"


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_cut_prefix_gives_a_call_that_was_not_closed(data):
    text = data.draw(st.sampled_from([search("a } b"), TC01, search("x").replace("\n", "")]))
    prefix = text[: data.draw(st.integers(0, len(text) - 1))]
    assert not any(isinstance(c, ToolCall) for c in parse_tool_calls(prefix, finish_reason="length"))
    tagged = f"<search>{prefix}"
    assert only_error(tagged, format="tag", finish_reason="length").reason == "truncated"


def test_braces_and_quotes_in_strings():
    body = '{"name": "search", "arguments": {"query": "meaning of \\"}{\\" in the novel \\"Set {1}\\""}}'
    assert only_call(hermes(body)).arguments == {"query": 'meaning of "}{" in the novel "Set {1}"'}


@pytest.mark.parametrize("inside", ["</tool_call>", "<tool_response>", "<answer>x</answer>", "<think>", "</think>"])
def test_tags_inside_a_json_string_are_text(inside):
    read = read_turn(search(f"what is {inside} for"))
    assert read.calls[0].arguments == {"query": f"what is {inside} for"}
    assert read.answer is None and read.flags == () and read.calls[0].flags == ()


def test_two_calls_in_one_turn():
    calls = parse_tool_calls(search("director of Kes") + "\n" + search("director of Ratcatcher"))
    assert [c.arguments["query"] for c in calls] == ["director of Kes", "director of Ratcatcher"]


A, B, C = (json.dumps({"name": "search", "arguments": {"query": query}}) for query in "ABC")
LITERAL = "{'name': 'search', 'arguments': {'query': 'B', 'exact': True,}}"
TAGGED = '{"name": "search", "arguments": {"query": "</tool_call> <tool_call>"}}'


@pytest.mark.parametrize("wrap", [hermes, lambda body: f"<tool_call>{body}", lambda body: f"```json\n{body}\n```", str])
@pytest.mark.parametrize(
    ("body", "queries"),
    [
        (f"{A}\n{B}", "AB"),
        (f"{A}{B}", "AB"),
        (f"{A}, {B};\n\n{C}", "ABC"),
        (f"{A}\n{LITERAL}\n{C}", "ABC"),
        (f"{LITERAL}{A}", "BA"),
    ],
)
def test_several_objects_between_two_tags_all_run(wrap, body, queries):
    read = read_turn(f"<think>x</think>\n{wrap(body)}")
    assert [call.arguments["query"] for call in read.calls] == list(queries)
    assert all("shared_tags" in call.flags and "trailing_text" not in call.flags for call in read.calls)
    assert [call.raw.strip() in body for call in read.calls] == [True] * len(queries) and read.left_out == ()


def test_tags_in_the_strings_of_a_second_object_are_text():
    read = read_turn(hermes(f"{A}\n{TAGGED}\n{B}") + search("C"))
    assert [c.arguments["query"] for c in read.calls] == ["A", "</tool_call> <tool_call>", "B", "C"]


def test_strict_reading_runs_one_object_and_names_the_rest():
    read = read_turn(hermes(f"{A}\n{B}"), lenient=False)
    assert [call.arguments["query"] for call in read.calls] == ["A"] and read.calls[0].flags == ("trailing_text",)
    assert read.flags == ("left_out",) and B in read.left_out[0]


@pytest.mark.parametrize(
    ("text", "kinds", "left"),
    [
        (hermes(f"{A}\nand then {B}"), "A", "and then"),
        (hermes(f"{A} I will read it."), "A", "I will read it."),
        (hermes(f"{A}\n[{B}]"), "A", "["),
        (hermes(f"[{A}]\n{B}"), "!B", None),
        (hermes(f"[{A}] junk"), "!", "junk"),
        (hermes(f"{A}\n{{junk"), "A!", None),
        (hermes(f"{A}\n{{'junk': }}\n{B}"), "A!", None),
        (hermes(f'{A}\n{{"query": "B"}}'), "A!", None),
        (hermes(f"{A}\n{B}\nso"), "AB", "so"),
        (hermes(f"Here: {A}"), "!", None),
        (f"{hermes(A)}\n{B}", "A", "a call without tags"),
        (f"{B}\n{hermes(A)}", "A", "a call without tags"),
        (f"{hermes(A)}\n```json\n{B}\n```", "A", "a call without tags"),
        (f"<tool_call>{A}<think>hm</think>{B}</tool_call>", "A", "a call without tags"),
        (f"{A} I will read it.", "A", "I will read it."),
        (f"```json\n{A}\nI will read it.\n```", "A", "I will read it."),
        (f"{A}\n{{junk", "A!", None),
        (f"```json\n{A}\n{{junk\n```", "A!", None),
        (hermes('{"name": "search", "arguments": {"query": "B", "query": "A"}}'), "A", "stands twice"),
        (hermes(A[:-1] + ', "top_k": 5}'), "A", '{"top_k": 5} beside "name" and "arguments"'),
        (hermes(A[:-1] + ', "parameters": {"query": "B"}}'), "A", "parameters"),
        (f"{hermes(A)}<tool_response>x</tool_response>{hermes(B)}", "A", "what follows your own <tool_response>"),
    ],
)
def test_nothing_beside_a_call_vanishes(text, kinds, left):
    """Every object that was written runs, is an error of its own, or is named with a flag."""
    read = read_turn(text)
    found = "".join(c.arguments["query"] if isinstance(c, ToolCall) else "!" for c in read.calls)
    assert found == kinds
    assert (read.left_out == ()) is (left is None) and (read.flags == ()) is (left is None)
    assert left is None or left in " ".join(read.left_out)


def test_what_belongs_to_no_call_is_not_named():
    for text in (
        f"I will look it up.\n{hermes(A)}\nand then answer.",
        f"<think>{hermes(B)} {{</think>{hermes(A)}",
        f'{hermes(A)}\n```json\n{{"results": [1]}}\n```',
        hermes(A) + "<|im_end|>\n",
        f"{A}</tool_call>",
        hermes(A[:-1] + ', "id": "call_1", "type": "function"}'),
    ):
        read = read_turn(text)
        assert (read.left_out, read.flags, len(read.calls)) == ((), (), 1), text


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("<search>A <think>hm</think> B</search>", '"B" before </search>'),
        ("<search>A</search> B</search>", '"B" before </search>'),
        ("<search>A</search>", None),
        ("<search>A<search>B</search>", None),
        ("say <search>A</search></search>", None),
    ],
)
def test_a_query_parted_by_a_tag_is_named(text, left):
    read = read_turn(text, "tag")
    assert read.calls[0].arguments == {"query": "A"}
    assert read.left_out == (() if left is None else (left,))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.text(max_size=6), min_size=1, max_size=5), st.sampled_from(["", "\n", ", ", "\n\n"]))
def test_any_number_of_objects_is_read_in_order(queries, between):
    bodies = [json.dumps({"name": "search", "arguments": {"query": query}}) for query in queries]
    calls = parse_tool_calls(hermes(between.join(bodies)))
    assert [call.arguments["query"] for call in calls] == [json.loads(json.dumps(q)) for q in queries]


@pytest.mark.parametrize("reason", ["length", "stop"])
def test_arguments_cut_inside_their_string_are_no_call(reason):
    """As OpenAI writes calls: the arguments are JSON in a string, which may be cut though all around it is closed."""
    cut = hermes('{"name": "search", "arguments": "{\\"query\\": \\"pop"}')
    error = only_error(cut, finish_reason=reason)
    assert error.reason == "malformed_json" and '"arguments" is a string, and not valid JSON' in error.message
    assert only_error(cut[: -len("</tool_call>")], finish_reason="length").reason == "truncated"


def test_two_objects_cut_by_length_are_no_calls():
    for text in (f"<tool_call>{A}\n{B[:-9]}", f"<tool_call>{A}\n{B}", f"{A}\n{B}", f"```json\n{A}\n{B}"):
        assert only_error(text, finish_reason="length").reason == "truncated"
    assert len(parse_tool_calls(hermes(f"{A}\n{B}"), finish_reason="length")) == 2


def test_arguments_as_a_string_are_rendered_as_an_object():
    call = only_call(hermes('{"name": "search", "arguments": "{\\"query\\": \\"Treaty of Roskilde year\\"}"}'))
    assert call.arguments == {"query": "Treaty of Roskilde year"} and call.flags == ("string_arguments",)
    assert render_tool_call(call) == hermes('{"name": "search", "arguments": {"query": "Treaty of Roskilde year"}}')


def test_code_fence_without_tags():
    body = '{"name": "search", "arguments": {"query": "who designed the Øresund Bridge"}}'
    text = f"I should look this up.\n```json\n{body}\n```"
    call = only_call(text)
    assert call.arguments == {"query": "who designed the Øresund Bridge"} and call.flags == ("no_tags",)
    assert parse_tool_calls(text, lenient=False) == []
    assert read_turn(text).answer is None
    assert parse_tool_calls('```json\n{"results": [1, 2]}\n```') == []


def test_a_turn_that_is_nothing_but_json_is_meant_as_a_call():
    assert only_call(' {"name": "search", "arguments": {"query": "a"}}<|im_end|>').flags == ("no_tags",)
    assert only_error('[{"name": "search", "arguments": {"query": "a"}}]').reason == "not_an_object"
    assert only_error('{"query": "no name key"}').reason == "no_name"
    assert only_error('{"name": "search", "arguments": {"query": "a"}}', finish_reason="length").reason == "truncated"
    assert parse_tool_calls("NaN") == parse_tool_calls("{curly} words") == []
    assert parse_tool_calls('{"name": "search", "arguments": {"query": "a"}}', lenient=False) == []


WRONG = [
    ('{"name": "search", "arguments": null}', "bad_arguments"),
    ('{"name": "search"}', "bad_arguments"),
    ('{"name": "search", "arguments": "Oslo"}', "malformed_json"),
    ('{"name": "search", "arguments": "{} {}"}', "bad_arguments"),
    ('{"name": "search", "arguments": ["Oslo"]}', "bad_arguments"),
    ('[{"name": "search", "arguments": {"query": "a"}}]', "not_an_object"),
    ('{"query": "no name key"}', "no_name"),
    ('{"name": 7, "arguments": {}}', "no_name"),
    ('{"name": " ", "arguments": {}}', "no_name"),
    ("NaN", "not_finite"),
    ('{"name": "search", "arguments": {"query": NaN}}', "not_finite"),
    ('{"name": "search", "arguments": {"query": 1e999}}', "not_finite"),
    ("", "malformed_json"),
    ("null", "not_an_object"),
    ('"search"', "not_an_object"),
    ('{"name": "search", "arguments": {"query": ' + "9" * 5000 + "}}", "malformed_json"),
    ('{"name": "search", "arguments": {"query": ' + "9" * 400 + "}}", "number_too_long"),
    ('{"name": "search", "arguments": {"query": ' + "[" * 40 + "]" * 40 + "}}", "too_deep"),
    ('{"name": "search", "arguments": {"query": ' + "[" * 90_000 + "]" * 90_000 + "}}", "malformed_json"),
    ("search(query='Oslo')", "malformed_json"),
    ("{'name': 'search', 'arguments': {'query': 'Lund's school'}}", "malformed_json"),
]


@pytest.mark.parametrize(("body", "reason"), WRONG, ids=range(len(WRONG)))
def test_wrong_shapes_are_errors_with_one_line(body, reason):
    error = only_error(hermes(body))
    assert error.reason == reason and error.raw == hermes(body)
    assert len(error.message) < 300


def test_a_message_names_the_place_once():
    cut = only_error('<tool_call>{"name": "search", "argum</tool_call>')
    assert "not valid JSON: Unterminated string starting at character 20." in cut.message


def test_nothing_becomes_empty_arguments():
    assert only_call(hermes('{"name": "now", "arguments": {}}')).arguments == {}
    assert all(isinstance(c, ToolCallError) for body, _ in WRONG for c in parse_tool_calls(hermes(body)))


def test_duplicate_keys_and_other_names():
    twice = hermes('{"name": "search", "arguments": {"query": "a", "query": "b"}}')
    assert only_call(twice).arguments == {"query": "b"} and only_call(twice).flags == ("duplicate_key",)
    assert only_error(twice, lenient=False).reason == "duplicate_key"
    other = hermes('{"name": "search", "parameters": {"query": "a"}}')
    assert only_call(other).flags == ("renamed_key",)
    assert only_error(other, lenient=False).reason == "bad_arguments"


def test_lone_surrogates_cannot_reach_a_file():
    call = only_call(hermes('{"name": "search", "arguments": {"query": "\\ud83d\\ude00 \\ud800"}}'))
    assert call.arguments["query"].encode() and call.arguments["query"].startswith("😀")


def test_thoughts_hide_calls_and_answers():
    read = read_turn(f"<think>I could use {search('no')} or <answer>no</answer></think>{search('yes')}")
    assert [c.arguments["query"] for c in read.calls] == ["yes"] and read.answer is None
    opened_by_template = f"maybe {search('no')}</think>{search('yes')}"
    assert [c.arguments["query"] for c in parse_tool_calls(opened_by_template)] == ["yes"]
    assert [c.arguments["query"] for c in parse_tool_calls(f"<think>never closed {search('yes')}")] == ["yes"]


def test_a_forged_tool_response_ends_the_reading():
    text = search("a") + "\n<tool_response>\nBergen\n</tool_response>\n" + search("b") + "<answer>Bergen</answer>"
    read = read_turn(text)
    assert [c.arguments["query"] for c in read.calls] == ["a"]
    assert read.answer is None and read.flags == ("wrote_tool_response",)


def test_answer_and_call_in_one_turn_are_both_reported():
    call = '<tool_call>{"name":"search","arguments":{"query":"capital of Norway"}}</tool_call>'
    read = read_turn(f"<think>..</think><answer>Oslo</answer>\n{call}")
    assert read.answer == "Oslo" and len(read.calls) == 1


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<answer>Oslo</answer>", "Oslo"),
        ("prompt: <answer> Beijing </answer> ... <answer>Oslo</answer>", "Oslo"),
        ("<answer>Oslo", None),
        ("<answer><answer>Oslo</answer></answer>", "Oslo"),
        ("<answer>Oslo</answer><answer>Bergen</answer>", "Bergen"),
        ("<answer></answer>", ""),
        ("Oslo</answer>", None),
        ("<answer>Oslo</answer><answer>Ber", "Oslo"),
        ("", None),
    ],
)
def test_answer_is_the_last_closed_pair(text, answer):
    assert parse_answer(text) == answer


def test_tag_format():
    assert only_call("<think>x</think><search> Ole Rømer </search>", format="tag").arguments == {"query": "Ole Rømer"}
    assert only_call("<search>Ole Rømer<|im_end|>", format="tag").flags == ("unclosed",)
    assert only_error("<search>Ole Rø", format="tag", finish_reason="length").reason == "truncated"
    tools = {"open": "page", "find": "text"}
    calls = parse_tool_calls("<open>Oslo</open><find>king</find><search>no tool</search>", "tag", tools=tools)
    assert [(c.name, c.arguments) for c in calls] == [("open", {"page": "Oslo"}), ("find", {"text": "king"})]
    assert render_tool_call(ToolCall("open", {"page": "Oslo"}), "tag") == "<open>Oslo</open>"
    for arguments in ({"a": "x", "b": "y"}, {"query": "</search>"}, {"query": 3}, {}):
        with pytest.raises(ValueError, match="cannot hold search"):
            render_tool_call(ToolCall("search", arguments), "tag")


def test_stop_strings_stop_before_a_forged_reply():
    assert get_format("hermes").stop_strings({"search": "query"}, True) == ("<tool_response>",)
    assert get_format("hermes").stop_strings({"search": "query"}, False) == ("</tool_call>", "<tool_response>")
    assert get_format("tag").stop_strings({"search": "query"}, False) == ("</search>", "<tool_response>")


def test_unknown_format_names_the_known_ones():
    with pytest.raises(ValueError, match="'xml' is unknown; choose one of hermes, tag"):
        parse_tool_calls("x", "xml")


numbers = st.integers(-(2**80), 2**80) | st.floats(allow_nan=False, allow_infinity=False)
json_values = st.recursive(
    st.none() | st.booleans() | numbers | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
names = st.text(min_size=1).filter(lambda s: s.strip())
PIECES = (
    "<tool_call> </tool_call> <think> </think> <answer> </answer> <tool_response> <search> </search> ``` \" ' \\ { }"
)
PIECES += ' [ ] , : None NaN 1e999 \x00 \ud800 <|im_end|> {\'name\':\'a\', {"name":"search","arguments":{"query":"x"}}'
pieces = st.sampled_from([*PIECES.split(" "), "```json\n", "\n", " "])


@settings(max_examples=150, deadline=None)
@given(names, st.dictionaries(st.text(), json_values, max_size=4), st.booleans())
def test_round_trip(name, arguments, lenient):
    text = render_tool_call(ToolCall(name, arguments))
    call = only_call(f"<think>because</think>\n{text}", lenient=lenient)
    assert (call.name, call.arguments, call.flags, call.raw) == (name, arguments, (), text)


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet=st.characters(exclude_categories=["Cs"], exclude_characters="<>")))
def test_round_trip_of_the_tag_format(query):
    call = ToolCall("search", {"query": query.strip()})
    if not query.strip().endswith("</s>"):
        assert only_call(render_tool_call(call, "tag"), format="tag").arguments == call.arguments


@settings(max_examples=300, deadline=None)
@given(
    st.lists(pieces | st.text(max_size=8), max_size=14).map("".join),
    st.sampled_from(["hermes", "tag"]),
    st.sampled_from(["stop", "length", ""]),
    st.booleans(),
)
def test_any_text_gives_values_that_can_be_saved(text, form, finish_reason, lenient):
    for call in parse_tool_calls(text, form, finish_reason, lenient):
        if isinstance(call, ToolCall):
            assert isinstance(call.arguments, dict) and call.name.strip()
            json.dumps(call.arguments, allow_nan=False).encode()
        else:
            assert call.reason and call.message and len(call.message.splitlines()) == 1
    parse_answer(text)


HUGE = [
    "<tool_call>",
    "<think>",
    "<answer>",
    "<tool_call>{",
    '<tool_call>{"',
    "<tool_call>{'",
    '<tool_call>{"a":"',
    "<tool_call>{}",
    "<tool_call>{'a': '\\'",
    "```json\n",
    "``` ",
    "</think>",
    "<|im_end|>",
    " ",
    "{",
    "{'a':",
    "\\'",
    ", ",
    '<tool_call>{"a": "\\',
    "<search>",
    "{}",
    "{'a':1}",
    '{"a": 1} ',
    '<tool_call>{"name": "a", "arguments": {}} {',
]


@pytest.mark.parametrize("unit", HUGE)
def test_huge_inputs_take_linear_work(unit):
    """Quadratic reading would take minutes here, so no clock is needed."""
    for text in (unit * (100_000 // len(unit)), '<tool_call>{"' + unit * (100_000 // len(unit)) + "x"):
        for form in ("hermes", "tag"):
            for finish_reason in ("stop", "length"):
                parse_tool_calls(text, form, finish_reason)
