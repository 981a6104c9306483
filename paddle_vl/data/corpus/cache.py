"""What is kept for data files: folders of their indexes, opened files, and local copies of shards,
uncompressed or of files on a slow store.
"""

import gzip
import hashlib
import os
import re
import shutil
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from xxhash import xxh3_64

from paddle_vl.files.text_file import locked, replacing

T = TypeVar("T")
FOLDER = ".paddle_vl"
# Opened files, tables and copies that a process keeps.
_MOST_OPEN = 64
# Suffixes of compressed shards.
SUFFIXES = (".gz", ".zst")
_BLOCK = 1 << 22
# A compressed shard may have so many times its size, or 64 MiB; gzip's most is 1032.
_MOST_RATIO, _ALWAYS_FINE = 200, 1 << 26
_ATTEMPTS = 5
_ENDING = b"<end of a whole file>"
# Blocks of a data file that every start reads.
_SAMPLES, _SAMPLE = 4, 1 << 16


class CacheFolders:
    """Where indexes and local copies of data files lie.

    Args:
        chosen: folder for all of them (data.cache); None for one beside each file, or the user's
            cache folder where that cannot be written.
        builds: whether missing indexes are built.
    """

    def __init__(self, chosen: str | None = None, *, builds: bool = True):
        self.chosen, self.builds = chosen, builds

    def candidates(self, file: Path) -> list[Path]:
        """Paths for what belongs to a file, without suffix, in the order of preference."""
        resolved = file.resolve()
        digest = hashlib.sha256(str(resolved).encode()).hexdigest()[:16]
        elsewhere = f"{digest}-{file.name}"
        if self.chosen is not None:
            return [Path(self.chosen) / elsewhere]
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        return [resolved.parent / FOLDER / file.name, Path(base) / "paddle_vl" / elsewhere]

    def existing(self, file: Path, suffix: str) -> Iterator[Path]:
        """Existing files that belong to a file."""
        for stem in self.candidates(file):
            if (found := stem.with_name(stem.name + suffix)).is_file():
                yield found

    def writable(self, file: Path, suffix: str) -> Path:
        """The first candidate whose folder can be written.

        Raises:
            RuntimeError: there is none.
        """
        problems = []
        for stem in self.candidates(file):
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


def file_state(file: Path) -> tuple[int, int, int]:
    """Size in bytes, modification time in nanoseconds, and hash of a few blocks at fixed places;
    of a small file, of all of it.

    Raises:
        RuntimeError: the file does not exist or cannot be read.
    """
    hashed = xxh3_64()
    try:
        with file.open("rb", buffering=0) as opened:
            found = os.fstat(opened.fileno())
            space = max(0, found.st_size - _SAMPLES * _SAMPLE)
            for number in range(_SAMPLES):
                at = number * _SAMPLE + space * number // (_SAMPLES - 1)
                hashed.update(os.pread(opened.fileno(), _SAMPLE, at))
    except OSError as error:
        raise RuntimeError(f"data file {file} cannot be read: {error.strerror}") from error
    # A time before 1970 is negative.
    return found.st_size, found.st_mtime_ns % (1 << 64), hashed.intdigest()


class OpenThings:
    """A bounded number of opened things by key, the least recently used one closed first."""

    def __init__(self, most: int):
        self._most = most
        self._open: OrderedDict[Any, tuple[Any, Callable[[], None]]] = OrderedDict()

    def get(self, key: Any, make: Callable[[], tuple[T, Callable[[], None]]]) -> T:
        """The thing of a key; `make` returns it and what closes it."""
        if key not in self._open:
            self._open[key] = make()
            while len(self._open) > self._most:
                _, close = self._open.popitem(last=False)[1]
                close()
        self._open.move_to_end(key)
        return self._open[key][0]

    def drop(self, key: Any) -> None:
        """Close the thing of a key, if it is open."""
        if key in self._open:
            self._open.pop(key)[1]()


open_files = OpenThings(_MOST_OPEN)


def descriptor(path: str | Path) -> int:
    """Descriptor of a file opened for reading, kept open for further reads.

    Raises:
        RuntimeError: it cannot be opened, which is no fault of a document.
    """

    def make() -> tuple[int, Callable[[], None]]:
        try:
            opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise RuntimeError(
                f"{path} cannot be opened ({error.strerror}): it was there when the run started"
            ) from error
        return opened, lambda: os.close(opened)

    return open_files.get(str(path), make)


def pread(opened: int, begin: int, end: int) -> bytes:
    """Bytes `begin` to `end` of an opened file; fewer where it ends before."""
    pieces: list[bytes] = []
    while begin < end and (piece := os.pread(opened, end - begin, begin)):
        pieces.append(piece)
        begin += len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


