"""Asynchronous writing of a run's checkpoints.

The main thread copies the tensors to host memory, which needs the device and collectives
(`Snapshot`). A thread writes the files with checksums, flushes them to disk, and reads them back if
older checkpoints are to be pruned; on rank 0 it waits for all ranks and renames the folder
(`commit`). Threads issue no collectives. At most one write is in flight.
"""

import logging
import shutil
from concurrent.futures import wait
from functools import partial
from pathlib import Path

from paddle_vl.checkpoint.manifest import write_bytes
from paddle_vl.config.schema import TrainConfig
from paddle_vl.parallel.ranks import ONE_RANK, SingleRank
from paddle_vl.train.checkpoint import (
    checkpoint_folders,
    checkpoint_name,
    partial_of,
    set_aside,
)
from paddle_vl.train.resume import examine
from paddle_vl.train.saving.commit import (
    Copies,
    Fill,
    FolderWrite,
    Snapshot,
    check_written,
    collect_parts,
    commit,
    failure,
)

logger = logging.getLogger(__name__)
FINAL = "final"
# Seconds that a written file may stay invisible on a network file system.
_VISIBLE_WITHIN_S = 300.0
# Seconds that rank 0 waits for other ranks after an error; one of them may have died.
_PATIENCE_S = 5.0


