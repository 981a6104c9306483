"""The table of a doctor's findings, its JSON, and its exit code."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from paddle_vl.doctor.check import STATUSES, finite
from paddle_vl.doctor.supervise import Finished

# Raised when a key of the JSON changes its meaning or goes.
FORMAT = 1
_MOST_ROWS = 80


def exit_code(findings: Sequence[Finished]) -> int:
    """1 if anything is wrong, else 0."""
    return int(any(finished.result.status == "wrong" for finished in findings))


def as_json(findings: Sequence[Finished], **facts: Any) -> dict[str, Any]:
    """What `--json` writes.

    Args:
        facts: about the whole run: version, start, seconds, command.

    Returns:
        `format`, the facts, `ok`, `counts` by status, and `checks`: name, title, status, found,
        figures, remedy and seconds of each.
    """
    counts = Counter(finished.result.status for finished in findings)
    return {
        "format": FORMAT,
        **finite(facts),
        "ok": exit_code(findings) == 0,
        "counts": {status: counts[status] for status in STATUSES},
        "checks": [
            {
                "name": finished.name,
                "title": finished.title,
                **finished.result.as_json(),
                "seconds": finished.seconds,
            }
            for finished in findings
        ],
    }


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    """Write the content in one go."""
    partial = file.with_name(file.name + ".partial")
    partial.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    partial.replace(file)


def table(findings: Sequence[Finished]) -> str:
    """A table in GitHub's markdown, then the tables of the checks that have one, then what is
    wrong and what to do."""
    rows = [
        ("check", "result", "s", "what was found"),
        *(
            (
                finished.name,
                finished.result.status.upper()
                if finished.result.status == "wrong"
                else finished.result.status,
                "" if finished.seconds is None else f"{finished.seconds:.1f}",
                _one_line(finished.result.found),
            )
            for finished in findings
        ),
    ]
    parts = [markdown(rows)]
    for group, members in groupby(findings, lambda finished: finished.name.partition(".")[0]):
        # Rows of one kind stand in one table.
        kinds: list[tuple[set[str], list[Mapping[str, Any]]]] = []
        for finished in members:
            for row in finished.result.figures.get("table") or ():
                columns = set(row)
                for known, rows in kinds:
                    if known <= columns or columns <= known:
                        known |= columns
                        rows.append(row)
                        break
                else:
                    kinds.append((columns, [row]))
        parts += [f"{group}\n\n{_own_table(rows)}" for _, rows in kinds]
    parts.append(_verdict(findings))
    return "\n\n".join(parts)


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Rows as a markdown table whose columns are aligned in plain text; the first is the head."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    # A last column of sentences is not filled up with spaces.
    widths[-1] = min(widths[-1], 3)
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in rows
    ]
    lines.insert(1, "| " + " | ".join("-" * max(3, width) for width in widths) + " |")
    return "\n".join(lines)


def _own_table(entries: Sequence[Mapping[str, Any]]) -> str:
    columns = list(dict.fromkeys(key for entry in entries for key in entry))
    rows = [[_cell(entry.get(column)) for column in columns] for entry in entries]
    text = markdown([columns, *rows[:_MOST_ROWS]])
    left = len(rows) - _MOST_ROWS
    return text if left <= 0 else f"{text}\n\n{left} more rows are in --json"


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
    if exit_code(findings) == 0:
        lines.append("nothing is wrong")
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return _one_line(str(value))


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
