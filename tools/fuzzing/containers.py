"""Documents and conversations in files of every kind: damaged ones, and those that stand for more
than they hold, by lowered limits."""

import gzip
import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import zstandard
from hypothesis import strategies as st
from pyarrow import parquet

from fuzzing.mutations import as_json, damaged_bytes, in_file, json_lines, mutated
from fuzzing.parser import Parser
from fuzzing.samples import small_processor, write_image
from paddle_vl.config.data_sources import SourceConfig
from paddle_vl.data.corpus import cache as corpus_cache
from paddle_vl.data.corpus.cache import _opened_copy, opened_file
from paddle_vl.data.corpus.table_shard import _record_batch, _row_group
from paddle_vl.data.corpus.token_files import TokenFileWriter
from paddle_vl.data.jsonl import BadSampleError
from paddle_vl.families.vlm.inputs.corpus import Corpus
from paddle_vl.families.vlm.settings import VLDataConfig

_FORMATS = ("text", "image_text", "interleaved")
# Small, so that what it bounds does not hide in the memory of the libraries.
_LINE = 1 << 10
# A copy is at most so large or 200 times its file; the index has 8 bytes per line, of 16 here.
_COPY, _COPY_RATIO, _MOST_KEPT = 1 << 16, 200, 1.6
_MEBIBYTES = 400
_USER, _ANSWER = {"role": "user"}, {"role": "assistant", "content": "A cat."}
_CHAT = [_USER | {"content": "<image>What?"}, _ANSWER]
_SIZES = [0, 1, 511, 512, 1 << 16, 1 << 20, -1, -512]


def forget_files() -> None:
    """Close what readers keep open, which a new process has not."""
    for kept in (opened_file, _opened_copy, _row_group, _record_batch):
        kept.cache_clear()


def _reader(folder: Path, name: str) -> Callable[[], None]:
    """Reads every conversation of a file as a new process would."""
    processor, cache = small_processor(), folder / "cache"
    cache.mkdir()
    corpus_cache._ALWAYS_FINE = _COPY
    source = SourceConfig(path=str(folder / name), format="messages")
    data = VLDataConfig(max_length=60, allow_outside=False, max_line_bytes=_LINE, cache=str(cache))

    def parse() -> None:
        forget_files()
        for file in cache.iterdir():
            file.unlink()
        try:
            samples = Corpus.opened([source], data, processor, seed=0).samples()
            for number in range(min(len(samples), 20)):
                samples[number]
        finally:
            kept = sum(file.stat().st_size for file in cache.iterdir())
            size = (folder / name).stat().st_size
            if kept > _MOST_KEPT * max(_COPY, _COPY_RATIO * size):
                raise AssertionError(f"{kept} bytes are kept in the cache folder, of {size}")

    return parse


def _member(name: str, content: bytes, **header: Any) -> bytes:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    pax = header.pop("pax_headers", None)
    real_size = header.pop("real_size", None)
    for key, value in header.items():
        setattr(info, key, value)
    info.pax_headers = pax or {}
    if real_size is not None:
        info.type = tarfile.GNUTYPE_SPARSE
    head = info.tobuf(tarfile.PAX_FORMAT if pax else tarfile.GNU_FORMAT)
    if real_size is not None:
        head = _sparse(head, len(content), real_size)
    return head + content + bytes(-len(content) % 512)


def _sparse(head: bytes, stored: int, real_size: int) -> bytes:
    """The header of a member of which a few bytes are stored and the rest is zero."""
    changed = bytearray(head)
    changed[386:410] = b"%011o\0%011o\0" % (0, stored)
    changed[483:495] = b"%011o\0" % real_size
    changed[148:156] = b" " * 8
    changed[148:156] = b"%06o\0 " % sum(changed)
    return bytes(changed)


