"""Small files that stand for much more than they hold.

Guarantees: `data.max_line_bytes` bounds the text of a document in every container, and with it a
row group of Parquet; what a header or a footer states is checked before memory is taken; compressed
files that are cut off are refused.
"""

import resource
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import zstandard
from pyarrow import parquet

from paddle_vl.data.jsonl import BadSampleError
from tests.single_card_tests.data.corpus.corpus_files import lines, opener, write_tar

HUGE = 1 << 62
NOISE = np.random.default_rng(0).bytes(1 << 18)
# Less than any of the files below stands for.
MORE_MEMORY = 1 << 30


@pytest.fixture
def _little_memory():
    """Allocations beyond 1 GiB fail, as they would on a full machine."""
    status = Path("/proc/self/status").read_text()
    now = int(status[status.index("VmSize") :].split(None, 2)[1]) * 1024
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + MORE_MEMORY, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, limits)


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


def empty_rows(file: Path) -> None:
    parquet.write_table(pa.table({"text": pa.nulls(1 << 23)}), file, row_group_size=1 << 23)


CONTENTS: list[tuple[str, bytes | Callable[[Path], None], str]] = [
    ("sparse.tar", sparse((8 << 30) - 1), "1.txt is sparse, which is not supported"),
    ("huge.tar", member("1.txt", HUGE), "no uncompressed tar file, or a damaged one"),
    ("pax.tar", member("x", HUGE, tarfile.XHDTYPE), "no uncompressed tar file, or a damaged one"),
    ("back.tar", member("1.txt", -1024), "1.txt has the size -1024"),
    ("nested.tar", member("x", 512, tarfile.GNUTYPE_LONGNAME)[:1024] * 3000, "recursion"),
    ("middle.tar", damaged_in_the_middle, "the header at byte 1024 is damaged"),
    ("null.parquet", empty_rows, "row group 1 takes 67108864 bytes.*row_group_size"),
]


@pytest.mark.parametrize(
    ("name", "content", "reason"), CONTENTS, ids=[each[0] for each in CONTENTS]
)
def test_little_that_stands_for_much_is_refused(tmp_path, name, content, reason, request):
    file = tmp_path / name
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        content(file)
    assert file.stat().st_size < 4 << 20
    request.getfixturevalue("_little_memory")
    with pytest.raises((RuntimeError, BadSampleError), match=reason):
        opener(max_line_bytes=1 << 15)(file).read(0)


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
def test_the_line_limit_holds_for_texts_of_every_container(tmp_path, number):
    limited = opener(max_line_bytes=2048)
    file = rows_of(tmp_path, "x" * 2000, NOISE[:60_000])[number]
    assert file.stat().st_size > 60_000
    assert limited(file).read(0)["text"] == "x" * 2000
    (tmp_path / "long").mkdir()
    file = rows_of(tmp_path / "long", "é" * 1025, b"a")[number]
    with pytest.raises(BadSampleError, match="2050 bytes of text; .*at most 2048") as error:
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
