"""The experts' products on a GPU: matrices stay where they are, as far as shapes are fixed.

Without expert parallelism the host does not know how many rows an expert has, so shapes must not
depend on it. Every expert has a first block of R rows, multiplied with all matrices in place; the
rows beyond R fill further blocks, at most (N - 1) // R of them, each with a copy of its expert's
matrix. R is at least the rows of a tile, so few rows need no copy at all.

Expert parallelism reads the numbers of rows for its exchange anyway; then Paddle's `batched_gemm`
runs one product per expert, without padding and without copies.

Shapes: N rows, E experts, I features in, O features out; B blocks beyond the first E, of R rows.
"""

from typing import Any, NamedTuple

import paddle
import paddle.incubate.nn.functional as incubate
from paddle import Tensor
from paddle.autograd import PyLayer

from paddle_vl.nn.experts import GroupSizes, grouped_linear

# A product of fewer rows takes as long: the rows of a tile of cuBLAS.
_TILE = 128


@grouped_linear.register("gpu")
def _grouped_linear(x_NI: Tensor, weight_EIO: Tensor, sizes: GroupSizes) -> Tensor:
    if sizes.on_host is not None:
        return _ProductPerExpert.apply(x_NI, weight_EIO, sizes.on_host)
    if sizes.layout is None:
        sizes.layout = _Layout.of(sizes.counts_E, x_NI.shape[0])
    return _BlockedProduct.apply(x_NI, weight_EIO, sizes.layout)


class _ProductPerExpert(PyLayer):
    """`batched_gemm` has three forms, for the result and both gradients, but no gradient."""

    @staticmethod
    def forward(ctx, x_NI, weight_EIO, counts):
        ctx.save_for_backward(x_NI, weight_EIO)
        ctx.counts, ctx.needs = counts, (not x_NI.stop_gradient, not weight_EIO.stop_gradient)
        return incubate.batched_gemm(x_NI, weight_EIO, counts)

    @staticmethod
    def backward(ctx, grad_NO):
        x_NI, weight_EIO = ctx.saved_tensor()
        needs_x, needs_weight = ctx.needs
        grad_x: Any = None
        grad_weight: Any = None
        if needs_x:
            grad_x = incubate.batched_gemm(grad_NO, weight_EIO, ctx.counts, trans_rhs=True)
        if needs_weight:
            grad_weight = incubate.batched_gemm(x_NI, grad_NO, ctx.counts, trans_lhs=True)
            for expert, count in enumerate(ctx.counts):
                # A product of no terms may leave the memory as it was.
                if count == 0:
                    grad_weight[expert] = 0.0
        return grad_x, grad_weight


