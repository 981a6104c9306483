"""Numbers of every rank for a report, gathered in one collective and compared on the host.

The values of a rank form one small tensor; the tensors of all ranks are gathered and copied to the
host. Shapes: P ranks, K values.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import paddle
from paddle import Tensor

from paddle_vl.processes import resident_bytes

# Values of this rank by name: numbers, and tensors `[n]` of equally many entries on all ranks.
OwnValues = Mapping[str, float | Tensor]


def packed(values: OwnValues) -> Tensor:
    """The values of this rank, `[K]` float64 on the device.

    Nothing waits for the device: `paddle.full` writes a number there, while copying it from the
    host would synchronize.
    """
    return paddle.concat(
        [
            value.astype("float64").reshape([-1])
            if isinstance(value, Tensor)
            else paddle.full([1], float(value), dtype="float64")
            for value in values.values()
        ]
    )


def by_rank(values_PK: np.ndarray, own: OwnValues) -> dict[str, np.ndarray]:
    """The values of all ranks by name: `[P]`, or `[P, n]` for a tensor.

    Args:
        own: the packed values of one rank, for names and sizes.
    """
    sizes = {name: v.size if isinstance(v, Tensor) else None for name, v in own.items()}
    ends = np.cumsum([1 if size is None else size for size in sizes.values()])
    columns = np.split(values_PK, ends[:-1], axis=1)
    return {
        name: values[:, 0] if size is None else values
        for (name, size), values in zip(sizes.items(), columns, strict=True)
    }


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
    return resident_bytes()
