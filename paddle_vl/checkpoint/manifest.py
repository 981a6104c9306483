"""`manifest.json` of a checkpoint: its files with sizes and checksums.

    {"format": 1, "step": 500, "nonfinite_updates": 0,
     "files": {"model.safetensors": {"size": 1234, "xxh3_128": "9f.."}, ..}}

Checksums are computed from the bytes in memory before they are written, so they reveal errors of
writing too. Other files in the folder, such as a model card, are not checked.
"""

import json
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NamedTuple

import xxhash

from paddle_vl.files.text_file import replacing

MANIFEST_FILE = "manifest.json"
CHECKSUM = "xxh3_128"
FORMAT = 1
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


class FileSum(NamedTuple):
    """Size in bytes and checksum of a file."""

    size: int
    checksum: str


class SummedStream:
    """A file that is being written, and the checksum of its bytes."""

    def __init__(self, stream: BinaryIO):
        self._stream, self._hash = stream, xxhash.xxh3_128()
        self._size = self._size_on_disk = 0

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
            if self._size - self._size_on_disk >= _FLUSH_BYTES:
                self._flush()

    def to_disk(self) -> FileSum:
        """Flush everything to the disk; size and checksum of the file."""
        self._flush()
        return FileSum(self._size, self._hash.hexdigest())

    def _flush(self) -> None:
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self._size_on_disk = self._size


def write_bytes(
    file: Path, parts: Iterable[Any], go_on: Callable[[], None] | None = None
) -> FileSum:
    """Write one file atomically: it gets its name when it is complete on disk.

    Args:
        parts: contiguous buffers.
        go_on: called between pieces; it raises to abort the write.

    Returns:
        Its size and checksum.

    Raises:
        OSError: the file cannot be written; the error names it.
    """
    with replacing(file) as partial, partial.open("wb") as stream:
        summed = SummedStream(stream)
        for part in parts:
            summed.write(part, go_on)
            # Free it before the next one is made.
            del part
        return summed.to_disk()


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
        values = {
            "format": FORMAT,
            "step": self.step,
            # For earlier versions, which pass over checkpoints with another number.
            "nonfinite_updates": 0,
            "files": dict(sorted(files_as_json(self.files).items())),
        }
        write_bytes(folder / MANIFEST_FILE, [json.dumps(values, indent=1).encode()])

    @classmethod
    def read(cls, folder: Path) -> "Manifest | None":
        """The manifest of a folder; None if it has none, as in checkpoints of earlier versions.

        Raises:
            RuntimeError: the file is damaged.
        """
        path = folder / MANIFEST_FILE
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            if values["format"] != FORMAT:
                raise ValueError(f"format {values['format']} is not {FORMAT}")
            manifest = cls(values["step"], files_from_json(values["files"]))
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
    return {name: {"size": file.size, CHECKSUM: file.checksum} for name, file in files.items()}


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
        size, checksum = entry["size"], entry[CHECKSUM]
        if type(size) is not int or not isinstance(checksum, str):
            raise ValueError(f"the entry of {name} has size {size!r} and {CHECKSUM} {checksum!r}")
        files[name] = FileSum(size, checksum)
    return files


def damaged_files(
    folder: Path, files: Mapping[str, FileSum], checksums: bool = True, drop_cache: bool = False
) -> list[str]:
    """One line for each missing, truncated or changed file.

    Sizes are compared first, so that missing and truncated files are found without reading.

    Args:
        checksums: read the files; otherwise only their sizes are compared.
        drop_cache: read from the disk instead of the page cache, where the system allows it.
    """
    found = []
    for name, wanted in files.items():
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
    ordered = sorted(files, key=lambda name: -files[name].size)

    def wrong_sum(name: str) -> str | None:
        try:
            found = file_sum(folder / name, drop_cache)
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
        if found.checksum == files[name].checksum:
            return None
        return f"{name} does not have the checksum that was written, its contents have changed"

    with ThreadPoolExecutor(min(_MAX_READERS, len(files), os.cpu_count() or 1)) as readers:
        return [problem for problem in readers.map(wrong_sum, ordered) if problem is not None]


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
    """This rank's share of the files to check, about equal in bytes on all `size` ranks."""
    loads = [0] * size
    own = {}
    for name in sorted(files, key=lambda name: (-files[name].size, name)):
        least = loads.index(min(loads))
        loads[least] += files[name].size
        if least == rank:
            own[name] = files[name]
    return own


def file_sum(file: Path, drop_cache: bool = False) -> FileSum:
    """Size and checksum of a file as it is.

    Args:
        drop_cache: see `damaged_files`.
    """
    with file.open("rb", buffering=0) as stream:
        if drop_cache and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        size = os.fstat(stream.fileno()).st_size
        hash_, buffer = xxhash.xxh3_128(), bytearray(min(_READ_BYTES, max(size, 1)))
        view = memoryview(buffer)
        while count := stream.readinto(buffer):
            hash_.update(view[:count])
    return FileSum(size, hash_.hexdigest())
