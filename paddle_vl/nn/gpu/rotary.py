"""Rotary embedding in Paddle's fused kernel: one launch for queries, one for keys, none kept.

The kernel computes in float32 and takes tables in the dtype of the rows, so float32 tables are
rounded to it, once for all layers of a forward pass (as HF transformers rounds those of its
decoders). The plain form computes in the dtype of the tables.
"""

import paddle.incubate.nn.functional as incubate
from paddle import Tensor

from paddle_vl.nn.rotary import RotaryTables, apply_rotary


@apply_rotary.register("gpu")
def _apply_rotary(q_TNH: Tensor, k_TKH: Tensor, tables: RotaryTables) -> tuple[Tensor, Tensor]:
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
