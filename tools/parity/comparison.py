"""Quantities of one golden case, their errors and tolerances."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass
class Quantity:
    """One compared tensor: its error and tolerance in the same measure.

    Attributes:
        found: what was compared, in units of that measure.
    """

    group: str
    name: str
    error: float
    allowed: float
    note: str = ""
    found: Any = 0.0

    @property
    def passed(self) -> bool:
        # NaN compares false with everything, so it fails.
        return self.error <= self.allowed


@dataclass
class CaseReport:
    """All comparisons of one case; `unsupported` says why there are none.

    Attributes:
        golden: the case's tensors; what is compared with has the name of one, unless it is given.
        compared: names of golden tensors that have been compared.
    """

    name: str
    tolerance_scale: float = 1.0
    golden: Mapping[str, np.ndarray] = field(default_factory=dict)
    unsupported: str = ""
    quantities: list[Quantity] = field(default_factory=list)
    compared: set[str] = field(default_factory=set)

    @property
    def passed(self) -> bool:
        return bool(self.quantities) and not self.unsupported and not self.failures

    @property
    def failures(self) -> list[Quantity]:
        return [quantity for quantity in self.quantities if not quantity.passed]

    def exact(self, group: str, name: str, found: Any, wanted: Any = None) -> None:
        """Require equality; the error is the number of differing entries."""
        if (pair := self._pair(group, name, found, wanted, None)) is not None:
            differing = float(np.count_nonzero(pair[0] != pair[1]))
            self.quantities.append(Quantity(group, name, differing, 0.0, "entries differ"))

    def absolute(
        self, group: str, name: str, found: Any, tolerance: float, wanted: Any = None
    ) -> None:
        """Require max|found - wanted| <= tolerance."""
        if (pair := self._pair(group, name, found, wanted)) is not None:
            self._add(group, name, _largest(pair[0] - pair[1]), tolerance, pair[0])

    def relative(
        self, group: str, name: str, found: Any, tolerance: float, wanted: Any = None
    ) -> None:
        """Require max|found - wanted| / max|wanted| <= tolerance."""
        if (pair := self._pair(group, name, found, wanted)) is not None:
            largest = _largest(pair[1])
            if error := _largest(pair[0] - pair[1]):
                error = error / largest if largest else float("inf")
            self._add(group, name, error, tolerance, pair[0] / (largest or 1.0))

    def near(
        self, group: str, name: str, found: Any, rtol: float, atol: float, wanted: Any = None
    ) -> None:
        """Require |found - wanted| <= rtol |wanted| + atol. The error is relative, as rtol is."""
        if (pair := self._pair(group, name, found, wanted)) is not None:
            unit = np.abs(pair[1]) + atol / rtol
            error = np.abs(pair[0] - pair[1]) / unit
            self._add(group, name, _largest(error), rtol, pair[0] / unit)

    def fail(self, group: str, name: str, reason: str) -> None:
        """Record a quantity that could not be compared."""
        self.quantities.append(Quantity(group, name, float("inf"), 0.0, reason))

    def all_compared(self, start: str = "") -> None:
        """Fail for every golden tensor with this prefix that was not compared."""
        for name in sorted(set(self.golden) - self.compared):
            if name.startswith(start):
                self.fail("coverage", name, "the case has it and it was not compared")

    def _pair(
        self, group: str, name: str, found: Any, wanted: Any, dtype: Any = np.float64
    ) -> tuple[np.ndarray, np.ndarray] | None:
        """Both sides as arrays; None if their shapes differ, which is a failure."""
        if name in self.golden:
            self.compared.add(name)
        found = np.asarray(found, dtype)
        wanted = np.asarray(self.golden[name] if wanted is None else wanted, dtype)
        if found.shape == wanted.shape:
            return found, wanted
        self.fail(group, name, f"shape {list(found.shape)}, golden {list(wanted.shape)}")
        return None

    def _add(self, group: str, name: str, error: float, tolerance: float, found: Any = 0.0) -> None:
        allowed = tolerance * self.tolerance_scale
        self.quantities.append(Quantity(group, name, error, allowed, found=found))

    def changes(self, other: "CaseReport") -> dict[str, float]:
        """Largest change of a quantity of each group from another run of the case."""
        found: dict[str, float] = {}
        for one, two in zip(self.quantities, other.quantities, strict=True):
            change = _largest(np.asarray(one.found - two.found))
            found[one.group] = max(found.get(one.group, 0.0), change)
        return found

    def line(self) -> str:
        """One line: verdict, name, worst error of each group."""
        if self.unsupported:
            return f"FAIL {self.name:<28} not supported: {self.unsupported}"
        worst: dict[str, float] = {}
        for quantity in self.quantities:
            worst[quantity.group] = max(worst.get(quantity.group, 0.0), quantity.error)
        errors = "  ".join(f"{group} {error:.2g}" for group, error in worst.items())
        return f"{'PASS' if self.passed else 'FAIL'} {self.name:<28} {errors}"

    def failure_lines(self, limit: int = 5) -> list[str]:
        """The first failing quantities, in the order of computation."""
        lines = [
            f"     {q.group}: {q.name}: {q.note or 'error'}"
            + ("" if q.error == float("inf") else f" {q.error:.3g}, allowed {q.allowed:.3g}")
            for q in self.failures
        ]
        more = len(lines) - limit
        return lines[:limit] + ([f"     ... and {more} more"] if more > 0 else [])


def _largest(values: np.ndarray) -> float:
    return float(np.abs(values).max()) if values.size else 0.0
