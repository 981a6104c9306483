"""Quantities of one golden case, their errors and tolerances."""

from dataclasses import dataclass, field

import numpy as np


@dataclass
class Quantity:
    """One compared tensor: its error and tolerance in the same measure."""

    group: str
    name: str
    error: float
    allowed: float
    note: str = ""

    @property
    def passed(self) -> bool:
        # NaN compares false with everything, so it fails.
        return self.error <= self.allowed


@dataclass
class CaseReport:
    """All comparisons of one case; `unsupported` says why there are none."""

    name: str
    tolerance_scale: float = 1.0
    unsupported: str = ""
    quantities: list[Quantity] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return bool(self.quantities) and not self.unsupported and not self.failures

    @property
    def failures(self) -> list[Quantity]:
        return [quantity for quantity in self.quantities if not quantity.passed]

    def exact(self, group: str, name: str, found, wanted) -> None:
        """Require equality; the error is the number of differing entries."""
        found, wanted = np.asarray(found), np.asarray(wanted)
        if found.shape != wanted.shape:
            self._shapes_differ(group, name, found, wanted)
        else:
            differing = float(np.count_nonzero(found != wanted))
            self.quantities.append(Quantity(group, name, differing, 0.0, "entries differ"))

    def absolute(self, group: str, name: str, found, wanted, tolerance: float) -> None:
        """Require max|found - wanted| <= tolerance."""
        self._distance(group, name, found, wanted, tolerance, relative=False)

    def relative(self, group: str, name: str, found, wanted, tolerance: float) -> None:
        """Require max|found - wanted| / max|wanted| <= tolerance."""
        self._distance(group, name, found, wanted, tolerance, relative=True)

    def near(self, group: str, name: str, found, wanted, rtol: float, atol: float) -> None:
        """Require |found - wanted| <= rtol |wanted| + atol. The error is relative, as rtol is."""
        found, wanted = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
        if found.shape != wanted.shape:
            self._shapes_differ(group, name, found, wanted)
            return
        error = 0.0
        if found.size:
            error = float((np.abs(found - wanted) / (np.abs(wanted) + atol / rtol)).max())
        self.quantities.append(Quantity(group, name, error, rtol * self.tolerance_scale))

    def fail(self, group: str, name: str, reason: str) -> None:
        """Record a quantity that could not be compared."""
        self.quantities.append(Quantity(group, name, float("inf"), 0.0, reason))

    def _distance(self, group, name, found, wanted, tolerance: float, relative: bool) -> None:
        found, wanted = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
        if found.shape != wanted.shape:
            self._shapes_differ(group, name, found, wanted)
            return
        error = float(np.abs(found - wanted).max()) if found.size else 0.0
        if relative and error:
            largest = float(np.abs(wanted).max())
            error = error / largest if largest else float("inf")
        allowed = tolerance * self.tolerance_scale
        self.quantities.append(Quantity(group, name, error, allowed))

    def _shapes_differ(self, group: str, name: str, found, wanted) -> None:
        self.fail(group, name, f"shape {list(found.shape)}, golden {list(wanted.shape)}")

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
