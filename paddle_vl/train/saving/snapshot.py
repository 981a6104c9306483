"""One rank's files of a checkpoint, collected in the main thread.

A `Fill` writes small text files into a temporary folder, and passes files of tensors, whose arrays
come from the device and from other ranks, to a `FileWriter`. Tensors are either copied to host
memory and written during training (`HostSnapshot`), or written at once, one tensor in memory at a
time (`NoSnapshot`).
"""

import tempfile
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from paddle_vl.checkpoint.manifest import FileSum, SummedStream
from paddle_vl.checkpoint.safetensors_io import (
    FileWriter,
    TensorToWrite,
    bytes_of,
    file_header,
    write_file,
)
from paddle_vl.files.text_file import naming

# Allocation unit beyond the prepared memory, and stride of touching memory.
_BLOCK_BYTES = 1 << 26
_TOUCHED_BYTES = 1 << 24
# Writes text files into a folder and passes files of tensors to the writer. Called by all ranks.
Fill = Callable[[Path, FileWriter], None]


class AbandonedError(Exception):
    """A write was abandoned."""


class HostMemory:
    """Host memory for copies of tensors, kept from one save to the next.

    The first write to newly allocated pages costs several times the copy itself. So memory is
    reused, and a thread touches the expected amount before the first save, while training runs.
    """

    def __init__(self):
        # Blocks, and used bytes of each.
        self._blocks: list[np.ndarray] = []
        self._taken: list[int] = []
        self._touching: threading.Thread | None = None

    def prepare(self, size: int) -> None:
        """Allocate `size` bytes and touch them in a thread.

        Raises:
            RuntimeError: out of memory.
        """
        if size > 0 and not self._blocks:
            block = self._new_block(size)
            self._touching = threading.Thread(target=_touch, args=[block], name="touch memory")
            self._touching.start()

    def begin(self) -> None:
        """Reuse all memory for a new save."""
        self.wait()
        self._taken = [0] * len(self._blocks)

    def take(self, size: int) -> np.ndarray:
        """An uninitialized array `[size]` uint8.

        Raises:
            RuntimeError: out of memory.
        """
        for number, block in enumerate(self._blocks):
            begin = self._taken[number]
            if block.size - begin >= size:
                self._taken[number] = begin + size
                return block[begin : begin + size]
        block = self._new_block(max(size, _BLOCK_BYTES))
        self._taken[-1] = size
        return block[:size]

    def wait(self) -> None:
        """Wait for the thread that touches memory."""
        if self._touching is not None:
            self._touching.join()
            self._touching = None

    def clear(self) -> None:
        """Free the memory."""
        self.wait()
        self._blocks, self._taken = [], []

    def _new_block(self, size: int) -> np.ndarray:
        try:
            block = np.empty([size], np.uint8)
        except MemoryError as error:
            raise RuntimeError(
                f"there is no host memory of {size / 1e9:.1f} GB for a copy of the checkpoint: set "
                "train.async_save=false, which writes it without one"
            ) from error
        self._blocks.append(block)
        self._taken.append(0)
        return block


def _touch(block: np.ndarray) -> None:
    for begin in range(0, block.size, _TOUCHED_BYTES):
        block[begin : begin + _TOUCHED_BYTES] = 0


class Snapshot(ABC):
    """Files of this rank: collected by `take`, written by `write_to`."""

    def __init__(self):
        self._texts: dict[str, bytes] = {}

    def take(self, fill: Fill, partial: Path) -> None:
        """Collect the files of `fill`. Called in the main thread by all checkpoint ranks.

        Args:
            partial: folder that `write_to` fills.
        """
        with tempfile.TemporaryDirectory(prefix="paddle-vl-") as folder:
            root = Path(folder)

            def write(file: Path, tensors: Iterable[TensorToWrite]) -> None:
                self._take_tensors(partial, file.relative_to(root).as_posix(), list(tensors))

            fill(root, write)
            for path in sorted(root.rglob("*")):
                if path.is_file():
                    self._texts[path.relative_to(root).as_posix()] = path.read_bytes()

    def write_to(self, partial: Path, go_on: Callable[[], None]) -> dict[str, FileSum]:
        """Write all files into the folder and flush them to disk.

        Args:
            go_on: called between chunks; raises `AbandonedError` to stop.

        Raises:
            OSError: a file cannot be written; the error names it.
        """
        return {
            name: _written(partial / name, lambda stream, text=text: stream.write(text))
            for name, text in self._texts.items()
        }

    @abstractmethod
    def _take_tensors(self, partial: Path, name: str, tensors: list[TensorToWrite]) -> None:
        """Collect the tensors of one file."""


class HostSnapshot(Snapshot):
    """Copies the tensors of this rank to host memory."""

    def __init__(self, memory: HostMemory):
        super().__init__()
        self._memory = memory
        memory.begin()
        self._files: dict[str, list[tuple[TensorToWrite, np.ndarray]]] = {}

    def write_to(self, partial: Path, go_on: Callable[[], None]) -> dict[str, FileSum]:
        written = super().write_to(partial, go_on)
        for name, copies in self._files.items():

            def write(stream: SummedStream, copies=copies) -> None:
                stream.write(file_header(tensor for tensor, _ in copies))
                for tensor, copy in copies:
                    stream.write(bytes_of(tensor, copy), go_on)

            written[name] = _written(partial / name, write)
        return written

    def _take_tensors(self, partial: Path, name: str, tensors: list[TensorToWrite]) -> None:
        copies = []
        for tensor in tensors:
            array = tensor.produce()
            copy = self._memory.take(array.nbytes).view(array.dtype).reshape(array.shape)
            np.copyto(copy, array)
            copies.append((tensor, copy))
        self._files[name] = copies


class NoSnapshot(Snapshot):
    """Writes tensors while they are collected; they are never all in memory."""

    def __init__(self):
        super().__init__()
        self._written: dict[str, FileSum] = {}

    def write_to(self, partial: Path, go_on: Callable[[], None]) -> dict[str, FileSum]:
        return super().write_to(partial, go_on) | self._written

    def _take_tensors(self, partial: Path, name: str, tensors: list[TensorToWrite]) -> None:
        (partial / name).parent.mkdir(parents=True, exist_ok=True)
        self._written[name] = write_file(partial / name, tensors)


def _written(path: Path, write: Callable[[SummedStream], object]) -> FileSum:
    with naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as stream:
            summed = SummedStream(stream)
            write(summed)
            return summed.to_disk()
