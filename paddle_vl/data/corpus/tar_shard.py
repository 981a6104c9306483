"""WebDataset tar files as shards.

A document is the run of members with the same name up to the first dot of the file's name:

    0001.jpg  0001.txt                    an image and its caption
    0002.json  0002.a.jpg  0002.b.jpg     a row, and the images that it names (`a.jpg`, `b.jpg`)

Members that webdataset and Energon skip belong to none, wherever they lie: files named `__this__`
or of a folder `__this__` at the top, and those whose name begins with a dot (of macOS) or has none.

A `.json` member is the row; `.txt` becomes its `text`, and the only image member its `image`.
Entries of `image` and `images` that name a member become that member's bytes, and so do the images
of a conversation's messages; its image members that nothing names are its `images`. The row may be
a `.conversation.json` member instead, also a list of messages, or JSON text of one (Energon's
shards); `.nv-meta/dataset.yaml` may give the members other names, see `energon`.
"""

import io
import re
import tarfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from xxhash import xxh3_64

from paddle_vl.data.corpus.cache import Cache
from paddle_vl.data.corpus.energon import Fields, fields_of
from paddle_vl.data.corpus.offset_index import Offsets
from paddle_vl.data.corpus.shard import BINARY_PER_TEXT, IndexedShard, Row, check_row_size
from paddle_vl.data.jsonl import BadSampleError, parse_object

