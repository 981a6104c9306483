"""Shards: data files with documents that can be read by number."""

import os
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

# A row of JSONL, of a Parquet table or of a tar file. Images are paths, or bytes of a file.
Row = Mapping[str, Any]
T = TypeVar("T")
# Opened files, tables and copies that a process keeps.
_MOST_OPEN = 64


class Shard(Protocol):
    """One data file. It can be pickled; files are opened when a document is read.

    Attributes:
        path: the data file.
        count: its documents.
        groups: documents of each of its parts that are read at once; `[count]` if any can be.
        content: hash that changes with the documents.
    """

    @property
    def path(self) -> str: ...

    @property
    def count(self) -> int: ...

    @property
    def content(self) -> int: ...

    @property
    def groups(self) -> Sequence[int]: ...

    def read(self, row: int) -> Row:
        """The document of a number.

        Raises:
            BadSampleError: it cannot be used; without a place.
        """
        ...

    def place(self, row: int) -> str:
        """The document's place for messages: `file:line`, `file:row N` or the like."""
        ...


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


open_files = OpenThings(_MOST_OPEN)


def descriptor(path: str | Path) -> int:
    """Descriptor of a file opened for reading, kept open for further reads."""

    def make() -> tuple[int, Callable[[], None]]:
        opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        return opened, lambda: os.close(opened)

    return open_files.get(str(path), make)
