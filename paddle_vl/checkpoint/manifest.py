"""`manifest.json` of a checkpoint: its files with sizes and checksums.

    {"format": 2, "step": 500,
     "files": {"config.json": {"size": 1234, "xxh3_128": "9f.."},
               "model.safetensors": {"size": 5678, "pieces": [[0, 4000, "1a.."], ..]}, ..}}

A large file, or one that several ranks have written, has a checksum per piece: first byte, length
and checksum, in order. Format 1 has no pieces, and is still read. Checksums are computed from the
bytes in memory before they are written, so they reveal errors of writing too. Other files in the
folder, such as a model card, are not checked.
"""

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NamedTuple

import xxhash

from paddle_vl.files.text_file import naming, replacing

MANIFEST_FILE = "manifest.json"
CHECKSUM = "xxh3_128"
FORMAT = 2
_FORMATS = (1, FORMAT)
# A longer piece ends after the write call that exceeds it.
PIECE_BYTES = 1 << 26
# Bytes per write call; between calls other threads run, and a write can be aborted.
CHUNK_BYTES = 1 << 23
# Bytes between flushes to disk, so that the page cache does not fill up, writes of other programs
# do not wait long, and a write can be aborted soon.
_FLUSH_BYTES = 1 << 28
_READ_BYTES = 1 << 23
# More readers are not faster.
_MAX_READERS = 4
# Files that weights are loaded from. Others are text, which users may edit in a model folder.
WEIGHT_FILES = (
    "model.safetensors",
    "model-*-of-*.safetensors",
    "model.safetensors.index.json",
    "adapter_model.safetensors",
)


class Piece(NamedTuple):
    """Consecutive bytes of a file, and their checksum."""

    begin: int
    length: int
    checksum: str


class FileSum(NamedTuple):
    """Size in bytes and checksum of a file.

    Attributes:
        checksum: of the file, or of the text of the pieces' checksums.
        pieces: in order; empty for a file with one checksum.
    """

    size: int
    checksum: str
    pieces: tuple[Piece, ...] = ()

    @classmethod
    def of(cls, pieces: Iterable[Piece]) -> "FileSum":
        """The file that ends with the last of these pieces."""
        ordered = sorted(pieces)
        size = ordered[-1].begin + ordered[-1].length
        if len(ordered) == 1 and not ordered[0].begin:
            return cls(size, ordered[0].checksum)
        sums = "".join(piece.checksum for piece in ordered)
        return cls(size, xxhash.xxh3_128_hexdigest(sums.encode()), tuple(ordered))

    def parts(self) -> tuple[Piece, ...]:
        """Its pieces; one that is the file if it has none."""
        return self.pieces or (Piece(0, self.size, self.checksum),)


def uncovered(pieces: Iterable[Piece], size: int) -> str | None:
    """The first bytes of a file in no piece or in two, e.g. `bytes 16 to 32`; None without any."""
    end = 0
    for piece in (*sorted(pieces), Piece(size, 0, "")):
        if piece.begin != end:
            return f"bytes {min(end, piece.begin)} to {max(end, piece.begin)}"
        end += piece.length
    return None


class SummedStream:
    """A file that is being written, and the checksums of its bytes, from byte `begin` on."""

    def __init__(self, stream: BinaryIO, begin: int = 0):
        self._stream, self._hash = stream, xxhash.xxh3_128()
        self._begin, self._size, self._unflushed = begin, 0, 0
        self._pieces: list[Piece] = []

    def write(self, data: Any, go_on: Callable[[], None] | None = None) -> None:
        """Write the bytes of a contiguous buffer.

        Args:
            go_on: called before every piece; it raises to abort the write.
        """
        view = memoryview(data).cast("B")
        for begin in range(0, len(view), CHUNK_BYTES):
            if go_on is not None:
                go_on()
            chunk = view[begin : begin + CHUNK_BYTES]
            self._hash.update(chunk)
            self._stream.write(chunk)
            self._size += len(chunk)
            self._unflushed += len(chunk)
            if self._size >= PIECE_BYTES:
                self._end_piece()
            if self._unflushed >= _FLUSH_BYTES:
                self._flush()

    def to_disk(self) -> FileSum:
        """Flush everything to the disk; end and checksums of what was written."""
        self._flush()
        if self._size or not self._pieces:
            self._end_piece()
        return FileSum.of(self._pieces)

    def _end_piece(self) -> None:
        self._pieces.append(Piece(self._begin, self._size, self._hash.hexdigest()))
        self._hash.reset()
        self._begin, self._size = self._begin + self._size, 0

    def _flush(self) -> None:
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self._unflushed = 0


