"""Inject faults into real training runs, resume the runs, and compare them with undisturbed ones.

    python tools/fault_campaign.py                        # ten faults, two minutes or so
    python tools/fault_campaign.py --all                  # every kind with every start
    python tools/fault_campaign.py --kinds power-loss kill-rank --starts nproc4 --seed 3

A fault hits a tiny run of 1, 2 or 4 ranks (data and tensor parallel, sharding stage 3, pipeline,
colocated schedule) at a random moment, drawn from the seed. When the run has ended, the same
command is started again with train.resume_from_checkpoint=auto. Prints a line per fault: whether
the run recovered, to the bit (final weights, optimizer state, losses), without a lost checkpoint, a
traceback, or a process that runs on 10 s after the command; if not, what went wrong, the end of the
output, and the command that repeats it. Exits 1 unless all recovered.
"""

import argparse
import functools
import json
import os
import random
import re
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path
from signal import SIGHUP, SIGINT, SIGKILL, SIGTERM
from typing import Any, NamedTuple

from signalled_runs import (
    NUM_STEPS,
    SAVE_STEPS,
    STARTS,
    Ended,
    SignalledRun,
    checkpoint_steps,
    damage_of,
    differences_of_runs,
    write_tiny_run,
)

AUTO = ["train.resume_from_checkpoint=auto"]
# Number of faults that `--all` injects at least.
FEWEST_OF_ALL = 200
_RUN_S, _END_S, _POLL_S = 300.0, 90.0, 0.003
# Where a run may be struck: during startup, after a step (in the next step, an evaluation or a
# save), while a checkpoint is written, at the end. With weights, and the longest delay in seconds.
PLACES = {"start": (2, 8.0), "step": (5, 0.5), "write": (2, 0.05), "end": (1, 0.5)}
# Its last line is the first that is not indented.
_TRACEBACK = re.compile(r"^Traceback \(most recent call last\):\n((?:[ \t].*\n)*)(\S.*)", re.M)
# Paddle's import runs `ldd --version`, which Ctrl-C ends with it.
_PADDLES_LDD = "in less_than_ver"
# Two checkpoints exist from this step on.
_WITH_TWO = range(2 * SAVE_STEPS, NUM_STEPS - 1)


class TooLateError(Exception):
    """The run ended before its moment came."""


