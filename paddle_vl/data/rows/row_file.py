"""Random access to the rows of a data set, whatever files it is in."""

import datetime
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paddle_vl.config.row_sources import RowSourceConfig
from paddle_vl.data.corpus.opener import ShardOpener, Shards
from paddle_vl.data.corpus.shard import Shard
from paddle_vl.data.corpus.table_shard import TableShard
from paddle_vl.data.jsonl import BadSampleError
from paddle_vl.data.rows.containers import files_of

_LISTS_OF_OBJECTS = ("messages", "conversations", "conversation", "prompt", "completion")


@dataclass(frozen=True)
class RowFile(Shards):
    """Rows by number. It can be pickled; files are opened when a row is read, and stay open.

    Attributes:
        folder: where relative paths in the rows start.
        shards: the data files.
    """

    folder: Path
    shards: tuple[Shard, ...]

    def __len__(self) -> int:
        return sum(shard.count for shard in self.shards)

    def row(self, number: int) -> dict[str, Any]:
        """A row, of JSON's types and bytes. Tables have no null values in objects.

        Raises:
            BadSampleError: it cannot be read; with its place.
            RuntimeError: a file cannot be read.
        """
        shard, row = self.shard_of(number)
        with self.at_place(number):
            found = dict(shard.read(row))
            return _plain(found) if isinstance(shard, TableShard) else found


def open_rows(
    path: str | Path,
    *,
    splits: Sequence[str | None] = (None,),
    subsets: Sequence[str | None] = (None,),
    opener: ShardOpener | None = None,
) -> RowFile:
    """Open a file or folder of rows. Of text, archives and streams an index is built the first
    time; no row is parsed but the first.

    Args:
        splits, subsets: of a folder, see `files_of`; the rows of all of them follow one another.
        opener: default: indexes lie beside the files, or in the user's cache folder.

    Raises:
        RuntimeError: a file is missing, damaged or of another kind, or the folder has no such split
            or subset.
        ValueError: there are no rows, or the file is an object of columns.
        BadSampleError: the first row cannot be read.
    """
    path, opener = Path(path), opener or ShardOpener()
    files = [f for subset in subsets for split in splits for f in files_of(path, split, subset)]
    rows = RowFile(path if path.is_dir() else path.parent, tuple(map(opener, files)))
    if not len(rows):
        raise ValueError(f"data file {path} has no rows: write one object per row")
    first = rows.row(0)
    if len(rows) == 1 and _is_columns(first):
        raise ValueError(
            f"data file {path} is an object of columns ({', '.join(first)}): write a list of rows, "
            'one object each (in pandas: to_json(path, orient="records", lines=True))'
        )
    return rows


def open_source(
    source: RowSourceConfig,
    *,
    fetch: Callable[[str], Path] = Path,
    opener: ShardOpener | None = None,
) -> RowFile:
    """Open the rows of a source, see `open_rows`.

    Args:
        fetch: gives the local path of the source's path, which may be a data set on a hub.
    """
    folder = fetch(source.path) / (source.folder or "")
    splits = source.split if isinstance(source.split, list) else [source.split]
    return open_rows(folder, splits=splits, subsets=source.subsets or [None], opener=opener)


def _is_columns(row: Mapping[str, Any]) -> bool:
    """Whether an object has a list of values for each key, as tables are written by columns."""
    if not all(isinstance(value, list) for value in row.values()) or {"src", "tgt"} <= row.keys():
        return False
    first = [row[key][0] for key in _LISTS_OF_OBJECTS if row.get(key)]
    is_row = "text_info" in row or any(isinstance(each, dict) for each in first)
    return not is_row and len({len(value) for value in row.values()}) == 1


def _plain(value: Any) -> Any:
    """A value of a table in JSON's types."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list):
        # pyarrow's maps.
        if value and all(isinstance(each, tuple) for each in value):
            return _plain(dict(value))
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        raise BadSampleError("bad_value", f"it contains {value}, which is no JSON number: use null")
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if value is None or isinstance(value, str | bytes | bool | int | float):
        return value
    raise BadSampleError(
        "bad_value", f"it contains a {type(value).__name__}, which JSON has not: write it as text"
    )
