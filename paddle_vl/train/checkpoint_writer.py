"""Writing a run's checkpoints beside training.

The main thread collects what is to be written, which takes the device and other ranks
(`paddle_vl.train.snapshot`). A thread then writes it, with checksums, has it on the disk, reads it
back where older checkpoints are to be pruned, and leaves this rank's part; on the first rank it
waits for all parts and gives the folder its name (`paddle_vl.train.checkpoint_commit`). Threads
issue no collectives. One write is in flight at most.
"""

import logging
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from paddle_vl.config.schema import TrainConfig
from paddle_vl.models.checkpoint.manifest import damaged_files
from paddle_vl.train.checkpoint import checkpoint_name, partial_of
from paddle_vl.train.checkpoint_commit import Part, Pruner, collect_parts, commit
from paddle_vl.train.processes import ONE_PROCESS, SingleProcess
from paddle_vl.train.snapshot import (
    AbandonedError,
    Fill,
    HostBuffers,
    HostSnapshot,
    NoSnapshot,
    Snapshot,
)

logger = logging.getLogger(__name__)
FINAL = "final"
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


class CheckpointWriter:
    """Writes the folders of a run. All ranks call its methods together, but for `poll`.

    It may be entered: left without an exception it waits for the write in flight, and with one it
    lets that end as far as it can without the other ranks.

    Args:
        train: async_save, verify_checkpoint and save_total_limit are looked at.

    Attributes:
        is_overdue: whether a periodic checkpoint was put off.
        times: what the last complete write took; of the first rank.
    """

    def __init__(
        self, output_dir: Path, train: TrainConfig, processes: SingleProcess = ONE_PROCESS
    ):
        self.output_dir, self.processes = output_dir, processes
        self.pruner = Pruner(output_dir, train.save_total_limit, train.verify_checkpoint)
        self.is_overdue = False
        self.times: WriteTimes | None = None
        self._is_async = train.async_save
        self._verifies = train.verify_checkpoint
        self._reads_back = self._verifies and train.save_total_limit is not None
        self._buffers = HostBuffers()
        self._ranks: list[int] | None = None
        self._target: Path | None = None
        self._write: _Write | None = None

    def save(
        self, step: int, fill: Fill, nonfinite_updates: int = 0, is_last_word: bool = False
    ) -> Path:
        """Write the checkpoint of a step; training may go on when this returns.

        Args:
            fill: see `paddle_vl.train.snapshot`.
            nonfinite_updates: updates that were skipped in a row until now; above 0 it is marked.
            is_last_word: the run is being stopped: nothing is read back and pruned, for which there
                may be no time.

        Returns:
            The folder that it will be.

        Raises:
            RuntimeError: the write before it failed, on whichever rank; or this one, without
                async_save.
        """
        self.is_overdue = False
        target = self.output_dir / checkpoint_name(step)
        if nonfinite_updates and self.processes.is_main:
            logger.warning(
                "%s is marked, as the last %d updates were skipped: "
                "train.resume_from_checkpoint=auto passes it over, its path does not",
                target,
                nonfinite_updates,
            )
        self._begin(target, step, fill, nonfinite_updates, prunes=not is_last_word)
        return target

    def save_final(self, step: int, fill: Fill) -> Path:
        """Write the trained model, completely."""
        target = self.output_dir / FINAL
        self._begin(target, step, fill, 0, prunes=False)
        self.wait()
        return target

    def put_off(self, step: int, nonfinite_updates: int) -> None:
        """Leave a periodic checkpoint out for now, as updates are being skipped."""
        if not self.is_overdue and self.processes.is_main:
            logger.warning(
                "%s is put off: %d updates in a row were skipped, as a loss or the gradient norm "
                "was not finite; it is written after the next update that is",
                checkpoint_name(step),
                nonfinite_updates,
            )
        self.is_overdue = True

    def poll(self) -> None:
        """Raise what this rank's write failed with, if it did: once per step, no message.

        Raises:
            RuntimeError: a file could not be written.
        """
        write = self._write
        if write is not None and write.error is not None:
            write.is_told = True
            raise write.error

    def wait(self) -> None:
        """Until the write in flight is a complete folder.

        Raises:
            RuntimeError: it failed, on whichever rank; all raise.
        """
        if self._target is None:
            return
        target, write = self._target, self._write
        self._target = None
        if write is not None:
            write.has_written.wait()
        self._agree(write, target)
        if write is not None:
            write.all_have_written.set()
            write.join()
        self._agree(write, target)
        self._write = None
        if write is not None:
            self.times = write.times

    def close(self, at_once: bool = False) -> None:
        """End the write in flight without the other ranks, which may be gone.

        What this rank has to write gets written, and where all parts come in soon the folder its
        name. What fails is logged: there is another error already.

        Args:
            at_once: give the write up after the piece that is being written.
        """
        write, self._write, self._target = self._write, None, None
        if write is not None:
            write.leave(at_once)
            write.join()
            if write.error is not None and not write.is_told:
                logger.warning("%s", write.error)
            elif write.times is None and self.processes.is_main:
                logger.warning("%s was not completed", write.target)
        self._buffers.clear()

    def __enter__(self) -> "CheckpointWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        try:
            if kind is None:
                self.wait()
        finally:
            self.close(at_once=kind is not None and not issubclass(kind, Exception))

    def _begin(
        self, target: Path, step: int, fill: Fill, nonfinite_updates: int, prunes: bool
    ) -> None:
        begin = time.perf_counter()
        self.wait()
        processes, partial = self.processes, partial_of(target)
        if self._ranks is None:
            holders = processes.gathered(bool(processes.holds_model))
            self._ranks = [rank for rank, holds in enumerate(holders) if holds]
        if processes.is_main:
            target.parent.mkdir(parents=True, exist_ok=True)
            if partial.exists():
                shutil.rmtree(partial)
            partial.mkdir()
        processes.wait()
        self._target = target
        if processes.holds_model:
            snapshot = HostSnapshot(self._buffers) if self._is_async else NoSnapshot()
            try:
                snapshot.take(fill, partial)
            except OSError as error:
                raise failure(target, error) from error
            write = _Write(snapshot, target, processes.rank, begin)
            write.reads_back = self._reads_back and prunes
            if processes.is_main:
                write.finish = self._finisher(write, step, nonfinite_updates, prunes)
            self._write = write
            write.start()
        if not self._is_async:
            self.wait()

    def _finisher(
        self, write: "_Write", step: int, nonfinite_updates: int, prunes: bool
    ) -> Callable[[], None]:
        """What the first rank does behind its own write."""

        def finish() -> None:
            partial, target = partial_of(write.target), write.target
            parts = collect_parts(partial, self._ranks, write.go_on, write.all_have_written.is_set)
            doubts = [doubt for part in parts.values() for doubt in part.doubts]
            commit(partial, target, parts, step, nonfinite_updates)
            is_read = write.reads_back or not self._verifies
            self.pruner.learn(target, is_read and not doubts and not nonfinite_updates)
            if doubts:
                logger.warning(
                    "%s was written, but reads back differently: %s. The storage is not reliable; "
                    "older checkpoints are kept",
                    target,
                    "; ".join(doubts),
                )
            elif prunes and not nonfinite_updates:
                self.pruner.prune(target)

        return finish

    def _agree(self, write: "_Write | None", target: Path) -> None:
        """Raise on all ranks where one of them failed."""
        own = write.error if write is not None else None
        errors = self.processes.gathered(None if own is None else str(own))
        failed = [rank for rank, error in enumerate(errors) if error is not None]
        if not failed:
            return
        if own is not None:
            write.is_told = True
            raise own
        raise RuntimeError(f"{target.name} failed on rank {failed[0]}: {errors[failed[0]]}")


class _Write:
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
