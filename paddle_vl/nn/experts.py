"""A gated MLP per expert, each applied to the token rows that were sent to it.

Shapes: T token rows; K experts of each; N = T * K assignments of a row to an expert, numbered
`t * K + k`; E experts; D width; I features in, O features out of a product.

The assignments are sorted by expert, so that one expert's rows lie together and experts that are
neighbours have neighbouring rows. Every gradient is a gather in the opposite order: nothing is
added up in an order that could change from run to run. Shapes depend on T only, and on a GPU
nothing is read by the host.
"""

from collections.abc import Callable
from functools import partial
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
    y_ND = reorder_rows(y_ND, place_N, order_N)
    y_TKD = y_ND.reshape([*weights_TK.shape, -1])
    return paddle.matmul(weights_TK.unsqueeze(1), y_TKD).squeeze(1)


def reorder_rows(y_ND: Tensor, order_N: Tensor, inverse_N: Tensor) -> Tensor:
    """Row `order[i]` at place i; `inverse` is the order that undoes it."""
    if paddle.in_dynamic_mode():
        return _Reorder.apply(y_ND, order_N, inverse_N)
    return paddle.index_select(y_ND, order_N)


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
    def forward(ctx, y_ND, order_N, inverse_N):
        ctx.save_for_backward(inverse_N)
        return paddle.index_select(y_ND, order_N)

    @staticmethod
    def backward(ctx, grad_ND):
        (inverse_N,) = ctx.saved_tensor()
        return paddle.index_select(grad_ND, inverse_N), None, None


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
    needed. Each block has a copy of its expert's matrix, made again for the backward pass. It has
    run on CPUs only.
    """
    blocks = _Blocks.of(counts_E, x_NI.shape[0])
    if paddle.in_dynamic_mode():
        return _BlockedLinear.apply(x_NI, weight_EIO, *blocks)
    return _blocked_product(x_NI, weight_EIO, blocks)


class _Blocks(NamedTuple):
    """Where sorted rows lie in B blocks of R rows.

    Attributes:
        place: `[N]` int64, each row's place among the `B * R`.
        expert: `[B]` int64, each block's expert, ascending; unused blocks have the last.
        num_rows: R.
    """

    place: Tensor
    expert: Tensor
    num_rows: int

    @classmethod
    def of(cls, counts_E: Tensor, total: int) -> "_Blocks":
        num_experts = counts_E.shape[0]
        rows = -(-total // num_experts)
        num_blocks = (total + min(num_experts, total) * (rows - 1)) // rows
        ends_E, blocks_E = counts_E.cumsum(), (counts_E + (rows - 1)) // rows
        block_ends_E = blocks_E.cumsum()
        numbers_N = paddle.arange(total, dtype="int64")
        expert_N = paddle.searchsorted(ends_E, numbers_N, right=True)
        shift_E = (block_ends_E - blocks_E) * rows - (ends_E - counts_E)
        place_N = numbers_N + paddle.index_select(shift_E, expert_N)
        numbers_B = paddle.arange(num_blocks, dtype="int64")
        expert_B = paddle.searchsorted(block_ends_E, numbers_B, right=True)
        return cls(place_N, expert_B.clip(max=num_experts - 1), rows)

    def filled(self, x_NI: Tensor) -> Tensor:
        """The rows in their blocks, `[B, R, I]`."""
        num_blocks, columns = self.expert.shape[0], x_NI.shape[1]
        empty = paddle.zeros([num_blocks * self.num_rows, columns], dtype=x_NI.dtype)
        return paddle.scatter(empty, self.place, x_NI).reshape([num_blocks, -1, columns])


def _blocked_product(
    x_NI: Tensor, weight_EIO: Tensor, blocks: _Blocks, transposed: bool = False
) -> Tensor:
    weight_BIO = paddle.index_select(weight_EIO, blocks.expert)
    y_BRO = paddle.matmul(blocks.filled(x_NI), weight_BIO, transpose_y=transposed)
    return paddle.index_select(y_BRO.reshape([-1, y_BRO.shape[-1]]), blocks.place)


class _BlockedLinear(PyLayer):
    """Left to autograd, the copies of the matrices would be kept for the backward pass."""

    @staticmethod
    def forward(ctx, x_NI, weight_EIO, place_N, expert_B, num_rows):
        ctx.save_for_backward(x_NI, weight_EIO, place_N, expert_B)
        ctx.num_rows = num_rows
        ctx.needs = (not x_NI.stop_gradient, not weight_EIO.stop_gradient)
        return _blocked_product(x_NI, weight_EIO, _Blocks(place_N, expert_B, num_rows))

    @staticmethod
    def backward(ctx, grad_NO):
        x_NI, weight_EIO, place_N, expert_B = ctx.saved_tensor()
        blocks = _Blocks(place_N, expert_B, ctx.num_rows)
        needs_x, needs_weight = ctx.needs
        grad_x = grad_weight = None
        if needs_x:
            grad_x = _blocked_product(grad_NO, weight_EIO, blocks, transposed=True)
        if needs_weight:
            grad_BIO = paddle.matmul(blocks.filled(x_NI), blocks.filled(grad_NO), transpose_x=True)
            # The sum over an expert's blocks as a product: its order is always the same.
            numbers_E1 = paddle.arange(weight_EIO.shape[0], dtype="int64").unsqueeze(1)
            is_of_EB = (numbers_E1 == expert_B.unsqueeze(0)).astype(grad_BIO.dtype)
            grad_weight = paddle.matmul(is_of_EB, grad_BIO.reshape([expert_B.shape[0], -1]))
            grad_weight = grad_weight.reshape(weight_EIO.shape)
        return grad_x, grad_weight, None, None


class Experts(nn.Layer):
    """`down(silu(gate(x)) * up(x))` by each row's experts, summed with the rows' weights.

    Weights are `[E, in, out]`, gate and up beside each other, drawn from a normal of `init_std`.

    Attributes:
        num_experts: E that rows are sent to; those that a process does not hold are reached through
            `exchange`.
        exchange: takes `run_experts`, rows by expert and their counts, and returns what their
            experts make of them; None where all experts are.
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
        self.exchange: Callable[..., Tensor] | None = None
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
        run = (
            self.run_experts if self.exchange is None else partial(self.exchange, self.run_experts)
        )
        rows_ND = run(permute_rows(x_TD, dispatch), dispatch.counts)
        return unpermute_rows(rows_ND, dispatch, weights_TK)

    def run_experts(self, x_ND: Tensor, counts_E: Tensor) -> Tensor:
        """Rows that lie together by expert, through their experts."""
        inner = F.swiglu(grouped_linear(x_ND, self.gate_up_proj, counts_E))
        return grouped_linear(inner, self.down_proj, counts_E)
