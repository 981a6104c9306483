"""Counts the kernels that a GPU would launch, and the bytes kept for the backward pass.

A layer runs on the CPU in float64, which stands for bfloat16 (see `contract`), forward and backward
under Paddle's profiler. Each kernel that Paddle starts is one launch; a stand-in is as many as its
kernel starts. Views of memory are none. A kernel of flash attention counts as one launch, and its
gradient as one.

Not seen: copies that Paddle makes before its own kernels of tensors that are not contiguous.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import paddle
import paddle.nn.functional as F
import pytest
from paddle import Tensor, _C_ops, profiler
from paddle.autograd import PyLayer

from tests.support.gpu_stubs.contract import contiguous, halves_are, launched, launches_of
from tests.support.gpu_stubs.installed import gpu_stubs
from tests.support.gpu_stubs.machine import STUBS
from tests.support.gpu_stubs.pretended import pretended_gpu

# Operators that return views of their input, or memory that is not written.
VIEWS = frozenset(
    [
        *("reshape", "transpose", "slice", "strided_slice", "unsqueeze", "squeeze", "flatten"),
        *("expand_as", "share_data", "unbind", "empty"),
    ]
)
# The dtype that stands for bfloat16.
_HALF = "float64"
# Paddle's kernels that start more than one.
_SEVERAL = {"matmul_grad": 2}
# Bytes of a value on a GPU.
_BYTES = {"float64": 2, "float32": 4, "int64": 8, "int32": 4, "bool": 1}


@dataclass(frozen=True)
class LayerCounts:
    """What a layer does in one pass.

    Attributes:
        forward, backward: launches by kernel.
        saved: bytes kept from the forward pass for the backward pass, without those of `shared`.
    """

    forward: Counter
    backward: Counter
    saved: int

    @property
    def launches(self) -> tuple[int, int]:
        """Launches forward and backward."""
        return self.forward.total(), self.backward.total()


def counted(
    layer: Callable[..., Any],
    inputs: list[Tensor],
    kernels: Literal["gpu", "plain"],
    shared: Iterable[Tensor] = (),
) -> LayerCounts:
    """Run a layer forward and backward and count.

    Args:
        layer: takes the inputs; returns a tensor, or several.
        inputs: float64, with gradients.
        shared: tensors that are kept anyway: parameters, and what all layers have in common.
    """
    saved: dict[int, int] = {}
    known = {tensor.data_ptr() for tensor in shared}

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.data_ptr()] = max(saved.get(tensor.data_ptr(), 0), _size(tensor))
        return tensor

    with _gpu(kernels):
        # Once without counting, for what is made once.
        outputs = _tuple(layer(*inputs))
        paddle.autograd.backward(list(outputs), _ones(outputs))
        with paddle.autograd.saved_tensors_hooks(pack, lambda tensor: tensor):
            forward, outputs = _launches(lambda: _tuple(layer(*inputs)))
        grads = _ones(outputs)
        for tensor in inputs:
            tensor.clear_gradient(set_to_zero=False)
        backward, _ = _launches(lambda: paddle.autograd.backward(list(outputs), grads))
    own = sum(size for pointer, size in saved.items() if pointer not in known)
    return LayerCounts(forward, backward, own)


def _tuple(found: Any) -> tuple[Tensor, ...]:
    tensors = found if isinstance(found, tuple) else (found,)
    return tuple(x for x in tensors if isinstance(x, Tensor) and not x.stop_gradient)


def _ones(outputs: tuple[Tensor, ...]) -> list[Tensor]:
    return [paddle.ones_like(x) for x in outputs]


def _size(tensor: Tensor) -> int:
    return tensor.size * _BYTES[str(tensor.dtype).removeprefix("paddle.")]


def _launches(run: Callable[[], Any]) -> tuple[Counter, Any]:
    found: Counter = Counter()
    profile = profiler.Profiler(
        targets=[profiler.ProfilerTarget.CPU], on_trace_ready=lambda _: None
    )
    profile.start()
    result = run()
    profile.stop()

    def walk(node: Any) -> None:
        marked = launches_of(node.name)
        if marked is not None:
            found[marked[0]] += marked[1]
            return
        if node.type == profiler.TracerEventType.DygraphKernelLaunch:
            name = node.name.removesuffix(" kernel launch")
            if name.removesuffix("_grad") not in VIEWS:
                found[name] += _SEVERAL.get(name, 1)
        for child in node.children_node:
            walk(child)

    for root in profile.profiler_result.get_data().values():
        walk(root)
    # The three numbers of a range are on the host.
    found["full"] -= 3 * found["arange_tensor"]
    return +found, result


@contextmanager
def _gpu(kernels: Literal["gpu", "plain"]) -> Iterator[None]:
    """Paddle's choices on a GPU; attention's kernels and `linear_v2` count."""
    with (
        gpu_stubs(),
        halves_are(_HALF),
        pretended_gpu(stand_in=_HALF, kernels=kernels),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(F, "linear", _linear)
        for name in STUBS:
            patch.setattr(_C_ops, name, partial(_attend, name, getattr(_C_ops, name)))
        yield


def _attend(name: str, stub: Callable[..., Any], q, k, v, *arguments):
    compute = partial(_quiet, stub, arguments)
    out = _Attention.apply(name, compute, *contiguous(q, k, v))
    # The kernels return more, which this package does not use.
    return (out, *[None] * 3) if name in ("flash_attn", "flashmask_attention") else (out, None)


def _quiet(stub: Callable[..., Any], arguments: tuple, *tensors: Tensor) -> Tensor:
    with paddle.no_grad():
        return stub(*tensors, *arguments)[0]


class _Attention(PyLayer):
    """Launches of attention and what it keeps: inputs, result, and the rows' log-sums."""

    @staticmethod
    def forward(ctx, name, compute, q, k, v):
        with launched(name):
            out = compute(q, k, v).contiguous()
            sums = paddle.zeros(q.shape[:-1], dtype="float32")
        ctx.save_for_backward(q, k, v, out, sums)
        ctx.name = name
        return out

    @staticmethod
    def backward(ctx, grad):
        contiguous(grad)
        with launched(f"{ctx.name}_grad"):
            return tuple(paddle.zeros_like(x) for x in ctx.saved_tensor()[:3])


def _linear(x, weight, bias=None, name=None):
    return paddle.matmul(x, weight) if bias is None else _Linear.apply(x, weight, bias)


class _Linear(PyLayer):
    """`linear_v2`: a product whose epilogue adds the bias, and three gradients."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        with launched("linear_v2"):
            return paddle.matmul(x, weight) + bias

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensor()
        with launched("linear_v2_grad", 3):
            rows = grad.reshape([-1, grad.shape[-1]])
            return (
                paddle.matmul(grad, weight, transpose_y=True),
                paddle.matmul(x.reshape([-1, x.shape[-1]]), rows, transpose_x=True),
                rows.sum(axis=0),
            )
