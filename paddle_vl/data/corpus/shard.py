"""Shards: data files with documents that can be read by number, and entries of their rows.

A JSONL file, plain or compressed (.gz, .zst), is the simplest of them.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from xxhash import xxh3_64

from paddle_vl.data.corpus.cache import CacheFolders, LocalCopies
from paddle_vl.data.corpus.offset_index import (
    ChangedError,
    IndexFile,
    Offsets,
    SummedReader,
    index_of,
)
from paddle_vl.data.jsonl import BadSampleError, check_length, parse_object

logger = logging.getLogger(__name__)
# A row of JSONL, of a Parquet table or of a tar file. Images are paths, or bytes of a file.
Row = Mapping[str, Any]
S = TypeVar("S", bound="Shard")
Indexed = TypeVar("Indexed", bound="IndexedShard")
# Bytes of images and other binary entries that a row may have for each byte of text: 64 MiB.
BINARY_PER_TEXT = 64
_BLOCK = 1 << 22
_BREAK, _SPACE = 10, 32
# Of every byte, whether it is no white space.
_IS_TEXT = np.array([bool(bytes([byte]).strip()) for byte in range(256)])


@dataclass(frozen=True)
class Shard(ABC):
    """One data file. It can be pickled; files are opened when a document is read.

    Attributes:
        path: the data file.
        groups: documents of each of its parts that are read at once; one number if any can be.
        content: hash that changes with the documents.
        index: offsets of the documents, where the file does not have them, and sums of its blocks.
        copies: gives the local, uncompressed copy of the file; None to read `path` itself.
        max_line_bytes: a document with more text, or too large images for it, is a bad sample and
            is not read.
    """

    path: str
    groups: tuple[int, ...]
    content: int
    index: IndexFile
    copies: LocalCopies | None
    max_line_bytes: int

    @classmethod
    @abstractmethod
    def opened(
        cls: type[S],
        path: Path,
        folders: CacheFolders,
        copies: LocalCopies | None,
        max_line_bytes: int,
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
    def sums(self) -> int:
        """Hash of the sums of its blocks, which shows edits that `content` does not."""
        return self.index.sums

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
        """Bytes of the file or of its copy, compared with the sums of its index; a damaged copy is
        made again.

        Raises:
            RuntimeError: see `IndexFile.read`.
        """
        if self.copies is None:
            return self.index.read(begin, end)
        try:
            return self.index.read(begin, end, self.copies.descriptor(self.path))
        except ChangedError:
            logger.warning("the local copy of %s is damaged: it is made again", self.path)
            self.copies.forget(Path(self.path))
        return self.index.read(begin, end, self.copies.descriptor(self.path))


class IndexedShard(Shard):
    """A file whose documents are found by reading it once."""

    @classmethod
    def opened(
        cls: type[Indexed],
        path: Path,
        folders: CacheFolders,
        copies: LocalCopies | None,
        max_line_bytes: int,
    ) -> Indexed:
        index = index_of(path, folders, lambda: cls.offsets(path, copies))
        return cls(str(path), (index.count,), index.content, index, copies, max_line_bytes)

    @classmethod
    @abstractmethod
    def offsets(cls, path: Path, copies: LocalCopies | None) -> Offsets:
        """What its index has, found by reading the file."""


class TextShard(IndexedShard):
    """Documents that are parts of a text."""

    @classmethod
    def offsets(cls, path: Path, copies: LocalCopies | None) -> Offsets:
        if copies is not None:
            # A copy from before may be damaged, and there are no sums to compare it with.
            copies.forget(path)
        try:
            return cls.offsets_of_text(path if copies is None else Path(copies.file(path)))
        except ValueError as error:
            raise RuntimeError(f"data file {path}: {error}") from error

    @classmethod
    @abstractmethod
    def offsets_of_text(cls, path: Path) -> Offsets:
        """What its index has, from the uncompressed file.

        Raises:
            ValueError: its text is damaged.
        """

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
    def offsets_of_text(cls, path: Path) -> Offsets:
        return line_offsets(path)

    def read(self, row: int) -> Row:
        return parse_object(self.text(row), "a document's entries")


def line_offsets(path: Path) -> Offsets:
    """Offsets of all lines that are not blank; the file is read once, in blocks.

    Raises:
        RuntimeError: the file cannot be read.
    """
    found: list[np.ndarray] = []
    hashed, at, num_breaks = xxh3_64(), 0, 0
    # Begin of the line that the last block ended in, and whether it has been blank so far.
    begin, is_blank = 0, True
    with SummedReader(path) as file:
        while block := file.read(_BLOCK):
            hashed.update(block)
            bytes_N = np.frombuffer(block, dtype=np.uint8)
            breaks_K = np.flatnonzero(bytes_N == _BREAK)
            num_breaks += breaks_K.size
            if not breaks_K.size:
                is_blank = is_blank and not block.strip()
            else:
                begins_K = np.concatenate([[0], breaks_K[:-1] + 1])
                # Most lines begin with a bracket; only others are looked at.
                has_text_K = bytes_N[begins_K] > _SPACE
                if (odd := np.flatnonzero(~has_text_K)).size:
                    text_at = np.flatnonzero(_IS_TEXT[bytes_N])
                    first = np.searchsorted(text_at, begins_K[odd])
                    has_text_K[odd] = first < np.searchsorted(text_at, breaks_K[odd])
                has_text_K[0] |= not is_blank
                begins_K += at
                begins_K[0] = begin
                found.append(begins_K[has_text_K])
                rest = int(breaks_K[-1]) + 1
                begin, is_blank = at + rest, not block[rest:].strip()
            at += len(block)
    if not is_blank:
        found.append(np.array([begin]))
    starts = np.concatenate([*found, np.zeros(0, dtype=np.int64)])
    num_lines = num_breaks + (begin < at)
    offsets = np.append(starts, at).astype(np.uint64)
    return Offsets(at, file.sums, offsets, hashed.intdigest(), len(starts) == num_lines)


def check_row_size(text: int, binary: int, max_line_bytes: int) -> None:
    """Raise a BadSampleError for a row of a table or an archive with more bytes of text, or of
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
