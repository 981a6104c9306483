"""Tables as shards: Parquet files, whose row groups are read at once, so that documents are mixed a
few row groups at a time, and Arrow IPC streams, whose record batches are mapped.

A few hundred bytes of Parquet can stand for any number of values. What a row group takes by the
footer is checked when the file is opened; columns of texts with a dictionary are read with it, and
written out when their size is known.

A table's metadata may name features of Hugging Face's `datasets` (`{"info": {"features": ...}}`
under `huggingface`). Two of them store something else than they mean: a `Sequence` of a struct is a
struct of lists in older files, and `Json` is JSON text.
"""

import json
import os
from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from xxhash import xxh3_64_intdigest

from paddle_vl.data.corpus.cache import Cache, file_state, first_bytes
from paddle_vl.data.corpus.shard import BINARY_PER_TEXT, Row, Shard, check_row_size
from paddle_vl.data.jsonl import BadSampleError, parse_value

_METADATA = b"huggingface"
_LISTS = ("Sequence", "List", "LargeList")
# Offset, level and validity of a value, at least.
_VALUE_BYTES = 8
# Types of pyarrow that older versions do not have, and those with the same values.
_VIEWS = {"string_view": "large_string", "binary_view": "large_binary"}
# Length and magic at the end of a Parquet file.
_TAIL = 8
# A row group may take so many lines of data.max_line_bytes in memory: 1 GiB.
_GROUP_LINES = 1024
# Begins a file with a footer, which knows its batches but not whether they are compressed.
_FILE = b"ARROW1"
# Marks the end of an Arrow stream; only a file that is cut off has none.
_END = b"\xff\xff\xff\xff\0\0\0\0"


class TableShard(Shard):
    """Rows of a table, in groups.

    Attributes:
        has_views: whether values may lie anywhere in a group, or several in the same bytes.
    """

    has_views = False

    # Groups are kept by it, and there may be many.
    def __hash__(self) -> int:
        return hash((self.path, self.state))

    @abstractmethod
    def group(self, number: int) -> Any:
        """The rows of a group: pyarrow's table or record batch.

        Raises:
            BadSampleError: it cannot be read.
        """

    @cached_property
    def _starts(self) -> list[int]:
        return [0, *accumulate(self.groups)]

    @property
    def local(self) -> str:
        """Path of the file to read."""
        return self.path if self.copies is None else self.copies.copy_of(self.path, self.state)

    def read(self, row: int) -> Row:
        group = bisect_right(self._starts, row) - 1
        found = self.group(group).slice(row - self._starts[group], 1)
        # Values are counted where these few bytes may be too many.
        size = sum(map(unpacked_bytes, found.columns)) if self.has_views else found.nbytes
        if size > (1 + BINARY_PER_TEXT) * self.max_line_bytes:
            check_row_size(0, size, self.max_line_bytes)
        # Tables fill keys that a row does not have with null.
        values = _without_nulls(found.to_pylist()[0])
        if size > self.max_line_bytes:
            text = _text_bytes(values)
            check_row_size(text, size - text, self.max_line_bytes)
        metadata = (found.schema.metadata or {}).get(_METADATA)
        return values if metadata is None else _by_feature(values, _features(metadata))

    def place(self, row: int) -> str:
        return f"{self.path}:row {row + 1}"


class ParquetShard(TableShard):
    """Rows of a Parquet file, in row groups."""

    @classmethod
    def opened(
        cls, path: Path, cache: Cache, copies: Cache | None, max_line_bytes: int
    ) -> "ParquetShard":
        """See `Shard.opened`; only the footer is read, and too large row groups are refused."""
        state = file_state(path)
        with reading_table(path, f"data file {path} is no Parquet file", RuntimeError) as arrow:
            metadata = arrow.parquet.read_metadata(path)
            with path.open("rb") as file:
                file.seek(-_TAIL, os.SEEK_END)
                length = int.from_bytes(file.read(4), "little")
                file.seek(-_TAIL - length, os.SEEK_END)
                content = xxh3_64_intdigest(file.read(length))
            groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
            if any(group.num_rows < 0 for group in groups):
                raise ValueError("a row group has fewer than no rows")
        for number, group in enumerate(groups):
            size = max(group.total_byte_size, _VALUE_BYTES * _num_values(group))
            if reason := _too_large(number, size, max_line_bytes):
                raise RuntimeError(f"data file {path}: {reason}")
        counts = tuple(group.num_rows for group in groups)
        return cls(str(path), state, counts, content, copies, max_line_bytes)

    def group(self, number: int) -> Any:
        return _row_group(self, number)


