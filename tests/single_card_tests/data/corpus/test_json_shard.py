"""JSON files that are no lines.

Guarantees: elements of an array and objects over several lines are found wherever the blocks of
the file end, with any texts in them; a file is told apart by its content; what is cut off, goes on
after its end or has other values than rows is refused.
"""

import gzip
import json
import random

import pytest

from paddle_vl.data.corpus import json_shard
from paddle_vl.data.jsonl import BadSampleError
from tests.single_card_tests.data.corpus.corpus_files import opener

TRICKY = ['a "quoted" [word]', "back\\slash\\", '\\"', "{", "]},{", "\n\t", "é☀", '",[{\\\\"', ""]
ROWS = [{"text": each, "n": [i, {"deep": [each]}]} for i, each in enumerate(TRICKY)]


@pytest.mark.parametrize("block", [1, 2, 7, 64, 1 << 22])
@pytest.mark.parametrize("indent", [None, 2])
def test_rows_of_an_array_do_not_depend_on_blocks(tmp_path, monkeypatch, block, indent):
    monkeypatch.setattr(json_shard, "_BLOCK", block)
    (tmp_path / "a.json").write_text("\ufeff \n" + json.dumps(ROWS, indent=indent) + "\n")
    shard = opener()(tmp_path / "a.json")
    assert [shard.read(row) for row in range(shard.count)] == ROWS


def test_random_arrays_are_read_as_json_reads_them(tmp_path, monkeypatch):
    monkeypatch.setattr(json_shard, "_BLOCK", 5)
    rng = random.Random(0)
    for _ in range(40):
        texts = ["".join(rng.choices('\\"[]{},: a\n', k=rng.randrange(12))) for _ in range(6)]
        rows = [{text: texts} for text in texts]
        (tmp_path / "a.json").write_text(json.dumps(rows, indent=rng.choice([None, 1])))
        shard = opener(tmp_path)(tmp_path / "a.json")
        assert [shard.read(row) for row in range(shard.count)] == rows


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
        ('[{"a": 1}, {"a": ', "it ends early"),
        ('[{"a": 1}, {"a": "]}', "it ends early"),
        ('[{"a": 1}]\n[{"a": 2}]', "it goes on after its array ends"),
        ('[{"a": 1}]]', "it goes on after its array ends"),
        ('["x", {"a": 1}]', "one array of objects is needed"),
    ],
)
@pytest.mark.parametrize("block", [3, 1 << 22])
def test_broken_arrays_are_refused_when_opened(tmp_path, monkeypatch, text, reason, block):
    monkeypatch.setattr(json_shard, "_BLOCK", block)
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(RuntimeError, match=reason) as error:
        opener()(tmp_path / "a.json")
    assert "a.json" in str(error.value)


@pytest.mark.parametrize(
    ("text", "row", "reason"),
    [
        ('[{"a": 1}, 5, {"a": 2}]', 0, "Extra data"),
        ('[{"a": 1} {"a": 2}]', 0, "no ',' after the row"),
        ('[{"a": 1}, {"a": 2}] x', 1, "no ']' after the row"),
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
