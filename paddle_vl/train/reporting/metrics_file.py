"""metrics.jsonl: one JSON object a line, each with its `step`; `metrics` says what else."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paddle_vl.files.named_errors import naming, write_text

METRICS_FILE = "metrics.jsonl"
Line = dict[str, Any]


class MetricsFile:
    """Appends lines to a metrics.jsonl, and reads them."""

    def __init__(self, path: Path):
        self.path = path

    def append(self, line: Line) -> None:
        with naming(self.path), self.path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(line, allow_nan=False) + "\n")

    def drop_after(self, step: int) -> None:
        """Forget lines of later steps than the one that a run continues from."""
        kept = [line for line in self.read() if line["step"] <= step]
        partial = self.path.with_name(self.path.name + ".partial")
        write_text(partial, "".join(json.dumps(line) + "\n" for line in kept))
        partial.replace(self.path)

    def read(self) -> list[Line]:
        """All lines; one that a crash cut short at the end is left out.

        Raises:
            RuntimeError: a line in the middle is not JSON, or one is not an object with a step.
        """
        return self.read_all()[0]

    def read_all(self) -> tuple[list[Line], bool]:
        """All lines, and whether there is one more, which a crash cut short.

        Raises:
            RuntimeError: as of `read`.
        """
        if not self.path.exists():
            return [], False
        texts = self.path.read_bytes().split(b"\n")
        if not texts[-1]:
            texts.pop()
        lines = []
        for number, text in enumerate(texts, start=1):
            try:
                line = json.loads(text)
            except (ValueError, RecursionError) as error:
                if number == len(texts):
                    return lines, True
                reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
                raise RuntimeError(self._not_a_line(number, reason)) from error
            if not isinstance(line, dict) or not _is_step(line.get("step")):
                raise RuntimeError(self._not_a_line(number, "no object with a step"))
            lines.append(line)
        return lines, False

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
            yield key, value if value is None or _is_finite(value) else None


def _is_step(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:
        # A whole number beyond what a float holds.
        return False


def _flat(values: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}/")
        else:
            yield prefix + name, value
