"""Injects many faults, each into a run beside an undisturbed one, and prints a table of them."""

import json
import random
import shutil
import statistics
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import count, islice
from pathlib import Path
from typing import NamedTuple

from faults.kinds import Fault
from faults.runs import STARTS, Ended, SignalledRun, TooLateError
from faults.strikes import AUTO, Damage
from faults.tiny_run import write_tiny_run
from faults.verdict import (
    checkpoint_steps,
    damaged_checkpoints,
    differences_of_runs,
    tracebacks,
    vanished_checkpoints,
)

# Number of faults that `--all` injects at least.
FEWEST_OF_ALL = 200
# A moment after the end of the run is drawn again.
_ATTEMPTS = 4
_RUN_S, _END_S = 300.0, 90.0
_LIMITS = (None, 3)
_SHOWN_LINES, _SHOWN_REASONS = 40, 5


class Planned(NamedTuple):
    """A fault to inject."""

    fault: Fault
    start: str
    seed: int


@dataclass
class Outcome:
    """Outcome of one fault.

    Attributes:
        planned: what repeats it.
        moment: when it struck, and what was done to the folder afterwards.
        lost: lost files and lines, one text each.
        left: command lines of processes left running.
        problems: differences from the undisturbed run, and other broken promises.
        seconds: from the fault until all processes had ended; None if the run was to continue.
        output: output of all starts.
    """

    planned: Planned
    moment: str = "not injected"
    lost: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    seconds: float | None = None
    output: str = ""

    @property
    def is_good(self) -> bool:
        return not (self.lost or self.left or self.problems)

    def lines(self) -> Iterator[str]:
        """One line; if it is not good what went wrong, the end of the output, and the command that
        repeats it."""
        fault, start, seed = self.planned
        seconds = "" if self.seconds is None else f", all ended after {self.seconds:.1f} s"
        names = {"lost": "LOST", "left": "LEFT RUNNING", "problems": "NOT RECOVERED"}
        said = ", ".join(word for name, word in names.items() if getattr(self, name))
        yield f"{fault.name} {start}, seed {seed}, {self.moment}{seconds}: {said or 'recovered'}"
        if self.is_good:
            return
        for kind in names:
            texts = getattr(self, kind)
            yield from (f"  {kind}: {text}" for text in texts[:_SHOWN_REASONS])
            if len(texts) > _SHOWN_REASONS:
                yield f"  {kind}: {len(texts) - _SHOWN_REASONS} more"
        yield from (f"  | {line}" for line in self.output.splitlines()[-_SHOWN_LINES:])
        yield (
            f"  again: python tools/fault_campaign.py --kinds {fault.name} --starts {start} "
            f"--seed {seed} --faults 1"
        )


def plan(
    faults: Sequence[Fault], starts: Sequence[str], seed: int, number: int | None
) -> list[Planned]:
    """List the faults to inject: the kinds in turn, each with its starts in turn, then again with
    the next seed.

    Args:
        number: how many; None for every kind with every start, and at least 200.
    """
    left = []
    for turn, fault in enumerate(faults):
        own = [start for start in fault.starts if start in starts]
        # Kinds begin with different starts.
        turn = turn % len(own) if own else 0
        left.append((fault, own[turn:] + own[:turn]))
    pairs = []
    while any(own for _, own in left):
        pairs += [(fault, own.pop(0)) for fault, own in left if own]
    if not pairs:
        return []
    number = max(len(pairs), FEWEST_OF_ALL) if number is None else number
    rounds = (Planned(fault, start, seed + repeat) for repeat in count() for fault, start in pairs)
    return list(islice(rounds, number))


