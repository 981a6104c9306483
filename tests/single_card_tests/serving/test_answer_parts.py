"""What clients get of an answer's text.

Guarantees: values in `<function=NAME>` calls have the types of the tool's schema, and may have
tags; a call that is broken or short of a parameter stays text; a call ends reasoning that nothing
closes, and its own end may be missing; text around calls keeps its blanks; stops act on content
alone, however the text is cut into tokens; of log-probabilities come as many as asked.
"""

import json
import random

import pytest

from paddle_vl.serving.answer_parts import CALL, CALL_END, AnswerReader, Parts, read_calls
from paddle_vl.serving.engine import Event
from paddle_vl.serving.openai_calls import completion_call
from tests.support.openai_server import scripted, template_processor

DEFS = {
    "Size": {"enum": [1, 2]}, "Place": {"type": "object", "properties": {}},
    "Either": {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/Size"}]},
}  # fmt: skip


def called(value: str, schema=None, end: str = "\n</parameter>\n"):
    properties = {} if schema is None else {"a": schema}
    tools = {"f": {"type": "object", "properties": properties, "$defs": DEFS}}
    found = read_calls(f"\n<function=f>\n<parameter=a>\n{value}{end}</function>\n", tools)
    assert found is not None
    return found[0]


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        # vLLM 0.33's coerce_to_schema_type.
        ({"type": "boolean"}, "True", True), ({"type": "boolean"}, "false", False),
        ({"type": "boolean"}, "0", False), ({"type": "boolean"}, "yes", "yes"),
        ({"type": ["string", "null"]}, "12345", "12345"), ({"type": "string"}, "null", "null"),
        ({"type": ["string", "null"]}, "null", None), ({"type": "string"}, "True", "True"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "12345", "12345"),
        ({"oneOf": [{"type": "integer"}, {"type": "array"}]}, "[1]", [1]),
        ({"enum": ["1", "2"]}, "1", "1"), ({"enum": [1, 2]}, "1", 1),
        ({"type": ["integer", "string"]}, "7", 7), ({"type": ["integer", "string"]}, "7x", "7x"),
        ({"type": ["integer", "string"]}, "1.0", "1.0"), ({"type": "integer"}, "1e5", 100000),
        ({"type": ["integer", "string"]}, "1e5", "1e5"), ({"type": "number"}, "-0", 0),
        ({"type": "integer"}, " 3 ", 3), ({"type": "integer"}, "abc", "abc"),
        ({"type": "number"}, "2.5", 2.5), ({"type": "number"}, "5.0", 5),
        ({"type": "number"}, "NaN", "NaN"), ({"type": "number"}, "-Infinity", "-Infinity"),
        ({"type": "number"}, "1e999", "1e999"), ({"type": "array"}, "[1e999]", "[1e999]"),
        ({"type": "object"}, '{"a": [true, null]}', {"a": [True, None]}),
        ({"type": "object"}, '{"a": NaN}', '{"a": NaN}'), ({"type": "int"}, "3", 3),
        ({"type": "uint"}, "3", 3), ({"type": " Integer"}, "3", 3),
        ({"type": ["string", "null"]}, "NULL", None),
        ({"type": ["string", "null"]}, "null ", "null "),
        ({}, "12", "12"), (None, "12", "12"),
        # Qwen3.5's template writes null as Python does.
        ({"type": ["string", "null"]}, "None", None), ({"type": "null"}, "None", None),
        ({"type": "string"}, "None", "None"), ({"type": "integer"}, "None", "None"),
        # JSON Schema 2020-12.
        ({"const": "1"}, "1", "1"), ({"const": 1}, "1", 1), ({"type": "integer"}, "3.0", 3),
        ({"$ref": "#/$defs/Size"}, "2", 2), ({"$ref": "#/$defs/Place"}, "{}", {}),
        ({"allOf": [{"$ref": "#/$defs/Size"}]}, "2", 2), ({"type": "object"}, "[1]", "[1]"),
        ({"type": "array"}, "3", "3"), ({"$ref": "#/$defs/No"}, "2", "2"),
        # As zod-to-json-schema refers; an anchor that nothing has is no reference to the whole.
        ({"$ref": "#/$defs/Either/anyOf/1"}, "2", 2), ({"$ref": "#No"}, "{}", "{}"),
        ({"$ref": "#"}, "{}", {}), ({"$ref": "#/$defs/Either/anyOf/2"}, "2", "2"),
    ],
)  # fmt: skip
def test_values_have_the_types_of_the_schema(schema, text, value):
    name, arguments = called(text, schema)
    assert (name, json.loads(arguments, parse_constant=pytest.fail)) == ("f", {"a": value})
    assert isinstance(json.loads(arguments)["a"], type(value))


