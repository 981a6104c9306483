"""Runs command lines of `table` as a user would, in a folder with the data of the quickstart.

A command is a fork that has imported the package (see `tests.support.forked`) and runs
`python -m paddle_vl`; ranks have the variables of Paddle's launcher, as fleetrun starts them. Data
and runs on one device are made once, by the worker of the tests that comes first.
"""

import fcntl
import json
import math
import os
import re
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from learn_digit_preferences import write_pairs
from make_digits_corpus import make_digits_corpus
from paddle_vl.cli.main import MALLOC_VARIABLE, with_whole_blocks
from paddle_vl.nn.cpu.compiler import CompilerError, find_compiler
from tests.routes.table import HALVES, RUNS, TOPOLOGIES, Row, Run
from tests.support import forked
from tests.support.finished_runs import arrays_of, assert_close, metrics_of
from tests.support.launch import rank_environment, reserve_port
from tests.support.tolerance import TOPOLOGY
from tests.support.topology_runs import DAMPED, num_data_parts

ROOT = Path(__file__).parents[2]
DATA, CORPUS, ARM = "runs/digits/data", "runs/digits_corpus", "data/demonstrations"
STEPS, SAVED = 3, 2
# Of a file; three steps take 180.
_ROWS = 320
_TIMEOUT_S = 300.0
# As `paddle-vl train` starts itself; a process that has it does not start again.
_ENVIRONMENT = {MALLOC_VARIABLE: with_whole_blocks({})[MALLOC_VARIABLE]}
_SHORT = (
    *DAMPED, f"train.max_steps={STEPS}", f"train.save_steps={SAVED}", "train.eval_steps=null",
    "train.warmup_steps=1", "data.num_workers=0", "logging.logging_steps=1",
    "train.gradient_accumulation_steps=2",
)  # fmt: skip


