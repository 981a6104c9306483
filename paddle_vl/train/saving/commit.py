"""Writing of a folder by several ranks without collectives, which only the main thread may issue.

The main thread collects a rank's files in a `Snapshot`: a `Fill` writes small text files into a
temporary folder, and passes files of tensors, whose arrays come from the device and from other
ranks, to a `FileWriter`. Tensors are either copied to host memory and written during training, or
written at once, one tensor in memory at a time.

Every rank writes its files, and its ranges of common files, in a thread (`FolderWrite`). Once they
are on disk it leaves `.part-RANK.json` in the partial folder: their sizes and checksums, or why it
failed. Rank 0 waits for these files, checks that the ranges cover each file, merges them into
`manifest.json` and renames the folder (`commit`). That needs a file system that all ranks share.
"""

import json
import logging
import math
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path

import numpy as np

from paddle_vl.checkpoint.manifest import (
    CHUNK_BYTES,
    FileSum,
    Manifest,
    Piece,
    damaged_files,
    files_as_json,
    files_from_json,
    uncovered,
    write_bytes,
)
from paddle_vl.checkpoint.safetensors_io import FileWriter, TensorToWrite, write_file
from paddle_vl.train.checkpoint import flush_to_disk, partial_of, set_aside

logger = logging.getLogger(__name__)
_POLL_S = (0.02, 1.0)
# Writes text files into a folder and passes files of tensors to the writer. Called by all ranks.
Fill = Callable[[Path, FileWriter], None]
# Copies of tensors by file and name, kept from one save to the next: the first write to newly
# allocated pages costs several times the copy itself.
Copies = dict[tuple[str, str, int | None], np.ndarray]


