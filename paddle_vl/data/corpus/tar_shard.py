"""WebDataset tar files as shards.

A document is the run of members with the same name up to the first dot of the file's name:

    0001.jpg  0001.txt                    an image and its caption
    0002.json  0002.a.jpg  0002.b.jpg     a row, and the images that it names (`a.jpg`, `b.jpg`)

A `.json` member is the row; `.txt` becomes its `text`, and the only image member its `image`.
Entries of `image` and `images` that name a member become that member's bytes.
"""

import io
import os
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from xxhash import xxh3_64

from paddle_vl.data.corpus.local_copies import LocalCopies
from paddle_vl.data.corpus.offset_index import CacheFolders, IndexFile, Offsets, index_of
from paddle_vl.data.corpus.shard import Row, descriptor
from paddle_vl.data.jsonl import BadSampleError, parse_object

_IMAGES = ("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "ppm")
# Two empty blocks end an archive.
_END = bytes(1024)


@dataclass(frozen=True)
class TarShard:
    """See `paddle_vl.data.corpus.shard.Shard`.

    Attributes:
        copies: gives the local copy of the file; None to read `path` itself.
    """

    path: str
    index: IndexFile
    copies: LocalCopies | None

    @classmethod
    def opened(cls, path: Path, folders: CacheFolders, copies: LocalCopies | None) -> "TarShard":
        """Open a file; its index is built if there is none.

        Raises:
            RuntimeError: it is no uncompressed tar file.
        """
        return cls(str(path), index_of(path, folders, lambda: _member_offsets(path)), copies)

    @property
    def count(self) -> int:
        return self.index.count

    @property
    def content(self) -> int:
        return self.index.content

    @property
    def groups(self) -> list[int]:
        return [self.count]

    def read(self, row: int) -> Row:
        return _row(self._members(row))

    def place(self, row: int) -> str:
        """The file and the document's key, or its number if that cannot be read."""
        try:
            name = next(iter(self._members(row)))
        except (OSError, tarfile.TarError, StopIteration):
            return f"{self.path}:document {row + 1}"
        return f"{self.path}:{_key_of(name)[0]}"

    def _members(self, row: int) -> dict[str, bytes]:
        begin, end = self.index.span(descriptor(self.index.path), row)
        opened = descriptor(self.path) if self.copies is None else self.copies.descriptor(self.path)
        block = io.BytesIO(os.pread(opened, end - begin, begin) + _END)
        found = {}
        with tarfile.open(fileobj=block, mode="r:") as archive:
            for member in archive:
                if member.isfile() and (file := archive.extractfile(member)) is not None:
                    found[member.name] = file.read()
        return found


def _key_of(name: str) -> tuple[str, str]:
    """Key and extension of a member."""
    folder, slash, file = name.rpartition("/")
    stem, _, extension = file.partition(".")
    return f"{folder}{slash}{stem}", extension


def _row(members: Mapping[str, bytes]) -> dict[str, Any]:
    parts = {_key_of(name)[1].lower(): data for name, data in members.items()}
    row: dict[str, Any] = {}
    if "json" in parts:
        row = parse_object(parts["json"], "a document's entries")
    if "txt" in parts:
        try:
            row.setdefault("text", parts["txt"].decode("utf-8-sig"))
        except UnicodeDecodeError as error:
            raise BadSampleError(
                "broken_json", f"the .txt member is not UTF-8 ({error.reason}); convert it"
            ) from error
    by_name = {**members, **{name.rpartition("/")[2]: data for name, data in members.items()}}
    by_name |= parts

    def named(value: Any) -> Any:
        return by_name.get(value, value) if isinstance(value, str) else value

    if isinstance(images := row.get("images"), list):
        row["images"] = [named(image) for image in images]
    if "image" in row:
        row["image"] = named(row["image"])
    own = [extension for extension in parts if extension.rpartition(".")[2] in _IMAGES]
    if "image" not in row and len(own) == 1:
        row["image"] = parts[own[0]]
    # So that columns can name a member, such as a caption in .cap.
    return {**{name: data for name, data in parts.items() if name != "json"}, **row}


def _member_offsets(path: Path) -> Offsets:
    hashed, starts, end = xxh3_64(), [], 0
    last = None
    try:
        for member in _headers(path):
            key = _key_of(member.name)[0]
            if key != last:
                starts.append(member.offset)
                last = key
            # Content is skipped, so a member that is edited in place shows by its time.
            hashed.update(f"{member.name}:{member.size}:{member.mtime},".encode())
            end = member.offset_data + (member.size + 511) // 512 * 512
    except (OSError, tarfile.TarError, EOFError) as error:
        raise RuntimeError(
            f"data file {path} is no uncompressed tar file ({error}): shards must be .tar, as they "
            "are read at any place"
        ) from error
    return Offsets(np.array([*starts, end], dtype=np.uint64), hashed.intdigest(), False)


def _headers(path: Path) -> Iterator[tarfile.TarInfo]:
    with tarfile.open(path, mode="r:") as archive:
        for member in archive:
            if member.isfile():
                yield member
            # The archive keeps all of them otherwise.
            archive.members = []  # type: ignore[attr-defined]
