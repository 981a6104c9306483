"""Local copies of shards: uncompressed, or of files on a slow store."""

import gzip
import os
import shutil
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from paddle_vl.data.corpus.offset_index import CacheFolders, file_state, locked
from paddle_vl.data.corpus.shard import open_files

SUFFIXES = (".gz", ".zst")
_BLOCK = 1 << 22
_ATTEMPTS = 5


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
        size, time_ns = file_state(path)
        suffix = f".{size:x}-{time_ns:x}.copy"
        target = next(iter(self.folders.existing(path, suffix)), None)
        if target is None:
            target = self.folders.writable(path, suffix)
            with locked(self.folders.writable(path, ".copy")):
                if not target.is_file():
                    _copy(path, target)
                    self._remove_old(target)
        elif self.at_most is not None:
            with suppress(OSError):
                os.utime(target)
        return str(target)

    def _remove_old(self, newest: Path) -> None:
        if self.at_most is None:
            return
        ages: list[tuple[int, Path]] = []
        for copy in newest.parent.glob("*.copy"):
            with suppress(OSError):
                ages.append((copy.stat().st_mtime_ns, copy))
        for _, copy in sorted(ages)[: -self.at_most]:
            copy.unlink(missing_ok=True)


def _copy(path: Path, target: Path) -> None:
    partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
    try:
        with opened(path) as source, partial.open("wb") as file:
            shutil.copyfileobj(source, file, _BLOCK)
        partial.replace(target)
    except (OSError, EOFError, zlib.error, _zstd_error()) as error:
        raise RuntimeError(
            f"data file {path} cannot be read or uncompressed into {target.parent} ({error}): "
            "check the file, the free space, and data.cache"
        ) from error
    finally:
        partial.unlink(missing_ok=True)


def opened(path: Path) -> BinaryIO | gzip.GzipFile:
    """A file opened for reading its uncompressed content from begin to end.

    Raises:
        RuntimeError: it is a .zst file and the package `zstandard` is missing.
    """
    if path.suffix == ".gz":
        return gzip.open(path, "rb")
    if path.suffix == ".zst":
        return zstandard(path).open(path, "rb")
    return path.open("rb")


def zstandard(path: Path) -> Any:
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


def _zstd_error() -> type[Exception]:
    try:
        import zstandard as package
    except ImportError:
        return OSError
    return package.ZstdError
