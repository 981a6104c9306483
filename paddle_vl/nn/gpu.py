"""Operations on a GPU by Paddle's fused kernels: attention, activations, norms, rotary embedding,
experts. `paddle_vl.nn.kernels` says which inputs go to which function.

Flash attention is for every form of attention whose dtype and head width it takes.

| attention | call |
| --- | --- |
| causal | flash attention |
| a single query on cached keys | flash attention, all prompts in one batch entry |
| causal, packed samples or masked keys | FlashMask: for each key, where it ends |
| segments of any lengths (images) | one call for variable lengths |
| a single query of each row on keys in a shared memory | the same, on a copy of these keys |
| blocks of a prefix | FlashMask: for each key, the rows that see it |
| a suffix after a prefix | flash attention with a bias of one row |
| a slice of packed samples on all keys | FlashMask: for each key, the rows that see it |
| past frames of a video | FlashMask: all patches of a video in one row, each a document |
| other masks | flash attention with a dense bias |

Other dtypes and head widths do not fit.

`FLAGS_flash_attn_version` chooses FlashAttention 2 or 3 (`paddle_vl.train.gpu_settings` sets it).
`scaled_dot_product_attention` does not look at it, `flash_attention` and `flashmask_attention` do,
and variable lengths have a function for each version. A dense mask is for version 2 alone.

Limits of the kernels: bfloat16 or float16, head widths up to 256 in multiples of 8, and 65,535
batch entries, which lie along a grid's y dimension. Source: Paddle 3.3.1's
`nn/functional/flash_attention.py` and `sdpa.py`; flash-attention's `flash_attn.cu`.

Shapes of attention: B batch, L queries, S keys, C capacity of a cache, N query heads, K key heads,
Y and X those of all prompts together, H head width, P packed rows.

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

Shapes of the others: N rows, E experts, I features in, O features out; B blocks beyond the first E,
of R rows.
"""

import math
from typing import Any, NamedTuple

import paddle
import paddle.incubate.nn.functional as incubate
import paddle.nn.functional as F
from paddle import Tensor, _C_ops
from paddle.autograd import PyLayer
from paddle.nn.attention.sdpa import SDPBackend, _get_enabled_backends
from paddle.nn.functional.flash_attention import (
    flash_attention,
    flash_attn_unpadded,
    flash_attn_varlen_func,
)

from paddle_vl.nn.attention import (
    CachedKeys,
    PackedSamples,
    PagedKeys,
    RotaryTables,
    Segments,
    with_averages,
)
from paddle_vl.nn.attention_masks import AttentionMask, HistoryMask
from paddle_vl.nn.experts import GroupedProduct, GroupSizes

_VERSION, _DETERMINISTIC = "FLAGS_flash_attn_version", "FLAGS_cudnn_deterministic"
# Paddle's layer_norm refuses a larger one.
_LARGEST_EPSILON = 1e-3
# A product of fewer rows takes as long: the rows of a tile of cuBLAS.
_TILE = 128
# Rows of a block where the host must not read the counts, over the square root of the rows per
# expert. Up to a block of each expert is empty, and each further one copies a matrix: on an H100
# both take equally long then, by its data sheet.
_BALANCE = 22

# Attention


def has_flash_dtype(x: Tensor) -> bool:
    """Whether flash attention has kernels for this dtype."""
    return x.dtype in (paddle.bfloat16, paddle.float16)


def fits_flash(q: Tensor, *others: Any) -> bool:
    """Whether flash attention takes queries of this dtype and head width, `[..., H]`.

    Never in a Paddle that is built without it, or where the user has disabled it
    (`paddle.nn.attention.sdpa_kernel`): `flash_attention` would then drop the causal mask.
    """
    width = q.shape[-1]
    fits = has_flash_dtype(q) and width <= 256 and width % 8 == 0
    return fits and SDPBackend.FLASH_ATTENTION in _get_enabled_backends()


