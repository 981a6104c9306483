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
    """

    def __init__(self, position_ids_BL: Tensor, head_dim: int, base: float):
        slots = head_dim // 2
        # Division by float32 powers, as the original: a product with inverses rounds differently.
        scale = np.float32(base) ** (np.float32(2.0 / head_dim) * np.arange(slots, dtype="float32"))
        angle = position_ids_BL.astype("float32").unsqueeze(-1) / paddle.to_tensor(scale)
        angle_BL1H = paddle.concat([angle, angle], axis=-1).unsqueeze(2)
        self._one_head = paddle.cos(angle_BL1H), paddle.sin(angle_BL1H)
        self._by_heads: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, x_BLNH: Tensor) -> Tensor:
        """Queries or keys, rotated in float32 and cast back."""
        cos, sin = self._tables(x_BLNH.shape[2])
        return apply_rotary(x_BLNH.unsqueeze(-2), cos, sin).squeeze(-2)

    def _tables(self, heads: int) -> tuple[Tensor, Tensor]:
        """Repeated for every head: Paddle's CPU kernels are slow at broadcasting over a middle
        dim."""
        if heads not in self._by_heads:
            self._by_heads[heads] = tuple(paddle.concat([x] * heads, 2) for x in self._one_head)
        return self._by_heads[heads]
