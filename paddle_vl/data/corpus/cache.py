"""What is kept for data files: folders of their indexes, opened files, and local copies of shards,
uncompressed or of files on a slow store.
"""

import gzip
import hashlib
import os
import re
import shutil
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from xxhash import xxh3_64

from paddle_vl.files.text_file import locked, replacing

FOLDER = ".paddle_vl"
# Opened files that a process keeps.
_MOST_OPEN = 64
# Suffixes of compressed shards.
SUFFIXES = (".gz", ".zst")
_BLOCK = 1 << 22
# Compressed bytes that are unpacked at once: four can stand for 128 KiB.
_PACKED = 1 << 10
# A compressed shard may have so many times its size, or 64 MiB; gzip's most is 1032.
_MOST_RATIO, _ALWAYS_FINE = 200, 1 << 26
_ATTEMPTS = 5
# Blocks of a data file that every start reads.
_SAMPLES, _SAMPLE = 4, 1 << 16


class FileState(NamedTuple):
    """Size in bytes, modification time in nanoseconds, and hash of a few blocks at fixed places; of
    a small file, of all of it."""

    size: int
    time: int
    blocks: int


def file_state(file: str | Path) -> FileState:
    """
    Raises:
        RuntimeError: the file does not exist or cannot be read.
    """
    hashed = xxh3_64()
    try:
        with open(file, "rb", buffering=0) as opened:
            found = os.fstat(opened.fileno())
            space = max(0, found.st_size - _SAMPLES * _SAMPLE)
            for number in range(_SAMPLES):
                at = number * _SAMPLE + space * number // (_SAMPLES - 1)
                hashed.update(os.pread(opened.fileno(), _SAMPLE, at))
    except OSError as error:
        raise RuntimeError(f"data file {file} cannot be read: {error.strerror}") from error
    # A time before 1970 is negative.
    return FileState(found.st_size, found.st_mtime_ns % (1 << 64), hashed.intdigest())


class _Opened:
    """A file opened for reading, closed when nobody has it any more."""

    def __init__(self, descriptor: int):
        self.descriptor = descriptor

    # The module is empty when the interpreter ends.
    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        close(self.descriptor)


@lru_cache(maxsize=_MOST_OPEN)
def opened_file(path: str, state: FileState | None) -> _Opened:
    """A file, kept open for further reads.

    Args:
        state: that it had; another file of the name is opened anew.
    """
    return _Opened(os.open(path, os.O_RDONLY | os.O_CLOEXEC))


def read_bytes(path: str, state: FileState | None, begin: int, end: int) -> bytes:
    """Bytes `begin` to `end` of a file; fewer where it ends before.

    Raises:
        RuntimeError: it cannot be read, which is no fault of a document.
    """
    try:
        return _pread(opened_file(path, state), begin, end)
    except OSError as error:
        raise RuntimeError(
            f"{path} cannot be read ({error.strerror}): it was there when the run started"
        ) from error


def _pread(opened: _Opened, begin: int, end: int) -> bytes:
    pieces: list[bytes] = []
    while begin < end and (piece := os.pread(opened.descriptor, end - begin, begin)):
        pieces.append(piece)
        begin += len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


@dataclass(frozen=True)
class Cache:
    """Where indexes and local copies of data files lie.

    Attributes:
        chosen: folder for all of them (data.cache); None for one beside each file, or the user's
            cache folder where that cannot be written.
        most_copies: shards whose copies are kept; the least recently used are removed. None keeps
            all.
    """

    chosen: str | None = None
    most_copies: int | None = None

    def _stems(self, file: Path) -> list[Path]:
        """Paths for what belongs to a file, without suffix, in the order of preference."""
        resolved = file.resolve()
        digest = hashlib.sha256(str(resolved).encode()).hexdigest()[:16]
        elsewhere = f"{digest}-{file.name}"
        if self.chosen is not None:
            return [Path(self.chosen) / elsewhere]
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        return [resolved.parent / FOLDER / file.name, Path(base) / "paddle_vl" / elsewhere]

    def existing(self, file: Path, suffix: str) -> list[Path]:
        """Existing files that belong to a file."""
        paths = [stem.with_name(stem.name + suffix) for stem in self._stems(file)]
        return [path for path in paths if path.is_file()]

    def writable(self, file: Path, suffix: str) -> Path:
        """The first path for what belongs to a file whose folder can be written.

        Raises:
            RuntimeError: there is none.
        """
        problems = []
        for stem in self._stems(file):
            try:
                stem.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                problems.append(str(error))
                continue
            if os.access(stem.parent, os.W_OK | os.X_OK):
                return stem.with_name(stem.name + suffix)
            problems.append(f"{stem.parent} cannot be written")
        raise RuntimeError(
            f"there is no folder for the index of {file} ({'; '.join(problems)}): set data.cache "
            "to a folder that can be written"
        )

    def copy_of(self, path: str, state: FileState) -> str:
        """Path of the local copy of a shard in a state, made when it is first needed.

        Raises:
            RuntimeError: the shard cannot be read or uncompressed.
        """
        file = Path(path)
        suffix = f".{'-'.join(f'{number:x}' for number in state)}.copy"
        target = next(iter(self.existing(file, suffix)), None)
        if target is None:
            target = self.writable(file, suffix)
            with locked(self.writable(file, ".copy")):
                if not target.is_file():
                    _copy(file, target)
                    self._remove_old(target, target.name.removesuffix(suffix))
        elif self.most_copies is not None:
            with suppress(OSError):
                os.utime(target)
        return str(target)

    def read_copy(self, path: str, state: FileState, begin: int, end: int) -> bytes:
        """Bytes of the local copy of a shard.

        Raises:
            RuntimeError: see `copy_of`; or it is removed before it can be read.
        """
        return _pread(_opened_copy(self, path, state), begin, end)

    def _remove_old(self, newest: Path, name: str) -> None:
        """Remove copies of earlier states of the same shard, and those beyond `most_copies`."""
        earlier = re.compile(re.escape(name) + r"\.[0-9a-f]+(-[0-9a-f]+)+\.copy")
        ages: list[tuple[int, Path]] = []
        for copy in newest.parent.glob("*.copy"):
            with suppress(OSError):
                if copy != newest and earlier.fullmatch(copy.name):
                    copy.unlink()
                else:
                    ages.append((copy.stat().st_mtime_ns, copy))
        for _, copy in sorted(ages)[: -self.most_copies] if self.most_copies is not None else ():
            copy.unlink(missing_ok=True)


