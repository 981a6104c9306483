"""Runs checks in another process and survives whatever happens to it.

The process tells which check begins and ends (`paddle_vl.doctor.worker`). If it dies, or a check
passes its time limit, that check is a finding and a new process goes on with the rest.
"""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paddle_vl.doctor.check import Result, wrong
from paddle_vl.doctor.worker import EVENTS_FILE, JOB_FILE, RESTART
from paddle_vl.processes import Processes, end_in_words

PACKAGE = Path(__file__).resolve().parents[1]
# Until the first event: importing Paddle from a cold disk takes tens of seconds.
START_LIMIT_S = 180.0
# For ranks that the worker has started, before it is killed.
_GRACE_S = 10.0
_CRASH = (
    "a crash in a kernel or library, not a Python error: report it with this table and --json; if "
    "only this kernel crashes, look for another wheel or driver"
)
_SHOWN_LINES = 25
# A process that dies outside of its checks would do so for ever.
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
    while True:
        work = folder / str(len(list(folder.glob("*"))))
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
                    title, result = worker.title(event["check"]), Result(**event["result"])
                    yield Finished(event["check"], title, result, event["seconds"])
        finally:
            # The launcher passes SIGTERM on to its ranks.
            worker.process.end(_GRACE_S)
        if worker.problem is not None:
            yield worker.problem
            done.append(worker.problem.name)
        if not worker.wants_successor:
            return


class _Worker:
    """One process that runs checks.

    Attributes:
        problem: after `events` has ended, the check that ended the process; None if all ran.
        wants_successor: after `events` has ended, whether the other checks need a new process.
    """

    def __init__(self, command: Sequence[str], work: Path):
        self.problem: Finished | None = None
        self.wants_successor = False
        self._work, self._running = work, None
        # The checks that the process is going to run; None before it has told.
        self._plan: dict[str, dict[str, Any]] | None = None
        self.process = Processes()
        self.process.start(command, _environment(), work / "output")

    def title(self, name: str) -> str:
        return (self._plan or {}).get(name, {}).get("title", "")

    def events(self) -> Iterator[dict[str, Any]]:
        """What happens, until the process ends or a check takes too long."""
        file, seen, since = self._work / EVENTS_FILE, 0, time.monotonic()
        for _ in self.process.watched():
            # Before its events, which it may write until it ends.
            (code,) = self.process.codes()
            # The last line may be half written.
            lines = file.read_bytes().split(b"\n")[:-1] if file.exists() else []
            for line in lines[seen:]:
                event, since = json.loads(line), time.monotonic()
                if event["event"] == "plan":
                    self._plan = {check["name"]: check for check in event["checks"]}
                self._running = event["check"] if event["event"] == "begin" else None
                yield event
            seen = len(lines)
            limit_s = START_LIMIT_S
            if self._plan is not None and self._running is not None:
                limit_s = self._plan[self._running]["limit_s"]
            if code is None and time.monotonic() - since > limit_s:
                self.problem = self._late(limit_s)
                self.wants_successor = self._running is not None
                return
            is_between = self._running is None and self._plan is not None
            if code is not None and not (is_between and code in (0, RESTART)):
                self.problem = self._ended(code)
            self.wants_successor = code == RESTART or self._running is not None

    def _ended(self, code: int) -> Finished:
        how = end_in_words(code)
        name, title = _START, "the process of the checks"
        found, remedy = f"it {how} between two checks", "report it with this table and --json"
        if self._running is not None:
            name, title = self._running, self.title(self._running)
            found, remedy = f"the process crashed: it {how}", _CRASH
            if code == -signal.SIGKILL:
                remedy = "the host's memory may be full: see dmesg"
        elif self._plan is None:
            title = "Paddle can be imported"
            found = f"the process of the checks {how} while it imported Paddle"
            remedy = (
                "Paddle cannot be imported here: read the output, and install the wheel for this "
                "machine's Python, CUDA and driver"
            )
        return Finished(name, title, wrong(found, remedy, output=self._output()))

    def _late(self, limit_s: float) -> Finished:
        name = self._running or _START
        result = wrong(
            f"did not end within {limit_s:g} s and was stopped",
            "a hang: see where it stands in --json; of several ranks, check NCCL_DEBUG=INFO, the "
            "network interfaces and peer access between the GPUs",
            output=self._output(),
        )
        return Finished(name, self.title(name), result, limit_s)

    def _output(self) -> list[str]:
        return self.process.end_of_output(0, _SHOWN_LINES)


def _environment() -> dict[str, str]:
    """This process's variables; the package is the same one, also from a clone."""
    paths = [str(PACKAGE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONFAULTHANDLER": "1", "PYTHONPATH": os.pathsep.join(paths)}
