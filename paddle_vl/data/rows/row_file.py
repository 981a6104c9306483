"""Random access to the rows of a data set, whatever files it is in."""

import datetime
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paddle_vl.config.row_sources import RowSourceConfig
from paddle_vl.data.corpus.opener import ShardOpener, Shards, open_shards
from paddle_vl.data.corpus.shard import Shard
from paddle_vl.data.corpus.table_shard import TableShard
from paddle_vl.data.jsonl import BadSampleError
from paddle_vl.data.rows.containers import files_of

# Names the format of a row; raises a BadSampleError if it has none. It can be pickled.
Recognised = Callable[[Mapping[str, Any]], str]
_LISTS_OF_OBJECTS = ("messages", "conversations", "conversation", "prompt", "completion")


@dataclass(frozen=True)
class RowFile(Shards):
    """Rows by number. It can be pickled; files are opened when a row is read, and stay open.

    Attributes:
        folder: where relative paths in the rows start.
        shards: the data files.
        recognised: names the format of a row; None to not compare formats.
        format: that of the first row, which all others must have.
    """

    folder: Path
    shards: tuple[Shard, ...]
    recognised: Recognised | None = None
    format: str | None = None

    def __len__(self) -> int:
        return sum(shard.count for shard in self.shards)

    @property
    def groups(self) -> tuple[int, ...]:
        """Rows of each part of the files that is read at once, see `DocumentOrder`."""
        return tuple(count for shard in self.shards for count in shard.groups)

    def row(self, number: int) -> dict[str, Any]:
        """A row, of JSON's types and bytes. Tables have no null values in objects.

        Raises:
            BadSampleError: it cannot be read, or has another format than the first row; with its
                place.
            RuntimeError: a file was changed, or cannot be read.
        """
        shard, row = self.shard_of(number)
        with self.at_place(number):
            found = dict(shard.read(row))
            if isinstance(shard, TableShard):
                found = _plain(found)
            if self.recognised and self.format not in (None, own := self.recognised(found)):
                raise BadSampleError(
                    "mixed_formats",
                    f"row {number + 1} has another format ({own}) than row 1 ({self.format}): put "
                    "rows of one format into a file, and name the files as sources",
                )
        return found


def open_rows(
    path: str | Path,
    *,
    splits: Sequence[str | None] = (None,),
    subsets: Sequence[str | None] = (None,),
    opener: ShardOpener | None = None,
    recognised: Recognised | None = None,
    num_processes: int = 1,
) -> RowFile:
    """Open a file or folder of rows. Of text, archives and streams an index is built the first
    time; no row is parsed but the first.

    Args:
        splits, subsets: of a folder, see `files_of`; the rows of all of them follow one another.
        opener: default: indexes lie beside the files, or in the user's cache folder.
        recognised: names the format of a row, which all rows must have.
        num_processes: that build indexes.

    Raises:
        RuntimeError: a file is missing, damaged or of another kind, or the folder has no such split
            or subset.
        ValueError: there are no rows, or the file is an object of columns.
        BadSampleError: the first row cannot be read.
    """
    path = Path(path)
    files = [
        str(f) for subset in subsets for split in splits for f in files_of(path, split, subset)
    ]
    shards = tuple(open_shards(files, opener or ShardOpener(), num_processes))
    rows = RowFile(path if path.is_dir() else path.parent, shards)
    if not len(rows):
        raise ValueError(f"data file {path} has no rows: write one object per row")
    first = rows.row(0)
    if len(rows) == 1 and _is_columns(first):
        raise ValueError(
            f"data file {path} is an object of columns ({', '.join(first)}): write a list of rows, "
            'one object each (in pandas: to_json(path, orient="records", lines=True))'
        )
    if recognised is None:
        return rows
    with rows.at_place(0):
        return replace(rows, recognised=recognised, format=recognised(first))


def open_source(
    source: RowSourceConfig,
    *,
    fetch: Callable[[str], Path] = Path,
    opener: ShardOpener | None = None,
    recognised: Recognised | None = None,
) -> RowFile:
    """Open the rows of a source, see `open_rows`.

    Args:
        fetch: gives the local path of the source's path, which may be a data set on a hub.
    """
    splits = (
        [source.split] if source.split is None or isinstance(source.split, str) else source.split
    )
    return open_rows(
        fetch(source.path) / (source.folder or ""),
        splits=splits,
        subsets=source.subsets or [None],
        opener=opener,
        recognised=recognised,
    )


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
