"""Training runs that are signalled from outside, as people, launchers and batch systems do."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
STARTS = {
    "one": [sys.executable, "-m", "paddle_vl", "train"],
    "nproc": [sys.executable, "-m", "paddle_vl", "train", "--nproc", "2"],
    "fleetrun": [sys.executable, "-m", "paddle.distributed.launch", "--nproc_per_node", "2"],
}
# Steps without end, so that a signal always meets one.
ENDLESS = ("train.max_steps=1000000", "train.save_steps=null", "logging.logging_steps=1")
_START_S = 90.0
_END_S = 60.0


@dataclass
class Ended:
    """How a run ended.

    Attributes:
        code: exit code of the command.
        seconds: from the first signal until nothing of it was left.
        left: command lines of processes that outlived it by 10 seconds; they were killed.
        checkpoints: names, sorted.
        last_step: of metrics.jsonl.
        output: of the command.
    """

    code: int
    seconds: float
    left: list[list[str]]
    checkpoints: list[str]
    last_step: int
    output: str


class SignalledRun:
    """A run in a session of its own.

    Args:
        start: one of `STARTS`; two ranks train data parallel.
        overrides: further settings.
        prefix: command that runs the command, such as one that makes a PID namespace.
    """

    def __init__(
        self,
        start: str,
        run_file: Path,
        output_dir: Path,
        overrides: Sequence[str] = (),
        prefix: Sequence[str] = (),
    ):
        self.output_dir = output_dir
        command = [*prefix, *STARTS[start]]
        if start == "fleetrun":
            command += ["--log_dir", f"{output_dir}-log", str(ROOT / "tools" / "train.py")]
        command += [str(run_file), f"train.output_dir={output_dir}", *ENDLESS, *overrides]
        if start != "one":
            command.append("parallel.dp_degree=2")
        environment = {name: value for name, value in os.environ.items() if name[:7] != "PADDLE_"}
        environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self._output = output_dir.with_name(output_dir.name + ".out")
        with self._output.open("wb") as stream:
            self.process = subprocess.Popen(
                command,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    def wait_for_steps(self, number: int = 2) -> None:
        """Until so many steps are in metrics.jsonl."""
        deadline = time.monotonic() + _START_S
        while self.last_step() < number:
            assert self.process.poll() is None, self._output.read_text()
            assert time.monotonic() < deadline, self._output.read_text()
            time.sleep(0.05)

    def last_step(self) -> int:
        file = self.output_dir / "metrics.jsonl"
        return file.read_text().count("\n") if file.exists() else 0

    def rank(self, number: int) -> psutil.Process:
        """The process of a rank."""
        for process in psutil.Process(self.process.pid).children(recursive=True):
            is_worker = "multiprocessing" in " ".join(process.cmdline())
            if process.environ().get("PADDLE_TRAINER_ID") == str(number) and not is_worker:
                return process
        raise AssertionError(f"there is no rank {number}")

    def signal(
        self, number: signal.Signals, target: str = "command", times: int = 1, gap_s: float = 0.2
    ) -> Ended:
        """Signal the command, its process `group` or `rank N`, and wait for the end of all."""
        processes = [psutil.Process(self.process.pid)]
        processes += processes[0].children(recursive=True)
        targets = {
            "command": lambda: self.process.send_signal(number),
            "group": lambda: os.killpg(self.process.pid, number),
        }
        if target.startswith("rank"):
            rank = self.rank(int(target.split()[1]))
            targets[target] = lambda: rank.send_signal(number)
        begin = time.monotonic()
        for count in range(times):
            if count:
                time.sleep(gap_s)
            try:
                targets[target]()
            except (ProcessLookupError, psutil.NoSuchProcess):
                break
        code = self.process.wait(_END_S)
        _, left = psutil.wait_procs(processes, timeout=10)
        left = [process for process in left if _is_alive(process)]
        seconds = time.monotonic() - begin
        lines = [process.cmdline() for process in left]
        for process in left:
            process.kill()
        return Ended(
            code,
            seconds,
            lines,
            sorted(path.name for path in self.output_dir.glob("checkpoint-*")),
            self.last_step(),
            self._output.read_text(errors="replace"),
        )

    def __enter__(self) -> "SignalledRun":
        return self

    def __exit__(self, *exception: object) -> None:
        if self.process.poll() is None:
            for process in psutil.Process(self.process.pid).children(recursive=True):
                process.kill()
            self.process.kill()
        self.process.wait()


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
