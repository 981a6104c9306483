"""Parquet files as shards. A row group is read at once, so documents are mixed a few row groups at
a time.

What a row group takes is known before it is read: a few hundred bytes can stand for any number of
values. Columns with a dictionary are read with it, and unpacked when their size is known. The
headers of the pages tell, which a reader believes: it makes room for the size that a page states,
however few bytes are stored, and for its number of values; the file's footer may say less. Headers
are structs of Thrift's compact protocol.

Source: https://parquet.apache.org/docs/file-format/data-pages/ (parquet.thrift, PageHeader) and
https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md.
"""

import mmap
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from xxhash import xxh3_64_intdigest

from paddle_vl.data.corpus.cache import CacheFolders, LocalCopies, OpenThings
from paddle_vl.data.corpus.offset_index import Offsets, SummedReader, index_of
from paddle_vl.data.corpus.table_shard import TableShard, needs_pyarrow
from paddle_vl.data.jsonl import MAX_LINE_BYTES, BadSampleError

# Row groups that a process keeps: those of two neighbouring blocks of the default eight.
_tables = OpenThings(16)
_TAIL = 8
# A row group may take so many lines of data.max_line_bytes in memory: 1 GiB.
_GROUP_LINES = 1024
# Offset, level and validity of a value, at least.
_VALUE_BYTES = 8
# Fields of PageHeader, and of the headers of data and dictionary pages in it.
_UNPACKED, _STORED, _NUM_VALUES = 2, 3, 1
_DICTIONARY = 7
_PAGE_KINDS = (5, _DICTIONARY, 8)
# Distance of the blocks of images that are summed.
_STRIDE = 1 << 19


@dataclass(frozen=True)
class ParquetShard(TableShard):
    """Rows of a table, in row groups."""

    @classmethod
    def opened(
        cls, path: Path, folders: CacheFolders, copies: LocalCopies | None, max_line_bytes: int
    ) -> "ParquetShard":
        """Open a file; its sums are found if there are none, otherwise only its footer is read.

        Raises:
            RuntimeError: it is no Parquet file, a row group is too large, or pyarrow is missing.
        """
        parquet = _parquet(path)
        try:
            metadata = parquet.read_metadata(path)
            with path.open("rb") as file:
                file.seek(-_TAIL, os.SEEK_END)
                length = int.from_bytes(file.read(4), "little")
                file.seek(-_TAIL - length, os.SEEK_END)
                content = xxh3_64_intdigest(file.read(length))
            numbers = range(metadata.num_row_groups)
            chunks = [_column_chunks(metadata, group) for group in numbers]
            size = path.stat().st_size
            for chunk in (chunk for own in chunks for chunk in own):
                if not 0 <= chunk.begin <= chunk.end <= size:
                    where = f"bytes {chunk.begin} to {chunk.end}"
                    raise ValueError(f"a column lies at {where} of {size}")
        except (OSError, ValueError, _arrow_error()) as error:
            raise RuntimeError(f"data file {path} is no Parquet file: {error}") from error
        groups = []
        for number in numbers:
            group = metadata.row_group(number)
            size = max(group.total_byte_size, group.num_rows * group.num_columns * _VALUE_BYTES)
            if group.num_rows < 0:
                raise RuntimeError(
                    f"data file {path} is damaged: a row group has {group.num_rows} rows"
                )
            if reason := _too_large(number, size, max_line_bytes):
                raise RuntimeError(f"data file {path}: {reason}")
            groups.append(group.num_rows)
        index = index_of(path, folders, lambda: _sums(path, chunks))
        spans = tuple(
            (min(each.begin for each in own), max(each.end for each in own)) for own in chunks
        )
        return cls(str(path), tuple(groups), content, index, copies, max_line_bytes, spans)

    def group(self, number: int) -> Any:
        return _tables.get((self.path, self.sums, number), lambda: self._table(number))

    def _table(self, group: int) -> tuple[Any, Callable[[], None]]:
        path = Path(self.path)
        parquet = _parquet(path)
        self.check_sums(group)
        local = path if self.copies is None else self.copies.file(path)
        try:
            metadata = parquet.read_metadata(local)
            size, packed = stated_size(Path(local), metadata, group)
            self._check_size(group, size)
            with parquet.ParquetFile(local, metadata=metadata, read_dictionary=packed) as file:
                table = file.read_row_group(group)
            if table.num_rows != self.groups[group]:
                raise ValueError(f"it has {table.num_rows} rows and states {self.groups[group]}")
            self._check_size(group, sum(map(_unpacked_bytes, table.columns)))
            return table.cast(metadata.schema.to_arrow_schema()), lambda: None
        except BadSampleError:
            raise
        except (OSError, ValueError, _arrow_error()) as error:
            raise BadSampleError(
                "unreadable_sample", f"row group {group + 1} cannot be read: {error}"
            ) from error

    def _check_size(self, group: int, size: int) -> None:
        if reason := _too_large(group, size, self.max_line_bytes):
            raise BadSampleError("line_too_long", reason)


def _too_large(group: int, size: int, max_line_bytes: int) -> str | None:
    """What is wrong with the size of a row group; None if nothing is."""
    if size <= _GROUP_LINES * max_line_bytes:
        return None
    return (
        f"row group {group + 1} takes {size} bytes in memory; with data.max_line_bytes "
        f"{max_line_bytes} at most {_GROUP_LINES * max_line_bytes} are read: write it again with "
        "fewer rows in a row group (row_group_size), or raise the setting"
    )


