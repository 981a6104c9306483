"""A gated MLP per expert, each applied to the token rows that were sent to it.

Shapes: T token rows; K experts of each; N = T * K assignments of a row to an expert, numbered
`t * K + k`; E experts; D width; I features in, O features out of a product.

The assignments are sorted by expert, so that one expert's rows lie together and experts that are
neighbours have neighbouring rows. Every gradient is a gather in the opposite order: nothing is
added up in an order that could change from run to run. Shapes depend on T only, and on a GPU
nothing is read by the host.
"""

from typing import NamedTuple

import paddle
import paddle.nn.functional as F
from paddle import Tensor, nn
from paddle.autograd import PyLayer
from paddle.nn.initializer import Normal

from paddle_vl.nn.backend import is_eager_cpu


class Dispatch(NamedTuple):
    """The order of assignments by expert, all int64.

    Attributes:
        order: `[N]`, the assignment at each place of the sorted rows; within an expert, in order.
        place: `[N]`, the place of each assignment among the sorted rows.
        counts: `[E]`, rows of each expert.
    """

    order: Tensor
    place: Tensor
    counts: Tensor


def sort_by_expert(indices_TK: Tensor, num_experts: int) -> Dispatch:
    """Sort assignments, given by the expert of each."""
    expert_N = indices_TK.reshape([-1])
    order_N = paddle.argsort(expert_N, stable=True)
    numbers_N = paddle.arange(expert_N.shape[0], dtype="int64")
    place_N = paddle.scatter(paddle.zeros_like(numbers_N), order_N, numbers_N)
    ends_E = paddle.searchsorted(
        paddle.index_select(expert_N, order_N),
        paddle.arange(num_experts, dtype=expert_N.dtype),
        right=True,
    )
    return Dispatch(order_N, place_N, paddle.diff(ends_E, prepend=paddle.zeros_like(ends_E[:1])))