class _Layout(NamedTuple):
    """Where the sorted rows are among the `E + B` blocks.

    Attributes:
        place: `[N]` int64, each row's place among the `(E + B) * R`.
        further: `[B]` int64, the expert of each block beyond the first E, ascending; unused blocks
            have the last expert.
        is_of: `[E, B]` float32, 1 where a further block is an expert's.
        num_rows: R.
    """

    place: Tensor
    further: Tensor
    is_of: Tensor
    num_rows: int

    @classmethod
    def of(cls, counts_E: Tensor, total: int) -> "_Layout":
        """The layout of `total` rows, `counts_E` of each expert."""
        num_experts = counts_E.shape[0]
        rows = max(-(-total // num_experts), _TILE)
        numbers_N = paddle.arange(total, dtype="int64")
        ends_E = counts_E.cumsum()
        expert_N = paddle.searchsorted(ends_E, numbers_N, right=True)
        # The number of a row among those of its expert.
        own_N = numbers_N - paddle.index_select(ends_E - counts_E, expert_N)
        first_N = expert_N * rows + own_N
        further_E = (counts_E - 1).clip(min=0) // rows
        further_ends_E = further_E.cumsum()
        begins_E = (num_experts + further_ends_E - further_E - 1) * rows
        further_N = paddle.index_select(begins_E, expert_N) + own_N
        place_N = paddle.where(own_N < rows, first_N, further_N)
        numbers_B = paddle.arange((total - 1) // rows, dtype="int64")
        further_B = paddle.searchsorted(further_ends_E, numbers_B, right=True)
        further_B = further_B.clip(max=num_experts - 1)
        numbers_E1 = paddle.arange(num_experts, dtype="int64").unsqueeze(1)
        is_of_EB = (numbers_E1 == further_B.unsqueeze(0)).astype("float32")
        return cls(place_N, further_B, is_of_EB, rows)

    def filled(self, x_NI: Tensor) -> tuple[Tensor, Tensor]:
        """The rows in their blocks, zeros elsewhere: the first `[E, R, I]`, further `[B, R, I]`."""
        first, columns = self.is_of.shape[0], x_NI.shape[1]
        blocks = first + self.further.shape[0]
        rows = paddle.zeros([blocks * self.num_rows, columns], dtype=x_NI.dtype)
        rows = paddle.scatter_(rows, self.place, x_NI)
        return self._parts(rows)

    def product(self, x_NI: Tensor, weight_EIO: Tensor, transposed: bool = False) -> Tensor:
        """`[N, I]` to `[N, O]`, each row with its expert's matrix; the reverse if transposed."""
        first_ERI, further_BRI = self.filled(x_NI)
        columns = weight_EIO.shape[1 if transposed else 2]
        blocks = first_ERI.shape[0] + further_BRI.shape[0]
        y = paddle.empty([blocks * self.num_rows, columns], dtype=x_NI.dtype)
        first_ERO, further_BRO = self._parts(y)
        paddle.matmul(first_ERI, weight_EIO, transpose_y=transposed, out=first_ERO)
        if further_BRI.shape[0]:
            weight_BIO = paddle.index_select(weight_EIO, self.further)
            paddle.matmul(further_BRI, weight_BIO, transpose_y=transposed, out=further_BRO)
        return paddle.index_select(y, self.place)

    def weight_gradient(self, x_NI: Tensor, grad_NO: Tensor) -> Tensor:
        """`[E, I, O]`: the sum of `x^T @ grad` over each expert's rows."""
        first_ERI, further_BRI = self.filled(x_NI)
        first_ERO, further_BRO = self.filled(grad_NO)
        grad_EIO = paddle.matmul(first_ERI, first_ERO, transpose_x=True)
        if further_BRI.shape[0]:
            grad_BIO = paddle.matmul(further_BRI, further_BRO, transpose_x=True)
            # The sum over an expert's blocks as a product, which is deterministic.
            grad_BC = grad_BIO.reshape([grad_BIO.shape[0], -1])
            sums_EC = paddle.matmul(self.is_of.astype(grad_BC.dtype), grad_BC)
            grad_EIO = grad_EIO.add_(sums_EC.reshape(grad_EIO.shape))
        return grad_EIO

    def _parts(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """First and further blocks of `[(E + B) * R, C]`, which share its memory."""
        shape = [-1, self.num_rows, rows.shape[1]]
        end = self.is_of.shape[0] * self.num_rows
        further = rows._slice(end, rows.shape[0])
        return rows._slice(0, end).reshape_(shape), further.reshape_(shape)


class _BlockedProduct(PyLayer):
    """Keeps the rows and no copies of matrices; the backward pass copies again."""

    @staticmethod
    def forward(ctx, x_NI, weight_EIO, layout):
        ctx.save_for_backward(x_NI, weight_EIO)
        ctx.layout, ctx.needs = layout, (not x_NI.stop_gradient, not weight_EIO.stop_gradient)
        return layout.product(x_NI, weight_EIO)

    @staticmethod
    def backward(ctx, grad_NO):
        x_NI, weight_EIO = ctx.saved_tensor()
        needs_x, needs_weight = ctx.needs
        grad_x = ctx.layout.product(grad_NO, weight_EIO, transposed=True) if needs_x else None
        grad_weight = ctx.layout.weight_gradient(x_NI, grad_NO) if needs_weight else None
        return grad_x, grad_weight
