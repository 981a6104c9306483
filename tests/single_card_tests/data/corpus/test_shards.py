"""Data files of pretraining, read document by document.

Guarantees: JSONL, plain and compressed, Parquet, WebDataset and token files give their documents by
number, and their places; an index is built once, beside the data or in a cache folder, by several
processes, and again when the file changed; damaged files and documents are refused with their
place.
"""

import gzip
import json
import struct

import numpy as np
import pyarrow as pa
import pytest
import zstandard
from pyarrow import parquet

from paddle_vl.data.corpus import shard as shard_module
from paddle_vl.data.corpus.cache import Cache
from paddle_vl.data.corpus.opener import ShardOpener, open_shards
from paddle_vl.data.corpus.token_files import TokenFileWriter
from paddle_vl.data.jsonl import BadSampleError
from tests.single_card_tests.data.corpus.corpus_files import lines, opener, picture, write_tar

ROWS = [{"text": f"row {i} " + "x" * (i % 7)} for i in range(300)]


@pytest.mark.parametrize(
    ("name", "packed"),
    [("a.jsonl", bytes), ("b.jsonl.gz", gzip.compress), ("c.jsonl.zst", zstandard.compress)],
)
def test_jsonl_gives_its_rows_and_their_lines(tmp_path, name, packed, monkeypatch):
    # Blocks that end inside lines, and blank lines.
    monkeypatch.setattr(shard_module, "_BLOCK", 50)
    raw = lines(ROWS[:5]) + b"\n  \t\n" + lines(ROWS[5:])[:-1]
    (tmp_path / name).write_bytes(packed(raw))
    shard = opener()(tmp_path / name)
    assert shard.count == 300
    assert [shard.read(row) for row in range(300)] == ROWS
    assert [shard.place(row) for row in (4, 5)] == [f"{tmp_path / name}:{n}" for n in (5, 8)]


def test_parquet_gives_its_rows_and_row_groups(tmp_path):
    images = [{"bytes": picture(i), "path": None} for i in range(5)]
    table = pa.table({"text": [f"t{i}" for i in range(5)], "image": images})
    parquet.write_table(table, tmp_path / "p.parquet", row_group_size=2)
    shard = opener()(tmp_path / "p.parquet")
    assert list(shard.groups) == [2, 2, 1]
    assert shard.read(4) == {"text": "t4", "image": {"bytes": picture(4)}}
    assert shard.place(4) == f"{tmp_path / 'p.parquet'}:row 5"


def test_webdataset_gives_its_documents(tmp_path):
    page = {"texts": ["a", None], "images": [None, "one.png"]}
    write_tar(
        tmp_path / "w.tar",
        {
            "x/0001.jpg": picture(1), "x/0001.txt": b"first",
            "x/0002.txt": b"second", "x/0002.png": picture(2),
            "x/0003.json": json.dumps(page).encode(), "x/0003.one.png": picture(3),
        },
    )  # fmt: skip
    shard = opener()(tmp_path / "w.tar")
    assert shard.count == 3
    rows = [shard.read(row) for row in range(3)]
    assert [row.get("text") for row in rows] == ["first", "second", None]
    assert [row.get("image") for row in rows[:2]] == [picture(1), picture(2)]
    assert rows[2]["texts"] == page["texts"]
    assert rows[2]["images"] == [None, picture(3)]
    assert shard.place(2) == f"{tmp_path / 'w.tar'}:x/0003"


@pytest.mark.parametrize(
    "skipped",
    ["._{}", "README", "__meta__/{}", "__notes__", "folder/LICENSE", "./._{}", "folder/._{}"],
)
def test_members_that_webdataset_skips_tear_no_document(tmp_path, skipped):
    """Documents and members as webdataset 1.0.2 and megatron-energon 7.4.1 group them; of files of
    macOS in a folder they make documents of their own."""
    before, inside, behind = (skipped.format(name) for name in ("0.jpg", "0.json", "2.json"))
    names = [before, "0.jpg", inside, "0.json", "1.jpg", "1.json", behind]
    write_tar(tmp_path / "w.tar", dict.fromkeys(names if before != inside else names[1:], b"{}"))
    shard = opener()(tmp_path / "w.tar")
    assert [shard.read(row) for row in range(shard.count)] == [{"image": b"{}", "jpg": b"{}"}] * 2
    assert shard.place(1) == f"{tmp_path / 'w.tar'}:1"


