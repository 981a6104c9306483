"""What the benchmarks share: options, runs in other processes, ratios, tables, and docs sections.

A benchmark prints its tables. With `--write-doc FILE` it replaces the text between two markers of a
markdown file by its tables and where they come from: command, date, machine and versions.

    <!-- benchmark NAME -->
    ...
    <!-- end of benchmark NAME -->

What is measured runs in processes of its own: `launch(function, ...)` calls a function of a
benchmark there, on one rank or several, with arguments that JSON holds, and returns its results.
"""

import argparse
import inspect
import json
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_HERE = str(Path(__file__).resolve())
# Script that writes the data of a family, the file to train on, and options that make the data fit
# `configs/bench/FAMILY_step.yaml`.
DATA = {
    "qwen3_vl": ("make_digits_dataset.py", "train.jsonl", ""),
    "qwen3_5": ("make_digits_dataset.py", "train.jsonl", ""),
    "qwen4_exp": ("make_digits_dataset.py", "train.jsonl", ""),
    "paddleocr_vl": ("make_documents_dataset.py", "text_train.jsonl", "text=1 --held-out 1"),
    "pi07": ("make_demonstrations.py", "arm-joint.jsonl",
             "--state-dim 32 --action-dim 32 --chunk-size 50 --action-vocab-size 1024"),
}  # fmt: skip
# Settings of a run that only takes steps.
STEPS_ONLY = {
    "train.max_steps": 10**6,
    "train.eval_steps": "null",
    "train.save_steps": "null",
    "train.resume_from_checkpoint": "none",
    "logging.progress_bar": "false",
}
# Results of a round, by side.
Round = Mapping[str, dict[str, Any]]


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


@dataclass(frozen=True)
class Result:
    """What a benchmark found.

    Attributes:
        found: what `--json` prints.
        versions: further versions, for instance of a reference.
        is_good: whether the benchmark's own expectations held; the exit code.
    """

    tables: Sequence[Table]
    found: Any
    versions: Mapping[str, str] = field(default_factory=dict)
    is_good: bool = True


def parser(doc: str | None) -> argparse.ArgumentParser:
    """A parser with the options of all benchmarks, which shows the docstring's first paragraph."""
    made = argparse.ArgumentParser(description=(doc or "").split("\n\n")[0])
    made.add_argument("--json", action="store_true", help="print one line of JSON")
    made.add_argument(
        "--write-doc", type=Path, metavar="FILE", help="write the tables into a markdown file"
    )
    return made


def add_count(made: argparse.ArgumentParser, name: str, default: int | None, text: str) -> None:
    """Add an option that is a whole number from 1; its help ends with the default."""
    shown = text if default is None else f"{text} ({default})"
    made.add_argument(f"--{name}", type=_positive, default=default, help=shown)


def _positive(text: str) -> int:
    """A whole number from 1, as the type of an option."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is no whole number from 1")
    return int(text)


def run(
    made: argparse.ArgumentParser, benchmark: Callable[[argparse.Namespace, Path], Result]
) -> int:
    """Run a benchmark with its options and a temporary folder; print its result.

    Returns:
        The exit code: 1 if a process failed, or the result is not as it should be.
    """
    options = made.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        try:
            result = benchmark(options, Path(folder))
        except RuntimeError as error:
            print(f"{made.prog}: a run failed:\n{error}", file=sys.stderr)
            return 1
    text = "\n\n".join(map(Table.text, result.tables))
    print(json.dumps(result.found) if options.json else text)
    if options.write_doc is not None:
        for table in result.tables:
            section = f"{table.markdown()}\n\n{provenance(**result.versions)}"
            write_section(options.write_doc, table.name, section)
    return int(not result.is_good)


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


def median(rounds: Sequence[Round], side: str, *keys: str) -> float:
    """Median over rounds of a side's number, at a path of keys."""
    return statistics.median(_number(one[side], keys) for one in rounds)


def ratio(rounds: Sequence[Round], side: str, base: str, *keys: str) -> str:
    """`median (first to third quartile)` over rounds of a side's number relative to another's."""
    found = [_number(one[side], keys) / _number(one[base], keys) for one in rounds]
    # Of one round the number itself.
    parts = statistics.quantiles(found * 2 if len(found) < 2 else found, n=4, method="inclusive")
    low, middle, high = (f"{value:.2f}" for value in parts)
    return f"{middle} ({low} to {high})"


def _number(found: Any, keys: Sequence[str]) -> float:
    for key in keys:
        found = found[key]
    return found


