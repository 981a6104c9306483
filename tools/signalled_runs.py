"""Training runs that are signalled and killed from outside, as people, launchers and batch systems
do, with all processes that they start, wherever they are in the process tree; and their comparison,
bit for bit, with undisturbed ones.
"""

import json
import os
import re
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from signal import Signals
from typing import Any, NamedTuple

import psutil
import yaml
from safetensors.numpy import load_file

from paddle_vl.processes import start_process
from paddle_vl.testing import tiny_run

ROOT = Path(__file__).parents[1]
NUM_STEPS, SAVE_STEPS = 12, 2
# Practically endless, so that a signal always arrives during training.
ENDLESS = ("train.max_steps=1000000", "train.save_steps=null", "logging.logging_steps=1")
# Environment variable that identifies all processes of a start, orphans too.
_TOKEN = "FAULT_RUN_ID"
_START_S, _END_S = 90.0, 90.0
# Time after the command within which every process must have ended.
_LEFT_AFTER_S = 10.0
_COMPARED_METRICS = ("loss", "grad_norm", "eval_loss", "learning_rate")


class Start(NamedTuple):
    """How a run is started; runs with the same settings of `parallel` have the same results."""

    num_ranks: int
    parallel: tuple[str, ...] = ()


STARTS = {
    "one": Start(1),
    "nproc": Start(2, ("dp_degree=2",)),
    "fleetrun": Start(2, ("dp_degree=2",)),
    "nproc4": Start(4, ("dp_degree=2", "mp_degree=2")),
    "sharding3": Start(2, ("sharding_degree=2", "sharding_stage=3")),
    "pipeline": Start(2, ("pp_degree=2",)),
    "colocated": Start(2, ("pp_degree=2", "schedule=colocated")),
}


def write_tiny_run(folder: Path) -> Path:
    """Write all files of a run with checkpoints, whose step takes about 0.1 s; its `run.yaml`."""
    path = tiny_run.write_tiny_run(folder, NUM_STEPS)
    lines = (folder / "train.jsonl").read_bytes().splitlines()
    (folder / "test.jsonl").write_bytes(b"\n".join(lines[:5]) + b"\n")
    settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    settings["data"]["eval"] = [str(folder / "test.jsonl")]
    del settings["data"]["num_workers"]
    settings["train"] |= {"per_device_train_batch_size": 2, "warmup_steps": 1, "eval_steps": 3}
    settings["train"]["save_steps"] = SAVE_STEPS
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")
    return path


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
        prefix: wrapper command, such as one that makes a PID namespace.
        output: file for the command's output; by default beside `output_dir`.
        environment: variables that make a process of the run fail, see
            `kill_hook/sitecustomize.py`.
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
        self.num_ranks = STARTS[start].num_ranks
        command, self.log_dir = [sys.executable, "-m", "paddle_vl", "train"], output_dir / "log"
        if start == "fleetrun":
            self.log_dir = Path(f"{output_dir}-log")
            command[2:] = ["paddle.distributed.launch", "--nproc_per_node", "2", "--log_dir"]
            command += [str(self.log_dir), str(ROOT / "tools" / "train.py")]
        elif start != "one":
            command += ["--nproc", str(self.num_ranks)]
        command += [str(run_file), f"train.output_dir={output_dir}"]
        command += [f"parallel.{each}" for each in STARTS[start].parallel]
        # Imported by every Python process of a run that gets an environment.
        path = [str(ROOT / "tools" / "kill_hook")] * bool(self.environment) + [str(ROOT)]
        self.output = output or output_dir.with_name(output_dir.name + ".out")
        token = uuid.uuid4().hex
        self._mark = f"{_TOKEN}={token}".encode()
        self.process = start_process(
            [*prefix, *command, *overrides],
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
        self, suffix: str, overrides: Sequence[str] = (), environment: Any = None
    ) -> "SignalledRun":
        """Start the same command again with further settings and its own environment."""
        settings, output = [*self.overrides, *overrides], self.output.with_suffix(suffix)
        return SignalledRun(
            self.start, self.run_file, self.output_dir, settings, (), output, environment
        )

    def wait_for_steps(self, number: int = 2) -> None:
        """Wait until metrics.jsonl has this many steps."""
        deadline = time.monotonic() + _START_S
        while self.last_step() < number:
            assert self.process.poll() is None, self.said()
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.05)

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
        """The process of a rank; `AssertionError` if there is none."""
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
        """`send`, and wait until all have ended."""
        begin = time.monotonic()
        self.send(number, target, times, gap_s)
        return self.ended(begin)

    def send(
        self, number: Signals, target: str = "command", times: int = 1, gap_s: float = 0.2
    ) -> None:
        """Signal the command, its process `group` or `rank N`."""
        rank = self.rank(int(target.split()[1])) if target.startswith("rank") else None
        for count in range(times):
            if count:
                time.sleep(gap_s)
            with suppress(ProcessLookupError, psutil.NoSuchProcess):
                if target == "group":
                    os.killpg(self.process.pid, number)
                else:
                    (rank or self.process).send_signal(number)

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
            deadline = time.monotonic() + _LEFT_AFTER_S
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