def test_token_files_give_what_was_written(tmp_path):
    documents = [np.arange(4), np.arange(70, 76), np.array([9])]
    with TokenFileWriter(tmp_path / "tokens", highest_id=300) as writer:
        writer.add(np.concatenate(documents[:2]), np.array([4, 6]))
        writer.add(documents[2], np.array([1]))
    shard = opener()(tmp_path / "tokens.idx")
    assert shard.count == 3
    for row, ids in enumerate(documents):
        np.testing.assert_array_equal(shard.read(row)["tokens"], ids)
    (tmp_path / "tokens.lsm").write_bytes(bytes([1, 1, 0, 1, 0, 0, 0, 0, 0, 1, 1]))
    masked = opener()(tmp_path / "tokens.idx")
    assert masked.read(0)["mask"].tolist() == [1, 1, 0, 1]
    assert masked.read(2)["mask"].tolist() == [1]


def test_token_files_have_the_layout_of_megatron_and_paddlenlp(tmp_path):
    """Read as their `MMapIndexedDataset` reads them."""
    for highest, code, dtype in ((300, 8, np.uint16), (151_668, 4, np.int32)):
        with TokenFileWriter(tmp_path / f"t{code}", highest) as writer:
            writer.add(np.arange(10), np.array([4, 6]))
        raw = (tmp_path / f"t{code}.idx").read_bytes()
        assert raw[:9] == b"MMIDIDX\0\0"
        assert struct.unpack("<QBQQ", raw[9:34]) == (1, code, 2, 3)
        sizes = np.frombuffer(raw, np.int32, 2, 34)
        pointers = np.frombuffer(raw, np.int64, 2, 42)
        boundaries = np.frombuffer(raw, np.int64, 3, 58)
        assert len(raw) == 82
        assert sizes.tolist() == [4, 6]
        assert pointers.tolist() == [0, 4 * np.dtype(dtype).itemsize]
        assert boundaries.tolist() == [0, 1, 2]
        tokens = np.frombuffer((tmp_path / f"t{code}.bin").read_bytes(), dtype)
        assert tokens.tolist() == list(range(10))


def test_a_document_of_several_sequences_is_one(tmp_path):
    """As Megatron's own tool writes documents that are split into sentences."""
    ids = np.arange(9, dtype="<i4")
    (tmp_path / "m.bin").write_bytes(ids.tobytes())
    index = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 4, 3, 3)
    index += np.array([2, 4, 3], dtype="<i4").tobytes()
    index += np.array([0, 8, 24], dtype="<i8").tobytes() + np.array([0, 2, 3], "<i8").tobytes()
    (tmp_path / "m.idx").write_bytes(index)
    shard = opener()(tmp_path / "m.idx")
    assert [shard.read(row)["tokens"].tolist() for row in range(2)] == [
        list(range(6)), [6, 7, 8],
    ]  # fmt: skip


def test_an_index_is_built_once_and_again_after_a_change(tmp_path, monkeypatch):
    file = tmp_path / "a.jsonl"
    file.write_bytes(lines(ROWS))
    first = opener()(file)
    assert (tmp_path / ".paddle_vl" / "a.jsonl.index").is_file()

    def refuse(path):
        raise AssertionError("read again")

    with monkeypatch.context() as patch:
        patch.setattr(shard_module, "line_offsets", refuse)
        assert opener()(file) == first
    file.write_bytes(lines(ROWS[::-1]))
    again = opener()(file)
    assert again.read(0) == ROWS[-1]
    assert again.content != first.content


