"""Tools in all spellings.

Guarantees: calls, answers and definitions of every spelling give one form; answers stand in the
order of the calls; nulls that tables fill in are no values; calls and answers without each other,
and what is no JSON, are refused.
"""

import json

import pyarrow
import pytest

from paddle_vl.data.formats.reader import to_canonical
from paddle_vl.data.jsonl import BadSampleError
from tests.single_card_tests.data.formats.rows import CALL, flat, said

BARE = {"name": "tide", "description": "d", "parameters": {"type": "object"}}
ARGUMENTS = CALL["function"]
END = {"role": "assistant", "content": "done"}


def called(*messages, **entries):
    return {"messages": [{"role": "user", "content": "q"}, *messages, END], **entries}


def of_openai(call, **answer):
    return (
        {"role": "assistant", "tool_calls": call if isinstance(call, list) else [call]},
        {"role": "tool", "content": "1", **answer},
    )


@pytest.mark.parametrize(
    "messages",
    [
        of_openai(CALL),
        of_openai({"id": "c", "function": {"name": "tide", "arguments": '{"harbour": "Kiel"}'}}),
        of_openai(ARGUMENTS, name="tide", tool_call_id="c"),
        tuple(said(("function_call", json.dumps(ARGUMENTS)), ("observation", "1"))["messages"]),
        tuple(said(("function", [ARGUMENTS]), ("function_response", "1"))["messages"]),
        (
            {"role": "assistant", "content": [
                {"type": "tool_use", "id": "c", "name": "tide", "input": {"harbour": "Kiel"}}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "c", "content": "1"}]},
        ),
    ],
)  # fmt: skip
def test_every_spelling_gives_one_form(messages):
    row = to_canonical(called(*messages)).messages
    assert row[1] == {"role": "assistant", "content": [], "tool_calls": [CALL], "loss": True}
    assert row[2] == {"role": "tool", "content": [{"type": "text", "text": "1"}]}


@pytest.mark.parametrize(
    "tools",
    [
        [BARE], json.dumps([BARE]), [{"type": "function", "function": BARE}], [json.dumps(BARE)],
        [{"name": "tide", "description": "d", "input_schema": {"type": "object"}}],
    ],
)  # fmt: skip
def test_every_definition_gives_the_wrapped_form(tools):
    row = called(*of_openai(CALL), tools=tools)
    assert to_canonical(row).tools == [{"type": "function", "function": BARE}]


@pytest.mark.parametrize("given", [{"arguments": each} for each in ("", " ", None, "null")] + [{}])
@pytest.mark.parametrize("wrap", [lambda call: call, lambda call: {"function": call, "index": 0}])
def test_a_call_without_arguments_has_none(given, wrap):
    """As OpenAI's clients send what they joined of a stream (openai 3.50)."""
    row = to_canonical(called(*of_openai(wrap({"name": "tide", **given}))))
    assert row.messages[1]["tool_calls"][0]["function"] == {"name": "tide", "arguments": {}}


def schema(**properties):
    return {"type": "object", "properties": properties}


def test_nulls_of_exported_tables_are_as_if_they_were_not_there():
    """pyarrow 26 fills them in as `Dataset.to_json` writes them; Parquet files lose them."""
    city = {"type": "string", "enum": ["Bern", "Zug"]}
    days = {"type": "object", "properties": {"first": {"type": "integer"}}, "required": ["first"]}
    calls = [
        ({"name": "weather", "parameters": schema(city=city)}, {"city": "Bern"}),
        ({"name": "tide", "parameters": schema(days=days)}, {"days": [{"first": 1}, {"last": 2}]}),
        ({"name": "look"}, {}),
    ]
    rows = [called(*of_openai({"name": tool["name"], "arguments": given}), tools=[tool])
            for tool, given in calls]  # fmt: skip
    exported = pyarrow.Table.from_pylist(rows).to_pylist()
    assert '"city": null' in json.dumps(exported)
    assert [*map(to_canonical, exported)] == [*map(to_canonical, rows)]


NULLABLE = [
    {"type": ["string", "null"]}, {"anyOf": [{"type": "string"}, {"type": "null"}]},
    {"enum": ["Bern", None]}, {"$ref": "#/$defs/City"}, {"allOf": [{"$ref": "#/$defs/City"}]},
    {"type": "STRING", "nullable": True}, {"description": "any"},
]  # fmt: skip


