"""Operations with a plain implementation, and faster kernels per device behind the same function.

The body of an operation is its plain implementation: Paddle operations that run on any device, are
differentiable, and can be traced into a program.

    @operation
    def rms_norm(x, weight_C, epsilon): ...

    @rms_norm.register("cpu")
    def _rms_norm_on_cpu(x, weight_C, epsilon): ...

A call takes the kernel of its first tensor's device. Without one, or while a program is traced, it
takes the plain implementation. `use_kernels` forces one choice, for tests.

Small operations are here too: sums, activations, slices, dropout of token rows, and the cross
entropy of tokens, of given logits or of a head's predictions in chunks. Over 350 lines, as every
batch passes these.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Generic, Literal, NamedTuple, ParamSpec, TypeVar, cast

import paddle
import paddle.nn.functional as F
from paddle import Tensor, nn
from paddle.autograd import PyLayer
from paddle.jit.dy2static.program_translator import convert_to_static

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
        kernels: other implementations, by device.
    """

    def __init__(self, plain: Callable[P, R]):
        functools.update_wrapper(self, plain)
        self.plain = plain
        self.kernels: dict[str | None, Callable[..., R]] = {}
        OPERATIONS.append(self)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        kernel = self.kernels.get(_device_of(args[0]))
        if kernel is None:
            # A traced program does not convert what is called through a reference by itself:
            # free sizes would be -1.
            kernel = self.plain if paddle.in_dynamic_mode() else convert_to_static(self.plain)
        return kernel(*args, **kwargs)

    def register(self, *devices: Device) -> Callable[[K], K]:
        """Decorator: the kernel for these devices in eager mode, a function of the same arguments
        or a `PyLayer` class."""

        def add(kernel: K) -> K:
            call: Any = getattr(kernel, "apply", kernel)
            self.kernels.update(dict.fromkeys(devices, call))
            return kernel

        return add


