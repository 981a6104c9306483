"""Writing of a folder by several ranks without collectives, which only the main thread may issue.

Every rank writes its files in a thread (`FolderWrite`). Once they are on disk it leaves
`.part-RANK.json` in the partial folder: their sizes and checksums, or why it failed. Rank 0 waits
for these files, merges them into `manifest.json` and renames the folder (`commit`). That needs a
file system that all ranks share.
"""

import json
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from paddle_vl.checkpoint.manifest import (
    FileSum,
    Manifest,
    damaged_files,
    files_as_json,
    files_from_json,
    write_bytes,
)
from paddle_vl.train.checkpoint import flush_to_disk, partial_of, remove_folder, replaced_of
from paddle_vl.train.saving.snapshot import AbandonedError, Snapshot

logger = logging.getLogger(__name__)
_POLL_S = (0.02, 1.0)
# Seconds that a written file may stay invisible on a network file system.
VISIBLE_WITHIN_S = 300.0
# Seconds that rank 0 waits for other ranks after an error; one of them may have died.
_PATIENCE_S = 5.0


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
        values = {
            "files": files_as_json(self.files),
            "doubts": list(self.doubts),
            "error": self.error,
        }
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
        reads_back: read the files again and compare them.
        begin: when the save began, by `time.perf_counter`.

    Attributes:
        all_have_written: set once the files of all ranks are on disk, or have failed.
        finish: further work on rank 0, after its files.
        is_told: whether the failure was raised already.
    """

    def __init__(self, snapshot: Snapshot, target: Path, rank: int, begin: float, reads_back: bool):
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
        self._files = thread.submit(self._write_files)
        self._end = thread.submit(self._finish)
        thread.shutdown(wait=False)

    @property
    def error(self) -> RuntimeError | None:
        """The failure so far; a write that was left is none."""
        for work in (self._files, self._end):
            error = work.exception() if work.done() else None
            if error is not None and not isinstance(error, AbandonedError):
                return failure(self.target, error)
        return None

    def wait_for_files(self) -> None:
        """Wait until this rank's files are on disk, or have failed."""
        wait([self._files])

    def join(self) -> None:
        """Wait for the end of the write."""
        wait([self._end])

    def leave(self, at_once: bool) -> None:
        """Stop waiting for other ranks soon; `at_once` stops writing too."""
        self._deadline = time.monotonic() + (0 if at_once else _PATIENCE_S)
        self._is_given_up = at_once

    def go_on(self) -> None:
        """Raise AbandonedError if this rank must not wait for others any longer."""
        if time.monotonic() > self._deadline:
            raise AbandonedError

    def _go_on_writing(self) -> None:
        if self._is_given_up:
            raise AbandonedError

    def _write_files(self) -> None:
        partial = partial_of(self.target)
        try:
            files = self._snapshot.write_to(partial, self._go_on_writing)
            doubts = ()
            if self.reads_back:
                doubts = tuple(damaged_files(partial, files, drop_cache=True))
            RankFiles(files, doubts).write(partial, self._rank)
        except (OSError, RuntimeError) as error:
            # So that rank 0 does not wait for this rank; `CheckpointWriter.wait` raises it too.
            with suppress(OSError):
                RankFiles(error=str(error)).write(partial, self._rank)
            raise

    def _finish(self) -> None:
        self._files.result()
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