@dataclass(frozen=True)
class LocalCopies:
    """Copies of the shards of one source, made when they are first needed.

    Attributes:
        folders: where they lie.
        at_most: shards to keep; the least recently used are removed. None keeps all.
    """

    folders: CacheFolders
    at_most: int | None = None

    def descriptor(self, path: str) -> int:
        """Descriptor of the copy of a shard, kept open for further reads.

        Raises:
            RuntimeError: see `file`.
        """

        def make() -> tuple[int, Callable[[], None]]:
            for _ in range(_ATTEMPTS):
                # Another process may remove the copy before it is opened.
                with suppress(FileNotFoundError):
                    opened = os.open(self.file(Path(path)), os.O_RDONLY | os.O_CLOEXEC)
                    return opened, partial(os.close, opened)
            raise RuntimeError(
                f"the local copy of {path} is removed again before it can be read: more shards are "
                "in use than data.shuffle_shards allows; raise it"
            )

        return open_files.get(("copy", path), make)

    def file(self, path: Path) -> str:
        """Path of the copy of a shard.

        Raises:
            RuntimeError: the shard cannot be read or uncompressed.
        """
        suffix = _suffix(path)
        target = next(iter(self.folders.existing(path, suffix)), None)
        if target is None:
            target = self.folders.writable(path, suffix)
            with locked(self.folders.writable(path, ".copy")):
                if not target.is_file():
                    _copy(path, target)
                    self._remove_old(target, target.name.removesuffix(suffix))
        elif self.at_most is not None:
            with suppress(OSError):
                os.utime(target)
        return str(target)

    def forget(self, path: Path) -> None:
        """Remove the copy of a shard; the next use makes it again."""
        for copy in self.folders.existing(path, _suffix(path)):
            copy.unlink(missing_ok=True)
        open_files.drop(("copy", str(path)))

    def _remove_old(self, newest: Path, name: str) -> None:
        """Remove copies of earlier states of the same shard, and those beyond `at_most`."""
        earlier = re.compile(re.escape(name) + r"\.[0-9a-f]+(-[0-9a-f]+)+\.copy")
        for copy in newest.parent.glob("*.copy"):
            if copy != newest and earlier.fullmatch(copy.name):
                copy.unlink(missing_ok=True)
        if self.at_most is None:
            return
        ages: list[tuple[int, Path]] = []
        for copy in newest.parent.glob("*.copy"):
            with suppress(OSError):
                ages.append((copy.stat().st_mtime_ns, copy))
        for _, copy in sorted(ages)[: -self.at_most]:
            copy.unlink(missing_ok=True)


def _suffix(path: Path) -> str:
    return f".{'-'.join(f'{number:x}' for number in file_state(path))}.copy"


def _copy(path: Path, target: Path) -> None:
    with (
        _reading(path, f" into {target.parent}"),
        _opened(path) as source,
        replacing(target) as partial,
        partial.open("wb") as file,
    ):
        if path.suffix in SUFFIXES:
            _uncompress(path, source, file)
        else:
            shutil.copyfileobj(source, file, _BLOCK)


@contextmanager
def _reading(path: Path, into: str = "") -> Iterator[None]:
    """Name the file in errors of reading or uncompressing it."""
    broken: tuple[type[Exception], ...] = (OSError, EOFError, zlib.error)
    if path.suffix == ".zst":
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
    with _reading(path), _opened(path) as file:
        return file.read(length)


def _uncompress(path: Path, source: BinaryIO | gzip.GzipFile, file: BinaryIO) -> None:
    most = max(_ALWAYS_FINE, _MOST_RATIO * path.stat().st_size)
    size, ending = 0, _ENDING if path.suffix == ".zst" else b""
    kept = b""
    while block := source.read(_BLOCK):
        size += len(block)
        if size > most:
            raise RuntimeError(
                f"data file {path} has more than {most} bytes uncompressed and "
                f"{path.stat().st_size} as it is: that looks like a damaged or hostile file; if it "
                "is meant so, uncompress it yourself and name the result"
            )
        block = kept + block
        kept = block[len(block) - len(ending) :]
        file.write(block[: len(block) - len(kept)])
    if kept != ending:
        raise EOFError("it is cut off")


class _Ended:
    """A Zstandard file and one more frame, which is lost if the file is cut off; without it the end
    would be no error."""

    def __init__(self, file: BinaryIO, frame: bytes):
        self._file, self._frame = file, BytesIO(frame)
        self.close = file.close

    def read(self, size: int = -1) -> bytes:
        return self._file.read(size) or self._frame.read(size)


def _opened(path: Path) -> BinaryIO | gzip.GzipFile:
    """A file opened for reading its uncompressed content from begin to end; that of a .zst file is
    followed by `_ENDING`."""
    if path.suffix == ".gz":
        return gzip.open(path, "rb")
    if path.suffix == ".zst":
        package = _zstandard(path)
        file = _Ended(path.open("rb"), package.compress(_ENDING))
        return package.ZstdDecompressor().stream_reader(file, read_across_frames=True)
    return path.open("rb")


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
