"""Operations with a plain implementation, and faster kernels per device behind the same function.

The body of an operation is its plain implementation, its specification: Paddle operations that run
on any device and are differentiable.

    @operation
    def rms_norm(x, weight_C, epsilon): ...

`paddle_vl.nn.kernels` has the table of kernels: for each operation those to prefer, in order, each
with its device and a condition on its inputs. A call takes the first that fits, else the plain
implementation. `choose_kernels` narrows the choice of the whole process (the setting
`train.kernels`), `use_kernels` forces one inside a block.

Small operations are here too: sums, activations, slices, dropout of token rows, and the cross
entropy of tokens, of given logits or of a head's predictions in chunks. Over 350 lines, as every
batch passes these.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Generic, Literal, NamedTuple, ParamSpec, TypeVar, cast, get_args

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import Tensor, nn
from paddle.autograd import PyLayer

Device = Literal["cpu", "gpu"]
Kernels = Literal["fused", "uncompiled", "plain"]
# What a kernel is made with.
Source = Literal["C", "oneDNN", "Paddle"]
P = ParamSpec("P")
R = TypeVar("R")

OPERATIONS: list["Operation[Any, Any]"] = []
# Gives an operation's implementation.
Choice = Callable[["Operation[Any, Any]"], Callable[..., Any]]
_chosen: Kernels = "fused"
_forced: Device | Literal["plain"] | Choice | None = None
_needs_gradient = True
_has_compiled = False


def _always(*args: Any, **kwargs: Any) -> bool:
    return True


@dataclass(frozen=True)
class Kernel:
    """An implementation of an operation for one device.

    Attributes:
        run: takes the operation's arguments.
        fits: whether it takes these arguments.
        has_gradient: False for one without a backward pass, for `without_gradient` only.
    """

    device: Device
    source: Source
    run: Callable[..., Any]
    fits: Callable[..., bool] = _always
    has_gradient: bool = True


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
        OPERATIONS.append(self)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.chosen(*args, **kwargs)(*args, **kwargs)

    def chosen(self, *args: P.args, **kwargs: P.kwargs) -> Callable[..., R]:
        """The implementation for these arguments, of which the first is a tensor."""
        if callable(_forced):
            return _forced(self)
        device = _forced or ("plain" if _chosen == "plain" else _device_of(args[0]))
        for kernel in self.kernels:
            if kernel.device == device and is_used(kernel) and kernel.fits(*args, **kwargs):
                return kernel.run
        return self.plain

    def kernels_on(self, device: str, has_gradient: bool = True) -> list[Kernel]:
        """The kernels for a device, in order of preference."""
        return [
            kernel
            for kernel in self.kernels
            if kernel.device == device and kernel.has_gradient == has_gradient
        ]


def is_used(kernel: Kernel) -> bool:
    """Whether the process may take a kernel now, whatever the arguments are."""
    if kernel.source == "C" and not (_has_compiled and _chosen != "uncompiled"):
        return False
    return kernel.has_gradient or not _needs_gradient


def operation(plain: Callable[P, R]) -> Operation[P, R]:
    """Decorator: make an `Operation` of a function whose first argument is a tensor."""
    if callable(_forced):
        # Code that a `Choice` derives from an operation's is decorated again.
        return cast(Any, plain)
    return Operation(plain)


def choose_kernels(kernels: Kernels) -> None:
    """Narrow the choice of kernels from now on, in the whole process.

    Args:
        kernels: `fused` takes any; `uncompiled` none in C; `plain` none at all: the plain
            implementations round after each operator as the original models do.

    Raises:
        ValueError: another choice.
    """
    global _chosen
    if kernels not in get_args(Kernels):
        raise ValueError(f"kernels is {kernels!r}; 'fused', 'uncompiled' or 'plain'")
    _chosen = kernels


def chosen_kernels() -> Kernels:
    """The last choice of `choose_kernels`; `fused` before the first."""
    return _chosen


def set_compiled(has_compiled: bool) -> None:
    """Tell whether the kernels in C are loaded."""
    global _has_compiled
    _has_compiled = has_compiled


@contextmanager
def use_kernels(choice: Device | Literal["plain"] | Choice) -> Iterator[None]:
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
def without_gradient() -> Iterator[None]:
    """Inside the block, kernels may be taken that have no backward pass.

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
        table = paddle.to_tensor(self.make(*args))
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


IGNORE_INDEX = -100
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


