"""A whole examination: the process that runs the checks, its supervision, the table and the JSON.

A crash of a check, a segmentation fault of a kernel included, ends the process of the checks only:
that check is a finding, as is one that passes its time limit, and a new process goes on with the
rest. What happens there comes through a file, whose lines are JSON objects:

    {"plan": {NAME: {"title": ..., "limit_s": ...}, ...}}
    {"begin": NAME}
    {"end": NAME, "seconds": ..., "result": {...}}
    {"refused": REASON}

After an error on a GPU the process ends with `_RESTART`: a failed kernel leaves a CUDA context in
which everything fails, so the other checks need a new one.
"""

import faulthandler
import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, get_args

import paddle_vl
from paddle_vl.doctor.check import (
    TRACEBACK,
    Check,
    Machine,
    Status,
    UnknownCheckError,
    chosen_checks,
    run_check,
    wrong,
)
from paddle_vl.files.text_file import write_text
from paddle_vl.processes import Processes, end_in_words

# Raised when a key of the JSON changes its meaning or goes.
FORMAT = 1
_PACKAGE = Path(__file__).resolve().parents[1]
_EVENTS_FILE, _JOB_FILE = "events.jsonl", "job.json"
_RESTART = 75
# Until the first event: importing Paddle from a cold disk takes tens of seconds.
_START_LIMIT_S = 180.0
# For ranks that the process has started, before it is killed.
_GRACE_S = 10.0
_SHOWN_LINES, _MOST_ROWS = 25, 80


def run_checks(
    folder: Path,
    all_checks: Callable[[], Sequence[Check]],
    find_machine: Callable[[bool, Path], Machine] | None = None,
) -> int:
    """Run the checks that the job's file in the folder asks for; the command of the process.

    Args:
        all_checks: every check; some are skipped here, with a reason.
        find_machine: describes the machine; None for `this_machine`.

    Returns:
        The exit code, 0; findings are in the events.
    """
    job = json.loads((folder / _JOB_FILE).read_text(encoding="utf-8"))
    events = (folder / _EVENTS_FILE).open("a", encoding="utf-8", buffering=1)

    def tell(**event: Any) -> None:
        events.write(json.dumps(event) + "\n")

    machine = (find_machine or this_machine)(job["is_quick"], folder)
    # Paddle's import has put its own handlers in place, which show no Python code.
    faulthandler.disable()
    faulthandler.enable()
    try:
        checks = chosen_checks(all_checks(), **job)
    except UnknownCheckError as error:
        tell(refused=str(error))
        return 0
    tell(plan={check.name: {"title": check.title, "limit_s": check.limit_s} for check in checks})
    for check in checks:
        print(f"check: {check.name}", flush=True)
        tell(begin=check.name)
        # If it hangs, its output says where.
        faulthandler.dump_traceback_later(0.9 * check.limit_s)
        begin = time.perf_counter()
        result = run_check(check, machine)
        faulthandler.cancel_dump_traceback_later()
        seconds = round(time.perf_counter() - begin, 3)
        tell(end=check.name, seconds=seconds, result=asdict(result))
        if machine.device == "gpu" and TRACEBACK in result.figures:
            os._exit(_RESTART)
    sys.stdout.flush()
    sys.stderr.flush()
    # Without Paddle's teardown, which may abort after everything is written.
    os._exit(0)


def this_machine(is_quick: bool, folder: Path) -> Machine:
    """The machine that Paddle computes on."""
    import paddle

    if not paddle.get_device().startswith("gpu"):
        return Machine("cpu", 0, False, is_quick, folder)
    cuda = paddle.device.cuda
    major = cuda.get_device_capability()[0]
    return Machine("gpu", cuda.device_count(), major >= 8, is_quick, folder)


@dataclass(frozen=True)
class Finding:
    """A check that is over, as in the JSON; see `Result`.

    Attributes:
        seconds: that it took; None where its process did not say.
    """

    name: str
    title: str
    status: Status
    found: str
    figures: Mapping[str, Any]
    remedy: str
    seconds: float | None = None


