"""Rows of JSON files that are no lines: the elements of an array, or objects over several lines.

The file is read and parsed once, to find where its values begin; a value is parsed again when it is
read.
"""

import json
import re
from pathlib import Path

import numpy as np
from xxhash import xxh3_64_intdigest

from paddle_vl.data.corpus.offset_index import Offsets
from paddle_vl.data.corpus.shard import JsonlShard, Row, TextShard
from paddle_vl.data.jsonl import parse_object

_BOM = b"\xef\xbb\xbf"
_BETWEEN = b" \t\r\n,"
_SPACE = re.compile(r"[ \t\r\n]*")
_DECODER = json.JSONDecoder()


class JsonShard(TextShard):
    """The elements of an array, or objects one after another."""

    @classmethod
    def offsets(cls, path: Path) -> Offsets:
        return value_offsets(path.read_bytes())

    def read(self, row: int) -> Row:
        return parse_object(self.text(row, _BETWEEN), "a row's entries")

    def place(self, row: int) -> str:
        """The file, the line in which the row begins, and its number."""
        return f"{super().place(row)} (row {row + 1})"


def json_kind(head: bytes, is_json: bool) -> type[TextShard]:
    """How a JSON file has its rows.

    Args:
        head: its first bytes.
        is_json: whether it is named `.json`, which may be one object over several lines.
    """
    text = head.removeprefix(_BOM).lstrip()
    if text.startswith(b"["):
        return JsonShard
    line, line_break, _ = text.partition(b"\n")
    if is_json and line_break and line.startswith(b"{"):
        try:
            json.loads(line)
        except ValueError:
            return JsonShard
    return JsonlShard


def value_offsets(content: bytes) -> Offsets:
    """Offsets of the elements of an array, or of values one after another.

    Raises:
        ValueError: it is neither; says in which line.
    """
    # Of the same length as the bytes; what the parser looks for is the same in UTF-8.
    text = content.decode("latin-1")
    at = _after_space(text, len(_BOM) if content.startswith(_BOM) else 0)
    is_array = text[at : at + 1] == "["
    at = _after_space(text, at + is_array)
    begins = []
    try:
        while at < len(text) and not (is_array and text[at] == "]" and not begins):
            begins.append(at)
            at = _after_space(text, _DECODER.raw_decode(text, at)[1])
            if is_array and text[at : at + 1] != ",":
                break
            at = _after_space(text, at + is_array)
    except (ValueError, RecursionError) as error:
        line = text.count("\n", 0, begins[-1]) + 1
        raise ValueError(f"the value in line {line} is broken ({error}): write it again") from error
    if is_array and text[at:].rstrip() != "]":
        line = text.count("\n", 0, at) + 1
        raise ValueError(
            f"the array ends early or goes on in line {line}: write one array of objects, or one "
            "object per line"
        )
    return Offsets(np.array([*begins, at], dtype=np.uint64), xxh3_64_intdigest(content))


def _after_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return at if found is None else found.end()
