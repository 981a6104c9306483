"""Operations on a GPU by Paddle's fused kernels: activations, norms, rotary embedding, experts.

Norms compute in float32 and keep their input and one float32 number per row, not a float32 copy of
the rows; they replace 9 to 15 kernels by 1 to 4. Rows, weight and result of `rms_norm` have one
dtype; the result is rounded once, where the plain form rounds the quotient too. The others round as
the plain forms do.

The fused rotary embedding computes in float32 and takes tables in the dtype of the rows, so float32
tables are rounded to it, once for all layers of a forward pass (as HF transformers rounds those of
its decoders). The plain form computes in the dtype of the tables.

Many rows of experts: `batched_gemm` runs one product per expert, without padding and without copies
of matrices. It takes the numbers of rows from the host, which reads them once per layer and
micro-batch, in the forward pass; expert parallelism has read them for its exchange. Shapes that fit
any numbers would mean twice the rows, and a copy of every matrix in every product.

Few rows, at most those of a tile per expert, as in generation: a tile takes as long however full it
is, so nothing is read. Every expert has a first block of R rows, those of a tile, multiplied with
all matrices in place; the rows beyond R fill further blocks, at most (N - 1) // R of them, each
with a copy of its expert's matrix.

Shapes: N rows, E experts, I features in, O features out; B blocks beyond the first E, of R rows.
"""

import math
from typing import Any, NamedTuple

import paddle
import paddle.incubate.nn.functional as incubate
import paddle.nn.functional as F
from paddle import Tensor, _C_ops
from paddle.autograd import PyLayer

from paddle_vl.nn.attention import RotaryTables
from paddle_vl.nn.experts import GroupedProduct, GroupSizes

# Paddle's layer_norm refuses a larger one.
_LARGEST_EPSILON = 1e-3
# A product of fewer rows takes as long: the rows of a tile of cuBLAS.
_TILE = 128
# Rows of a block where the host must not read the counts, over the square root of the rows per
# expert. Up to a block of each expert is empty, and each further one copies a matrix: on an H100
# both take equally long then, by its data sheet.
_BALANCE = 22


def has_rows(x: Tensor, *others: Any) -> bool:
    """Whether a norm's kernel, which starts a block per row, can run."""
    return 0 not in x.shape


def is_of_one_dtype(x: Tensor, *others: Any) -> bool:
    """`has_rows`, and all tensors have one dtype."""
    return has_rows(x) and all(y.dtype == x.dtype for y in others if isinstance(y, Tensor))


def takes_layer_norm(x: Tensor, weight_C: Tensor, bias_C: Tensor, epsilon: float) -> bool:
    """Whether `layer_norm` takes these."""
    return has_rows(x) and epsilon <= _LARGEST_EPSILON


def geglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """`operations.geglu`, keeping its two inputs only.

    Paddle's fused kernel (`fused_bias_act`) has the erf form of GELU and no gradient, so the
    products are Paddle's own; a third tensor, `gelu(gate)`, is computed again in the backward pass.
    """
    if up is None:
        gate, up = paddle.chunk(gate, 2, axis=-1)
    return _GeGLU.apply(gate, up)


class _GeGLU(PyLayer):
    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        ctx.needs = (not gate.stop_gradient, not up.stop_gradient)
        return F.gelu(gate, approximate=True) * up

    @staticmethod
    def backward(ctx, grad):
        gate, up = ctx.saved_tensor()
        needs_gate, needs_up = ctx.needs
        grad_gate = _C_ops.gelu_grad(gate, grad * up, True) if needs_gate else None
        grad_up = grad * F.gelu(gate, approximate=True) if needs_up else None
        return grad_gate, grad_up


def rms_norm(x: Tensor, weight_C: Tensor, epsilon: float) -> Tensor:
    """`operations.rms_norm`."""
    return F.rms_norm(x, [x.shape[-1]], weight_C, epsilon)[0]


