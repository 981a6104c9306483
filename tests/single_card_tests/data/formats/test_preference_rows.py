"""Rows of preference training.

Guarantees: every form gives the same two conversations in which the answer alone is learned, with
the images of each branch; rated answers in every form have their rating; a row that cannot be used
is refused with the reason.
"""

import pytest

from paddle_vl.data.formats.keys import RowSettings
from paddle_vl.data.formats.preference import to_preference
from paddle_vl.data.jsonl import BadSampleError

USER = {"role": "user", "content": "<image>What is this?"}
GOOD, BAD = ({"role": "assistant", "content": text} for text in ("A cat.", "A dog."))
IMAGE = {"images": ["a.png"]}
PARTS = {"role": "user", "content": [
    {"type": "image"}, {"type": "text", "text": "What is this?"}]}  # fmt: skip
PAIRS = {
    "TRL": {"prompt": [PARTS], "chosen": [GOOD], "rejected": [BAD], **IMAGE},
    "TRL, texts": {
        "prompt": USER["content"], "chosen": "A cat.", "rejected": "A dog.", **IMAGE,
    },
    "TRL, implicit prompt": {"chosen": [USER, GOOD], "rejected": [USER, BAD], **IMAGE},
    "ms-swift": {"messages": [USER, GOOD], "rejected_response": "A dog.", **IMAGE},
    "ms-swift, list": {"messages": [USER, GOOD], "rejected_response": [BAD], **IMAGE},
    "ms-swift, messages": {
        "messages": [USER, GOOD], **IMAGE,
        "rejected_messages": [USER, BAD], "rejected_images": ["a.png"],
    },
    "LLaMA-Factory, sharegpt": {
        "conversations": [{"from": "human", "value": USER["content"]}], **IMAGE,
        "chosen": {"from": "gpt", "value": "A cat."},
        "rejected": {"from": "gpt", "value": "A dog."},
    },
    "LLaMA-Factory, alpaca": {
        "instruction": USER["content"], "chosen": "A cat.", "rejected": "A dog.", **IMAGE,
    },
    "PaddleFormers": {
        "messages": [USER], "chosen_response": [GOOD], "rejected_response": [BAD], **IMAGE,
    },
    "ERNIEKit": {
        "src": [USER["content"]], "tgt": [], "response": ["A dog.", ["A cat."]], "sort": [0, 1],
        **IMAGE,
    },
}  # fmt: skip
RATED = {
    "TRL": {"prompt": [USER], "completion": [GOOD], "label": False, **IMAGE},
    "ms-swift": {"messages": [USER, GOOD], "label": 0, **IMAGE},
    "LLaMA-Factory": {
        "conversations": [
            {"from": "human", "value": USER["content"]}, {"from": "gpt", "value": "A cat."},
        ],
        "kto_tag": False, **IMAGE,
    },
    "LLaMA-Factory, alpaca": {
        "instruction": USER["content"], "output": "A cat.", "label": False, **IMAGE,
    },
}  # fmt: skip


def read(row: dict, **settings):
    return to_preference(row, RowSettings(**settings))


def conversation(text: str, image: str = "a.png") -> list[dict]:
    question = [{"type": "image", "image": image}, {"type": "text", "text": "What is this?"}]
    answer = [{"type": "text", "text": text}]
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "content": answer, "loss": True},
    ]


@pytest.mark.parametrize("form", PAIRS)
def test_a_pair_is_two_conversations_with_one_prompt(form):
    found = read(PAIRS[form])
    assert found.chosen.messages == conversation("A cat.")
    assert found.rejected.messages == conversation("A dog.")


@pytest.mark.parametrize("form", RATED)
def test_a_rated_answer_has_its_rating(form):
    found = read(RATED[form])
    assert found.chosen.messages == conversation("A cat.")
    assert found.rejected is None
    assert found.is_chosen is False


def test_a_rejected_branch_may_differ_in_its_image_alone():
    found = read({"messages": [USER, GOOD], "rejected_images": ["b.png"], **IMAGE})
    assert found.rejected.messages == conversation("A cat.", "b.png")


def test_earlier_turns_and_tools_are_the_prompt():
    turns = [USER, GOOD, {"role": "user", "content": "Sure?"}]
    tool = {"type": "function", "function": {"name": "zoom", "parameters": {}}}
    call = {"role": "assistant", "content": "", "tool_calls": [
        {"type": "function", "function": {"name": "zoom", "arguments": {}}}]}  # fmt: skip
    row = {"messages": [*turns, BAD], "rejected_response": [call], "tools": [tool], **IMAGE}
    found = read(row)
    assert [each.get("loss") for each in found.chosen.messages] == [None, False, None, True]
    assert found.rejected.messages[-1]["tool_calls"]
    assert len(found.rejected.tools) == 1


def test_columns_rename_the_keys_of_a_form():
    row = {"ask": USER["content"], "better": "A cat.", "worse": "A dog.", **IMAGE}
    found = read(row, columns={"ask": "prompt", "better": "chosen", "worse": "rejected"})
    assert found.chosen.messages == conversation("A cat.")


@pytest.mark.parametrize(
    ("row", "kind", "message"),
    [
        (PAIRS["TRL"] | {"rejected": [GOOD]}, "equal_answers", "are equal"),
        (PAIRS["ERNIEKit"] | {"sort": [1, 1]}, "equal_answers", "no answer is better"),
        (PAIRS["ERNIEKit"] | {"sort": [1, "no"]}, "unsupported", "a list of numbers"),
        (PAIRS["TRL, texts"] | {"rejected": ""}, "empty_answer", "is empty"),
        (PAIRS["ms-swift"] | {"messages": [USER]}, "empty_answer", "is empty"),
        (PAIRS["ms-swift"] | {"rejected_response": "<image>A dog."}, "tag_count", "<image> tag"),
        (PAIRS["ms-swift"] | {"rejected_images": ["a.png", "b.png"]}, "tag_count", "2 entries"),
        (PAIRS["TRL"] | {"prompt": [PARTS, GOOD]}, "bad_order", "of the user or of a tool"),
        (PAIRS["ms-swift"] | {"rejected_messages": [USER, BAD]}, "ambiguous", "keep one"),
        (RATED["ms-swift"] | {"label": 3}, "bad_target", "true and false"),
        ({"messages": [USER, GOOD], **IMAGE}, "no_preference", "compares no answers"),
        (PAIRS["TRL"] | {"chosen_score": 3}, "preference", "chosen_score"),
    ],
)
def test_a_row_that_cannot_be_used_says_why(row, kind, message):
    with pytest.raises(BadSampleError, match=message) as raised:
        read(row)
    assert raised.value.kind == kind