_PAX = [
    {"size": str(1 << 20)}, {"size": "-1"}, {"size": "x"}, {"path": "../../x.json"}, {"path": ""},
    {"GNU.sparse.map": "0,65536"}, {"GNU.sparse.size": "65536"},
    {"GNU.sparse.map": "0,5", "GNU.sparse.size": "65536", "GNU.sparse.name": "1.json"},
    {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": "65536"},
    {"hdrcharset": "BINARY"}, {"hdrcharset": "nonsense"}, {"comment": "x" * 5000},
]  # fmt: skip
_TYPES = [bytes([kind]) for kind in b"0127SLKxgXVDM\0"]


@st.composite
def _archives(draw, rows: st.SearchStrategy[Any], picture: bytes) -> bytes:
    parts = []
    for number in range(draw(st.integers(1, 3))):
        row = as_json(draw(rows)) + b" " * draw(st.sampled_from([0, 0, 0, _LINE]))
        image = picture + bytes(draw(st.sampled_from([0, 0, 0, 65 * _LINE])))
        for name, content in ((f"{number}.json", row), (f"{number}.png", image)):
            header: dict[str, Any] = {}
            odd = draw(st.sampled_from([""] * 12 + ["size", "type", "both", "pax", "sparse"]))
            if odd in ("size", "both"):
                header["size"] = draw(st.sampled_from(_SIZES))
            if odd in ("type", "both"):
                header["type"] = draw(st.sampled_from(_TYPES))
            if odd == "sparse":
                header["real_size"] = draw(st.sampled_from([1 << 12, 1 << 16]))
            if odd == "pax":
                header["pax_headers"] = draw(st.sampled_from(_PAX))
            parts.append(_member(name, content, **header))
    whole = b"".join(parts)
    ways = ["whole", "whole", "nested", "open"]
    if (way := draw(st.sampled_from(ways))) == "nested":
        whole = _member("x" * 300, b"", type=b"L")[:1024] * 20 + whole
    return whole + (bytes(1024) if way != "open" else b"")


def archives(folder: Path) -> Parser:
    """WebDataset files of conversations, with headers that lie."""
    picture = write_image(folder / "cat.png").read_bytes()
    seeds: list[dict[str, Any]] = [
        {"messages": _CHAT},
        {"messages": _CHAT, "images": ["png"]},
        {"messages": [_USER | {"content": [{"type": "image", "image": "png"}]}, _ANSWER]},
    ]
    valid = _member("1.json", as_json(seeds[1])) + _member("1.png", picture) + bytes(1024)
    (folder / "web.tar").write_bytes(valid)
    rows = st.one_of(st.sampled_from(seeds), mutated(seeds, 1))
    inputs = st.one_of(_archives(rows, picture), damaged_bytes([valid]))
    named = in_file("web.tar", inputs)
    return Parser(named, _reader(folder, "web.tar"), ("web",), _MEBIBYTES)


def _written(table: pa.Table, **settings: Any) -> bytes:
    file = io.BytesIO()
    parquet.write_table(table, file, **settings)
    return file.getvalue()


def _varint(number: int, length: int) -> bytes:
    """A number as Thrift writes it, in so many bytes or more."""
    parts = [(number << 1) >> (7 * place) & 127 for place in range(length)]
    return bytes([part | 128 for part in parts[:-1]] + parts[-1:])


@st.composite
def _tables_of(draw, rows: st.SearchStrategy[Any], picture: bytes) -> bytes:
    settings: dict[str, Any] = {
        "compression": draw(st.sampled_from(["none", "snappy", "zstd", "gzip"])),
        "use_dictionary": draw(st.booleans()),
        "data_page_version": draw(st.sampled_from(["1.0", "2.0"])),
        "store_schema": draw(st.booleans()),
    }
    count = draw(st.sampled_from([1, 1, 2, 3, 1000, 1 << 12, 1 << 18]))
    if count > 3:
        # Much in little: one long text, nothing, or many lists, for every row.
        long = "x" * draw(st.sampled_from([1, 100, 1000]))
        way = draw(st.sampled_from(["text", "null", "list", "wide"]))
        if way == "text":
            texts = pa.array([0] * count, pa.int32())
            column = pa.DictionaryArray.from_arrays(texts, pa.array([long]))
        elif way == "null":
            column = pa.nulls(count, draw(st.sampled_from([pa.null(), pa.string(), pa.int8()])))
        elif way == "list":
            column = pa.array([[None] * count])
        else:
            column = pa.array([b"\0" * (1 << 12)] * (count // 64), pa.binary(1 << 12))
        table = pa.table({"messages": column})
        settings |= {"row_group_size": count, "use_dictionary": True}
    else:
        lines = [draw(rows) for _ in range(count)]
        try:
            table = pa.Table.from_pylist([row if isinstance(row, dict) else {} for row in lines])
        except (pa.ArrowException, TypeError, ValueError, OverflowError):
            # Rows of several types are no table.
            table = pa.table({"messages": [json.dumps(lines, default=repr)]})
    try:
        content = _written(table, **settings)
    except (pa.ArrowException, ValueError):
        content = _written(pa.table({"messages": [_CHAT], "images": [[picture]]}))
    way = draw(st.sampled_from(["whole", "whole", "lie", "damaged"]))
    if way == "damaged":
        return draw(damaged_bytes([content], 3))
    if way == "lie":
        metadata = parquet.read_metadata(io.BytesIO(content))
        groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
        stated = [value for group in groups for value in (group.total_byte_size, group.num_rows)]
        for number in stated:
            length = max(1, -(-(number.bit_length() + 1) // 7))
            other = draw(st.sampled_from([number, 0, 1, 100, (1 << (7 * length - 1)) - 1]))
            at = content.rfind(_varint(number, length))
            content = content[:at] + _varint(other, length) + content[at + length :]
    return content


def tables(folder: Path) -> Parser:
    """Parquet files of conversations: few bytes for many values, footers that lie."""
    picture = write_image(folder / "cat.png").read_bytes()
    image = {"bytes": picture, "path": "cat.png"}
    shown = [{"type": "image", "image": image}, {"type": "text", "text": "What?"}]
    seeds: list[dict[str, Any]] = [
        {"messages": _CHAT, "images": [image]},
        {"messages": _CHAT, "images": [{"bytes": None, "path": "cat.png"}]},
        {"messages": _CHAT, "images": [picture], "id": 1},
        {"messages": [_USER | {"content": shown}, _ANSWER | {"content": shown[1:]}]},
    ]
    valid = _written(pa.Table.from_pylist(seeds[:1]))
    (folder / "rows.parquet").write_bytes(valid)
    rows = st.one_of(st.sampled_from(seeds), mutated(seeds, 2))
    inputs = st.one_of(_tables_of(rows, picture), damaged_bytes([valid]))
    named = in_file("rows.parquet", inputs)
    return Parser(named, _reader(folder, "rows.parquet"), ("rows",), _MEBIBYTES)


@st.composite
def _long(draw, pack: Callable[[bytes], bytes]) -> bytes:
    line = draw(st.sampled_from([b"x", b"\n", b" ", b"[", as_json({"messages": []}) + b"\n"]))
    size = draw(st.sampled_from([1 << 10, 1 << 15, 1 << 17]))
    return pack(line * (size // len(line)))


def _compressed(folder: Path, name: str, pack: Callable[[bytes], bytes]) -> Parser:
    seeds: list[dict[str, Any]] = [{"messages": [_USER | {"content": "What?"}, _ANSWER]}]
    valid = pack(as_json(seeds[0]) + b"\n")
    (folder / name).write_bytes(valid)
    lines = json_lines(seeds, 3, 1).map(pack)
    inputs = st.one_of(lines, lines, damaged_bytes([valid]), _long(pack))
    named = in_file(name, inputs)
    return Parser(named, _reader(folder, name), ("rows",), _MEBIBYTES)


def zst_files(folder: Path) -> Parser:
    """JSONL in Zstandard files, some of which unpack to more."""
    return _compressed(folder, "rows.jsonl.zst", zstandard.compress)


def gz_files(folder: Path) -> Parser:
    """JSONL in gzip files, some of which unpack to more."""
    return _compressed(folder, "rows.jsonl.gz", lambda content: gzip.compress(content, 1))


def _read_all(processor: Any, file: Path, kinds: tuple[str, ...]) -> None:
    """Read every document of a file; at least one must be usable in some format."""
    refused: list[BadSampleError] = []
    num_good = 0
    for kind in kinds:
        source = SourceConfig(path=str(file), format=kind)  # type: ignore[arg-type]
        data = VLDataConfig(max_length=60, allow_outside=False, on_bad_sample="skip")
        samples = Corpus.opened([source], data, processor, seed=0).samples()
        for number in range(min(len(samples), 20)):
            try:
                samples[number]
                num_good += 1
            except BadSampleError as error:
                refused.append(error)
    if refused and not num_good:
        raise refused[0]


def documents(folder: Path) -> Parser:
    """JSONL of texts, captions and pages."""
    write_image(folder / "cat.png")
    page = {"texts": ["A cat", None, "on a mat."], "images": [None, "cat.png", None]}
    info = [{"image_name": "cat.png", "matched_text_index": 1}]
    seeds: list[dict[str, Any]] = [
        {"text": "A cat on a mat."},
        {"text": ["A cat", "on a mat."], "url": "x"},
        {"image": "cat.png", "text": "A cat."},
        {"image": {"path": "cat.png", "bytes": None}, "text": "A cat."},
        page,
        {"text_list": ["A cat", "on a mat."], "image_info": info},
    ]
    file = folder / "rows.jsonl"
    file.write_bytes(as_json(seeds[2]))
    processor = small_processor()
    inputs = in_file("rows.jsonl", json_lines(seeds, 1))
    return Parser(inputs, lambda: _read_all(processor, file, _FORMATS), ("rows",))


def corpus_shards(folder: Path) -> Parser:
    """Token files, and WebDataset files of captions."""
    picture = write_image(folder / "cat.png").read_bytes()
    with TokenFileWriter(folder / "tokens", 300) as writer:
        writer.add(np.arange(20), np.array([12, 8]))
    members = [("1.png", picture), ("1.txt", b"A cat."), ("2.png", picture)]
    members.append(("2.json", as_json({"image": "png", "text": "A cat."})))
    archive = b"".join(_member(name, content) for name, content in members)
    (folder / "web.tar").write_bytes(archive + bytes(1024))
    valid = {name: (folder / name).read_bytes() for name in ("tokens.idx", "web.tar")}
    processor = small_processor()

    def parse() -> None:
        _read_all(processor, folder / "tokens.idx", ("text",))
        _read_all(processor, folder / "web.tar", ("image_text",))

    one = [
        damaged_bytes([content]).map(lambda changed, name=name: {**valid, name: changed})
        for name, content in valid.items()
    ]
    return Parser(st.one_of(one), parse, ("tokens", "web"))
