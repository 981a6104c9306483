"""The write of one folder on one rank, in a thread."""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from paddle_vl.checkpoint.manifest import damaged_files
from paddle_vl.train.checkpoint import partial_of
from paddle_vl.train.saving.commit import Part
from paddle_vl.train.saving.snapshot import AbandonedError, Snapshot

# How long the first rank waits for the others' parts when the run ends by an error: one of them may
# be gone.
_PATIENCE_S = 5.0


class WriteTimes(NamedTuple):
    """What one write took, in seconds.

    Attributes:
        stall: how long training stood still for it: for the write before it, and for the snapshot.
        write: from then until the folder had its name, and old ones were pruned.
    """

    stall: float
    write: float


class FolderWrite:
    """One folder's write on this rank, in a thread that outlives nothing: it is always joined.

    Attributes:
        has_written: this rank's part is on the disk, or has failed.
        all_have_written: those of all ranks are.
        finish: what follows on the first rank.
        error: what it failed with; is_told: whether somebody was told.
    """

    def __init__(self, snapshot: Snapshot, target: Path, rank: int, begin: float):
        self.target, self.reads_back = target, False
        self.has_written, self.all_have_written = threading.Event(), threading.Event()
        self.finish: Callable[[], None] | None = None
        self.error: RuntimeError | None = None
        self.is_told = False
        self.times: WriteTimes | None = None
        self._snapshot, self._rank, self._begin = snapshot, rank, begin
        self._deadline: float | None = None
        self._is_given_up, self._is_abandoned = threading.Event(), False
        # Not a daemon, which an ending interpreter would leave in the middle of a rename.
        self._thread = threading.Thread(target=self._run, name=f"write {target.name}")

    def start(self) -> None:
        self._thread.start()

    def join(self) -> None:
        self._thread.join()

    def leave(self, at_once: bool) -> None:
        """End soon, and wait for nobody for long."""
        self._deadline = time.monotonic() + _PATIENCE_S
        if at_once:
            self._is_given_up.set()

    def go_on(self) -> None:
        """Raise where the others are not to be waited for any longer."""
        late = self._deadline is not None and time.monotonic() > self._deadline
        if late or self._is_given_up.is_set():
            raise AbandonedError

    def _go_on_writing(self) -> None:
        if self._is_given_up.is_set():
            raise AbandonedError

    def _run(self) -> None:
        started = time.perf_counter()
        self._attempt(self._write_part)
        self.has_written.set()
        if self.finish is not None and self.error is None:
            self._attempt(self.finish)
        if self.error is None and not self._is_abandoned:
            self.times = WriteTimes(started - self._begin, time.perf_counter() - started)

    def _attempt(self, work: Callable[[], None]) -> None:
        if self._is_abandoned:
            return
        try:
            work()
        except AbandonedError:
            self._is_abandoned = True
        # Whatever it is, the main thread has to hear of it.
        except Exception as error:
            self.error = failure(self.target, error)

    def _write_part(self) -> None:
        partial = partial_of(self.target)
        try:
            files = self._snapshot.write_to(partial, self._go_on_writing)
            doubts = ()
            if self.reads_back:
                doubts = tuple(damaged_files(partial, files, drop_cache=True))
            Part(files, doubts).write(partial, self._rank)
        except (OSError, RuntimeError) as error:
            # The first rank need not wait for this one then. `wait` tells it too.
            with suppress(OSError):
                Part(error=str(error)).write(partial, self._rank)
            raise


def failure(target: Path, error: Exception) -> RuntimeError:
    """What to raise where a folder could not be written."""
    told = RuntimeError(
        f"{target.name} could not be written: {error}. Earlier checkpoints are as they were: mend "
        "this and continue with train.resume_from_checkpoint=auto"
    )
    told.__cause__ = error
    return told
