"""FlashMask attention for packed samples.

Other attention needs no kernel: the plain implementations call Paddle's
`scaled_dot_product_attention`, which uses flash attention on a GPU.
"""

from typing import Any

import paddle
import paddle.nn.functional as F
from paddle import Tensor

from paddle_vl.nn.attention import PackedSamples, causal_attention


@causal_attention.register("gpu")
def _causal_attention(
    q_BLNH: Tensor,
    k_BSKH: Tensor,
    v_BSKH: Tensor,
    key_bias_BS: Tensor | None = None,
    packed: PackedSamples | None = None,
) -> Tensor:
    # FlashMask has no float32 kernel. It has no CPU kernel either, so CI does not run this call.
    if packed is not None and q_BLNH.dtype in (paddle.bfloat16, paddle.float16):
        out: Any = F.flashmask_attention(q_BLNH, k_BSKH, v_BSKH, packed.key_ends_B1L1, causal=True)
        return out
    return causal_attention.plain(q_BLNH, k_BSKH, v_BSKH, key_bias_BS, packed)
