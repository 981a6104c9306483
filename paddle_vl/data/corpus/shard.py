"""Shards: data files with documents that can be read by number, and entries of their rows.

A JSONL file, plain or compressed (.gz, .zst), is the simplest of them.
"""

from abc import ABC, abstractmethod
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from xxhash import xxh3_64

from paddle_vl.data.corpus.cache import Cache, FileState, read_bytes
from paddle_vl.data.corpus.offset_index import Index, Offsets, index_of
from paddle_vl.data.jsonl import BadSampleError, check_length, parse_object

# A row of JSONL, of a Parquet table or of a tar file. Images are paths, or bytes of a file.
Row = Mapping[str, Any]
S = TypeVar("S", bound="Shard")
Indexed = TypeVar("Indexed", bound="IndexedShard")
# Bytes of images and other binary entries that a row may have for each byte of text: 64 MiB.
BINARY_PER_TEXT = 64
_BLOCK = 1 << 20


@dataclass(frozen=True)
class Shard(ABC):
    """One data file. It can be pickled; files are opened when a document is read.

    Attributes:
        path: the data file.
        state: of the file when it was opened.
        groups: documents of each of its parts that are read at once; one number if any can be.
        content: hash that changes with the documents.
        copies: gives the local, uncompressed copy of the file; None to read `path` itself.
        max_line_bytes: a document with more text, or too large images for it, is a bad sample and
            is not read.
    """

    path: str
    state: FileState
    groups: tuple[int, ...]
    content: int
    copies: Cache | None
    max_line_bytes: int

    @classmethod
    @abstractmethod
    def opened(
        cls: type[S], path: Path, cache: Cache, copies: Cache | None, max_line_bytes: int
    ) -> S:
        """Open a file; its index is built if there is none.

        Raises:
            RuntimeError: it cannot be read, is damaged or of another kind.
        """

    @property
    def count(self) -> int:
        """Its documents."""
        return sum(self.groups)

    @property
    def samples(self) -> str:
        """Its size and the hash of some of its blocks, which show edits that `content` does not."""
        return f"{self.state.size}:{self.state.blocks}"

    @abstractmethod
    def read(self, row: int) -> Row:
        """The document of a number.

        Raises:
            BadSampleError: it cannot be used; without a place.
        """

    @abstractmethod
    def place(self, row: int) -> str:
        """The document's place for messages: `file:line`, `file:row N` or the like."""

    def bytes_of(self, begin: int, end: int) -> bytes:
        """Bytes of the file or of its copy."""
        if self.copies is None:
            return read_bytes(self.path, self.state, begin, end)
        return self.copies.read_copy(self.path, self.state, begin, end)


@dataclass(frozen=True)
class IndexedShard(Shard):
    """A file whose documents are found by reading it once.

    Attributes:
        index: their offsets.
    """

    index: Index

    @classmethod
    def opened(
        cls: type[Indexed], path: Path, cache: Cache, copies: Cache | None, max_line_bytes: int
    ) -> Indexed:
        def build(state: FileState) -> Offsets:
            local = path if copies is None else Path(copies.copy_of(str(path), state))
            try:
                return cls.offsets(local)
            except ValueError as error:
                raise RuntimeError(f"data file {path}: {error}") from error

        index = index_of(path, cache, build)
        state, groups = index.state, (index.count,)
        return cls(str(path), state, groups, index.content, copies, max_line_bytes, index)

    @classmethod
    @abstractmethod
    def offsets(cls, path: Path) -> Offsets:
        """What its index has, from the uncompressed file.

        Raises:
            ValueError: it is damaged or of another kind.
        """


class TextShard(IndexedShard):
    """Documents that are parts of a text."""

    def text(self, row: int, around: bytes | None = None) -> bytes:
        """The bytes of a document, without those of `around`, or white space, at both ends.

        Raises:
            BadSampleError: there are more than `max_line_bytes`.
        """
        begin, end = self.index.span(row)
        text = self.bytes_of(begin, min(end, begin + self.max_line_bytes + 2)).strip(around)
        check_length(text, self.max_line_bytes)
        return text

    def place(self, row: int) -> str:
        if self.index.rows_are_lines:
            return f"{self.path}:{row + 1}"
        begin, _ = self.index.span(row)
        starts = range(0, begin, _BLOCK)
        breaks = sum(self.bytes_of(at, min(at + _BLOCK, begin)).count(b"\n") for at in starts)
        return f"{self.path}:{breaks + 1}"


class JsonlShard(TextShard):
    """Lines of a file."""

    @classmethod
    def offsets(cls, path: Path) -> Offsets:
        return line_offsets(path)

    def read(self, row: int) -> Row:
        return parse_object(self.text(row), "a document's entries")


def line_offsets(path: Path) -> Offsets:
    """Offsets of all lines that are not blank."""
    hashed, starts, num_lines = xxh3_64(), array("Q"), 0
    # Begin of the line at `at`, which may be longer than what is read at once.
    begin, at, is_blank = 0, 0, True
    with path.open("rb", buffering=_BLOCK) as file:
        while piece := file.readline(_BLOCK):
            hashed.update(piece)
            at += len(piece)
            is_blank = is_blank and not piece.strip()
            if piece.endswith(b"\n"):
                num_lines += 1
                if not is_blank:
                    starts.append(begin)
                begin, is_blank = at, True
    if not is_blank:
        starts.append(begin)
    num_lines += begin < at
    rows_are_lines = len(starts) == num_lines
    starts.append(at)
    return Offsets(np.array(starts), hashed.intdigest(), rows_are_lines)


def check_row_size(text: int, binary: int, max_line_bytes: int) -> None:
    """Raise a BadSampleError for a row of a table or an archive with too many bytes of text, or of
    images and other binary entries."""
    for size, most, kind in (
        (text, max_line_bytes, "text"),
        (binary, BINARY_PER_TEXT * max_line_bytes, "images and other binary entries"),
    ):
        if size > most:
            raise BadSampleError(
                "line_too_long",
                f"the document has {size} bytes of {kind}; with data.max_line_bytes "
                f"{max_line_bytes} at most {most} are read: shorten it, or raise the setting",
            )


def needed(row: Row, key: str, kind: str) -> Any:
    """An entry of a row.

    Args:
        kind: the source's format, for the message.

    Raises:
        BadSampleError: the row does not have it.
    """
    if row.get(key) is None:
        raise BadSampleError(
            "missing_key",
            f"the row has no {key!r}, which format {kind} needs; its entries are {sorted(row)} "
            "(other names can be given with the source's columns, another kind with its format)",
        )
    return row[key]


def text_of(row: Row, kind: str = "text") -> str:
    """The entry `text`: a string, or a list of strings, which are joined by line breaks.

    Raises:
        BadSampleError: it is missing or of another type.
    """
    text = needed(row, "text", kind)
    if isinstance(text, str):
        return text
    if isinstance(text, Sequence) and all(isinstance(each, str) for each in text):
        return "\n".join(text)
    raise BadSampleError(
        "missing_key",
        f"'text' is of type {type(text).__name__}; a string or a list of strings is needed",
    )


def refuse_empty(has_text: bool) -> None:
    """Raise a BadSampleError for a document without text."""
    if not has_text:
        raise BadSampleError(
            "empty_text", "the document has no text, so that nothing is learned: leave it out"
        )
