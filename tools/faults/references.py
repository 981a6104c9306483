"""Data, settings and undisturbed reference runs; each is made once."""

import threading
import time
from pathlib import Path

from faults.fault import Fault
from faults.runs import STARTS, SignalledRun
from faults.tiny_run import write_tiny_run

_RUN_S = 300.0


class References:
    """Undisturbed runs by settings and data; they keep every checkpoint.

    Args:
        folder: an empty folder.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._lock = threading.Lock()
        self._runs: dict[tuple, Path] = {}
        self._making: dict[tuple, threading.Lock] = {}
        self._files: dict[tuple, Path] = {}

    def run_file(self, fault: Fault, start: str) -> Path:
        """Settings file for the runs of a fault."""
        return self._run_file(tuple(fault.extra_lines), _owner(fault, start))

    def settings(self, fault: Fault, start: str) -> list[str]:
        """The fault's `data_settings`."""
        folder = str(self.run_file(fault, start).parent)
        return [text.replace("DATA", folder) for text in fault.data_settings]

    def output_dir(self, fault: Fault, start: str) -> Path:
        """Folder of the undisturbed run.

        Raises:
            RuntimeError: the undisturbed run failed.
        """
        # Simple bad lines stand in for hostile ones: both are skipped.
        lines = tuple(b"{}" for _ in fault.extra_lines)
        owner, settings = _owner(fault, start), self.settings(fault, start)
        start = next(name for name in STARTS if STARTS[name].settings == STARTS[start].settings)
        key = (start, lines, owner)
        with self._lock:
            making = self._making.setdefault(key, threading.Lock())
        with making:
            if key not in self._runs:
                run_file = self._run_file(lines, owner)
                self._runs[key] = self._make(start, run_file, settings)
            return self._runs[key]

    def _make(self, start: str, run_file: Path, settings: list[str]) -> Path:
        output_dir = run_file.parent / f"reference-{start}"
        with SignalledRun(start, run_file, output_dir, [*settings, "train.save_steps=1"]) as run:
            ended = run.ended(time.monotonic(), within_s=_RUN_S)
        if ended.code != 0:
            raise RuntimeError(f"the undisturbed run failed:\n{ended.output}")
        return output_dir

    def _run_file(self, lines: tuple[bytes, ...], owner: str) -> Path:
        with self._lock:
            if (lines, owner) not in self._files:
                folder = self._folder / f"data-{len(self._files)}"
                self._files[lines, owner] = write_tiny_run(folder, lines)
            return self._files[lines, owner]


def _owner(fault: Fault, start: str) -> str:
    """Whose data it is; empty for what all faults use."""
    return f"{fault.name} {start}" if fault.own_data else ""
