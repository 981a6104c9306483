"""Columns of Parquet files, a block of rows at a time; the blocks used last stay in memory."""

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from paddle_vl.data.corpus.table_shard import reading_table
from paddle_vl.data.jsonl import BadSampleError

# Bytes of blocks that a process keeps, and of one block; a row group that lerobot writes, an
# episode, is one block if it has fewer.
_MOST_BYTES = 256 << 20
_BLOCK_BYTES = 32 << 20
_MOST_OPEN = 16
# Of a column chunk that is read a block at a time.
_BUFFER_BYTES = 1 << 20

Columns = tuple[str, ...]


class FileVersion(NamedTuple):
    """A file as it is now; one that is written anew differs."""

    path: Path
    changed_ns: int
    size: int


def version_of(path: Path) -> FileVersion:
    """
    Raises:
        BadSampleError: there is no such file.
    """
    if not path.is_file():
        raise BadSampleError("missing_file", f"there is no file {path}")
    found = path.stat()
    return FileVersion(path, found.st_mtime_ns, found.st_size)


class _File:
    """An open file.

    Attributes:
        names: of its columns.
        starts: first row of every row group, and of the end.
    """

    def __init__(self, opened: Any):
        self.opened, groups = opened, range(opened.metadata.num_row_groups)
        self.names = {*opened.schema_arrow.names}
        counts = (opened.metadata.row_group(group).num_rows for group in groups)
        self.starts = [0, *accumulate(counts)]
        # A method would be kept for all files.
        self.rows_at_once = lru_cache(maxsize=None)(self._rows_at_once)

    def _rows_at_once(self, group: int, columns: Columns) -> int:
        """Rows of a block of these columns."""
        metadata = self.opened.metadata.row_group(group)
        chunks = map(metadata.column, range(metadata.num_columns))
        # Parts of a column have its name and their own.
        inside = tuple(f"{name}." for name in columns)
        size = sum(
            chunk.total_uncompressed_size
            for chunk in chunks
            if chunk.path_in_schema in columns or chunk.path_in_schema.startswith(inside)
        )
        return max(1, metadata.num_rows // max(1, -(-size // _BLOCK_BYTES)))


class _Block(NamedTuple):
    """The rows `number * at_once` to `(number + 1) * at_once` of a row group."""

    version: FileVersion
    group: int
    columns: Columns
    at_once: int
    number: int


class _Blocks:
    """The blocks used last, at most `_MOST_BYTES` of them."""

    def __init__(self) -> None:
        self.kept: OrderedDict[_Block, Any] = OrderedDict()
        self.size = 0

    def add(self, key: _Block, batch: Any) -> None:
        if key not in self.kept:
            self.kept[key] = batch
            self.size += batch.nbytes
        self.kept.move_to_end(key)
        while self.size > _MOST_BYTES and len(self.kept) > 1:
            self.size -= self.kept.popitem(last=False)[1].nbytes


# Of all datasets of this process, those used last at the end.
_files: OrderedDict[FileVersion, _File] = OrderedDict()
_blocks = _Blocks()


def read_rows(path: Path, columns: Columns, first: int, count: int) -> Any:
    """Some rows of some columns of a Parquet file, as pyarrow's table.

    Columns that are read together share their blocks.

    Raises:
        BadSampleError: there is no such file, or it is damaged or has fewer rows; names the file.
    """
    pieces = []
    with reading_table(path, f"{path} cannot be read", _bad) as arrow:
        version = version_of(path)
        file = _opened(arrow, version)
        if first + count > file.starts[-1]:
            raise BadSampleError(
                "missing_rows",
                f"{path} has {file.starts[-1]} rows, and rows {first} to {first + count} are "
                "needed: fetch the dataset again",
            )
        if absent := [name for name in columns if name not in file.names]:
            raise BadSampleError(
                "missing_column",
                f"{path} has no column {', '.join(absent)}, which info.json lists: fetch or "
                "convert the dataset again",
            )
        row = first
        while row < first + count:
            group = bisect_right(file.starts, row) - 1
            at_once = file.rows_at_once(group, columns)
            number, offset = divmod(row - file.starts[group], at_once)
            block = _block(file, _Block(version, group, columns, at_once, number))
            pieces.append(block.slice(offset, first + count - row))
            row += len(pieces[-1])
        return arrow.Table.from_batches(pieces)


def _opened(arrow: Any, version: FileVersion) -> _File:
    if version not in _files:
        # Buffered ahead, a column chunk would be kept whole as long as the file is open.
        opened = arrow.parquet.ParquetFile(
            version.path, buffer_size=_BUFFER_BYTES, pre_buffer=False
        )
        _files[version] = _File(opened)
        if len(_files) > _MOST_OPEN:
            _files.popitem(last=False)[1].opened.close()
    _files.move_to_end(version)
    return _files[version]


def _block(file: _File, wanted: _Block) -> Any:
    """A block of a row group; those before it are read on the way, and kept too."""
    if wanted not in _blocks.kept:
        columns = list(wanted.columns)
        batches = file.opened.iter_batches(wanted.at_once, [wanted.group], columns)
        for number, batch in enumerate(islice(batches, wanted.number + 1)):
            _blocks.add(wanted._replace(number=number), batch)
    _blocks.kept.move_to_end(wanted)
    return _blocks.kept[wanted]


def _bad(reason: str) -> BadSampleError:
    return BadSampleError("unreadable_sample", reason)


def as_array(column: Any, shape: Sequence[int]) -> np.ndarray:
    """A column of numbers as `[rows, *shape]`, `[rows]` for shape (1,); float64 as float32, as in
    lerobot.

    Raises:
        BadSampleError: values have another shape.
    """
    rows, values = len(column), column.combine_chunks()
    while hasattr(values, "flatten") and hasattr(values.type, "value_type"):
        values = values.flatten()
    array = values.to_numpy(zero_copy_only=False)
    if array.dtype == np.float64:
        array = array.astype(np.float32)
    wanted = (rows,) if tuple(shape) == (1,) else (rows, *shape)
    if array.size != np.prod(wanted, dtype=np.int64):
        raise BadSampleError(
            "bad_shape", f"{rows} rows have {array.size} values; info.json says {list(shape)} each"
        )
    return array.reshape(wanted)
