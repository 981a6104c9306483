"""Small files that stand for much more than they hold.

Guarantees: `data.max_line_bytes` bounds the text of a document in every container, and with it its
images and a row group of Parquet; what a file states is checked before memory or disk is taken, and
what a row group of Parquet has when it is read; nothing stays of a refused copy.
"""

import gzip
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import zstandard
from pyarrow import parquet

from paddle_vl.data.corpus import cache
from paddle_vl.data.jsonl import BadSampleError
from tests.single_card_tests.data.corpus.corpus_files import lines, opener, write_tar

# More than is there.
LONG = 1 << 20
NOISE = np.random.default_rng(0).bytes(1 << 18)


def member(name: str, size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    """A member's header, followed by two blocks of content and the archive's end."""
    info = tarfile.TarInfo(name)
    info.size, info.type = size, kind
    return info.tobuf(tarfile.GNU_FORMAT) + b"a" * 1024 + bytes(1024)


def sparse(real_size: int) -> bytes:
    """A member of 512 stored bytes that reads as `real_size`."""
    head = bytearray(member("1.txt", 512, tarfile.GNUTYPE_SPARSE))
    head[386:410] = b"%011o\0%011o\0" % (0, 512)
    head[483:495] = b"%011o\0" % real_size
    head[148:156] = b" " * 8
    head[148:156] = b"%06o\0 " % sum(head[:512])
    return bytes(head)


def damaged_in_the_middle(file: Path) -> None:
    write_tar(file, {"1.txt": b"a", "2.txt": b"b"})
    content = bytearray(file.read_bytes())
    content[1024] ^= 1
    file.write_bytes(content)


def one_text_for_all_rows(file: Path) -> None:
    """A few hundred bytes of Parquet for 100 KB of text."""
    rows = pa.array(np.zeros(100, np.int32))
    texts = pa.DictionaryArray.from_arrays(rows, pa.array(["x" * 1000]))
    parquet.write_table(
        pa.table({"text": texts}), file, 100, compression="zstd", store_schema=False
    )


def varint(number: int, length: int) -> bytes:
    """A number of Thrift's compact protocol, in more bytes than it needs."""
    parts = [(number << 1) >> (7 * place) & 127 for place in range(length)]
    return bytes([part | 128 for part in parts[:-1]] + parts[-1:])


def footer_that_lies(file: Path) -> None:
    """Pages of 96 KB, of which the footer says that they have 1000 bytes."""
    text = pa.array(["x" * (32 << 10)] * 3)
    parquet.write_table(
        pa.table({"text": text}), file, compression="zstd", use_dictionary=False,
        store_schema=False, data_page_size=1, write_statistics=False,
    )  # fmt: skip
    stated = parquet.read_metadata(file).row_group(0).total_byte_size
    file.write_bytes(file.read_bytes().replace(varint(stated, 3), varint(1000, 3)))
    assert parquet.read_metadata(file).row_group(0).total_byte_size == 1000


def empty_rows(file: Path) -> None:
    parquet.write_table(pa.table({"text": pa.nulls(1 << 13)}), file, row_group_size=1 << 13)


CONTENTS: list[tuple[str, bytes | Callable[[Path], None], str]] = [
    ("sparse.tar", sparse(1 << 16), "1.txt is sparse, which is not supported"),
    ("huge.tar", member("1.txt", LONG), "no uncompressed tar file, or a damaged one"),
    ("pax.tar", member("x", LONG, tarfile.XHDTYPE), "no uncompressed tar file, or a damaged one"),
    ("name.tar", member("x", LONG, tarfile.GNUTYPE_LONGNAME), "no uncompressed tar file"),
    ("back.tar", member("1.txt", -1024), "1.txt has the size -1024"),
    ("nested.tar", member("x", 512, tarfile.GNUTYPE_LONGNAME)[:1024] * 3000, "recursion"),
    ("middle.tar", damaged_in_the_middle, "the header at byte 1024 is damaged"),
    ("rows.parquet", one_text_for_all_rows, "row group 1 takes 10.... bytes"),
    ("lie.parquet", footer_that_lies, "row group 1 takes 98... bytes"),
    ("null.parquet", empty_rows, "row group 1 takes 65536 bytes.*row_group_size"),
]


@pytest.mark.parametrize(
    ("name", "content", "reason"), CONTENTS, ids=[each[0] for each in CONTENTS]
)
def test_little_that_stands_for_more_is_refused(tmp_path, name, content, reason):
    file = tmp_path / name
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        content(file)
    with pytest.raises((RuntimeError, BadSampleError), match=reason):
        opener(max_line_bytes=32)(file).read(0)


@pytest.mark.parametrize("name", ["long.jsonl.zst", "long.jsonl.gz"])
def test_a_compressed_file_that_unpacks_to_far_more_leaves_no_copy(tmp_path, name, monkeypatch):
    monkeypatch.setattr(cache, "_ALWAYS_FINE", 1 << 15)
    pack = zstandard.compress if name.endswith("zst") else gzip.compress
    (tmp_path / name).write_bytes(pack(b'{"text": "a"}\n' * 3000))
    with pytest.raises(RuntimeError, match=rf"{name} has more than 32768 bytes uncompressed"):
        opener()(tmp_path / name)
    assert sum(file.stat().st_size for file in (tmp_path / ".paddle_vl").iterdir()) == 0


def test_a_zst_file_of_one_repeated_byte_is_refused_by_the_ratio(tmp_path, monkeypatch):
    """90 bytes for 2.6 MB, in blocks of 128 KiB that are stored as 4 bytes."""
    monkeypatch.setattr(cache, "_ALWAYS_FINE", 1 << 15)
    block = (1 << 1 | (1 << 17) << 3).to_bytes(3, "little") + b"x"
    last = (1 << 0 | 1 << 1 | 1 << 3).to_bytes(3, "little") + b"\n"
    head = b"\x28\xb5\x2f\xfd" + bytes([0, 11 << 3])
    (tmp_path / "a.jsonl.zst").write_bytes(head + block * 20 + last)
    with pytest.raises(RuntimeError, match="has more than 32768 bytes uncompressed and 90 as it"):
        opener()(tmp_path / "a.jsonl.zst")


@pytest.mark.parametrize("number_of_frames", [1, 2])
def test_a_zst_file_that_is_cut_off_is_refused(tmp_path, number_of_frames):
    """The library ends without an error, and the last documents would be missing."""
    rows = [{"text": NOISE[i * 1000 : i * 1000 + 1000].hex()} for i in range(250)]
    frames = zstandard.compress(lines(rows)) * number_of_frames
    (tmp_path / "a.jsonl.zst").write_bytes(frames)
    assert opener()(tmp_path / "a.jsonl.zst").count == 250 * number_of_frames
    for length in (len(frames) - 1, len(frames) - 5000):
        (tmp_path / "a.jsonl.zst").write_bytes(frames[:length])
        with pytest.raises(RuntimeError, match=r"a\.jsonl\.zst cannot be read or uncompressed"):
            opener()(tmp_path / "a.jsonl.zst")


def rows_of(folder: Path, text: str, image: bytes) -> list[Path]:
    """The same document in an archive and two tables."""
    write_tar(folder / "t.tar", {"1.png": image, "1.txt": text.encode()})
    for name, column in (("b", image), ("s", {"bytes": image, "path": None})):
        table = pa.table({"text": [text], "image": [column]})
        parquet.write_table(table, folder / f"{name}.parquet")
    return [folder / name for name in ("t.tar", "b.parquet", "s.parquet")]


@pytest.mark.parametrize("number", range(3))
def test_the_line_limit_holds_for_rows_of_every_container(tmp_path, number):
    limited = opener(max_line_bytes=2048)
    file = rows_of(tmp_path, "x" * 2000, NOISE[:60_000])[number]
    assert file.stat().st_size > 60_000
    assert limited(file).read(0)["text"] == "x" * 2000
    for folder, text, image, what in (
        ("text", "é" * 1025, b"a", "2050 bytes of text; .*data.max_line_bytes 2048 at most 2048"),
        ("image", "a", NOISE, "bytes of images .*at most 131072"),
    ):
        (tmp_path / folder).mkdir()
        file = rows_of(tmp_path / folder, text, image)[number]
        with pytest.raises(BadSampleError, match=what) as error:
            limited(file).read(0)
        assert error.value.kind == "line_too_long"


def test_a_row_group_is_bounded_by_the_line_limit(tmp_path):
    table = pa.table({"text": [f"{i} " + "x" * 900 for i in range(3000)]})
    for rows in (3000, 1000):
        parquet.write_table(table, tmp_path / f"{rows}.parquet", row_group_size=rows)
    assert len(opener(max_line_bytes=1024)(tmp_path / "1000.parquet").read(1)["text"]) == 902
    with pytest.raises(RuntimeError, match="at most 1048576 are read: write it again with fewer"):
        opener(max_line_bytes=1024)(tmp_path / "3000.parquet")
    assert opener()(tmp_path / "3000.parquet").read(1)["text"].startswith("1 x")


def test_every_encoding_and_page_version_is_read(tmp_path):
    numbers = list(range(5000))
    table = pa.table({
        "text": [f"text {i % 100}" for i in numbers], "number": numbers,
        "images": [[{"bytes": b"a" * (i % 7), "path": "a"}] * (i % 3) for i in numbers],
        "pairs": pa.array([[("a", str(i))] for i in numbers], pa.map_(pa.string(), pa.string())),
        "kind": pa.array([f"kind {i % 3}" for i in numbers]).dictionary_encode(),
    })  # fmt: skip
    for version in ("1.0", "2.0"):
        for packed in (True, False, ["text"]):
            for compression in ("none", "snappy", "gzip", "zstd"):
                file = tmp_path / f"{version}-{packed}-{compression}.parquet"
                parquet.write_table(
                    table, file, data_page_version=version, use_dictionary=packed,
                    compression=compression, data_page_size=512, row_group_size=3000,
                )  # fmt: skip
                shard = opener()(file)
                for row in (0, 2999, 3000, 4999):
                    assert shard.read(row) == table.slice(row, 1).to_pylist()[0]
