"""Attention under any mask on the CPU, in query blocks.

Shapes: as in `paddle_vl.nn.cpu.attention`.
"""

from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import paddle
from paddle import Tensor

from paddle_vl.nn.attention import MASKED_SCORE, AttentionMask, eager_or_sdpa_attention
from paddle_vl.nn.cpu.attention import QUERY_BLOCK, Block, Parts, attention_in_blocks


@eager_or_sdpa_attention.register("cpu")
def _eager_or_sdpa_attention(
    q_BLNH: Tensor,
    k_BSKH: Tensor,
    v_BSKH: Tensor,
    mask: AttentionMask,
    scale: float,
    implementation: str,
) -> Tensor:
    factor = scale * q_BLNH.shape[-1] ** 0.5
    q_BLNH = q_BLNH if factor == 1.0 else q_BLNH * factor
    key_heads = k_BSKH.shape[2]
    parts = mask_parts(mask, q_BLNH.shape[2] // key_heads, key_heads)
    out_BLNH = attention_in_blocks(q_BLNH, k_BSKH, v_BSKH, parts)
    if sees(mask).all_see:
        return out_BLNH
    out_BLNH = out_BLNH * mask.has_key_BL11.astype(out_BLNH.dtype)
    return out_BLNH if implementation == "sdpa" else with_averages(out_BLNH, v_BSKH, mask)


def with_averages(out_BLNH: Tensor, v_BSKH: Tensor, mask: AttentionMask) -> Tensor:
    """An output that is zero for a query without a key, with the average of all values there."""
    groups = out_BLNH.shape[2] // v_BSKH.shape[2]
    mean_B1KH = v_BSKH.mean(axis=1, keepdim=True)
    mean_B1NH = mean_B1KH if groups == 1 else mean_B1KH.repeat_interleave(groups, axis=2)
    return out_BLNH + mean_B1NH * (1.0 - mask.has_key_BL11).astype(out_BLNH.dtype)


class Sees(NamedTuple):
    """What a mask lets queries see, on the host.

    Attributes:
        visible: `[B, L, S]` bool.
        ends: `[B, L]` int32, the last key that each query sees plus one; 0 if it sees none.
        all_see: whether every query sees a key.
    """

    visible: np.ndarray
    ends: np.ndarray
    all_see: bool


class _MaskBlocks:
    """What is made once of a mask that serves several layers."""

    def __init__(self) -> None:
        self.sees: Sees | None = None
        self.parts: dict[tuple[int, int], Parts] = {}


_of_masks: WeakKeyDictionary[AttentionMask, _MaskBlocks] = WeakKeyDictionary()


def sees(mask: AttentionMask) -> Sees:
    """See `Sees`; reads the mask once."""
    made = _of_masks.setdefault(mask, _MaskBlocks())
    if made.sees is None:
        visible_BLS = np.ascontiguousarray(mask.visible_on_host())
        keys = visible_BLS.shape[-1]
        ends_BL = keys - visible_BLS[:, :, ::-1].argmax(axis=-1)
        ends_BL[~visible_BLS.any(axis=-1)] = 0
        made.sees = Sees(visible_BLS, ends_BL.astype(np.int32), bool(ends_BL.all()))
    return made.sees


def mask_parts(mask: AttentionMask, groups: int, key_heads: int) -> Parts:
    """Blocks of attention under a mask; a query without a key sees all keys of its block.

    A batch entry is a part, so that its mask is common to its heads. Few queries are one block of
    one part.
    """
    made, key = _of_masks.setdefault(mask, _MaskBlocks()), (groups, key_heads)
    if key not in made.parts:
        visible_BLS, ends_BL, _ = sees(mask)
        if visible_BLS.shape[1] <= QUERY_BLOCK:
            made.parts[key] = (_common_block(visible_BLS, ends_BL, groups, key_heads),)
        else:
            made.parts[key] = tuple(
                _blocks_of_mask(visible_LS, ends_L, groups)
                for visible_LS, ends_L in zip(visible_BLS, ends_BL, strict=True)
            )
    return made.parts[key]


def _common_block(
    visible_BLS: np.ndarray, ends_BL: np.ndarray, groups: int, key_heads: int
) -> tuple[Block]:
    """One block, with a matrix for each of Z."""
    num_keys = max(int(ends_BL.max()), 1)
    seen_BLS = visible_BLS[:, :, :num_keys] | (ends_BL == 0)[:, :, None]
    seen_ZRS = seen_BLS.repeat(groups, axis=1).repeat(key_heads, axis=0)
    return (_masked_block(0, num_keys, seen_ZRS),)


def _blocks_of_mask(visible_LS: np.ndarray, ends_L: np.ndarray, groups: int) -> tuple[Block, ...]:
    blocks, num_keys = [], 1
    for begin in range(0, ends_L.size, QUERY_BLOCK):
        rows = slice(begin, begin + QUERY_BLOCK)
        num_keys = max(num_keys, int(ends_L[rows].max()))
        seen_LS = visible_LS[rows, :num_keys] | (ends_L[rows] == 0)[:, None]
        blocks.append(_masked_block(begin * groups, num_keys, seen_LS.repeat(groups, axis=0)))
    return tuple(blocks)


def _masked_block(begin: int, num_keys: int, seen_RS: np.ndarray) -> Block:
    end = begin + seen_RS.shape[-2]
    if seen_RS.all():
        return Block(begin, end, 0, num_keys)
    seen = paddle.to_tensor(seen_RS, place=paddle.CPUPlace()).astype("float32")
    return Block(begin, end, 0, num_keys, lambda: (seen - 1.0) * -MASKED_SCORE, lambda: seen)
