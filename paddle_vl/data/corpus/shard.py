"""Shards: data files with documents that can be read by number, and entries of their rows."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from paddle_vl.data.corpus.cache import CacheFolders
from paddle_vl.data.corpus.local_copies import LocalCopies
from paddle_vl.data.corpus.offset_index import ChangedError, IndexFile, Offsets, index_of
from paddle_vl.data.jsonl import BadSampleError

logger = logging.getLogger(__name__)
# A row of JSONL, of a Parquet table or of a tar file. Images are paths, or bytes of a file.
Row = Mapping[str, Any]
S = TypeVar("S", bound="Shard")
# Bytes of images and other binary entries that a row may have for each byte of text: 64 MiB.
BINARY_PER_TEXT = 64


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
        index = index_of(path, folders, lambda: cls.offsets(path, copies))
        return cls(str(path), (index.count,), index.content, index, copies, max_line_bytes)

    @classmethod
    def offsets(cls, path: Path, copies: LocalCopies | None) -> Offsets:
        """What its index has, found by reading the file."""
        raise NotImplementedError

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
