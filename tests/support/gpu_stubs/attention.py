"""Stubs of Paddle's flash attention, versions 2 and 3, FlashMask, variable lengths, and xformers'.

Shapes: B batch, L queries, S keys, N query heads, K key heads, H head width, T and U packed rows of
queries and keys.
"""

from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F

from tests.support.gpu_stubs.machine import Machine, is_traced, kernel_stub, require

# Names of the flash attention kernels that this package calls.
FLASH = (
    *("flash_attn", "flash_attn_unpadded", "flashmask_attention"),
    *("flash_attn_v3", "flash_attn_v3_varlen", "flashmask_attention_v2"),
)
_MAX_GRID_Y = 65_535
_FLASH_DTYPES = (paddle.float16, paddle.bfloat16)


def _check_heads(machine: Machine, q, k, v, batch: int) -> None:
    """What every flash kernel checks. The batch lies along the grid's y dimension."""
    dtypes = [machine.dtype_of(x) for x in (q, k, v)]
    require(dtypes[0] in _FLASH_DTYPES, f"flash attention has no kernel for {dtypes[0]}")
    require(len(set(dtypes)) == 1, f"queries, keys and values of dtypes {dtypes}")
    require(q.dtype == k.dtype == v.dtype, f"dtypes {q.dtype}, {k.dtype}, {v.dtype}")
    heads, width = q.shape[-2:]
    require(list(k.shape) == list(v.shape), f"keys {k.shape} and values {v.shape}")
    require(k.shape[-1] == width, f"queries {q.shape} and keys {k.shape}")
    require(heads % k.shape[-2] == 0, f"{heads} query heads and {k.shape[-2]} key heads")
    require(width % 8 == 0, f"head width {width} is no multiple of 8")
    require(width <= 256, f"head width {width} above 256")
    if width > 192 and not q.stop_gradient:
        wide = machine.capability in ((8, 0), (9, 0))
        require(wide, f"the backward pass of head width {width} on capability {machine.capability}")
    require(0 < batch <= _MAX_GRID_Y, f"{batch} batch entries in a grid's y dimension")


def _check_padded(q, k) -> None:
    require(len(q.shape) == len(k.shape) == 4, f"queries {q.shape} and keys {k.shape}")
    require(q.shape[0] == k.shape[0], f"batch of queries {q.shape} and keys {k.shape}")


def _attend(q_BLNH, k_BSKH, v_BSKH, scale: float, bias=None, visible=None):
    """Attention in float32 or wider; a row that sees nothing gives zero.

    Args:
        bias: `[B, 1 or N, 1 or L, S]`.
        visible: `[B, 1, L, S]` or `[L, S]` bool.
    """
    groups = q_BLNH.shape[2] // k_BSKH.shape[2]
    wide = "float64" if q_BLNH.dtype == paddle.float64 else "float32"
    q_BNLH, k_BNSH, v_BNSH = (
        (x if i == 0 or groups == 1 else x.repeat_interleave(groups, axis=2))
        .transpose([0, 2, 1, 3])
        .astype(wide)
        for i, x in enumerate((q_BLNH, k_BSKH, v_BSKH))
    )
    scores = paddle.matmul(q_BNLH, k_BNSH, transpose_y=True) * scale
    if bias is not None:
        scores = scores + bias.astype(wide)
    if visible is None:
        probability = F.softmax(scores)
    else:
        seen = visible.astype(wide)
        probability = F.softmax(scores + (1.0 - seen) * -1e30) * seen
    out_BNLH = paddle.matmul(probability, v_BNSH)
    return out_BNLH.transpose([0, 2, 1, 3]).astype(q_BLNH.dtype)


def _tensor(array: np.ndarray):
    # Asked for in host memory: a kernel makes no copy to the device.
    return paddle.to_tensor(array, place=paddle.CPUPlace())


def _causal(length: int, keys: int):
    return paddle.tril(paddle.ones([length, keys])).astype("bool")


