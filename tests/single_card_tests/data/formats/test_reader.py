"""Rows of every format give their canonical form.

Guarantees: the rows of other trainers give what is recorded for them or are refused; a canonical
row stays what it is; a row of another format than its source is refused with both names; no damage
to a row gives another error than a refusal, or a form that is not canonical.
"""

import copy
import json
import random
from pathlib import Path

import pytest

from check_formats import BOXES, CONTROL_TOKENS, check_rows
from paddle_vl.data.formats.keys import RowSettings
from paddle_vl.data.formats.reader import to_canonical
from paddle_vl.data.jsonl import BadSampleError
from tests.single_card_tests.data.formats.rows import assert_canonical, chat, shared

GOLDEN = Path(__file__).parents[3] / "golden/formats"
FOLDERS = sorted(path.parent for path in GOLDEN.glob("*/expected.jsonl"))
ROWS = [json.loads(line) for each in FOLDERS for line in (each / "rows.jsonl").open("rb")]
HOSTILE = (
    None, "", [], {}, 0, -1, 1.5, True, "x", "<image>", "<bbox>", "[1", "{}", ["x"], [None], [{}],
    [["a", "b"]], [1, 2], {"a": 1}, b"x", {"url": "u"}, {"role": "user"},
)  # fmt: skip


@pytest.mark.parametrize(
    ("case", "problem"), [outcome for folder in FOLDERS for outcome in check_rows(folder)]
)
def test_rows_of_other_trainers_give_their_recorded_form(case, problem):
    assert problem is None, problem


def test_every_folder_of_rows_is_checked():
    assert len(FOLDERS) == 13
    assert len(ROWS) == 103


def test_a_canonical_row_stays_what_it_is():
    for folder in FOLDERS:
        for line in (folder / "expected.jsonl").open("rb"):
            canonical = json.loads(line).get("canonical")
            for form in [] if canonical is None else [canonical.get(each) for each in BOXES]:
                form = form or canonical
                assert_canonical(form)
                settings = RowSettings(special_tokens=["box", "object_ref"])
                assert to_canonical(copy.deepcopy(form), settings).to_dict() == form


def damaged(row, rng):
    """The row with one value replaced or removed."""
    row = copy.deepcopy(row)
    holder = row
    while True:
        keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
        if not keys:
            return row
        key = rng.choice(keys)
        if isinstance(holder[key], dict | list) and rng.random() < 0.8:
            holder = holder[key]
            continue
        if rng.random() < 0.2:
            del holder[key]
        else:
            holder[key] = copy.deepcopy(rng.choice(HOSTILE))
        return row


def test_damaged_rows_are_refused_or_canonical():
    rng = random.Random(0)
    settings = RowSettings(control_tokens=CONTROL_TOKENS, image_size=lambda source: (64, 48))
    outcomes = set()
    for _ in range(3000):
        try:
            found = to_canonical(damaged(rng.choice(ROWS), rng), settings)
        except BadSampleError as error:
            outcomes.add(error.kind)
        else:
            assert_canonical(found.to_dict())
            outcomes.add("canonical")
    assert {"canonical", "missing_key", "tag_count", "bad_tool_call", "bad_box"} <= outcomes


def test_a_row_of_another_format_is_refused_with_both_names():
    with pytest.raises(BadSampleError, match="format sharegpt, and its source the format messages"):
        to_canonical(shared(("human", "a"), ("gpt", "b")), format="messages")
    with pytest.raises(ValueError, match="format is 'sharegtp'; use one of messages"):
        to_canonical(chat(), format="sharegtp")


def test_a_refusal_names_the_format_of_the_row():
    with pytest.raises(BadSampleError, match="^a row of format alpaca: 'output' is missing"):
        to_canonical({"instruction": "a", "input": "b"})


def test_unknown_keys_of_a_row_are_kept_as_extras():
    row = to_canonical(chat(id=7, task=None, system="hello", chat_template_kwargs={"a": 1}))
    assert row.extras == {"id": 7}
    assert row.to_dict().keys() == {"messages", "chat_template_kwargs"}
