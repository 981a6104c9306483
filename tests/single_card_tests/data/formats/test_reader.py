"""Rows of every format give their canonical form.

Guarantees: the rows of other trainers give what is recorded for them or are refused; a canonical
row stays what it is; a row of another format than its source is refused with both names. Damaged
rows are in `damaged/test_damaged_rows`.
"""

import copy
import json
from pathlib import Path

import pytest

from check_formats import BOXES, check_rows
from paddle_vl.data.formats.keys import RowSettings
from paddle_vl.data.formats.reader import to_canonical
from paddle_vl.data.jsonl import BadSampleError
from tests.single_card_tests.data.formats.rows import assert_canonical, chat, shared

GOLDEN = Path(__file__).parents[3] / "golden/formats"
FOLDERS = sorted(path.parent for path in GOLDEN.glob("*/expected.jsonl"))
ROWS = [json.loads(line) for each in FOLDERS for line in (each / "rows.jsonl").open("rb")]


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
