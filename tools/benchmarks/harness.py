"""What the benchmarks share: options, runs in other processes, medians, tables, and docs sections.

A benchmark prints its tables. With `--write-doc FILE` it replaces the text between two markers of a
markdown file by its tables and where they come from: command, date, machine and versions.

    <!-- benchmark NAME -->
    ...
    <!-- end of benchmark NAME -->
"""

import argparse
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).parents[2]
# Script that writes the data of a family, its options, and the file to train on.
DATA = {
    "qwen3_vl": ("make_digits_dataset.py", "train.jsonl"),
    "pi07": ("make_demonstrations.py", "arm-joint.jsonl"),
}
# Settings of a run that only takes steps.
STEPS_ONLY = {
    "train.max_steps": 10**6,
    "train.eval_steps": "null",
    "train.save_steps": "null",
    "train.resume_from_checkpoint": "none",
    "logging.progress_bar": "false",
}
Side = TypeVar("Side", bound=Hashable)


@dataclass(frozen=True)
class Table:
    """A table of results; cells are numbers as strings, the first column is a label.

    Attributes:
        name: name of its markers in a markdown file.
        note: a sentence below the table.
    """

    name: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""

    def text(self) -> str:
        """The table for a terminal."""
        cells = [list(self.columns), *map(list, self.rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = [
            "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])])
            for row in cells
        ]
        return "\n".join([*lines, self.note]).rstrip()

    def markdown(self) -> str:
        """The table in GitHub's markdown."""
        rule = ["---", *["---:"] * (len(self.columns) - 1)]
        rows = [self.columns, rule, *self.rows]
        table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
        return f"{table}\n\n{self.note}".rstrip()


def parser(doc: str | None, json: bool = True) -> argparse.ArgumentParser:
    """A parser with the options of all benchmarks.

    Args:
        doc: docstring of the benchmark; its first paragraph is shown.
        json: whether the benchmark has `--json`.
    """
    made = argparse.ArgumentParser(description=(doc or "").split("\n\n")[0])
    if json:
        made.add_argument("--json", action="store_true", help="print one line of JSON")
    made.add_argument(
        "--write-doc", type=Path, metavar="FILE", help="write the tables into a markdown file"
    )
    return made


def show(options: argparse.Namespace, tables: Sequence[Table], found: Any, **more: str) -> None:
    """Print tables or JSON, and write the tables into a markdown file if asked for.

    Args:
        found: what `--json` prints.
        more: further versions, for instance of a reference.
    """
    print(json.dumps(found) if options.json else "\n\n".join(map(Table.text, tables)))
    if options.write_doc is not None:
        for table in tables:
            text = f"{table.markdown()}\n\n{provenance(**more)}"
            write_section(options.write_doc, table.name, text)


def provenance(**more: str) -> str:
    """Command, date, machine and versions, as one line of markdown."""
    from paddle_vl.train.reporting.run_record import processor_name, versions

    arguments = sys.argv[1:]
    if "--write-doc" in arguments:
        place = arguments.index("--write-doc")
        del arguments[place : place + 2]
    command = shlex.join(["python", os.path.relpath(sys.argv[0], ROOT), *map(_short, arguments)])
    found = versions()
    shown = {name: found[name] for name in ("python", "paddlepaddle", "paddlepaddle-gpu", "cuda")
             if name in found} | more  # fmt: skip
    return (
        f"*`{command}`, {datetime.now(timezone.utc):%Y-%m-%d}, {processor_name()}, "
        f"{len(os.sched_getaffinity(0))} cores; "
        f"{', '.join(f'{name} {version}' for name, version in shown.items())}.*"
    )


def _short(argument: str) -> str:
    """An absolute path without its folders, which are those of one machine."""
    return Path(argument).name if os.path.isabs(argument) else argument


def write_section(file: Path, name: str, text: str) -> None:
    """Replace the text between the markers of a name.

    Raises:
        ValueError: the file does not have the two markers exactly once.
    """
    begin, end = f"<!-- benchmark {name} -->", f"<!-- end of benchmark {name} -->"
    page = file.read_text(encoding="utf-8")
    if page.count(begin) != 1 or page.count(end) != 1:
        raise ValueError(f"{file} needs the markers {begin} and {end}, each of them once")
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    file.write_text(pattern.sub(lambda _: f"{begin}\n{text}\n{end}", page), encoding="utf-8")


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """First quartile, median and third quartile."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    first, middle, third = statistics.quantiles(values, n=4, method="inclusive")
    return first, middle, third


def spread(values: Iterable[float], digits: int = 1) -> str:
    """`median (first to third quartile)`."""
    low, middle, high = (f"{value:.{digits}f}" for value in quartiles(list(values)))
    return f"{middle} ({low} to {high})"


def in_rounds(
    sides: Sequence[Side], rounds: int, run: Callable[[Side], Any]
) -> list[dict[Side, Any]]:
    """Run all sides in every round, in changing order, so that a busy machine affects all sides."""
    found = []
    for number in range(rounds):
        shift = number % len(sides)
        found.append({side: run(side) for side in [*sides[shift:], *sides[:shift]]})
    return found


def make_data(family: str, folder: Path, *options: str) -> Path:
    """Write the data of a family into a folder; returns the file to train on."""
    tool, file = DATA[family]
    command = [sys.executable, str(ROOT / "tools" / tool), str(folder), *options]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
    return folder / file


def overrides(settings: Mapping[str, Any]) -> list[str]:
    """Settings as command line arguments."""
    return [f"{name}={value}" for name, value in settings.items()]


def launch(
    script: str, num_ranks: int, arguments: Sequence[str], work: Path, package: Path = ROOT
) -> list[dict[str, Any]]:
    """Run a benchmark's worker on several ranks with one thread each.

    Args:
        arguments: of the script; `leave` writes the ranks' results into `work`.
        work: folder for results and logs.
        package: checkout whose paddle_vl is used.

    Returns:
        The result of every rank.

    Raises:
        RuntimeError: a rank failed; has the end of its output.
    """
    from paddle_vl.cli.heap import with_whole_blocks

    work.mkdir(parents=True, exist_ok=True)
    launcher = ["-m", "paddle.distributed.launch", "--nproc_per_node", str(num_ranks)]
    launcher = [*launcher, "--log_dir", str(work / "log")] if num_ranks > 1 else []
    environment = {name: value for name, value in os.environ.items() if name[:7] != "PADDLE_"}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(package)}
    # As `paddle-vl train` starts.
    environment = with_whole_blocks(environment)
    done = subprocess.run(
        [sys.executable, *launcher, script, *arguments],
        capture_output=True,
        text=True,
        env=environment,
        cwd=work,
    )
    results = [work / f"result{rank}.json" for rank in range(num_ranks)]
    if done.returncode or not all(path.exists() for path in results):
        logs = sorted((work / "log").glob("workerlog.*"))
        text = "\n".join(log.read_text() for log in logs) or done.stdout + done.stderr
        raise RuntimeError(text[-3000:])
    return [json.loads(path.read_text()) for path in results]


def leave(found: dict[str, Any], work: Path) -> None:
    """Write the result of this rank and end the process."""
    rank = int(os.environ.get("PADDLE_TRAINER_ID", "0"))
    partial = work / f"result{rank}.partial"
    partial.write_text(json.dumps(found))
    partial.rename(work / f"result{rank}.json")
    if int(os.environ.get("PADDLE_TRAINERS_NUM", "1")) > 1:
        import paddle.distributed as dist

        dist.barrier()
    # Paddle's teardown of process groups may hang, see paddle_vl.cli.main.run.
    os._exit(0)
