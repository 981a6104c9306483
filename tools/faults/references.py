"""Data, settings and undisturbed reference runs; each is made once."""

import threading
import time
from pathlib import Path

from faults.fault import Fault
from faults.runs import NUM_RANKS, SignalledRun
from faults.tiny_run import write_tiny_run

_RUN_S = 300.0
# Number of ranks to the start of the undisturbed run.
_STARTS = {1: "one", 2: "nproc", 4: "nproc4"}


class References:
    """Undisturbed runs by number of ranks and data; they keep every checkpoint.

    Args:
        folder: an empty folder.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._lock = threading.Lock()
        self._runs: dict[tuple, Path] = {}
        self._files: dict[tuple, Path] = {}

    def run_file(self, fault: Fault) -> Path:
        """Settings file for the runs of a fault."""
        with self._lock:
            return self._run_file(tuple(fault.extra_lines))

    def output_dir(self, fault: Fault, start: str) -> Path:
        """Folder of the undisturbed run.

        Raises:
            RuntimeError: the undisturbed run failed.
        """
        # Simple bad lines stand in for hostile ones: both are skipped.
        lines = tuple(b"{}" for _ in fault.extra_lines)
        key = (NUM_RANKS[start], lines)
        with self._lock:
            if key not in self._runs:
                self._runs[key] = self._make(*key)
            return self._runs[key]

    def _make(self, num_ranks: int, lines: tuple[bytes, ...]) -> Path:
        output_dir = self._folder / f"reference-{num_ranks}-{len(lines)}"
        run_file = self._run_file(lines)
        overrides = ("train.save_steps=1",)
        with SignalledRun(_STARTS[num_ranks], run_file, output_dir, overrides) as run:
            ended = run.ended(time.monotonic(), within_s=_RUN_S)
        if ended.code != 0:
            raise RuntimeError(f"the undisturbed run failed:\n{ended.output}")
        return output_dir

    def _run_file(self, lines: tuple[bytes, ...]) -> Path:
        if lines not in self._files:
            folder = self._folder / f"data-{len(self._files)}"
            self._files[lines] = write_tiny_run(folder, lines)
        return self._files[lines]
