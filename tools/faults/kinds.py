"""The table of all kinds of faults: when and how each strikes, and what is expected of the run.

Moments are drawn from a seed, and found in a run by the files that it writes.
"""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from signal import SIGHUP, SIGINT, SIGKILL, SIGTERM, Signals
from typing import Any

from faults import strikes
from faults.runs import NUM_RANKS, STARTS, Ended, SignalledRun
from faults.strikes import Damage, killed_at
from faults.tiny_run import NUM_STEPS, SAVE_STEPS

ALL_STARTS = tuple(STARTS)
SEVERAL_RANKS = tuple(start for start in STARTS if NUM_RANKS[start] > 1)
# Places of a run and their weights: during startup, after a step (in the next step, an evaluation
# or a save, depending on the delay), while a checkpoint is written, at the end.
PLACES = {"start": 2, "step": 5, "write": 2, "end": 1}
# The longest delay behind the place, in seconds.
_LONGEST_S = {"start": 8.0, "step": 0.5, "write": 0.05, "end": 0.5}
_WAIT_S = 120.0
_POLL_S = 0.003


@dataclass(frozen=True)
class Moment:
    """A place in a run and a delay in seconds."""

    place: str
    step: int
    delay_s: float

    def __str__(self) -> str:
        names = {
            "start": "from the start",
            "step": f"behind step {self.step}",
            "write": f"in a checkpoint behind step {self.step}",
            "end": "behind the last step",
        }
        return f"{self.delay_s:.2f} s {names[self.place]}"

    def wait(self, run: SignalledRun) -> None:
        """Return at this moment.

        Raises:
            TooLateError: the run ended before.
            RuntimeError: the moment was not reached in time.
        """
        deadline = time.monotonic() + _WAIT_S
        while not self._has_come(run):
            run.check_runs()
            if time.monotonic() > deadline:
                raise RuntimeError(f"{self} does not come within {_WAIT_S:g} s:\n{run.said()}")
            time.sleep(_POLL_S)
        time.sleep(self.delay_s)
        run.check_runs()

    def _has_come(self, run: SignalledRun) -> bool:
        if self.place != "start" and run.last_step() < self.step:
            return False
        return self.place != "write" or any(run.output_dir.glob(".partial-checkpoint-*"))


@dataclass(frozen=True)
class Fault:
    """A kind of fault.

    Attributes:
        name: name in the table and for `--kinds`.
        sentence: what it does.
        strike: injects the fault now; returns what went wrong with the injection, if anything;
            raises `TooLateError` if the run had ended.
        damage: damages the files of the run; called when it has ended.
        starts: how the runs are started, keys of `STARTS`.
        overrides: settings of the runs.
        places: of `PLACES`, where it may strike; without any the rank itself has the moment.
        steps: behind which it may strike.
        is_request: the run must leave a checkpoint of the last reported step.
        goes_on: the run must survive the fault and complete.
        check: deviations from how the run should have ended.
        environment: variables of the first start, see `hooks/sitecustomize.py`; called with the
            output folder and the start.
    """

    name: str
    sentence: str
    strike: Callable[[SignalledRun, random.Random], list[str] | None]
    damage: Callable[[SignalledRun, random.Random], Damage] = lambda run, rng: Damage()
    starts: Sequence[str] = ALL_STARTS
    overrides: Sequence[str] = ()
    places: Sequence[str] = tuple(PLACES)
    steps: range = range(1, NUM_STEPS - 1)
    is_request: bool = False
    goes_on: bool = False
    check: Callable[[Ended], list[str]] = lambda ended: []
    environment: Callable[[Path, str, random.Random], dict[str, str]] = lambda out, start, rng: {}

    def moment(self, rng: random.Random) -> Moment:
        """Draw the moment of the fault."""
        if not self.places:
            return Moment("start", 0, 0.0)
        place = rng.choices(self.places, [PLACES[name] for name in self.places])[0]
        step = NUM_STEPS if place == "end" else rng.choice(self.steps)
        return Moment(place, step, rng.uniform(0, _LONGEST_S[place]))

    def problems(self, ended: Ended) -> list[str]:
        """Deviations from how the run should have ended."""
        if self.goes_on and ended.code != 0:
            return [f"exit code {ended.code}, not 0"]
        return self.check(ended)


def _request(number: Signals, target: str, times: int) -> Fault:
    """A stop request by people, launchers and batch systems."""
    goals = {"command": "the command", "group": "the process group", "rank": "one rank"}
    burst = f"{times} times {number.name}, 0.2 s apart," if times > 1 else number.name
    # At startup a rank has no signal handlers yet.
    rank: dict[str, Any] = {"starts": SEVERAL_RANKS, "places": ("step", "write", "end")}
    return Fault(
        f"{number.name.lower()}-{target}" + (f"-x{times}" if times > 1 else ""),
        f"{burst} to {goals[target]}",
        strikes.signalled(number, target, times),
        is_request=True,
        check=strikes.ended_by(number),
        **(rank if target == "rank" else {}),
    )


