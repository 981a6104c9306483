"""Runs a function of a test module on several ranks, with the variables of Paddle's launcher.

Ranks are forked (see `forked`): a launch takes a tenth of a second, and each has fresh ranks. What
must not share them, like several topologies, has a launch of its own. Many small checks under one
topology share one: a worker returns a dict of outcomes by name (made with `run_checks`), a
module-scoped fixture launches it, and each parametrised test asserts on one name (`outcome_of`).

    def worker():
        dist.init_parallel_env()
        return run_checks({"sum": check_sum, "gather": check_gather})

    @pytest.fixture(scope="module")
    def outcomes():
        return launch(worker, processes=2)

    @pytest.mark.parametrize("name", ["sum", "gather"])
    def test_collective(outcomes, name):
        outcome_of(outcomes, name)
"""

import importlib.util
import inspect
import os
import pickle
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.support import forked
from tests.support.implementations import take_compiled

POLL_INTERVAL = 0.02
SHOWN_LINES = 40


def launch(
    worker: Callable,
    processes: int,
    *,
    arguments: Sequence[Any] = (),
    environment: Mapping[str, str] | None = None,
    timeout: float = 120,
) -> list[Any]:
    """Run a module-level function of a test module on several ranks, on CPUs with gloo.

    Args:
        worker: each rank imports it from its file; its result must be picklable.
        arguments: picklable, the same on each rank; functions of the worker's module too.
        environment: variables added to this process's and the launcher's.
        timeout: seconds until all ranks are killed.

    Returns:
        The results in rank order.

    Raises:
        AssertionError: a rank failed or the timeout passed; shows the last output of the first rank
            that failed, or of all ranks that still run.
    """
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        ports = [reserve_port(stack) for _ in range(processes)]
        job = Path(folder) / "job"
        job.write_bytes(_job(worker, arguments))
        deadline = time.monotonic() + timeout
        ranks = _Ranks(Path(folder))
        stack.callback(ranks.kill)
        for rank in range(processes):
            ranks.start(job, rank_environment(rank, ports) | dict(environment or {}))
        ranks.wait(deadline, timeout)
        return [pickle.loads(path.read_bytes()) for path in ranks.results]


def run_checks(checks: Mapping[str, Callable[[], Any]]) -> dict[str, tuple[Any, str | None]]:
    """Run each check in turn, in a worker; a check that raises on all ranks does not stop the rest.

    Returns:
        (result, None) or (None, traceback) by name.
    """
    outcomes = {}
    for name, check in checks.items():
        # A hanging rank's last output then names the check.
        print("check:", name, flush=True)
        try:
            outcomes[name] = (check(), None)
        except (Exception, pytest.fail.Exception):
            outcomes[name] = (None, traceback.format_exc())
    return outcomes


def outcome_of(outcomes: Sequence[Mapping[str, tuple[Any, str | None]]], name: str) -> list[Any]:
    """The results of a check by rank; raises AssertionError with its first failure, if any."""
    for rank, of_rank in enumerate(outcomes):
        error = of_rank[name][1]
        assert error is None, f"check {name!r} on rank {rank} of {len(outcomes)}:\n{error}"
    return [of_rank[name][0] for of_rank in outcomes]


def wait_for_ranks(folder: str | Path, rank: int, ranks: Sequence[int], limit: float = 300) -> None:
    """A barrier through files, without Paddle: report this rank and wait until `ranks` have.

    For workers whose ranks must not end while others still use the run's store or connections.

    Args:
        folder: empty, one per barrier; created if it is missing.
        limit: seconds.

    Raises:
        TimeoutError: names the ranks that have not come.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / str(rank)).touch()
    deadline = time.monotonic() + limit
    while missing := [other for other in ranks if not (folder / str(other)).exists()]:
        if time.monotonic() > deadline:
            raise TimeoutError(f"ranks {missing} have not come to {folder} within {limit} s")
        time.sleep(POLL_INTERVAL)


class _Ranks:
    """Running ranks with their output files and results."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.processes: list[forked.Forked | forked.Started] = []

    @property
    def results(self) -> list[Path]:
        return [self.folder / f"result{rank}" for rank in range(len(self.processes))]

    def start(self, job: Path, environment: dict[str, str]) -> None:
        rank = len(self.processes)
        self.processes.append(
            forked.start(
                [__file__, str(job), str(self.folder / f"result{rank}")],
                environment=environment,
                stdout=self.folder / f"output{rank}",
                # Two hash seeds, so that an order of a set that ranks must share is seen to differ.
                server=rank % 2,
            )
        )

    def wait(self, deadline: float, timeout: float) -> None:
        while True:
            codes = [process.poll() for process in self.processes]
            failed = [rank for rank, code in enumerate(codes) if code not in (None, 0)]
            if failed:
                rank = failed[0]
                raise AssertionError(
                    f"rank {rank} of {len(codes)} ended with {codes[rank]}:\n{self._end(rank)}"
                )
            if None not in codes:
                return
            if time.monotonic() > deadline:
                running = [rank for rank, code in enumerate(codes) if code is None]
                ends = "\n".join(f"--- rank {rank}\n{self._end(rank)}" for rank in running)
                raise AssertionError(f"ranks {running} still run after {timeout} s:\n{ends}")
            time.sleep(POLL_INTERVAL)

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()

    def _end(self, rank: int) -> str:
        text = (self.folder / f"output{rank}").read_text(encoding="utf-8", errors="replace")
        return "\n".join(text.splitlines()[-SHOWN_LINES:])


def reserve_port(stack: ExitStack) -> int:
    """Reserve a port for a socket that reuses addresses, as the store does."""
    placeholder = stack.enter_context(socket.socket())
    placeholder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    placeholder.bind(("127.0.0.1", 0))
    return placeholder.getsockname()[1]


def rank_environment(rank: int, ports: list[int]) -> dict[str, str]:
    """The variables that Paddle's launcher sets."""
    endpoints = [f"127.0.0.1:{port}" for port in ports]
    return {
        "PADDLE_DISTRI_BACKEND": "gloo",
        "PADDLE_TRAINER_ID": str(rank),
        "PADDLE_TRAINERS_NUM": str(len(ports)),
        "PADDLE_CURRENT_ENDPOINT": endpoints[rank],
        "PADDLE_TRAINER_ENDPOINTS": ",".join(endpoints),
    }


def _job(worker: Callable, arguments: Sequence[Any]) -> bytes:
    source = inspect.getsourcefile(worker)
    if source is None or worker.__qualname__ != worker.__name__:
        raise ValueError(f"{worker.__qualname__} is not a function at the top of a test module.")
    call = pickle.dumps((worker, tuple(arguments)))
    return pickle.dumps((worker.__module__, source, call))


def _run_as_rank(job: Path, result: Path) -> None:
    # pytest imports test modules under names that ranks cannot import.
    name, source, call = pickle.loads(job.read_bytes())
    spec = importlib.util.spec_from_file_location(name, source)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    worker, arguments = pickle.loads(call)
    take_compiled()
    result.write_bytes(pickle.dumps(worker(*arguments)))
    sys.stdout.flush()
    # For the reason given in paddle_vl.cli.main.run.
    os._exit(0)


if __name__ == "__main__":
    _run_as_rank(Path(sys.argv[1]), Path(sys.argv[2]))