@dataclass
class Routes:
    """Runs command lines in one folder, and counts their processor seconds.

    Attributes:
        folder: where data and runs are, the working directory of every command.
        seconds: processor seconds so far, of commands and all that they started.
    """

    folder: Path
    seconds: float = field(default=0.0, init=False)

    def once(self, name: str, make: Callable[[], object]) -> None:
        """Call `make` if no process of the tests has."""
        with open(self.folder / f".{name.replace('/', '-')}.lock", "a+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            lock.seek(0)
            if not lock.read():
                make()
                lock.write("made")

    def command(self, *arguments: str, ranks: int = 1) -> str:
        """Run `paddle-vl ARGUMENTS` to its end; returns what it, or rank 0, printed.

        Raises:
            AssertionError: a rank failed; has the end of its output.
        """
        with ExitStack() as stack:
            ports = [reserve_port(stack) for _ in range(ranks)]
            processes, files = [], []
            for rank in range(ranks):
                own = rank_environment(rank, ports) if ranks > 1 else {}
                files.append(self.folder / f"output-{os.getpid()}-{rank}")
                files[-1].unlink(missing_ok=True)
                process = forked.start(
                    ["-m", "paddle_vl", *arguments],
                    environment={**_ENVIRONMENT, **own},
                    stdout=files[-1],
                    folder=self.folder,
                    # See `tests.support.launch`.
                    server=rank % 2,
                )
                stack.callback(process.kill)
                processes.append(process)
            deadline = time.monotonic() + _TIMEOUT_S
            while None in (codes := [process.poll() for process in processes]):
                if any(codes) or time.monotonic() > deadline:
                    break
                time.sleep(0.02)
            for process in processes:
                process.kill()
                process.wait()
            self.seconds += sum(process.processor_seconds for process in processes)
            outputs = [file.read_text("utf-8", "backslashreplace") for file in files]
            if any(code != 0 for code in codes):
                failed = next(rank for rank, code in enumerate(codes) if code != 0)
                raise AssertionError(f"ended with {codes}:\n{outputs[failed][-3000:]}")
            return outputs[0]

    def program(self, *command: str, environment: Mapping[str, str] | None = None) -> str:
        """Run a whole process to its end; returns what it printed."""
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(
            command, cwd=self.folder, env={**os.environ, **(environment or {})},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=_TIMEOUT_S,
        )  # fmt: skip
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        self.seconds += after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        assert done.returncode == 0, done.stdout[-3000:]
        return done.stdout

    def make_data(self) -> None:
        """The data of the configurations, with the first rows of each file, and pairs of answers."""
        whole = self.folder / "whole"
        make_digits_corpus(whole)
        write_pairs(whole / "digits", self.folder / "pairs")
        for made, name in ((whole / "digits", DATA), (whole, CORPUS)):
            folder = self.folder / name
            folder.mkdir(parents=True)
            for entry in ("images", "processor"):
                (folder / entry).symlink_to(made / entry)
            for file in made.glob("*.jsonl"):
                every = 20 if file.name.startswith(("test", "held_out")) else 1
                _write_rows(folder / file.name, _rows_of(file)[::every][:_ROWS])
        pairs = self.folder / "pairs"
        rows = _rows_of(pairs / "train.jsonl")
        # Half of them about styles, half about other questions.
        _write_rows(pairs / "train.jsonl", rows[:: len(rows) // _ROWS])
        _write_rows(pairs / "test.jsonl", _rows_of(pairs / "test.jsonl")[::20])
        for number, row in enumerate(rows):
            row["label"], other = number % 3 > 0, row.pop("rejected_response")
            if not row["label"]:
                row["messages"][-1]["content"] = other
        _write_rows(pairs / "rated.jsonl", rows[:: len(rows) // _ROWS])
        self.program(sys.executable, str(ROOT / "tools/make_demonstrations.py"), ARM)

    def settings(self, run: Run, topology: Sequence[str]) -> list[str]:
        """The command line of a run under a topology, without its output folder."""
        parts = num_data_parts(topology)
        given = [
            *_SHORT,
            f"train.per_device_train_batch_size={run.micro_batch // parts}",
            *run.settings,
            *topology,
        ]
        if HALVES in topology:
            given.remove(HALVES)
            given += [
                "train.gradient_accumulation_steps=4",
                f"train.per_device_train_batch_size={run.micro_batch // parts // 2}",
            ]
        return [str(ROOT / "configs" / run.config), *map(self._filled, given)]

    def _filled(self, setting: str) -> str:
        """A setting with the folders of the runs that it names."""

        def folder_of(match: re.Match[str]) -> str:
            return str(self.one_device(match[1]).relative_to(self.folder))

        return re.sub(r"\{([a-z0-9_. ]+)\}", folder_of, setting)

    def one_device(self, name: str) -> Path:
        """The folder of a run on one device, which is made if it is missing."""
        output = self.folder / "one" / name.replace(" ", "_")

        def make() -> None:
            printed = self.command("train", *self.settings(RUNS[name], ()), _output(output))
            assert_kernels_of_this_machine(printed)

        self.once(f"one {name}", make)
        return output

    def train(self, row: Row) -> None:
        """Run a training row and compare it with one device."""
        run, one = RUNS[row.run], self.one_device(row.run)
        topology = TOPOLOGIES[row.topology]
        output = self.folder / "rows" / f"{row.run}, {row.topology}".replace(" ", "_")
        settings = [*self.settings(run, topology), _output(output)]
        ranks = num_ranks(topology)
        if row.launcher == "nproc":
            printed = self.program(
                sys.executable, "-m", "paddle_vl", "train", *settings, "--nproc", str(ranks)
            )
        elif row.launcher == "fleetrun":
            printed = self.program(
                str(Path(sys.executable).with_name("fleetrun")), "--nproc_per_node", str(ranks),
                str(ROOT / "tools" / "train.py"), *settings,
            )  # fmt: skip
        else:
            printed = self.command("train", *settings, ranks=ranks)
        assert_kernels_of_this_machine(printed)
        assert_equals(output, one)
        if not row.then:
            return
        topology = TOPOLOGIES[row.then]
        resumed = output.with_name(f"{output.name}-then")
        resumed.mkdir()
        shutil.copytree(output / f"checkpoint-{SAVED}", resumed / f"checkpoint-{SAVED}")
        settings = [*self.settings(run, topology), _output(resumed)]
        settings.append("train.resume_from_checkpoint=auto")
        self.command("train", *settings, ranks=num_ranks(topology))
        if row.then == row.topology:
            assert_same_bits(resumed, output)
        else:
            assert_equals(resumed, one)


def _rows_of(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def _write_rows(file: Path, rows: Sequence[dict]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _output(folder: Path) -> str:
    return f"train.output_dir={folder}"


def num_ranks(topology: Sequence[str]) -> int:
    """The product of the degrees; those of cp and ep lie within others."""
    degrees = re.findall(r"parallel\.(?:dp|mp|pp|sharding)_degree=(\d+)", " ".join(topology))
    return math.prod(map(int, degrees))


def assert_kernels_of_this_machine(printed: str) -> None:
    """Assert that a command took the kernels that it takes by default here: those in C where there
    is a compiler."""
    found = re.search(r"kernels \(fused, cpu\): (.*)", printed)
    assert found, printed[-2000:]
    assert (" C," in found[1]) == has_compiler(), found[0]


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
