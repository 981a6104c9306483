"""Operations with a plain implementation, and faster kernels per device behind the same function.

The body of an operation is its plain implementation, its specification: Paddle operations that run
on any device and are differentiable.

    @operation
    def rms_norm(x, weight_C, epsilon): ...

`paddle_vl.nn.kernels` has the table of kernels: for each operation those to prefer, in order, each
with its device and a condition on its inputs. A call takes the first that fits, else the plain
implementation. `choose_kernels` narrows the choice of the whole process (the setting
`train.kernels`), `use_kernels` forces one inside a block.

Small operations are here too: sums, activations, norms, slices and dropout of token rows. Norms
are computed in float32 for activations of any dtype: a bfloat16 mean of squares over a wide row
would lose most of its bits.

Shapes: N rows, C channels; any number of leading dims.
"""

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Generic, Literal, ParamSpec, TypeVar, cast

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import Tensor, nn
from paddle.autograd import PyLayer
from paddle.nn.initializer import Constant

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
    """

    device: Device
    source: KernelSource
    run: Callable[..., Any]
    fits: Callable[..., bool] | None = None


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
        for kernel in self.kernels_on(device):
            if kernel.fits is None or kernel.fits(*args):
                return kernel.run
        return self.plain

    def kernels_on(self, device: str | None) -> list[Kernel]:
        """The kernels for a device that may be used now, in order of preference."""
        return [one for one in self.kernels if one.device == device and _is_used(one)]


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


class HostTable:
    """A table made of its arguments alone, as a tensor on the current device.

    It is copied there at the first call for these arguments; a later step copies nothing from the
    host.

    Args:
        make: the table from hashable arguments, as a NumPy array.

    Attributes:
        is_kept: False makes a new tensor at every call of any table.
    """

    is_kept = True
    _MOST = 256

    def __init__(self, make: Callable[..., np.ndarray]):
        functools.update_wrapper(self, make)
        self.make = make
        self._tensors: dict[tuple, Tensor] = {}

    def __call__(self, *args: Any) -> Tensor:
        key = (paddle.get_device(), *args)
        kept = self._tensors.get(key) if HostTable.is_kept else None
        if kept is not None:
            return kept
        table = device_tensor(self.make(*args))
        if HostTable.is_kept and isinstance(table, Tensor):
            while len(self._tensors) >= self._MOST:
                self._tensors.pop(next(iter(self._tensors)))
            self._tensors[key] = table
        return table


host_table = HostTable


@operation
def row_sum(x: Tensor) -> Tensor:
    """Sum over the last dim, which is kept: `[..., C]` to `[..., 1]`, in the dtype of `x`."""
    return x.sum(axis=-1, keepdim=True)


@operation
def column_sum(x_NC: Tensor) -> Tensor:
    """Sum over the rows: `[N, C]` to `[C]`, in the dtype of `x`."""
    return x_NC.sum(axis=0)


@operation
def gelu(x: Tensor, approximate: bool = False) -> Tensor:
    """GELU with the error function, or its tanh form."""
    return F.gelu(x, approximate)


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": gelu,
    "gelu_pytorch_tanh": lambda x: gelu(x, True),
    "silu": F.silu,
}
ACTIVATIONS = tuple(_ACTIVATIONS)


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """The function that a configuration's `hidden_act` names.

    Raises:
        ValueError: an unknown name, with the known ones.
    """
    if name not in _ACTIVATIONS:
        raise ValueError(f"hidden_act is {name!r}; this package has {sorted(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


@operation
def swiglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """`silu(gate) * up`, in one kernel; without `up` both are halves of `gate`'s last dim.

    Source: Shazeer, GLU Variants Improve Transformer, https://arxiv.org/abs/2002.05202.
    """
    return F.swiglu(gate, up)


@operation
def geglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """`gelu(gate) * up` with the tanh form of GELU, as in Gemma; without `up` both are halves of
    `gate`'s last dim."""
    if up is None:
        gate, up = paddle.chunk(gate, 2, axis=-1)
    return gelu(gate, True) * up


@operation
def dropout(x: Tensor, p: float) -> Tensor:
    """Zeroes entries with probability `p` and scales the others by `1 / (1 - p)`.

    What is dropped follows from the state of Paddle's random generator, and differs by device.
    """
    return F.dropout(x, p)


@operation
def times_constant(x: Tensor, constant: Tensor) -> Tensor:
    """`x * constant`, without a gradient of the constant."""
    return x * constant


