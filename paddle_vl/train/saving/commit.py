"""Writing of a folder by several ranks without collectives, which only the main thread may issue.

The main thread collects a rank's files in a `Snapshot`: a `Fill` writes small text files into a
temporary folder, and passes files of tensors, whose arrays come from the device and from other
ranks, to a `FileWriter`. Tensors are either copied to host memory and written during training, or
written at once, one tensor in memory at a time.

Every rank writes its files in a thread (`FolderWrite`). Once they are on disk it leaves
`.part-RANK.json` in the partial folder: their sizes and checksums, or why it failed. Rank 0 waits
for these files, merges them into `manifest.json` and renames the folder (`commit`). That needs a
file system that all ranks share. Over 350 lines, for a write from its snapshot to its commit.
"""

import json
import logging
import math
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from paddle_vl.checkpoint.manifest import (
    FileSum,
    Manifest,
    damaged_files,
    files_as_json,
    files_from_json,
    write_bytes,
)
from paddle_vl.checkpoint.safetensors_io import FileWriter, TensorToWrite, write_file
from paddle_vl.threads import JoinedThread
from paddle_vl.train.checkpoint import flush_to_disk, partial_of, remove_folder, replaced_of

logger = logging.getLogger(__name__)
_POLL_S = (0.02, 1.0)
# Seconds that a written file may stay invisible on a network file system.
VISIBLE_WITHIN_S = 300.0
# Seconds that rank 0 waits for other ranks after an error; one of them may have died.
_PATIENCE_S = 5.0
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
        if size <= 0 or self._blocks:
            return
        block = self._new_block(size)

        def touch() -> None:
            for begin in range(0, size, _TOUCHED_BYTES):
                block[begin : begin + _TOUCHED_BYTES] = 0

        self._touching = JoinedThread(target=touch, name="touch memory")
        self._touching.start()

    def begin(self) -> None:
        """Reuse all memory for a new save, once the thread has touched it."""
        if self._touching is not None:
            self._touching.join()
            self._touching = None
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

    def clear(self) -> None:
        """Free the memory."""
        self.begin()
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
                    return
                copies = self._copies[name] = []
                for tensor in tensors:
                    array = tensor.produce()
                    copy = self._memory.take(array.nbytes).view(array.dtype).reshape(array.shape)
                    np.copyto(copy, array)
                    copies.append(tensor._replace(produce=lambda copy=copy: copy))

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


