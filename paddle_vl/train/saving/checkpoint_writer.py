"""Writing a run's checkpoints beside training.

The main thread collects what is to be written, which takes the device and other ranks
(`snapshot`). A thread then writes it, with checksums, has it on the disk, reads it back where older
checkpoints are to be pruned, and leaves this rank's part (`folder_write`); on the first rank it
waits for all parts and gives the folder its name (`commit`). Threads issue no collectives. One
write is in flight at most.
"""

import logging
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from paddle_vl.config.schema import TrainConfig
from paddle_vl.train.checkpoint import checkpoint_name, partial_of
from paddle_vl.train.processes import ONE_PROCESS, SingleProcess
from paddle_vl.train.saving.commit import Pruner, collect_parts, commit
from paddle_vl.train.saving.folder_write import FolderWrite, WriteTimes, failure
from paddle_vl.train.saving.snapshot import Fill, HostMemory, HostSnapshot, NoSnapshot

logger = logging.getLogger(__name__)
FINAL = "final"


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
        self._memory = HostMemory()
        self._ranks: list[int] | None = None
        self._target: Path | None = None
        self._write: FolderWrite | None = None

    def prepare(self, num_bytes: int) -> None:
        """Have host memory for about so many bytes of this rank ready before the first save.

        Raises:
            RuntimeError: there is not so much memory.
        """
        if self._is_async and self.processes.holds_model:
            self._memory.prepare(num_bytes)

    def save(
        self, step: int, fill: Fill, nonfinite_updates: int = 0, is_last_word: bool = False
    ) -> Path:
        """Write the checkpoint of a step; training may go on when this returns.

        Args:
            fill: see `paddle_vl.train.saving.snapshot`.
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
            if write.error is not None:
                if not write.is_told:
                    logger.warning("%s", write.error)
            elif write.times is None and self.processes.is_main:
                logger.warning("%s was not completed", write.target)
        self._memory.clear()

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
            snapshot = HostSnapshot(self._memory) if self._is_async else NoSnapshot()
            try:
                snapshot.take(fill, partial)
            except OSError as error:
                raise failure(target, error) from error
            write = FolderWrite(snapshot, target, processes.rank, begin)
            write.reads_back = self._reads_back and prunes
            if processes.is_main:
                write.finish = self._finisher(write, step, nonfinite_updates, prunes)
            self._write = write
            write.start()
        if not self._is_async:
            self.wait()

    def _finisher(
        self, write: FolderWrite, step: int, nonfinite_updates: int, prunes: bool
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
            elif prunes:
                self.pruner.prune(target)

        return finish

    def _agree(self, write: FolderWrite | None, target: Path) -> None:
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
