"""Rows of a question and an answer: Alpaca, query and response, prompt and completion.

Guarantees: input follows the instruction on a new line, history comes first and is learned, names
have aliases without case; several aliases, several answers and targets in a prompt are refused.
"""

import pytest

from paddle_vl.data.jsonl import BadSampleError
from tests.single_card_tests.data.formats.rows import flat, losses, said

ASKED, LEARNED = said(("user", "a"))["messages"], said(("assistant", "b"))["messages"]
BOTH = said(("user", "x"), ("assistant", "y"))["messages"]


@pytest.mark.parametrize(
    ("row", "wanted"),
    [
        ({"instruction": "a", "input": "b", "output": "c", "text": "all"}, ["a\nb", "c"]),
        ({"instruction": "", "input": "b", "output": "c"}, ["b", "c"]),
        ({"QUERY": "a", "Answer": "b", "History": [["h", "i"]]}, ["h", "i", "a", "b"]),
        ({"query": "a", "prompt": "a", "response": "b"}, ["a", "b"]),
        ({"instruction": "a", "output": "c", "history": '[["h", "i"]]'}, ["h", "i", "a", "c"]),
        ({"prompt": BOTH + ASKED, "completion": LEARNED}, ["x", "y", "a", "b"]),
    ],
)
def test_questions_and_answers_alternate(row, wanted):
    assert [text for _, text in flat(row)] == wanted


def test_history_is_learned_and_a_prompt_is_not():
    assert losses({"query": "a", "response": "b", "history": [["h", "i"]]}) == [True, True]
    assert losses({"prompt": BOTH + ASKED, "completion": LEARNED}) == [False, True]


def test_plain_prompts_are_read_if_the_format_says_how():
    row = {"prompt": "a", "completion": "b"}
    assert flat(row, "query_response") == [("user", "a"), ("assistant", "b")]
    with pytest.raises(BadSampleError, match="'prompt' must be a list"):
        flat(row, "prompt_completion")


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        ({"instruction": "a", "input": "b"}, "missing_key"),
        ({"instruction": "", "output": "b"}, "missing_key"),
        ({"query": "a", "response": ["b", "c"]}, "missing_key"),
        ({"query": "a", "response": "b", "history": [["h"]]}, "missing_key"),
        ({"query": "a", "answer": "b", "solution": "c"}, "ambiguous"),
        ({"query": "a", "response": "b", "output": "c"}, "ambiguous"),
        ({"query": "a", "Query": "b", "response": "c"}, "ambiguous"),
        ({"query": "a", "response": "b", "mask": [1]}, "unsupported"),
        ({"prompt": ASKED, "completion": ASKED}, "bad_order"),
        ({"prompt": [{**BOTH[1], "loss": True}], "completion": LEARNED}, "bad_target"),
    ],
)
def test_what_is_missing_or_said_twice_is_refused(row, kind):
    with pytest.raises(BadSampleError) as info:
        flat(row)
    assert info.value.kind == kind, info.value
