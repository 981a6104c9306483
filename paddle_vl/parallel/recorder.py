"""Records every collective and point-to-point message of this rank, in order.

paddle.distributed and fleet's layers, pipeline and sharding all call methods of a process group; a
few operators communicate directly. Both are replaced while recording, for every backend. A call
counts once, even if its method (as with gloo) calls other methods.

Recordings measure the communication of a step independently of the machine; `collective_check` uses
them to stop at the first collective on which ranks disagree.
"""

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import paddle
import paddle.distributed as dist
from paddle import Tensor, _C_ops
from paddle.base import core
from paddle.distributed import collective

from paddle_vl.parallel.gloo_fleet import groups as gloo_groups

_MESSAGES = ("send", "recv")
# Ranks may contribute tensors of different length.
_UNEVEN = ("alltoall", "alltoall_single")
# Files whose frames are not shown; `<string>` is code without a file.
_NOT_SHOWN = (
    str(Path(__file__).parent),
    str(Path(__file__).parents[1] / "testing"),
    str(Path(paddle.__file__).parent),
    contextlib.__file__,
    "<",
)


class Collective(NamedTuple):
    """One collective or message on one rank.

    Attributes:
        phase: label of the recording, such as `forward`.
        kind: such as `all_reduce`; `send` and `recv` are messages.
        ranks: global ranks of the group, in its order; sender and receiver of a message.
        num_bytes: bytes that this rank contributes, or receives by a recv or a scatter.
        dtype, shape: of these data; empty for barriers. Several tensors add a first axis.
        detail: what else must agree, such as the operation of a reduction; not recorded.
    """

    phase: str
    kind: str
    ranks: tuple[int, ...]
    num_bytes: int
    dtype: str = ""
    shape: tuple[int, ...] = ()
    detail: str = ""

    @property
    def num_ranks(self) -> int:
        return len(self.ranks)

    @property
    def is_message(self) -> bool:
        return self.kind in _MESSAGES

    @property
    def agreed(self) -> tuple:
        """Values that must be equal on all ranks of a collective or both ends of a message."""
        # Fleet sends a number as [] and receives it as [1].
        shape = self.shape or (1,)
        if self.is_message:
            return self.dtype, shape
        return self.kind, self.dtype, () if self.kind in _UNEVEN else shape, self.detail

    def describe(self) -> str:
        """E.g. `all_gather of float32 [12, 4] in backward`."""
        what = f"{self.kind} ({self.detail})" if self.detail else self.kind
        what += f" of {self.dtype} {list(self.shape)}" if self.dtype else ""
        return f"{what} in {self.phase}" if self.phase else what


# By method of process groups: kind of its collective, and position of the argument that this rank
# contributes or receives; the group, a method's first argument, is not counted. Of a message the
# second argument is the other rank's number within the group.
_METHODS: dict[str, tuple[str, int | None]] = {
    "all_reduce": ("all_reduce", 0),
    "allreduce": ("all_reduce", 0),
    "reduce": ("reduce", 0),
    "broadcast": ("broadcast", 0),
    "all_gather": ("all_gather", 1),
    "all_gather_into_tensor": ("all_gather", 1),
    "all_gather_partial": ("all_gather", 1),
    "reduce_scatter": ("reduce_scatter", 1),
    "reduce_scatter_tensor": ("reduce_scatter", 1),
    "all_to_all": ("alltoall", 1),
    "all_to_all_tensor": ("alltoall", 1),
    "alltoall": ("alltoall", 0),
    "all_to_all_single": ("alltoall_single", 1),
    "alltoall_single": ("alltoall_single", 0),
    "scatter": ("scatter", 0),
    "scatter_tensor": ("scatter", 0),
    "gather": ("gather", 0),
    "send": ("send", 0),
    "send_partial": ("send", 0),
    "recv": ("recv", 0),
    "recv_partial": ("recv", 0),
    "barrier": ("barrier", None),
}
_ON_CALC_STREAM = "_on_calc_stream"
# Paddle's older overloads have the first two arguments swapped, and fewer arguments than this.
_SWAPPED_BELOW = {"all_gather": 3, "scatter": 4}
# Of these methods the third argument is the number of slices of which one is communicated.
_PARTIAL = "_partial"
# Methods without communication, or whose messages are recorded individually.
_SILENT_METHODS = {
    "rank", "size", "name", "_start_coalescing", "_end_coalescing", "eager_connect",
    "eager_connect_ring_exchange", "create", "create_default_device", "get_comm_name",
    "_pybind11_conduit_v1_",
}  # fmt: skip
# Operators that fleet calls in dynamic graphs and that communicate without a process group: kind,
# and position of the group's id; the first argument is contributed.
_OPERATORS = {
    "c_concat": ("all_gather", 3),
    "all_gather": ("all_gather", 1),
    "all_reduce": ("all_reduce", 1),
    "all_reduce_": ("all_reduce", 1),
    "mp_allreduce_sum": ("all_reduce", 1),
    "c_softmax_with_cross_entropy": ("all_reduce", 3),
}

Observe = Callable[[Collective], object]
# Observers of a thread that is a rank of its own.
_thread = threading.local()
_num_of_process = 0


@contextmanager
def observers_of_thread(observers: list[Observe]) -> Iterator[None]:
    """Inside the block `observed` of this thread adds to the list; its owner calls the entries."""
    _thread.observers = observers
    try:
        yield
    finally:
        _thread.observers = None


