"""Per-rank numbers of a report, gathered over all ranks in one collective and reduced on the host.

The values of a rank form one small tensor; the tensors of all ranks are gathered and copied to the
host, where sums, means and extremes are computed. Shapes: P ranks, K values.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from paddle import Tensor

_PAGE = os.sysconf("SC_PAGE_SIZE")
_REDUCTIONS = {
    # The value is the same on all ranks.
    "same": lambda column: column[0],
    "sum": np.sum,
    "mean": np.mean,
    "min": np.min,
    "max": np.max,
}


@dataclass(frozen=True)
class Gauge:
    """A value of this rank.

    Attributes:
        how: reduction over ranks: `same`, `sum`, `mean`, `min` or `max`.
        value: a number, or a tensor `[n]` that is reduced entry by entry.
    """

    name: str
    how: str
    value: float | Tensor


def local_values(gauges: Sequence[Gauge]) -> Tensor:
    """The values of this rank, `[K]` float64 on the device.

    Nothing waits for the device: `paddle.full` writes a number there, while copying it from the
    host would synchronize.
    """
    return paddle.concat(
        [
            gauge.value.astype("float64").reshape([-1])
            if isinstance(gauge.value, Tensor)
            else paddle.full([1], float(gauge.value), dtype="float64")
            for gauge in gauges
        ]
    )


@dataclass(frozen=True)
class GaugeLayout:
    """Name, reduction and number of entries of each gauge in the K values; same on all ranks.

    Attributes:
        places: (name, reduction, entries) per gauge; entries is None for a number.
    """

    places: tuple[tuple[str, str, int | None], ...]

    @classmethod
    def of(cls, gauges: Sequence[Gauge]) -> "GaugeLayout":
        return cls(
            tuple(
                (
                    gauge.name,
                    gauge.how,
                    gauge.value.size if isinstance(gauge.value, Tensor) else None,
                )
                for gauge in gauges
            )
        )

    def reduced(self, values_PK: np.ndarray) -> dict[str, float | np.ndarray]:
        """The reduced value of each gauge by name: a float, or an array for a tensor."""
        found: dict[str, float | np.ndarray] = {}
        begin = 0
        for name, how, size in self.places:
            columns = values_PK[:, begin : begin + (size or 1)]
            reduced = np.array([_REDUCTIONS[how](column) for column in columns.T])
            found[name] = float(reduced[0]) if size is None else reduced
            begin += size or 1
        return found


class HostCopy:
    """An asynchronous copy of a tensor to the host; only `read` waits for it.

    On a GPU the copy is queued on the current stream, behind the kernels that compute the tensor;
    kernels that are launched later do not wait for it. On a CPU nothing is copied.
    """

    def __init__(self, tensor: Tensor):
        self._event: Any = None
        if tensor.place.is_gpu_place():
            self._tensor = tensor._copy_to(paddle.CUDAPinnedPlace(), False)
            self._event = paddle.device.cuda.Event()
            self._event.record()
            # Keeps the memory from being reused before it is copied.
            self._source = tensor
        else:
            self._tensor = tensor

    def read(self) -> np.ndarray:
        """The values; waits until they are there."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensor.numpy()


def memory_in_use() -> int:
    """Bytes of memory of this process: on a GPU the peak of allocated tensors so far, on a CPU the
    resident set now. Does not wait for the device."""
    if not paddle.get_device().startswith("cpu"):
        return int(paddle.device.cuda.max_memory_allocated())
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * _PAGE
