"""A whole examination: its checks one after another, the table, the JSON, and the exit code."""

import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import paddle_vl
from paddle_vl.doctor.check import STATUSES, finite
from paddle_vl.doctor.supervise import Finished, supervised

# Raised when a key of the JSON changes its meaning or goes.
FORMAT = 1
_MOST_ROWS = 80


def examine(
    command: Sequence[str],
    only: Sequence[str] = (),
    is_quick: bool = False,
    json_file: Path | None = None,
) -> int:
    """Run the checks, and print the table.

    Args:
        command: starts a worker, see `paddle_vl.doctor.supervise.supervised`.
        only: names of checks or groups; empty for all.
        json_file: for the findings; written after every check, so that nothing is lost.

    Returns:
        The exit code: 1 if anything is wrong, else 0.

    Raises:
        RefusedError: `only` names what does not exist.
        OSError: the JSON file cannot be written; before anything runs.
    """
    started, begin = datetime.now(timezone.utc).isoformat(timespec="seconds"), time.monotonic()
    findings: list[Finished] = []

    def write() -> None:
        if json_file is not None:
            facts = {
                "paddle_vl": paddle_vl.__version__,
                "started": started,
                "seconds": round(time.monotonic() - begin, 1),
                "only": list(only),
                "is_quick": is_quick,
            }
            partial = json_file.with_name(json_file.name + ".partial")
            text = json.dumps(_as_json(findings, facts), indent=1, allow_nan=False)
            partial.write_text(text + "\n", encoding="utf-8")
            partial.replace(json_file)

    write()
    with tempfile.TemporaryDirectory(prefix="paddle-vl-doctor-") as folder:
        for finished in supervised(command, Path(folder), only, is_quick):
            findings.append(finished)
            status, found = finished.result.status, finished.result.found
            print(f"{finished.name}: {status}: {found}", file=sys.stderr, flush=True)
            write()
    print(table(findings))
    if json_file is not None:
        print(f"written to {json_file}")
    return int(_is_wrong(findings))


def table(findings: Sequence[Finished]) -> str:
    """A table in GitHub's markdown, then the tables of the checks that have one, then what is
    wrong and what to do."""
    rows = [
        {
            "check": finished.name,
            "result": finished.result.status.replace("wrong", "WRONG"),
            "s": "" if finished.seconds is None else f"{finished.seconds:.1f}",
            "what was found": finished.result.found,
        }
        for finished in findings
    ]
    # Rows of one kind, which begin with the same column, stand in one table.
    tables: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for finished in findings:
        for row in finished.result.figures.get("table") or ():
            tables.setdefault((finished.name.partition(".")[0], next(iter(row))), []).append(row)
    parts = [_markdown(rows)]
    for (group, _), rows in tables.items():
        parts.append(f"{group}\n\n{_markdown(rows[:_MOST_ROWS])}")
        if len(rows) > _MOST_ROWS:
            parts.append(f"{len(rows) - _MOST_ROWS} more rows are in --json")
    return "\n\n".join([*parts, _verdict(findings)])


def _is_wrong(findings: Sequence[Finished]) -> bool:
    return any(finished.result.status == "wrong" for finished in findings)


def _as_json(findings: Sequence[Finished], facts: Mapping[str, Any]) -> dict[str, Any]:
    counts = Counter(finished.result.status for finished in findings)
    return {
        "format": FORMAT,
        **facts,
        "ok": not _is_wrong(findings),
        "counts": {status: counts[status] for status in STATUSES},
        "checks": [
            {
                "name": finished.name,
                "title": finished.title,
                **finished.result.as_json(),
                "seconds": finite(finished.seconds),
            }
            for finished in findings
        ],
    }


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


def _verdict(findings: Sequence[Finished]) -> str:
    counts = Counter(finished.result.status for finished in findings)
    told = ", ".join(f"{counts[status]} {status}" for status in STATUSES if counts[status])
    lines = [f"{len(findings)} checks: {told}"]
    for finished in findings:
        if finished.result.status == "wrong":
            lines += [
                "",
                f"WRONG  {finished.name}: {finished.result.found}",
                f"  to do: {finished.result.remedy}",
            ]
            output = finished.result.figures.get("output") or []
            lines += [f"  | {line}" for line in output[-4:]]
    if not _is_wrong(findings):
        lines.append("nothing is wrong")
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return " ".join(str(value).split()).replace("|", "\\|")