class Trial:
    """A run that a fault strikes.

    Args:
        reference: folder of the undisturbed run.

    Attributes:
        said: when the fault struck, and what it did.
        problems: what was lost, left running, or is not as it was promised.
        goes_on: whether the run must survive and complete.
        damaged: step of a damaged checkpoint, which the next start must name and pass over.
        restored: step of a checkpoint that the next start must put into its place.
        excused: step whose line of metrics.jsonl may be missing.
    """

    def __init__(self, run: SignalledRun, reference: Path, limit: int | None, rng: random.Random):
        self.run, self.reference, self.limit, self.rng = run, reference, limit, rng
        self.said, self.problems, self.goes_on = [], [], False
        self.damaged: int | None = None
        self.restored: int | None = None
        self.excused: int | None = None
        self.folder, self.output, self.before = run.output_dir, "", set[int]()
        self._ended: Ended | None = None

    @property
    def steps(self) -> set[int]:
        """Of the complete checkpoints that there are now."""
        return checkpoint_steps(self.folder)

    def until(self, has_come: Callable[[], Any]) -> None:
        """Wait for something; `TooLateError` if the run ends before."""
        deadline = time.monotonic() + _RUN_S
        while not has_come():
            if self.run.process.poll() is not None:
                raise TooLateError
            if time.monotonic() > deadline:
                raise RuntimeError(f"the moment does not come in {_RUN_S:g} s:\n{self.run.said()}")
            time.sleep(_POLL_S)

    def wait(self, *places: str, steps: range = range(1, NUM_STEPS - 1)) -> None:
        """Wait for a moment in one of the places, of `PLACES`, behind one of the steps."""
        places = places or tuple(PLACES)
        place = self.rng.choices(places, [PLACES[each][0] for each in places])[0]
        step = NUM_STEPS if place == "end" else self.rng.choice(steps)
        delay = self.rng.uniform(0, PLACES[place][1])
        if place != "start":
            self.until(lambda: self.run.last_step() >= step)
        if place == "write":
            self.until(lambda: any(self.folder.glob(".partial-checkpoint-*")))
        time.sleep(delay)
        if self.run.process.poll() is not None:
            raise TooLateError
        self.said.append(f"{delay:.2f} s behind {place} {step}")
        self.before = self.steps

    def rank(self) -> Any:
        """A rank, as soon as it has started."""
        number, found = self.rng.randrange(self.run.num_ranks), []

        def has_come() -> bool:
            try:
                found.append(self.run.rank(number))
            except AssertionError:
                return False
            return True

        self.until(has_come)
        return found[0]

    def end(self) -> Ended:
        """Wait until all processes have ended, once; check what they have left."""
        if self._ended is None:
            within = _RUN_S if self.goes_on else _END_S
            self._ended = ended = self.run.ended(time.monotonic(), within)
            self.said.append(f"all ended after {ended.seconds:.1f} s")
            self._judge(ended)
            if self.goes_on and ended.code:
                self.problems.append(f"exit code {ended.code}, not 0")
            gone = vanished_checkpoints(self.before, self.steps, self.limit)
            self.problems += [f"checkpoint-{step} is gone" for step in gone]
            for differences in damaged_checkpoints(self.folder, self.reference).values():
                self.problems += differences
        return self._ended

    def resume(self) -> None:
        """Start an incomplete run again, and compare it with the undisturbed one."""
        if self.end().code or not (self.folder / "final").is_dir():
            wanted = max(self.steps - {self.damaged} | {self.restored or 0}, default=0)
            # Logs of this start only.
            shutil.rmtree(self.run.log_dir, ignore_errors=True)
            with self.run.again(".again", AUTO) as again:
                ended = again.ended(time.monotonic(), within_s=_RUN_S)
            self._judge(ended)
            if ended.code:
                self.problems.append(f"started again it ended with exit code {ended.code}")
                return
            first = json.loads((self.folder / "run.json").read_text())["starts"][-1]["first_step"]
            if first != wanted:
                self.problems.append(f"it went on from step {first}, not from checkpoint-{wanted}")
            if self.damaged and f"checkpoint-{self.damaged}" not in ended.output:
                self.problems.append(f"it did not name checkpoint-{self.damaged}, which is damaged")
        self.problems += differences_of_runs(self.folder, self.reference, self.excused)

    def _judge(self, ended: Ended) -> None:
        self.output += ended.output
        self.problems += [f"left running: {' '.join(line)[:200]}" for line in ended.left]
        self.problems += tracebacks(ended.output)


def tracebacks(output: str) -> list[str]:
    """Exceptions whose traceback a run has printed, but for Ctrl-C before the package runs."""
    return [
        f"a traceback of {error[:200]}"
        for frames, error in _TRACEBACK.findall(output)
        if error != "KeyboardInterrupt" and _PADDLES_LDD not in frames
    ]


def damaged_checkpoints(output_dir: Path, reference: Path) -> dict[int, list[str]]:
    """Steps of checkpoints that differ from the undisturbed run, with the differences."""
    # 0: the run was stopped before its first step; the final comparison covers it.
    names = {step: f"checkpoint-{step}" for step in sorted(checkpoint_steps(output_dir) - {0})}
    found = {n: damage_of(output_dir / name, reference / name) for n, name in names.items()}
    return {step: differences for step, differences in found.items() if differences}


def vanished_checkpoints(before: set[int], after: set[int], limit: int | None) -> list[int]:
    """Steps of missing checkpoints that train.save_total_limit did not delete."""
    return [
        step
        for step in sorted(before - after)
        if limit is None or sum(other > step for other in after) < limit
    ]


