"""Where the host reads from the device: each such read waits until the device has come that far.

For counts that hold on any machine: on a CPU reading waits for nothing and happens at the same
places of the code.
"""

import functools
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import paddle

# All ways from a tensor to a number or an array; some of them go through others.
_READS = (
    "numpy",
    "item",
    "tolist",
    "cpu",
    "__float__",
    "__int__",
    "__bool__",
    "__index__",
    "__array__",
    "__dlpack__",
)
_TENSOR = type(paddle.zeros([0]))


@contextmanager
def record_host_reads() -> Iterator[list[str]]:
    """Collect `file:line` of every read of a tensor's values while entered, in order.

    A tensor that was put into host memory itself, such as a message between hosts, is not the
    device's, and its reads are not counted where the device is a GPU. On a CPU they are: what tells
    them apart there is the file they stand in.
    """
    reads: list[str] = []
    kept = {name: getattr(_TENSOR, name) for name in _READS if hasattr(_TENSOR, name)}
    is_inside = False

    def counting(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def read(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal is_inside
            if is_inside:
                return function(tensor, *args, **kwargs)
            is_inside = True
            try:
                if tensor.place.is_gpu_place() or paddle.get_device().startswith("cpu"):
                    reads.append(_place())
                return function(tensor, *args, **kwargs)
            finally:
                is_inside = False

        return read

    try:
        for name, function in kept.items():
            setattr(_TENSOR, name, counting(function))
        yield reads
    finally:
        for name, function in kept.items():
            setattr(_TENSOR, name, function)


def _place() -> str:
    """The line of this package, or of whoever called it, that reads."""
    frames = [f for f in traceback.extract_stack() if f.filename != __file__]
    own = [frame for frame in frames if "paddle_vl" in frame.filename]
    frame = (own or frames)[-1]
    return f"{frame.filename.rpartition('paddle_vl/')[2]}:{frame.lineno}"
