"""Stand-in of `fused_rotary_position_embedding`, by fused_rope_kernel.cu of Paddle 3.3.1."""

import paddle

from tests.support.gpu_stubs.contract import is_float32, is_half, need

KERNEL = "fused_rotary_position_embedding"


def fused_rotary_position_embedding(
    q, k=None, v=None, sin=None, cos=None, position_ids=None, use_neox_rotary_style=True,
    time_major=False, rotary_emb_base=10000.0,
):  # fmt: skip
    need(position_ids is None and not time_major and v is None, KERNEL, "rows in order")
    need(not use_neox_rotary_style, KERNEL, "the halves as pairs: its neox style pairs neighbours")
    need(sin is not None and cos is not None, KERNEL, "tables")
    for x in (q, k):
        if x is None:
            continue
        need(is_float32(x) or is_half(x), KERNEL, "float32 or bfloat16", x=x)
        need(len(x.shape) == 4, KERNEL, "[batch, rows, heads, width]", x=x)
        _, rows, _, width = x.shape
        need(width % 2 == 0, KERNEL, "an even width", x=x)
        for table in (sin, cos):
            need(table.dtype == x.dtype, KERNEL, "tables of the rows' dtype", x=x, table=table)
            shapes = ([rows, width], [1, rows, 1, width])
            need(list(table.shape) in shapes, KERNEL, "a row of the table each", x=x, table=table)
            need(table.stop_gradient, KERNEL, "tables without a gradient, it has none for them")
    return _rotated(q, sin, cos), None if k is None else _rotated(k, sin, cos), None


def _rotated(x, sin, cos):
    wide = x.astype("float32" if is_float32(x) else "float64")
    first, second = wide.chunk(2, axis=-1)
    turned = paddle.concat([-second, first], axis=-1)
    sin, cos = (y.astype(wide.dtype).reshape([1, x.shape[1], 1, x.shape[3]]) for y in (sin, cos))
    return (wide * cos + turned * sin).astype(x.dtype)