class Fault(NamedTuple):
    """A kind of fault.

    Attributes:
        strike: strikes a trial's run; may wait for its end and damage its files.
        sentence: what it does.
        starts: how the runs are started, keys of `STARTS`.
        overrides: settings of the runs.
        calls: rank 0 is killed at one of so many renames and removals of folders.
    """

    name: str
    strike: Callable[[Trial], object]
    sentence: str
    starts: Sequence[str] = tuple(STARTS)
    overrides: Sequence[str] = ()
    calls: int = 0


KINDS: dict[str, Fault] = {}
SEVERAL_RANKS = tuple(start for start in STARTS if STARTS[start].num_ranks > 1)
_ONE_AND_TWO = tuple(start for start in STARTS if STARTS[start].num_ranks < 4)
_GOALS = {"command": "the command", "group": "the process group", "rank": "one rank"}


def kind(name: str, *starts: str, sentence: str = "", **settings: Any) -> Callable:
    """Enter a function into `KINDS`; its docstring is the sentence."""

    def enter(strike: Callable[[Trial], object]) -> Callable[[Trial], object]:
        said = sentence or (strike.__doc__ or "").replace("\n    ", " ").rstrip(".")
        KINDS[name] = Fault(name, strike, said, starts or tuple(STARTS), **settings)
        return strike

    return enter


def _request(number: Any, target: str, times: int, trial: Trial) -> None:
    """A stop request; the run has to leave a checkpoint of the last reported step."""
    # At startup a rank has no signal handlers yet.
    trial.wait(*(("step", "write", "end") if target == "rank" else ()))
    own = f"rank {trial.rng.randrange(trial.run.num_ranks)}"
    trial.run.send(number, own if target == "rank" else target, times)
    ended = trial.end()
    # 0: the run was complete; the negative number: Python had imported nothing yet; fleetrun's
    # launcher has exit codes of its own.
    if ended.start != "fleetrun" and ended.code not in (0, 128 + number, -number):
        trial.problems.append(f"exit code {ended.code}, not {128 + number}")
    if ended.last_step and ended.last_step not in trial.steps:
        trial.problems.append(f"step {ended.last_step} was reported and has no checkpoint")


for _target, _goal in _GOALS.items():
    for _number in (SIGINT, SIGTERM, SIGHUP):
        kind(
            f"{_number.name.lower()}-{_target}",
            *(SEVERAL_RANKS if _target == "rank" else ()),
            sentence=f"{_number.name} to {_goal}",
        )(functools.partial(_request, _number, _target, 1))
kind("sigterm-command-x3", sentence="3 times SIGTERM, 0.2 s apart, to the command")(
    functools.partial(_request, SIGTERM, "command", 3)
)


@kind("kill-command")
def _(trial: Trial) -> None:
    """SIGKILL to the command, which is the launcher where there are several ranks."""
    # Ranks outlive their launcher by seconds, in which they may save.
    trial.wait()
    trial.run.send(SIGKILL)


@kind("kill-rank", *SEVERAL_RANKS)
def _(trial: Trial) -> None:
    """SIGKILL to one rank."""
    trial.wait()
    trial.rank().kill()


@kind("kill-rank-in-write", *SEVERAL_RANKS)
def _(trial: Trial) -> None:
    """SIGKILL to one rank while a checkpoint is written, and others wait for its shard."""
    trial.wait("write")
    trial.rank().kill()


@kind("restarts", "nproc", "nproc4", overrides=("--max_restarts", "1"))
def _(trial: Trial) -> None:
    """SIGKILL to one rank under --max_restarts 1, which goes on by itself."""
    trial.goes_on = True
    trial.wait("step", "write")
    trial.rank().kill()


