"""The files that one rank writes of a checkpoint, collected in the main thread.

What fills a checkpoint does two things: it writes small text files into a folder, and hands files
of tensors, whose arrays come from the device and from other ranks, to a `FileWriter`. The text goes
into a temporary folder of this machine. Tensors are either copied into host memory, to be written
while training goes on (`HostSnapshot`), or written at once, one in memory at a time (`NoSnapshot`).
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
from paddle_vl.files.named_errors import naming

# What memory is taken in beyond what was known to be needed.
_BLOCK_BYTES = 1 << 26
_TOUCHED_BYTES = 1 << 24
# Fills a folder; files of tensors in it are handed to the writer. Called by all ranks together.
Fill = Callable[[Path, FileWriter], None]


class AbandonedError(Exception):
    """A write was given up."""


class HostMemory:
    """Host memory for copies of tensors, which stays from one save to the next.

    Memory that the system hands out anew costs several times the copying, when it is first touched.
    So it is kept, and what is known to be needed is touched beside training, before the first save.
    """

    def __init__(self):
        # Blocks, and how much of each is taken.
        self._blocks: list[np.ndarray] = []
        self._taken: list[int] = []
        self._touching: threading.Thread | None = None

    def prepare(self, size: int) -> None:
        """Have so many bytes ready soon.

        Raises:
            RuntimeError: there is not so much memory.
        """
        if size > 0 and not self._blocks:
            block = self._new_block(size)
            self._touching = threading.Thread(target=_touch, args=[block], name="touch memory")
            self._touching.start()

    def begin(self) -> None:
        """Take everything anew: nothing of an earlier save is needed any more."""
        self.settle()
        self._taken = [0] * len(self._blocks)

    def take(self, size: int) -> np.ndarray:
        """`[size]` uint8, with whatever is in it.

        Raises:
            RuntimeError: there is not so much memory.
        """
        for number, block in enumerate(self._blocks):
            begin = self._taken[number]
            if block.size - begin >= size:
                self._taken[number] = begin + size
                return block[begin : begin + size]
        block = self._new_block(max(size, _BLOCK_BYTES))
        self._taken[-1] = size
        return block[:size]

    def settle(self) -> None:
        """Until no thread works on it."""
        if self._touching is not None:
            self._touching.join()
            self._touching = None

    def clear(self) -> None:
        """Give the memory back."""
        self.settle()
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
    """What this rank writes into a folder; made by `take`, written by `write_to`."""

    def __init__(self):
        self._texts: dict[str, bytes] = {}

    def take(self, fill: Fill, partial: Path) -> None:
        """Collect what `fill` makes. In the main thread, by all ranks that hold the model together.

        Args:
            partial: the folder that is to be filled in the end.
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
        """Write everything into the folder, on the disk when this returns.

        Args:
            go_on: called between pieces; raises `AbandonedError` to end the write.

        Raises:
            OSError: a file cannot be written; the error names it.
        """
        return {
            name: _written(partial / name, lambda stream, text=text: stream.write(text))
            for name, text in self._texts.items()
        }

    @abstractmethod
    def _take_tensors(self, partial: Path, name: str, tensors: list[TensorToWrite]) -> None:
        """Take the tensors of one file."""


class HostSnapshot(Snapshot):
    """Tensors as copies in host memory: this rank's share of the checkpoint."""

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
    """Tensors are written while they are collected, and are never all in memory."""

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