@dataclass(frozen=True)
class RankFiles:
    """What one rank wrote.

    Attributes:
        files: by path inside the folder.
        doubts: messages about files that read back differently.
        error: why the rank failed, if it did.
    """

    files: Mapping[str, FileSum] = field(default_factory=dict)
    doubts: tuple[str, ...] = ()
    error: str | None = None

    def write(self, partial: Path, rank: int) -> None:
        """Write `.part-RANK.json` atomically."""
        values = {"files": files_as_json(self.files), "doubts": self.doubts, "error": self.error}
        write_bytes(_part_file(partial, rank), [json.dumps(values).encode()])

    @classmethod
    def read(cls, partial: Path, rank: int) -> "RankFiles | None":
        """What a rank wrote; None until it is there."""
        try:
            values = json.loads(_part_file(partial, rank).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        return cls(files_from_json(values["files"]), tuple(values["doubts"]), values["error"])


def _part_file(partial: Path, rank: int) -> Path:
    return partial / f".part-{rank}.json"


def collect_ranks(
    partial: Path, ranks: Iterable[int], go_on: Callable[[], None], all_written: Callable[[], bool]
) -> dict[int, RankFiles]:
    """Wait for what all ranks wrote.

    Args:
        go_on: called while waiting; raises to stop.
        all_written: whether all ranks are known to have written.

    Raises:
        RuntimeError: a rank failed, or its file cannot be seen from here.
    """
    found: dict[int, RankFiles] = {}
    pause, known_since = _POLL_S[0], None
    while True:
        for rank in [rank for rank in ranks if rank not in found]:
            written = RankFiles.read(partial, rank)
            if written is None:
                continue
            if written.error is not None:
                raise RuntimeError(f"rank {rank} could not write its files: {written.error}")
            found[rank] = written
        missing = [rank for rank in ranks if rank not in found]
        if not missing:
            return found
        go_on()
        if known_since is None and all_written():
            known_since = time.monotonic()
        if known_since is not None and time.monotonic() - known_since > VISIBLE_WITHIN_S:
            raise RuntimeError(
                f"{partial} has no {_part_file(partial, missing[0]).name}, which rank "
                f"{missing[0]} has written: train.output_dir must lie on a file system that all "
                "ranks share"
            )
        time.sleep(pause)
        pause = min(2 * pause, _POLL_S[1])


def commit(
    partial: Path,
    target: Path,
    by_rank: Mapping[int, RankFiles],
    step: int,
    nonfinite_updates: int,
) -> None:
    """Write the manifest and rename the folder; replaces an older folder of that name.

    If the process ends at any point, `target` is the complete old folder, the complete new one, or
    what `finish_replacements` makes the new one at the next start.
    """
    files = {name: file for one in by_rank.values() for name, file in one.files.items()}
    Manifest(step, nonfinite_updates, files).write(partial)
    for rank in by_rank:
        _part_file(partial, rank).unlink()
    for folder in {partial, *((partial / name).parent for name in files)}:
        flush_to_disk(folder)
    if target.exists():
        logger.info("%s is replaced by a new one", target)
        target.rename(replaced_of(target))
    partial.rename(target)
    flush_to_disk(target.parent)
    if replaced_of(target).exists():
        remove_folder(replaced_of(target))


class WriteTimes(NamedTuple):
    """Durations of a write in seconds.

    Attributes:
        stall: training was blocked, by the previous write and by the snapshot.
        write: from then until the folder was renamed and old ones were pruned.
    """

    stall: float
    write: float


class FolderWrite:
    """The write of one folder on this rank, in a thread of its own.

    The interpreter waits for the thread before it ends, so a rename is never cut short.

    Args:
        snapshot: of this rank; None for a rank that writes nothing.
        reads_back: read the files again and compare them.
        begin: when the save began, by `time.perf_counter`.

    Attributes:
        all_have_written: set once the files of all ranks are on disk, or have failed.
        finish: further work on rank 0, after its files.
        is_told: whether a failure, of any rank, was raised already.
    """

    def __init__(
        self, snapshot: Snapshot | None, target: Path, rank: int, begin: float, reads_back: bool
    ):
        self.target, self.reads_back = target, reads_back
        self.all_have_written = threading.Event()
        self.finish: Callable[[], None] = lambda: None
        self.is_told = False
        self.times: WriteTimes | None = None
        self._snapshot, self._rank, self._begin = snapshot, rank, begin
        self._deadline, self._is_given_up = math.inf, False

    def start(self) -> None:
        thread = ThreadPoolExecutor(1, f"write {self.target.name}")
        self._started = time.perf_counter()
        # Done once this rank's files are on disk, or have failed.
        self.files = thread.submit(self._write_files)
        self.end = thread.submit(self._finish)
        thread.shutdown(wait=False)

    @property
    def error(self) -> RuntimeError | None:
        """The failure so far; a write that was left is none."""
        for work in (self.files, self.end):
            error = work.exception() if work.done() else None
            if error is not None and not isinstance(error, AbandonedError):
                return failure(self.target, error)
        return None

    def leave(self, at_once: bool) -> None:
        """Stop waiting for other ranks soon, `at_once` stops writing too; wait for the end."""
        self._deadline = time.monotonic() + (0 if at_once else _PATIENCE_S)
        self._is_given_up = at_once
        wait([self.end])

    def go_on(self) -> None:
        """Raise AbandonedError if this rank must not wait for others any longer."""
        if time.monotonic() > self._deadline:
            raise AbandonedError

    def _go_on_writing(self) -> None:
        if self._is_given_up:
            raise AbandonedError

    def _write_files(self) -> None:
        partial = partial_of(self.target)
        if self._snapshot is None:
            return
        try:
            files = self._snapshot.write_to(partial, self._go_on_writing)
            doubts = damaged_files(partial, files, drop_cache=True) if self.reads_back else []
            RankFiles(files, tuple(doubts)).write(partial, self._rank)
        except (OSError, RuntimeError) as error:
            # So that rank 0 does not wait for this rank; `CheckpointWriter.wait` raises it too.
            with suppress(OSError):
                RankFiles(error=str(error)).write(partial, self._rank)
            raise

    def _finish(self) -> None:
        self.files.result()
        self.finish()
        written = time.perf_counter() - self._started
        self.times = WriteTimes(self._started - self._begin, written)


def failure(target: Path, error: BaseException) -> RuntimeError:
    """The error to raise if a folder could not be written."""
    told = RuntimeError(
        f"{target.name} could not be written: {error}. Earlier checkpoints are as they were: mend "
        "this and continue with train.resume_from_checkpoint=auto"
    )
    told.__cause__ = error
    return told
