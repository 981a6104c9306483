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
from pathlib import Path
from typing import Any, NamedTuple

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


class _Read(NamedTuple):
    """A host read that is about to happen.

    Attributes:
        what: the call, for messages.
        tensor: the tensor read; None for an operator.
        is_shape: whether a shape depends on the values.
    """

    what: str
    tensor: Tensor | None = None
    is_shape: bool = False


_Notice = Callable[[_Read], None]


class _Watched:
    """Tensor's methods and the operators, replaced while at least one block is entered.

    Blocks of several simulated ranks overlap, so the functions are replaced once for all of them.
    """

    def __init__(self):
        self._lock, self._inside = threading.Lock(), threading.local()
        self._replaced: list[tuple[Any, str, Any]] = []
        # By simulated rank; None outside of a simulation.
        self._notices: dict[SimulatedRank | None, list[_Notice]] = {}

    @contextmanager
    def noticed(self, notice: _Notice) -> Iterator[None]:
        """Call `notice` before every read of this simulated rank, or of all code outside of one."""
        rank = current_rank()
        with self._lock:
            if not self._notices:
                self._replace()
            self._notices.setdefault(rank, []).append(notice)
        try:
            yield
        finally:
            with self._lock:
                self._notices[rank].remove(notice)
                if not self._notices[rank]:
                    del self._notices[rank]
                while self._replaced and not self._notices:
                    setattr(*self._replaced.pop())

    def _replace(self) -> None:
        for owner, names, describe in (
            (Tensor, _READS, _described_read),
            (Tensor, _INDEXING, _described_indexing),
            (_C_ops, _SHAPES, _described_operator),
        ):
            for name in names:
                own = getattr(owner, name, None)
                if own is not None:
                    self._replaced.append((owner, name, own))
                    setattr(owner, name, self._watched(name, own, describe))

    def _watched(self, name: str, own: Callable, describe: Callable) -> Callable:
        @functools.wraps(own, assigned=("__name__", "__doc__"))
        def watched(*args: Any, **kwargs: Any) -> Any:
            # A read that another one makes is not a second one.
            if getattr(self._inside, "value", False):
                return own(*args, **kwargs)
            read = describe(name, *args)
            if read is None:
                return own(*args, **kwargs)
            self._inside.value = True
            try:
                for notice in list(self._notices.get(current_rank(), ())):
                    notice(read)
                return own(*args, **kwargs)
            finally:
                self._inside.value = False

        return watched


_watched = _Watched()


@contextmanager
def forbid_host_reads(shapes: bool = False) -> Iterator[None]:
    """Make every host read raise while the block runs; see the module for what is noticed.

    On a simulated rank only that rank's reads raise; elsewhere those of all threads.

    Args:
        shapes: forbid shapes that depend on values too, as in layers that search for nothing.

    Raises:
        AssertionError: in the block, at the read; names it.
    """

    def refuse(read: _Read) -> None:
        if shapes or not read.is_shape:
            raise AssertionError(f"host read: {read.what}")

    with _watched.noticed(refuse):
        yield


@contextmanager
def record_host_reads() -> Iterator[list[str]]:
    """Collect `file:line` of every host read of a tensor's values while entered, in order.

    On a GPU reads of tensors in host memory are not counted. On a CPU they are; the file tells them
    apart.
    """
    reads: list[str] = []

    def record(read: _Read) -> None:
        if read.tensor is None or read.is_shape:
            return
        if read.tensor.place.is_gpu_place() or paddle.get_device().startswith("cpu"):
            reads.append(calling_place())

    with _watched.noticed(record):
        yield reads


def _described_read(name: str, tensor: Tensor, *args: Any) -> _Read:
    return _Read(f"Tensor.{name}()", tensor)


def _described_operator(name: str, *args: Any) -> _Read:
    return _Read(f"{name}, whose shape depends on values", is_shape=True)


def _described_indexing(name: str, tensor: Tensor, index: Any, *value: Any) -> _Read | None:
    parts = index if isinstance(index, tuple) else (index,)
    if any(isinstance(part, Tensor) and part.dtype == paddle.bool for part in parts):
        return _Read(f"Tensor.{name} by a bool tensor, whose shape depends on values", tensor, True)
    return None


def calling_place() -> str:
    """`file:line` of the innermost frame in the package, else of the caller."""
    skipped = (str(Path(__file__).parent), str(Path(paddle.__file__).parent))
    frames = [f for f in traceback.extract_stack() if not f.filename.startswith(skipped)]
    own = [frame for frame in frames if "paddle_vl" in frame.filename]
    frame = (own or frames)[-1]
    return f"{frame.filename.rpartition('paddle_vl/')[2]}:{frame.lineno}"