def _unpacked_bytes(column: Any) -> int:
    """Bytes of a column whose dictionaries are written out."""
    import pyarrow.compute
    from pyarrow import chunked_array, types

    # Its functions are made when it is imported.
    compute: Any = pyarrow.compute
    kind = column.type
    if types.is_struct(kind):
        return sum(map(_unpacked_bytes, column.flatten()))
    if types.is_map(kind):
        parts = [part for chunk in column.chunks for part in (chunk.keys, chunk.items)]
        return sum(_unpacked_bytes(chunked_array([part])) for part in parts)
    if types.is_list(kind) or types.is_large_list(kind):
        return _unpacked_bytes(compute.list_flatten(column))
    if not types.is_dictionary(kind):
        return column.nbytes
    total = 0
    for chunk in column.chunks:
        lengths = compute.binary_length(chunk.dictionary).cast("int64")
        total += chunk.indices.nbytes
        total += compute.sum(compute.take(lengths, chunk.indices)).as_py() or 0
    return total


class _Chunk(NamedTuple):
    """Bytes of a column in a row group, and whether they are images or the like."""

    begin: int
    end: int
    is_binary: bool


def _column_chunks(metadata: Any, group: int) -> list[_Chunk]:
    found = []
    for number in range(metadata.num_columns):
        column, schema = metadata.row_group(group).column(number), metadata.schema.column(number)
        begin = column.dictionary_page_offset or column.data_page_offset
        is_binary = schema.physical_type == "BYTE_ARRAY" and schema.logical_type.type == "NONE"
        found.append(_Chunk(begin, begin + column.total_compressed_size, is_binary))
    return found or [_Chunk(0, 0, False)]


def _sums(path: Path, groups: Sequence[Sequence[_Chunk]]) -> Offsets:
    """Texts and numbers are read; of large columns of bytes only some blocks."""
    with SummedReader(path) as reader:
        for chunk in (chunk for chunks in groups for chunk in chunks):
            if not chunk.is_binary or chunk.end - chunk.begin <= MAX_LINE_BYTES:
                reader.touch(chunk.begin, chunk.end)
            else:
                for at in (*range(chunk.begin, chunk.end, _STRIDE), chunk.end - 1):
                    reader.touch(at, at + 1)
        return Offsets(reader.size, reader.sums)


def _parquet(path: Path) -> Any:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise needs_pyarrow(path, "a Parquet file") from error
    return parquet


def _arrow_error() -> type[Exception]:
    """What pyarrow raises for damaged files beyond ValueError and OSError."""
    import pyarrow

    return pyarrow.ArrowException


def stated_size(path: Path, metadata: Any, group: int) -> tuple[int, list[str]]:
    """Bytes that reading a row group takes by its pages' headers, entries of dictionaries once; and
    the columns of byte strings with a dictionary.

    Args:
        metadata: pyarrow's, of the file.
        group: number of the row group.

    Raises:
        ValueError: the pages are damaged.
    """
    total, packed = 0, []
    row_group = metadata.row_group(group)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        for number in range(row_group.num_columns):
            column, described = row_group.column(number), metadata.schema.column(number)
            starts = column.dictionary_page_offset, column.data_page_offset
            header = _Header(data, min(start for start in starts if start))
            is_text = column.physical_type == "BYTE_ARRAY"
            # Values of fixed length can stand in a dictionary too.
            width = max(_VALUE_BYTES, described.length)
            end = min(header.at + column.total_compressed_size, len(data))
            while header.at < end:
                page = header.struct()
                size, stored = page.get(_UNPACKED), page.get(_STORED)
                kinds = [page[kind] for kind in _PAGE_KINDS if kind in page]
                count = kinds[0].get(_NUM_VALUES) if kinds and isinstance(kinds[0], dict) else None
                numbers = [number for number in (size, stored, count) if type(number) is int]
                if len(numbers) < 3 or min(numbers) < 0:
                    raise ValueError(f"a page of column {described.path} is damaged")
                total += numbers[0] + numbers[2] * width
                if _DICTIONARY in page and is_text:
                    packed.append(described.path)
                header.at += numbers[1]
    return total, packed


class _Header:
    """Reads structs of integers, byte strings and structs."""

    def __init__(self, data: mmap.mmap, at: int):
        self.data, self.at = data, at

    def struct(self) -> dict[int, Any]:
        """Values by the numbers of their fields."""
        found: dict[int, Any] = {}
        field = 0
        try:
            while kind := self._byte():
                field = field + (kind >> 4) if kind >> 4 else self._integer()
                found[field] = self._value(kind & 15)
        except (IndexError, RecursionError) as error:
            raise ValueError("a page's header is damaged") from error
        return found

    def _value(self, kind: int) -> Any:
        if kind in (1, 2):
            return kind == 1
        if kind in (4, 5, 6):
            return self._integer()
        if kind == 8:
            length = self._varint()
            self.at += length
            return None
        if kind == 12:
            return self.struct()
        raise ValueError(f"a page's header has a field of type {kind}")

    def _byte(self) -> int:
        self.at += 1
        return self.data[self.at - 1]

    def _varint(self) -> int:
        value = shift = 0
        while (byte := self._byte()) & 128:
            value, shift = value | (byte & 127) << shift, shift + 7
            if shift > 63:
                raise ValueError("a page's header has a number of more than 64 bits")
        return value | byte << shift

    def _integer(self) -> int:
        value = self._varint()
        return value >> 1 ^ -(value & 1)
