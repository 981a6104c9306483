"""How faults strike a run: signals, kills, pauses, a second start, storage without room, and
failures inside a rank.
"""

import os
import random
import re
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from faults.runs import NUM_RANKS, Ended, SignalledRun, TooLateError
from faults.tiny_run import NUM_STEPS
from faults.verdict import checkpoint_steps

AUTO = ["train.resume_from_checkpoint=auto"]
Strike = Callable[[SignalledRun, random.Random], list[str] | None]
# Threads that call functions at their start only, or rarely.
_AT_ONCE = ("run-lock", "touch memory")
_ANY_TIME = ("peer-watch", "stop-signals", "data-wait", "write ")
# These are on rank 0, or only there on all topologies.
_ON_FIRST = ("run-lock", "touch memory", "write ")
_MESSAGE = "a failure injected by the campaign"
_DEATH_S, _RUN_S = 60.0, 120.0
_DISK = "64m"
_NAMED = re.compile(r"checkpoint-\d+ could not be written|'/[^']+'")


def signalled(number: signal.Signals, target: str, times: int = 1) -> Strike:
    """A signal or a burst, to the command (the launcher if there is one), its process `group` or a
    `rank`."""

    def strike(run: SignalledRun, rng: random.Random) -> None:
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


def interrupted_twice(run: SignalledRun, rng: random.Random) -> None:
    run.send(signal.SIGINT, "group")
    time.sleep(rng.uniform(0.5, 1.0))
    if run.process.poll() is None:
        run.send(signal.SIGINT, "group")


def kill_all(run: SignalledRun, rng: random.Random) -> None:
    """A power loss: SIGKILL to all processes at once."""
    run.kill_all()


def kill_rank(run: SignalledRun, rng: random.Random) -> None:
    """Kill a rank, as the kernel does when memory runs out; wait for it if it has not started."""
    number = rng.randrange(NUM_RANKS[run.start])
    while True:
        try:
            return run.rank(number).kill()
        except AssertionError:
            run.check_runs()
            time.sleep(0.01)


def kill_worker(run: SignalledRun, rng: random.Random) -> None:
    """Kill a worker of the loader."""
    workers = run.data_workers()
    if not workers:
        raise TooLateError
    rng.choice(sorted(workers, key=lambda worker: worker.pid)).kill()


def kill_with_checkpoints(fewest: int, waits: bool = False) -> Strike:
    """A power loss of a run with this many checkpoints, which are written asynchronously."""

    def strike(run: SignalledRun, rng: random.Random) -> None:
        while len(checkpoint_steps(run.output_dir)) < fewest:
            if not waits:
                raise TooLateError
            run.check_runs()
            time.sleep(0.002)
        run.kill_all()

    return strike


def paused(shortest: float, longest: float) -> Strike:
    """A rank suspended for some seconds."""

    def strike(run: SignalledRun, rng: random.Random) -> None:
        try:
            rank = run.rank(rng.randrange(NUM_RANKS[run.start]))
        except AssertionError:
            raise TooLateError from None
        rank.send_signal(signal.SIGSTOP)
        time.sleep(rng.uniform(shortest, longest))
        rank.send_signal(signal.SIGCONT)

    return strike


def started_again(deletes_lock: bool) -> Strike:
    """The same command started while the run is held up; the second run has to be refused."""

    def strike(run: SignalledRun, rng: random.Random) -> list[str]:
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
        problems = []
        if ended.code == 0 or "is in use by" not in ended.output:
            problems.append(f"the second run was not refused: {ended.output[-2000:]}")
        if ended.left:
            problems.append(f"the second run left {ended.left}")
        return problems

    return strike


def no_room(reason: str) -> Callable[[Ended], list[str]]:
    """Whether the run ended with a message that names the file."""

    def check(ended: Ended) -> list[str]:
        # Code 0: everything was written before; the comparison checks it.
        lines = [line for line in ended.output.splitlines() if reason in line]
        if ended.code == 0 or any(_NAMED.search(line) for line in lines):
            return []
        return [f"no message with {reason!r} names the file"]

    return check


