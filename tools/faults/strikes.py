"""How faults strike a run: signals, kills, pauses, a second start, files that may not grow.

And what they do to its folder when it has ended.
"""

import json
import os
import random
import re
import resource
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from faults.runs import NUM_RANKS, Ended, SignalledRun, TooLateError
from faults.tiny_run import NUM_STEPS
from faults.verdict import checkpoint_steps

AUTO = ["train.resume_from_checkpoint=auto"]
Rng = random.Random
Strike = Callable[[SignalledRun, Rng], list[str] | None]
_RUN_S = 120.0
_NAMED = re.compile(r"checkpoint-\d+ could not be written|'/[^']+'")


@dataclass
class Damage:
    """What a fault does to the folder of a run that has ended.

    Attributes:
        checkpoint: step of the damaged checkpoint, whose name the next start must log.
        restored: step of a checkpoint that is not in its place and that the next start must find.
        metrics: step whose line of metrics.jsonl is missing.
        what: description for the report.
    """

    checkpoint: int | None = None
    restored: int | None = None
    metrics: int | None = None
    what: str = ""


def signalled(number: signal.Signals, target: str, times: int = 1) -> Strike:
    """A signal or a burst, to the command (the launcher if there is one), its process `group` or a
    `rank`."""

    def strike(run: SignalledRun, rng: Rng) -> None:
        to = f"rank {rng.randrange(NUM_RANKS[run.start])}" if target == "rank" else target
        run.send(number, to, times)

    return strike


def ended_by(number: signal.Signals) -> Callable[[Ended], list[str]]:
    """Whether the exit code is that of a stop request."""

    def check(ended: Ended) -> list[str]:
        # 0: the run was complete; the negative number: Python had imported nothing yet.
        right = (0, 128 + number, -number)
        # fleetrun's launcher has exit codes of its own.
        if ended.start == "fleetrun" or ended.code in right:
            return []
        return [f"exit code {ended.code}, not {128 + number}"]

    return check


def interrupted_twice(run: SignalledRun, rng: Rng) -> None:
    run.send(signal.SIGINT, "group")
    time.sleep(rng.uniform(0.5, 1.0))
    if run.process.poll() is None:
        run.send(signal.SIGINT, "group")


def kill_all(run: SignalledRun, rng: Rng) -> None:
    """A power loss: SIGKILL to all processes at once."""
    run.kill_all()


def kill_rank(run: SignalledRun, rng: Rng) -> None:
    """Kill a rank, as the kernel does when memory runs out; wait for it if it has not started."""
    number = rng.randrange(NUM_RANKS[run.start])
    while True:
        try:
            return run.rank(number).kill()
        except AssertionError:
            run.check_runs()
            time.sleep(0.01)


def kill_worker(run: SignalledRun, rng: Rng) -> None:
    """Kill a worker of the loader."""
    workers = run.data_workers()
    if not workers:
        raise TooLateError
    rng.choice(sorted(workers, key=lambda worker: worker.pid)).kill()


def kill_with_checkpoints(run: SignalledRun, rng: Rng) -> None:
    """A power loss of a run with two checkpoints, which are written asynchronously."""
    while len(checkpoint_steps(run.output_dir)) < 2:
        run.check_runs()
        time.sleep(0.002)
    run.kill_all()


def pause(run: SignalledRun, rng: Rng) -> None:
    """A rank suspended for some seconds."""
    try:
        rank = run.rank(rng.randrange(NUM_RANKS[run.start]))
    except AssertionError:
        raise TooLateError from None
    rank.send_signal(signal.SIGSTOP)
    time.sleep(rng.uniform(1, 3))
    rank.send_signal(signal.SIGCONT)


def started_again(deletes_lock: bool) -> Strike:
    """The same command started while the run is held up; the second run has to be refused."""

    def strike(run: SignalledRun, rng: Rng) -> list[str]:
        held_up = run.alive()
        for process in held_up:
            process.suspend()
        try:
            if run.last_step() == NUM_STEPS:
                # The run may have released the folder.
                raise TooLateError
            if deletes_lock:
                (run.output_dir / "run.lock").unlink()
            begin = time.monotonic()
            with run.again(run.output.with_suffix(".second"), AUTO) as second:
                ended = second.ended(begin)
        finally:
            for process in held_up:
                process.resume()
        problems = [f"the second run left {ended.left}"] if ended.left else []
        if ended.code == 0 or "is in use by" not in ended.output:
            problems.append(f"the second run was not refused: {ended.output[-2000:]}")
        return problems

    return strike