@kind("kill-worker", "one", "nproc", "fleetrun", overrides=("data.num_workers=1",))
def _(trial: Trial) -> None:
    """SIGKILL to a data worker."""
    # Workers exist only between the first and the last step.
    trial.wait("step", "write")
    workers = sorted(trial.run.data_workers(), key=lambda worker: worker.pid)
    if not workers:
        raise TooLateError
    trial.rng.choice(workers).kill()


@kind("power-loss")
def _(trial: Trial) -> None:
    """SIGKILL to all processes at once."""
    trial.wait()
    trial.run.kill_all()


@kind("kill-in-write")
def _(trial: Trial) -> None:
    """SIGKILL to all processes while a checkpoint is written."""
    trial.wait("write")
    trial.run.kill_all()


@kind("stale-lock", "one", "nproc")
def _(trial: Trial) -> None:
    """SIGKILL to all processes, and run.lock is of another machine."""
    trial.wait("step")
    trial.run.kill_all()
    trial.end()
    lock = trial.folder / "run.lock"
    lock.write_text(json.dumps(json.loads(lock.read_text()) | {"host": "node-7"}))


@kind("cut-metrics", "one", "nproc4")
def _(trial: Trial) -> None:
    """SIGKILL to all processes, and the last line of metrics.jsonl is cut short."""
    trial.wait("step")
    trial.run.kill_all()
    trial.end()
    file = trial.folder / "metrics.jsonl"
    content = file.read_bytes()
    last = content.rstrip(b"\n").rsplit(b"\n", 1)[-1]
    file.write_bytes(content[: -trial.rng.randrange(2, len(last))])
    trial.excused = json.loads(last)["step"]


@kind("kill-at-rename", calls=24)
def _(trial: Trial) -> None:
    """SIGKILL to rank 0 at a random rename or removal of a folder of the run."""
    if trial.run.process.wait(_RUN_S) == 0:
        raise TooLateError
    trial.said.append(f"at call {trial.run.environment['FAULT_CALLS']}")


def _lose_power_with_checkpoints(trial: Trial, steps: range = _WITH_TWO) -> Path:
    """SIGKILL to all processes of a run with two checkpoints; the newest."""
    trial.wait("step", steps=steps)
    # They are written asynchronously.
    trial.until(lambda: len(trial.steps) > 1)
    trial.run.kill_all()
    trial.end()
    return trial.folder / f"checkpoint-{max(trial.steps)}"


@kind("kill-in-replacement")
def _(trial: Trial) -> None:
    """A damaged checkpoint is written again, and SIGKILL to rank 0 while it is replaced."""
    newest = _lose_power_with_checkpoints(trial, range(2 * SAVE_STEPS + 1, NUM_STEPS - 1))
    flip(min(newest.glob("optimizer*.safetensors")), trial.rng)
    # Before the old one gives way, between, and when the new one is in its place.
    call = trial.rng.choice((0, 1, 1, 2))
    trial.said.append(f"killed at call {call} of the replacement of {newest.name}")
    environment = killed_at(trial.run.start, call, f"{newest.name} ")
    with trial.run.again(".killed", AUTO, environment) as again:
        again.process.wait(_RUN_S)
    step = int(newest.name.partition("-")[2])
    trial.damaged, trial.restored = (None, step) if call else (step, None)


@kind("damage", "one", "nproc4", "sharding3", "pipeline", "colocated")
def _(trial: Trial) -> None:
    """A file of the newest checkpoint is deleted, cut short, or has a flipped bit, after a power
    loss; the run must resume from the one before."""
    newest = _lose_power_with_checkpoints(trial)
    patterns = ("*.safetensors", "*.safetensors", "trainer_state.json", "manifest.json")
    files = [path for path in newest.rglob(trial.rng.choice(patterns)) if path.stat().st_size]
    file, way = trial.rng.choice(sorted(files)), trial.rng.choice(("delete", "cut", "flip", "flip"))
    if way == "flip":
        flip(file, trial.rng)
    elif way == "cut" or file.name == "manifest.json":
        os.truncate(file, trial.rng.randrange(1, file.stat().st_size))
    else:
        file.unlink()
    trial.said.append(f"{newest.name}/{file.name}: {way}")
    trial.damaged = int(newest.name.partition("-")[2])