def flash(q_BLNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor, causal: bool = False) -> Tensor:
    """Attention without a mask, or causal with L = S: `[B, L, N, H]`."""
    return flash_attention(q_BLNH, k_BSKH, v_BSKH, causal=causal)[0]


def flash_of_rows(
    q_BLNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor, rows_B1SX: Tensor, causal: bool
) -> Tensor:
    """Attention in which each key is seen by one run of rows; causal, L = S.

    Args:
        rows_B1SX: int32. Causal, X = 1: the first later row that does not see the key. Else X = 2:
            the end and the begin of the rows that see it.
    """
    out: Any = F.flashmask_attention(q_BLNH, k_BSKH, v_BSKH, rows_B1SX, causal=causal)
    return out


def fits_runs(q_PNH: Tensor, k_PNH: Tensor, v_PNH: Tensor, segments: Segments) -> bool:
    """Whether `runs_attention` takes these; a single run needs no variable lengths."""
    return len(segments.runs) > 1 and fits_flash(q_PNH)


def runs_attention(q_PNH: Tensor, k_PNH: Tensor, v_PNH: Tensor, segments: Segments) -> Tensor:
    """`nn.attention.runs_attention` in one call."""
    offsets, longest = segments.offsets, segments.longest
    return _of_lengths(q_PNH, k_PNH, v_PNH, (offsets, offsets, longest, longest))


def _of_lengths(
    q: Tensor, k: Tensor, v: Tensor, lengths: tuple[Tensor, Tensor, int, int]
) -> Tensor:
    flags = paddle.get_flags([_VERSION, _DETERMINISTIC])
    if flags[_VERSION] == 3 and not flags[_DETERMINISTIC]:
        return flash_attn_varlen_func(q, k, v, *lengths)[0]
    return flash_attn_unpadded(q, k, v, *lengths, q.shape[-1] ** -0.5)[0]


def paged_attention(q_RNH: Tensor, key_MKH: Tensor, value_MKH: Tensor, paged: PagedKeys) -> Tensor:
    """`nn.attention.paged_attention`."""
    k_PKH, v_PKH = (paddle.index_select(x, paged.places) for x in (key_MKH, value_MKH))
    lengths = (paged.queries, paged.offsets, 1, paged.length)
    return _of_lengths(q_RNH, k_PKH, v_PKH, lengths)


def fits_causal(
    q_BLNH: Tensor,
    k_BSKH: Tensor,
    v_BSKH: Tensor,
    key_bias_BS: Tensor | None = None,
    packed: PackedSamples | None = None,
) -> bool:
    """Whether `causal_attention` takes these."""
    length, keys = q_BLNH.shape[1], k_BSKH.shape[1]
    is_square = length == keys and (key_bias_BS is None or length > 1)
    # A single query is the last and sees all keys.
    is_last = key_bias_BS is None and length == 1
    return (packed is not None or is_square or is_last) and fits_flash(q_BLNH)


def causal_attention(
    q_BLNH: Tensor,
    k_BSKH: Tensor,
    v_BSKH: Tensor,
    key_bias_BS: Tensor | None = None,
    packed: PackedSamples | None = None,
) -> Tensor:
    """`nn.attention.causal_attention`."""
    if packed is not None:
        return flash_of_rows(q_BLNH, k_BSKH, v_BSKH, packed.key_ends_B1L1, causal=True)
    if key_bias_BS is None:
        return flash(q_BLNH, k_BSKH, v_BSKH, causal=q_BLNH.shape[1] > 1)
    return flash_of_rows(q_BLNH, k_BSKH, v_BSKH, _ends_of_keys(key_bias_BS), causal=True)


def _ends_of_keys(key_bias_BS: Tensor) -> Tensor:
    """`[B, 1, S, 1]` int32: a masked key ends at its own row, others are seen by all later ones."""
    keys = key_bias_BS.shape[1]
    masked = (key_bias_BS < 0).astype("int32")
    place_S = paddle.arange(keys, dtype="int32")
    return (keys - masked * (keys - place_S)).unsqueeze([1, 3])