@pytest.mark.parametrize(
    ("city", "is_kept"),
    [
        *((each, True) for each in NULLABLE),
        *((each, False) for each in ({"type": "string"}, {"enum": ["Bern"]}, {"const": "Bern"})),
    ],
)
@pytest.mark.parametrize(
    "items",
    [
        lambda each: {"type": "array", "items": each},
        # Tuples, as pydantic 2.14 and zod 4.6 (draft 7) write them.
        lambda each: {"type": "array", "prefixItems": [each]},
        lambda each: {"type": "array", "items": [each]},
    ],
)
def test_nulls_that_a_schema_has_are_values(city, is_kept, items):
    """By JSON Schema 2020-12, and OpenAPI 3.0's `nullable`."""
    city = {**city, "default": None}
    nested = items(schema(city=city))
    whole = {**schema(city=city, all=nested), "$defs": {"City": {"type": ["string", "null"]}}}
    given = {"city": None, "other": None, "all": [{"city": None, "other": None}]}
    whole["examples"] = [given]
    call = {"name": "tide", "arguments": given}
    row = to_canonical(called(*of_openai(call), tools=[{"name": "tide", "parameters": whole}]))
    null = {"city": None} if is_kept else {}
    assert row.messages[1]["tool_calls"][0]["function"]["arguments"] == {**null, "all": [null]}
    found = row.tools[0]["function"]["parameters"]
    assert ("default" in found["properties"]["city"]) is is_kept
    assert found["examples"] == [{**null, "all": [null]}]


def test_nulls_of_json_texts_stay():
    text = '{"city": null}'
    tools = json.dumps([{"name": "tide", "parameters": schema(city=None)}])
    row = to_canonical(called(*of_openai({"name": "tide", "arguments": text}), tools=tools))
    assert row.messages[1]["tool_calls"][0]["function"]["arguments"] == json.loads(text)
    assert row.tools[0]["function"]["parameters"] == schema(city=None)


def numbered(number):
    return {"id": f"c{number}", "name": f"f{number}", "arguments": {}}


def test_answers_are_put_in_the_order_of_the_calls():
    answers = [{"role": "tool", "content": f"{n}", "tool_call_id": f"c{n}"} for n in (2, 1)]
    assistant = {"role": "assistant", "tool_calls": [numbered(1), numbered(2)]}
    row = called(assistant, *answers)
    assert flat(row)[2:4] == [("tool", "1"), ("tool", "2")]


@pytest.mark.parametrize(
    ("content", "text"),
    [({"m": None}, '{"m": null}'), (["ä"], '["\\u00e4"]'), (1.5, "1.5"), ("x", "x")],
)
def test_an_answer_may_be_any_json_value(content, text):
    assert flat(called(*of_openai(CALL, content=content)))[2] == ("tool", text)


def test_an_answer_may_show_an_image():
    block = {"type": "tool_result", "content": [
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "UE5H"}},
        {"type": "text", "text": "seen"}]}  # fmt: skip
    row = called(of_openai(CALL)[0], {"role": "user", "content": [block, block["content"][1]]})
    assert flat(row)[2:4] == [("tool", b"PNG", "seen"), ("user", "seen")]


def test_a_thought_before_a_call_is_its_text():
    call = f"<think>\nAsk.\n</think>\n{json.dumps(ARGUMENTS)}"
    row = called(*said(("tool_call", call), ("tool", "1"))["messages"])
    assert flat(row)[1] == ("assistant", "<think>\nAsk.\n</think>")


REFUSED = {
    "bad_order": [
        called({"role": "tool", "content": "1"}),
        called(*of_openai(CALL), {"role": "tool", "content": "2"}),
    ],
    "bad_tool_call": [
        called(*of_openai(CALL), tools=[{**BARE, "name": "moon"}]),
        called(*of_openai({"name": "tide", "arguments": "[1]"})),
        called(*of_openai({"name": "tide", "arguments": '{"a": 1, "a": 2}'})),
        called(*of_openai({**CALL, "type": "custom"})),
        called(*of_openai([numbered(1), numbered(1)])),
        called(*of_openai(numbered(1), tool_call_id="c9")),
        called(*of_openai(numbered(1), name="f9")),
        called(*of_openai(CALL, tool_call_id=["c"])),
        called({"role": "tool_call", "content": "tide(Kiel)"}),
    ],
    "unknown_key": [called(*of_openai({**CALL, "place": 0}))],
    "bad_tools": [
        called(*of_openai(CALL), tools=tools)
        for tools in ("no json", {"name": "tide"}, [BARE, BARE], [{"type": "web"}], ["x"], [{}])
    ],
    "unsupported": [
        called({"role": "user", "content": [{"type": "tool_result", "is_error": True}]})
    ],
}


@pytest.mark.parametrize(
    ("kind", "row"), [(kind, row) for kind, rows in REFUSED.items() for row in rows]
)
def test_what_is_no_call_answer_or_definition_is_refused(kind, row):
    with pytest.raises(BadSampleError) as info:
        to_canonical(row)
    assert info.value.kind == kind, info.value
