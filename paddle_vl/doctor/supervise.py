"""Runs checks in another process and survives whatever happens to it.

The process tells which check begins and ends (`paddle_vl.doctor.worker`). If it dies, or a check
passes its time limit, that check is a finding and a new process goes on with the rest.
"""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paddle_vl.doctor.check import Result, wrong
from paddle_vl.doctor.worker import EVENTS_FILE, JOB_FILE, RESTART

PACKAGE = Path(__file__).resolve().parents[1]
_POLL_S = 0.05
# Until the first event: importing Paddle from a cold disk takes tens of seconds.
START_LIMIT_S = 180.0
# For ranks that the worker has started, before it is killed.
_GRACE_S = 10.0
_CRASH = (
    "a crash in a kernel or library, not a Python error: report it with this table and --json; if "
    "only this kernel crashes, look for another wheel or driver"
)
_SHOWN_LINES = 25
# A process that dies before its first check would be started for ever.
_START = "start"


class RefusedError(ValueError):
    """The worker refused the job."""


@dataclass(frozen=True)
class Finished:
    """A check that is over.

    Attributes:
        seconds: that it took; None where its process did not say.
    """

    name: str
    title: str
    result: Result
    seconds: float | None = None


@dataclass(frozen=True)
class Plan:
    """The checks that a process is going to run, by name."""

    titles: dict[str, str]
    limits_s: dict[str, float]


def supervised(
    command: Sequence[str],
    folder: Path,
    only: Sequence[str] = (),
    is_quick: bool = False,
    on_plan: Callable[[int], None] = lambda number: None,
    on_begin: Callable[[str], None] = lambda name: None,
) -> Iterator[Finished]:
    """Run the chosen checks; yields each when it is over.

    Args:
        command: starts a worker; the job's folder is appended.
        folder: empty.
        on_plan: called with the number of checks, once.
        on_begin: called with the name of a check that begins.

    Raises:
        RefusedError: `only` names what does not exist.
    """
    done: list[str] = []
    is_planned = False
    for attempt in range(1000):
        work = folder / str(attempt)
        work.mkdir(parents=True)
        job = {"only": list(only), "is_quick": is_quick, "done": done}
        (work / JOB_FILE).write_text(json.dumps(job), encoding="utf-8")
        worker = _Worker([*command, str(work)], work)
        try:
            for event in worker.events():
                if event["event"] == "refused":
                    raise RefusedError(event["reason"])
                if event["event"] == "plan" and not is_planned:
                    is_planned = True
                    on_plan(len(event["checks"]))
                elif event["event"] == "begin":
                    on_begin(event["check"])
                elif event["event"] == "end":
                    done.append(event["check"])
                    yield worker.finished(event)
        finally:
            worker.stop()
        if worker.wants_restart:
            continue
        if worker.problem is None:
            return
        yield worker.problem
        if worker.problem.name == _START:
            return
        done.append(worker.problem.name)


class _Worker:
    """One process that runs checks.

    Attributes:
        problem: after `events` has ended, the check that ended the process; None if all ran.
        wants_restart: after `events` has ended, whether the other checks need a new process.
    """

    def __init__(self, command: Sequence[str], work: Path):
        self.problem: Finished | None = None
        self.wants_restart = False
        self._work, self._plan = work, None
        self._running: str | None = None
        self._since = time.monotonic()
        self._seen = 0
        with (work / "output").open("wb") as output:
            self._process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                # A group of its own, so that what it starts ends with it.
                start_new_session=True,
                env=_environment(),
            )

    def events(self) -> Iterator[dict[str, Any]]:
        """What happens, until the process ends or a check takes too long."""
        while True:
            code = self._process.poll()
            for event in self._new_events():
                self._note(event)
                yield event
            if code is not None:
                self.wants_restart = code == RESTART and self._running is None
                if self.wants_restart:
                    return
                if code or self._running is not None or self._plan is None:
                    self.problem = self._ended(code)
                return
            if time.monotonic() - self._since > self._limit_s:
                self.problem = self._late()
                return
            time.sleep(_POLL_S)

    def finished(self, event: dict[str, Any]) -> Finished:
        return Finished(
            event["check"],
            self._title(event["check"]),
            Result(**event["result"]),
            event["seconds"],
        )

    def stop(self) -> None:
        """End the process and what it has started."""
        if self._process.poll() is None:
            # The launcher passes SIGTERM on to its ranks.
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_GRACE_S)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    @property
    def _limit_s(self) -> float:
        if self._plan is None or self._running is None:
            return START_LIMIT_S
        return self._plan.limits_s[self._running]

    def _new_events(self) -> list[dict[str, Any]]:
        file = self._work / EVENTS_FILE
        if not file.exists():
            return []
        # The last line may be half written.
        lines = file.read_bytes().split(b"\n")[:-1]
        new, self._seen = lines[self._seen :], len(lines)
        return [json.loads(line) for line in new]

    def _note(self, event: dict[str, Any]) -> None:
        self._since = time.monotonic()
        if event["event"] == "plan":
            entries = event["checks"]
            self._plan = Plan(
                {entry["name"]: entry["title"] for entry in entries},
                {entry["name"]: entry["limit_s"] for entry in entries},
            )
        elif event["event"] == "refused":
            self._plan = Plan({}, {})
        self._running = event["check"] if event["event"] == "begin" else None

    def _title(self, name: str) -> str:
        return "" if self._plan is None else self._plan.titles.get(name, "")

    def _ended(self, code: int) -> Finished:
        how = f"exit code {code}"
        if code < 0:
            how = f"signal {signal.Signals(-code).name}"
        if self._running is None and self._plan is None:
            result = wrong(
                f"the process of the checks ended with {how} while it imported Paddle",
                "Paddle cannot be imported here: read the output, and install the wheel for this "
                "machine's Python, CUDA and driver",
                output=self._output(),
            )
            return Finished(_START, "Paddle can be imported", result)
        if self._running is None:
            result = wrong(
                f"the process of the checks ended with {how} between two checks",
                "report it with this table and --json",
                output=self._output(),
            )
            return Finished(_START, "the process of the checks", result)
        result = wrong(
            f"the process crashed: {how}",
            "the host's memory may be full: see dmesg" if code == -signal.SIGKILL else _CRASH,
            output=self._output(),
        )
        return Finished(self._running, self._title(self._running), result)

    def _late(self) -> Finished:
        name = self._running or _START
        result = wrong(
            f"did not end within {self._limit_s:g} s and was stopped",
            "a hang: see where it stands in --json; of several ranks, check NCCL_DEBUG=INFO, the "
            "network interfaces and peer access between the GPUs",
            output=self._output(),
        )
        return Finished(name, self._title(name), result, self._limit_s)

    def _output(self) -> list[str]:
        text = (self._work / "output").read_text(encoding="utf-8", errors="replace")
        return text.splitlines()[-_SHOWN_LINES:]


def _environment() -> dict[str, str]:
    """This process's variables; the package is the same one, also from a clone."""
    paths = [str(PACKAGE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONFAULTHANDLER": "1", "PYTHONPATH": os.pathsep.join(paths)}
