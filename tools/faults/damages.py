"""What faults do to the folder of a run that has ended, before the next start."""

import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path

from faults.fault import Damage
from faults.runs import SignalledRun
from faults.strikes import AUTO, killed_at
from faults.verdict import checkpoint_steps, tracebacks

Alter = Callable[[Path, random.Random], str]
_RUN_S = 120.0


def delete(file: Path, rng: random.Random) -> str:
    file.unlink()
    return "deleted"


def truncate(file: Path, rng: random.Random) -> str:
    size = rng.randrange(1, file.stat().st_size)
    os.truncate(file, size)
    return f"cut to {size} bytes"


def empty(file: Path, rng: random.Random) -> str:
    file.write_bytes(b"")
    return "emptied"


def flip(file: Path, rng: random.Random) -> str:
    content = bytearray(file.read_bytes())
    place, bit = rng.randrange(len(content)), rng.randrange(8)
    content[place] ^= 1 << bit
    file.write_bytes(content)
    return f"bit {bit} of byte {place} flipped"


def of_checkpoint(pattern: str, alter: Alter) -> Callable[[SignalledRun, random.Random], Damage]:
    """Damage one file of the newest checkpoint; the run must resume from the one before."""

    def damage(run: SignalledRun, rng: random.Random) -> Damage:
        step = max(checkpoint_steps(run.output_dir))
        newest = run.output_dir / f"checkpoint-{step}"
        file = rng.choice(sorted(path for path in newest.rglob(pattern) if path.stat().st_size))
        what = f"{newest.name}/{file.name} {alter(file, rng)}"
        return Damage(checkpoint=step, what=what, mentioned=(newest.name,))

    return damage


def of_cache(pattern: str) -> Callable[[SignalledRun, random.Random], Damage]:
    """Damage a file that the package has made from the data."""

    def damage(run: SignalledRun, rng: random.Random) -> Damage:
        file = rng.choice(sorted(run.run_file.parent.glob(pattern)))
        return Damage(what=f"{file.name} {rng.choice((flip, flip, truncate, empty))(file, rng)}")

    return damage


def edited_source(run: SignalledRun, rng: random.Random) -> Damage:
    """Change an answer, but neither the size nor the time of its file, and start the run, which has
    to refuse the data; then restore them."""
    file = run.run_file.parent / "train.jsonl"
    before, times = file.read_bytes(), file.stat()

    def write(content: bytes) -> None:
        file.write_bytes(content)
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))

    lines = before.split(b"\n")
    number = rng.choice([i for i, line in enumerate(lines) if b'"red"' in line])
    lines[number] = lines[number].replace(b'"red"', b'"der"')
    damage = Damage(what=f"line {number + 1} of {file.name} edited")
    try:
        write(b"\n".join(lines))
        with run.again(run.output.with_suffix(".edited"), AUTO) as again:
            ended = again.ended(time.monotonic())
    finally:
        write(before)
    if ended.code == 0 or file.name not in ended.output or tracebacks(ended.output):
        damage.problems.append(f"the edited {file.name} was not refused: {ended.output}")
    return damage


def killed_in_replacement(run: SignalledRun, rng: random.Random) -> Damage:
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


def stale_lock(run: SignalledRun, rng: random.Random) -> Damage:
    """Leave the lock of a machine that no longer exists."""
    lock = run.output_dir / "run.lock"
    owner = json.loads(lock.read_text()) | {"host": "node-7"}
    lock.write_text(json.dumps(owner))
    return Damage(what="run.lock of node-7")


def cut_metrics(run: SignalledRun, rng: random.Random) -> Damage:
    """Leave an incomplete last line in metrics.jsonl."""
    file = run.output_dir / "metrics.jsonl"
    content = file.read_bytes()
    last = content.rstrip(b"\n").rsplit(b"\n", 1)[-1]
    cut = rng.randrange(2, len(last))
    file.write_bytes(content[:-cut])
    step = json.loads(last)["step"]
    return Damage(metrics=step, what=f"{cut} bytes of step {step} are gone")


def room_again(run: SignalledRun, rng: random.Random) -> Damage:
    """Remove what filled the disk."""
    (run.output_dir / "ballast").unlink()
    return Damage()


def dead_thread(run: SignalledRun, rng: random.Random) -> Damage:
    """Nothing; say which thread died."""
    rank = run.environment["FAULT_RANK"] or "0"
    return Damage(what=f"thread {run.environment['FAULT_THREAD'].strip()} of rank {rank}")


def at_rename(run: SignalledRun, rng: random.Random) -> Damage:
    """Nothing; say at which rename the rank was killed."""
    return Damage(what=f"at call {run.environment['FAULT_CALLS']}")
