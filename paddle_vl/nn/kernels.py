"""Operations with a plain implementation, and faster kernels by device behind the same function.

The body of an operation is its plain implementation: Paddle operations that any device computes,
that autograd differentiates, and that can be traced into a program.

    @operation
    def rms_norm(x, weight_C, epsilon): ...

    @rms_norm.register("cpu")
    def _rms_norm_on_cpu(x, weight_C, epsilon): ...

A call takes the kernel of the device on which its first tensor lies. Without one, or while a
program is traced, it takes the plain implementation. `use_kernels` forces one choice, for tests.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, Literal, ParamSpec, TypeVar

import paddle
from paddle import Tensor

Device = Literal["cpu", "gpu"]
P = ParamSpec("P")
R = TypeVar("R")
# A function or a `PyLayer` class.
K = TypeVar("K")

OPERATIONS: list["Operation[Any, Any]"] = []
_forced: Device | Literal["plain"] | None = None


class Operation(Generic[P, R]):
    """A function that chooses its implementation by the device of its first argument.

    Attributes:
        plain: the implementation in plain Paddle operations.
        kernels: the others, by device.
    """

    def __init__(self, plain: Callable[P, R]):
        functools.update_wrapper(self, plain)
        self.plain = plain
        self.kernels: dict[str | None, Callable[..., R]] = {}
        OPERATIONS.append(self)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.kernels.get(_device_of(args[0]), self.plain)(*args, **kwargs)

    def register(self, *devices: Device) -> Callable[[K], K]:
        """Decorator: on these devices, in eager mode, take a function of the same arguments, or the
        `apply` of a `PyLayer` class."""

        def add(kernel: K) -> K:
            call: Any = getattr(kernel, "apply", kernel)
            self.kernels.update(dict.fromkeys(devices, call))
            return kernel

        return add


def operation(plain: Callable[P, R]) -> Operation[P, R]:
    """Decorator: make an `Operation` of a function whose first argument is a tensor."""
    return Operation(plain)


@contextmanager
def use_kernels(device: Device | Literal["plain"]) -> Iterator[None]:
    """Take the kernels of this device, or the plain implementations, wherever tensors lie.

    For tests: the plain implementations, and code for GPUs on a machine without one. A backward
    pass must run inside the block too, since hand-written ones call operations.
    """
    global _forced
    before, _forced = _forced, device
    try:
        yield
    finally:
        _forced = before


def _device_of(x: Any) -> str | None:
    if _forced is not None:
        return _forced
    if not paddle.in_dynamic_mode():
        return None
    place = x.place
    if place.is_cpu_place():
        return "cpu"
    return "gpu" if place.is_gpu_place() else None


@operation
def row_sum(x: Tensor) -> Tensor:
    """Sum over the last dim, which is kept: `[..., C]` to `[..., 1]`, in the dtype of `x`."""
    return x.sum(axis=-1, keepdim=True)


@operation
def column_sum(x_NC: Tensor) -> Tensor:
    """Sum over the rows: `[N, C]` to `[C]`, in the dtype of `x`."""
    return x_NC.sum(axis=0)
