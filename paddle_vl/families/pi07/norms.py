"""The norms of pi07's decoder: Gemma's RMSNorm and the one that a condition shifts and scales.

Shapes: T rows, C channels, E those of a condition. Both compute in float32 and cast the result,
unlike Qwen's, which casts the quotient.
"""

import paddle
from paddle import Tensor, nn
from paddle.nn.initializer import Constant

from paddle_vl.nn.linear import Linear
from paddle_vl.nn.norm import gemma_rms_norm, rms_quotient


class GemmaRMSNorm(nn.Layer):
    """`x / sqrt(mean(x^2) + epsilon) * (1 + weight)`, the weight zero at the start."""

    def __init__(self, size: int, epsilon: float):
        super().__init__()
        self.epsilon = epsilon
        self.weight = self.create_parameter([size], default_initializer=Constant(0.0))

    def forward(self, x: Tensor) -> Tensor:
        return gemma_rms_norm(x, self.weight, self.epsilon)


class AdaptiveRMSNorm(nn.Layer):
    """`x / sqrt(mean(x^2) + epsilon) * (1 + scale) + shift`, and a gate for what follows.

    Scale, shift and gate are thirds, in this order, of a linear of the condition. There is no
    weight besides.

    Source: GemmaRMSNorm of openpi, with `cond_dim`.
    """

    def __init__(self, size: int, cond_size: int, epsilon: float):
        super().__init__()
        self.epsilon = epsilon
        self.dense = Linear(cond_size, 3 * size, True)

    def forward(self, x_TC: Tensor, cond_TE: Tensor) -> tuple[Tensor, Tensor]:
        """Rows normalised, and their gates, both in the rows' dtype.

        Args:
            cond_TE: a condition for each row, or for the rows of one sample, the same for all.
        """
        terms = self.dense(cond_TE)
        samples = x_TC.shape[0] // terms.shape[0]
        terms = terms if samples == 1 else paddle.concat([terms] * samples)
        scale, shift, gate = paddle.chunk(terms, 3, axis=-1)
        quotient = rms_quotient(x_TC, self.epsilon)
        y = quotient * (1.0 + scale.astype("float32")) + shift.astype("float32")
        return y.astype(x_TC.dtype), gate.astype(x_TC.dtype)
