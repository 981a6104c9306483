"""Operations on the CPU that Paddle computes faster in another form.

Shapes: N rows, E experts, I features in, O features out; B batch, N query heads, K key heads, S
capacity of a cache, H head width.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import paddle
from paddle import Tensor
from paddle.autograd import PyLayer

from paddle_vl.nn.attention import CachedKeys, biased_rows
from paddle_vl.nn.experts import GroupedProduct, GroupSizes


class BiasedLinear(PyLayer):
    """The product is added to the bias, whose gradient is a product with ones: sums and broadcasts
    take as long as a product with few input features."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        ctx.needs = (not x.stop_gradient, not weight.stop_gradient, not bias.stop_gradient)
        if x.dtype != paddle.float32:
            return paddle.matmul(x, weight).add_(bias)
        y_NO = paddle.addmm(bias.reshape([1, -1]), _as_rows(x), weight)
        return y_NO.reshape([*x.shape[:-1], weight.shape[1]])

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensor()
        needs_x, needs_weight, needs_bias = ctx.needs
        grad_x = grad_weight = grad_bias = None
        grad_NO = _as_rows(grad)
        if needs_x:
            grad_x = paddle.matmul(grad, weight, transpose_y=True)
        if needs_weight:
            grad_weight = paddle.matmul(_as_rows(x), grad_NO, transpose_x=True)
        if needs_bias:
            ones_1N = paddle.ones([1, grad_NO.shape[0]], grad_NO.dtype)
            grad_bias = paddle.matmul(ones_1N, grad_NO).reshape([-1])
        return grad_x, grad_weight, grad_bias


def _as_rows(x: Tensor) -> Tensor:
    return x.reshape([-1, x.shape[-1]])


def grouped_linear(x_NI: Tensor, weight_EIO: Tensor, sizes: GroupSizes) -> Tensor:
    """`experts.grouped_linear`. Reading the counts on the host costs nothing on the CPU."""
    counts: Any = sizes.counts_E.tolist()
    return GroupedProduct.apply(x_NI, weight_EIO, _PerExpert(counts))


class _PerExpert(NamedTuple):
    """One product per expert, written into its slice of the result.

    Attributes:
        counts: rows of each expert.
    """

    counts: list[int]

    def product(self, x_NI: Tensor, weight_EIO: Tensor, transposed: bool = False) -> Tensor:
        """See `GroupedProduct`."""
        columns = weight_EIO.shape[1 if transposed else 2]
        y_NO = paddle.empty([x_NI.shape[0], columns], dtype=x_NI.dtype)
        for e, begin, end in self._ranges():
            paddle.matmul(
                x_NI._slice(begin, end),
                _matrix(weight_EIO, e),
                transpose_y=transposed,
                out=y_NO._slice(begin, end),
            )
        return y_NO

    def weight_gradient(self, x_NI: Tensor, grad_NO: Tensor) -> Tensor:
        """See `GroupedProduct`."""
        shape = [len(self.counts), x_NI.shape[1], grad_NO.shape[1]]
        grad_EIO = paddle.zeros(shape, dtype=x_NI.dtype)
        for e, begin, end in self._ranges():
            paddle.matmul(
                x_NI._slice(begin, end),
                grad_NO._slice(begin, end),
                transpose_x=True,
                out=_matrix(grad_EIO, e),
            )
        return grad_EIO

    def _ranges(self) -> Iterator[tuple[int, int, int]]:
        """Expert, first row and end row of every expert that has rows."""
        end = 0
        for e, count in enumerate(self.counts):
            begin, end = end, end + count
            if count:
                yield e, begin, end


def _matrix(weight_EIO: Tensor, e: int) -> Tensor:
    """One expert's matrix `[I, O]`, a view of the stacked weights."""
    return weight_EIO._slice(e, e + 1).reshape_(weight_EIO.shape[1:])


def is_one_query(q_BLNH: Tensor, *others: Any) -> bool:
    """Whether each batch entry has one query."""
    return q_BLNH.shape[1] == 1


def cached_attention(
    q_BLNH: Tensor, key_BKSH: Tensor, value_BKSH: Tensor, cached: CachedKeys
) -> Tensor:
    """`attention.cached_attention` of a single query, over the whole buffers: a part of them would
    be copied."""
    batch, _, heads, width = q_BLNH.shape
    _, key_heads, capacity, _ = key_BKSH.shape
    q_BKGH = (q_BLNH * width**-0.5).reshape([batch, key_heads, -1, width])
    bias_BKGS = cached.bias(batch, key_heads, heads // key_heads, capacity)
    out_BKGH = biased_rows(q_BKGH, key_BKSH, value_BKSH, bias_BKGS)
    return out_BKGH.reshape([batch, 1, heads, width])