class TimesConstant(PyLayer):
    """Keeps the constant only; autograd would keep `x` too."""

    @staticmethod
    def forward(ctx, x, constant):
        ctx.save_for_backward(constant)
        return x * constant

    @staticmethod
    def backward(ctx, grad):
        (constant,) = ctx.saved_tensor()
        return grad * constant, None


@operation
def rms_norm(x: Tensor, weight_C: Tensor, epsilon: float) -> Tensor:
    """`weight * (x / sqrt(mean(x^2) + epsilon))`, the mean over C.

    The quotient is computed in float32 and cast to the dtype of `x` before it is multiplied with
    the weight. Source: Qwen3VLTextRMSNorm of HF transformers.

    Args:
        x: `[..., C]`.

    Returns:
        `[..., C]` in the dtype of `x`, if the weight has that dtype too.
    """
    return _rms_quotient(x, epsilon).astype(x.dtype) * weight_C


def _rms_quotient(x: Tensor, epsilon: float) -> Tensor:
    x = x.astype("float32")
    return x * paddle.rsqrt(row_sum(x * x) / x.shape[-1] + epsilon)


@operation
def add_rms_norm(
    x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    """The sum of two `[T, D]`, and its `rms_norm`: a residual connection and the norm after it.

    Returns:
        Sum and norm, `[T, D]` in the dtype of `x`.
    """
    sum_TD = x_TD + residual_TD
    return sum_TD, rms_norm(sum_TD, weight_D, epsilon)


@operation
def gemma_rms_norm(x: Tensor, weight_C: Tensor, epsilon: float) -> Tensor:
    """Gemma's norm: `x / sqrt(mean(x^2) + epsilon) * (1 + weight)`, the mean over C.

    Computed in float32 and cast to the dtype of `x` at the end, unlike `rms_norm`.

    Args:
        x: `[..., C]`.

    Returns:
        `[..., C]` in the dtype of `x`.
    """
    scale_C = 1.0 + weight_C.astype("float32")
    return (_rms_quotient(x, epsilon) * scale_C).astype(x.dtype)


@operation
def rms_quotient(x: Tensor, epsilon: float) -> Tensor:
    """`x / sqrt(mean(x^2) + epsilon)` over the last dim, float32: a norm without a weight."""
    return _rms_quotient(x, epsilon)


@operation
def layer_norm(x: Tensor, weight_C: Tensor, bias_C: Tensor, epsilon: float) -> Tensor:
    """`weight * (x - mean) / sqrt(variance + epsilon) + bias`, mean and variance over C.

    Computed in float32 and cast to the dtype of `x` at the end, as torch's `layer_norm` does.

    Args:
        x: `[..., C]`.

    Returns:
        `[..., C]` in the dtype of `x`.
    """
    wide = x.astype("float32")
    centred = wide - row_sum(wide) / x.shape[-1]
    standard = centred * paddle.rsqrt(row_sum(centred * centred) / x.shape[-1] + epsilon)
    return (standard * weight_C.astype("float32") + bias_C.astype("float32")).astype(x.dtype)


class RMSNorm(nn.Layer):
    """`rms_norm` over the last dim with a learned weight that starts at one."""

    def __init__(self, size: int, epsilon: float = 1e-6):
        super().__init__()
        self.epsilon = epsilon
        self.weight = self.create_parameter([size], default_initializer=Constant(1.0))

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """The norm of `x`; with a residual `[T, D]`, the sum of both and its norm."""
        if residual is not None:
            return add_rms_norm(x, residual, self.weight, self.epsilon)
        return rms_norm(x, self.weight, self.epsilon)


class GemmaRMSNorm(nn.Layer):
    """`gemma_rms_norm` over the last dim: the learned weight starts at zero, its scale at one.

    Source: Gemma3RMSNorm and Qwen3_5RMSNorm of HF transformers.
    """

    def __init__(self, size: int, epsilon: float = 1e-6):
        super().__init__()
        self.epsilon = epsilon
        self.weight = self.create_parameter([size], default_initializer=Constant(0.0))

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """The norm of `x`; with a residual, the sum of both and its norm."""
        if residual is None:
            return gemma_rms_norm(x, self.weight, self.epsilon)
        total = x + residual
        return total, gemma_rms_norm(total, self.weight, self.epsilon)


class LayerNorm(nn.Layer):
    """`layer_norm` over the last dim; weight and bias start at one and zero."""

    def __init__(self, size: int, epsilon: float = 1e-6):
        super().__init__()
        self.epsilon = epsilon
        self.weight = self.create_parameter([size], default_initializer=Constant(1.0))
        self.bias = self.create_parameter([size], default_initializer=Constant(0.0))

    def forward(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.weight, self.bias, self.epsilon)


def slice_axis(x: Tensor, begin: int, end: int, axis: int = 0) -> Tensor:
    """`x[begin:end]` along an axis, always as an operation of the graph.

    Paddle leaves a full `x[:n]` out of the graph. Autograd would then visit the layers in another
    order than on a rank with a smaller slice, and collectives would not match.
    """
    return paddle.slice(x, [axis], [begin], [end])


def rows_in_order(x: Tensor, rows: np.ndarray) -> Tensor:
    """`x[rows]` for rows that come in few runs of consecutive ones, without a gradient.

    Slices in place of an index array, which would be copied to the device.
    """
    if not rows.size:
        return x[:0]
    runs = np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1)
    return paddle.concat([x[int(run[0]) : int(run[-1]) + 1] for run in runs])