def run_campaign(
    planned: Sequence[Planned],
    num_jobs: int,
    keep: Path | None = None,
    say: Callable[[str], None] = print,
) -> bool:
    """Inject the faults, print the outcome of each, then the table.

    Args:
        num_jobs: number of parallel runs.
        keep: folder for the files of failed runs.

    Returns:
        True if nothing was lost, nothing was left running and all results were identical.

    Raises:
        RuntimeError: an undisturbed run failed.
    """
    said = threading.Lock()
    with tempfile.TemporaryDirectory(prefix="faults-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        references = References(folder)

        def work(number: int, item: Planned) -> Outcome:
            own = folder / f"{number}-{item.fault.name}-{item.start}"
            own.mkdir()
            references.output_dir(item.start)
            try:
                outcome = run_trial(item, references, own)
            # Also a bug of a fault: the others go on.
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
                outcome = Outcome(item, problems=[problem], output=traceback.format_exc())
            with said:
                for line in outcome.lines():
                    say(line)
            if not outcome.is_good and keep is not None:
                shutil.copytree(own, keep / own.name, dirs_exist_ok=True)
            shutil.rmtree(own, ignore_errors=True)
            return outcome

        with ThreadPoolExecutor(num_jobs) as executor:
            outcomes = list(executor.map(work, range(len(planned)), planned))
    for line in table(outcomes):
        say(line)
    return bool(outcomes) and all(outcome.is_good for outcome in outcomes)


def table(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """One line per kind, and a total."""
    kinds = list(dict.fromkeys(outcome.planned.fault.name for outcome in outcomes))
    width = max(map(len, [*kinds, "total"]))
    yield (
        f"{'kind':{width}}  injected  recovered bit-identically  lost  left running  "
        "seconds to the end: median, max"
    )
    for kind in [*kinds, "total"]:
        own = [each for each in outcomes if kind in (each.planned.fault.name, "total")]
        seconds = [outcome.seconds for outcome in own if outcome.seconds is not None]
        ends = f"{statistics.median(seconds):.1f}, {max(seconds):.1f}" if seconds else "goes on"
        recovered = sum(not outcome.problems for outcome in own)
        lost, left = (sum(bool(getattr(one, name)) for one in own) for name in ("lost", "left"))
        yield f"{kind:{width}}  {len(own):8}  {recovered:25}  {lost:4}  {left:12}  {ends:>31}"


class References:
    """Undisturbed runs, which keep every checkpoint; and the settings file of all runs.

    Args:
        folder: an empty folder.
    """

    def __init__(self, folder: Path):
        self.run_file = write_tiny_run(folder / "data")
        self._runs: dict[tuple[str, ...], Path] = {}
        self._making = threading.Lock()

    def output_dir(self, start: str) -> Path:
        """Folder of the undisturbed run with the settings of a start.

        Raises:
            RuntimeError: the undisturbed run failed.
        """
        key = tuple(STARTS[start].settings)
        with self._making:
            if key not in self._runs:
                output_dir = self.run_file.parent / f"reference-{start}"
                overrides = ["train.save_steps=1"]
                with SignalledRun(start, self.run_file, output_dir, overrides) as run:
                    ended = run.ended(time.monotonic(), within_s=_RUN_S)
                if ended.code != 0:
                    raise RuntimeError(f"the undisturbed run failed:\n{ended.output}")
                self._runs[key] = output_dir
        return self._runs[key]


def run_trial(planned: Planned, references: References, folder: Path) -> Outcome:
    """Inject a fault into a run in `folder`, and resume the run to its end."""
    rng = random.Random(f"{planned.seed} {planned.fault.name} {planned.start}")
    outcome = Outcome(planned)
    for attempt in range(_ATTEMPTS):
        try:
            _disturb(outcome, rng, references, folder / f"out-{attempt}")
            return outcome
        except TooLateError:
            continue
    outcome.problems.append(f"the run was over before each of {_ATTEMPTS} moments")
    return outcome


def _disturb(
    outcome: Outcome, rng: random.Random, references: References, output_dir: Path
) -> None:
    fault, start, _ = outcome.planned
    limit, reference = rng.choice(_LIMITS), references.output_dir(start)
    overrides = list(fault.overrides)
    if limit is not None:
        overrides.append(f"train.save_total_limit={limit}")
    environment = fault.environment(output_dir, start, rng)
    moment, run_file = fault.moment(rng), references.run_file
    with SignalledRun(start, run_file, output_dir, overrides, environment=environment) as run:
        moment.wait(run)
        before = checkpoint_steps(output_dir)
        outcome.problems += fault.strike(run, rng) or []
        ended = run.ended(time.monotonic(), within_s=_RUN_S if fault.goes_on else _END_S)
    outcome.moment, outcome.output = str(moment), ended.output
    outcome.seconds = None if fault.goes_on else ended.seconds
    outcome.left += [" ".join(line)[:200] for line in ended.left]
    outcome.problems += [*fault.problems(ended), *tracebacks(ended.output)]
    outcome.lost += _lost(fault, ended, output_dir, reference, before, limit)
    damage = Damage()
    if ended.code != 0 or not (output_dir / "final").is_dir():
        damage = fault.damage(run, rng)
        outcome.moment += f"; {damage.what}" if damage.what else ""
        good = checkpoint_steps(output_dir) - {damage.checkpoint} | {damage.restored or 0}
        _continue(run, damage, max(good, default=0), outcome)
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
    # Logs of this start only.
    shutil.rmtree(run.log_dir, ignore_errors=True)
    with run.again(run.output.with_suffix(".again"), AUTO) as again:
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
    name = f"checkpoint-{damage.checkpoint}"
    if damage.checkpoint is not None and name not in ended.output:
        outcome.problems.append(f"it did not say that it passed {name} over")
