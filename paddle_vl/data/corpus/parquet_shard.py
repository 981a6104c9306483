"""Parquet files as shards. A row group is read at once, so documents are mixed a few row groups at
a time."""

import os
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

from xxhash import xxh3_64_intdigest

from paddle_vl.data.corpus.local_copies import LocalCopies
from paddle_vl.data.corpus.shard import OpenThings, Row
from paddle_vl.data.jsonl import BadSampleError

# Row groups that a process keeps: those of two neighbouring blocks of the default eight.
_tables = OpenThings(16)
_TAIL = 8


@dataclass(frozen=True)
class ParquetShard:
    """See `paddle_vl.data.corpus.shard.Shard`.

    Attributes:
        groups: rows of each row group.
        copies: gives the local copy of the file; None to read `path` itself.
    """

    path: str
    groups: tuple[int, ...]
    content: int
    copies: LocalCopies | None

    @classmethod
    def opened(cls, path: Path, copies: LocalCopies | None) -> "ParquetShard":
        """Open a file; only its footer is read.

        Raises:
            RuntimeError: it is no Parquet file, or pyarrow is missing.
        """
        parquet = _parquet(path)
        try:
            metadata = parquet.read_metadata(path)
            with path.open("rb") as file:
                file.seek(-_TAIL, os.SEEK_END)
                length = int.from_bytes(file.read(4), "little")
                file.seek(-_TAIL - length, os.SEEK_END)
                content = xxh3_64_intdigest(file.read(length))
        except (OSError, ValueError, _arrow_error()) as error:
            raise RuntimeError(f"data file {path} is no Parquet file: {error}") from error
        groups = tuple(
            metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)
        )
        return cls(str(path), groups, content, copies)

    @cached_property
    def _starts(self) -> list[int]:
        return [0, *accumulate(self.groups)]

    @property
    def count(self) -> int:
        return self._starts[-1]

    def read(self, row: int) -> Row:
        group = bisect_right(self._starts, row) - 1
        table = _tables.get((self.path, group), lambda: self._table(group))
        return table.slice(row - self._starts[group], 1).to_pylist()[0]

    def place(self, row: int) -> str:
        return f"{self.path}:row {row + 1}"

    def _table(self, group: int) -> tuple[Any, Callable[[], None]]:
        path = Path(self.path)
        parquet = _parquet(path)
        local = path if self.copies is None else self.copies.file(path)
        try:
            with parquet.ParquetFile(local) as file:
                return file.read_row_group(group), lambda: None
        except (OSError, ValueError, _arrow_error()) as error:
            raise BadSampleError(
                "unreadable_sample", f"row group {group + 1} cannot be read: {error}"
            ) from error


def _parquet(path: Path) -> Any:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise RuntimeError(
            f"{path} is a Parquet file, which needs the package pyarrow: pip install "
            "'paddle-vl[corpus]'"
        ) from error
    return parquet


def _arrow_error() -> type[Exception]:
    """What pyarrow raises for damaged files beyond ValueError and OSError."""
    import pyarrow

    return pyarrow.ArrowException
