"""Rows of Arrow tables, whose groups are read at once, and what Hugging Face's `datasets` says
about their columns.

A table's metadata may name features (`{"info": {"features": ...}}` under `huggingface`). Two of
them store something else than they mean: a `Sequence` of a struct is a struct of lists in older
files, and `Json` is JSON text.
"""

import json
from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

from paddle_vl.data.corpus.shard import BINARY_PER_TEXT, Row, Shard, check_row_size
from paddle_vl.data.jsonl import BadSampleError, parse_value

_PIECE = 1 << 22
_METADATA = b"huggingface"
_LISTS = ("Sequence", "List", "LargeList")


@dataclass(frozen=True)
class TableShard(Shard):
    """Rows of a table, in groups.

    Attributes:
        spans: first and last byte of each group.
    """

    spans: tuple[tuple[int, int], ...]

    @abstractmethod
    def group(self, number: int) -> Any:
        """The rows of a group: pyarrow's table or record batch.

        Raises:
            BadSampleError: it cannot be read.
        """

    @cached_property
    def _starts(self) -> list[int]:
        return [0, *accumulate(self.groups)]

    def read(self, row: int) -> Row:
        group = bisect_right(self._starts, row) - 1
        found = self.group(group).slice(row - self._starts[group], 1)
        # Values are counted where these few bytes may be too many.
        if (size := found.nbytes) > (1 + BINARY_PER_TEXT) * self.max_line_bytes:
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

    def check_sums(self, group: int) -> None:
        """Compare the bytes of a group with the sums of the index.

        Raises:
            RuntimeError: see `IndexFile.read`.
        """
        begin, end = self.spans[group]
        for at in range(begin, end, _PIECE):
            self.bytes_of(at, min(at + _PIECE, end))


def needs_pyarrow(path: Path, kind: str) -> RuntimeError:
    """The error for a file of Arrow tables where pyarrow is missing."""
    return RuntimeError(
        f"{path} is {kind}, which needs the package pyarrow: pip install 'paddle-vl[corpus]'"
    )


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
