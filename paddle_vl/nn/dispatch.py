"""Operations with a plain implementation, and faster kernels per device behind the same function.

The body of an operation is its plain implementation, its specification: Paddle operations that run
on any device and are differentiable.

    @operation
    def rms_norm(x, weight_C, epsilon): ...

`paddle_vl.nn.kernels` has the table of kernels: for each operation those to prefer, in order, each
with its device and a condition on its inputs. A call takes the first that fits, else the plain
implementation. `choose_kernels` narrows the choice of the whole process (the setting
`train.kernels`), `use_kernels` forces one inside a block.
"""

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, Literal, ParamSpec, TypeVar, cast

import paddle

Device = Literal["cpu", "gpu"]
Kernels = Literal["fused", "uncompiled", "plain"]
# What a kernel is made with.
KernelSource = Literal["C", "oneDNN", "Paddle"]
P = ParamSpec("P")
R = TypeVar("R")

OPERATIONS: list["Operation[Any, Any]"] = []
# Gives an operation's implementation.
KernelChoice = Callable[["Operation[Any, Any]"], Callable[..., Any]]
_chosen: Kernels = "fused"
_forced: Device | Literal["plain"] | KernelChoice | None = None
_has_compiled = False
# Called with an operation, its positional arguments and its result; None outside of `watched`.
_watch: Callable[[Any, tuple[Any, ...], Any], None] | None = None


@dataclass(frozen=True)
class Kernel:
    """An implementation of an operation for one device.

    Attributes:
        run: takes the operation's arguments.
        fits: whether it takes these arguments; None for all.
        is_for_answers: whether it takes only a first argument that is not differentiated.
    """

    device: Device
    source: KernelSource
    run: Callable[..., Any]
    fits: Callable[..., bool] | None = None
    is_for_answers: bool = False


class Operation(Generic[P, R]):
    """A function that chooses its implementation by its arguments.

    Attributes:
        plain: the implementation in plain Paddle operations.
        kernels: the others in order of preference; set by `paddle_vl.nn.kernels`.
    """

    def __init__(self, plain: Callable[P, R]):
        functools.update_wrapper(self, plain)
        self.plain = plain
        self.kernels: Sequence[Kernel] = ()
        self._signature = inspect.signature(plain)
        OPERATIONS.append(self)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if kwargs:
            # Kernels name their arguments as they like.
            bound = self._signature.bind(*args, **kwargs)
            bound.apply_defaults()
            return cast(Any, self)(*bound.args)
        result = self.chosen(*args)(*args)
        if _watch is not None:
            _watch(self, args, result)
        return result

    def chosen(self, *args: Any) -> Callable[..., R]:
        """The implementation for these arguments, of which the first is a tensor."""
        if callable(_forced):
            return _forced(self)
        device = "plain" if _chosen == "plain" and not _forced else device_of(args[0])
        for kernel in self.kernels:
            is_used = kernel.device == device and _is_used(kernel)
            if kernel.is_for_answers and paddle.is_grad_enabled() and not args[0].stop_gradient:
                continue
            if is_used and (kernel.fits is None or kernel.fits(*args)):
                return kernel.run
        return self.plain

    def kernels_on(self, device: str | None) -> list[Kernel]:
        """The kernels for a device that may be used now, in order of preference."""
        return [one for one in self.kernels if one.device == device and _is_used(one)]


def on_both(layer: Any) -> list[Kernel]:
    """A `PyLayer` in Paddle operations as the kernel of both devices."""
    return [Kernel("cpu", "Paddle", layer.apply), Kernel("gpu", "Paddle", layer.apply)]


def _is_used(kernel: Kernel) -> bool:
    return kernel.source != "C" or (_has_compiled and _chosen != "uncompiled")


def operation(plain: Callable[P, R]) -> Operation[P, R]:
    """Decorator: make an `Operation` of a function whose first argument is a tensor."""
    if callable(_forced):
        # Code that a `KernelChoice` derives from an operation's is decorated again.
        return cast(Any, plain)
    return Operation(plain)


def choose_kernels(kernels: Kernels) -> None:
    """Narrow the choice of kernels from now on, in the whole process.

    Args:
        kernels: `fused` takes any; `uncompiled` none in C; `plain` none at all: the plain
            implementations round after each operator as the original models do.
    """
    global _chosen
    _chosen = kernels


def chosen_kernels() -> Kernels:
    """The last choice of `choose_kernels`; `fused` before the first."""
    return _chosen


def set_compiled(are_loaded: bool) -> None:
    """Tell whether the kernels in C are loaded."""
    global _has_compiled
    _has_compiled = are_loaded


def has_compiled() -> bool:
    """Whether the kernels in C are loaded."""
    return _has_compiled


@contextmanager
def use_kernels(choice: Device | Literal["plain"] | KernelChoice) -> Iterator[None]:
    """Take the kernels of this device, or the plain implementations, wherever tensors lie; or what
    a function gives for an operation.

    For programs, and for tests: the plain implementations, and code for GPUs on a machine without
    one. A backward pass must run inside the block too, since hand-written ones call operations.
    """
    global _forced
    before, _forced = _forced, choice
    try:
        yield
    finally:
        _forced = before


@contextmanager
def watched(watch: Callable[[Any, tuple[Any, ...], Any], None]) -> Iterator[None]:
    """Tell of each operation inside the block, its positional arguments and its result."""
    global _watch
    before, _watch = _watch, watch
    try:
        yield
    finally:
        _watch = before


def device_of(x: Any) -> str | None:
    """The device whose kernels take a tensor: where it lies, if `use_kernels` does not say."""
    if _forced is not None and not callable(_forced):
        return _forced
    place = x.place
    if place.is_cpu_place():
        return "cpu"
    return "gpu" if place.is_gpu_place() else None
