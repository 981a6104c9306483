"""A whole examination: the process that runs the checks, its supervision, the table and the JSON.

A crash of a check, a segmentation fault of a kernel included, ends the process of the checks only:
that check is a finding, as is one that passes its time limit, and a new process goes on with the
rest. What happens there comes through a file of JSON lines: the plan, a list of name, title and
time limit of every check, or why it was refused; then the finding of each check that is over. After
an error on a GPU the process ends itself: a failed kernel leaves a CUDA context in which everything
fails.
"""

import faulthandler
import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, get_args

import paddle_vl
from paddle_vl.doctor.check import (
    TRACEBACK,
    Check,
    Machine,
    Result,
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
# A check that is over, as in the JSON: `name`, `title`, the fields of `Result`, and `seconds`, None
# where its process did not say.
Finding = dict[str, Any]
_PACKAGE = Path(__file__).resolve().parents[1]
_EVENTS_FILE, _JOB_FILE = "events.jsonl", "job.json"
# Until the plan: importing Paddle from a cold disk takes tens of seconds.
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
    machine = (find_machine or this_machine)(job["is_quick"], folder)
    # Paddle's import has put its own handlers in place, which show no Python code.
    faulthandler.disable()
    faulthandler.enable()
    try:
        checks = chosen_checks(all_checks(), job["only"], job["is_quick"])
    except UnknownCheckError as error:
        events.write(json.dumps({"refused": str(error)}) + "\n")
        return 0
    plan = [[check.name, check.title, check.limit_s] for check in checks]
    events.write(json.dumps({"plan": plan}) + "\n")
    for check in checks[job["done"] :]:
        print(f"check: {check.name}", flush=True)
        # If it hangs, its output says where.
        faulthandler.dump_traceback_later(0.9 * check.limit_s)
        begin = time.perf_counter()
        result = run_check(check, machine)
        faulthandler.cancel_dump_traceback_later()
        seconds = round(time.perf_counter() - begin, 3)
        events.write(json.dumps(_finding(check.name, check.title, result, seconds)) + "\n")
        if machine.device == "gpu" and TRACEBACK in result.figures:
            break
    sys.stdout.flush()
    sys.stderr.flush()
    # Without Paddle's teardown, which may abort after everything is written.
    os._exit(0)


def _finding(name: str, title: str, result: Result, seconds: float | None) -> Finding:
    return {"name": name, "title": title, **asdict(result), "seconds": seconds}


def this_machine(is_quick: bool, folder: Path) -> Machine:
    """The machine that Paddle computes on."""
    import paddle

    if not paddle.get_device().startswith("gpu"):
        return Machine("cpu", 0, False, is_quick, folder)
    cuda = paddle.device.cuda
    major = cuda.get_device_capability()[0]
    return Machine("gpu", cuda.device_count(), major >= 8, is_quick, folder)


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
    # The package is the same one, also from a clone.
    paths = [str(_PACKAGE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = {"PYTHONFAULTHANDLER": "1", "PYTHONPATH": os.pathsep.join(paths)}
    plan, done = None, 0
    while plan is None or done < len(plan):
        work = folder / str(done)
        work.mkdir(parents=True)
        job = {"only": list(only), "is_quick": is_quick, "done": done}
        (work / _JOB_FILE).write_text(json.dumps(job), encoding="utf-8")
        process, plan, problem = Processes(), None, None
        process.start([*command, str(work)], os.environ | variables, work / "output")
        first, seen, since = done, 0, time.monotonic()
        try:
            for _ in process.watched():
                # Before its events, which it may write until it ends.
                (code,) = process.codes()
                events = _events(work / _EVENTS_FILE)
                if len(events) > seen:
                    since = time.monotonic()
                    if "refused" in events[0]:
                        raise UnknownCheckError(events[0]["refused"])
                    plan = events[0]["plan"]
                    for finding in events[max(1, seen) :]:
                        done += 1
                        yield finding
                    seen = len(events)
                if plan and done == len(plan):
                    return
                limit_s = _START_LIMIT_S if plan is None else plan[done][2]
                if code is None and time.monotonic() - since > limit_s:
                    problem = (
                        f"did not end within {limit_s:g} s and was stopped",
                        "a hang: see where it stands in --json; of several ranks, check "
                        "NCCL_DEBUG=INFO, the network interfaces and peer access between the GPUs",
                    )
                elif code or (code == 0 and done == first):
                    problem = _died(code, plan is None)
                if problem is not None:
                    name, title, _ = plan[done] if plan else ("start", "Paddle can be imported", 0)
                    output = process.end_of_output(0, _SHOWN_LINES)
                    seconds = limit_s if code is None else None
                    done += 1
                    yield _finding(name, title, wrong(*problem, output=output), seconds)
                    break
        finally:
            # The launcher passes SIGTERM on to its ranks.
            process.end(_GRACE_S)
        if plan is None:
            return


def _events(file: Path) -> list[dict[str, Any]]:
    """The events of a process so far; numbers that JSON lacks (NaN, infinities) are strings."""
    # The last line may be half written.
    lines = file.read_bytes().split(b"\n")[:-1] if file.exists() else []
    return [json.loads(line, parse_constant=lambda number: str(float(number))) for line in lines]


def _died(code: int, before_checks: bool) -> tuple[str, str]:
    """That the process has ended, and what to do."""
    how = end_in_words(code)
    if before_checks:
        return (
            f"the process of the checks {how} while it imported Paddle",
            "Paddle cannot be imported here: read the output, and install the wheel for this "
            "machine's Python, CUDA and driver",
        )
    if code == -signal.SIGKILL:
        return f"the process crashed: it {how}", "the host's memory may be full: see dmesg"
    return (
        f"the process crashed: it {how}",
        "a crash in a kernel or library, not a Python error: report it with this table and --json; "
        "if only this kernel crashes, look for another wheel or driver",
    )


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
            "checks": findings,
        }
        write_text(json_file, json.dumps(content, indent=1, allow_nan=False) + "\n")

    write()
    with tempfile.TemporaryDirectory(prefix="paddle-vl-doctor-") as folder:
        for finding in supervised(command, Path(folder), only, is_quick):
            findings.append(finding)
            line = "{name}: {status}: {found}".format_map(finding)
            print(line, file=sys.stderr, flush=True)
            write()
    print(table(findings))
    if json_file is not None:
        print(f"written to {json_file}")
    return int(_counts(findings)["wrong"] > 0)


def _counts(findings: Sequence[Finding]) -> dict[str, int]:
    counts = Counter(finding["status"] for finding in findings)
    return {status: counts[status] for status in get_args(Status)}


def table(findings: Sequence[Finding]) -> str:
    """A table in GitHub's markdown, then the tables of the checks that have one, then what is
    wrong and what to do."""
    rows = [
        {
            "check": finding["name"],
            "result": finding["status"].replace("wrong", "WRONG"),
            "s": "" if finding["seconds"] is None else f"{finding['seconds']:.1f}",
            "what was found": finding["found"],
        }
        for finding in findings
    ]
    # Rows of one kind, which begin with the same column, stand in one table.
    tables: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for finding in findings:
        for row in finding["figures"].get("table") or ():
            tables.setdefault((finding["name"].partition(".")[0], next(iter(row))), []).append(row)
    parts = [_markdown(rows)]
    for (group, _), rows in tables.items():
        parts.append(f"{group}\n\n{_markdown(rows[:_MOST_ROWS])}")
        if len(rows) > _MOST_ROWS:
            parts.append(f"{len(rows) - _MOST_ROWS} more rows are in --json")
    counts = _counts(findings)
    told = ", ".join(f"{number} {status}" for status, number in counts.items() if number)
    lines = [f"{len(findings)} checks: {told}"]
    for finding in findings:
        if finding["status"] == "wrong":
            lines += ["", "WRONG  {name}: {found}\n  to do: {remedy}".format_map(finding)]
            lines += [f"  | {line}" for line in (finding["figures"].get("output") or [])[-4:]]
    if not counts["wrong"]:
        lines.append("nothing is wrong")
    return "\n\n".join([*parts, "\n".join(lines)])


def _markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as a markdown table whose columns are aligned in plain text."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [columns, *([_cell(row.get(column)) for column in columns] for row in rows)]
    # A last column of sentences is not filled up with spaces.
    widths = [max(3, *(len(row[i]) for row in cells)) for i in range(len(columns) - 1)] + [3]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in [cells[0], ["-" * width for width in widths], *cells[1:]]
    )


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return "" if value is None else " ".join(str(value).split()).replace("|", "\\|")