def true_positions(mask_N: Tensor, count: int | None = None) -> Tensor:
    """Ascending positions of the True entries: int64 `[count]`.

    Args:
        count: their number, if known: nothing is searched then, which would make the host wait.
            With another one positions are missing, or 0 for those that are not there.
    """
    if count is None:
        return paddle.nonzero(mask_N).reshape([-1])
    # Other entries go to one place more, which is cut off.
    places_N = paddle.where(mask_N, mask_N.astype("int64").cumsum(0) - 1, count).clip(max=count)
    positions = paddle.zeros([count + 1], dtype="int64")
    return paddle.scatter(positions, places_N, paddle.arange(mask_N.shape[0]))[:count]


class RowDropout(nn.Layer):
    """In training, zeroes entries with probability `p` and scales the others by `1 / (1 - p)`.

    Attributes:
        random: makes the context of the draws; it switches the random state where the rows differ
            from rank to rank.
    """

    def __init__(self, p: float):
        super().__init__()
        self.p = p
        self.random: Callable[[], AbstractContextManager[None]] = nullcontext

    def forward(self, x_TD: Tensor) -> Tensor:
        if not (self.training and self.p):
            return x_TD
        with self.random():
            return dropout(x_TD, self.p)


class PinnedCopies:
    """Copies arrays to a GPU through pinned memory, on the compute stream: the host does not wait.
    The pinned memory is kept until its copy is over."""

    def __init__(self):
        self._in_flight: list[tuple[Any, Tensor]] = []

    def __call__(self, array: np.ndarray) -> Tensor:
        self._in_flight = [entry for entry in self._in_flight if not entry[0].query()]
        dtype: Any = str(array.dtype)
        tensor: Any = paddle.empty(array.shape, dtype)
        if not array.size:
            return tensor
        # Without a dtype: with one, Paddle 3.3 ignores the place.
        pinned = paddle.to_tensor(array, place=paddle.CUDAPinnedPlace())
        tensor.copy_(pinned, False)
        self._in_flight.append((paddle.device.current_stream().record_event(), pinned))
        return tensor


_pinned_copy = PinnedCopies()


def device_tensor(array: Any) -> Any:
    """An array as a tensor on the device; tensors and None are returned unchanged."""
    if not isinstance(array, np.ndarray):
        return array
    return _pinned_copy(array) if _copies_to_gpu() else paddle.to_tensor(array)


def _copies_to_gpu() -> bool:
    return paddle.get_device().startswith("gpu")


def host_array(array: Any) -> Any:
    """A tensor as a NumPy array, which waits for the device; arrays and None stay."""
    return array.numpy() if isinstance(array, Tensor) else array


def gradient_of(tensor: Tensor) -> Tensor | None:
    """The gradient for the optimizer: fleet's float32 `main_grad` if set, else `grad`."""
    main = getattr(tensor, "main_grad", None)
    return tensor.grad if main is None else main


def fill_gradient(tensor: Tensor) -> None:
    """Give a tensor without a gradient one of zeros; also each tensor of a flat bucket."""
    bucket = getattr(tensor, "bucket", None)
    if bucket is not None:
        bucket.fill()
    elif gradient_of(tensor) is None:
        tensor.grad = paddle.zeros_like(tensor)