def limit_files(run: SignalledRun, rng: Rng) -> None:
    """A file size limit, as `ulimit -f` sets it."""
    for rank in range(NUM_RANKS[run.start]):
        run.rank(rank).rlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))


def no_room(ended: Ended) -> list[str]:
    """Whether the run ended with a message that names the file."""
    # Code 0: everything was written before; the comparison checks it.
    lines = [line for line in ended.output.splitlines() if "File too large" in line]
    if ended.code == 0 or any(_NAMED.search(line) for line in lines):
        return []
    return ["no message with 'File too large' names the file"]


def killed_at(start: str, call: int, path: str) -> dict[str, str]:
    """Environment of a run whose rank 0 is killed at a rename or removal."""
    rank = "" if NUM_RANKS[start] == 1 else "0"
    return {"FAULT_RANK": rank, "FAULT_CALLS": str(call), "FAULT_PATH": path}


def wait_for_kill(run: SignalledRun, rng: Rng) -> None:
    """Wait until the run ends by the kill of `killed_at`."""
    run.process.wait(_RUN_S)
    if run.process.returncode == 0:
        raise TooLateError


def at_rename(run: SignalledRun, rng: Rng) -> Damage:
    """Nothing; say at which rename the rank was killed."""
    return Damage(what=f"at call {run.environment['FAULT_CALLS']}")


def delete(file: Path, rng: Rng) -> str:
    file.unlink()
    return "deleted"


def truncate(file: Path, rng: Rng) -> str:
    size = rng.randrange(1, file.stat().st_size)
    os.truncate(file, size)
    return f"cut to {size} bytes"


def flip(file: Path, rng: Rng) -> str:
    content = bytearray(file.read_bytes())
    place, bit = rng.randrange(len(content)), rng.randrange(8)
    content[place] ^= 1 << bit
    file.write_bytes(content)
    return f"bit {bit} of byte {place} flipped"


def of_checkpoint(
    pattern: str, alter: Callable[[Path, Rng], str]
) -> Callable[[SignalledRun, Rng], Damage]:
    """Damage one file of the newest checkpoint; the run must resume from the one before."""

    def damage(run: SignalledRun, rng: Rng) -> Damage:
        step = max(checkpoint_steps(run.output_dir))
        newest = run.output_dir / f"checkpoint-{step}"
        file = rng.choice(sorted(path for path in newest.rglob(pattern) if path.stat().st_size))
        return Damage(checkpoint=step, what=f"{newest.name}/{file.name} {alter(file, rng)}")

    return damage


def killed_in_replacement(run: SignalledRun, rng: Rng) -> Damage:
    """Damage a checkpoint, and kill rank 0 of the next start while it replaces the checkpoint."""
    step = max(checkpoint_steps(run.output_dir))
    name = f"checkpoint-{step}"
    flip(min((run.output_dir / name).glob("optimizer*.safetensors")), rng)
    # Before the old one gives way, between, and when the new one is in its place.
    call = rng.choice((0, 1, 1, 2))
    environment = killed_at(run.start, call, f"{name} ")
    with run.again(run.output.with_suffix(".killed"), AUTO, environment) as again:
        again.process.wait(_RUN_S)
    places = sorted(path.name for path in run.output_dir.glob(f".*{name}"))
    return Damage(
        checkpoint=step if call == 0 else None,
        restored=None if call == 0 else step,
        what=f"{name} flipped, killed at call {call} of its replacement, which left {places}",
    )


def stale_lock(run: SignalledRun, rng: Rng) -> Damage:
    """Leave the lock of a machine that no longer exists."""
    lock = run.output_dir / "run.lock"
    owner = json.loads(lock.read_text()) | {"host": "node-7"}
    lock.write_text(json.dumps(owner))
    return Damage(what="run.lock of node-7")


def cut_metrics(run: SignalledRun, rng: Rng) -> Damage:
    """Leave an incomplete last line in metrics.jsonl."""
    file = run.output_dir / "metrics.jsonl"
    content = file.read_bytes()
    last = content.rstrip(b"\n").rsplit(b"\n", 1)[-1]
    cut = rng.randrange(2, len(last))
    file.write_bytes(content[:-cut])
    step = json.loads(last)["step"]
    return Damage(metrics=step, what=f"{cut} bytes of step {step} are gone")
