"""Patch mergers: four neighbouring patches of a merge block become one decoder row.

Shapes: P patches, M = P / merge^2 merged rows, U tower width, D decoder width.
"""

import paddle.nn.functional as F
from paddle import Tensor, nn

from paddle_vl.families.qwen3_vl.config import Qwen3VLVisionConfig
from paddle_vl.nn.linear import Linear
from paddle_vl.nn.norm import LayerNorm


class PatchMerger(nn.Layer):
    """LayerNorm, concatenation of a block, and a two-layer MLP with the exact (erf) GELU.

    Args:
        norm_after_merge: False for the final merger, which normalises each patch over U before the
            concatenation; True for deepstack mergers, which normalise the 4U after it.
    """

    def __init__(self, config: Qwen3VLVisionConfig, norm_after_merge: bool):
        super().__init__()
        self.norm_after_merge = norm_after_merge
        self.block_width = config.hidden_size * config.spatial_merge_size**2
        norm_width = self.block_width if norm_after_merge else config.hidden_size
        std = config.initializer_range
        self.norm = LayerNorm(norm_width, 1e-6)
        self.linear_fc1 = Linear(self.block_width, self.block_width, True, std)
        self.linear_fc2 = Linear(self.block_width, config.out_hidden_size, True, std)

    def forward(self, x_PU: Tensor) -> Tensor:
        """`[P, U]` in merge-block order to `[M, D]`."""
        if self.norm_after_merge:
            x = self.norm(x_PU.reshape([-1, self.block_width]))
        else:
            x = self.norm(x_PU).reshape([-1, self.block_width])
        return self.linear_fc2(F.gelu(self.linear_fc1(x)))