@kernel_stub("flash_attn")
def flash_attn(
    machine: Machine,
    q,
    k,
    v,
    fixed_seed_offset,
    attn_mask,
    dropout,
    causal,
    return_softmax,
    is_test,
    rng_name,
):
    """FlashAttention 2, with a dense mask that it broadcasts over heads and queries alone."""
    _check_padded(q, k)
    _check_heads(machine, q, k, v, q.shape[0])
    batch, length, heads, width = q.shape
    keys = k.shape[1]
    require(dropout == 0.0, "this package has no dropout in attention")
    require(not return_softmax, "the softmax is returned with dropout only")
    require(not (causal and attn_mask is not None), "a causal call ignores its mask")
    require(not causal or length == keys, f"a causal call of {length} queries and {keys} keys")
    if attn_mask is not None:
        shape = list(attn_mask.shape)
        require(machine.dtype_of(attn_mask) == machine.dtype_of(q), f"mask {attn_mask.dtype}")
        require(len(shape) == 4, f"a mask of shape {shape}")
        require(shape[0] == batch, f"mask {shape} for batch {batch}: dim 0 is not broadcast")
        require(shape[1] in (1, heads), f"mask {shape} for {heads} heads")
        require(shape[2] in (1, length), f"mask {shape} for {length} queries")
        require(shape[3] == keys, f"mask {shape} for {keys} keys")
        require(attn_mask.stop_gradient, "the kernel has no gradient of a mask")
    machine.record("flash_attn", q, k, v, attn_mask, causal=causal)
    if is_traced(q):
        return paddle.zeros_like(q), None, None, None
    if attn_mask is not None:
        # The kernel adds the mask to unscaled scores, times the root of the head width.
        with np.errstate(over="ignore"):
            unscaled = attn_mask.astype("float32").numpy() * np.float32(width**0.5)
        require(np.isfinite(unscaled).all(), "a mask times the root of the head width overflows")
    visible = _causal(length, keys) if causal else None
    return _attend(q, k, v, width**-0.5, attn_mask, visible), None, None, None


@kernel_stub("flash_attn_v3")
def flash_attn_v3(machine: Machine, q, k, v, *arguments):
    """FlashAttention 3: Hopper, no mask."""
    q_v, q_scale, k_scale, v_scale, scale, causal, left, right, softcap, splits = arguments[:10]
    require(machine.capability == (9, 0), f"FlashAttention 3 on {machine.capability}")
    _check_padded(q, k)
    _check_heads(machine, q, k, v, q.shape[0])
    require([q_v, q_scale, k_scale, v_scale] == [None] * 4, "no FP8 and no second value")
    require((left, right, softcap, splits) == (-1, -1, 0.0, 1), "no window, no cap, one split")
    machine.record("flash_attn_v3", q, k, v, causal=causal)
    if is_traced(q):
        return paddle.zeros_like(q), None
    require(not causal or q.shape[1] == k.shape[1], "a causal call with as many queries as keys")
    visible = _causal(q.shape[1], k.shape[1]) if causal else None
    return _attend(q, k, v, scale, None, visible), None


def _check_offsets(offsets, rows: int, longest: int, what: str) -> None:
    require(offsets.dtype == paddle.int32, f"{what} is {offsets.dtype}, int32 is read")
    require(len(offsets.shape) == 1, f"{what} has shape {offsets.shape}")
    require(isinstance(longest, int), f"the longest of {what} is a {type(longest).__name__}")
    require(longest > 0, f"the longest of {what} is {longest}")
    if not is_traced(offsets):
        values = offsets.numpy()
        lengths = np.diff(values)
        require(values[0] == 0, f"{what} begins at {values[0]}")
        require(values[-1] == rows, f"{what} ends at {values[-1]} of {rows} rows")
        require((lengths >= 0).all(), f"{what} decreases")
        require(lengths.max() <= longest, f"{what} has {lengths.max()} rows, longest is {longest}")


