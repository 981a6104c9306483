"""Rotary angles of both streams of pi07.

The original has its own: no `rope_scaling`, whatever the configuration says, and the expert's
`rope_theta` is not used.
"""

import numpy as np
import paddle
from paddle import Tensor

from paddle_vl.nn.rope import apply_rotary


class Rotary:
    """The rotation of queries and keys at given positions, for layers of one base.

    Not a tuple: Paddle would look for tensors in it.

    Args:
        position_ids_BL: int64.
        heads, key_heads: the tables are repeated for every head, as Paddle's CPU kernels are slow
            at broadcasting over a middle dim.
    """

    def __init__(
        self, position_ids_BL: Tensor, head_dim: int, base: float, heads: int, key_heads: int
    ):
        slots = head_dim // 2
        # Division by float32 powers, as the original: a product with inverses rounds differently.
        scale = np.float32(base) ** (np.float32(2.0 / head_dim) * np.arange(slots, dtype="float32"))
        angle = position_ids_BL.astype("float32").unsqueeze(-1) / paddle.to_tensor(scale)
        angle_BL1H = paddle.concat([angle, angle], axis=-1).unsqueeze(2)
        cos, sin = paddle.cos(angle_BL1H), paddle.sin(angle_BL1H)
        self._cos, self._sin = (paddle.concat([x] * heads, axis=2) for x in (cos, sin))
        self._key_heads = key_heads

    def queries(self, q_BLNH: Tensor) -> Tensor:
        """Rotated in float32 and cast back."""
        return apply_rotary(q_BLNH.unsqueeze(-2), self._cos, self._sin).squeeze(-2)

    def keys(self, k_BLKH: Tensor) -> Tensor:
        """Rotated in float32 and cast back."""
        cos, sin = self._cos[:, :, : self._key_heads], self._sin[:, :, : self._key_heads]
        return apply_rotary(k_BLKH.unsqueeze(-2), cos, sin).squeeze(-2)
