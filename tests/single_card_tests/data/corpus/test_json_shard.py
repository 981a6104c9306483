"""JSON files that are no lines.

Guarantees: elements of an array and objects over several lines are found, with any texts in them; a
file is told apart by its content; what is cut off, goes on after its end or has other values than
rows is refused.
"""

import gzip
import json

import pytest

from paddle_vl.data.jsonl import BadSampleError
from tests.single_card_tests.data.corpus.corpus_files import opener

TRICKY = ['a "quoted" [word]', "back\\slash\\", '\\"', "{", "]},{", "\n\t", "é☀", '",[{\\\\"', ""]
ROWS = [{"text": each, "n": [i, {"deep": [each]}]} for i, each in enumerate(TRICKY)]


@pytest.mark.parametrize("indent", [None, 2])
def test_rows_of_an_array_are_found(tmp_path, indent):
    (tmp_path / "a.json").write_text("\ufeff \n" + json.dumps(ROWS, indent=indent) + "\n")
    shard = opener()(tmp_path / "a.json")
    assert [shard.read(row) for row in range(shard.count)] == ROWS


def test_objects_over_several_lines_follow_one_another(tmp_path):
    (tmp_path / "a.json").write_text("\n".join(json.dumps(row, indent=1) for row in ROWS))
    shard = opener()(tmp_path / "a.json")
    assert [shard.read(row) for row in range(shard.count)] == ROWS
    assert shard.place(1) == f"{tmp_path / 'a.json'}:12 (row 2)"


def test_compressed_arrays_are_read_and_lines_in_a_json_file(tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(json.dumps(ROWS).encode()))
    (tmp_path / "b.json").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    for name in ("a.jsonl.gz", "b.json"):
        shard = opener()(tmp_path / name)
        assert [shard.read(row) for row in range(shard.count)] == ROWS
    assert shard.place(2) == f"{tmp_path / 'b.json'}:3"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('[{"a": 1},\n {"a": ', "the value in line 2 is broken"),
        ('[{"a": 1}, {"a": "]}', "the value in line 1 is broken"),
        ('[{"a": 1}]\n[{"a": 2}]', "ends early or goes on in line 1"),
        ('[{"a": 1}]]', "ends early or goes on"),
        ('[{"a": 1} {"a": 2}]', "ends early or goes on"),
        ('[{"a": 1}, {"a": 2}] x', "ends early or goes on"),
        ('[{"a": 1},', "ends early or goes on"),
        ("[" * 100_000, "the value in line 1 is broken"),
    ],
)
def test_broken_arrays_are_refused_when_opened(tmp_path, text, reason):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(RuntimeError, match=reason) as error:
        opener()(tmp_path / "a.json")
    assert "a.json" in str(error.value)


@pytest.mark.parametrize(
    ("text", "row", "reason"),
    [
        ('[5, {"a": 2}]', 0, "holds a JSON int"),
        ('[[{"a": 1}], {"a": 2}]', 0, "holds a JSON list"),
        ('[{"a": 1, "a": 2}, {"a": 2}]', 0, "the key 'a' is there twice"),
        ('[{"a": NaN}, {"a": 2}]', 0, "contains NaN"),
    ],
)
def test_broken_rows_of_an_array_are_bad_samples(tmp_path, text, row, reason):
    (tmp_path / "a.json").write_text(text)
    shard = opener()(tmp_path / "a.json")
    assert shard.read(1 - row) == {"a": 2 - row}
    with pytest.raises(BadSampleError, match=reason):
        shard.read(row)


def test_a_row_that_is_too_long_is_not_read(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps([{"a": "x" * 5000}, {"a": "y"}]))
    shard = opener(max_line_bytes=100)(tmp_path / "a.json")
    assert shard.read(1) == {"a": "y"}
    with pytest.raises(BadSampleError, match="more than 100 bytes"):
        shard.read(0)
