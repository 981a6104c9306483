"""The format of a row.

Guarantees: each format is recognised from the keys of a row, and null keys say nothing; rows that
are packed, for preference training, documents or ambiguous are refused with what to do.
"""

import pytest

from paddle_vl.data.formats.dialects import fitting_format, recognised
from paddle_vl.data.jsonl import BadSampleError
from tests.single_card_tests.data.formats.rows import chat, shared

PAIR = [{"role": "user", "content": "a"}]
TALK = shared(("human", "a"), ("gpt", "b"))


@pytest.mark.parametrize(
    ("row", "format"),
    [
        (chat(instruction="a", output="b"), "messages"),
        ({"conversation": PAIR}, "messages"),
        ({"messages": '[{"role": "user", "content": "a"}]'}, "messages"),
        ({"messages": TALK["conversations"]}, "sharegpt"),
        ({**TALK, "image": None, "video": ""}, "sharegpt"),
        ({**TALK, "video": ["a.mp4"]}, "llava"),
        ({"conversation": [{"human": "a", "assistant": "b"}]}, "sharegpt"),
        ({"src": ["a"], "tgt": ["b"]}, "erniekit"),
        ({"text_info": [], "text": "a"}, "erniekit"),
        ({"prompt": PAIR, "completion": PAIR}, "prompt_completion"),
        ({"instruction": "a", "input": None, "output": "b", "text": "c"}, "alpaca"),
        ({"instruction": "a", "response": "b"}, "query_response"),
        ({"Question": "a", "ANSWER": "b", "messages": None}, "query_response"),
    ],
)
def test_a_format_is_recognised_from_the_keys(row, format):
    assert recognised(row) == format


@pytest.mark.parametrize(
    ("row", "kind", "reason"),
    [
        ([TALK], "unsupported", "packed data"),
        (chat(chosen="a"), "preference", "'chosen' is for preference training"),
        (chat(rejected_images=["a"]), "preference", "'rejected_images'"),
        ({"query": "a", "response": "b", "sort": [1]}, "preference", "'response' with 'sort'"),
        (chat(label=1.0), "preference", "'label'.*rename the key"),
        ({"text": "a", "id": 1}, "corpus", "format: text"),
        ({"prompt": "a", "completion": "b"}, "ambiguous", "set data.format to query_response"),
        ({"query": "a"}, "missing_key", "a question and no answer; its keys are .*'query'"),
        ({"images": []}, "missing_key", "no 'messages'; its keys are .*'images'"),
    ],
)
def test_other_rows_are_refused_with_what_to_do(row, kind, reason):
    with pytest.raises(BadSampleError, match=reason) as info:
        recognised(row)
    assert info.value.kind == kind


@pytest.mark.parametrize("format", ["messages", "sharegpt", "llava", "erniekit", "alpaca"])
def test_plain_prompts_and_completions_are_no_rows_of_other_formats(format):
    with pytest.raises(BadSampleError, match="set data.format to query_response"):
        fitting_format({"prompt": "a", "completion": "b"}, format)
    assert fitting_format({"prompt": "a", "completion": "b"}, "query_response") == "query_response"