def supervised(
    command: Sequence[str], folder: Path, only: Sequence[str] = (), is_quick: bool = False
) -> Iterator[Finding]:
    """Run the chosen checks in processes; yields each when it is over.

    Args:
        command: starts `run_checks`; the job's folder is appended.
        folder: empty.

    Raises:
        UnknownCheckError: `only` names what does not exist.
    """
    done: list[str] = []
    # The package is the same one, also from a clone.
    paths = [str(_PACKAGE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = {"PYTHONFAULTHANDLER": "1", "PYTHONPATH": os.pathsep.join(paths)}
    goes_on = True
    while goes_on:
        work = folder / str(len(list(folder.glob("*"))))
        work.mkdir(parents=True)
        job = {"only": list(only), "is_quick": is_quick, "done": done}
        (work / _JOB_FILE).write_text(json.dumps(job), encoding="utf-8")
        process = Processes()
        process.start([*command, str(work)], os.environ | variables, work / "output")
        try:
            goes_on = yield from _findings(process, work / _EVENTS_FILE, done)
        finally:
            # The launcher passes SIGTERM on to its ranks.
            process.end(_GRACE_S)


def _findings(process: Processes, events: Path, done: list[str]) -> Generator[Finding, None, bool]:
    """Each check that is over, until the process ends or a check takes too long.

    Args:
        done: receives the names of these checks.

    Returns:
        Whether the other checks need a new process.
    """
    # The checks that the process is going to run, None before it has told; and the present one.
    plan: dict[str, dict[str, Any]] | None = None
    running: str | None = None
    seen, since, goes_on = 0, time.monotonic(), False

    def finding(name: str, result: Mapping[str, Any], seconds: float | None = None) -> Finding:
        done.append(name)
        title = "Paddle can be imported" if plan is None else "the process of the checks"
        return Finding(
            name, (plan or {}).get(name, {"title": title})["title"], **result, seconds=seconds
        )

    for _ in process.watched():
        # Before its events, which it may write until it ends.
        (code,) = process.codes()
        # The last line may be half written.
        lines = events.read_bytes().split(b"\n")[:-1] if events.exists() else []
        for line in lines[seen:]:
            # Numbers that JSON lacks (NaN, infinities) become strings.
            event = json.loads(line, parse_constant=lambda number: str(float(number)))
            since, plan, running = time.monotonic(), event.get("plan", plan), event.get("begin")
            if "refused" in event:
                raise UnknownCheckError(event["refused"])
            if "end" in event:
                yield finding(event["end"], event["result"], event["seconds"])
        seen = len(lines)
        # A process that dies outside of its checks would do so for ever.
        goes_on = code == _RESTART or running is not None
        limit_s = plan[running]["limit_s"] if plan and running else _START_LIMIT_S
        is_late = code is None and time.monotonic() - since > limit_s
        is_between = running is None and plan is not None
        if is_late:
            problem = (
                f"did not end within {limit_s:g} s and was stopped",
                "a hang: see where it stands in --json; of several ranks, check NCCL_DEBUG=INFO, "
                "the network interfaces and peer access between the GPUs",
            )
        elif code is not None and not (is_between and code in (0, _RESTART)):
            problem = _died(code, running, plan is None)
        else:
            continue
        result = asdict(wrong(*problem, output=process.end_of_output(0, _SHOWN_LINES)))
        yield finding(running or "start", result, limit_s if is_late else None)
        if is_late:
            break
    return goes_on


def _died(code: int, running: str | None, before_checks: bool) -> tuple[str, str]:
    """That the process has ended, and what to do."""
    how = end_in_words(code)
    if running is not None:
        remedy = (
            "a crash in a kernel or library, not a Python error: report it with this table and "
            "--json; if only this kernel crashes, look for another wheel or driver"
        )
        if code == -signal.SIGKILL:
            remedy = "the host's memory may be full: see dmesg"
        return f"the process crashed: it {how}", remedy
    if before_checks:
        return (
            f"the process of the checks {how} while it imported Paddle",
            "Paddle cannot be imported here: read the output, and install the wheel for this "
            "machine's Python, CUDA and driver",
        )
    return f"it {how} between two checks", "report it with this table and --json"


def examine(
    command: Sequence[str],
    only: Sequence[str] = (),
    is_quick: bool = False,
    json_file: Path | None = None,
) -> int:
    """Run the checks, and print the table.

    Args:
        command: see `supervised`.
        only: names of checks or groups; empty for all.
        json_file: for the findings; written after every check, so that nothing is lost.

    Returns:
        The exit code: 1 if anything is wrong, else 0.

    Raises:
        UnknownCheckError: `only` names what does not exist.
        OSError: the JSON file cannot be written; before anything runs.
    """
    started, begin = datetime.now(timezone.utc).isoformat(timespec="seconds"), time.monotonic()
    findings: list[Finding] = []

    def write() -> None:
        if json_file is None:
            return
        counts = _counts(findings)
        content = {
            "format": FORMAT,
            "paddle_vl": paddle_vl.__version__,
            "started": started,
            "seconds": round(time.monotonic() - begin, 1),
            "only": list(only),
            "is_quick": is_quick,
            "ok": not counts["wrong"],
            "counts": counts,
            "checks": [asdict(finding) for finding in findings],
        }
        write_text(json_file, json.dumps(content, indent=1, allow_nan=False) + "\n")

    write()
    with tempfile.TemporaryDirectory(prefix="paddle-vl-doctor-") as folder:
        for finding in supervised(command, Path(folder), only, is_quick):
            findings.append(finding)
            print(f"{finding.name}: {finding.status}: {finding.found}", file=sys.stderr, flush=True)
            write()
    print(table(findings))
    if json_file is not None:
        print(f"written to {json_file}")
    return int(_counts(findings)["wrong"] > 0)


def _counts(findings: Sequence[Finding]) -> dict[str, int]:
    counts = Counter(finding.status for finding in findings)
    return {status: counts[status] for status in get_args(Status)}


def table(findings: Sequence[Finding]) -> str:
    """A table in GitHub's markdown, then the tables of the checks that have one, then what is
    wrong and what to do."""
    rows = [
        {
            "check": finding.name,
            "result": finding.status.replace("wrong", "WRONG"),
            "s": "" if finding.seconds is None else f"{finding.seconds:.1f}",
            "what was found": finding.found,
        }
        for finding in findings
    ]
    # Rows of one kind, which begin with the same column, stand in one table.
    tables: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for finding in findings:
        for row in finding.figures.get("table") or ():
            tables.setdefault((finding.name.partition(".")[0], next(iter(row))), []).append(row)
    parts = [_markdown(rows)]
    for (group, _), rows in tables.items():
        parts.append(f"{group}\n\n{_markdown(rows[:_MOST_ROWS])}")
        if len(rows) > _MOST_ROWS:
            parts.append(f"{len(rows) - _MOST_ROWS} more rows are in --json")
    counts = _counts(findings)
    told = ", ".join(f"{number} {status}" for status, number in counts.items() if number)
    lines = [f"{len(findings)} checks: {told}"]
    for finding in findings:
        if finding.status == "wrong":
            lines += ["", f"WRONG  {finding.name}: {finding.found}", f"  to do: {finding.remedy}"]
            lines += [f"  | {line}" for line in (finding.figures.get("output") or [])[-4:]]
    if not counts["wrong"]:
        lines.append("nothing is wrong")
    return "\n\n".join([*parts, "\n".join(lines)])


def _markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as a markdown table whose columns are aligned in plain text."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [columns, *([_cell(row.get(column)) for column in columns] for row in rows)]
    widths = [max(3, *(len(row[i]) for row in cells)) for i in range(len(columns))]
    # A last column of sentences is not filled up with spaces.
    widths[-1] = 3
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in [cells[0], ["-" * width for width in widths], *cells[1:]]
    ]
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return " ".join(str(value).split()).replace("|", "\\|")