def flip(file: Path, rng: random.Random) -> None:
    """Flip one bit."""
    content = bytearray(file.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    file.write_bytes(content)


@kind("file-size-limit", "one", "nproc", "fleetrun")
def _(trial: Trial) -> None:
    """Files may suddenly not be larger than 40 kB, and a checkpoint's are."""
    # At least one more checkpoint follows.
    trial.wait("step", "write", steps=range(1, NUM_STEPS - 3))
    for rank in range(trial.run.num_ranks):
        trial.run.rank(rank).rlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))
    ended = trial.end()
    # Code 0: everything was written before; the comparison checks it.
    lines = [line for line in ended.output.splitlines() if "File too large" in line]
    named = re.compile(r"checkpoint-\d+ could not be written|'/[^']+'")
    if ended.code and not any(named.search(line) for line in lines):
        trial.problems.append("no message with 'File too large' names the file")


@kind("second-run", *_ONE_AND_TWO)
def _start_again(trial: Trial, deletes_lock: bool = False) -> None:
    """The same command is started again while the first is held up, and has to be refused."""
    trial.goes_on = True
    trial.wait("step", "write")
    held_up = trial.run.alive()
    for process in held_up:
        process.suspend()
    try:
        if trial.run.last_step() == NUM_STEPS:
            # The run may have released the folder.
            raise TooLateError
        if deletes_lock:
            (trial.folder / "run.lock").unlink()
        with trial.run.again(".second", AUTO) as second:
            ended = second.ended(time.monotonic())
    finally:
        for process in held_up:
            process.resume()
    if ended.left or ended.code == 0 or "is in use by" not in ended.output:
        trial.problems.append(f"the second run was not refused: {ended.output[-2000:]}")


@kind("deleted-lock", *_ONE_AND_TWO)
def _(trial: Trial) -> None:
    """The same with run.lock deleted before."""
    _start_again(trial, deletes_lock=True)


def killed_at(start: str, call: int, path: str) -> dict[str, str]:
    """Environment of a run whose rank 0 is killed at a rename or removal."""
    rank = "" if STARTS[start].num_ranks == 1 else "0"
    return {"FAULT_RANK": rank, "FAULT_CALLS": str(call), "FAULT_PATH": path}


class Planned(NamedTuple):
    """A fault to inject."""

    fault: Fault
    start: str
    seed: int