def write_bytes(
    file: Path,
    parts: Iterable[Any],
    go_on: Callable[[], None] | None = None,
    begin: int | None = None,
    in_place: bool = True,
) -> FileSum:
    """Write one file atomically: it gets its name when it is complete on disk.

    Args:
        parts: contiguous buffers.
        go_on: called between pieces; it raises to abort the write.
        begin: write from this byte of a file on into which others write too.
        in_place: False writes a file of its own instead, NAME.BEGIN.range.

    Returns:
        Its size and checksum.

    Raises:
        OSError: the file cannot be written; the error names it.
    """
    if not in_place and begin is not None:
        file = file.with_name(f"{file.name}.{begin:020}.range")
    with (
        replacing(file) if begin is None else naming(file) as partial,
        open(partial or file, "wb", opener=_open_whole if begin is not None else None) as stream,
    ):
        stream.seek(begin or 0 if in_place else 0)
        summed = SummedStream(stream, begin or 0)
        for part in parts:
            summed.write(part, go_on)
            # Free it before the next one is made.
            del part
        return summed.to_disk()


def _open_whole(file: str, flags: int) -> int:
    """Open a file for writing and keep what others have written into it."""
    return os.open(file, flags & ~os.O_TRUNC, 0o666)


@dataclass(frozen=True)
class Manifest:
    """The files of a checkpoint.

    Attributes:
        step: updates before the checkpoint.
        files: by path inside the folder, with forward slashes.
    """

    step: int
    files: Mapping[str, FileSum]

    def write(self, folder: Path) -> None:
        """Write the file and flush it to the disk."""
        files = dict(sorted(files_as_json(self.files).items()))
        values = {"format": FORMAT, "step": self.step, "files": files}
        text = json.dumps(values, indent=1)
        # One line per piece.
        text = re.sub(r"\[\s+(\d+),\s+(\d+),\s+(\S+)\s+\]", r"[\1, \2, \3]", text)
        write_bytes(folder / MANIFEST_FILE, [text.encode()])

    @classmethod
    def read(cls, folder: Path) -> "Manifest | None":
        """The manifest of a folder; None if it has none, as in checkpoints of earlier versions.

        Raises:
            RuntimeError: the file is damaged.
        """
        path = folder / MANIFEST_FILE
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            if values["format"] not in _FORMATS:
                raise ValueError(f"format {values['format']} is not one of {_FORMATS}")
            manifest = cls(values["step"], files_from_json(values["files"]))
            for name, file in manifest.files.items():
                if gap := uncovered(file.parts(), file.size):
                    raise ValueError(f"of {name} {gap} are of no piece or of two")
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise RuntimeError(
                f"{path} is damaged ({error or type(error).__name__}): fetch the folder again, or "
                "use another checkpoint"
            ) from error
        return manifest


def files_as_json(files: Mapping[str, FileSum]) -> dict[str, dict[str, Any]]:
    """Sizes and checksums as a JSON object."""
    return {
        name: {"size": file.size}
        | ({"pieces": file.pieces} if file.pieces else {CHECKSUM: file.checksum})
        for name, file in files.items()
    }


def files_from_json(values: Mapping[str, Any]) -> dict[str, FileSum]:
    """The inverse of `files_as_json`.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: another object.
    """
    files = {}
    for name, entry in values.items():
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or not name:
            raise ValueError(f"file {name!r} lies outside the folder")
        if "\0" in name or any("\ud800" <= character <= "\udfff" for character in name):
            raise ValueError(f"file {name!r} has a name that no file can have")
        size = entry["size"]
        found: list[Any] = entry.get("pieces") or [[0, size, entry[CHECKSUM]]]
        pieces = [Piece(*piece) for piece in found]
        if any([type(value) for value in piece] != [int, int, str] for piece in pieces):
            raise ValueError(f"the entry of {name} has pieces {pieces} of {size!r} bytes")
        files[name] = FileSum.of(pieces)
        if files[name].size != size:
            raise ValueError(f"the pieces of {name} do not end at its size {size!r}")
    return files