def limit_files(run: SignalledRun, rng: random.Random) -> None:
    """A file size limit, as `ulimit -f` sets it."""
    for rank in range(NUM_RANKS[run.start]):
        run.rank(rank).rlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))


def cannot_mount() -> str | None:
    """Reason why this machine cannot mount a small file system."""
    if os.geteuid() != 0:
        return "only root can mount a small file system"
    probe = ["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    try:
        done = subprocess.run(probe, capture_output=True, text=True)
    except FileNotFoundError:
        return "there is no unshare"
    return done.stderr.strip() or None


@contextmanager
def small_disk(output_dir: Path) -> Iterator[None]:
    """A small separate file system as the output folder."""
    output_dir.mkdir()
    options = ["-t", "tmpfs", "-o", f"size={_DISK}", "tmpfs", str(output_dir)]
    subprocess.run(["mount", *options], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(output_dir)], check=True)


def fill_disk(run: SignalledRun, rng: random.Random) -> None:
    with (run.output_dir / "ballast").open("wb", buffering=0) as stream:
        for size in (1 << 20, 1 << 12, 1):
            block = bytes(size)
            try:
                while stream.write(block) == size:
                    continue
            except OSError:
                continue


def thread_to_die(output_dir: Path, start: str, rng: random.Random) -> dict[str, str]:
    """Environment of a run in which a thread of the package raises."""
    name = rng.choice([*_AT_ONCE, *_ANY_TIME])
    rank = 0 if name in _ON_FIRST else rng.randrange(NUM_RANKS[start])
    file = Path(f"{output_dir}.die")
    if name in _AT_ONCE:
        file.touch()
    rank = "" if NUM_RANKS[start] == 1 else str(rank)
    return {"FAULT_RANK": rank, "FAULT_THREAD": name, "FAULT_FILE": str(file)}


def let_thread_die(run: SignalledRun, rng: random.Random) -> list[str]:
    """Let the thread of `thread_to_die` raise, and wait until it has."""
    file, name = Path(run.environment["FAULT_FILE"]), run.environment["FAULT_THREAD"]
    died = Path(f"{file}.died")
    if name not in _AT_ONCE:
        step = rng.randrange(NUM_STEPS - 3)
        while run.last_step() < step and run.process.poll() is None:
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 0.3))
        file.touch()
    if name == "stop-signals":
        # It sleeps until somebody asks.
        rank = run.environment["FAULT_RANK"]
        run.send(signal.SIGTERM, f"rank {rank}" if rank else "command")
    begin = time.monotonic()
    while not died.exists():
        run.check_runs()
        if time.monotonic() - begin > _DEATH_S:
            return [f"{name} has not died within {_DEATH_S:g} s"]
        time.sleep(0.01)
    return []


def told_of_thread(ended: Ended) -> list[str]:
    """Whether the run noticed the dead thread and ended."""
    if ended.code == 0:
        return ["the run went on without the thread"]
    return [] if _MESSAGE in ended.output else ["the output does not say what ended the run"]


def killed_at(start: str, call: int, path: str) -> dict[str, str]:
    """Environment of a run whose rank 0 is killed at a rename or removal."""
    rank = "" if NUM_RANKS[start] == 1 else "0"
    return {"FAULT_RANK": rank, "FAULT_CALLS": str(call), "FAULT_PATH": path}


def rename_to_die_at(output_dir: Path, start: str, rng: random.Random) -> dict[str, str]:
    """Environment of a run whose rank 0 is killed at a random rename or removal in its folder."""
    return killed_at(start, rng.randrange(24), str(output_dir))


def wait_for_kill(run: SignalledRun, rng: random.Random) -> None:
    """Wait until the run ends by the kill of `killed_at`."""
    run.process.wait(_RUN_S)
    if run.process.returncode == 0:
        raise TooLateError
