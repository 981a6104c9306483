"""Runs checks in another process and survives whatever happens to it.

The process tells which check begins and ends (`paddle_vl.doctor.worker`). If it dies, or a check
passes its time limit, that check is a finding and a new process goes on with the rest.
"""

import json
import os
import signal
import time
from collections.abc import Iterator, Sequence
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
    command: Sequence[str], folder: Path, only: Sequence[str] = (), is_quick: bool = False
) -> Iterator[Finished]:
    """Run the chosen checks; yields each when it is over.

    Args:
        command: starts a worker; the job's folder is appended.
        folder: empty.

    Raises:
        RefusedError: `only` names what does not exist.
    """
    done: list[str] = []
    while True:
        work = folder / str(len(list(folder.glob("*"))))
        work.mkdir(parents=True)
        job = {"only": list(only), "is_quick": is_quick, "done": done}
        (work / JOB_FILE).write_text(json.dumps(job), encoding="utf-8")
        worker = _Worker([*command, str(work)], work)
        try:
            for finished in worker.findings():
                yield finished
                done.append(finished.name)
        finally:
            # The launcher passes SIGTERM on to its ranks.
            worker.process.end(_GRACE_S)
        if not worker.wants_successor:
            return


class _Worker:
    """One process that runs checks.

    Attributes:
        wants_successor: after `findings` has ended, whether the other checks need a new process.
    """

    def __init__(self, command: Sequence[str], work: Path):
        self.wants_successor = False
        self._work, self._running = work, None
        # The checks that the process is going to run; None before it has told.
        self._plan: dict[str, dict[str, Any]] | None = None
        self.process = Processes()
        self.process.start(command, _environment(), work / "output")

    def findings(self) -> Iterator[Finished]:
        """Each check that is over, until the process ends or a check takes too long."""
        file, seen, since = self._work / EVENTS_FILE, 0, time.monotonic()
        for _ in self.process.watched():
            # Before its events, which it may write until it ends.
            (code,) = self.process.codes()
            # The last line may be half written.
            lines = file.read_bytes().split(b"\n")[:-1] if file.exists() else []
            for line in lines[seen:]:
                event, since = json.loads(line), time.monotonic()
                name = event.get("check")
                self._running = name if event["event"] == "begin" else None
                if event["event"] == "refused":
                    raise RefusedError(event["reason"])
                if event["event"] == "plan":
                    self._plan = {check["name"]: check for check in event["checks"]}
                if event["event"] == "end":
                    result = Result(**event["result"])
                    yield Finished(name, self._title(name), result, event["seconds"])
            seen = len(lines)
            limit_s = START_LIMIT_S
            if self._plan is not None and self._running is not None:
                limit_s = self._plan[self._running]["limit_s"]
            self.wants_successor = code == RESTART or self._running is not None
            if code is None and time.monotonic() - since > limit_s:
                yield self._late(limit_s)
                return
            is_between = self._running is None and self._plan is not None
            if code is not None and not (is_between and code in (0, RESTART)):
                yield self._ended(code)

    def _title(self, name: str) -> str:
        return (self._plan or {}).get(name, {}).get("title", "")

    def _ended(self, code: int) -> Finished:
        how = end_in_words(code)
        name, title = _START, "the process of the checks"
        found, remedy = f"it {how} between two checks", "report it with this table and --json"
        if self._running is not None:
            name, title = self._running, self._title(self._running)
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
        return Finished(name, self._title(name), result, limit_s)

    def _output(self) -> list[str]:
        return self.process.end_of_output(0, _SHOWN_LINES)


def _environment() -> dict[str, str]:
    """This process's variables; the package is the same one, also from a clone."""
    paths = [str(PACKAGE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONFAULTHANDLER": "1", "PYTHONPATH": os.pathsep.join(paths)}
