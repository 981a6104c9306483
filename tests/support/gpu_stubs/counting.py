"""Counts the kernels that a GPU would launch, and the bytes kept for the backward pass.

A layer runs on the CPU in float64, which stands for bfloat16 (see `contract`), forward and backward
under Paddle's profiler. Each kernel that Paddle starts is one launch; a stand-in is as many as its
kernel starts. Views of memory are none. Attention counts as one launch forward and one backward,
whichever kernel it takes.

Not seen: copies that Paddle makes before its own kernels of tensors that are not contiguous.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import paddle
import paddle.nn.functional as F
import pytest
from paddle import Tensor, profiler
from paddle.autograd import PyLayer

from paddle_vl.nn.operations import use_kernels
from tests.support.gpu_stubs.contract import contiguous, halves_are, launched, launches_of
from tests.support.gpu_stubs.installed import gpu_stubs

# Operators that return views of their input, or memory that is not written.
VIEWS = frozenset(
    [
        *("reshape", "transpose", "slice", "strided_slice", "unsqueeze", "squeeze", "flatten"),
        *("expand_as", "share_data", "unbind", "empty"),
    ]
)
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

    with gpu_stubs(), halves_are("float64"), use_kernels(kernels), _attention():
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
def _attention() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", _sdpa)
        patch.setattr(F, "linear", _linear)
        yield


def _sdpa(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, **_):
    return _Attention.apply(*contiguous(query, key, value), attn_mask, is_causal)


class _Attention(PyLayer):
    """Flash attention's launches and what it keeps: inputs, result, and the rows' log-sums."""

    @staticmethod
    def forward(ctx, q, k, v, mask, is_causal):
        with launched("attention"):
            roots = paddle.zeros([q.shape[0], q.shape[2], q.shape[1]], dtype="float32")
            out = v.mean(axis=[1, 2], keepdim=True).expand(q.shape).contiguous()
        ctx.save_for_backward(q, k, v, out, roots)
        return out

    @staticmethod
    def backward(ctx, grad):
        contiguous(grad)
        with launched("attention_grad"):
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