def _varlen(machine, name, q, k, v, cu_q, cu_k, longest_q, longest_k, scale, causal) -> Any:
    require(len(q.shape) == len(k.shape) == 3, f"queries {q.shape} and keys {k.shape}")
    require(list(cu_q.shape) == list(cu_k.shape), f"offsets {cu_q.shape} and {cu_k.shape}")
    _check_offsets(cu_q, q.shape[0], longest_q, "cu_seqlens_q")
    _check_offsets(cu_k, k.shape[0], longest_k, "cu_seqlens_k")
    _check_heads(machine, q, k, v, cu_q.shape[0] - 1)
    require(not causal, "this package has no causal call of variable lengths")
    machine.record(name, q, k, v, cu_q, longest=longest_q)
    if is_traced(q):
        return paddle.zeros_like(q)
    label_T, label_U = (
        np.repeat(np.arange(cu.shape[0] - 1), np.diff(cu.numpy())) for cu in (cu_q, cu_k)
    )
    visible = _tensor(label_T[:, None] == label_U)
    return _attend(*(x.unsqueeze(0) for x in (q, k, v)), scale, None, visible).squeeze(0)


@kernel_stub("flash_attn_unpadded")
def flash_attn_unpadded(machine: Machine, q, k, v, cu_q, cu_k, *arguments):
    """FlashAttention 2 over segments of any lengths."""
    seed, mask, longest_q, longest_k, scale, dropout, causal, return_softmax, _, _ = arguments
    require((seed, mask, dropout, return_softmax) == (None, None, 0.0, False), "plain calls only")
    out = _varlen(
        machine, "flash_attn_unpadded", q, k, v, cu_q, cu_k, longest_q, longest_k, scale, causal
    )
    return out, None


@kernel_stub("flash_attn_v3_varlen")
def flash_attn_v3_varlen(machine: Machine, q, k, v, cu_q, cu_k, *arguments):
    """FlashAttention 3 over segments of any lengths."""
    require(machine.capability == (9, 0), f"FlashAttention 3 on {machine.capability}")
    used_q, used_k, q_v, *scales = arguments[:6]
    longest_q, longest_k, scale, causal, left, right, softcap, splits = arguments[6:14]
    require([used_q, used_k, q_v, *scales] == [None] * 6, "no FP8, no second value, all rows used")
    require((left, right, softcap, splits) == (-1, -1, 0.0, 1), "no window, no cap, one split")
    out = _varlen(
        machine, "flash_attn_v3_varlen", q, k, v, cu_q, cu_k, longest_q, longest_k, scale, causal
    )
    return out, None


def visible_of_rows(rows_BKSX: np.ndarray, length: int, causal: bool) -> np.ndarray:
    """`[B, K, L, S]` bool mask of FlashMask's row indices.

    Its documentation describes intervals within the triangles below and above the diagonal, its
    conversion to a dense mask whole columns. A mask that means different things is refused. With
    more keys than rows there is no diagonal; PaddleFleet's context parallelism, which gathers keys
    and values as this package does, relies on whole columns.
    """
    bounds, keys = rows_BKSX.shape[-1], rows_BKSX.shape[2]
    require(bounds in ((1, 2) if causal else (2, 4)), f"{bounds} bounds, causal is {causal}")
    row_L1, key_S = np.arange(length)[:, None], np.arange(keys)
    parts = [rows_BKSX[:, :, None, :, i] for i in range(bounds)]
    has_end = bounds == (2 if causal else 4)
    below = row_L1 >= parts[0]
    if has_end:
        below &= row_L1 < parts[1]
    above = np.zeros_like(below)
    if not causal:
        begin, end = (parts[2], parts[3]) if has_end else (0, parts[1])
        above = (row_L1 >= begin) & (row_L1 < end)
    by_columns = below | above
    by_triangles = (below & (row_L1 >= key_S)) | (above & (row_L1 < key_S))
    if causal:
        by_columns, by_triangles = (
            hidden | (row_L1 < key_S) for hidden in (by_columns, by_triangles)
        )
    if length == keys:
        require((by_columns == by_triangles).all(), "row indices with two readings")
    return ~by_columns


