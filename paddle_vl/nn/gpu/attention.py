"""Flash attention for every form of attention whose dtype and head width it takes.

| attention | call |
| --- | --- |
| causal | flash attention |
| causal, packed samples or masked keys | FlashMask: for each key, where it ends |
| segments of any lengths (images) | one call for variable lengths |
| blocks of a prefix | FlashMask: for each key, the rows that see it |
| a suffix after a prefix | flash attention with a bias of one row |
| past frames of a video | FlashMask: all patches of a video in one row, each a document |
| other masks | flash attention with a dense bias |

Other dtypes and head widths take the plain implementations.
"""

import paddle
from paddle import Tensor

from paddle_vl.nn.attention import (
    AttentionMask,
    HistoryMask,
    PackedSamples,
    Segments,
    causal_attention,
    eager_or_sdpa_attention,
    equal_segments_attention,
    runs_attention,
)
from paddle_vl.nn.gpu.flash import (
    MAX_BATCH,
    fits_flash,
    flash,
    flash_of_rows,
    flash_of_segments,
    flash_with_bias,
)


@causal_attention.register("gpu")
def _causal_attention(
    q_BLNH: Tensor,
    k_BSKH: Tensor,
    v_BSKH: Tensor,
    key_bias_BS: Tensor | None = None,
    packed: PackedSamples | None = None,
) -> Tensor:
    length, keys = q_BLNH.shape[1], k_BSKH.shape[1]
    if not fits_flash(q_BLNH):
        return causal_attention.plain(q_BLNH, k_BSKH, v_BSKH, key_bias_BS, packed)
    if packed is not None:
        return flash_of_rows(q_BLNH, k_BSKH, v_BSKH, packed.key_ends_B1L1, causal=True)
    if key_bias_BS is None and length in (1, keys):
        # A single query is the last and sees all keys.
        return flash(q_BLNH, k_BSKH, v_BSKH, causal=length > 1)
    if key_bias_BS is not None and length == keys and length > 1:
        return flash_of_rows(q_BLNH, k_BSKH, v_BSKH, _ends_of_keys(key_bias_BS), causal=True)
    return causal_attention.plain(q_BLNH, k_BSKH, v_BSKH, key_bias_BS)


def _ends_of_keys(key_bias_BS: Tensor) -> Tensor:
    """`[B, 1, S, 1]` int32: a masked key ends at its own row, others are seen by all later ones."""
    keys = key_bias_BS.shape[1]
    masked = (key_bias_BS < 0).astype("int32")
    place_S = paddle.arange(keys, dtype="int32")
    return (keys - masked * (keys - place_S)).unsqueeze([1, 3])


@equal_segments_attention.register("gpu")
def _equal_segments_attention(
    q_PNH: Tensor, k_PNH: Tensor, v_PNH: Tensor, count: int, length: int
) -> Tensor:
    if not fits_flash(q_PNH):
        return equal_segments_attention.plain(q_PNH, k_PNH, v_PNH, count, length)
    heads = q_PNH.shape[1:]
    q, k, v = (x.reshape([count, length, *heads]) for x in (q_PNH, k_PNH, v_PNH))
    return flash(q, k, v).reshape([-1, *heads])


@runs_attention.register("gpu")
def _runs_attention(q_PNH: Tensor, k_PNH: Tensor, v_PNH: Tensor, segments: Segments) -> Tensor:
    is_one_call = len(segments.runs) > 1 and segments.count <= MAX_BATCH
    if is_one_call and fits_flash(q_PNH):
        return flash_of_segments(q_PNH, k_PNH, v_PNH, segments)
    return runs_attention.plain(q_PNH, k_PNH, v_PNH, segments)


@eager_or_sdpa_attention.register("gpu")
def _eager_or_sdpa_attention(
    q_BLNH: Tensor,
    k_BSKH: Tensor,
    v_BSKH: Tensor,
    mask: AttentionMask,
    scale: float,
    implementation: str,
) -> Tensor:
    if not fits_flash(q_BLNH):
        return eager_or_sdpa_attention.plain(q_BLNH, k_BSKH, v_BSKH, mask, scale, implementation)
    # The kernels scale by H^-0.5.
    factor = scale * q_BLNH.shape[-1] ** 0.5
    q_BLNH = q_BLNH if abs(factor - 1.0) < 1e-9 else q_BLNH * factor
    rows = mask.row_intervals() if q_BLNH.shape[1] == k_BSKH.shape[1] else None
    if isinstance(mask, HistoryMask):
        out_BLNH = _attend_to_history(q_BLNH, k_BSKH, v_BSKH, mask)
    elif rows is not None:
        out_BLNH = flash_of_rows(q_BLNH, k_BSKH, v_BSKH, rows, causal=False)
    else:
        bias = mask.row_bias_in(q_BLNH.dtype)
        out_BLNH = flash_with_bias(q_BLNH, k_BSKH, v_BSKH, bias)
    if not mask.some_see_nothing:
        return out_BLNH
    has_key_BL11 = mask.has_key_BL11.astype(out_BLNH.dtype)
    out_BLNH = out_BLNH * has_key_BL11
    if implementation == "sdpa":
        return out_BLNH
    # A query without a key gets the average of all values.
    groups = q_BLNH.shape[2] // k_BSKH.shape[2]
    mean_B1KH = v_BSKH.astype("float32").mean(axis=1, keepdim=True).astype(v_BSKH.dtype)
    mean_B1NH = mean_B1KH if groups == 1 else mean_B1KH.repeat_interleave(groups, axis=2)
    return out_BLNH + mean_B1NH * (1.0 - has_key_BL11)


def _attend_to_history(q_BFNH: Tensor, k_BFNH: Tensor, v_BFNH: Tensor, mask: HistoryMask) -> Tensor:
    """All entries of a video in one row. A batch entry for each would fill 128 rows of a tile with
    a few frames, and there may be more than a grid has room for."""
    q_VRNH, k_VRKH, v_VRKH = (
        x.reshape([-1, mask.copies * x.shape[1], *x.shape[2:]]) for x in (q_BFNH, k_BFNH, v_BFNH)
    )
    out_VRNH = flash_of_rows(q_VRNH, k_VRKH, v_VRKH, mask.row_ends_V1R1, causal=True)
    return out_VRNH.reshape([-1, *q_BFNH.shape[1:]])