def fits_cached(q_BLNH: Tensor, *others: Any) -> bool:
    """Whether `cached_attention` takes these."""
    return q_BLNH.shape[1] == 1 and fits_flash(q_BLNH)


def cached_attention(
    q_B1NH: Tensor, key_BKCH: Tensor, value_BKCH: Tensor, cached: CachedKeys
) -> Tensor:
    """`nn.attention.cached_attention` of a single query. The heads of all prompts are those of one
    batch entry, so that the keys of all positions so far are contiguous: nothing is copied."""
    heads, width = q_B1NH.shape[2:]
    key_1SXH, value_1SXH = (
        buffer.transpose([2, 0, 1, 3])[: cached.length].reshape([1, cached.length, -1, width])
        for buffer in (key_BKCH, value_BKCH)
    )
    q_11YH = q_B1NH.reshape([1, 1, -1, width])
    mask = cached.mask_of_heads(heads, q_B1NH.dtype)
    if mask is None:
        return flash(q_11YH, key_1SXH, value_1SXH).reshape(q_B1NH.shape)
    out_11YH = F.scaled_dot_product_attention(q_11YH, key_1SXH, value_1SXH, mask)
    return out_11YH.reshape(q_B1NH.shape)


def equal_segments_attention(
    q_PNH: Tensor, k_PNH: Tensor, v_PNH: Tensor, count: int, length: int
) -> Tensor:
    """`nn.attention.equal_segments_attention`."""
    heads = q_PNH.shape[1:]
    q, k, v = (x.reshape([count, length, *heads]) for x in (q_PNH, k_PNH, v_PNH))
    return flash(q, k, v).reshape([-1, *heads])


def masked_attention(
    q_BLNH: Tensor,
    k_BSKH: Tensor,
    v_BSKH: Tensor,
    mask: AttentionMask,
    scale: float,
    implementation: str = "eager",
) -> Tensor:
    """`nn.attention.masked_attention`."""
    # The kernels scale by H^-0.5.
    factor = scale * q_BLNH.shape[-1] ** 0.5
    q_BLNH = q_BLNH if abs(factor - 1.0) < 1e-9 else q_BLNH * factor
    fits_rows = q_BLNH.shape[1] == k_BSKH.shape[1] or not mask.keys_are_queries
    rows = mask.row_intervals() if fits_rows else None
    if isinstance(mask, HistoryMask):
        out_BLNH = _attend_to_history(q_BLNH, k_BSKH, v_BSKH, mask)
    elif rows is not None:
        out_BLNH = flash_of_rows(q_BLNH, k_BSKH, v_BSKH, rows, causal=False)
    else:
        bias = mask.row_bias_in(q_BLNH.dtype)
        out_BLNH = F.scaled_dot_product_attention(q_BLNH, k_BSKH, v_BSKH, bias)
    if not mask.some_see_nothing:
        return out_BLNH
    out_BLNH = out_BLNH * mask.has_key_BL11.astype(out_BLNH.dtype)
    return out_BLNH if implementation == "sdpa" else with_averages(out_BLNH, v_BSKH, mask)


def _attend_to_history(q_BFNH: Tensor, k_BFNH: Tensor, v_BFNH: Tensor, mask: HistoryMask) -> Tensor:
    """All entries of a video in one row. A batch entry for each would fill 128 rows of a tile with
    a few frames, and there may be more than a grid has room for."""
    q_VRNH, k_VRKH, v_VRKH = (
        x.reshape([-1, mask.copies * x.shape[1], *x.shape[2:]]) for x in (q_BFNH, k_BFNH, v_BFNH)
    )
    out_VRNH = flash_of_rows(q_VRNH, k_VRKH, v_VRKH, mask.row_ends_V1R1, causal=True)
    return out_VRNH.reshape([-1, *q_BFNH.shape[1:]])


# Activations, norms, rotary embedding, experts


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
