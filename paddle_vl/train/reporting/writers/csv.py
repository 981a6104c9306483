"""metrics.csv: one row per metrics line, one column per number, empty where a line has none."""

import csv
from typing import Any

from paddle_vl.files.text_file import naming
from paddle_vl.train.reporting.run_files import Line, numbers_of
from paddle_vl.train.reporting.writers.base import Start

CSV_FILE = "metrics.csv"


class Writer:
    """Columns have the names of metrics.jsonl; a new one is added behind the others."""

    package = "csv"

    def __init__(self, start: Start):
        self._path = start.output_dir / CSV_FILE
        self._columns = ["step"]
        rows = [_row(line) for line in start.lines]
        self._columns += dict.fromkeys(key for row in rows for key in row if key != "step")
        self._write(rows, "w")

    def write(self, line: Line) -> None:
        row = _row(line)
        if new := [key for key in row if key not in self._columns]:
            with naming(self._path), self._path.open(newline="", encoding="utf-8") as stream:
                before = list(csv.DictReader(stream))
            self._columns += new
            self._write([*before, row], "w")
        else:
            self._write([row], "a")

    def show(self, step: int, answers: Any) -> None:
        """predictions.jsonl has them."""

    def close(self) -> None:
        """Nothing is open."""

    def _write(self, rows: list[dict], mode: str) -> None:
        with naming(self._path), self._path.open(mode, newline="", encoding="utf-8") as stream:
            table = csv.DictWriter(stream, self._columns)
            if mode == "w":
                table.writeheader()
            table.writerows(rows)


def _row(line: Line) -> dict[str, float]:
    numbers = {key: value for key, value in numbers_of(line) if value is not None}
    return {"step": line["step"], **numbers}
