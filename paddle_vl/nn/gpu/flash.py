"""Calls of Paddle's flash attention kernels within their limits, in the version that is set.

`FLAGS_flash_attn_version` chooses FlashAttention 2 or 3 (`paddle_vl.nn.gpu.flags` sets it).
`scaled_dot_product_attention` does not look at it, `flash_attention` and `flashmask_attention` do,
and variable lengths have a function for each version. A dense mask is for version 2 alone.

Limits of the kernels: bfloat16 or float16, head widths up to 256 in multiples of 8, and 65,535
batch entries, which lie along a grid's y dimension. Source: Paddle 3.3.1's
`nn/functional/flash_attention.py` and `sdpa.py`; flash-attention's `flash_attn.cu`.

Shapes: B batch, L queries, S keys, N query heads, K key heads, H head width, P packed rows.
"""

from collections.abc import Callable
from typing import Any

import paddle
import paddle.nn.functional as F
from paddle import Tensor
from paddle.nn.functional.flash_attention import (
    flash_attention,
    flash_attn_unpadded,
    flash_attn_varlen_func,
)

from paddle_vl.nn.attention import Segments

MAX_BATCH = 65_535
_VERSION, _DETERMINISTIC = "FLAGS_flash_attn_version", "FLAGS_cudnn_deterministic"


def has_flash_dtype(x: Tensor) -> bool:
    """Whether flash attention has kernels for this dtype."""
    return x.dtype in (paddle.bfloat16, paddle.float16)


def fits_flash(q: Tensor) -> bool:
    """Whether flash attention takes queries of this dtype and head width, `[..., H]`."""
    width = q.shape[-1]
    return has_flash_dtype(q) and width <= 256 and width % 8 == 0


def flash(q_BLNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor, causal: bool = False) -> Tensor:
    """Attention without a mask, or causal with L = S: `[B, L, N, H]`."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attention(q, k, v, causal=causal)[0]

    return _in_parts(attend, q_BLNH, k_BSKH, v_BSKH)


def flash_with_bias(q_BLNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor, bias: Tensor) -> Tensor:
    """Attention with a dense bias `[B, 1, L or 1, S]` in the dtype of the queries."""
    return _in_parts(F.scaled_dot_product_attention, q_BLNH, k_BSKH, v_BSKH, bias)


def flash_of_rows(
    q_BLNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor, rows_B1SX: Tensor, causal: bool
) -> Tensor:
    """Attention in which each key is seen by one run of rows; L = S.

    Args:
        rows_B1SX: int32. Causal, X = 1: the first later row that does not see the key. Else X = 2:
            the end and the begin of the rows that see it.
    """

    def attend(q: Tensor, k: Tensor, v: Tensor, rows: Tensor) -> Tensor:
        out: Any = F.flashmask_attention(q, k, v, rows, causal=causal)
        return out

    return _in_parts(attend, q_BLNH, k_BSKH, v_BSKH, rows_B1SX)


def flash_of_segments(q_PNH: Tensor, k_PKH: Tensor, v_PKH: Tensor, segments: Segments) -> Tensor:
    """Attention within segments of any lengths in one call: `[P, N, H]`."""
    lengths = (segments.offsets, segments.offsets, segments.longest, segments.longest)
    flags = paddle.get_flags([_VERSION, _DETERMINISTIC])
    if flags[_VERSION] == 3 and not flags[_DETERMINISTIC]:
        return flash_attn_varlen_func(q_PNH, k_PKH, v_PKH, *lengths)[0]
    return flash_attn_unpadded(q_PNH, k_PKH, v_PKH, *lengths, q_PNH.shape[-1] ** -0.5)[0]


def _in_parts(attend: Callable[..., Any], *inputs: Tensor) -> Tensor:
    """The same in several calls if there are more batch entries than one call takes."""
    batch = inputs[0].shape[0]
    if not isinstance(batch, int) or batch <= MAX_BATCH:
        return attend(*inputs)
    begins = range(0, batch, MAX_BATCH)
    return paddle.concat(
        [attend(*(x[begin : begin + MAX_BATCH] for x in inputs)) for begin in begins]
    )
