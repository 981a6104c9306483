"""Grammars that answers keep.

Guarantees: a schema's own `x-guidance` is kept; unknown formats say nothing, known ones hold;
regular expressions may have slashes however they are escaped.
"""

import pytest

from paddle_vl.serving.grammars import Grammars, json_rule, regex_rule
from tests.support.openai_server import template_processor


@pytest.fixture(scope="module")
def processor(tmp_path_factory):
    return template_processor(tmp_path_factory.mktemp("processor"))


@pytest.fixture(scope="module")
def grammars(processor):
    return Grammars(processor.tokenizer, 448, processor.eos_token_ids)


@pytest.fixture(scope="module")
def takes(processor, grammars):
    """Whether a rule lets an answer be a text."""

    def takes(rule: str, text: str) -> bool:
        constraint, ids = grammars.compiled(rule, False), processor.tokenizer.encode(text)
        wanted = [*ids, processor.eos_token_ids[0]]
        return all(constraint(wanted[:i])[token_id] for i, token_id in enumerate(wanted))

    return takes


TEXTS = ['{"a":1}', '{ "a" : 1 }', '{"a": 1}', '{"a":' + " " * 30 + "1}"]


@pytest.mark.parametrize(
    ("own", "taken"),
    [
        (None, [True, True, True, False]),
        ({"whitespace_flexible": True}, [True, True, True, False]),
        ({"whitespace_flexible": False}, [True, False, False, False]),
        ({"whitespace_pattern": " +"}, [True, True, True, True]),
        ({"key_separator": ": ", "whitespace_flexible": False}, [False, False, True, False]),
    ],
)
def test_a_schema_says_how_its_values_are_written(takes, own, taken):
    """llguidance 1.9.1's options; space without end is taken where the schema wants it."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    assert [takes(json_rule({**schema, "x-guidance": own}), text) for text in TEXTS] == taken


UNKNOWN = ["path", "binary", "uuid4", "file-path", "int32", "regex", ""]
KNOWN = "date time date-time duration email hostname ipv4 ipv6 uuid uri".split()
RECORD = {"type": "object", "propertyNames": {"type": "string"},
          "additionalProperties": {"type": "integer"}}  # fmt: skip
FORMAT = {"type": "object", "properties": {"format": {"const": {"format": "path"}}},
          "required": ["format"], "additionalProperties": False}  # fmt: skip
WRAPPED = [
    (lambda each: each, '"x"'),
    (lambda each: {"type": "array", "items": {"anyOf": [each, {"type": "null"}]}}, '["x"]'),
    (lambda each: {"$ref": "#/$defs/format", "$defs": {"format": each}}, '"x"'),
]


@pytest.mark.parametrize(
    ("schema", "taken", "refused"),
    [
        # As JSON Schema 2020-12 has it; pydantic 2.14 writes the first four.
        *(
            (wrapped({"type": "string", "format": name}), answer, "1")
            for name in UNKNOWN
            for wrapped, answer in WRAPPED
        ),
        *(({"type": "string", "format": name}, None, '" "') for name in KNOWN),
        # zod 4.6 writes it of every `z.record`.
        (RECORD, '{"a": 1}', '{"a": "b"}'),
        # What is called format is no format.
        (FORMAT, '{"format": {"format": "path"}}', '{"format": {}}'),
    ],
)
def test_unknown_formats_say_nothing_and_known_ones_hold(takes, schema, taken, refused):
    assert taken is None or takes(json_rule(schema), taken)
    assert not takes(json_rule(schema), refused)


def test_other_names_of_properties_are_refused(takes):
    with pytest.raises(ValueError, match="propertyNames"):
        takes(json_rule({**RECORD, "propertyNames": {"enum": ["a"]}}), '{"a": 1}')


@pytest.mark.parametrize(
    "schema",
    [None, {}, {"properties": {"a": {"type": "integer"}}},
     {"$ref": "#/$defs/A", "$defs": {"A": {"properties": {"a": {"type": "integer"}}}}}],
)  # fmt: skip
def test_arguments_of_calls_are_objects(takes, grammars, schema):
    call = '<tool_call>\n{"name": "f", "arguments": ARGUMENTS}\n</tool_call>'
    rule = grammars.calls({"f": schema}, False)
    assert takes(rule, call.replace("ARGUMENTS", '{"a": 1}'))
    assert not takes(rule, call.replace("ARGUMENTS", "1"))


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("a/b", "a/b"), (r"a\/b", "a/b"), (r"a\\/b", "a\\/b"), (r"a\\\/b", "a\\/b"),
        (r"a\\\\/b", "a\\\\/b"), ("[/]", "/"), (r"\d/\d", "1/2"), (r"a\\", "a\\"),
    ],
)  # fmt: skip
def test_regular_expressions_may_have_slashes(takes, pattern, text):
    """As Python's `re.fullmatch` takes them."""
    assert takes(regex_rule(pattern), text)
    assert not takes(regex_rule(pattern), text + "/")