class Snapshot:
    """Files of this rank: collected by `take`, written by `write_to`.

    Args:
        memory: for copies of the tensors; None to write tensors while they are collected, so that
            they are never all in memory.
        in_place: ranks write into common files; otherwise rank 0 puts their ranges together.
    """

    def __init__(self, memory: Copies | None, in_place: bool = True):
        self._memory, self.in_place = memory, in_place
        self._texts: dict[str, bytes] = {}
        self._copies: dict[str, list[TensorToWrite]] = {}
        self._written: dict[str, FileSum] = {}
        self._error: OSError | None = None

    def take(self, fill: Fill, partial: Path) -> None:
        """Collect the files of `fill`. Called in the main thread by all checkpoint ranks.

        Args:
            partial: folder that `write_to` fills.

        Raises:
            RuntimeError: out of host memory.
        """
        with tempfile.TemporaryDirectory(prefix="paddle-vl-") as folder:
            root = Path(folder)

            def write(file: Path, tensors: Iterable[TensorToWrite]) -> None:
                name = file.relative_to(root).as_posix()
                if self._memory is None:
                    self._write_tensors(partial, name, list(tensors))
                else:
                    self._copies[name] = [_copied(name, each, self._memory) for each in tensors]

            fill(root, write)
            for path in sorted(root.rglob("*")):
                if path.is_file():
                    self._texts[path.relative_to(root).as_posix()] = path.read_bytes()

    def write_to(self, partial: Path, go_on: Callable[[], None]) -> dict[str, FileSum]:
        """Write all files into the folder and flush them to disk.

        Args:
            go_on: called between chunks; raises to stop.

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
            written[name] = write_file(partial / name, copies, go_on, self.in_place)
        return written

    def _write_tensors(self, partial: Path, name: str, tensors: list[TensorToWrite]) -> None:
        left = list(tensors)

        def next_array() -> np.ndarray:
            return left.pop(0).produce()

        try:
            (partial / name).parent.mkdir(parents=True, exist_ok=True)
            counted = [tensor._replace(produce=next_array) for tensor in tensors]
            self._written[name] = write_file(partial / name, counted, None, self.in_place)
        except OSError as error:
            # Raised once no rank waits for this one in the collectives that produce arrays.
            self._error = self._error or error
            while left:
                next_array()


def _copied(file: str, tensor: TensorToWrite, memory: Copies) -> TensorToWrite:
    """The tensor with a copy of its array, in the memory of the copy before."""
    array = tensor.produce()
    key = file, tensor.name, tensor.offset
    copy = memory.get(key)
    if copy is None or copy.shape != array.shape or copy.dtype != array.dtype:
        try:
            copy = memory[key] = np.empty(array.shape, array.dtype)
        except MemoryError as error:
            raise RuntimeError(
                f"there is no host memory of {array.nbytes / 1e9:.1f} GB for a copy of "
                f"{tensor.name}: set train.async_save=false, which writes a checkpoint without one"
            ) from error
    np.copyto(copy, array)
    return tensor._replace(produce=lambda: copy)


def leave_part(
    partial: Path, rank: int, files: Mapping[str, FileSum], error: str | None = None
) -> None:
    """Write `.part-RANK.json`, which says what a rank wrote, or why it failed."""
    values = {"files": files_as_json(files), "error": error}
    write_bytes(_part_file(partial, rank), [json.dumps(values).encode()])


def _part_file(partial: Path, rank: int) -> Path:
    return partial / f".part-{rank}.json"


def collect_parts(
    partial: Path, ranks: Iterable[int], deadline: Callable[[], float]
) -> dict[str, FileSum]:
    """Wait for what all ranks wrote: all files by path inside the folder.

    Args:
        deadline: until when, by `time.monotonic`; asked while waiting.

    Raises:
        RuntimeError: a rank failed, its part is not here in time, or the ranks' ranges do not
            cover a file.
    """
    pieces: dict[str, list[Piece]] = {}
    missing, pause = list(ranks), _POLL_S[0]
    while True:
        for rank in list(missing):
            part = _part_file(partial, rank)
            if part.exists():
                values = json.loads(part.read_text(encoding="utf-8"))
                if values["error"] is not None:
                    raise RuntimeError(f"rank {rank} could not write its files: {values['error']}")
                for name, written in files_from_json(values["files"]).items():
                    pieces.setdefault(name, []).extend(written.parts())
                missing.remove(rank)
        if not missing:
            _join_ranges(partial)
            return {name: _covering(partial / name, found) for name, found in pieces.items()}
        if time.monotonic() > deadline():
            raise RuntimeError(
                f"{partial} has no {_part_file(partial, missing[0]).name}, so rank {missing[0]} "
                "has ended, or train.output_dir is not on a file system that all ranks share"
            )
        time.sleep(pause)
        pause = min(2 * pause, _POLL_S[1])


def _join_ranges(partial: Path) -> None:
    """Put files together whose ranges the ranks have written as files of their own."""
    for part in sorted(partial.rglob("*.range")):
        whole = part.with_suffix("").with_suffix("")
        with part.open("rb") as read, whole.open("ab") as stream:
            shutil.copyfileobj(read, stream, CHUNK_BYTES)
        flush_to_disk(whole)
        part.unlink()


def check_written(partial: Path, files: Mapping[str, FileSum], sizes: bool = True) -> None:
    """Read files back from the disk.

    Args:
        sizes: see `damaged_files`; unknown while other ranks write.

    Raises:
        RuntimeError: they differ from what was written.
    """
    if damage := damaged_files(partial, files, drop_cache=True, sizes=sizes):
        raise RuntimeError(f"{partial} reads back differently: {'; '.join(damage)}")


def _covering(file: Path, pieces: Sequence[Piece]) -> FileSum:
    """A file that consists of these pieces."""
    if gap := uncovered(pieces, file.stat().st_size):
        raise RuntimeError(
            f"{file} is not what the ranks have written: {gap} are of no rank or of two"
        )
    return FileSum.of(pieces)


def commit(partial: Path, target: Path, files: Mapping[str, FileSum], step: int) -> None:
    """Write the manifest and rename the folder; replaces an older folder of that name.

    If the process ends at any point, `target` is the complete old folder, the complete new one, or
    what `finish_saves` makes the new one at the next start.
    """
    for part in partial.glob(".part-*.json"):
        part.unlink()
    Manifest(step, files).write(partial)
    for folder in {partial, *((partial / name).parent for name in files)}:
        flush_to_disk(folder)
    older = None
    if target.exists():
        logger.info("%s is replaced by a new one", target)
        older = set_aside(target)
    partial.rename(target)
    flush_to_disk(target.parent)
    if older is not None:
        shutil.rmtree(older)


class FolderWrite:
    """The write of one folder on this rank, in a thread of its own.

    The interpreter waits for the thread before it ends, so a rename is never cut short.

    Args:
        snapshot: of this rank.
        reads_back: read the files again and compare them.

    Attributes:
        deadline: until when rank 0 waits for other ranks, by `time.monotonic`.
        finish: further work on rank 0, after its files.
        is_told: whether a failure, of any rank, was raised already.
        files: done once this rank's files are on disk, or have failed.
        end: done after `finish`.
    """

    def __init__(self, snapshot: Snapshot, target: Path, rank: int, reads_back: bool):
        self.target, self._reads_back = target, reads_back
        self.deadline = math.inf
        self.finish: Callable[[], None] = lambda: None
        self.is_told = False
        self._snapshot, self._rank, self._is_given_up = snapshot, rank, False

    def start(self) -> None:
        thread = ThreadPoolExecutor(1, f"write {self.target.name}")
        self.files = thread.submit(self._write_files)
        self.end = thread.submit(self._finish)
        thread.shutdown(wait=False)

    @property
    def error(self) -> RuntimeError | None:
        """The failure so far."""
        for work in (self.files, self.end):
            error = work.exception() if work.done() else None
            if error is not None:
                return failure(self.target, error)
        return None

    def wait_for_others(self, seconds: float) -> None:
        """Wait for the end, with this much time left for other ranks."""
        self.deadline = time.monotonic() + seconds
        wait([self.end])

    def give_up(self) -> None:
        """Stop writing after the current chunk."""
        self._is_given_up = True
        self.wait_for_others(0)

    def _go_on(self) -> None:
        if self._is_given_up:
            raise RuntimeError("the process was interrupted")

    def _write_files(self) -> None:
        partial = partial_of(self.target)
        try:
            files = self._snapshot.write_to(partial, self._go_on)
            if self._reads_back:
                check_written(partial, files, sizes=False)
            leave_part(partial, self._rank, files)
        except (OSError, RuntimeError) as error:
            # So that rank 0 does not wait for this rank; `CheckpointWriter.wait` raises it too.
            with suppress(OSError):
                leave_part(partial, self._rank, {}, str(error))
            raise

    def _finish(self) -> None:
        self.files.result()
        self.finish()


def failure(target: Path, error: BaseException) -> RuntimeError:
    """The error to raise if a folder could not be written."""
    told = RuntimeError(
        f"{target.name} could not be written: {error}. Earlier checkpoints are as they were: mend "
        "this and continue with train.resume_from_checkpoint=auto"
    )
    told.__cause__ = error
    return told
