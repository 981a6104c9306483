"""Stand-in of `fused_rotary_position_embedding`, by fused_rope_kernel.cu of Paddle 3.3.1."""

import paddle
from paddle.autograd import PyLayer

from tests.support.gpu_stubs.contract import contiguous, is_float32, is_half, launched, need

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
    if k is None:
        return _Rope.apply(*contiguous(q, sin, cos)), None, None
    return *_RopeOfTwo.apply(*contiguous(q, k, sin, cos)), None


class _Rope(PyLayer):
    @staticmethod
    def forward(ctx, x, sin, cos):
        ctx.save_for_backward(sin, cos)
        with launched(KERNEL, int(x.size > 0)):
            return _rotated(x, sin, cos)

    @staticmethod
    def backward(ctx, grad):
        sin, cos = ctx.saved_tensor()
        (grad,) = contiguous(grad)
        with launched(f"{KERNEL}_grad", int(grad.size > 0)):
            return _rotated_back(grad, sin, cos), None, None


class _RopeOfTwo(PyLayer):
    """One launch per tensor; an output without a gradient counts as one of zeros."""

    @staticmethod
    def forward(ctx, q, k, sin, cos):
        ctx.save_for_backward(sin, cos)
        with launched(KERNEL, 2):
            return _rotated(q, sin, cos), _rotated(k, sin, cos)

    @staticmethod
    def backward(ctx, *grads):
        sin, cos = ctx.saved_tensor()
        grads = contiguous(*grads)
        with launched(f"{KERNEL}_grad", 2):
            return *(_rotated_back(grad, sin, cos) for grad in grads), None, None


def _wide(x, sin, cos):
    shape = [1, x.shape[1], 1, x.shape[3]]
    wide = "float32" if is_float32(x) else "float64"
    return x.astype(wide), *(y.astype(wide).reshape(shape) for y in (sin, cos))


def _rotated(x, sin, cos):
    wide, sin, cos = _wide(x, sin, cos)
    first, second = wide.chunk(2, axis=-1)
    return (wide * cos + paddle.concat([-second, first], axis=-1) * sin).astype(x.dtype)


def _rotated_back(grad, sin, cos):
    wide, sin, cos = _wide(grad, sin, cos)
    first, second = (wide * sin).chunk(2, axis=-1)
    return (wide * cos + paddle.concat([second, -first], axis=-1)).astype(grad.dtype)