def is_process_observed() -> bool:
    """Whether a block of `observed` is entered that concerns the process."""
    return _num_of_process > 0


@contextmanager
def observed(observe: Observe) -> Iterator[None]:
    """Call `observe` on this rank right before each of its collectives and messages.

    On a simulated rank (`paddle_vl.testing`) that rank's only.

    Raises:
        RuntimeError: Paddle's process groups have a method that is not listed here.
    """
    own = getattr(_thread, "observers", None)
    if own is not None:
        own.append(observe)
        try:
            yield
        finally:
            own.remove(observe)
        return
    global _num_of_process
    running = threading.local()
    kept = []
    _num_of_process += 1
    try:
        for owner, name, see in _sites():
            kept.append((owner, name, vars(owner)[name]))
            setattr(owner, name, _observing(observe, running, getattr(owner, name), see))
        yield
    finally:
        _num_of_process -= 1
        for owner, name, function in reversed(kept):
            setattr(owner, name, function)


def _sites() -> Iterator[tuple[Any, str, Callable[..., list[Collective]]]]:
    """Owner and name of each function to replace, and a function that describes its calls."""
    for owner in [core.ProcessGroup, *core.ProcessGroup.__subclasses__()]:
        for name in list(vars(owner)):
            if name.removesuffix(_ON_CALC_STREAM) in _METHODS:
                yield owner, name, functools.partial(_described_method, name)
            elif not name.startswith("__") and name not in _SILENT_METHODS:
                raise RuntimeError(
                    f"paddlepaddle {paddle.__version__} has process groups with a method {name}, "
                    "which the recorder does not know: add it to paddle_vl/parallel/recorder.py"
                )
    for name in _OPERATORS:
        if name in vars(_C_ops):
            yield _C_ops, name, functools.partial(_described_operator, name)


def _observing(
    observe: Observe, running: threading.local, own: Callable, see: Callable[..., list[Collective]]
) -> Callable:
    @functools.wraps(own, assigned=("__name__", "__doc__"))
    def observing(*args: Any, **kwargs: Any) -> Any:
        if getattr(running, "is_inside", False):
            return own(*args, **kwargs)
        for call in see(args, kwargs):
            observe(call)
        running.is_inside = True
        try:
            return own(*args, **kwargs)
        finally:
            running.is_inside = False

    return observing


def _described_operator(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Collective]:
    kind, group = _OPERATORS[name]
    ranks = tuple(collective._get_group_map()[args[group]].ranks)
    if name != "c_softmax_with_cross_entropy":
        return [described_call(kind, ranks, args[0])]
    # Per row: the largest logit, the logit of the target, and the sum of the exponentials.
    return [described_call(kind, ranks, args[0][..., :1])] * 3


def _described_method(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Collective]:
    group, *given = args
    plain = name.removesuffix(_ON_CALC_STREAM)
    kind, position = _METHODS[plain]
    # Paddle passes tensors by position, options possibly by name.
    if position is not None and len(given) + len(kwargs) < _SWAPPED_BELOW.get(name, 0):
        position = 1 - position
    groups = collective._get_group_map().values()
    of_group = [known.ranks for known in groups if known.process_group is group]
    ranks = tuple(of_group[0] if of_group else gloo_groups.ranks_of(group))
    if kind in _MESSAGES:
        own, peer = dist.get_rank(), ranks[given[1]]
        ranks = (own, peer) if kind == "send" else (peer, own)
    slices = given[2] if plain.endswith(_PARTIAL) else 1
    return [described_call(kind, ranks, None if position is None else given[position], slices)]


def described_call(
    kind: str, ranks: tuple[int, ...], sent: Tensor | Sequence[Tensor] | None, slices: int = 1
) -> Collective:
    """A collective or message of these tensors, without a phase.

    Args:
        sent: None for a barrier.
        slices: into how many the tensor is cut, of which one is communicated.
    """
    if sent is None:
        return Collective("", kind, ranks, 0)
    tensors = [sent] if isinstance(sent, Tensor) else list(sent)
    dtype = str(tensors[0].dtype).removeprefix("paddle.")
    size = sum(tensor.size for tensor in tensors) // slices
    shape = tuple(tensors[0].shape)
    if not isinstance(sent, Tensor):
        alike = all(tensor.shape == tensors[0].shape for tensor in tensors)
        shape = (len(tensors), *shape) if alike else (size,)
    elif slices > 1:
        shape = (size,)
    return Collective("", kind, ranks, size * tensors[0].element_size(), dtype, shape)


@dataclass
class Recording:
    """Calls so far. Set `phase` to label those that follow."""

    phase: str = ""
    calls: list[Collective] = field(default_factory=list)

    def of(self, phase: str) -> list[Collective]:
        return [call for call in self.calls if call.phase == phase]


@contextmanager
def record_collectives() -> Iterator[Recording]:
    """Record this rank's collectives and messages while entered; they run as usual."""
    recording = Recording()

    def record(call: Collective) -> None:
        recording.calls.append(call._replace(phase=recording.phase))

    with observed(record):
        yield recording


def is_in_backward() -> bool:
    """Whether a backward pass called this function."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "backward":
            return True
        frame = frame.f_back
    return False


def caller() -> str:
    """The innermost frame outside Paddle and this package's parallel code."""
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_SHOWN):
        frame = frame.f_back
    path = Path(frame.f_code.co_filename)
    return f"{path.parent.name}/{path.name}:{frame.f_lineno} in {frame.f_code.co_name}"
