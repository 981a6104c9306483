"""Rows of prompts: every form gives the prompt, the row's columns and its right answers; a row that
ends in an answer, or asks nothing, is refused."""

import pytest

from paddle_vl.data.formats.keys import RowSettings
from paddle_vl.data.formats.prompts import to_prompt
from paddle_vl.data.jsonl import BadSampleError

ASKED = [{"role": "user", "content": "<image>How many?"}]
ANSWER = {"role": "assistant", "content": "Three."}
CANONICAL = [
    {
        "role": "user",
        "content": [{"type": "image", "image": "a.png"}, {"type": "text", "text": "How many?"}],
    }
]
PARTS = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "How many?"}]}]
IMAGES = {"images": ["a.png"]}
GROUND = {"style": "rule", "ground_truth": "3"}


@pytest.mark.parametrize(
    ("row", "columns", "references"),
    [
        ({"messages": ASKED, "solution": "3"}, {"solution": "3"}, ["3"]),
        ({"messages": [*ASKED, ANSWER], "solution": "3"}, {"solution": "3"}, ["3"]),
        ({"prompt": PARTS, "level": 2}, {"level": 2}, []),
        ({"prompt": "<image>How many?", "answer": 3}, {"answer": 3}, ["3"]),
        ({"problem": "<image>How many?", "answer": ["3", "three"]}, None, ["3", "three"]),
        (
            {"prompt": ASKED, "data_source": "x", "reward_model": GROUND},
            {"data_source": "x", "reward_model": GROUND},
            ["3"],
        ),
        (
            {"conversations": [{"from": "human", "value": "<image>How many?"}], "solution": "3"},
            {"solution": "3"},
            ["3"],
        ),
        # Names that rows of fine-tuning refuse are columns here.
        ({"messages": ASKED, "weight": 0.5, "label": 1}, {"weight": 0.5, "label": 1}, []),
    ],
)
def test_a_row_gives_its_prompt_columns_and_right_answers(row, columns, references):
    found = to_prompt({**row, **IMAGES}, RowSettings())
    assert found.prompt.messages == CANONICAL
    assert found.references == references
    if columns is not None:
        assert found.columns == columns


def test_earlier_turns_and_tools_stay_in_the_prompt():
    turns = [{"role": "system", "content": "Be brief."}, *ASKED, ANSWER]
    turns.append({"role": "user", "content": "Sure?"})
    found = to_prompt({"messages": turns, **IMAGES}, RowSettings())
    roles = [message["role"] for message in found.prompt.messages]
    assert roles == ["system", "user", "assistant", "user"]
    assert found.prompt.targets == []
    assert found.answer is None


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": [ANSWER]}, "the role of the last message of the prompt is 'missing'"),
        ({"prompt": "a", "question": "b"}, "prompt and question beside each other"),
        ({"solution": "3"}, "no 'messages' or 'prompt'"),
        ({"messages": ASKED}, "1 image place.s. .* but 0 entries in 'images'"),
    ],
)
def test_a_row_that_asks_nothing_is_refused(row, message):
    with pytest.raises(BadSampleError, match=message):
        to_prompt(row, RowSettings())
