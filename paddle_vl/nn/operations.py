"""Operations with a plain implementation, and faster kernels per device behind the same function.

The body of an operation is its plain implementation: Paddle operations that run on any device, are
differentiable, and can be traced into a program.

    @operation
    def rms_norm(x, weight_C, epsilon): ...

    @rms_norm.register("cpu")
    def _rms_norm_on_cpu(x, weight_C, epsilon): ...

A call takes the kernel of its first tensor's device. Without one, or while a program is traced, it
takes the plain implementation. `choose_kernels("plain")` makes every call of the process take it,
and `use_kernels` forces one choice, for tests. Generation and exported programs, which need no
gradient, run inside `without_gradient` and take kernels that have no backward pass:

    @rms_norm.register("cpu", "program", gradient=False)
    def _rms_norm_without_gradient(x, weight_C, epsilon): ...

Small operations are here too: sums, activations, slices, dropout of token rows, and the cross
entropy of tokens.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Generic, Literal, ParamSpec, TypeVar, cast

import paddle
import paddle.nn.functional as F
from paddle import Tensor, nn
from paddle.jit.dy2static.program_translator import convert_to_static

# "program" is any device of a traced program.
Device = Literal["cpu", "gpu", "program"]
P = ParamSpec("P")
R = TypeVar("R")
# A function or a `PyLayer` class.
K = TypeVar("K")

OPERATIONS: list["Operation[Any, Any]"] = []
Kernels = Literal["fused", "plain"]
_chosen: Kernels = "fused"
_forced: Device | Literal["plain"] | None = None
_needs_gradient = True


class Operation(Generic[P, R]):
    """A function that chooses its implementation by the device of its first argument.

    Attributes:
        plain: the implementation in plain Paddle operations.
        kernels: other implementations, by device.
        kernels_without_gradient: those that have no backward pass, by device.
    """

    def __init__(self, plain: Callable[P, R]):
        functools.update_wrapper(self, plain)
        self.plain = plain
        self.kernels: dict[str | None, Callable[..., R]] = {}
        self.kernels_without_gradient: dict[str | None, Callable[..., R]] = {}
        OPERATIONS.append(self)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.kernel_for(args[0])(*args, **kwargs)

    # Not converted: a converted function has copies of the module's variables.
    @paddle.jit.not_to_static
    def kernel_for(self, x: Any) -> Callable[..., R]:
        """The implementation for a tensor."""
        device, kernel = _device_of(x), None
        if not _needs_gradient:
            kernel = self.kernels_without_gradient.get(device)
        kernel = kernel or self.kernels.get(device, self.plain)
        if device in ("program", "plain") and not paddle.in_dynamic_mode():
            # A traced program does not convert what is called through a reference by itself:
            # free sizes would be -1.
            kernel = convert_to_static(kernel)
        return kernel

    def register(self, *devices: Device, gradient: bool = True) -> Callable[[K], K]:
        """Decorator: the kernel for these devices, a function of the same arguments or a `PyLayer`
        class.

        Args:
            gradient: False for a function without a backward pass, for `without_gradient` only.
        """
        kernels = self.kernels if gradient else self.kernels_without_gradient

        def add(kernel: K) -> K:
            call: Any = getattr(kernel, "apply", kernel)
            kernels.update(dict.fromkeys(devices, call))
            return kernel

        return add


@paddle.jit.not_to_static
def operation(plain: Callable[P, R]) -> Operation[P, R]:
    """Decorator: make an `Operation` of a function whose first argument is a tensor."""
    if plain.__name__.startswith("_orig_"):
        # dy2static decorates the code again that it has made of a plain implementation.
        return cast(Any, plain)
    return Operation(plain)


def choose_kernels(kernels: Kernels) -> None:
    """Take kernels or plain implementations from now on, in the whole process.

    Args:
        kernels: `fused` takes the kernels of the tensors' device; `plain` takes the plain
            implementations on every device, which round after each operator as the original
            models do. The setting `train.kernels`.

    Raises:
        ValueError: another choice.
    """
    global _chosen
    if kernels not in ("fused", "plain"):
        raise ValueError(f"kernels is {kernels!r}; 'fused' or 'plain'")
    _chosen = kernels


def chosen_kernels() -> Kernels:
    """The last choice of `choose_kernels`; `fused` before the first."""
    return _chosen


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


@contextmanager
def without_gradient() -> Iterator[None]:
    """Inside the block, take kernels that have no backward pass where a device has one.

    Not `paddle.no_grad`, under which activation recomputation runs too: there both passes must
    round alike.
    """
    global _needs_gradient
    before, _needs_gradient = _needs_gradient, False
    try:
        with paddle.no_grad():
            yield
    finally:
        _needs_gradient = before


def _device_of(x: Any) -> str | None:
    if _forced is not None:
        return _forced
    if _chosen == "plain":
        return "plain"
    if not paddle.in_dynamic_mode():
        return "program"
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


IGNORE_INDEX = -100
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate=True),
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


def slice_axis(x: Tensor, begin: int, end: int, axis: int = 0) -> Tensor:
    """`x[begin:end]` along an axis, always as an operation of the graph.

    Paddle leaves a full `x[:n]` out of the graph. Autograd would then visit the layers in another
    order than on a rank with a smaller slice, and collectives would not match.
    """
    return paddle.slice(x, [axis], [begin], [end])


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
            return F.dropout(x_TD, self.p)


def next_token_targets(labels_BL: Tensor) -> Tensor:
    """Labels shifted left by one, so that row i has the target of its prediction: `[B * L]` int64.

    The last position of every batch row gets `IGNORE_INDEX`.
    """
    ignored = paddle.full([labels_BL.shape[0], 1], IGNORE_INDEX, dtype=labels_BL.dtype)
    return paddle.concat([labels_BL[:, 1:], ignored], axis=1).reshape([-1])


def token_loss(
    logits_TV: Tensor, targets_T: Tensor, weights_T: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Cross entropy summed over the rows whose target is not `IGNORE_INDEX`, and their number.

    Logits are cast to float32 first: a bfloat16 sum over the vocabulary is too coarse. The caller
    divides by the count of the global batch. (Paddle 3.3.1's own mean also counts ignored rows if
    the ignored index is negative.)

    Args:
        weights_T: float32 factors of the rows in the sum; None for 1. They do not change the count.

    Returns:
        Two float32 scalars, sum and count.
    """
    reduction = "sum" if weights_T is None else "none"
    total = F.cross_entropy(
        logits_TV.astype("float32"), targets_T, ignore_index=IGNORE_INDEX, reduction=reduction
    )
    if weights_T is not None:
        total = (total.reshape([-1]) * weights_T).sum()
    count = (targets_T != IGNORE_INDEX).astype("float32").sum()
    return total, count
