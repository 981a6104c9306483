"""Host-to-device copies: places where data of the host becomes a tensor on the device.

On a GPU `paddle.to_tensor` of an array copies from pageable memory on the null stream: it waits for
all kernels before it and holds up all behind it. Noticed are tensors made of arrays, numbers and
lists (`paddle.to_tensor`, `paddle.Tensor`), `paddle.assign` of an array and `Tensor.set_value`. The
same calls count on a CPU. Tensors that are asked for in host or pinned memory do not.
"""

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import paddle
from paddle import Tensor, _C_ops

from paddle_vl.testing.host_reads import calling_place

_OPERATORS = ("assign_value", "assign_value_")


@contextmanager
def record_device_copies() -> Iterator[list[str]]:
    """Collect `file:line` of every copy to the device while entered, in order, of all threads."""
    found: list[str] = []
    inside = threading.local()

    def noting(own: Callable[..., Any], counts: Callable[..., bool]) -> Callable[..., Any]:
        @functools.wraps(own, assigned=("__name__", "__doc__"))
        def call(*args: Any, **kwargs: Any) -> Any:
            if getattr(inside, "value", False):
                return own(*args, **kwargs)
            inside.value = True
            try:
                if counts(*args, **kwargs):
                    found.append(calling_place())
                return own(*args, **kwargs)
            finally:
                inside.value = False

        return call

    replaced = [
        (paddle, "to_tensor", _is_copied),
        (Tensor, "__init__", _is_made_of_array),
        (Tensor, "set_value", lambda self, value: not isinstance(value, Tensor)),
        *((_C_ops, name, lambda *args: True) for name in _OPERATORS if hasattr(_C_ops, name)),
    ]
    kept = [(owner, name, getattr(owner, name)) for owner, name, _ in replaced]
    for (owner, name, counts), (_, _, own) in zip(replaced, kept, strict=True):
        setattr(owner, name, noting(own, counts))
    try:
        yield found
    finally:
        for owner, name, own in kept:
            setattr(owner, name, own)


def _is_copied(data: Any, dtype: Any = None, place: Any = None, *_: Any, **__: Any) -> bool:
    in_host_memory = place is not None and not str(place).lower().startswith(("gpu", "place(gpu"))
    return not in_host_memory and not isinstance(data, Tensor)


def _is_made_of_array(self: Tensor, *args: Any, **kwargs: Any) -> bool:
    return any(isinstance(x, np.ndarray) for x in (*args, *kwargs.values()))
