"""From tower rows to tokens of the backbone.

Source: Gemma3MultiModalProjector of HF transformers.
"""

import paddle
import paddle.nn.functional as F
from paddle import Tensor, nn
from paddle.nn.initializer import Constant

from paddle_vl.families.pi07.engine_config import Gemma3Config
from paddle_vl.families.pi07.norms import GemmaRMSNorm


class MultiModalProjector(nn.Layer):
    """Average over square windows of patches; norm and product, whose matrix is zero at the start.

    The average has no parameters, and comes by itself: its rows are what ranks that share the
    tower's work tell each other.
    """

    def __init__(self, config: Gemma3Config):
        super().__init__()
        vision = config.vision_config
        self.side = vision.grid_side
        self.window = self.side // round(config.mm_tokens_per_image**0.5)
        self.mm_input_projection_weight = self.create_parameter(
            [vision.hidden_size, config.text_config.hidden_size],
            default_initializer=Constant(0.0),
        )
        self.mm_soft_emb_norm = GemmaRMSNorm(vision.hidden_size, vision.layer_norm_eps)

    def pooled(self, x_BNU: Tensor) -> Tensor:
        """`[B, N, U]` patch rows to `[B, M, U]`, both in reading order."""
        batch, _, width = x_BNU.shape
        grid = x_BNU.transpose([0, 2, 1]).reshape([batch, width, self.side, self.side])
        pooled = F.avg_pool2d(grid, self.window, self.window)
        return pooled.reshape([batch, width, -1]).transpose([0, 2, 1])

    def forward(self, rows_BMU: Tensor) -> Tensor:
        """`[B, M, U]` pooled rows to `[B, M, D]` tokens."""
        return paddle.matmul(self.mm_soft_emb_norm(rows_BMU), self.mm_input_projection_weight)
