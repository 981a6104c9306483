"""Training runs that are signalled and killed from outside, as people, launchers and batch systems
do.
"""

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from signal import Signals

import psutil

ROOT = Path(__file__).parents[2]
_COMMAND = [sys.executable, "-m", "paddle_vl", "train"]
STARTS = {
    "one": _COMMAND,
    "nproc": [*_COMMAND, "--nproc", "2"],
    "nproc4": [*_COMMAND, "--nproc", "4"],
    "fleetrun": [sys.executable, "-m", "paddle.distributed.launch", "--nproc_per_node", "2"],
}
NUM_RANKS = {"one": 1, "nproc": 2, "nproc4": 4, "fleetrun": 2}
_DEGREES = {
    1: [],
    2: ["parallel.dp_degree=2"],
    4: ["parallel.dp_degree=2", "parallel.mp_degree=2"],
}
# Practically endless, so that a signal always arrives during training.
ENDLESS = ("train.max_steps=1000000", "train.save_steps=null", "logging.logging_steps=1")
# Environment variable that identifies all processes of a run, orphans too.
_TOKEN = "FAULT_RUN_ID"
_START_S = 90.0
_END_S = 90.0
# Time within which every process must have ended.
LEFT_AFTER_S = 10.0


@dataclass
class Ended:
    """How a run ended.

    Attributes:
        start: one of `STARTS`.
        code: the command's exit code.
        seconds: from the first signal until all processes had ended.
        left: command lines of processes that outlived the command by 10 seconds and were killed.
        checkpoints: names, sorted.
        last_step: last step in metrics.jsonl.
        output: the command's output.
    """

    start: str
    code: int
    seconds: float
    left: list[list[str]]
    checkpoints: list[str]
    last_step: int
    output: str


