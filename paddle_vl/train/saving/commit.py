"""How a folder that several ranks filled becomes a checkpoint, without a message between them.

Every rank that writes leaves `.part-RANK.json` in the partial folder once its files are on the
disk: their sizes and checksums, or why it failed. The first rank looks for these parts, merges them
into `manifest.json`, and renames the folder. That needs a file system that all ranks share, and no
collective, which only the main thread may issue.
"""

import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from paddle_vl.checkpoint.manifest import (
    FileSum,
    Manifest,
    files_as_json,
    files_from_json,
)
from paddle_vl.train.checkpoint import (
    checkpoint_folders,
    flush_to_disk,
    remove_folder,
)
from paddle_vl.train.saving.verify import examine

logger = logging.getLogger(__name__)
_POLL_S = (0.02, 1.0)
# How long a part may stay invisible that its rank has written: network file systems look late.
VISIBLE_WITHIN_S = 300.0


@dataclass(frozen=True)
class Part:
    """What one rank wrote.

    Attributes:
        files: by path inside the folder.
        doubts: why files that it wrote and read back are not what it wrote.
        error: why it could not write; its files do not count then.
    """

    files: Mapping[str, FileSum] = field(default_factory=dict)
    doubts: tuple[str, ...] = ()
    error: str | None = None

    def write(self, partial: Path, rank: int) -> None:
        """Leave the part in the folder; it appears there whole."""
        values = {
            "files": files_as_json(self.files),
            "doubts": list(self.doubts),
            "error": self.error,
        }
        path = _part_file(partial, rank)
        unfinished = path.with_name(path.name + ".partial")
        with unfinished.open("w", encoding="utf-8") as stream:
            stream.write(json.dumps(values))
            stream.flush()
            os.fsync(stream.fileno())
        unfinished.rename(path)

    @classmethod
    def read(cls, partial: Path, rank: int) -> "Part | None":
        """A rank's part; None while it is not there."""
        try:
            values = json.loads(_part_file(partial, rank).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        return cls(files_from_json(values["files"]), tuple(values["doubts"]), values["error"])


def collect_parts(
    partial: Path, ranks: Iterable[int], go_on: Callable[[], None], all_written: Callable[[], bool]
) -> dict[int, Part]:
    """Wait until the parts of all ranks are there.

    Args:
        go_on: called while waiting; raises to end that.
        all_written: whether all ranks are known to have written their parts.

    Raises:
        RuntimeError: a rank failed, or a part that was written cannot be seen from here.
    """
    parts: dict[int, Part] = {}
    pause, known_since = _POLL_S[0], None
    while True:
        missing = [rank for rank in ranks if rank not in parts]
        for rank in missing:
            part = Part.read(partial, rank)
            if part is None:
                continue
            if part.error is not None:
                raise RuntimeError(f"rank {rank} could not write its files: {part.error}")
            parts[rank] = part
        missing = [rank for rank in ranks if rank not in parts]
        if not missing:
            return parts
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
    partial: Path, target: Path, parts: Mapping[int, Part], step: int, nonfinite_updates: int
) -> None:
    """Give the complete folder its manifest and its name; an older one of that name is replaced.

    Whenever the process ends on the way, `target` is the complete old folder, or absent, or the
    complete new one.
    """
    files = {name: file for part in parts.values() for name, file in part.files.items()}
    Manifest(step, nonfinite_updates, files).write(partial)
    for rank in parts:
        _part_file(partial, rank).unlink()
    for folder in {partial, *((partial / name).parent for name in files)}:
        flush_to_disk(folder)
    if target.exists():
        logger.info("%s is replaced by a new one", target)
        remove_folder(target, then=lambda: partial.rename(target))
    else:
        partial.rename(target)
    flush_to_disk(target.parent)


class Pruner:
    """Deletes old checkpoints, never at the cost of a good one.

    Only checkpoints whose files are known to be what the run wrote count, and no marked ones:
    `limit` of these stay, and what is older than them goes.

    Args:
        checksums: whether files of checkpoints that this process did not write are read to know.
    """

    def __init__(self, output_dir: Path, limit: int | None, checksums: bool):
        self.output_dir, self.limit, self.checksums = output_dir, limit, checksums
        self._good: set[str] = set()

    def learn(self, folder: Path, is_good: bool) -> None:
        """Take note of what has been found out about a checkpoint's files."""
        (self._good.add if is_good else self._good.discard)(folder.name)

    def prune(self, newest: Path) -> None:
        """Delete what is older than the newest good checkpoints, `newest` the last of them.

        Later ones, which the run passed over when it was continued, stay.
        """
        if self.limit is None or newest.name not in self._good:
            return
        steps = dict(map(reversed, checkpoint_folders(self.output_dir)))
        older = [path for path, step in steps.items() if step <= steps[newest]]
        num_kept = 0
        for path in reversed(older):
            if num_kept >= self.limit:
                remove_folder(path)
            elif self._is_good(path):
                num_kept += 1

    def _is_good(self, folder: Path) -> bool:
        if folder.name in self._good:
            return True
        verdict = examine(folder, self.checksums)
        is_good = verdict.has_manifest and not verdict.reasons
        if is_good:
            self._good.add(folder.name)
        return is_good


def _part_file(partial: Path, rank: int) -> Path:
    return partial / f".part-{rank}.json"
