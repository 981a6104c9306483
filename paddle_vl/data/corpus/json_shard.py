"""Rows of JSON files that are no lines: the elements of an array, or objects over several lines.

The file is read once. Where values begin is found from quotes and brackets alone, in blocks; a
value is parsed when it is read.
"""

import json
from pathlib import Path
from typing import ClassVar

import numpy as np
from xxhash import xxh3_64

from paddle_vl.data.corpus.offset_index import Offsets, SummedReader
from paddle_vl.data.corpus.shard import JsonlShard, Row, TextShard
from paddle_vl.data.jsonl import BadSampleError, parse_object

_BLOCK = 1 << 22
_QUOTE, _BACKSLASH = ord('"'), ord("\\")
_BOM = b"\xef\xbb\xbf"
# By how much each byte changes the depth of brackets.
_STEPS = np.zeros(256, dtype=np.int8)
_STEPS[list(b"[{")], _STEPS[list(b"]}")] = 1, -1


class JsonArrayShard(TextShard):
    """The elements of an array."""

    depth: ClassVar[int] = 1

    @classmethod
    def offsets_of_text(cls, path: Path) -> Offsets:
        return value_offsets(path, cls.depth)

    def read(self, row: int) -> Row:
        text, end = self.text(row), b"]" if row + 1 == self.count else b","
        if not text.endswith(end):
            raise BadSampleError(
                "broken_json", f"broken JSON: there is no {end.decode()!r} after the row"
            )
        return parse_object(text[:-1], "a row's entries")

    def place(self, row: int) -> str:
        """The file, the line in which the row begins, and its number."""
        return f"{super().place(row)} (row {row + 1})"


class JsonSequenceShard(JsonArrayShard):
    """Objects one after another, each over several lines."""

    depth = 0

    def read(self, row: int) -> Row:
        return parse_object(self.text(row), "a row's entries")


def json_kind(head: bytes, is_json: bool) -> type[TextShard]:
    """How a JSON file has its rows.

    Args:
        head: its first bytes.
        is_json: whether it is named `.json`, which may be one object over several lines.
    """
    text = head.removeprefix(_BOM).lstrip()
    if text.startswith(b"["):
        return JsonArrayShard
    line, line_break, _ = text.partition(b"\n")
    if is_json and line_break and line.startswith(b"{"):
        try:
            json.loads(line)
        except ValueError:
            return JsonSequenceShard
    return JsonlShard


def value_offsets(path: Path, depth: int) -> Offsets:
    """Offsets of the objects and arrays within so many brackets.

    Raises:
        RuntimeError: the file cannot be read.
        ValueError: its brackets do not match, or something else surrounds the values.
    """
    scan, hashed, at = _Scan(depth), xxh3_64(), 0
    found: list[np.ndarray] = []
    head = b""
    with SummedReader(path) as file:
        while block := file.read(_BLOCK):
            hashed.update(block)
            starts = scan.starts(np.frombuffer(block, dtype=np.uint8))
            if not any(each.size for each in found):
                head += block[: starts[0]] if starts.size else block
            found.append(starts + at)
            at += len(block)
        if scan.level or scan.in_string:
            raise ValueError("it ends early, within brackets or a text: fetch or write it again")
    if (around := head.removeprefix(_BOM).strip()) != b"["[:depth] and any(f.size for f in found):
        raise ValueError(f"it begins with {around[:40]!r}; one array of objects is needed")
    offsets = np.append(np.concatenate([*found, np.zeros(0, np.int64)]), at).astype(np.uint64)
    return Offsets(at, file.sums, offsets, hashed.intdigest())


class _Scan:
    """Follows strings and brackets through the blocks of a file."""

    def __init__(self, depth: int):
        self._depth, self.level, self.in_string = depth, 0, False
        # Whether the last block ended in a backslash that escapes the next byte.
        self._escapes = False
        self._ended = False

    def starts(self, bytes_N: np.ndarray) -> np.ndarray:
        """Where values begin in a block."""
        quotes = np.flatnonzero(self._quotes(bytes_N))
        steps_N = _STEPS[bytes_N]
        brackets = np.flatnonzero(steps_N)
        is_outside = np.searchsorted(quotes, brackets) % 2 == int(self.in_string)
        brackets = brackets[is_outside]
        self.in_string ^= bool(quotes.size % 2)
        if not brackets.size:
            return brackets
        steps = steps_N[brackets]
        levels = self.level + np.cumsum(steps, dtype=np.int64)
        self.level = int(levels[-1])
        ends = np.flatnonzero(levels == 0)
        goes_on = self._ended or (ends.size and ends[0] + 1 < len(levels))
        if levels.min() < 0 or (self._depth and goes_on):
            raise ValueError(
                "it goes on after its array ends: write one array of objects, or one object per "
                "line"
            )
        self._ended = bool(ends.size)
        return brackets[(steps > 0) & (levels == self._depth + 1)]

    def _quotes(self, bytes_N: np.ndarray) -> np.ndarray:
        """`[N]` whether a byte is a quote that begins or ends a string."""
        is_quote = bytes_N == _QUOTE
        is_slash = bytes_N == _BACKSLASH
        carried, self._escapes = self._escapes, False
        if carried and not is_slash[0]:
            is_quote[0] = False
        if is_slash.any():
            # Runs of backslashes; the byte after an odd one is escaped.
            edges = np.diff(is_slash.astype(np.int8), prepend=0, append=0)
            begins, ends = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)
            begins[0] -= carried and is_slash[0]
            escaped = ends[(ends - begins) % 2 == 1]
            self._escapes = bool(escaped.size) and int(escaped[-1]) == len(bytes_N)
            is_quote[escaped[: len(escaped) - self._escapes]] = False
        return is_quote