def permute_rows(x_TD: Tensor, dispatch: Dispatch) -> Tensor:
    """Each token's row once for each of its experts, sorted by expert: `[N, D]`."""
    order_N, place_N, _ = dispatch
    copies = order_N.shape[0] // x_TD.shape[0]
    if paddle.in_dynamic_mode():
        return _PermuteRows.apply(x_TD, order_N, place_N, copies)
    return paddle.index_select(x_TD, order_N // copies)


def unpermute_rows(y_ND: Tensor, dispatch: Dispatch, weights_TK: Tensor) -> Tensor:
    """Weighted sum of each token's rows, from the order of `permute_rows`: `[T, D]`."""
    order_N, place_N, _ = dispatch
    if paddle.in_dynamic_mode():
        y_ND = _Reorder.apply(y_ND, order_N, place_N)
    else:
        y_ND = paddle.index_select(y_ND, place_N)
    y_TKD = y_ND.reshape([*weights_TK.shape, -1])
    return paddle.matmul(weights_TK.unsqueeze(1), y_TKD).squeeze(1)


class _PermuteRows(PyLayer):
    @staticmethod
    def forward(ctx, x_TD, order_N, place_N, copies):
        ctx.save_for_backward(place_N)
        ctx.shape = [*x_TD.shape[:1], copies, -1]
        return paddle.index_select(x_TD, order_N // copies)

    @staticmethod
    def backward(ctx, grad_ND):
        (place_N,) = ctx.saved_tensor()
        grad_TKD = paddle.index_select(grad_ND, place_N).reshape(ctx.shape)
        return grad_TKD.sum(axis=1), None, None


class _Reorder(PyLayer):
    @staticmethod
    def forward(ctx, y_ND, order_N, place_N):
        ctx.save_for_backward(order_N)
        return paddle.index_select(y_ND, place_N)

    @staticmethod
    def backward(ctx, grad_ND):
        (order_N,) = ctx.saved_tensor()
        return paddle.index_select(grad_ND, order_N), None, None


def grouped_linear(x_NI: Tensor, weight_EIO: Tensor, counts_E: Tensor) -> Tensor:
    """`x @ weight[e]` with each row's own expert e: the first `counts_E[0]` rows have expert 0.

    On the CPU a product per expert, whose sizes are read there for nothing. Elsewhere
    `blocked_grouped_linear`.
    """
    if is_eager_cpu(x_NI):
        return _GroupedLinear.apply(x_NI, weight_EIO, counts_E)
    return blocked_grouped_linear(x_NI, weight_EIO, counts_E)


class _GroupedLinear(PyLayer):
    @staticmethod
    def forward(ctx, x_NI, weight_EIO, counts_E):
        ctx.save_for_backward(x_NI, weight_EIO)
        ctx.counts = counts_E.tolist()
        ctx.needs = (not x_NI.stop_gradient, not weight_EIO.stop_gradient)
        return _rows_times_experts(x_NI, weight_EIO, ctx.counts)

    @staticmethod
    def backward(ctx, grad_NO):
        x_NI, weight_EIO = ctx.saved_tensor()
        needs_x, needs_weight = ctx.needs
        grad_x = grad_weight = None
        if needs_x:
            grad_x = _rows_times_experts(grad_NO, weight_EIO, ctx.counts, transposed=True)
        if needs_weight:
            grad_weight = paddle.zeros_like(weight_EIO)
            for e, begin, end in _segments(ctx.counts):
                paddle.matmul(
                    x_NI._slice(begin, end),
                    grad_NO._slice(begin, end),
                    transpose_x=True,
                    out=_matrix(grad_weight, e),
                )
        return grad_x, grad_weight, None


def _rows_times_experts(
    x_NI: Tensor, weight_EIO: Tensor, counts: list[int], transposed: bool = False
) -> Tensor:
    """Written into slices of the result: without them every part would be copied once more."""
    columns = weight_EIO.shape[1 if transposed else 2]
    y_NO = paddle.empty([x_NI.shape[0], columns], dtype=x_NI.dtype)
    for e, begin, end in _segments(counts):
        paddle.matmul(
            x_NI._slice(begin, end),
            _matrix(weight_EIO, e),
            transpose_y=transposed,
            out=y_NO._slice(begin, end),
        )
    return y_NO


def _matrix(weight_EIO: Tensor, e: int) -> Tensor:
    """One expert's matrix, in the memory of all."""
    return weight_EIO._slice(e, e + 1).reshape_(weight_EIO.shape[1:])


def _segments(counts: list[int]):
    """Expert, first row and end of the experts that have rows."""
    end = 0
    for e, count in enumerate(counts):
        begin, end = end, end + count
        if count:
            yield e, begin, end


def blocked_grouped_linear(x_NI: Tensor, weight_EIO: Tensor, counts_E: Tensor) -> Tensor:
    """`grouped_linear` as one batched product, of shapes that do not depend on the counts.

    Each expert's rows fill blocks of `ceil(N / E)` rows, the last one up with zeros. Whatever the
    counts, E further blocks than N rows fill are enough; so the product is at most twice what is
    needed, and each block has a copy of its expert's matrix. It has run on CPUs only.
    """
    num_rows, (num_experts, _, columns) = x_NI.shape[0], weight_EIO.shape
    rows = -(-num_rows // num_experts)
    num_blocks = (num_rows + min(num_experts, num_rows) * (rows - 1)) // rows
    ends_E, blocks_E = counts_E.cumsum(), (counts_E + (rows - 1)) // rows
    block_ends_E = blocks_E.cumsum()
    numbers_N = paddle.arange(num_rows, dtype="int64")
    expert_N = paddle.searchsorted(ends_E, numbers_N, right=True)
    shift_E = (block_ends_E - blocks_E) * rows - (ends_E - counts_E)
    place_N = numbers_N + paddle.index_select(shift_E, expert_N)
    numbers_B = paddle.arange(num_blocks, dtype="int64")
    expert_B = paddle.searchsorted(block_ends_E, numbers_B, right=True).clip(max=num_experts - 1)
    empty = paddle.zeros([num_blocks * rows, x_NI.shape[1]], dtype=x_NI.dtype)
    x_BRI = paddle.scatter(empty, place_N, x_NI).reshape([num_blocks, rows, -1])
    y_BRO = paddle.matmul(x_BRI, paddle.index_select(weight_EIO, expert_B))
    return paddle.index_select(y_BRO.reshape([-1, columns]), place_N)


class Experts(nn.Layer):
    """`down(silu(gate(x)) * up(x))` by each row's experts, summed with the rows' weights.

    Weights are `[E, in, out]`, gate and up beside each other, drawn from a normal of `init_std`.

    Attributes:
        tokens_per_expert: `[E]` int64, rows of each expert in the last call; None before.
    """

    def __init__(self, num_experts: int, width: int, inner: int, init_std: float = 0.02):
        super().__init__()
        self.num_experts = num_experts
        self.gate_up_proj = self.create_parameter(
            [num_experts, width, 2 * inner], default_initializer=Normal(std=init_std)
        )
        self.down_proj = self.create_parameter(
            [num_experts, inner, width], default_initializer=Normal(std=init_std)
        )
        self.tokens_per_expert: Tensor | None = None

    def forward(self, x_TD: Tensor, indices_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """Token rows `[T, D]` again.

        Args:
            indices_TK: each row's experts, int64.
            weights_TK: their weights, in the dtype of the rows.
        """
        dispatch = sort_by_expert(indices_TK, self.num_experts)
        if paddle.in_dynamic_mode():
            self.tokens_per_expert = dispatch.counts
        rows_ND = self.run_experts(permute_rows(x_TD, dispatch), dispatch.counts)
        return unpermute_rows(rows_ND, dispatch, weights_TK)

    def run_experts(self, x_ND: Tensor, counts_E: Tensor) -> Tensor:
        """Rows that lie together by expert, through their experts."""
        inner = F.swiglu(grouped_linear(x_ND, self.gate_up_proj, counts_E))
        return grouped_linear(inner, self.down_proj, counts_E)