def add_rms_norm(
    x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    """`operations.add_rms_norm`."""
    return _AddRMSNorm.apply(x_TD, residual_TD, weight_D, epsilon)


class _AddRMSNorm(PyLayer):
    """Paddle's kernel of sum and norm has no gradient for the sum; that of `rms_norm` is used."""

    @staticmethod
    def forward(ctx, x_TD, residual_TD, weight_D, epsilon):
        normed_TD, sum_TD, inverse_T = incubate.fused_rms_norm(
            x_TD, weight_D, None, epsilon, 1, None, residual_TD
        )
        # Detached: kept itself, an output without a backward pass would never be freed.
        ctx.save_for_backward(sum_TD.detach(), weight_D, inverse_T)
        ctx.epsilon = epsilon
        ctx.needs = [not x.stop_gradient for x in (x_TD, residual_TD, weight_D)]
        return sum_TD, normed_TD

    @staticmethod
    def backward(ctx, sum_grad_TD, normed_grad_TD):
        sum_TD, weight_D, inverse_T = ctx.saved_tensor()
        grad_TD, weight_grad_D = _C_ops.rms_norm_grad(
            sum_TD, weight_D, inverse_T, normed_grad_TD, [sum_TD.shape[-1]], ctx.epsilon
        )
        grad_TD = grad_TD + sum_grad_TD
        grads = (grad_TD, grad_TD, weight_grad_D)
        return tuple(grad if need else None for grad, need in zip(grads, ctx.needs, strict=True))


def gemma_rms_norm(x: Tensor, weight_C: Tensor, epsilon: float) -> Tensor:
    """`operations.gemma_rms_norm`. The kernel of `rms_norm` takes a weight in the dtype of `x`,
    which would round `1 + weight`; this one takes a float32 weight, and returns float32."""
    scale_C = 1.0 + weight_C.astype("float32")
    return incubate.fused_rms_norm_ext(x, scale_C, epsilon)[0].astype(x.dtype)


def rms_quotient(x: Tensor, epsilon: float) -> Tensor:
    """`operations.rms_quotient`."""
    ones_C = paddle.ones([x.shape[-1]], dtype="float32")
    return incubate.fused_rms_norm_ext(x, ones_C, epsilon)[0]


def layer_norm(x: Tensor, weight_C: Tensor, bias_C: Tensor, epsilon: float) -> Tensor:
    """`operations.layer_norm`."""
    return F.layer_norm(x, [x.shape[-1]], weight_C, bias_C, epsilon)


def apply_rotary(q_TNH: Tensor, k_TKH: Tensor, tables: RotaryTables) -> tuple[Tensor, Tensor]:
    """`attention.apply_rotary`: one launch for queries, one for keys, none kept."""
    # One by one, which launches no more: with both, an output that has no gradient passes zeros.
    tables = tables.astype(q_TNH.dtype)
    return _rotated(q_TNH, tables), _rotated(k_TKH, tables)


def _rotated(x_TNH: Tensor, tables: RotaryTables) -> Tensor:
    heads, width = x_TNH.shape[-2:]
    # The batch is one long sequence: the kernel's tables are the same for all sequences.
    rows = x_TNH.reshape([1, -1, heads, width])
    cos, sin = tables.cos_TH.reshape([-1, width]), tables.sin_TH.reshape([-1, width])
    out, _, _ = incubate.fused_rotary_position_embedding(
        rows, sin=sin, cos=cos, use_neox_rotary_style=False
    )
    return out.reshape(x_TNH.shape)


def grouped_linear(x_NI: Tensor, weight_EIO: Tensor, sizes: GroupSizes) -> Tensor:
    """`experts.grouped_linear`."""
    total, rows = x_NI.shape[0], _TILE
    per_expert = total / weight_EIO.shape[0]
    if sizes.on_host is None and per_expert > _TILE:
        if sizes.may_read:
            sizes.on_host = sizes.counts_E.numpy().tolist()
        rows = _TILE * math.ceil(_BALANCE * per_expert**0.5 / _TILE)
    if sizes.on_host is not None:
        return GroupedProduct.apply(x_NI, weight_EIO, _PerExpert(sizes.on_host))
    if sizes.layout is None:
        sizes.layout = _Layout.of(sizes.counts_E, total, rows)
    return GroupedProduct.apply(x_NI, weight_EIO, sizes.layout)


class _PerExpert(NamedTuple):
    """One product per expert; `batched_gemm` has three forms, but no gradient.

    Attributes:
        counts: rows of each expert.
    """

    counts: Any

    def product(self, x_NI: Tensor, weight_EIO: Tensor, transposed: bool = False) -> Tensor:
        """See `GroupedProduct`."""
        y_NO: Any = incubate.batched_gemm(x_NI, weight_EIO, self.counts, trans_rhs=transposed)
        return y_NO

    def weight_gradient(self, x_NI: Tensor, grad_NO: Tensor) -> Tensor:
        """See `GroupedProduct`."""
        grad_EIO: Any = incubate.batched_gemm(x_NI, grad_NO, self.counts, trans_lhs=True)
        for expert, count in enumerate(self.counts):
            # A product of no terms may leave the memory as it was.
            if count == 0:
                grad_EIO[expert] = 0.0
        return grad_EIO


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
    def of(cls, counts_E: Tensor, total: int, rows: int) -> "_Layout":
        """The layout of `total` rows, `counts_E` of each expert, in blocks of `rows`."""
        num_experts = counts_E.shape[0]
        numbers_N = paddle.arange(total, dtype="int64")
        ends_E = counts_E.cumsum()
        expert_N = paddle.searchsorted(ends_E, numbers_N, right=True).clip(max=num_experts - 1)
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
        """See `GroupedProduct`."""
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
        """See `GroupedProduct`."""
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
