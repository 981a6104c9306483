"""The suffix: noisy actions, and the time that conditions the expert.

Shapes: B batch, C steps of a chunk, A action values, E expert width.
"""

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import Tensor, nn

from paddle_vl.families.pi07.config import PI07Config
from paddle_vl.families.pi07.group_linear import GroupedProjection, fresh_std
from paddle_vl.nn.linear import Linear

_SHORTEST, _LONGEST = 4e-3, 4.0


def time_embedding(time_BC: Tensor, width: int) -> Tensor:
    """Sine and cosine of `2 pi time / period`: float64 `[B, C, width]`.

    Periods are geometric from 0.004 to 4.
    """
    fraction = np.linspace(0.0, 1.0, width // 2)
    frequency = 2 * np.pi / (_SHORTEST * (_LONGEST / _SHORTEST) ** fraction)
    angle = time_BC.astype("float64").unsqueeze(-1) * paddle.to_tensor(frequency)
    return paddle.concat([paddle.sin(angle), paddle.cos(angle)], axis=-1)


class SuffixEmbedding(nn.Layer):
    """Rows of the expert from noisy actions, and the condition of its norms from their time."""

    def __init__(self, config: PI07Config, num_groups: int | None):
        super().__init__()
        width = config.proj_width
        self.action_in_proj = GroupedProjection(config.max_action_dim, width, num_groups)
        self.time_mlp_in = Linear(width, width, True, init_std=fresh_std(width))
        self.time_mlp_out = Linear(width, width, True, init_std=fresh_std(width))

    def forward(
        self, noisy_BCA: Tensor, time_BC: Tensor, group_B: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Rows `[B, C, E]` and condition of `time_BC`'s leading dims, `[B or 1, C, E]`."""
        dtype = self.time_mlp_in.weight.dtype
        rows_BCE = self.action_in_proj(noisy_BCA.astype(dtype), group_B)
        code = time_embedding(time_BC, rows_BCE.shape[-1]).astype(dtype)
        return rows_BCE, F.silu(self.time_mlp_out(F.silu(self.time_mlp_in(code))))