_WEIGHTS, _STATE, _MANIFEST = "*.safetensors", "trainer_state.json", "manifest.json"
_GOES_ON: Any = {"places": ("step", "write"), "goes_on": True}
_REFUSED = "the same command is started again while the first is held up, and has to be refused"
_ONE_AND_TWO = ("one", "nproc", "fleetrun", "sharding3", "pipeline", "colocated")
POWER_LOSS = Fault("power-loss", "SIGKILL to all processes at once", strikes.kill_all)

# fmt: off
_ALL = [
    # Stop requests.
    *(_request(number, target, 1)
      for target in ("command", "group", "rank") for number in (SIGINT, SIGTERM, SIGHUP)),
    _request(SIGTERM, "command", 3),
    Fault("second-ctrl-c", "Ctrl-C in the terminal, and again half a second to a second later",
          strikes.interrupted_twice, starts=("one", "nproc", "nproc4")),
    Fault("short-grace",
          "SIGTERM where train.stop_grace_s is over before the step or its checkpoint is done",
          strikes.signalled(SIGTERM, "command"), overrides=("train.stop_grace_s=0.05",)),
    # Kills. Ranks outlive their launcher by seconds, in which they may save.
    Fault("kill-command",
          "SIGKILL to the command, which is the launcher where there are several ranks",
          strikes.signalled(SIGKILL, "command")),
    Fault("kill-rank", "SIGKILL to one rank", strikes.kill_rank, starts=SEVERAL_RANKS),
    # Other ranks wait for its shard of the checkpoint.
    Fault("kill-rank-in-write", "SIGKILL to one rank while a checkpoint is written",
          strikes.kill_rank, starts=SEVERAL_RANKS, places=("write",)),
    Fault("restarts", "SIGKILL to one rank under --max_restarts 1, which goes on by itself",
          strikes.kill_rank, starts=("nproc", "nproc4"), overrides=("--max_restarts", "1"),
          **_GOES_ON),
    # Workers exist only between the first and the last step.
    Fault("kill-worker", "SIGKILL to a data worker", strikes.kill_worker,
          starts=("one", "nproc", "fleetrun"), overrides=("data.num_workers=1",),
          places=("step", "write")),
    POWER_LOSS,
    Fault("kill-in-write", "SIGKILL to all processes while a checkpoint is written",
          strikes.kill_all, places=("write",)),
    Fault("stale-lock",
          "SIGKILL to all processes, and run.lock is of another machine",
          strikes.kill_all, strikes.stale_lock, starts=("one", "nproc"), places=("step",)),
    Fault("cut-metrics",
          "SIGKILL to all processes, and the last line of metrics.jsonl is cut short",
          strikes.kill_all, strikes.cut_metrics, starts=("one", "nproc4"), places=("step",)),
    Fault("kill-at-rename",
          "SIGKILL to rank 0 at a random rename or removal of a folder of the run",
          strikes.wait_for_kill, strikes.at_rename, places=(),
          environment=lambda out, start, rng: killed_at(start, rng.randrange(24), str(out))),
    Fault("kill-in-replacement",
          "a damaged checkpoint is written again, and SIGKILL to rank 0 while it is replaced",
          strikes.kill_with_checkpoints, strikes.killed_in_replacement, places=("step",),
          steps=range(2 * SAVE_STEPS + 1, NUM_STEPS - 1)),
    # A damaged checkpoint; two exist from this step on.
    *(Fault(f"damage-{name}", f"{sentence} in the newest checkpoint, after a power loss",
            strikes.kill_with_checkpoints, strikes.of_checkpoint(pattern, alter),
            starts=("one", "nproc4", "sharding3", "pipeline", "colocated"), places=("step",),
            steps=range(2 * SAVE_STEPS, NUM_STEPS - 1))
      for name, sentence, pattern, alter in (
          ("delete", "weights or optimizer state deleted", _WEIGHTS, strikes.delete),
          ("truncate", "weights or optimizer cut short", _WEIGHTS, strikes.truncate),
          ("flip", "a bit of weights or optimizer state flipped", _WEIGHTS, strikes.flip),
          ("flip-state", "a bit of trainer_state.json flipped", _STATE, strikes.flip),
          ("truncate-state", "trainer_state.json cut short", _STATE, strikes.truncate),
          ("flip-manifest", "a bit of manifest.json flipped", _MANIFEST, strikes.flip),
          ("truncate-manifest", "manifest.json cut short", _MANIFEST, strikes.truncate),
      )),
    # At least one more checkpoint follows.
    Fault("file-size-limit", "files may suddenly not be larger than 40 kB, and a checkpoint's are",
          strikes.limit_files, check=strikes.no_room, starts=("one", "nproc", "fleetrun"),
          places=("step", "write"), steps=range(1, NUM_STEPS - 3)),
    # What a run must survive.
    Fault("pause-rank", "SIGSTOP to a rank, SIGCONT one to three seconds later",
          strikes.pause, **_GOES_ON),
    Fault("second-run", _REFUSED, strikes.started_again(deletes_lock=False), starts=_ONE_AND_TWO,
          **_GOES_ON),
    Fault("deleted-lock", f"run.lock is deleted, then {_REFUSED}",
          strikes.started_again(deletes_lock=True), starts=_ONE_AND_TWO, **_GOES_ON),
]
# fmt: on
KINDS = {fault.name: fault for fault in _ALL}