def in_rounds(sides: Sequence[str], rounds: int, run: Callable[[str], Any]) -> list[Round]:
    """Run all sides in every round, in changing order, so that a busy machine affects all sides."""
    found: list[Round] = []
    for number in range(rounds):
        shift = number % len(sides)
        found.append({side: run(side) for side in [*sides[shift:], *sides[:shift]]})
    return found


def make_data(family: str, folder: Path) -> Path:
    """Write the data of a family into a folder; returns the file to train on."""
    tool, file, options = DATA[family]
    command = [sys.executable, str(ROOT / "tools" / tool), str(folder), *options.split()]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
    if family == "paddleocr_vl":
        from paddle_vl.families.paddleocr_vl.inputs.processor import PaddleOCRVLProcessor

        made = PaddleOCRVLProcessor.from_texts([], 1400, patch_size=16)
        made.save_pretrained(folder / "processor")
    return folder / file


def overrides(settings: Mapping[str, Any]) -> list[str]:
    """Settings as command line arguments."""
    return [f"{name}={value}" for name, value in settings.items()]


def data_settings(family: str, folder: Path) -> dict[str, Any]:
    """Settings of a run that only takes steps on data that `make_data` has written."""
    settings = STEPS_ONLY | {
        "data.train": f"[{folder / DATA[family][1]}]",
        "data.eval": "[]",
        "data.processor": folder / "processor",
    }
    if family != "pi07":
        # A batch has as many samples as it says.
        settings |= {"data.packing": "false", "data.packing_length": "null"}
    return settings


def launch(
    function: Callable[..., dict[str, Any]],
    folder: Path,
    num_ranks: int = 1,
    /,
    threads: int = 1,
    **arguments: Any,
) -> list[dict[str, Any]]:
    """Call a module-level function of a benchmark on ranks of their own.

    Args:
        folder: for arguments, results and logs; emptied before.
        threads: of a rank, while its libraries are loaded.
        arguments: of the function; paths become strings.

    Returns:
        The result of every rank.

    Raises:
        RuntimeError: a rank failed; has the end of its output.
    """
    from paddle_vl.cli.main import with_whole_blocks

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    results = [folder / f"result{rank}.json" for rank in range(num_ranks)]
    (folder / "arguments.json").write_text(json.dumps(arguments, default=str), encoding="utf-8")
    launcher = ["-m", "paddle.distributed.launch", "--nproc_per_node", str(num_ranks)]
    launcher = [*launcher, "--log_dir", str(folder / "log")] if num_ranks > 1 else []
    environment = {name: value for name, value in os.environ.items() if name[:7] != "PADDLE_"}
    environment |= {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(ROOT)}
    script = Path(inspect.getfile(function)).stem
    done = subprocess.run(
        [sys.executable, *launcher, _HERE, script, function.__name__, str(folder)],
        capture_output=True,
        text=True,
        # As `paddle-vl train` starts.
        env=with_whole_blocks(environment),
        cwd=folder,
    )
    if done.returncode or not all(path.exists() for path in results):
        logs = sorted((folder / "log").glob("workerlog.*"))
        text = "\n".join(log.read_text() for log in logs) or done.stdout + done.stderr
        raise RuntimeError(text[-3000:])
    return [json.loads(path.read_text(encoding="utf-8")) for path in results]


def reference(python: str, *arguments: object) -> Any:
    """The line of JSON that `references.py` prints, run by another interpreter.

    Raises:
        RuntimeError: it failed; has the end of its output.
    """
    command = [python, str(Path(__file__).with_name("references.py")), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{python} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def peak_mib() -> float:
    """Peak resident memory of this process."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def _worker(script: str, function: str, folder: Path) -> None:
    """Call the function on this rank, write its result and end the process."""
    arguments = json.loads((folder / "arguments.json").read_text(encoding="utf-8"))
    found = getattr(import_module(script), function)(**arguments)
    rank = int(os.environ.get("PADDLE_TRAINER_ID", "0"))
    partial = folder / f"result{rank}.partial"
    partial.write_text(json.dumps(found), encoding="utf-8")
    partial.rename(folder / f"result{rank}.json")
    if int(os.environ.get("PADDLE_TRAINERS_NUM", "1")) > 1:
        import paddle.distributed as dist

        dist.barrier()
    # Paddle's teardown of process groups may hang, see paddle_vl.cli.main.run.
    os._exit(0)


if __name__ == "__main__":
    made = argparse.ArgumentParser(description="Call a benchmark's function on this rank.")
    for name in ("script", "function", "folder"):
        made.add_argument(name)
    given = made.parse_args()
    _worker(given.script, given.function, Path(given.folder))
