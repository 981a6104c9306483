"""Killed processes and simulated power losses."""

import json
import os
import random
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from faults.fault import SEVERAL_RANKS, Damage, Fault
from faults.moments import TooLateError
from faults.runs import NUM_RANKS, SignalledRun

_ONE_AND_TWO = ("one", "nproc")


class KillCommand(Fault):
    """Kills the launcher. Its ranks outlive it by seconds, in which they may save."""

    name = "kill-command"
    sentence = "SIGKILL to the command, which is the launcher where there are several ranks"

    def strike(self, run: SignalledRun, rng: random.Random) -> None:
        run.send(signal.SIGKILL, "command")


class KillRank(Fault):
    """Kills a rank, as the kernel does when memory runs out."""

    name = "kill-rank"
    sentence = "SIGKILL to one rank"
    starts: Sequence[str] = SEVERAL_RANKS

    def strike(self, run: SignalledRun, rng: random.Random) -> None:
        kill_rank(run, rng)


class KillRankInWrite(KillRank):
    """Kills a rank while other ranks wait for its shard of a checkpoint."""

    name = "kill-rank-in-write"
    sentence = "SIGKILL to one rank while a checkpoint is written"
    places = ("write",)


class Restarts(KillRank):
    """Kills a rank of a run whose launcher restarts the ranks."""

    name = "restarts"
    sentence = "SIGKILL to one rank under --max_restarts 1, which goes on by itself"
    starts = ("nproc", "nproc4")
    overrides = ("--max_restarts", "1")
    places = ("step", "write")
    goes_on = True
    codes = (0,)


class KillWorker(Fault):
    """Kills a loader worker."""

    name = "kill-worker"
    sentence = "SIGKILL to a data worker"
    starts = ("one", "nproc", "fleetrun")
    overrides = ("data.num_workers=1",)
    # Workers exist only between the first and the last step.
    places = ("step", "write")

    def strike(self, run: SignalledRun, rng: random.Random) -> None:
        workers = run.data_workers()
        if not workers:
            raise TooLateError
        rng.choice(sorted(workers, key=lambda worker: worker.pid)).kill()


class PowerLoss(Fault):
    """Kills all processes at once."""

    name = "power-loss"
    sentence = "SIGKILL to all processes at once"

    def strike(self, run: SignalledRun, rng: random.Random) -> None:
        run.kill_all()


class KillInWrite(PowerLoss):
    """Leaves a half-written checkpoint."""

    name = "kill-in-write"
    sentence = "SIGKILL to all processes while a checkpoint is written"
    places = ("write",)


class StaleLock(PowerLoss):
    """Leaves the lock of a machine that no longer exists."""

    name = "stale-lock"
    sentence = "SIGKILL to all processes, and run.lock is of another machine and a minute old"
    starts = _ONE_AND_TWO
    places = ("step",)

    def damage(self, output_dir: Path, rng: random.Random) -> Damage:
        lock = output_dir / "run.lock"
        owner = json.loads(lock.read_text()) | {"host": "node-7", "boot_id": "another"}
        lock.write_text(json.dumps(owner))
        before = time.time() - 60
        os.utime(lock, (before, before))
        return Damage(what="run.lock of node-7")


class CutMetrics(PowerLoss):
    """Leaves an incomplete last line in metrics.jsonl."""

    name = "cut-metrics"
    sentence = "SIGKILL to all processes, and the last line of metrics.jsonl is cut short"
    starts = ("one", "nproc4")
    places = ("step",)

    def damage(self, output_dir: Path, rng: random.Random) -> Damage:
        file = output_dir / "metrics.jsonl"
        content = file.read_bytes()
        last = content.rstrip(b"\n").rsplit(b"\n", 1)[-1]
        cut = rng.randrange(2, len(last))
        file.write_bytes(content[:-cut])
        step = json.loads(last)["step"]
        return Damage(metrics=step, what=f"{cut} bytes of step {step} are gone")


def kill_rank(run: SignalledRun, rng: random.Random) -> None:
    """Send SIGKILL to a randomly drawn rank; wait for it if it has not started yet."""
    number = rng.randrange(NUM_RANKS[run.start])
    while True:
        try:
            return run.rank(number).kill()
        except AssertionError:
            if run.process.poll() is not None:
                raise TooLateError from None
            time.sleep(0.01)


KILLS = [
    KillCommand(),
    KillRank(),
    KillRankInWrite(),
    Restarts(),
    KillWorker(),
    PowerLoss(),
    KillInWrite(),
    StaleLock(),
    CutMetrics(),
]
