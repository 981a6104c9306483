"""One fault in one run beside an undisturbed one, and the outcome."""

import json
import random
import shutil
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from faults.fault import Damage, Fault
from faults.runs import STARTS, Ended, SignalledRun, TooLateError
from faults.tiny_run import write_tiny_run
from faults.verdict import (
    checkpoint_steps,
    damaged_checkpoints,
    differences_of_runs,
    tracebacks,
    vanished_checkpoints,
)

_ATTEMPTS = 4
_RUN_S = 300.0
_LIMITS = (None, 3)


@dataclass
class Outcome:
    """Outcome of one fault.

    Attributes:
        kind, start: the fault, and how the run was started.
        seed: seed that repeats it.
        moment: when it struck, and what was done to the folder afterwards.
        lost: lost files and lines, one text each.
        left: command lines of processes left running.
        problems: differences from the undisturbed run, and other broken promises.
        seconds: from the fault until all processes had ended; None if the run was to continue.
        output: output of all starts if the run did not recover.
    """

    kind: str
    start: str
    seed: int
    moment: str = ""
    lost: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    seconds: float | None = None
    output: str = ""

    @property
    def is_good(self) -> bool:
        return not (self.lost or self.left or self.problems)

    @property
    def is_recovered(self) -> bool:
        return not self.problems


class References:
    """Undisturbed runs by settings and data; they keep every checkpoint.

    Args:
        folder: an empty folder.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._lock = threading.Lock()
        self._runs: dict[tuple, Path] = {}
        self._making: dict[tuple, threading.Lock] = {}
        self._files: dict[tuple, Path] = {}

    def run_file(self, fault: Fault, start: str) -> Path:
        """Settings file for the runs of a fault."""
        return self._run_file(tuple(fault.extra_lines), self._owner(fault, start))

    def settings(self, fault: Fault, start: str) -> list[str]:
        """The fault's `data_settings`."""
        folder = str(self.run_file(fault, start).parent)
        return [text.replace("DATA", folder) for text in fault.data_settings]

    def output_dir(self, fault: Fault, start: str) -> Path:
        """Folder of the undisturbed run.

        Raises:
            RuntimeError: the undisturbed run failed.
        """
        # Simple bad lines stand in for hostile ones: both are skipped.
        lines = tuple(b"{}" for _ in fault.extra_lines)
        owner, settings = self._owner(fault, start), self.settings(fault, start)
        start = next(name for name in STARTS if STARTS[name].settings == STARTS[start].settings)
        key = (start, lines, owner)
        with self._lock:
            making = self._making.setdefault(key, threading.Lock())
        with making:
            if key not in self._runs:
                run_file = self._run_file(lines, owner)
                self._runs[key] = self._make(start, run_file, settings)
            return self._runs[key]

    def _make(self, start: str, run_file: Path, settings: list[str]) -> Path:
        output_dir = run_file.parent / f"reference-{start}"
        with SignalledRun(start, run_file, output_dir, [*settings, "train.save_steps=1"]) as run:
            ended = run.ended(time.monotonic(), within_s=_RUN_S)
        if ended.code != 0:
            raise RuntimeError(f"the undisturbed run failed:\n{ended.output}")
        return output_dir

    def _run_file(self, lines: tuple[bytes, ...], owner: str) -> Path:
        with self._lock:
            if (lines, owner) not in self._files:
                folder = self._folder / f"data-{len(self._files)}"
                self._files[lines, owner] = write_tiny_run(folder, lines)
            return self._files[lines, owner]

    @staticmethod
    def _owner(fault: Fault, start: str) -> str:
        """Whose data it is; empty for what all faults use."""
        return f"{fault.name} {start}" if fault.own_data else ""


def run_trial(fault: Fault, start: str, seed: int, references: References, folder: Path) -> Outcome:
    """Inject a fault into a run in `folder`, and resume the run to its end.

    A moment after the end of the run is drawn again, a few times.
    """
    rng = random.Random(f"{seed} {fault.name} {start}")
    outcome = Outcome(fault.name, start, seed)
    for attempt in range(_ATTEMPTS):
        output_dir = folder / f"out-{attempt}"
        try:
            with fault.around(output_dir):
                _disturb(outcome, fault, rng, references, output_dir)
            return outcome
        except TooLateError:
            continue
    outcome.problems.append(f"the run was over before each of {_ATTEMPTS} moments")
    return outcome


