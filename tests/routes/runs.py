"""Runs command lines of `table` as a user would, in a folder with the data of the quickstart.

A command is a fork that has imported the package (see `tests.support.forked`) and runs
`python -m paddle_vl`; ranks have the variables of Paddle's launcher, as fleetrun starts them. Data
and runs on one device are made once, by the worker of the tests that comes first.
"""

import fcntl
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from paddle_vl.cli.main import MALLOC_VARIABLE, with_whole_blocks
from paddle_vl.nn.cpu.compiler import CompilerError, find_compiler
from tests.routes.data import write_data
from tests.routes.table import RUNS, TOPOLOGIES, Row, Run
from tests.support import forked
from tests.support.finished_runs import arrays_of, assert_close, metrics_of
from tests.support.launch import POLL_INTERVAL, rank_environment, reserve_port
from tests.support.tolerance import TOPOLOGY
from tests.support.topology_runs import DAMPED, num_data_parts

ROOT = Path(__file__).parents[2]
STEPS, SAVED = 3, 2
_LONGEST_S = 300.0
# As `paddle-vl train` starts itself; a process that has it does not start again.
_ENVIRONMENT = {MALLOC_VARIABLE: with_whole_blocks({})[MALLOC_VARIABLE]}
_WITH_INPUT = "import sys; from paddle_vl.cli.main import run; sys.stdin = open({!r}); run({!r})"
_SHORT = (
    *DAMPED, f"train.max_steps={STEPS}", f"train.save_steps={SAVED}", "train.eval_steps=null",
    "train.warmup_steps=1", "data.num_workers=0", "logging.logging_steps=1",
    "train.gradient_accumulation_steps=2",
)  # fmt: skip


@dataclass
class Started:
    """A command line that runs, on one rank or several.

    Attributes:
        out, log: files of what each rank prints to stdout and stderr.
    """

    processes: list
    out: list[Path]
    log: list[Path]

    def shown(self, rank: int = 0) -> str:
        """The ends of both outputs."""
        return "\n".join(_text(files[rank])[-3000:] for files in (self.out, self.log))

    def wait(self) -> None:
        """Wait until all ranks have ended.

        Raises:
            AssertionError: one failed, or runs too long; has the ends of its outputs.
        """
        deadline = time.monotonic() + _LONGEST_S
        while None in (codes := [process.poll() for process in self.processes]):
            if any(codes) or time.monotonic() > deadline:
                break
            time.sleep(POLL_INTERVAL)
        failed = [rank for rank, code in enumerate(codes) if code != 0]
        failed.sort(key=lambda rank: codes[rank] is None)
        assert not failed, f"ended with {codes}:\n{self.shown(failed[0])}"

    def wait_for(self, pattern: str) -> re.Match[str]:
        """Wait until a line of the log has a pattern."""
        deadline = time.monotonic() + _LONGEST_S
        while (found := re.search(pattern, _text(self.log[0]))) is None:
            assert self.processes[0].poll() is None, self.shown()
            assert time.monotonic() < deadline, self.shown()
            time.sleep(POLL_INTERVAL)
        return found

    def stop(self) -> None:
        """Ask it to end; it ends with 0."""
        os.kill(self.processes[0].pid, signal.SIGTERM)
        self.wait()