_IMAGES = ("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "ppm")
_TEXTS = ("json", "txt")
_ROWS = ("conversation.json", "conversations.json", "messages.json")
_CONVERSATIONS = ("messages", "conversations", "conversation")
_BOM = b"\xef\xbb\xbf"
_USUAL = Fields()
_SKIPPED = re.compile(r"__[^/]*__($|/)")
# What tarfile raises for damaged archives; MemoryError for headers of impossible sizes.
_BROKEN = (
    OSError, tarfile.TarError, EOFError, ValueError, ArithmeticError, RecursionError, MemoryError,
)  # fmt: skip
# Two empty blocks end an archive.
_END = bytes(1024)


@dataclass(frozen=True)
class TarShard(IndexedShard):
    """Documents of an archive.

    Attributes:
        fields: members of a sample that are no row or image by their extension alone.
    """

    fields: Fields = _USUAL

    @classmethod
    def opened(
        cls, path: Path, cache: Cache, copies: Cache | None, max_line_bytes: int
    ) -> "TarShard":
        """See `Shard.opened`; what `.nv-meta/dataset.yaml` says and is not supported is refused."""
        shard = super().opened(path, cache, copies, max_line_bytes)
        return replace(shard, fields=fields_of(path))

    @classmethod
    def offsets(cls, path: Path) -> Offsets:
        hashed, starts, end, last_end = xxh3_64(), [], 0, 0
        last = None
        try:
            for member in _headers(path):
                if member.offset < end:
                    raise tarfile.ReadError(f"member {member.name} overlaps the one before")
                end = member.offset_data + (member.size + 511) // 512 * 512
                if _is_skipped(member.name):
                    continue
                key, _ = _key_of(member.name)
                if key != last:
                    starts.append(member.offset)
                    last = key
                hashed.update(f"{member.name}:{member.size}:{member.mtime},".encode())
                last_end = end
        except _BROKEN as error:
            raise ValueError(
                f"it is no uncompressed tar file, or a damaged one ({error}): shards must be .tar, "
                "as they are read at any place; fetch or write it again"
            ) from error
        return Offsets(np.array([*starts, last_end], dtype=np.uint64), hashed.intdigest())

    def read(self, row: int) -> Row:
        return _row(self._members(row), self.fields)

    def place(self, row: int) -> str:
        """The file and the document's key, or its number if that cannot be read."""
        try:
            name = next(iter(self._members(row)))
        except (BadSampleError, OSError, RuntimeError, StopIteration):
            return f"{self.path}:document {row + 1}"
        return f"{self.path}:{_key_of(name)[0]}"

    def _members(self, row: int) -> dict[str, bytes]:
        begin, end = self.index.span(row)
        if end - begin > (1 + BINARY_PER_TEXT) * self.max_line_bytes:
            # Its headers take a little too.
            check_row_size(0, end - begin, self.max_line_bytes)
        block = io.BytesIO(self.bytes_of(begin, end) + _END)
        found = {}
        try:
            with tarfile.open(fileobj=block, mode="r:") as archive:
                members = [_checked(member) for member in archive if member.isfile()]
                members = [each for each in members if not _is_skipped(each.name)]
                sizes = {True: 0, False: 0}
                for member in members:
                    sizes[_key_of(member.name)[1].lower() in _TEXTS] += member.size
                check_row_size(sizes[True], sizes[False], self.max_line_bytes)
                for member in members:
                    if (file := archive.extractfile(member)) is not None:
                        found[member.name] = file.read()
        except BadSampleError:
            raise
        except _BROKEN as error:
            raise BadSampleError(
                "unreadable_sample", f"its members cannot be read ({error}): fetch the file again"
            ) from error
        return found


def _is_skipped(name: str) -> bool:
    stem, dot, _ = name.rpartition("/")[2].partition(".")
    return not (stem and dot) or _SKIPPED.match(name) is not None


def _key_of(name: str) -> tuple[str, str]:
    """Key and extension of a member."""
    folder, slash, file = name.rpartition("/")
    stem, _, extension = file.partition(".")
    return f"{folder}{slash}{stem}", extension


def _row(members: Mapping[str, bytes], fields: Fields) -> dict[str, Any]:
    parts = {_key_of(name)[1].lower(): data for name, data in members.items()}
    if "jpgs" in parts:
        raise BadSampleError(
            "unreadable_sample",
            "the member .jpgs is a pickle, which can run any code when it is read: write the "
            "images as members .0.jpg, .1.jpg, ...",
        )
    row: dict[str, Any] = {}
    json_part = next((name for name in (fields.row, "json", *_ROWS) if name in parts), None)
    if json_part is not None:
        row = _row_of(parts[json_part])
    if "txt" in parts:
        try:
            row.setdefault("text", parts["txt"].decode("utf-8-sig"))
        except UnicodeDecodeError as error:
            raise BadSampleError(
                "broken_json", f"the .txt member is not UTF-8 ({error.reason}); convert it"
            ) from error
    by_name = {**members, **{name.rpartition("/")[2]: data for name, data in members.items()}}
    by_name |= parts
    used: list[bytes] = []

    def named(value: Any) -> Any:
        if not isinstance(value, str) or value not in by_name:
            return value
        used.append(by_name[value])
        return used[-1]

    if isinstance(images := row.get("images"), list):
        row["images"] = [named(image) for image in images]
    if "image" in row:
        row["image"] = named(row["image"])
    own = [name for name in parts if name.rpartition(".")[2] in _IMAGES or name in fields.images]
    if (key := next((key for key in _CONVERSATIONS if key in row), None)) is not None:
        row[key] = _with_members(row[key], named)
        unnamed = [parts[name] for name in own if not any(parts[name] is each for each in used)]
        if unnamed and "image" not in row:
            row.setdefault("images", unnamed)
        return row
    if "image" not in row and len(own) == 1:
        row["image"] = parts[own[0]]
    # So that columns can name a member, such as an image in .left.
    return {**{name: data for name, data in parts.items() if name != json_part}, **row}


def _row_of(member: bytes) -> dict[str, Any]:
    """The row in a member: an object, a list of messages, or JSON text of one of them."""
    member = member.removeprefix(_BOM).strip()
    if not member.startswith((b"[", b'"')):
        return parse_object(member, "a document's entries")
    # In an object, so that the same rules hold.
    row = parse_object(b'{"messages":%b}' % member, "messages")
    if len(row) > 1:
        raise BadSampleError("broken_json", "broken JSON: the member has more than one value")
    value = row["messages"]
    return _row_of(value.encode()) if isinstance(value, str) else row


def _with_members(value: Any, named: Callable[[Any], Any]) -> Any:
    """Messages with the bytes of the members that their parts of type image name."""
    if isinstance(value, list):
        return [_with_members(each, named) for each in value]
    if not isinstance(value, dict):
        return value
    is_image = value.get("type") in ("image", "image_url")
    return {
        key: named(each) if is_image else _with_members(each, named) for key, each in value.items()
    }


def _headers(path: Path) -> Iterator[tarfile.TarInfo]:
    with path.open("rb") as file, tarfile.open(fileobj=file, mode="r:") as archive:
        begin = -1
        for member in archive:
            # A negative size would lead back to it for ever.
            if member.offset <= begin:
                raise tarfile.ReadError(f"member {member.name} leads back to an earlier one")
            begin = member.offset
            if member.isfile():
                yield _checked(member)
            # The archive keeps all of them otherwise.
            archive.members = []  # type: ignore[attr-defined]
        # Without a word tarfile takes a damaged header for the end.
        file.seek(archive.offset)  # type: ignore[attr-defined]
        if file.read(tarfile.BLOCKSIZE).strip(b"\0"):
            raise tarfile.ReadError(f"the header at byte {archive.offset} is damaged")  # type: ignore[attr-defined]


def _checked(member: tarfile.TarInfo) -> tarfile.TarInfo:
    if member.issparse():
        raise tarfile.ReadError(f"member {member.name} is sparse, which is not supported")
    if member.size < 0:
        raise tarfile.ReadError(f"member {member.name} has the size {member.size}")
    return member
