"""Numbers that every process has its own of, brought together in one collective.

All values of a process make one small tensor; the tensors of all are gathered, and sums, means and
extremes computed from them. Shapes: P processes, K values.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import paddle
from paddle import Tensor

_REDUCTIONS = {
    # What all processes have the same of.
    "same": lambda column: column[0],
    "sum": np.sum,
    "mean": np.mean,
    "min": np.min,
    "max": np.max,
}


@dataclass(frozen=True)
class Gauge:
    """A value of this process.

    Attributes:
        how: what is told of all processes' values: `same`, `sum`, `mean`, `min` or `max`.
        value: a number, or a tensor `[n]` whose entries are taken one by one.
    """

    name: str
    how: str
    value: float | Tensor


def local_values(gauges: Sequence[Gauge]) -> Tensor:
    """`[K]` float64, on the device, where tensors are and nothing is waited for.

    Numbers are written by the device: copying them from the host would wait for it.
    """
    return paddle.concat(
        [
            gauge.value.astype("float64").reshape([-1])
            if _is_tensor(gauge)
            else paddle.full([1], float(gauge.value), dtype="float64")
            for gauge in gauges
        ]
    )


@dataclass(frozen=True)
class GaugeLayout:
    """What stands where among the K values; the same on all processes.

    Attributes:
        places: of each gauge its name, how it is reduced, and how many values it has; None for a
            number.
    """

    places: tuple[tuple[str, str, int | None], ...]

    @classmethod
    def of(cls, gauges: Sequence[Gauge]) -> "GaugeLayout":
        return cls(
            tuple(
                (gauge.name, gauge.how, gauge.value.size if _is_tensor(gauge) else None)
                for gauge in gauges
            )
        )

    def reduced(self, values_PK: np.ndarray) -> dict[str, float | np.ndarray]:
        """By name what all processes' values come to; arrays of those that have several."""
        found: dict[str, float | np.ndarray] = {}
        begin = 0
        for name, how, size in self.places:
            columns = values_PK[:, begin : begin + (size or 1)]
            reduced = np.array([_REDUCTIONS[how](column) for column in columns.T])
            found[name] = float(reduced[0]) if size is None else reduced
            begin += size or 1
        return found


def _is_tensor(gauge: Gauge) -> bool:
    return isinstance(gauge.value, Tensor)