@paddle.jit.not_to_static
def operation(plain: Callable[P, R]) -> Operation[P, R]:
    """Decorator: make an `Operation` of a function whose first argument is a tensor."""
    if plain.__name__.startswith("_orig_"):
        # dy2static decorates the code again that it has made of a plain implementation.
        return cast(Any, plain)
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

    The caller divides by the count of the global batch. (Paddle 3.3.1's own mean also counts
    ignored rows if the ignored index is negative.)

    Args:
        weights_T: float32 factors of the rows in the sum; None for 1. They do not change the count.

    Returns:
        Two float32 scalars, sum and count.
    """
    return summed_cross_entropy(logits_TV, targets_T, weights_T), num_targets(targets_T)


def num_targets(targets_T: Tensor) -> Tensor:
    """Number of targets that are not `IGNORE_INDEX`, a float32 scalar."""
    return (targets_T != IGNORE_INDEX).astype("float32").sum()


def summed_cross_entropy(
    logits_TV: Tensor, targets_T: Tensor, weights_T: Tensor | None = None
) -> Tensor:
    """The sum of `token_loss`.

    Logits are cast to float32 first: a bfloat16 sum over the vocabulary is too coarse.
    """
    reduction = "sum" if weights_T is None else "none"
    total = F.cross_entropy(
        logits_TV.astype("float32"), targets_T, ignore_index=IGNORE_INDEX, reduction=reduction
    )
    return total if weights_T is None else (total.reshape([-1]) * weights_T).sum()


# Logits that exist at once in `summed_in_chunks`: rows of a chunk times this rank's vocabulary.
CHUNK_LOGITS = 1 << 27


class TargetRows(NamedTuple):
    """Token rows with a target, all of a batch's or more.

    Attributes:
        rows: `[R]` int64 row numbers, at least one.
        targets: `[R]` int64; `IGNORE_INDEX` counts as none.
        weights: `[R]` float32 factors of the rows in the loss; None for 1.
    """

    rows: Tensor
    targets: Tensor
    weights: Tensor | None = None


# The logits `[R, V]` of rows and parameters.
Predict = Callable[[Sequence[Tensor], Sequence[Tensor]], Tensor]


def summed_in_chunks(
    predict: Predict,
    rows: Sequence[Tensor],
    parameters: Sequence[Tensor],
    targets: TargetRows,
    vocab_size: int,
    cross_entropy: Callable[[Tensor, Tensor, Tensor | None], Tensor] = summed_cross_entropy,
) -> Tensor:
    """Summed cross entropy of a head's predictions; logits exist for one chunk of rows at a time.

    The gradients of a chunk are computed with its loss, as long as its logits exist. Backward only
    multiplies them by the gradient of the sum. Sums of the parameters' gradients over chunks are
    float32. The number of chunks follows from the shapes alone.

    Source: the order of work is that of Liger Kernel's fused linear cross entropy (Hsu et al.,
    https://arxiv.org/abs/2410.10989).

    Args:
        predict: logits of rows and parameters, row by row.
        rows: `[R, ...]` each, the inputs of the head.
        parameters: of the head; their gradients are summed over the chunks.
        targets: of the rows; its `rows` are not used.
        vocab_size: V of the logits on this rank.
        cross_entropy: of logits, targets and weights, summed; may be collective.

    Returns:
        A float32 scalar.
    """
    call = _ChunkedSum(predict, rows, parameters, targets, vocab_size, cross_entropy)
    given = [*rows, *parameters]
    if paddle.is_grad_enabled() and any(not value.stop_gradient for value in given):
        return cast(Tensor, _SumWithGradients.apply(call, *given))
    return sum((call.loss(*bounds) for bounds in call.bounds()), paddle.zeros([]))


class _ChunkedSum:
    """The arguments of `summed_in_chunks`; hides from `PyLayer` what it should not search."""

    def __init__(self, predict, rows, parameters, targets, vocab_size, cross_entropy):
        self.predict, self.cross_entropy, self.targets = predict, cross_entropy, targets
        self.rows, self.parameters = list(rows), list(parameters)
        self.num_rows = rows[0].shape[0]
        most = max(1, CHUNK_LOGITS // vocab_size)
        self.num_chunks = max(1, -(-self.num_rows // most))

    def bounds(self) -> Iterator[tuple[int, int]]:
        """Begin and end of every chunk; all have the same size, but for one row."""
        for number in range(self.num_chunks):
            begin, end = number * self.num_rows, (number + 1) * self.num_rows
            yield begin // self.num_chunks, end // self.num_chunks

    def loss(self, begin: int, end: int) -> Tensor:
        """The sum over the rows of a chunk."""
        return self._loss([x[begin:end] for x in self.rows], self.parameters, begin, end)

    def _loss(self, rows, parameters, begin: int, end: int) -> Tensor:
        weights_R = self.targets.weights
        return self.cross_entropy(
            self.predict(rows, parameters),
            self.targets.targets[begin:end],
            None if weights_R is None else weights_R[begin:end],
        )

    def with_gradients(self) -> tuple[Tensor, list[Tensor | None]]:
        """The sum over all rows, and its gradients by rows and parameters; None if frozen."""
        total = paddle.zeros([])
        of_rows: list[list[Tensor]] = [[] for _ in self.rows]
        of_parameters: list[Tensor | None] = [None] * len(self.parameters)
        for begin, end in self.bounds():
            rows = [_leaf(x, begin, end) for x in self.rows]
            # New ones for every chunk: Paddle would add up their gradients in their own dtype.
            parameters = [_leaf(parameter) for parameter in self.parameters]
            with paddle.enable_grad():
                loss = self._loss(rows, parameters, begin, end)
            loss.backward()
            total += loss.detach()
            for x, grads in zip(rows, of_rows, strict=True):
                if not x.stop_gradient:
                    grads.append(x.grad)
            for number, parameter in enumerate(parameters):
                if not parameter.stop_gradient:
                    grad, before = parameter.grad.astype("float32"), of_parameters[number]
                    of_parameters[number] = grad if before is None else before.add_(grad)
        joined = [_joined(grads) if grads else None for grads in of_rows]
        return total, [*joined, *of_parameters]


def _leaf(value: Tensor, begin: int = 0, end: int | None = None) -> Tensor:
    """The value, or some of its rows, with a gradient of its own."""
    own = value.detach()
    if end is not None:
        own = slice_axis(own, begin, end)
    own.stop_gradient = value.stop_gradient
    return own


def _joined(pieces: list[Tensor]) -> Tensor:
    return pieces[0] if len(pieces) == 1 else paddle.concat(pieces)


class _SumWithGradients(PyLayer):
    @staticmethod
    def forward(ctx, call, *given):
        ctx.dtypes = [value.dtype for value in given]
        total, ctx.grads = call.with_gradients()
        return total

    @staticmethod
    def backward(ctx, grad):
        grads, ctx.grads = ctx.grads, None
        return tuple(
            None if own is None else (own * grad).astype(dtype)
            for own, dtype in zip(grads, ctx.dtypes, strict=True)
        )
