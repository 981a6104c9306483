"""Rows of any file by number.

Guarantees: the golden files give the same rows whatever they are written in, or are refused; values
are those of JSON; a million rows are opened without being parsed.
"""

import datetime
import json
import shutil
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from format_cases import check_containers
from paddle_vl.config.row_sources import RowSourceConfig
from paddle_vl.data.jsonl import BadSampleError
from paddle_vl.data.rows.row_file import open_rows, open_source

GOLDEN = Path(__file__).parents[3] / "golden" / "formats" / "containers"


def test_golden_files_give_the_same_rows_or_are_refused():
    cases = dict(check_containers(GOLDEN))
    expected = json.loads((GOLDEN / "expected.json").read_text(encoding="utf-8"))
    assert cases.keys() == {
        *expected["same_rows"],
        *expected["refused"],
        "alpaca.csv",
        "alpaca.tsv",
    }
    assert {name: error for name, error in cases.items() if error} == {}


def test_the_check_of_golden_files_finds_differences(tmp_path):
    shutil.copytree(GOLDEN, tmp_path / "c")
    text = (tmp_path / "c" / "rows.json").read_text(encoding="utf-8")
    (tmp_path / "c" / "rows.json").write_text(text.replace("Grey", "Gray"), encoding="utf-8")
    shutil.copy(tmp_path / "c" / "rows.jsonl", tmp_path / "c" / "bad_empty.jsonl")
    wrong = [name for name, error in check_containers(tmp_path / "c") if error]
    assert wrong == ["rows.json", "bad_empty.jsonl"]


def test_a_column_of_json_text_is_read_as_the_rows_it_stands_for(tmp_path):
    rows = [{"messages": [{"role": role, "content": "a"} for role in ("user", "assistant")]}]
    table = pa.table({"messages": [json.dumps(row["messages"]) for row in rows]})
    parquet.write_table(table, tmp_path / "text.parquet")
    expected = {"rows": rows, "same_rows": ["text.parquet"], "refused": []}
    (tmp_path / "expected.json").write_text(json.dumps(expected))
    assert list(check_containers(tmp_path)) == [("text.parquet", None)]


def test_values_of_tables_are_those_of_json(tmp_path):
    kinds = pa.struct([("a", pa.string()), ("b", pa.map_(pa.string(), pa.int64()))])
    columns = {
        "x": pa.array([{"a": None, "b": [("k", 1)]}], kinds),
        "none": pa.array([None], pa.string()),
        "list": [[{"a": 1, "b": None}, {"a": None, "b": 2}]],
        "day": [datetime.date(2026, 1, 2)],
        "bytes": [b"\xff"],
    }
    parquet.write_table(pa.table(columns), tmp_path / "a.parquet")
    assert open_rows(tmp_path / "a.parquet").row(0) == {
        "x": {"b": {"k": 1}}, "list": [{"a": 1}, {"b": 2}], "day": "2026-01-02", "bytes": b"\xff",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("value", "reason"), [(float("nan"), "contains nan"), (Decimal(1), "Decim")]
)
def test_values_that_json_has_not_are_bad_samples(tmp_path, value, reason):
    parquet.write_table(pa.table({"x": [value]}), tmp_path / "a.parquet")
    with pytest.raises(BadSampleError, match=rf"a\.parquet:row 1: .*{reason}"):
        open_rows(tmp_path / "a.parquet")


@pytest.mark.parametrize(
    ("text", "is_columns"),
    [
        ('{"instruction": ["a", "b"], "output": ["c", "d"]}', True),
        ('{"messages": [[{"role": "user"}]], "images": [["a.png"]]}', True),
        ('{"messages": [{"role": "user", "content": "a"}]}', False),
        ('{"prompt": [{"role": "user"}], "completion": [{"role": "assistant"}]}', False),
        ('{"src": ["a"], "tgt": ["b"], "label": [1]}', False),
        ('{"text_info": [{"text": "a"}], "image_info": [{"image_url": "b"}]}', False),
    ],
)
def test_columns_are_told_from_a_single_row(tmp_path, text, is_columns):
    (tmp_path / "a.json").write_text(text)
    if is_columns:
        with pytest.raises(ValueError, match="is an object of columns"):
            open_rows(tmp_path / "a.json")
    else:
        assert len(open_rows(tmp_path / "a.json")) == 1


def test_the_fingerprint_changes_with_the_rows(tmp_path):
    found = set()
    for text in ('{"a": 1}\n', '{"a": 2}\n', '{"a": 2}\n{"a": 2}\n'):
        (tmp_path / "a.jsonl").write_text(text)
        found.add(open_rows(tmp_path / "a.jsonl").fingerprint)
    assert len(found) == 3


def test_a_source_has_the_rows_of_its_splits_and_subsets(tmp_path):
    for number, name in enumerate(["x/train.jsonl", "x/test.jsonl", "y/train.jsonl"]):
        (tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "data" / name).write_text(json.dumps({"n": number}) + "\n")
    source = RowSourceConfig(path="hf://a/b", subsets=["y", "x"], split="train", folder="data")
    rows = open_source(source, fetch=lambda path: tmp_path)
    assert [rows.row(i)["n"] for i in range(len(rows))] == [2, 0]


def test_lines_are_not_parsed_when_a_file_is_opened(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n' + "no JSON\n" * 1000)
    rows = open_rows(tmp_path / "a.jsonl")
    assert len(rows) == 1001
    with pytest.raises(BadSampleError, match=r"a\.jsonl:1001: broken JSON"):
        rows.row(1000)
