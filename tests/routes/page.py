"""The tables of routes in docs/testing.md."""

import os
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from itertools import chain
from pathlib import Path

from harness import Table, write_section
from paddle_vl.train.reporting.run_record import processor_name, versions
from tests.routes.lines import ANSWERS, HEAVY_ANSWERS, HEAVY_LINES, LINES
from tests.routes.table import HEAVY, TRAINING

DEFAULT, OTHER = "routes", "heavy routes"
COLUMNS = ("command", "family", "what", "ways (processor seconds)")
ROWS = {
    DEFAULT: [*TRAINING, *LINES, *chain(*ANSWERS.values())],
    OTHER: [*HEAVY, *HEAVY_LINES, *chain(*HEAVY_ANSWERS.values())],
}


def promises(ways: Iterable[tuple[Sequence[str], str]]) -> list[list[str]]:
    """A line of the table for each command, family and capability, with all its ways."""
    grouped: dict[tuple[str, ...], list[str]] = {}
    for promised, way in ways:
        grouped.setdefault(tuple(promised), []).append(way)
    return [[*promised, "; ".join(ways)] for promised, ways in grouped.items()]


def write_routes(page: Path, found: Sequence[tuple[Sequence[str], float]], is_heavy: bool) -> None:
    """Write the table of the rows that a session ran.

    Args:
        found: of each row command, family, capability and way; its processor seconds.
        is_heavy: whether these are the heavy ones.

    Raises:
        ValueError: a row of the table did not run.
    """
    name = OTHER if is_heavy else DEFAULT
    seconds = {tuple(route): used for route, used in found}
    rows = [(row.promised, row.way) for row in ROWS[name]]
    if missing := [row for row in rows if (*row[0], row[1]) not in seconds]:
        raise ValueError(f"{len(missing)} rows did not run, the first is {missing[0]}")
    told = [(promised, f"{way} ({seconds[(*promised, way)]:.1f})") for promised, way in rows]
    used, of = sum(seconds.values()), versions()
    note = (
        f"{len(rows)} rows, {used:.0f} processor seconds: {datetime.now(timezone.utc):%Y-%m-%d}, "
        f"{processor_name()}, {len(os.sched_getaffinity(0))} cores, python {of['python']}, "
        f"paddlepaddle {of['paddlepaddle']}."
    )
    table = Table(name, COLUMNS, promises(told), f"*{note}*").markdown()
    write_section(page, name, table.replace("---:", "---"))