@dataclass(frozen=True)
class ArrowShard(TableShard):
    """Rows of a stream, in record batches: data sets saved by Hugging Face's `datasets`, and files
    of its cache.

    Attributes:
        begins: first byte of each batch.
    """

    begins: tuple[int, ...]
    has_views: bool

    __hash__ = TableShard.__hash__

    @classmethod
    def opened(
        cls, path: Path, cache: Cache, copies: Cache | None, max_line_bytes: int
    ) -> "ArrowShard":
        """See `Shard.opened`; only the headers of its batches are read."""
        if first_bytes(path, len(_FILE)) == _FILE:
            raise RuntimeError(
                f"data file {path} is an Arrow file (Feather), and streams are read: write it "
                "again as one (polars: write_ipc_stream, pyarrow: ipc.new_stream), or as Parquet"
            )
        state, counts, begins = file_state(path), [], []
        refusal = f"data file {path} is no whole Arrow stream"
        with (
            reading_table(path, refusal, RuntimeError) as arrow,
            arrow.memory_map(str(path)) as file,
        ):
            # It checks that there is a schema, which `read_schema` does not.
            schema = arrow.ipc.open_stream(file).schema
            begin = file.tell()
            while (message := _next(arrow, file)) is not None:
                if message.type != "record batch":
                    raise ValueError(f"it has a {message.type}; cast categorical columns to texts")
                batch = arrow.ipc.read_record_batch(message, schema)
                batch.validate()
                if batch.get_total_buffer_size() > file.tell() - begin:
                    raise ValueError("its batches are compressed: save it without compression")
                counts.append(batch.num_rows)
                begins.append(begin)
                begin = file.tell()
            file.seek(begin)
            if file.read(len(_END)) != _END:
                raise ValueError("it ends early")
        content = xxh3_64_intdigest(str((state.size, state.blocks, counts)).encode())
        groups = tuple(counts)
        has_views = "_view" in str(schema.types)
        starts = tuple(begins)
        return cls(str(path), state, groups, content, copies, max_line_bytes, starts, has_views)

    def group(self, number: int) -> Any:
        return _record_batch(self, number)


# Row groups that a process keeps: those of two neighbouring blocks of the default eight.
@lru_cache(maxsize=16)
def _row_group(shard: ParquetShard, number: int) -> Any:
    local = Path(shard.local)
    with reading_table(shard.path, f"row group {number + 1} cannot be read", _bad) as arrow:
        metadata = arrow.parquet.read_metadata(local)
        columns = map(metadata.row_group(number).column, range(metadata.num_columns))
        packed = [
            column.path_in_schema
            for column in columns
            if column.has_dictionary_page and column.physical_type == "BYTE_ARRAY"
        ]
        with arrow.parquet.ParquetFile(local, metadata=metadata, read_dictionary=packed) as file:
            table = file.read_row_group(number)
        if table.num_rows != shard.groups[number]:
            raise ValueError(f"it has {table.num_rows} rows and states {shard.groups[number]}")
        size = sum(map(unpacked_bytes, table.columns))
        if reason := _too_large(number, size, shard.max_line_bytes):
            raise BadSampleError("line_too_long", reason)
        schema = metadata.schema.to_arrow_schema()
        fields = [field.with_type(_plain_type(field.type)) for field in schema]
        return table.cast(arrow.schema(fields, schema.metadata))


def _num_values(group: Any) -> int:
    rows = group.num_rows
    return sum(max(rows, group.column(i).num_values) for i in range(group.num_columns))


def _too_large(group: int, size: int, max_line_bytes: int) -> str | None:
    """What is wrong with the size of a row group; None if nothing is."""
    most = _GROUP_LINES * max_line_bytes
    if size <= most:
        return None
    return (
        f"row group {group + 1} takes {size} bytes in memory; with data.max_line_bytes "
        f"{max_line_bytes} at most {most} are read: write it again with fewer rows in a row group "
        "(row_group_size), or raise the setting"
    )


def unpacked_bytes(column: Any) -> int:
    """Bytes of pyarrow's column, chunked or not, if dictionaries and views were written out."""
    import pyarrow.compute
    from pyarrow import chunked_array, types

    # Its functions are made when it is imported.
    compute: Any = pyarrow.compute
    kind, chunks = column.type, getattr(column, "chunks", [column])
    if types.is_struct(kind):
        return sum(map(unpacked_bytes, column.flatten()))
    if types.is_map(kind):
        parts = [part for chunk in chunks for part in (chunk.keys, chunk.items)]
        return sum(unpacked_bytes(chunked_array([part])) for part in parts)
    if hasattr(kind, "value_field"):
        return unpacked_bytes(compute.list_flatten(column))
    if str(kind) in _VIEWS:
        return sum(map(_bytes_of_views, chunks))
    if not types.is_dictionary(kind):
        return column.nbytes
    total = 0
    for chunk in chunks:
        lengths = compute.binary_length(chunk.dictionary).cast("int64")
        total += chunk.indices.nbytes
        total += compute.sum(compute.take(lengths, chunk.indices)).as_py() or 0
    return total