def damaged_files(
    folder: Path,
    files: Mapping[str, FileSum],
    checksums: bool = True,
    drop_cache: bool = False,
    sizes: bool = True,
) -> list[str]:
    """One line for each missing, truncated or changed file.

    Sizes are compared first, so that missing and truncated files are found without reading.

    Args:
        checksums: read the files, or those of their pieces that are given; otherwise only their
            sizes are compared.
        drop_cache: read from the disk instead of the page cache, where the system allows it.
        sizes: compare sizes; not for a file that other ranks still write.
    """
    found = []
    for name, wanted in files.items() if sizes else ():
        try:
            size = (folder / name).stat().st_size
        except FileNotFoundError:
            found.append(f"{name} is missing")
        except OSError as error:
            found.append(f"{name} cannot be read ({error.strerror})")
        else:
            if size != wanted.size:
                has = f"has {size} bytes" if size else "is empty"
                found.append(f"{name} {has}, {wanted.size} were written")
    if found or not checksums or not files:
        return found
    # Largest first, so that the readers end at about the same time.
    pieces = [(name, piece) for name, file in files.items() for piece in file.parts()]
    pieces.sort(key=lambda entry: -entry[1].length)

    def wrong_sum(entry: tuple[str, Piece]) -> str | None:
        name, piece = entry
        try:
            if _checksum(folder / name, piece.begin, piece.length, drop_cache) == piece.checksum:
                return None
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
        return f"{name} does not have the checksum that was written, its contents have changed"

    with ThreadPoolExecutor(min(_MAX_READERS, len(pieces), os.cpu_count() or 1)) as readers:
        problems = readers.map(wrong_sum, pieces)
        return list(dict.fromkeys(problem for problem in problems if problem is not None))


def check_weights(folder: Path) -> None:
    """Compare the weights of a model folder with its manifest, if it has one.

    Only the files that weights are loaded from; users may edit the others in a model folder.

    Raises:
        RuntimeError: files are damaged; all are named.
    """
    if problems := damaged_files(folder, listed_weights(folder)):
        raise RuntimeError(damage_of_weights(folder, problems))


def listed_weights(folder: Path) -> dict[str, FileSum]:
    """The files of a model folder's manifest that weights are loaded from.

    Raises:
        RuntimeError: the manifest is damaged.
    """
    manifest = Manifest.read(folder)
    files = {} if manifest is None else manifest.files
    return {
        name: file
        for name, file in files.items()
        if any(fnmatchcase(name, pattern) for pattern in WEIGHT_FILES)
    }


def damage_of_weights(folder: Path, problems: Iterable[str]) -> str:
    """The error text for a model folder whose weights differ from its manifest."""
    return (
        f"{folder} is damaged: {'; '.join(problems)}. Use another checkpoint or fetch the folder "
        f"again; if you replaced the weights yourself, delete its {MANIFEST_FILE}"
    )


def shared_out(files: Mapping[str, FileSum], rank: int, size: int) -> dict[str, FileSum]:
    """This rank's share of the files to check, about equal in bytes on all `size` ranks. A file
    with pieces is divided at these."""
    loads = [0] * size
    own: dict[str, list[Piece]] = {}
    pieces = [(name, piece) for name, file in files.items() for piece in file.parts()]
    for name, piece in sorted(pieces, key=lambda entry: (-entry[1].length, entry)):
        least = loads.index(min(loads))
        loads[least] += piece.length
        if least == rank:
            own.setdefault(name, []).append(piece)
    return {
        name: files[name]._replace(pieces=tuple(found)) if files[name].pieces else files[name]
        for name, found in own.items()
    }


def file_sum(file: Path) -> FileSum:
    """Size and checksum of a file as it is."""
    size = file.stat().st_size
    return FileSum(size, _checksum(file, 0, size))


def _checksum(file: Path, begin: int, length: int, drop_cache: bool = False) -> str:
    """The checksum of consecutive bytes of a file, or of what it has of them."""
    with file.open("rb", buffering=0) as stream:
        if drop_cache and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(stream.fileno(), begin, length, os.POSIX_FADV_DONTNEED)
        stream.seek(begin)
        hash_, left = xxhash.xxh3_128(), length
        view = memoryview(bytearray(min(_READ_BYTES, max(length, 1))))
        while left and (count := stream.readinto(view[: min(left, len(view))])):
            hash_.update(view[:count])
            left -= count
    return hash_.hexdigest()
