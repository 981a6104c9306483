"""Host reads, where the host waits for the device to have computed a value, and copies to it.

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

On a GPU `paddle.to_tensor` of an array copies from pageable memory on the null stream: it waits for
all kernels before it and holds up all behind it. Noticed are tensors made of arrays, numbers and
lists (`paddle.to_tensor`, `paddle.Tensor`), `paddle.assign` of an array and `Tensor.set_value`;
tensors that are asked for in host or pinned memory do not count.
"""

import functools
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from paddle import Tensor, _C_ops

from paddle_vl.parallel.simulated.group import SimulatedRank, current_rank

# Called before a call of a watched function, with its kind, its words, and the tensor that is read;
# None if it is no read.
_Notice = Callable[[str, str, Tensor | None], None]
_READ, _SHAPE, _COPY = "read", "shape", "copy"
_EVERY_THREAD = "every thread"


def _always(*args: Any, **kwargs: Any) -> bool:
    return True


def _is_by_bools(tensor: Tensor, index: Any, *value: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, Tensor) and part.dtype == paddle.bool for part in parts)


def _is_made_on_device(data: Any, dtype: Any = None, place: Any = None, *_: Any, **__: Any) -> bool:
    in_host_memory = place is not None and not str(place).lower().startswith(("gpu", "place(gpu"))
    return not (in_host_memory or isinstance(data, Tensor))


def _has_array(*args: Any, **kwargs: Any) -> bool:
    return any(isinstance(x, np.ndarray) for x in (*args, *kwargs.values()))


def _is_not_of_tensor(tensor: Tensor, value: Any) -> bool:
    return not isinstance(value, Tensor)


# Functions that are watched, what a call of them is, in which case, and its words. Some read by
# calling others.
_WATCHED: tuple[tuple[Any, tuple[str, ...], str, Callable[..., bool], str], ...] = (
    (
        Tensor,
        ("numpy", "item", "tolist", "cpu", "__float__", "__int__", "__bool__", "__index__",
         "__array__", "__dlpack__"),
        _READ, _always, "Tensor.{}()",
    ),
    (
        Tensor, ("__getitem__", "__setitem__"),
        _SHAPE, _is_by_bools, "Tensor.{} by a bool tensor, whose shape depends on values",
    ),
    (
        _C_ops,
        ("nonzero", "masked_select", "unique", "unique_consecutive",
         "repeat_interleave_with_tensor_index"),
        _SHAPE, _always, "{}, whose shape depends on values",
    ),
    (paddle, ("to_tensor",), _COPY, _is_made_on_device, "{}"),
    (Tensor, ("__init__",), _COPY, _has_array, "{}"),
    (Tensor, ("set_value",), _COPY, _is_not_of_tensor, "{}"),
    (_C_ops, ("assign_value", "assign_value_"), _COPY, _always, "{}"),
)  # fmt: skip


class _Watch:
    """The functions, replaced while at least one block is entered.

    Blocks of several simulated ranks overlap, so the functions are replaced once for all of them.
    """

    def __init__(self):
        self._lock, self._inside = threading.Lock(), threading.local()
        self._replaced: list[tuple[Any, str, Any]] = []
        # By simulated rank; None outside of a simulation.
        self._notices: dict[SimulatedRank | str | None, list[_Notice]] = {}

    @contextmanager
    def noticed(self, notice: _Notice, rank: SimulatedRank | str | None) -> Iterator[None]:
        """Call `notice` before each event of this simulated rank, of all code outside of one, or
        of every thread."""
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
        for owner, names, kind, happens, what in _WATCHED:
            for name in names:
                own = getattr(owner, name, None)
                if own is not None:
                    self._replaced.append((owner, name, own))
                    watched = self._watched(name, own, kind, happens, what)
                    setattr(owner, name, watched)

    def _watched(
        self, name: str, own: Callable, kind: str, happens: Callable[..., bool], what: str
    ) -> Callable:
        @functools.wraps(own, assigned=("__name__", "__doc__"))
        def watched(*args: Any, **kwargs: Any) -> Any:
            # A read that another one makes is not a second one; nor is a copy.
            inside = self._inside.__dict__.setdefault("copies" if kind == _COPY else "reads", [])
            is_noticed = not inside and happens(*args, **kwargs)
            if not is_noticed and kind != _COPY:
                return own(*args, **kwargs)
            inside.append(name)
            try:
                if is_noticed:
                    tensor = args[0] if kind == _READ else None
                    for rank in (current_rank(), _EVERY_THREAD):
                        for notice in list(self._notices.get(rank, ())):
                            notice(kind, what.format(name), tensor)
                return own(*args, **kwargs)
            finally:
                inside.pop()

        return watched


_watch = _Watch()


@contextmanager
def forbid_host_reads(shapes: bool = False) -> Iterator[None]:
    """Make every host read raise while the block runs; see the module for what is noticed.

    On a simulated rank only that rank's reads raise; elsewhere those of all threads.

    Args:
        shapes: forbid shapes that depend on values too, as in layers that search for nothing.

    Raises:
        AssertionError: in the block, at the read; names it.
    """
    kinds = (_READ, _SHAPE) if shapes else (_READ,)

    def refuse(kind: str, what: str, tensor: Tensor | None) -> None:
        if kind in kinds:
            raise AssertionError(f"host read: {what}")

    with _watch.noticed(refuse, current_rank()):
        yield


@contextmanager
def record_host_reads() -> Iterator[list[str]]:
    """Collect `file:line` of every host read of a tensor's values while entered, in order.

    On a GPU reads of tensors in host memory are not counted. On a CPU they are; the file tells them
    apart.
    """
    reads: list[str] = []

    def record(kind: str, what: str, x: Tensor | None) -> None:
        if x is not None and (x.place.is_gpu_place() or paddle.get_device().startswith("cpu")):
            reads.append(_calling_place())

    with _watch.noticed(record, current_rank()):
        yield reads


@contextmanager
def record_device_copies() -> Iterator[list[str]]:
    """Collect `file:line` of every copy to the device while entered, in order, of all threads.

    The same calls count on a CPU.
    """
    copies: list[str] = []

    def record(kind: str, what: str, tensor: Tensor | None) -> None:
        if kind == _COPY:
            copies.append(_calling_place())

    with _watch.noticed(record, _EVERY_THREAD):
        yield copies


def _calling_place() -> str:
    """`file:line` of the innermost frame in the package, else of the caller."""
    skipped = (str(Path(__file__).parent), str(Path(paddle.__file__).parent))
    frames = [f for f in traceback.extract_stack() if not f.filename.startswith(skipped)]
    own = [frame for frame in frames if "paddle_vl" in frame.filename]
    frame = (own or frames)[-1]
    return f"{frame.filename.rpartition('paddle_vl/')[2]}:{frame.lineno}"
