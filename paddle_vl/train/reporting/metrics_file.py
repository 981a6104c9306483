"""metrics.jsonl: one JSON object a line, each with its `step`; `metrics` says what else."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

METRICS_FILE = "metrics.jsonl"
Line = dict[str, Any]


class MetricsFile:
    """Appends lines to a metrics.jsonl, and reads them."""

    def __init__(self, path: Path):
        self.path = path

    def append(self, line: Line) -> None:
        with self.path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(line, allow_nan=False) + "\n")

    def drop_after(self, step: int) -> None:
        """Forget lines of later steps than the one that a run continues from."""
        kept = [line for line in self.read() if line["step"] <= step]
        partial = self.path.with_name(self.path.name + ".partial")
        partial.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
        partial.replace(self.path)

    def read(self) -> list[Line]:
        """All lines; one that a crash cut short at the end is left out.

        Raises:
            RuntimeError: a line in the middle is not JSON, or one is not an object with a step.
        """
        if not self.path.exists():
            return []
        texts = self.path.read_text(encoding="utf-8").splitlines()
        lines = []
        for number, text in enumerate(texts, start=1):
            try:
                line = json.loads(text)
            except json.JSONDecodeError as error:
                if number == len(texts):
                    break
                raise RuntimeError(self._not_a_line(number, str(error))) from error
            if not isinstance(line, dict) or not isinstance(line.get("step"), int):
                raise RuntimeError(self._not_a_line(number, "no object with a step"))
            lines.append(line)
        return lines

    def _not_a_line(self, number: int, reason: str) -> str:
        return f"{self.path}:{number} is not a metrics line ({reason}); mend or remove it"


def numbers_of(line: Line) -> Iterator[tuple[str, float | None]]:
    """The keys of a line that have numbers, without `step`; None is one that was not finite.

    Mappings in a line have keys of their own, `outer/inner`; texts, lists and truths are left out.
    """
    for key, value in _flat(line, ""):
        if key == "step" or isinstance(value, bool):
            continue
        if value is None or isinstance(value, int | float):
            yield key, value if value is None or math.isfinite(value) else None


def _flat(values: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}/")
        else:
            yield prefix + name, value