def _bytes_of_views(column: Any) -> int:
    # Views of 16 bytes begin with the length.
    lengths = np.frombuffer(column.buffers()[1] or b"", "<i4")[::4]
    own = lengths[column.offset : column.offset + len(column)]
    return int(own[np.asarray(column.is_valid())].sum(dtype=np.int64)) + 16 * len(column)


def _plain_type(kind: Any) -> Any:
    """pyarrow's type without dictionaries and views (polars has both), to which it cannot cast
    columns that were read with their dictionaries."""
    import pyarrow
    from pyarrow import types

    if types.is_dictionary(kind):
        return _plain_type(kind.value_type)
    if (name := str(kind)) in _VIEWS:
        return getattr(pyarrow, _VIEWS[name])()
    if types.is_struct(kind):
        fields = [kind.field(number) for number in range(kind.num_fields)]
        return pyarrow.struct([field.with_type(_plain_type(field.type)) for field in fields])
    if types.is_map(kind):
        return pyarrow.map_(_plain_type(kind.key_type), _plain_type(kind.item_type))
    if hasattr(kind, "value_field"):
        inner = kind.value_field.with_type(_plain_type(kind.value_type))
        if types.is_fixed_size_list(kind):
            return pyarrow.list_(inner, kind.list_size)
        # pyarrow 26 casts a view to a list with offsets of the same width wrongly.
        is_large_view = name.startswith("large_list_view")
        return pyarrow.list_(inner) if is_large_view else pyarrow.large_list(inner)
    return kind


# They are mapped, so that they take no memory.
@lru_cache(maxsize=1024)
def _record_batch(shard: ArrowShard, number: int) -> Any:
    local = shard.local
    with (
        reading_table(shard.path, f"record batch {number + 1} cannot be read", _bad) as arrow,
        arrow.memory_map(local) as file,
    ):
        schema = arrow.ipc.open_stream(file).schema
        file.seek(shard.begins[number])
        batch = arrow.ipc.read_record_batch(arrow.ipc.read_message(file), schema)
        # Offsets that lie would be read beyond the end of the file.
        batch.validate(full=True)
        return batch


def _bad(reason: str) -> BadSampleError:
    return BadSampleError("unreadable_sample", reason)


def _next(arrow: Any, file: Any) -> Any:
    try:
        return arrow.ipc.read_message(file)
    except EOFError:
        return None


@contextmanager
def reading_table(
    path: str | Path, refusal: str, error_of: Callable[[str], Exception]
) -> Iterator[Any]:
    """pyarrow, whose errors become those of the refusal.

    Raises:
        RuntimeError: it is missing.
    """
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError as error:
        raise RuntimeError(
            f"{path} is a table, which needs the package pyarrow: pip install 'paddle-vl[corpus]'"
        ) from error
    try:
        yield pyarrow
    except BadSampleError:
        raise
    except (OSError, EOFError, ValueError, pyarrow.ArrowException) as error:
        raise error_of(f"{refusal} ({error}): fetch or save it again") from error


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [*map(_without_nulls, value)] if isinstance(value, list) else value


def _text_bytes(value: Any) -> int:
    if isinstance(value, str):
        return len(value.encode())
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return 0
    return sum(map(_text_bytes, value))


@lru_cache(maxsize=64)
def _features(metadata: bytes) -> Mapping[str, Any]:
    found: Any = json.loads(metadata)
    for key in ("info", "features"):
        found = found.get(key) if isinstance(found, dict) else None
    return found if isinstance(found, dict) else {}


def _by_feature(value: Any, feature: Any) -> Any:
    """A value as its feature means it."""
    kind = feature.get("_type") if isinstance(feature, dict) else None
    if kind == "Json" and isinstance(value, str):
        try:
            return parse_value(value)
        except ValueError as error:
            raise BadSampleError(
                "broken_json", f"a column of type Json has no JSON ({error}): write it again"
            ) from error
    if isinstance(feature, list) or kind in _LISTS:
        inner = feature[0] if isinstance(feature, list) else feature.get("feature")
        if isinstance(value, dict):
            value = _of_columns(value)
        return [_by_feature(each, inner) for each in value] if isinstance(value, list) else value
    if isinstance(feature, dict) and kind is None and isinstance(value, dict):
        return {key: _by_feature(each, feature.get(key)) for key, each in value.items()}
    return value


def _of_columns(columns: Mapping[str, list[Any]]) -> list[dict[str, Any]]:
    lengths = {key: len(column) for key, column in columns.items()}
    if len(set(lengths.values())) > 1:
        raise BadSampleError(
            "broken_row",
            f"the lists of a Sequence have unequal lengths ({lengths}): write it again",
        )
    rows = zip(*columns.values(), strict=True)
    return [_without_nulls(dict(zip(columns, row, strict=True))) for row in rows]