def zero_or_nan(counts: Sequence[tuple[Tensor, int]]) -> Tensor:
    """-0.0 if every mask has its number of True entries, else NaN: 0-D, without a host read.

    Added to a tensor it changes no bit, or makes it NaN.
    """
    value = paddle.full([], -0.0)
    for mask, count in counts:
        value = paddle.where(mask.astype("int64").sum() == count, value, float("nan"))
    return value


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
        rows: `[T, ...]` each, the inputs of the head; rows without a target are not read.
        parameters: of the head; their gradients are summed over the chunks.
        targets: their rows are all different.
        vocab_size: V of the logits on this rank.
        cross_entropy: of logits, targets and weights, summed; may be collective.

    Returns:
        A float32 scalar.
    """
    call = _ChunkedSum(predict, rows, parameters, targets, vocab_size, cross_entropy)
    given = [*rows, *parameters]
    if paddle.is_grad_enabled() and any(not value.stop_gradient for value in given):
        return cast(Tensor, _SumWithGradients.apply(call, *given))
    return sum(map(call.loss, call.chunks()), paddle.zeros([]))


class _ChunkedSum:
    """The arguments of `summed_in_chunks`; hides from `PyLayer` what it should not search."""

    def __init__(self, predict, rows, parameters, targets, vocab_size, cross_entropy):
        self.predict, self.cross_entropy, self.targets = predict, cross_entropy, targets
        self.rows, self.parameters = list(rows), list(parameters)
        self.num_rows = targets.rows.shape[0]
        most = max(1, CHUNK_LOGITS // vocab_size)
        self.num_chunks = max(1, -(-self.num_rows // most))

    def chunks(self) -> Iterator[TargetRows]:
        """The targets of every chunk; all have the same size, but for one row."""
        for number in range(self.num_chunks):
            begin, end = (n * self.num_rows // self.num_chunks for n in (number, number + 1))
            rows, targets, weights = self.targets
            yield TargetRows(
                slice_axis(rows, begin, end),
                slice_axis(targets, begin, end),
                None if weights is None else slice_axis(weights, begin, end),
            )

    def loss(self, chunk: TargetRows) -> Tensor:
        """The sum over the rows of a chunk."""
        rows = [paddle.index_select(x, chunk.rows) for x in self.rows]
        return self._loss(chunk, rows, self.parameters)

    def _loss(self, chunk: TargetRows, rows, parameters) -> Tensor:
        return self.cross_entropy(self.predict(rows, parameters), chunk.targets, chunk.weights)

    def with_gradients(self) -> tuple[Tensor, "_Gradients"]:
        """The sum over all rows, and its gradients."""
        total, grads = paddle.zeros([]), _Gradients(self.rows, self.parameters)
        for chunk in self.chunks():
            rows = [
                _leaf(paddle.index_select(x.detach(), chunk.rows), x.stop_gradient)
                for x in self.rows
            ]
            # New ones for every chunk: Paddle would add up their gradients in their own dtype.
            parameters = [_leaf(x.detach(), x.stop_gradient) for x in self.parameters]
            with paddle.enable_grad():
                loss = self._loss(chunk, rows, parameters)
            loss.backward()
            total += loss.detach()
            grads.add(chunk.rows, rows, parameters)
        return total, grads


def _leaf(value: Tensor, stop_gradient: bool) -> Tensor:
    value.stop_gradient = stop_gradient
    return value


class _Gradients:
    """Gradients of a sum in chunks, until the gradient of the sum is known."""

    def __init__(self, rows: Sequence[Tensor], parameters: Sequence[Tensor]):
        self.shapes, self.dtypes = [x.shape for x in rows], [x.dtype for x in parameters]
        # By chunk: row numbers, and the gradients of these rows.
        self.of_rows: list[tuple[Tensor, list[Tensor | None]]] = []
        self.of_parameters: list[Tensor | None] = [None] * len(parameters)

    def add(self, numbers: Tensor, rows: Sequence[Tensor], parameters: Sequence[Tensor]) -> None:
        """Take over the gradients of a chunk's leaves."""
        self.of_rows.append((numbers, [None if x.stop_gradient else x.grad for x in rows]))
        for number, parameter in enumerate(parameters):
            if not parameter.stop_gradient:
                own: Any = parameter.grad
                grad, total = own.astype("float32"), self.of_parameters[number]
                self.of_parameters[number] = grad if total is None else total.add_(grad)

    def times(self, factor: Tensor) -> list[Tensor | None]:
        """Of all rows and parameters, times a scalar; each is freed once it is not needed."""
        whole: list[Tensor | None] = [None] * len(self.shapes)
        while self.of_rows:
            numbers, grads = self.of_rows.pop(0)
            for i, grad in enumerate(grads):
                if grad is None:
                    continue
                own = whole[i]
                if own is None:
                    own = paddle.zeros(self.shapes[i], dtype=grad.dtype)
                # In float32: Paddle would round the factor to the gradient's dtype, which changes
                # all gradients alike.
                scaled = (grad.astype("float32") * factor).astype(grad.dtype)
                whole[i] = paddle.scatter_(own, numbers, scaled)
        of_parameters, self.of_parameters = self.of_parameters, []
        return whole + [
            None if grad is None else grad.multiply_(factor).astype(dtype)
            for grad, dtype in zip(of_parameters, self.dtypes, strict=True)
        ]


class _SumWithGradients(PyLayer):
    @staticmethod
    def forward(ctx, call, *given):
        total, ctx.grads = call.with_gradients()
        return total

    @staticmethod
    def backward(ctx, grad):
        return tuple(ctx.grads.times(grad))


def device_tensor(array: Any) -> Any:
    """An array as a tensor on the device; tensors and None are returned unchanged."""
    return paddle.to_tensor(array) if isinstance(array, np.ndarray) else array


def host_array(array: Any) -> Any:
    """A tensor as a NumPy array, which waits for the device; arrays and None stay."""
    return array.numpy() if isinstance(array, Tensor) else array
