"""Activations, layer norms and splits on the CPU by oneDNN, where Paddle's wheel contains it.

Paddle's kernels of these run in one thread or without vector instructions, and take up to five
times as long (docs/cpu_speed.md). Inputs that are not contiguous float32 go to these.

Shapes: N rows, C channels.
"""

import math
from collections.abc import Callable, Sequence
from itertools import accumulate

import paddle
from paddle import Tensor
from paddle.autograd import PyLayer

from paddle_vl.nn.cpu import onednn
from paddle_vl.nn.cpu.onednn import contiguous
from paddle_vl.nn.linear import split_columns
from paddle_vl.nn.norm import layer_norm
from paddle_vl.nn.operations import geglu, gelu, swiglu


def _activated(name: str, x: Tensor) -> Tensor:
    y = paddle.empty_like(x)
    onednn.eltwise(name, math.prod(x.shape))(x.data_ptr(), y.data_ptr())
    return y


class _Activation(PyLayer):
    """Keeps its input."""

    @staticmethod
    def forward(ctx, x, name):
        ctx.save_for_backward(x)
        ctx.name = name
        return _activated(name, x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensor()
        grad, grad_x = contiguous(grad), paddle.empty_like(x)
        run = onednn.eltwise_gradient(ctx.name, math.prod(x.shape))
        run(x.data_ptr(), grad.data_ptr(), grad_x.data_ptr())
        return grad_x


@gelu.register("cpu")
def _gelu(x: Tensor, approximate: bool = False) -> Tensor:
    if not onednn.takes(x):
        return gelu.plain(x, approximate)
    return _Activation.apply(x, "gelu_tanh" if approximate else "gelu_erf")


class _Gated(PyLayer):
    """`activation(gate) * up`; keeps both."""

    @staticmethod
    def forward(ctx, gate, up, name):
        ctx.save_for_backward(gate, up)
        ctx.needs, ctx.name = (not gate.stop_gradient, not up.stop_gradient), name
        return _activated(name, gate).multiply_(up)

    @staticmethod
    def backward(ctx, grad):
        gate, up = ctx.saved_tensor()
        grads = _gated_gradients(ctx.name, gate, up, contiguous(grad))
        return tuple(x if need else None for x, need in zip(grads, ctx.needs, strict=True))


class _GatedHalves(PyLayer):
    """The same of the halves of a tensor's rows; keeps contiguous copies of them."""

    @staticmethod
    def forward(ctx, both, name):
        gate, up = _split(both, [both.shape[-1] // 2] * 2)
        ctx.save_for_backward(gate, up)
        ctx.name = name
        return _activated(name, gate).multiply_(up)

    @staticmethod
    def backward(ctx, grad):
        gate, up = ctx.saved_tensor()
        return _joined(_gated_gradients(ctx.name, gate, up, contiguous(grad)))


def _gated_gradients(name: str, gate: Tensor, up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    grad_gate = grad * up
    address = grad_gate.data_ptr()
    onednn.eltwise_gradient(name, math.prod(gate.shape))(gate.data_ptr(), address, address)
    return grad_gate, _activated(name, gate).multiply_(grad)


@swiglu.register("cpu")
def _swiglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    return _gated(swiglu.plain, "swish", gate, up)


@geglu.register("cpu")
def _geglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    return _gated(geglu.plain, "gelu_tanh", gate, up)


def _gated(plain: Callable[..., Tensor], name: str, gate: Tensor, up: Tensor | None) -> Tensor:
    if up is None and onednn.takes(gate):
        return _GatedHalves.apply(gate, name)
    if up is not None and up.shape == gate.shape and onednn.takes(gate, up):
        return _Gated.apply(gate, up, name)
    return plain(gate, up)


@split_columns.register("cpu")
def _split_columns(x: Tensor, widths: Sequence[int]) -> Sequence[Tensor]:
    if len(widths) < 2 or not onednn.takes(x):
        return split_columns.plain(x, widths)
    return _SplitColumns.apply(x, widths)


class _SplitColumns(PyLayer):
    @staticmethod
    def forward(ctx, x, widths):
        return tuple(_split(x, widths))

    @staticmethod
    def backward(ctx, *grads):
        return _joined([contiguous(grad) for grad in grads])


def _split(x: Tensor, widths: Sequence[int]) -> list[Tensor]:
    columns, rows, parts = x.shape[-1], math.prod(x.shape[:-1]), []
    for width, address in zip(widths, _column_addresses(x, widths), strict=True):
        parts.append(paddle.empty([*x.shape[:-1], width], x.dtype))
        copy = onednn.copy(rows, width, columns, width)
        copy(address, parts[-1].data_ptr())
    return parts


def _joined(parts: Sequence[Tensor]) -> Tensor:
    widths = [part.shape[-1] for part in parts]
    columns, rows = sum(widths), math.prod(parts[0].shape[:-1])
    x = paddle.empty([*parts[0].shape[:-1], columns], parts[0].dtype)
    for part, width, address in zip(parts, widths, _column_addresses(x, widths), strict=True):
        onednn.copy(rows, width, width, columns)(part.data_ptr(), address)
    return x


def _column_addresses(x: Tensor, widths: Sequence[int]) -> list[int]:
    """Where the first row of each part begins."""
    begins = [0, *accumulate(widths[:-1])]
    return [x.data_ptr() + x.element_size() * begin for begin in begins]


class _LayerNorm(PyLayer):
    """Keeps its input and two numbers per row."""

    @staticmethod
    def forward(ctx, x, weight, bias, epsilon):
        channels = x.shape[-1]
        rows, y = math.prod(x.shape[:-1]), paddle.empty_like(x)
        mean_N, variance_N = paddle.empty([rows], x.dtype), paddle.empty([rows], x.dtype)
        tensors = (x, y, mean_N, variance_N, weight, bias)
        onednn.layer_norm(rows, channels, epsilon)(*(t.data_ptr() for t in tensors))
        ctx.save_for_backward(x, mean_N, variance_N, weight, bias)
        ctx.needs = [not t.stop_gradient for t in (x, weight, bias)]
        ctx.epsilon = epsilon
        return y

    @staticmethod
    def backward(ctx, grad):
        kept = x, _, _, weight, bias = ctx.saved_tensor()
        grads = paddle.empty_like(x), paddle.empty_like(weight), paddle.empty_like(bias)
        run = onednn.layer_norm_gradient(math.prod(x.shape[:-1]), x.shape[-1], ctx.epsilon)
        tensors = (x, contiguous(grad), *kept[1:], *grads)
        run(*(t.data_ptr() for t in tensors))
        return tuple(g if need else None for g, need in zip(grads, ctx.needs, strict=True))


_layer_norm_in_paddle = layer_norm.kernels["cpu"]


@layer_norm.register("cpu")
def _layer_norm(x: Tensor, weight_C: Tensor, bias_C: Tensor, epsilon: float) -> Tensor:
    if not onednn.takes(x, weight_C, bias_C):
        return _layer_norm_in_paddle(x, weight_C, bias_C, epsilon)
    return _LayerNorm.apply(x, weight_C, bias_C, epsilon)
