"""One rank's files of a checkpoint, collected in the main thread.

A `Fill` writes small text files into a temporary folder, and passes files of tensors, whose arrays
come from the device and from other ranks, to a `FileWriter`. Tensors are either copied to host
memory and written during training, or written at once, one tensor in memory at a time.
"""

import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from paddle_vl.checkpoint.manifest import FileSum, write_bytes
from paddle_vl.checkpoint.safetensors_io import (
    FileWriter,
    TensorToWrite,
    write_file,
)
from paddle_vl.threads import JoinedThread

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
        self._touching: JoinedThread | None = None

    def prepare(self, size: int) -> None:
        """Allocate `size` bytes and touch them in a thread.

        Raises:
            RuntimeError: out of memory.
        """
        if size > 0 and not self._blocks:
            block = self._new_block(size)
            self._touching = JoinedThread(target=_touch, args=[block], name="touch memory")
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


class Snapshot:
    """Files of this rank: collected by `take`, written by `write_to`.

    Args:
        memory: for copies of the tensors; None to write tensors while they are collected, so that
            they are never all in memory.
    """

    def __init__(self, memory: HostMemory | None):
        self._memory = memory
        self._texts: dict[str, bytes] = {}
        self._copies: dict[str, list[TensorToWrite]] = {}
        self._written: dict[str, FileSum] = {}
        self._error: OSError | None = None

    def take(self, fill: Fill, partial: Path) -> None:
        """Collect the files of `fill`. Called in the main thread by all checkpoint ranks.

        Args:
            partial: folder that `write_to` fills.
        """
        if self._memory is not None:
            self._memory.begin()
        with tempfile.TemporaryDirectory(prefix="paddle-vl-") as folder:
            root = Path(folder)

            def write(file: Path, tensors: Iterable[TensorToWrite]) -> None:
                name = file.relative_to(root).as_posix()
                if self._memory is None:
                    self._write_tensors(partial, name, list(tensors))
                else:
                    self._copies[name] = [_copied(tensor, self._memory) for tensor in tensors]

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
        if self._error is not None:
            raise self._error
        for name in (*self._texts, *self._copies):
            (partial / name).parent.mkdir(parents=True, exist_ok=True)
        written = dict(self._written)
        for name, text in self._texts.items():
            written[name] = write_bytes(partial / name, [text])
        for name, copies in self._copies.items():
            written[name] = write_file(partial / name, copies, go_on)
        return written

    def _write_tensors(self, partial: Path, name: str, tensors: list[TensorToWrite]) -> None:
        left = list(tensors)

        def next_array() -> np.ndarray:
            return left.pop(0).produce()

        try:
            (partial / name).parent.mkdir(parents=True, exist_ok=True)
            counted = [tensor._replace(produce=next_array) for tensor in tensors]
            self._written[name] = write_file(partial / name, counted)
        except OSError as error:
            # Raised once no rank waits for this one in the collectives that produce arrays.
            self._error = self._error or error
            while left:
                next_array()


def _copied(tensor: TensorToWrite, memory: HostMemory) -> TensorToWrite:
    """The tensor with its array of now."""
    array = tensor.produce()
    copy = memory.take(array.nbytes).view(array.dtype).reshape(array.shape)
    np.copyto(copy, array)
    return tensor._replace(produce=lambda: copy)
