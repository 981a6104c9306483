"""Flash attention for every form of attention whose dtype and head width it takes.

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

Shapes: B batch, L queries, S keys, C capacity of a cache, N query heads, K key heads, Y and X those
of all prompts together, H head width, P packed rows.
"""

from typing import Any

import paddle
import paddle.nn.functional as F
from paddle import Tensor
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
    Segments,
    with_averages,
)
from paddle_vl.nn.attention_masks import AttentionMask, HistoryMask

_VERSION, _DETERMINISTIC = "FLAGS_flash_attn_version", "FLAGS_cudnn_deterministic"


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