def _flashmask(machine: Machine, name: str, q, k, v, rows, scale: float, causal: bool) -> Any:
    _check_padded(q, k)
    _check_heads(machine, q, k, v, q.shape[0])
    shape = list(rows.shape)
    require(rows.dtype == paddle.int32, f"row indices are {rows.dtype}")
    require(len(shape) == 4, f"row indices of shape {shape}")
    require(shape[0] == q.shape[0], f"row indices {shape} for batch {q.shape[0]}")
    require(shape[1] in (1, k.shape[2], q.shape[2]), f"row indices {shape} for the heads")
    require(shape[2] == k.shape[1], f"row indices {shape} for {k.shape[1]} keys")
    if causal:
        require(shape[2] == q.shape[1], f"row indices {shape} for {q.shape[1]} queries")
    require(shape[3] in ((1, 2) if causal else (2, 4)), f"{shape[3]} bounds, causal is {causal}")
    machine.record(name, q, k, v, rows, causal=causal)
    if is_traced(q):
        return paddle.zeros_like(q)
    values = rows.numpy()
    require(values.min() >= 0, "row indices below 0")
    require(values.max() <= q.shape[1], "row indices beyond the rows")
    visible = _tensor(visible_of_rows(values, q.shape[1], causal))
    return _attend(q, k, v, scale, None, visible)


@kernel_stub("flashmask_attention")
def flashmask_attention(machine: Machine, q, k, v, rows, *arguments):
    """FlashMask of version 2."""
    seed, dropout, causal, return_softmax, _, _ = arguments
    require((seed, dropout, return_softmax) == (None, 0.0, False), "plain calls only")
    out = _flashmask(machine, "flashmask_attention", q, k, v, rows, q.shape[-1] ** -0.5, causal)
    return out, None, None, None


@kernel_stub("flashmask_attention_v2")
def flashmask_attention_v2(machine: Machine, q, k, v, rows, block_mask, scale, causal):
    """FlashMask of version 3, which Paddle calls v2."""
    require(machine.capability == (9, 0), f"FlashAttention 3 on {machine.capability}")
    require(block_mask is None, "this package has no block masks")
    out = _flashmask(machine, "flashmask_attention_v2", q, k, v, rows, scale, causal)
    return out, None


@kernel_stub("memory_efficient_attention")
def memory_efficient_attention(machine: Machine, q, k, v, bias, *arguments):
    """xformers' kernel, which Paddle takes for float32."""
    *sequences, causal, dropout, scale, _ = arguments
    require(all(x in (None, -1) for x in sequences), "this package has no sequences of its own")
    _check_padded(q, k)
    batch, length, heads, width = q.shape
    require(k.shape[2] == heads, f"{k.shape[2]} key heads for {heads}: Paddle repeats them")
    require(not causal or length == k.shape[1], "a causal call with as many queries as keys")
    require(dropout == 0.0, "this package has no dropout in attention")
    if bias is not None:
        shape = list(bias.shape)
        whole = [batch, heads, length, k.shape[1]]
        require(shape in (whole, [1, 1, *whole[2:]]), f"a bias of {shape} for {whole}")
        require(shape[3] % 8 == 0, f"a bias of {shape[3]} keys, no multiple of 8")
    machine.record("memory_efficient_attention", q, k, v, bias, causal=causal)
    if is_traced(q):
        return paddle.zeros_like(q), None, None
    visible = _causal(length, length) if causal else None
    return _attend(q, k, v, scale if scale > 0 else width**-0.5, bias, visible), None, None
