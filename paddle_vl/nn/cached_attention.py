"""Attention over cached keys and values in buffers of fixed capacity.

Shapes: B batch, L new tokens, S keys so far, C capacity of the buffers, N query heads, K key heads,
G = N / K query heads per key head, H head width.
"""

import numpy as np
import paddle
from paddle import Tensor

from paddle_vl.nn.attention import MASKED_SCORE, causal_attention
from paddle_vl.nn.operations import operation


class CachedKeys:
    """How many positions of the buffers hold keys, and which of them are hidden; one object for
    all layers of a forward pass.

    Not a tuple, which Paddle would search for tensors.

    Args:
        length: S, the new tokens' keys among them.
        key_bias_BS: float32 added to every score of a key, 0 or `MASKED_SCORE`; None hides nothing.
    """

    def __init__(self, length: int, key_bias_BS: Tensor | None = None):
        self.length, self.key_bias_BS = length, key_bias_BS
        self._biases: dict[tuple[int, ...], Tensor] = {}

    def bias(self, batch: int, key_heads: int, groups: int, capacity: int) -> Tensor:
        """Bias `[B, K, G, C]` of a single query over whole buffers; it hides free positions too.

        Of full shape: Paddle's CPU kernels are slow at broadcasting over middle dims.
        """
        shape = (batch, key_heads, groups, capacity)
        if shape not in self._biases:
            hidden_BC = np.zeros((batch, capacity), dtype=np.float32)
            hidden_BC[:, self.length :] = MASKED_SCORE
            bias_BC = paddle.to_tensor(hidden_BC)
            if self.key_bias_BS is not None:
                bias_BC[:, : self.length] = self.key_bias_BS
            self._biases[shape] = bias_BC.reshape([batch, 1, 1, capacity]).tile(
                [1, key_heads, groups, 1]
            )
        return self._biases[shape]


@operation
def cached_attention(
    q_BLNH: Tensor, key_BKCH: Tensor, value_BKCH: Tensor, cached: CachedKeys
) -> Tensor:
    """`causal_attention` over the first S positions of buffers; the last query is the last key's.

    Returns:
        `[B, L, N, H]` in the dtype of the queries.
    """
    key_BSKH, value_BSKH = (
        buffer[:, :, : cached.length].transpose([0, 2, 1, 3]) for buffer in (key_BKCH, value_BKCH)
    )
    return causal_attention(q_BLNH, key_BSKH, value_BSKH, cached.key_bias_BS)