def test_a_replaced_file_is_read_anew_in_the_same_process(tmp_path):
    """Though file and index are open from before."""
    for count in (3, 300):
        (tmp_path / "new").write_bytes(lines(ROWS[:count]))
        (tmp_path / "new").replace(tmp_path / "a.jsonl")
        shard = opener()(tmp_path / "a.jsonl")
        assert [shard.read(row) for row in range(shard.count)] == ROWS[:count]


def test_an_index_goes_to_the_cache_folder_if_the_data_cannot_be_written(tmp_path, monkeypatch):
    data, cache = tmp_path / "data", tmp_path / "cache"
    data.mkdir()
    (data / "a.jsonl").write_bytes(lines(ROWS))
    # A file in the folder's place: for root a read-only folder can be written.
    (data / ".paddle_vl").write_bytes(b"")
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    assert opener()(data / "a.jsonl").count == 300
    assert len(list((cache / "paddle_vl").glob("*-a.jsonl.index"))) == 1
    chosen = tmp_path / "chosen"
    assert opener(chosen)(data / "a.jsonl").count == 300
    assert len(list(chosen.glob("*.index"))) == 1


def test_several_processes_build_the_same_indexes(tmp_path):
    for number in range(6):
        (tmp_path / f"{number}.jsonl").write_bytes(lines(ROWS[number:]))
    files = [str(tmp_path / f"{number}.jsonl") for number in range(6)]
    by_two = open_shards(files, opener(tmp_path / "two"), 2)
    assert [shard.count for shard in by_two] == [300 - number for number in range(6)]
    alone = open_shards(files, opener(tmp_path / "one"), 1)
    assert [shard.content for shard in by_two] == [shard.content for shard in alone]


def test_copies_of_shards_are_bounded(tmp_path):
    for number in range(6):
        (tmp_path / f"{number}.jsonl").write_bytes(lines(ROWS[number:]))
    make = ShardOpener(Cache(str(tmp_path / "cache"), most_copies=2), copies_all=True)
    shards = [make(tmp_path / f"{number}.jsonl") for number in range(6)]
    for number, shard in enumerate(shards):
        assert shard.read(0) == ROWS[number]
        assert len(list((tmp_path / "cache").glob("*.copy"))) <= 2


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{broken\n", "broken JSON"),
        (b"[1]\n", "a JSON list; an object"),
        (b'{"text": "' + b"x" * 3000 + b'"}\n', "more than 2048 bytes"),
        (b"\xff\xfe\n", "not UTF-8"),
    ],
)
def test_bad_lines_are_refused(tmp_path, line, reason):
    (tmp_path / "a.jsonl").write_bytes(lines(ROWS[:2]) + line + lines(ROWS[2:4]))
    shard = opener(max_line_bytes=2048)(tmp_path / "a.jsonl")
    assert [shard.read(row) for row in (0, 1, 3, 4)] == ROWS[:4]
    with pytest.raises(BadSampleError, match=reason):
        shard.read(2)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.parquet", b"PAR1 no footer", "is no Parquet file"),
        ("a.tar", b"no archive at all" * 100, "no uncompressed tar file"),
        ("b.tar", gzip.compress(bytes(10240), mtime=0), "no uncompressed tar file"),
        ("a.jsonl.gz", b"no archive", "cannot be read or uncompressed"),
        ("a.jsonl.zst", b"no archive", "cannot be read or uncompressed"),
        ("a.xlsx", b"a,b", "has no known suffix"),
        ("a.tar.gz", b"", "has no known suffix"),
        ("a.idx", b"TNTIDX\0\0", "has no a.bin beside it"),
    ],
)
def test_damaged_files_are_refused_when_they_are_opened(tmp_path, name, content, reason):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(RuntimeError, match=reason) as error:
        opener()(tmp_path / name)
    assert name in str(error.value)


def test_a_write_that_fails_leaves_no_token_files(tmp_path):
    with pytest.raises(KeyError), TokenFileWriter(tmp_path / "t", 300) as writer:  # noqa: PT012
        writer.add(np.arange(3), np.array([3]))
        raise KeyError
    assert list(tmp_path.iterdir()) == []