def plan(
    faults: Sequence[Fault], starts: Sequence[str], seed: int, number: int | None
) -> list[Planned]:
    """List the faults to inject: the kinds in turn, each with its starts in turn, then again with
    the next seed.

    Args:
        number: how many; None for every kind with every start, and at least 200.
    """
    turns = []
    for turn, fault in enumerate(faults):
        own = [start for start in fault.starts if start in starts]
        # Kinds begin with different starts.
        turn = turn % len(own) if own else 0
        turns.append(own[turn:] + own[:turn])
    rounds = (zip(faults, each, strict=True) for each in zip_longest(*turns))
    pairs = [(fault, start) for each in rounds for fault, start in each if start]
    if not pairs:
        return []
    number = max(len(pairs), FEWEST_OF_ALL) if number is None else number
    return [Planned(*pairs[i % len(pairs)], seed + i // len(pairs)) for i in range(number)]


def run_campaign(
    planned: Sequence[Planned], num_jobs: int = 1, say: Callable[[str], None] = print
) -> bool:
    """Inject the faults, so many at once; whether every run recovered. Prints a line for each."""
    with tempfile.TemporaryDirectory(prefix="faults-", ignore_cleanup_errors=True) as name:
        run_file, references = write_tiny_run(Path(name) / "data"), {}
        for start in {item.start for item in planned}:
            if (key := STARTS[start].parallel) not in references:
                references[key] = undisturbed(start, run_file)

        def work(number: int, item: Planned) -> bool:
            folder, (fault, start, seed) = Path(name) / str(number), item
            try:
                reference = references[STARTS[start].parallel]
                trial = run_trial(item, run_file, reference, folder)
                said, problems, output = ", ".join(trial.said), trial.problems, trial.output
            # Also a bug of a fault: the others go on.
            except Exception as error:
                said, problems, output = "not injected", [f"{type(error).__name__}: {error}"], ""
            shutil.rmtree(folder, ignore_errors=True)
            lines = [f"  {problem}" for problem in problems[:9]]
            lines += [f"  | {line}" for line in output.splitlines()[-40:]]
            lines.append(
                f"  again: python tools/fault_campaign.py --kinds {fault.name} --starts {start} "
                f"--seed {seed} --faults 1"
            )
            what = "NOT RECOVERED" if problems else "recovered"
            head = f"{fault.name} {start}, seed {seed}, {said}: {what}"
            say("\n".join([head, *lines] if problems else [head]))
            return not problems

        with ThreadPoolExecutor(num_jobs) as executor:
            recovered = list(executor.map(work, range(len(planned)), planned))
    say(f"{sum(recovered)} of {len(recovered)} faults were recovered")
    return all(recovered)


def undisturbed(start: str, run_file: Path) -> Path:
    """Folder of a run that ends by itself, and keeps every checkpoint.

    Raises:
        RuntimeError: it failed.
    """
    output_dir = run_file.parent / f"reference-{start}"
    with SignalledRun(start, run_file, output_dir, ["train.save_steps=1"]) as run:
        ended = run.ended(time.monotonic(), within_s=_RUN_S)
    if ended.code:
        raise RuntimeError(f"the undisturbed run failed:\n{ended.output}")
    return output_dir


def run_trial(planned: Planned, run_file: Path, reference: Path, folder: Path) -> Trial:
    """Inject a fault into a run in `folder`, and resume the run to its end."""
    fault, start, seed = planned
    rng = random.Random(f"{seed} {fault.name} {start}")
    # A moment after the end of the run is drawn again.
    for attempt in range(4):
        output_dir, limit = folder / str(attempt), rng.choice((None, 3))
        output_dir.mkdir(parents=True)
        overrides = [*fault.overrides, *([f"train.save_total_limit={limit}"] if limit else [])]
        call = rng.randrange(fault.calls) if fault.calls else None
        environment = None if call is None else killed_at(start, call, str(output_dir))
        with (
            SignalledRun(start, run_file, output_dir, overrides, environment=environment) as run,
            suppress(TooLateError),
        ):
            trial = Trial(run, reference, limit, rng)
            fault.strike(trial)
            trial.resume()
            return trial
    raise RuntimeError("the run was over before each of four moments")


def main() -> int:
    kinds = "\n".join(f"  {fault.name:24} {fault.sentence}" for fault in KINDS.values())
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=f"kinds:\n{kinds}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--faults", type=int, default=10, metavar="N", help="how many (default 10)")
    add("--all", action="store_true", help="every kind with every start, at least 200 faults")
    add("--kinds", nargs="+", choices=KINDS, metavar="KIND", help="only these")
    add("--starts", nargs="+", choices=STARTS, default=list(STARTS), help="only these")
    add("--seed", type=int, default=0, help="of the random moments (default 0)")
    add("--jobs", type=int, default=1, metavar="N", help="runs at once (default 1)")
    args = parser.parse_args()
    if args.faults < 1 or args.jobs < 1:
        parser.error("--faults and --jobs are numbers from 1")
    faults = [KINDS[name] for name in args.kinds or KINDS]
    planned = plan(faults, args.starts, args.seed, None if args.all else args.faults)
    if not planned:
        parser.error("none of these kinds has one of these starts")
    say = functools.partial(print, flush=True)
    return 0 if run_campaign(planned, args.jobs, say) else 1


if __name__ == "__main__":
    sys.exit(main())