def checkpoint_steps(output_dir: Path) -> set[int]:
    """Steps of the folders that are named as complete checkpoints."""
    matches = (re.fullmatch(r"checkpoint-(\d+)", path.name) for path in output_dir.glob("*"))
    return {int(match[1]) for match in matches if match}


def damage_of(checkpoint: Path, reference: Path) -> list[str]:
    """Differences between a checkpoint and that of the undisturbed run."""
    found = _tensor_differences(checkpoint, reference, "model")
    found += _tensor_differences(checkpoint, reference, "optimizer")
    states = []
    for folder in (checkpoint, reference):
        try:
            state = json.loads((folder / "trainer_state.json").read_text())
            states.append((state["step"], state["data"]))
        except (OSError, ValueError, KeyError) as error:
            return [*found, f"{folder.name}/trainer_state.json: {error}"]
    if states[0] != states[1]:
        found.append(f"{checkpoint.name}: step or data position {states[0]}, not {states[1]}")
    return found


def differences_of_runs(
    output_dir: Path, reference: Path, excused_step: int | None = None
) -> list[str]:
    """Differences in final weights, the last checkpoint and the losses.

    Args:
        excused_step: step whose lines of metrics.jsonl may be missing.
    """
    found = _tensor_differences(output_dir / "final", reference / "final", "model")
    newest = f"checkpoint-{max(checkpoint_steps(reference))}"
    found += damage_of(output_dir / newest, reference / newest)
    steps = [line["step"] for line in metrics(output_dir) if "loss" in line]
    twice = sorted({step for step in steps if steps.count(step) > 1})
    found += [f"metrics.jsonl has step {step} twice" for step in twice]
    own, wanted = _lines_by_step(output_dir), _lines_by_step(reference)
    for step, values in wanted.items():
        if step != excused_step and own.get(step) != values:
            found.append(f"metrics.jsonl: step {step} has {own.get(step)}, not {values}")
    return found


def _tensor_differences(folder: Path, reference: Path, stem: str) -> list[str]:
    name = f"{folder.name}/{stem}"
    try:
        found, wanted = (
            {key: value for file in files for key, value in load_file(file).items()}
            for files in (each.glob(f"{stem}*.safetensors") for each in (folder, reference))
        )
    except Exception as error:  # safetensors raises several types for damaged files.
        return [f"{name} cannot be read: {error}"]
    if set(found) != set(wanted) or not wanted:
        return [f"{name} has other tensors: {sorted(set(found) ^ set(wanted))[:3]}"]
    facts = lambda tensor: (tensor.dtype, tensor.shape, tensor.tobytes())  # noqa: E731
    differing = [key for key in sorted(wanted) if facts(found[key]) != facts(wanted[key])]
    if not differing:
        return []
    return [f"{name} differs in {len(differing)} tensors, such as {differing[0]}"]


def _lines_by_step(output_dir: Path) -> dict[int, dict[str, float]]:
    values: dict[int, dict[str, float]] = {}
    for line in metrics(output_dir):
        compared = {key: line[key] for key in _COMPARED_METRICS if key in line}
        values.setdefault(line["step"], {}).update(compared)
    return values
