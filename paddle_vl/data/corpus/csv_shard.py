"""Tables of text as shards: a header and records, whose quoted cells may have line breaks.

Every cell is text: `NA` is a word and `1` no number. Cells of media columns are a path, or a list
or object in JSON; empty ones are absent.
"""

import csv
import io
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import numpy as np
from xxhash import xxh3_64

from paddle_vl.data.corpus.offset_index import Offsets
from paddle_vl.data.corpus.shard import Row, TextShard
from paddle_vl.data.jsonl import BadSampleError, parse_value

_MEDIA = ("image", "images", "video", "videos")
# The package's own limit of a cell is 128 KiB; the limit here is data.max_line_bytes.
_LONGEST_CELL = (1 << 31) - 1


class CsvShard(TextShard):
    """Records with cells between commas."""

    delimiter: ClassVar[str] = ","

    @classmethod
    def offsets(cls, path: Path) -> Offsets:
        csv.field_size_limit(_LONGEST_CELL)
        hashed, starts, begin, at = xxh3_64(), [], 0, 0
        with path.open("rb") as file:

            def lines() -> Iterator[str]:
                nonlocal at
                for line in file:
                    at += len(line)
                    hashed.update(line)
                    # What the parser looks for is the same in UTF-8.
                    yield line.decode("latin-1")

            records = csv.reader(lines(), delimiter=cls.delimiter, strict=True)
            try:
                for cells in records:
                    if cells:
                        starts.append(begin)
                    begin = at
            except csv.Error as error:
                raise ValueError(f"line {records.line_num} is broken: {error}") from error
        return Offsets(np.array([*starts[1:], begin], dtype=np.uint64), hashed.intdigest())

    @cached_property
    def header(self) -> list[str]:
        """The names of the columns.

        Raises:
            BadSampleError: two are equal.
        """
        begin, _ = self.index.span(0)
        names = self._cells(self.bytes_of(0, begin))
        if len(set(names)) < len(names):
            raise BadSampleError(
                "broken_row", f"the header {names} names a column twice: rename it"
            )
        return names

    def read(self, row: int) -> Row:
        cells = self._cells(self.text(row, b"\r\n"))
        if len(cells) != len(self.header):
            raise BadSampleError(
                "broken_row",
                f"the record has {len(cells)} cells and the header {len(self.header)}: quote cells "
                "that contain the delimiter, a quote or a line break",
            )
        found = {}
        for name, cell in zip(self.header, cells, strict=True):
            if name not in _MEDIA:
                found[name] = cell
            elif cell.strip():
                found[name] = _media(name, cell)
        return found

    def _cells(self, record: bytes) -> list[str]:
        csv.field_size_limit(_LONGEST_CELL)
        try:
            text = io.StringIO(record.decode("utf-8-sig"), newline="")
            # Blank lines may stand before a header.
            return next(filter(None, csv.reader(text, delimiter=self.delimiter, strict=True)), [])
        except UnicodeDecodeError as error:
            reason = f"the record is not UTF-8 ({error.reason}): convert the file"
            raise BadSampleError("broken_row", reason) from error
        except csv.Error as error:
            raise BadSampleError("broken_row", f"the record is broken: {error}") from error


class TsvShard(CsvShard):
    """Records with cells between tabs."""

    delimiter = "\t"


def _media(name: str, cell: str) -> object:
    if not cell.lstrip().startswith(("[", "{")):
        return cell
    try:
        return parse_value(cell)
    except ValueError as error:
        raise BadSampleError(
            "broken_json", f"the cell of column {name!r} is neither a path nor JSON: {error}"
        ) from error