class SignalledRun:
    """A run in its own session; remaining processes are killed when the context ends.

    Args:
        start: one of `STARTS`; two ranks are data parallel, four tensor parallel too.
        overrides: settings and options of `paddle-vl train`.
        prefix: wrapper command, such as one that makes a PID namespace.
        output: file for the command's output; by default beside `output_dir`.
    """

    def __init__(
        self,
        start: str,
        run_file: Path,
        output_dir: Path,
        overrides: Sequence[str] = (),
        prefix: Sequence[str] = (),
        output: Path | None = None,
    ):
        self.start, self.run_file, self.output_dir = start, run_file, output_dir
        self.overrides = list(overrides)
        command = [*prefix, *STARTS[start]]
        self.log_dir = output_dir / "log"
        if start == "fleetrun":
            self.log_dir = Path(f"{output_dir}-log")
            command += ["--log_dir", str(self.log_dir), str(ROOT / "tools" / "train.py")]
        command += [str(run_file), f"train.output_dir={output_dir}"]
        command += [*_DEGREES[NUM_RANKS[start]], *overrides]
        environment = {name: value for name, value in os.environ.items() if name[:7] != "PADDLE_"}
        environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", _TOKEN: uuid.uuid4().hex}
        self._mark = f"{_TOKEN}={environment[_TOKEN]}".encode()
        self.output = output or output_dir.with_name(output_dir.name + ".out")
        with self.output.open("wb") as stream:
            self.process = subprocess.Popen(
                command,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    def again(self, output: Path, overrides: Sequence[str] = ()) -> "SignalledRun":
        """Start the same command again with further settings."""
        settings = [*self.overrides, *overrides]
        return SignalledRun(self.start, self.run_file, self.output_dir, settings, output=output)

    def wait_for_steps(self, number: int = 2) -> None:
        """Wait until metrics.jsonl has this many steps."""
        deadline = time.monotonic() + _START_S
        while self.last_step() < number:
            assert self.process.poll() is None, self.said()
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.05)

    def last_step(self) -> int:
        """Last step in metrics.jsonl, 0 for none; an incomplete line does not count."""
        return last_step(self.output_dir)

    def said(self) -> str:
        """Output so far, including that of the ranks under fleetrun."""
        files = [self.output]
        if self.start == "fleetrun":
            files += sorted(self.log_dir.glob("workerlog.*"))
        return "".join(file.read_text(errors="replace") for file in files)

    def rank(self, number: int) -> psutil.Process:
        """The process of a rank.

        Raises:
            AssertionError: no such rank.
        """
        if self.start == "one" and number == 0:
            return psutil.Process(self.process.pid)
        for process in psutil.Process(self.process.pid).children(recursive=True):
            try:
                own = process.environ().get("PADDLE_TRAINER_ID")
                if own == str(number) and "multiprocessing" not in " ".join(process.cmdline()):
                    return process
            except psutil.Error:
                continue
        raise AssertionError(f"there is no rank {number}")

    def data_workers(self) -> list[psutil.Process]:
        """The loader's worker processes."""
        return [process for process in self.alive() if "spawn_main" in " ".join(_line(process))]

    def alive(self) -> list[psutil.Process]:
        """All live processes of this start, wherever they are in the process tree."""
        found = []
        for pid in psutil.pids():
            try:
                if self._mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    process = psutil.Process(pid)
                    if process.status() != psutil.STATUS_ZOMBIE:
                        found.append(process)
            except (OSError, psutil.Error):
                continue
        return found

    def signal(
        self, number: Signals, target: str = "command", times: int = 1, gap_s: float = 0.2
    ) -> Ended:
        """Signal the command, its process `group` or `rank N`, and wait until all have ended."""
        begin = time.monotonic()
        self.send(number, target, times, gap_s)
        return self.ended(begin)

    def send(
        self, number: Signals, target: str = "command", times: int = 1, gap_s: float = 0.2
    ) -> None:
        """Signal the command, its process `group` or `rank N`."""
        targets = {
            "command": lambda: self.process.send_signal(number),
            "group": lambda: os.killpg(self.process.pid, number),
        }
        if target.startswith("rank"):
            rank = self.rank(int(target.split()[1]))
            targets[target] = lambda: rank.send_signal(number)
        for count in range(times):
            if count:
                time.sleep(gap_s)
            try:
                targets[target]()
            except (ProcessLookupError, psutil.NoSuchProcess):
                break

    def kill_all(self) -> None:
        """Send SIGKILL to all processes, the command first, until none is left."""
        while alive := self.alive():
            for process in alive:
                try:
                    process.kill()
                except psutil.NoSuchProcess:
                    continue
            self.process.poll()

    def ended(self, begin: float, within_s: float = _END_S) -> Ended:
        """Wait for the end of the command and check which processes are left 10 seconds later.

        Args:
            begin: start of the measured time, from `time.monotonic`.
            within_s: timeout after which the command itself counts as left.
        """
        try:
            self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            left = self.alive()
        else:
            deadline = time.monotonic() + LEFT_AFTER_S
            while (left := self.alive()) and time.monotonic() < deadline:
                time.sleep(0.05)
        seconds = time.monotonic() - begin
        lines = [_line(process) for process in left]
        self.kill_all()
        return Ended(
            self.start,
            self.process.wait(),
            seconds,
            lines,
            sorted(path.name for path in self.output_dir.glob("checkpoint-*")),
            self.last_step(),
            self.said(),
        )

    def __enter__(self) -> "SignalledRun":
        return self

    def __exit__(self, *exception: object) -> None:
        self.kill_all()
        self.process.wait()


def last_step(output_dir: Path) -> int:
    """Last step in the metrics.jsonl of a run."""
    return max((line["step"] for line in metrics(output_dir)), default=0)


def metrics(output_dir: Path) -> list[dict]:
    """Complete lines of the metrics.jsonl of a run."""
    file = output_dir / "metrics.jsonl"
    lines = []
    for text in file.read_text().splitlines() if file.exists() else []:
        try:
            lines.append(json.loads(text))
        except ValueError:
            break
    return lines


def _line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