@pytest.mark.parametrize(
    "value",
    ["", "\n", " a ", "<b>\n\n", "a</parameter>b", "</function>", "é", CALL, CALL_END, "</think>"],
)
def test_texts_are_taken_as_they_are(value):
    assert called(value, {"type": "string"}) == ("f", json.dumps({"a": value}, ensure_ascii=False))


@pytest.mark.parametrize(
    "body",
    [
        "<function=f>\n<parameter=a>\n3\n</function>",
        "<function=f>\n<parameter=a>\n3\n<parameter=b>\n4\n</parameter>\n</function>",
        "<function=f>\n<parameter=a>\n3\n</parameter>\n<parameter=b>\n4\n</function>",
        "<function=f>\n<parameter=a>\n3\n</parameter>",
        "<function=f>\nsay\n<parameter=a>\n3\n</parameter>\n</function>",
        "<function=f>\n<parameter=a\n3\n</parameter>\n</function>",
        "<function=>\n</function>", "<function=f>\n</function>\n<function=g>",
        "<function=f>\n</function>\nsay\n<function=g>\n</function>",
        '{"name": "f"}', '{"name": "f", "arguments": [1]}',
        '{"name": "f", "arguments": {"a": NaN}}',
        '{"name": "f", "arguments": {"a": 1e999}}', '{"name": "f", "arguments": {"a": 1, "a": 2}}',
        '[{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]', '{"arguments": {}}',
        '{"name": "f", "arguments": {"a": "\\ud800"}}', "3", "",
    ],
)  # fmt: skip
def test_a_broken_call_is_none(body):
    assert read_calls(body, {"f": {"properties": {"a": {"type": "integer"}}}}) is None


JSON_CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 3}}\n</tool_call>'
FUNCTION_CALL = (
    "<tool_call>\n<function=f>\n<parameter=a>\n3\n</parameter>\n</function>\n</tool_call>"
)
CALLS = [("f", '{"a": 3}')]
TAGS = "</tool_call>\n<tool_call></think>"
BROKEN = "<tool_call>\n<function=f>\n<parameter=a>\n3\n</function>\n</tool_call>"
TEXTS = {
    "BROKEN": BROKEN,
    "OPEN": "<tool_call>\n<function=f>\n<parameter=a>\n3\n</parameter>\n</function>",
    "FUNCTIONS": "<tool_call>\n<function=g>\n</function>\n<function=f>\n<parameter=a>\n3\n"
    "</parameter>\n</function><tool_call><function=h></function>\n</tool_call>",
    "TAGS": f"<tool_call><function=f><parameter=a>{TAGS}</parameter></function></tool_call>",
}


def parts(text: str, cuts, stops=(), is_reasoning=False, several=True) -> Parts:
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    tools = {"f": {"properties": {"a": {"type": "integer"}}}}
    reader = AnswerReader(
        lambda ids: "".join(pieces[i] for i in ids), stops, is_reasoning, tools, several
    )
    found = Parts()
    for i in range(len(pieces)):
        found.add(reader.push(i, i == len(pieces) - 1))
        if reader.is_stopped:
            break
    return found


