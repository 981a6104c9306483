"""Runs many faults, one by one or in parallel, and prints a table of the outcomes."""

import shutil
import statistics
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count, islice
from pathlib import Path
from typing import NamedTuple

from faults.fault import Fault
from faults.trial import Outcome, References, run_trial

# Number of faults that `--all` injects at least.
FEWEST_OF_ALL = 200
_SHOWN_LINES = 40
_SHOWN_REASONS = 5


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
    pairs = _pairs(faults, starts)
    if not pairs:
        return []
    if number is None:
        number = max(len(pairs), FEWEST_OF_ALL)
    rounds = (Planned(*pair, seed + repeat) for repeat in count() for pair in pairs)
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
            references.output_dir(item.fault, item.start)
            try:
                outcome = run_trial(item.fault, item.start, item.seed, references, own)
            # Also a bug of a fault: the others go on.
            except Exception as error:
                outcome = Outcome(item.fault.name, item.start, item.seed, "not injected")
                outcome.problems.append(f"{type(error).__name__}: {error}")
                outcome.output = traceback.format_exc()
            with said:
                say(line_of(outcome))
                for line in [] if outcome.is_good else failure_lines(outcome):
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


def line_of(outcome: Outcome) -> str:
    """One line for one fault."""
    seconds = "" if outcome.seconds is None else f", all ended after {outcome.seconds:.1f} s"
    said = [
        name
        for name, is_so in (
            ("LOST", outcome.lost),
            ("LEFT RUNNING", outcome.left),
            ("NOT RECOVERED", outcome.problems),
        )
        if is_so
    ]
    return (
        f"{outcome.kind} {outcome.start}, seed {outcome.seed}, {outcome.moment}{seconds}: "
        f"{', '.join(said) or 'recovered'}"
    )


def failure_lines(outcome: Outcome) -> Iterator[str]:
    """What went wrong, the end of the output, and the command that repeats it."""
    for kind in ("lost", "left", "problems"):
        texts = getattr(outcome, kind)
        for text in texts[:_SHOWN_REASONS]:
            yield f"  {kind}: {text}"
        if len(texts) > _SHOWN_REASONS:
            yield f"  {kind}: {len(texts) - _SHOWN_REASONS} more"
    for line in outcome.output.splitlines()[-_SHOWN_LINES:]:
        yield f"  | {line}"
    yield (
        f"  again: python tools/fault_campaign.py --kinds {outcome.kind} --starts {outcome.start} "
        f"--seed {outcome.seed} --faults 1"
    )


def table(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """One line per kind, and a total."""
    width = max([len(outcome.kind) for outcome in outcomes] + [5])
    yield (
        f"{'kind':{width}}  injected  recovered bit-identically  lost  left running  "
        "seconds to the end: median, max"
    )
    kinds = list(dict.fromkeys(outcome.kind for outcome in outcomes))
    for kind in kinds:
        yield _row(kind, [each for each in outcomes if each.kind == kind], width)
    yield _row("total", outcomes, width)


def _row(name: str, outcomes: Sequence[Outcome], width: int) -> str:
    seconds = [outcome.seconds for outcome in outcomes if outcome.seconds is not None]
    ends = f"{statistics.median(seconds):.1f}, {max(seconds):.1f}" if seconds else "goes on"
    recovered = sum(outcome.is_recovered for outcome in outcomes)
    lost = sum(bool(outcome.lost) for outcome in outcomes)
    left = sum(bool(outcome.left) for outcome in outcomes)
    return f"{name:{width}}  {len(outcomes):8}  {recovered:25}  {lost:4}  {left:12}  {ends:>31}"


def _pairs(faults: Sequence[Fault], starts: Sequence[str]) -> list[tuple[Fault, str]]:
    """Every kind with each of its starts; kinds alternate and begin with different starts."""
    left = []
    for number, fault in enumerate(faults):
        own = [start for start in fault.starts if start in starts]
        turn = number % len(own) if own else 0
        left.append((fault, own[turn:] + own[:turn]))
    pairs = []
    while any(own for _, own in left):
        pairs += [(fault, own.pop(0)) for fault, own in left if own]
    return pairs