def _disturb(
    outcome: Outcome, fault: Fault, rng: random.Random, references: References, output_dir: Path
) -> None:
    start, limit = outcome.start, rng.choice(_LIMITS)
    overrides = [*fault.overrides, *references.settings(fault, start)]
    if limit is not None:
        overrides.append(f"train.save_total_limit={limit}")
    environment = fault.environment(output_dir, start, rng)
    moment, reference = fault.moment(rng), references.output_dir(fault, start)
    run_file = references.run_file(fault, start)
    with SignalledRun(start, run_file, output_dir, overrides, environment=environment) as run:
        moment.wait(run)
        before = checkpoint_steps(output_dir)
        begin = time.monotonic()
        outcome.problems += fault.strike(run, rng) or []
        if fault.waits:
            begin = time.monotonic()
        ended = run.ended(begin, within_s=_RUN_S if fault.goes_on else 90.0)
    outcome.moment, outcome.output = str(moment), ended.output
    outcome.seconds = None if fault.goes_on else ended.seconds
    outcome.left += [" ".join(line)[:200] for line in ended.left]
    outcome.problems += fault.problems(ended)
    if not fault.may_trace:
        outcome.problems += tracebacks(ended.output)
    outcome.lost += _lost(fault, ended, output_dir, reference, before, limit)
    if ended.code == 0 and (output_dir / "final").is_dir():
        damage = Damage()
    else:
        damage = fault.damage(run, rng)
        outcome.moment += f"; {damage.what}" if damage.what else ""
        outcome.problems += damage.problems
        good = checkpoint_steps(output_dir) - {damage.checkpoint} | {damage.restored or 0}
        _continue(run, damage, max(good, default=0), outcome)
    fault.before_comparison(output_dir)
    outcome.problems += differences_of_runs(output_dir, reference, damage.metrics)


def _lost(
    fault: Fault,
    ended: Ended,
    output_dir: Path,
    reference: Path,
    before: set[int],
    limit: int | None,
) -> list[str]:
    """What the run lacks when it has ended."""
    steps = checkpoint_steps(output_dir)
    lost = [f"checkpoint-{step} is gone" for step in vanished_checkpoints(before, steps, limit)]
    for differences in damaged_checkpoints(output_dir, reference).values():
        lost += differences
    if fault.is_request and ended.last_step and ended.last_step not in steps:
        lost.append(f"step {ended.last_step} was reported and has no checkpoint, only {steps}")
    return lost


def _continue(run: SignalledRun, damage: Damage, newest_good: int, outcome: Outcome) -> None:
    """Start the run again with train.resume_from_checkpoint=auto and wait for its end."""
    output = run.output.with_suffix(".again")
    # Logs of this start only.
    shutil.rmtree(run.log_dir, ignore_errors=True)
    with run.again(output, ["train.resume_from_checkpoint=auto"]) as again:
        ended = again.ended(time.monotonic(), within_s=_RUN_S)
    outcome.output += f"\n--- started again ---\n{ended.output}"
    outcome.left += [f"started again: {' '.join(line)[:200]}" for line in ended.left]
    outcome.problems += tracebacks(ended.output)
    if ended.code != 0:
        outcome.problems.append(f"started again it ended with exit code {ended.code}")
        return
    first = json.loads((run.output_dir / "run.json").read_text())["starts"][-1]["first_step"]
    if first < newest_good:
        outcome.lost.append(f"it went on from step {first}, not from checkpoint-{newest_good}")
    elif first > newest_good:
        outcome.problems.append(f"it went on from step {first}, from a checkpoint that is damaged")
    for text in damage.mentioned:
        if text not in ended.output:
            outcome.problems.append(f"it did not say that it passed {text} over")
