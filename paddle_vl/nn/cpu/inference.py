"""Operations without a gradient, for generation and exported programs.

Shapes: B batch, L new tokens, C capacity of a cache, N query heads, K key heads, H head width.
"""

import paddle
import paddle.nn.functional as F
from paddle import Tensor
from paddle.incubate.nn.functional import fused_rms_norm

from paddle_vl.nn.cached_attention import CachedKeys, biased_attention, cached_attention
from paddle_vl.nn.linear import biased_linear
from paddle_vl.nn.norm import layer_norm, rms_norm
from paddle_vl.nn.operations import swiglu
from paddle_vl.nn.rotary import RotaryTables, apply_rotary


def _rms_norm(x: Tensor, weight_C: Tensor, epsilon: float) -> Tensor:
    """Paddle's own kernel, in float32 the same formula: one operation where there are six."""
    if x.dtype != paddle.float32 or weight_C.dtype != paddle.float32:
        return rms_norm.plain(x, weight_C, epsilon)
    return fused_rms_norm(x, weight_C, None, epsilon, len(x.shape) - 1)[0]


def _layer_norm(x: Tensor, weight_C: Tensor, bias_C: Tensor, epsilon: float) -> Tensor:
    """Paddle's own kernel, whose forward pass is thirteen times as fast as the composition."""
    if x.dtype != paddle.float32 or weight_C.dtype != paddle.float32:
        return layer_norm.plain(x, weight_C, bias_C, epsilon)
    return F.layer_norm(x, weight_C.shape, weight_C, bias_C, epsilon)


@biased_linear.register("cpu", gradient=False)
def _biased_linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return paddle.matmul(x, weight).add_(bias)


def _apply_rotary_in_program(
    q_TNH: Tensor, k_TKH: Tensor, tables: RotaryTables
) -> tuple[Tensor, Tensor]:
    """Tables of full shape; nothing else, since a program may run where products round (TF32)."""
    tables.prepare([q_TNH.shape[-2], k_TKH.shape[-2]])
    return apply_rotary.plain(q_TNH, k_TKH, tables)


def _swiglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """Two kernels with vector instructions are faster than the fused one without them."""
    compiled = swiglu.kernels.get("cpu") if paddle.in_dynamic_mode() else None
    if compiled is not None:
        return compiled(gate, up)
    if up is None:
        gate, up = gate.chunk(2, axis=-1)
    return F.silu(gate) * up


@cached_attention.register("cpu", gradient=False)
def _cached_attention(
    q_BLNH: Tensor, key_BKCH: Tensor, value_BKCH: Tensor, cached: CachedKeys
) -> Tensor:
    """A single query attends over the whole buffers: a part of them would be copied."""
    batch, length, heads, _ = q_BLNH.shape
    if length > 1:
        return cached_attention.plain(q_BLNH, key_BKCH, value_BKCH, cached)
    _, key_heads, capacity, _ = key_BKCH.shape
    bias_BKGC = cached.bias(batch, key_heads, heads // key_heads, capacity)
    return biased_attention(q_BLNH, key_BKCH, value_BKCH, bias_BKGC)


# Not decorators: tracing a program would apply them again.
rms_norm.register("cpu", "program", gradient=False)(_rms_norm)
layer_norm.register("cpu", "program", gradient=False)(_layer_norm)
apply_rotary.register("program", gradient=False)(_apply_rotary_in_program)
swiglu.register("cpu", "program", gradient=False)(_swiglu)