@lru_cache(maxsize=_MOST_OPEN)
def _opened_copy(cache: Cache, path: str, state: FileState) -> _Opened:
    for _ in range(_ATTEMPTS):
        # Another process may remove the copy before it is opened.
        with suppress(FileNotFoundError):
            return _Opened(os.open(cache.copy_of(path, state), os.O_RDONLY | os.O_CLOEXEC))
    raise RuntimeError(
        f"the local copy of {path} is removed again before it can be read: more shards are in use "
        "than data.shuffle_shards allows; raise it"
    )


def _copy(path: Path, target: Path) -> None:
    with (
        _reading(path, f" into {target.parent}"),
        path.open("rb") as source,
        replacing(target) as partial,
        partial.open("wb") as file,
    ):
        if path.suffix.lower() in SUFFIXES:
            file.writelines(_bounded(path, _unpacked(path, source)))
        else:
            shutil.copyfileobj(source, file, _BLOCK)


@contextmanager
def _reading(path: Path, into: str = "") -> Iterator[None]:
    """Name the file in errors of reading or uncompressing it."""
    broken: tuple[type[Exception], ...] = (OSError, EOFError, zlib.error)
    if path.suffix.lower() == ".zst":
        broken += (_zstandard(path).ZstdError,)
    try:
        yield
    except broken as error:
        raise RuntimeError(
            f"data file {path} cannot be read or uncompressed{into} ({error}): check the file, the "
            "free space, and data.cache"
        ) from error


def first_bytes(path: Path, length: int) -> bytes:
    """The uncompressed beginning of a file.

    Raises:
        RuntimeError: it cannot be read or uncompressed.
    """
    with _reading(path), path.open("rb") as file:
        if path.suffix.lower() not in SUFFIXES:
            return file.read(length)
        return next(_unpacked(path, file), b"")[:length]


def _unpacked(path: Path, source: BinaryIO) -> Iterator[bytes]:
    """The pieces of a compressed file.

    Raises:
        EOFError: it is cut off.
    """
    if path.suffix.lower() == ".gz":
        with gzip.open(source) as file:
            while piece := file.read(_BLOCK):
                yield piece
        return
    package, frame = _zstandard(path), None
    while packed := source.read(_PACKED):
        while packed:
            frame = frame or package.ZstdDecompressor().decompressobj()
            if piece := frame.decompress(packed):
                yield piece
            packed = frame.unused_data
            frame = None if frame.eof else frame
    if frame is not None:
        raise EOFError("it is cut off")


def _bounded(path: Path, pieces: Iterator[bytes]) -> Iterator[bytes]:
    """The pieces of a compressed file, refused where they become far more than it."""
    stored, size = path.stat().st_size, 0
    most = max(_ALWAYS_FINE, _MOST_RATIO * stored)
    for piece in pieces:
        size += len(piece)
        if size > most:
            raise RuntimeError(
                f"data file {path} has more than {most} bytes uncompressed and {stored} as it is: "
                "that looks like a damaged or hostile file; if it is meant so, uncompress it "
                "yourself and name the result"
            )
        yield piece


def _zstandard(path: Path) -> Any:
    """The package that reads Zstandard files.

    Raises:
        RuntimeError: it is missing.
    """
    try:
        import zstandard as package
    except ImportError as error:
        raise RuntimeError(
            f"{path} is a Zstandard file, which needs the package zstandard: pip install "
            "'paddle-vl[corpus]'"
        ) from error
    return package
