"""What is kept for data files: folders of their indexes and copies, and opened files."""

import fcntl
import hashlib
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from xxhash import xxh3_64

T = TypeVar("T")
FOLDER = ".paddle_vl"
# Opened files, tables and copies that a process keeps.
_MOST_OPEN = 64
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


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock beside `path` that other processes wait for; it ends with its process.

    Some network file systems have no locks. Then several processes may do the same work; files
    appear at once all the same.
    """
    with path.with_name(path.name + ".lock").open("a") as file:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


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
