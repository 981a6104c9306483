"""Tables of text.

Guarantees: cells with quotes, delimiters and line breaks are read as they were written, as text;
media cells are paths or JSON; records that do not fit the header are refused.
"""

import csv
import gzip

import pytest

from paddle_vl.data.jsonl import BadSampleError
from tests.single_card_tests.data.corpus.corpus_files import opener

RECORDS = [
    ["NA", "1", ""], ['say "x"', "two\nlines", "a,b\tc"], ["é☀", "\r\n", "x" * 200_000],
]  # fmt: skip


@pytest.mark.parametrize(("name", "delimiter"), [("a.csv", ","), ("a.tsv", "\t")])
@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_records_are_read_as_they_were_written(tmp_path, name, delimiter, line_end):
    with (tmp_path / name).open("w", encoding="utf-8-sig", newline="") as file:
        writer = csv.writer(file, delimiter=delimiter, lineterminator=line_end)
        writer.writerows([["a", "b", "c"], *RECORDS])
        file.write(line_end)
    shard = opener()(tmp_path / name)
    assert [[*shard.read(row).values()] for row in range(shard.count)] == RECORDS
    assert [*shard.read(0)] == ["a", "b", "c"]
    assert shard.place(2) == f"{tmp_path / name}:5"


def test_media_cells_are_paths_or_json_and_absent_when_empty(tmp_path):
    text = 'query,image,images\nq,a.png,"[""b.png"", ""c.png""]"\nq,,\nq,,[b\n'
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(text.encode()))
    shard = opener()(tmp_path / "a.csv.gz")
    assert shard.read(0) == {"query": "q", "image": "a.png", "images": ["b.png", "c.png"]}
    assert shard.read(1) == {"query": "q"}
    with pytest.raises(BadSampleError, match="neither a path nor JSON"):
        shard.read(2)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"a,b\n1\n", "has 1 cells and the header 2"),
        (b"a,b\n1,2,3\n", "has 3 cells and the header 2"),
        (b"a,a\n1,2\n", "names a column twice"),
        (b"a,b\n\xff,2\n", "is not UTF-8"),
    ],
)
def test_records_that_do_not_fit_are_bad_samples(tmp_path, text, reason):
    (tmp_path / "a.csv").write_bytes(text)
    with pytest.raises(BadSampleError, match=reason):
        opener()(tmp_path / "a.csv").read(0)


@pytest.mark.parametrize("text", [b'a,b\n"x,2\n', b'a,b\n"x"y,2\n'])
def test_broken_quotes_are_refused_when_opened(tmp_path, text):
    (tmp_path / "a.csv").write_bytes(text)
    with pytest.raises(RuntimeError, match=r"a\.csv: line \d+ is broken"):
        opener()(tmp_path / "a.csv")
