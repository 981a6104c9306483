"""Training runs that are signalled and killed from outside, as people, launchers and batch systems
do; with all processes that they start, wherever they are in the process tree.
"""

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from signal import Signals
from typing import NamedTuple

import psutil

from paddle_vl.processes import start_process

ROOT = Path(__file__).parents[2]
_COMMAND = [sys.executable, "-m", "paddle_vl", "train"]
_FLEETRUN = [sys.executable, "-m", "paddle.distributed.launch", "--nproc_per_node", "2"]
# Imported by every Python process of a run that gets an environment.
_HOOKS = Path(__file__).parent / "hooks"


class Start(NamedTuple):
    """How a run is started; runs with the same settings have the same results."""

    command: Sequence[str]
    num_ranks: int = 1
    settings: Sequence[str] = ()

    @classmethod
    def of(cls, num_ranks: int, *parallel: str) -> "Start":
        """A run of several ranks with these settings of `parallel`."""
        settings = [f"parallel.{each}" for each in parallel]
        return cls([*_COMMAND, "--nproc", str(num_ranks)], num_ranks, settings)


STARTS = {
    "one": Start(_COMMAND),
    "nproc": Start.of(2, "dp_degree=2"),
    "fleetrun": Start(_FLEETRUN, 2, ["parallel.dp_degree=2"]),
    "nproc4": Start.of(4, "dp_degree=2", "mp_degree=2"),
    "sharding3": Start.of(2, "sharding_degree=2", "sharding_stage=3"),
    "pipeline": Start.of(2, "pp_degree=2"),
    "colocated": Start.of(2, "pp_degree=2", "schedule=colocated"),
}
NUM_RANKS = {name: start.num_ranks for name, start in STARTS.items()}
# Practically endless, so that a signal always arrives during training.
ENDLESS = ("train.max_steps=1000000", "train.save_steps=null", "logging.logging_steps=1")
# Environment variable that identifies all processes of a start, orphans too.
_TOKEN = "FAULT_RUN_ID"
_START_S = 90.0
_END_S = 90.0
# Time after the command within which every process must have ended.
LEFT_AFTER_S = 10.0


class TooLateError(Exception):
    """The run ended before its moment came."""


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
        start: one of `STARTS`.
        overrides: settings and options of `paddle-vl train`.
        environment: variables that make a process of the run fail, see `hooks/sitecustomize.py`.
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
        environment: Mapping[str, str] | None = None,
    ):
        self.start, self.run_file, self.output_dir = start, run_file, output_dir
        self.overrides, self.environment = list(overrides), dict(environment or {})
        command = [*prefix, *STARTS[start].command]
        self.log_dir = output_dir / "log"
        if start == "fleetrun":
            self.log_dir = Path(f"{output_dir}-log")
            command += ["--log_dir", str(self.log_dir), str(ROOT / "tools" / "train.py")]
        command += [str(run_file), f"train.output_dir={output_dir}"]
        path = [str(_HOOKS)] * bool(self.environment) + [str(ROOT)]
        self.output = output or output_dir.with_name(output_dir.name + ".out")
        token = uuid.uuid4().hex
        self._mark = f"{_TOKEN}={token}".encode()
        self.process = start_process(
            [*command, *STARTS[start].settings, *overrides],
            {
                **{name: value for name, value in os.environ.items() if name[:7] != "PADDLE_"},
                "PYTHONPATH": os.pathsep.join(path),
                "OMP_NUM_THREADS": "1",
                # Every start would compile the package again.
                "PYTHONDONTWRITEBYTECODE": "",
                **self.environment,
                _TOKEN: token,
            },
            self.output,
        )

    def __enter__(self) -> "SignalledRun":
        return self

    def __exit__(self, *exception: object) -> None:
        self.kill_all()
        self.process.wait()

    def alive(self) -> list[psutil.Process]:
        """All live processes of this start."""
        found = []
        for pid in psutil.pids():
            with suppress(OSError, psutil.Error):
                if self._mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    process = psutil.Process(pid)
                    if process.status() != psutil.STATUS_ZOMBIE:
                        found.append(process)
        return found

    def kill_all(self) -> None:
        """Send SIGKILL to all processes, the command first, until none is left."""
        while alive := self.alive():
            for process in alive:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            self.process.poll()

    def again(
        self,
        output: Path,
        overrides: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> "SignalledRun":
        """Start the same command again with further settings and its own environment."""
        settings, folder = [*self.overrides, *overrides], self.output_dir
        return SignalledRun(self.start, self.run_file, folder, settings, (), output, environment)

    def wait_for_steps(self, number: int = 2) -> None:
        """Wait until metrics.jsonl has this many steps."""
        deadline = time.monotonic() + _START_S
        while self.last_step() < number:
            assert self.process.poll() is None, self.said()
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.05)

    def check_runs(self) -> None:
        """Raises TooLateError if the command has ended."""
        if self.process.poll() is not None:
            raise TooLateError

    def last_step(self) -> int:
        """Last step in metrics.jsonl, 0 for none; an incomplete line does not count."""
        return max((line["step"] for line in metrics(self.output_dir)), default=0)

    def said(self) -> str:
        """Output so far, including that of all ranks."""
        files = [self.output]
        for file in sorted(self.log_dir.glob("workerlog.*")):
            # Rank 0 of `--nproc` writes to the output too.
            if self.start == "fleetrun" or file.suffix != ".0":
                files.append(file)
        return "".join(file.read_text(errors="replace") for file in files)

    def rank(self, number: int) -> psutil.Process:
        """The process of a rank.

        Raises:
            AssertionError: no such rank.
        """
        if self.start == "one" and number == 0:
            return psutil.Process(self.process.pid)
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with suppress(psutil.Error):
                own = process.environ().get("PADDLE_TRAINER_ID")
                if own == str(number) and "multiprocessing" not in " ".join(process.cmdline()):
                    return process
        raise AssertionError(f"there is no rank {number}")

    def data_workers(self) -> list[psutil.Process]:
        """The loader's worker processes."""
        return [process for process in self.alive() if "spawn_main" in " ".join(_line_of(process))]

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
        seconds, lines = time.monotonic() - begin, [_line_of(process) for process in left]
        self.kill_all()
        checkpoints = sorted(path.name for path in self.output_dir.glob("checkpoint-*"))
        code, last = self.process.wait(), self.last_step()
        return Ended(self.start, code, seconds, lines, checkpoints, last, self.said())


def _line_of(process: psutil.Process) -> list[str]:
    """The command line of a process; empty if it has ended."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


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
