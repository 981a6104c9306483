"""Storage without room: a file size limit, a full disk."""

import os
import random
import re
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from faults.fault import Fault
from faults.runs import NUM_RANKS, Ended, SignalledRun
from faults.tiny_run import NUM_STEPS

_DISK = "64m"
_NAMED = re.compile(r"checkpoint-\d+ could not be written|'/[^']+'")


class NoRoom(Fault):
    """Base of both; the run must end with a message that names the file."""

    places = ("step", "write")
    # At least one more checkpoint follows.
    steps = range(1, NUM_STEPS - 3)
    reason: str

    def problems(self, ended: Ended) -> list[str]:
        if ended.code == 0:
            return []  # Everything was written before; the comparison checks it.
        problems = []
        if "Traceback (most recent call last)" in ended.output:
            problems.append("a traceback in place of a message")
        lines = [line for line in ended.output.splitlines() if self.reason in line]
        if not any(_NAMED.search(line) for line in lines):
            problems.append(f"no message with {self.reason!r} names the file")
        return problems


class FileSizeLimit(NoRoom):
    """A file size limit, as `ulimit -f` sets it."""

    name = "file-size-limit"
    sentence = "files may suddenly not be larger than 40 kB, and a checkpoint's are"
    reason = "File too large"
    starts = ("one", "nproc", "fleetrun")

    def strike(self, run: SignalledRun, rng: random.Random) -> None:
        for rank in range(NUM_RANKS[run.start]):
            run.rank(rank).rlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))


class FullDisk(NoRoom):
    """A small separate file system, filled by another file."""

    name = "full-disk"
    sentence = "the disk of train.output_dir is suddenly full, and has room again at the next start"
    reason = "No space left on device"
    starts = ("one", "nproc", "nproc4")

    def unavailable(self) -> str | None:
        if os.geteuid() != 0:
            return "only root can mount a small file system"
        probe = ["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
        try:
            done = subprocess.run(probe, capture_output=True, text=True)
        except FileNotFoundError:
            return "there is no unshare"
        return done.stderr.strip() or None

    @contextmanager
    def around(self, output_dir: Path) -> Iterator[None]:
        output_dir.mkdir()
        options = ["-t", "tmpfs", "-o", f"size={_DISK}", "tmpfs", str(output_dir)]
        subprocess.run(["mount", *options], check=True)
        try:
            yield
        finally:
            subprocess.run(["umount", "--lazy", str(output_dir)], check=True)

    def strike(self, run: SignalledRun, rng: random.Random) -> None:
        with (run.output_dir / "ballast").open("wb", buffering=0) as stream:
            for size in (1 << 20, 1 << 12, 1):
                block = bytes(size)
                try:
                    while stream.write(block) == size:
                        continue
                except OSError:
                    continue

    def damage(self, output_dir: Path, rng: random.Random):
        (output_dir / "ballast").unlink()
        return super().damage(output_dir, rng)


STORAGE = [FileSizeLimit(), FullDisk()]