@pytest.mark.parametrize("call", [JSON_CALL, FUNCTION_CALL])
@pytest.mark.parametrize(
    ("text", "asked", "wanted"),
    [
        # Reasoning that nothing closes, as vLLM 0.33's Qwen3Parser reads it.
        ("a b\nCALL", {"is_reasoning": True}, Parts("a b", "", CALLS)),
        ("<think>a\nCALL\nb", {}, Parts("a", "b", CALLS)),
        ("a CALL\n</think>\n\nb", {"is_reasoning": True}, Parts("a", "b", CALLS)),
        ("a BROKEN b</think>\n\nc\nCALL", {"is_reasoning": True}, Parts("a BROKEN b", "c", CALLS)),
        ("a <tool_call> b</think>c CALL", {"is_reasoning": True},
         Parts("a <tool_call> b", "c", CALLS)),
        ("a <tool_call> b ", {"is_reasoning": True}, Parts("a <tool_call> b")),
        # Several functions within a mark; ends that are missing; marks in values; as vLLM's.
        ("a FUNCTIONS b", {}, Parts("", "a  b", [("g", "{}"), ("f", '{"a": 3}'), ("h", "{}")])),
        ("a FUNCTIONSb", {"several": False}, Parts("", "a b", [("g", "{}")])),
        ("a\nCALLOPEN", {}, Parts("", "a", CALLS * 2)),
        ("aOPEN", {"is_reasoning": True}, Parts("a", "", CALLS)),
        ("a OPEN\n\nb", {}, Parts("", "a OPEN\n\nb")),
        ("a TAGS\nb", {"is_reasoning": True}, Parts("a", "b", [("f", json.dumps({"a": TAGS}))])),
        ("a <tool_call>\n<function=f></think>b CALL", {"is_reasoning": True},
         Parts("a <tool_call>\n<function=f>", "b", CALLS)),
        ("a <tool_call>\n<function=f>\n</tool_call> CALL", {},
         Parts("", "a <tool_call>\n<function=f>\n</tool_call>", CALLS)),
        # Blanks, as vLLM's: kept between texts.
        ("a \nCALL b CALL\n", {}, Parts("", "a \n b", CALLS * 2)),
        ("\nCALL\nb \n", {}, Parts("", "b", CALLS)),
        ("a BROKEN\nb ", {}, Parts("", "a BROKEN\nb ")),
        ("a <tool_call> b CALL c", {}, Parts("", "a <tool_call> b  c", CALLS)),
        # Stops.
        ("a\n\nb</think>\n\nc", {"is_reasoning": True, "stops": ["\n\n"]}, Parts("a\n\nb", "c")),
        ("<think>a\n\n</think>\n\nc\n\nd", {"stops": ["\n\n"]}, Parts("a", "c")),
        ("aCALL\nbSTOPc", {"stops": ["3", "tool", "STOP"]}, Parts("", "a\nb", CALLS)),
        ("a STBROKEN", {"stops": ["STOP", "function"]}, Parts("", "a ST<tool_call>\n<")),
        ("xabcd", {"stops": ["abcd", "bc"]}, Parts("", "xa")),
    ],
)  # fmt: skip
def test_the_parts_of_an_answer_do_not_depend_on_its_tokens(text, asked, wanted, call):
    draw = random.Random(0)
    for name, meant in {"CALL": call, **TEXTS}.items():
        text = text.replace(name, meant)
    reasoning, content = (
        each.replace("BROKEN", BROKEN).replace("OPEN", TEXTS["OPEN"])
        for each in (wanted.reasoning, wanted.content)
    )
    for number in (len(text) - 1, 0, *range(40)):
        cuts = sorted(draw.sample(range(1, len(text)), min(number, len(text) - 1)))
        assert parts(text, cuts, **asked) == Parts(reasoning, content, wanted.calls)


def test_texts_have_as_many_log_probabilities_as_asked(tmp_path):
    """Parts of characters as OpenAI's completions write them (their reference of `logprobs`)."""
    processor = template_processor(tmp_path)
    call = completion_call(scripted(processor, "a"), b'{"prompt": "a", "logprobs": 5}')
    # The bytes of é and their like, which are all U+FFFD by themselves.
    parts = [i for i in range(300) if "\ufffd" in processor.tokenizer.decode([i])][:4]
    top = tuple((i, -1.0) for i in (*parts, 0))
    call.take(call.choices[0], Event(parts[0], -1.0, top, "length"))
    found = call.whole()["choices"][0]["logprobs"]
    assert len(found["top_logprobs"][0]) == 5
    assert found["tokens"][0] in found["top_logprobs"][0]
    assert found["tokens"][0].startswith("bytes:\\x")
