"""Columns of Parquet files, a block of rows at a time; the blocks used last stay in memory."""

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from paddle_vl.data.corpus.table_shard import reading_table
from paddle_vl.data.jsonl import BadSampleError

# Bytes of blocks that a dataset keeps in a process, and of one block; a row group that lerobot
# writes, an episode, is one block if it has fewer.
_MOST_BYTES = 256 << 20
_BLOCK_BYTES = 32 << 20
_MOST_OPEN = 16
# Of a column chunk that is read a block at a time.
_BUFFER_BYTES = 1 << 20

Columns = tuple[str, ...]


class _File(NamedTuple):
    """An open file, and the first row of every row group and of the end."""

    opened: Any
    starts: list[int]

    def rows_at_once(self, group: int, columns: Columns) -> int:
        """Rows of a block of these columns."""
        metadata = self.opened.metadata.row_group(group)
        size = 0
        for number in range(metadata.num_columns):
            chunk = metadata.column(number)
            if any(chunk.path_in_schema == c or chunk.path_in_schema[: len(c) + 1] == f"{c}."
                   for c in columns):  # fmt: skip
                size += chunk.total_uncompressed_size
        blocks = -(-size // _BLOCK_BYTES)
        return max(1, metadata.num_rows // max(1, blocks))


class ParquetRows:
    """The Parquet files of a dataset. A pickled one has no file open and no block.

    Attributes:
        root: folder that names of files start from.
    """

    def __init__(self, root: Path):
        self.root = root
        self._clear()

    def __getstate__(self) -> Path:
        return self.root

    def __setstate__(self, root: Path) -> None:
        self.root = root
        self._clear()

    def read(self, file: str, columns: Columns, first: int, count: int) -> Any:
        """Some rows of some columns, as pyarrow's table.

        Columns that are read together share their blocks.

        Raises:
            BadSampleError: there is no such file, or it is damaged or has fewer rows.
        """
        pieces = []
        with reading_table(self.root / file, f"{file} cannot be read", _bad) as arrow:
            found = self._file(arrow, file)
            if first + count > found.starts[-1]:
                raise BadSampleError(
                    "missing_rows",
                    f"{file} has {found.starts[-1]} rows, and rows {first} to {first + count} are "
                    "needed: fetch the dataset again",
                )
            row = first
            while row < first + count:
                group = bisect_right(found.starts, row) - 1
                at_once = found.rows_at_once(group, columns)
                number, offset = divmod(row - found.starts[group], at_once)
                block = self._block(found, (file, group, columns, number), at_once)
                pieces.append(block.slice(offset, first + count - row))
                row += len(pieces[-1])
            return arrow.Table.from_batches(pieces)

    def _clear(self) -> None:
        self._files: OrderedDict[str, _File] = OrderedDict()
        self._blocks: OrderedDict[Any, Any] = OrderedDict()
        self._bytes = 0

    def _file(self, arrow: Any, file: str) -> _File:
        if file not in self._files:
            if not (self.root / file).is_file():
                raise BadSampleError("missing_file", f"there is no file {self.root / file}")
            opened = arrow.parquet.ParquetFile(self.root / file, buffer_size=_BUFFER_BYTES)
            groups = map(opened.metadata.row_group, range(opened.metadata.num_row_groups))
            self._files[file] = _File(opened, [0, *accumulate(g.num_rows for g in groups)])
            if len(self._files) > _MOST_OPEN:
                self._files.popitem(last=False)
        self._files.move_to_end(file)
        return self._files[file]

    def _block(self, file: _File, key: tuple[str, int, Columns, int], at_once: int) -> Any:
        """A block of a row group; those before it are read on the way, and kept too."""
        _, group, columns, number = key
        if key not in self._blocks:
            batches = file.opened.iter_batches(at_once, [group], list(columns))
            for place, block in enumerate(islice(batches, number + 1)):
                self._bytes -= getattr(self._blocks.pop((*key[:3], place), None), "nbytes", 0)
                self._blocks[(*key[:3], place)] = block
                self._bytes += block.nbytes
                while self._bytes > _MOST_BYTES and len(self._blocks) > 1:
                    self._bytes -= self._blocks.popitem(last=False)[1].nbytes
        self._blocks.move_to_end(key)
        return self._blocks[key]


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