class Routes:
    """Runs command lines in one folder, and counts their processor seconds.

    Attributes:
        folder: where data and runs are, the working directory of every command.
        seconds: processor seconds so far, of commands and all that they started.
    """

    def __init__(self, folder: Path):
        self.folder, self.seconds, self._paths = folder, 0.0, 0
        self.once("data", lambda: write_data(folder))

    def once(self, name: str, make: Callable[[], object]) -> None:
        """Call `make` if no process of the tests has."""
        with open(self.folder / f"{name}.made", "a+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            lock.seek(0)
            if not lock.read():
                make()
                lock.write("made")

    def new_path(self) -> str:
        """A path that no row has, relative to the folder."""
        self._paths += 1
        return f"made/{os.getpid()}-{self._paths}"

    def forget(self) -> None:
        """Remove what is at the paths of rows so far, so that all rows fit on a small disk."""
        for path in (self.folder / "made").glob(f"{os.getpid()}-*"):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()

    @contextmanager
    def started(self, *words: str, ranks: int = 1, typed: str = "") -> Iterator[Started]:
        """Start `paddle-vl WORDS`; what still runs is killed at the end of the block.

        Args:
            typed: its input.
        """
        with ExitStack() as stack:
            ports = [reserve_port(stack) for _ in range(ranks)]
            started = Started([], [], [])
            path = self.folder / self.new_path()
            path.mkdir(parents=True)
            arguments = ["-m", "paddle_vl", *words]
            if typed:
                (path / "in").write_text(typed)
                arguments = ["-c", _WITH_INPUT.format(str(path / "in"), list(words))]
            for rank in range(ranks):
                started.out.append(path / f"out{rank}")
                started.log.append(path / f"log{rank}")
                own = rank_environment(rank, ports) if ranks > 1 else {}
                process = forked.start(
                    arguments,
                    environment={**_ENVIRONMENT, **own},
                    stdout=started.out[-1],
                    stderr=started.log[-1],
                    folder=self.folder,
                    # See `tests.support.launch`.
                    server=rank % 2,
                )
                started.processes.append(process)
            try:
                yield started
            finally:
                for process in started.processes:
                    process.kill()
                    process.wait()
                self.seconds += sum(process.processor_seconds for process in started.processes)

    def command(self, *words: str, ranks: int = 1, typed: str = "") -> tuple[str, str]:
        """Run `paddle-vl WORDS` to its end; returns what it, or rank 0, wrote to stdout and
        stderr."""
        with self.started(*words, ranks=ranks, typed=typed) as started:
            started.wait()
        return _text(started.out[0]), _text(started.log[0])

    def program(self, *words: str) -> str:
        """Run a whole process to its end; returns what it printed."""
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(
            words, cwd=self.folder, text=True, timeout=_LONGEST_S,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        self.seconds += after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        assert done.returncode == 0, done.stdout[-3000:]
        return done.stdout

    def filled(self, text: str) -> str:
        """Text with the folders of the runs that it names, which are made, and of the tests."""

        def folder_of(match: re.Match[str]) -> str:
            if match[1] == "tests":
                return str(ROOT / "tests")
            return str(self.one_device(match[1])) if match[1] in RUNS else match[0]

        return re.sub(r"\{([a-z0-9. ]+)\}", folder_of, text)

    def settings(self, run: Run, topology: Sequence[str]) -> list[str]:
        """The configuration of a run and its settings under a topology."""
        is_policy = run.config.startswith("pi07")
        found = re.search(r"train\.gradient_accumulation_steps=(\d+)", " ".join(topology))
        micro_batches = 2 if found is None else int(found[1])
        samples = 2 * run.micro_batch // num_data_parts(topology) // micro_batches
        given = [*_SHORT, f"train.per_device_train_batch_size={samples}", *run.settings]
        # Policies pad nothing.
        given += [one for one in topology if not is_policy or not one.startswith("data.")]
        return [str(ROOT / "configs" / run.config), *map(self.filled, given)]

    def one_device(self, name: str) -> Path:
        """The folder of a run on one device, relative to `folder`; it is made if it is missing."""
        output = Path("one") / name.replace(" ", "_")

        def make() -> None:
            words = ["train", *self.settings(RUNS[name], ()), f"train.output_dir={output}"]
            assert_kernels_of_this_machine(self.command(*words)[1])

        self.once(output.name, make)
        return output

    def train(self, row: Row) -> None:
        """Run a training row and compare it with one device."""
        run, one = RUNS[row.run], self.folder / self.one_device(row.run)
        topology = TOPOLOGIES[row.topology]
        output = self.folder / self.new_path()
        words = ["train", *self.settings(run, topology), f"train.output_dir={output}"]
        ranks = number_of_ranks(topology)
        if row.launcher:
            told = self.program(*_launched(row.launcher, ranks, words))
        else:
            told = self.command(*words, ranks=ranks)[1]
        assert_kernels_of_this_machine(told)
        assert_equals(output, one)
        if not row.then:
            return
        resumed, topology = self.folder / self.new_path(), TOPOLOGIES[row.then]
        for folder in (f"checkpoint-{SAVED}", "final"):  # That may have the best model.
            shutil.copytree(output / folder, resumed / folder)
        words = ["train", *self.settings(run, topology), f"train.output_dir={resumed}"]
        self.command(*words, "train.resume_from_checkpoint=auto", ranks=number_of_ranks(topology))
        if row.then == row.topology:
            assert_same_bits(resumed, output)
        else:
            assert_equals(resumed, one)


def _launched(launcher: str, ranks: int, words: Sequence[str]) -> list[str]:
    """A command line that starts ranks by itself."""
    if launcher == "fleetrun":
        program = Path(sys.executable).with_name("fleetrun")
        script = str(ROOT / "tools" / "train.py")
        return [str(program), "--nproc_per_node", str(ranks), script, *words[1:]]
    return [sys.executable, "-m", "paddle_vl", *words, "--nproc", str(ranks)]


def _text(file: Path) -> str:
    return file.read_text("utf-8", "backslashreplace") if file.exists() else ""


def number_of_ranks(topology: Sequence[str]) -> int:
    """The product of the degrees; those of cp and ep lie within others."""
    degrees = re.findall(r"parallel\.(?:dp|mp|pp|sharding)_degree=(\d+)", " ".join(topology))
    return int(np.prod([int(degree) for degree in degrees], dtype=int))


def assert_kernels_of_this_machine(told: str) -> None:
    """Assert that a run took the kernels that it takes by default here: those in C where there is a
    compiler."""
    found = re.search(r"kernels \(fused, cpu\): (.*)", told)
    assert found, told[-2000:]
    assert (" C," in found[0]) == has_compiler(), found[0]


def has_compiler() -> bool:
    try:
        find_compiler()
    except CompilerError:
        return False
    return True


def last_checkpoint(run: Path) -> dict[str, np.ndarray]:
    """The weights of the last step; of adapters these and what is trained in full."""
    folder = run / f"checkpoint-{STEPS}"
    adapters = folder / "adapter_model.safetensors"
    return load_file(adapters) if adapters.is_file() else arrays_of(folder, ("model",))


def assert_equals(found: Path, wanted: Path) -> None:
    """Assert that the losses of every step that a run took, and its weights, are another's."""
    losses = {line["step"]: line for line in metrics_of(wanted)}
    for line in metrics_of(found):
        for name in ("loss", "grad_norm", "eval_loss"):
            if name in losses[line["step"]]:
                close = pytest.approx(losses[line["step"]][name], rel=TOPOLOGY)
                assert line[name] == close, f"{name} of step {line['step']}"
    assert line["step"] == STEPS
    assert_close(last_checkpoint(found), last_checkpoint(wanted))


def assert_same_bits(found: Path, wanted: Path) -> None:
    """Assert that the weights of two runs are equal to the bit."""
    ours, theirs = last_checkpoint(found), last_checkpoint(wanted)
    assert ours.keys() == theirs.keys()
    for name, array in theirs.items():
        np.testing.assert_array_equal(ours[name], array, err_msg=name)
