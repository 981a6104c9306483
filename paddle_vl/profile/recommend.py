"""Conclusions from a matrix: recommended choices, and comparisons of two choices of sharding.

Compared cells are equal in everything else.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from paddle_vl.profile.cells import Cell, Choice
from paddle_vl.train.phases import Phase

# Of cells within this share of the best throughput, the one with least memory is recommended.
_AS_GOOD = 0.02
# The phases that make up the two halves of a step.
_HALVES = {"forward": (Phase.FORWARD,), "backward": (Phase.BACKWARD, Phase.GRADIENT_SUM)}


@dataclass(frozen=True)
class Recommendation:
    """The recommended cell for one number of cameras, None if none fits, and the reason."""

    cameras: int | None
    cell: Cell | None
    reason: str


@dataclass(frozen=True)
class Comparison:
    """Two cells that differ in sharding only."""

    one: Cell
    other: Cell

    @property
    def is_within_spread(self) -> bool:
        """Whether the ranges of both cells' runs overlap, so that their order may be chance."""
        (low, high), (other_low, other_high) = self.one.speed_range, self.other.speed_range
        several = min(len(self.one.runs), len(self.other.runs)) > 1
        return several and low <= other_high and other_low <= high

    @property
    def speedup(self) -> float:
        """Samples per second, as a multiple of the other's."""
        return self.one.samples_per_sec / self.other.samples_per_sec

    @property
    def speedup_of_medians(self) -> float:
        """The same from the median step, which is less sensitive to a busy machine."""
        return self.other.median_step_ms / self.one.median_step_ms

    @property
    def cpu_ratio(self) -> float:
        """CPU time of a step, as a multiple of the other's; above 1 is more work."""
        return self.one.cpu_ms / self.other.cpu_ms

    def share_of_gap(self, half: str) -> float | None:
        """The percentage of the difference in step time due to `forward` or `backward`; None if the
        steps take equally long."""
        gap = self.other.step_ms - self.one.step_ms
        if abs(gap) < 0.02 * self.one.step_ms:
            return None
        difference = self._half_ms(self.other, half) - self._half_ms(self.one, half)
        return 100 * difference / gap

    @staticmethod
    def _half_ms(cell: Cell, half: str) -> float:
        means = cell.profile["phase_means_s"]
        return 1000 * sum(means.get(phase.value, 0.0) for phase in _HALVES[half])


def recommendations(
    cells: Sequence[Cell], limit_gb: float | None, memory_share: float
) -> list[Recommendation]:
    """For each number of cameras the fastest cell under a share of the memory limit.

    Args:
        limit_gb: memory limit of a rank; None for no limit.
        memory_share: share of the limit that a cell may use, in (0, 1].

    Raises:
        ValueError: a share out of range.
    """
    if not 0 < memory_share <= 1:
        raise ValueError(f"a memory share of {memory_share}: it must be above 0 and at most 1")
    cameras = dict.fromkeys(cell.choice.cameras for cell in cells)
    return [
        _recommended([c for c in cells if c.choice.cameras == n], n, limit_gb, memory_share)
        for n in cameras
    ]


def comparisons(cells: Sequence[Cell], one: str, other: str) -> list[Comparison]:
    """Comparisons of two choices of sharding, for all other settings measured with both."""
    measured = {(cell.choice, cell.batch_size): cell for cell in cells if cell.status == "ok"}
    found = []
    for (choice, size), cell in measured.items():
        partner = (choice._replace(sharding=other), size)
        if choice.sharding == one and partner in measured:
            found.append(Comparison(cell, measured[partner]))
    return found


def largest_batches(cells: Sequence[Cell]) -> dict[Choice, int]:
    """The largest batch size that fits, by choice."""
    found: dict[Choice, int] = {}
    for cell in cells:
        if cell.status == "ok":
            found[cell.choice] = max(found.get(cell.choice, 0), cell.batch_size)
    return found


def _recommended(
    cells: Sequence[Cell], cameras: int | None, limit_gb: float | None, memory_share: float
) -> Recommendation:
    measured = [cell for cell in cells if cell.status == "ok"]
    allowed = [c for c in measured if limit_gb is None or c.memory_gb <= memory_share * limit_gb]
    if not allowed:
        reason = f"none of the {len(cells)} cells ran"
        if measured:
            least = min(measured, key=lambda cell: cell.memory_gb)
            reason = (
                f"none of the {len(measured)} cells that ran stays below "
                f"{100 * memory_share:g} % of {limit_gb:g} GB; the smallest, {described(least)}, "
                f"takes {least.memory_gb:.2f} GB"
            )
        return Recommendation(cameras, None, reason)
    fastest = max(allowed, key=lambda cell: cell.samples_per_sec)
    as_good = [
        cell for cell in allowed if cell.samples_per_sec >= (1 - _AS_GOOD) * fastest.samples_per_sec
    ]
    best = min(as_good, key=lambda cell: cell.memory_gb)
    runs = f" ({spread(best)} in {len(best.runs)} runs)" if len(best.runs) > 1 else ""
    reason = f"{best.samples_per_sec:.2f} samples/s{runs} with {_memory(best, limit_gb)}"
    if best is not fastest:
        reason += (
            f"; {described(fastest)} is faster by less than {100 * _AS_GOOD:g} % and takes "
            f"{_memory(fastest, limit_gb)}"
        )
    others = [cell for cell in allowed if cell.choice.sharding != best.choice.sharding]
    if others:
        next_best = max(others, key=lambda cell: cell.samples_per_sec)
        reason += (
            f"; the best of another sharding, {described(next_best)}, makes "
            f"{next_best.samples_per_sec:.2f}"
        )
    over = max(measured, key=lambda cell: cell.samples_per_sec)
    if over not in allowed and over.samples_per_sec > fastest.samples_per_sec:
        reason += (
            f"; {described(over)} makes {over.samples_per_sec:.2f}, but takes "
            f"{_memory(over, limit_gb)}, above {100 * memory_share:g} %"
        )
    return Recommendation(cameras, best, reason)


def described(cell: Cell) -> str:
    """A cell in words."""
    choice = cell.choice
    cameras = "" if choice.cameras is None else f", {choice.cameras} camera(s)"
    attention = "" if choice.attention is None else f", {choice.attention} attention"
    start = f"{choice.sharding}{attention}, recompute {choice.recompute}"
    return f"{start}{cameras}, batch {cell.batch_size}"


def spread(cell: Cell) -> str:
    """Samples per second of a cell's slowest and fastest run."""
    return "{:.2f} to {:.2f}".format(*cell.speed_range)


def _memory(cell: Cell, limit_gb: float | None) -> str:
    if limit_gb is None:
        return f"{cell.memory_gb:.2f} GB"
    return f"{cell.memory_gb:.2f} GB, {100 * cell.memory_gb / limit_gb:.0f} % of the limit"