class CheckpointWriter:
    """Writes the checkpoints of a run. All ranks call its methods together, except `poll`.

    As a context manager it waits for the write in flight on exit. If an exception is raised, the
    write ends without the other ranks.

    Args:
        train: its async_save, verify_checkpoint and save_total_limit.
    """

    def __init__(self, output_dir: Path, train: TrainConfig, ranks: SingleRank = ONE_RANK):
        self.output_dir, self.ranks = output_dir, ranks
        self._is_async = train.async_save
        self._verifies = train.verify_checkpoint
        self._limit = train.save_total_limit
        # Names of checkpoints whose files match their manifest.
        self._good: set[str] = set()
        self._memory: Copies = {}
        # Unknown before the first save.
        self._in_place: bool | None = None
        self._write: FolderWrite | None = None

    def save(self, step: int, fill: Fill, prunes: bool = True, keeps: str | None = None) -> Path:
        """Start to write the checkpoint of a step; training continues when this returns.

        Args:
            fill: see `paddle_vl.train.saving.commit`.
            prunes: with save_total_limit, read it back and delete older ones.
            keeps: name of one that is not deleted, and not counted.

        Returns:
            The folder that the checkpoint will have.

        Raises:
            RuntimeError: the previous write failed on any rank, or without async_save this one.
        """
        target = self.output_dir / checkpoint_name(step)
        prunes = prunes and self._limit is not None
        self._begin(target, step, fill, prunes, self._is_async, keeps)
        return target

    def save_final(
        self, step: int, fill: Fill, streamed: Fill | None = None, folder: Path | None = None
    ) -> Path:
        """Write the trained model and wait for it.

        Args:
            streamed: in place of `fill`, without a snapshot.
            folder: in place of `final/`.
        """
        target = self.output_dir / FINAL if folder is None else folder
        copies = self._is_async and streamed is None
        self._begin(target, step, streamed or fill, prunes=False, copies=copies)
        self.wait()
        return target

    def poll(self) -> None:
        """Raise the error of this rank's write, if it failed. Not a collective.

        Raises:
            RuntimeError: a file could not be written.
        """
        write = self._write
        if write is not None and write.error is not None:
            write.is_told = True
            raise write.error

    def wait(self) -> None:
        """Wait until the write in flight is complete.

        Raises:
            RuntimeError: it failed on any rank; all ranks raise.
        """
        write = self._write
        if write is None or write.is_told:
            return
        wait([write.files])
        self._agree(write)
        write.wait_for_others(_VISIBLE_WITHIN_S)
        self._agree(write)
        self._write = None

    def close(self, at_once: bool = False) -> None:
        """End the write in flight without collectives, as other ranks may have died.

        This rank finishes its files; rank 0 renames the folder if all ranks finish soon. Failures
        are logged, as another error is being raised already.

        Args:
            at_once: stop writing after the current chunk.
        """
        write, self._write = self._write, None
        if write is not None:
            if at_once:
                write.give_up()
            else:
                write.wait_for_others(_PATIENCE_S)
            if write.error is not None and not write.is_told:
                logger.warning("%s", write.error)
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
        self,
        target: Path,
        step: int,
        fill: Fill,
        prunes: bool,
        copies: bool,
        keeps: str | None = None,
    ) -> None:
        self.wait()
        ranks, folder = self.ranks, partial_of(target)
        if ranks.is_main:
            target.parent.mkdir(parents=True, exist_ok=True)
            if folder.exists():
                shutil.rmtree(folder)
            folder.mkdir()
        ranks.wait()
        if self._in_place is None:
            self._in_place = self._writes_in_place(folder)
        snapshot = Snapshot(self._memory if copies else None, self._in_place)
        try:
            snapshot.take(fill, folder)
        except OSError as error:
            raise failure(target, error) from error
        reads_back = prunes and self._verifies
        write = FolderWrite(snapshot, target, ranks.rank, reads_back and self._in_place)
        if ranks.is_main:
            late = reads_back and not self._in_place
            write.finish = partial(self._finish, write, step, prunes, keeps, late)
        self._write = write
        write.start()
        if not self._is_async:
            self.wait()

    def _writes_in_place(self, folder: Path) -> bool:
        """Whether all ranks can write into one file of the folder. Called by all ranks."""
        ranks, file = self.ranks, folder / ".probe"
        if ranks.world_size == 1:
            return True
        parts, works = [f"{rank:8}".encode() for rank in range(ranks.world_size)], True
        try:
            write_bytes(file, [parts[ranks.rank]], begin=8 * ranks.rank)
        except OSError:
            works = False
        works = all(ranks.gathered(works))
        if ranks.is_main:
            # This rank does not see the file where the nodes share no file system.
            works = works and file.is_file() and file.read_bytes() == b"".join(parts)
            file.unlink(missing_ok=True)
            if not works:
                logger.warning(
                    "%s has no writes of several ranks into one file: rank 0 puts their parts "
                    "together, which takes longer",
                    self.output_dir,
                )
        return ranks.gathered(works)[0]

    def _finish(
        self, write: FolderWrite, step: int, prunes: bool, keeps: str | None, reads_back: bool
    ) -> None:
        """Work of rank 0 after its own write."""
        folder, target = partial_of(write.target), write.target
        files = collect_parts(folder, range(self.ranks.world_size), lambda: write.deadline)
        if reads_back:
            check_written(folder, files)
        commit(folder, target, files, step)
        if prunes:
            # It was read back.
            self._good.add(target.name)
            self._prune(target, keeps)

    def _prune(self, newest: Path, keeps: str | None) -> None:
        """Delete checkpoints older than the newest good ones that are kept.

        Checkpoints of later steps, which resume passed over, stay, and so does `keeps`.
        """
        assert self._limit is not None, "nothing is pruned without a limit"
        steps = {path: step for step, path in checkpoint_folders(self.output_dir)}
        older = [path for path, step in steps.items() if step <= steps[newest]]
        if keeps != newest.name:
            older = [path for path in older if path.name != keeps]
        num_kept = 0
        for path in reversed(older):
            if num_kept >= self._limit:
                shutil.rmtree(set_aside(path))
                continue
            if path.name not in self._good:
                verdict = examine(path, self._verifies)
                if verdict.problems or not verdict.has_manifest:
                    continue
                self._good.add(path.name)
            num_kept += 1

    def _agree(self, write: FolderWrite) -> None:
        """Raise on all ranks if one of them failed."""
        own = write.error
        errors = self.ranks.gathered(None if own is None else str(own))
        failed = [rank for rank, error in enumerate(errors) if error is not None]
        write.is_told = bool(failed)
        if own is not None:
            raise own
        if failed:
            name, rank = write.target.name, failed[0]
            raise RuntimeError(f"{name} failed on rank {rank}: {errors[rank]}")
