"""The tool that checks rows of other formats.

Guarantees: it prints a line per case and exits with 1 if a form differs, a row is refused that
should not be, or one that should be is not.
"""

import json
import sys

import pyarrow as pa
import pytest
from pyarrow import parquet

import check_formats
from format_cases import check_containers

ROW = {"query": "a", "response": "b"}
FORM = {
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "b"}], "loss": True},
    ]
}


@pytest.mark.parametrize(
    ("row", "expected", "line"),
    [
        (ROW, {"canonical": FORM}, "ok"),
        ({"query": "a"}, {"refused": "missing_key"}, "ok"),
        ({**ROW, "response": "c"}, {"canonical": FORM}, 'is  {"messages"'),
        ({"query": "a"}, {"canonical": FORM}, "refused (missing_key)"),
        (ROW, {"refused": "tag_count", "why": "y"}, "not refused (tag_count: y)"),
    ],
)
def test_a_case_is_equal_or_its_difference_is_printed(
    tmp_path, capsys, monkeypatch, row, expected, line
):
    folder = tmp_path / "cases" / "query_response"
    folder.mkdir(parents=True)
    (folder / "rows.jsonl").write_text(json.dumps(row))
    (folder / "expected.jsonl").write_text(json.dumps(expected))
    monkeypatch.setattr(sys, "argv", ["check_formats", str(tmp_path)])
    assert check_formats.main() == (line != "ok")
    assert capsys.readouterr().out.startswith(f"query_response 1: {line}")


def test_a_column_of_json_text_is_read_as_the_rows_it_stands_for(tmp_path):
    rows = [{"messages": [{"role": role, "content": "a"} for role in ("user", "assistant")]}]
    table = pa.table({"messages": [json.dumps(row["messages"]) for row in rows]})
    parquet.write_table(table, tmp_path / "text.parquet")
    expected = {"rows": rows, "same_rows": ["text.parquet"], "refused": []}
    (tmp_path / "expected.json").write_text(json.dumps(expected))
    assert list(check_containers(tmp_path)) == [("text.parquet", None)]
