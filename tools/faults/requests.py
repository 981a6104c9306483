"""Stop requests: signals from people, launchers and batch systems."""

import random
import signal
import time
from collections.abc import Sequence

from faults.fault import ALL_STARTS, SEVERAL_RANKS, Fault
from faults.runs import NUM_RANKS, Ended, SignalledRun

_NUMBERS = {"sigint": signal.SIGINT, "sigterm": signal.SIGTERM, "sighup": signal.SIGHUP}


class Signal(Fault):
    """One signal or a burst, to the command (the launcher if there is one), its process group or a
    rank."""

    is_request = True

    def __init__(self, signal_name: str, target: str, times: int = 1):
        self._number, self._target, self._times = _NUMBERS[signal_name], target, times
        self.name = f"{signal_name}-{target}" + (f"-x{times}" if times > 1 else "")
        goal = {"command": "the command", "group": "the process group", "rank": "one rank"}[target]
        burst = f"{times} times {signal_name.upper()}, 0.2 s apart," if times > 1 else None
        self.sentence = f"{burst or signal_name.upper()} to {goal}"
        self.starts = SEVERAL_RANKS if target == "rank" else ALL_STARTS
        # At startup a rank has no signal handlers yet.
        if target == "rank":
            self.places = ("step", "write", "end")

    def strike(self, run: SignalledRun, rng: random.Random) -> None:
        target = self._target
        if target == "rank":
            target = f"rank {rng.randrange(NUM_RANKS[run.start])}"
        run.send(self._number, target, self._times)

    def problems(self, ended: Ended) -> list[str]:
        # 0: the run was complete; the negative number: Python had imported nothing yet.
        right = (0, 128 + self._number, -self._number)
        # fleetrun's launcher has exit codes of its own.
        if ended.start == "fleetrun" or ended.code in right:
            return []
        return [f"exit code {ended.code}, not {128 + self._number}"]


class SecondCtrlC(Fault):
    """A second Ctrl-C before the run has stopped."""

    name = "second-ctrl-c"
    sentence = "Ctrl-C in the terminal, and again half a second to a second later"
    starts = ("one", "nproc", "nproc4")

    def strike(self, run: SignalledRun, rng: random.Random) -> None:
        run.send(signal.SIGINT, "group")
        time.sleep(rng.uniform(0.5, 1.0))
        if run.process.poll() is None:
            run.send(signal.SIGINT, "group")


class ShortGrace(Fault):
    """A batch system whose grace period is shorter than a step."""

    name = "short-grace"
    sentence = "SIGTERM where train.stop_grace_s is over before the step or its checkpoint is done"
    overrides: Sequence[str] = ("train.stop_grace_s=0.05",)

    def strike(self, run: SignalledRun, rng: random.Random) -> None:
        run.send(signal.SIGTERM, "command")


REQUESTS = [
    *(Signal(name, target) for target in ("command", "group", "rank") for name in _NUMBERS),
    Signal("sigterm", "command", times=3),
    SecondCtrlC(),
    ShortGrace(),
]
