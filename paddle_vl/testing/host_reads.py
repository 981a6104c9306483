"""Host reads: places where the host waits for the device to have computed a value.

| read | how it is noticed |
| --- | --- |
| `numpy`, `item`, `tolist`, `cpu`, `__array__` (`np.asarray`), `__dlpack__`, `bool`, `int`, \
`float`, an index, and printing, which calls `numpy` | methods of `Tensor` |
| shapes that depend on values: `nonzero`, `masked_select`, `unique`, `unique_consecutive`, \
`repeat_interleave` with a tensor, indexing by a bool tensor | operators and `Tensor` indexing; \
`forbid_host_reads` only |

Not noticed: reads inside a compiled operator other than these (an argument such as a shape, an axis
or a section size given as a tensor is read by Paddle's own code), `paddle.save`, and copies by
`Tensor.to` or `copy_`. On a CPU the same calls count as on a GPU, although they wait for nothing.
"""

import functools
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import paddle
from paddle import Tensor, _C_ops

from paddle_vl.parallel.simulated.current import SimulatedRank, current_rank

# Methods that read a tensor's values on the host; some call others.
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
# Operators whose output shapes depend on values.
_SHAPES = (
    "nonzero",
    "masked_select",
    "unique",
    "unique_consecutive",
    "repeat_interleave_with_tensor_index",
)
_INDEXING = ("__getitem__", "__setitem__")
# Replaced while at least one block is entered, by whichever simulated rank or thread.
_lock, _replaced, _num_entered = threading.Lock(), [], 0
# By simulated rank, None outside: the number of blocks, and of those that allow shapes.
_forbidding: dict[SimulatedRank | None, list[bool]] = {}


@contextmanager
def forbid_host_reads(shapes: bool = False) -> Iterator[None]:
    """Make every host read raise while the block runs; see the module for what is noticed.

    On a simulated rank only that rank's reads raise; elsewhere those of all threads.

    Args:
        shapes: forbid shapes that depend on values too, as in layers that search for nothing.

    Raises:
        AssertionError: in the block, at the read; names it.
    """
    rank = current_rank()
    _enter(rank, shapes)
    try:
        yield
    finally:
        _leave(rank, shapes)


@contextmanager
def record_host_reads() -> Iterator[list[str]]:
    """Collect `file:line` of every host read of a tensor's values while entered, in order.

    On a GPU reads of tensors in host memory are not counted. On a CPU they are; the file tells them
    apart.
    """
    reads: list[str] = []
    kept = {name: getattr(Tensor, name) for name in _READS if hasattr(Tensor, name)}
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
            setattr(Tensor, name, counting(function))
        yield reads
    finally:
        for name, function in kept.items():
            setattr(Tensor, name, function)


def _place() -> str:
    """`file:line` of the innermost frame in the package, else of the caller."""
    frames = [f for f in traceback.extract_stack() if f.filename != __file__]
    own = [frame for frame in frames if "paddle_vl" in frame.filename]
    frame = (own or frames)[-1]
    return f"{frame.filename.rpartition('paddle_vl/')[2]}:{frame.lineno}"


def _enter(rank: SimulatedRank | None, shapes: bool) -> None:
    global _num_entered
    with _lock:
        _forbidding.setdefault(rank, []).append(shapes)
        _num_entered += 1
        if _num_entered > 1:
            return
        for owner, names, guarded in (
            (Tensor, _READS, _guarded_read),
            (Tensor, _INDEXING, _guarded_indexing),
            (_C_ops, _SHAPES, _guarded_operator),
        ):
            for name in names:
                own = getattr(owner, name, None)
                if own is not None:
                    _replaced.append((owner, name, own))
                    setattr(owner, name, guarded(name, own))


def _leave(rank: SimulatedRank | None, shapes: bool) -> None:
    global _num_entered
    with _lock:
        _forbidding[rank].remove(shapes)
        if not _forbidding[rank]:
            del _forbidding[rank]
        _num_entered -= 1
        if _num_entered == 0:
            while _replaced:
                setattr(*_replaced.pop())


def _refuse(read: str, is_shape: bool = False) -> None:
    blocks = _forbidding.get(current_rank(), [])
    if any(blocks) if is_shape else blocks:
        raise AssertionError(f"host read: {read}")


def _guarded_read(name: str, own: Callable) -> Callable:
    @functools.wraps(own, assigned=("__name__", "__doc__"))
    def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        _refuse(f"Tensor.{name}()")
        return own(tensor, *args, **kwargs)

    return read


def _guarded_operator(name: str, own: Callable) -> Callable:
    @functools.wraps(own, assigned=("__name__", "__doc__"))
    def operator(*args: Any, **kwargs: Any) -> Any:
        _refuse(f"{name}, whose shape depends on values", is_shape=True)
        return own(*args, **kwargs)

    return operator


def _guarded_indexing(name: str, own: Callable) -> Callable:
    @functools.wraps(own, assigned=("__name__", "__doc__"))
    def indexed(tensor: Tensor, index: Any, *value: Any) -> Any:
        parts = index if isinstance(index, tuple) else (index,)
        if any(isinstance(part, Tensor) and part.dtype == paddle.bool for part in parts):
            _refuse(f"Tensor.{name} by a bool tensor, whose shape depends on values", True)
        return own(tensor, index, *value)

    return indexed
