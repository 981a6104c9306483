"""Layers that pi07's streams and embeddings share: norms, rotary angles, token tables, projections.

Shapes: B batch, L tokens, T token rows, D width of a stream, E width of the condition, N heads, H
head width, G groups of data, I inputs and O outputs of a linear.
"""

import numpy as np
import paddle
from paddle import Tensor, nn
from paddle.autograd import PyLayer
from paddle.nn.initializer import Uniform

from paddle_vl.nn.attention import RotaryTables
from paddle_vl.nn.linear import Linear, linear
from paddle_vl.nn.operations import host_table, rms_quotient

PAD_ID = 0


class SharedConditions:
    """Conditions of which many rows share one; a norm projects each of them once.

    Not a tuple, which Paddle's recompute searches for tensors.

    Args:
        values_nE: the distinct conditions.
        index_T: int64 condition of each token row.
    """

    def __init__(self, values_nE: Tensor, index_T: Tensor):
        self.values_nE, self.index_T = values_nE, index_T

    def of_rows(self, x_nD: Tensor) -> Tensor:
        """A value of each condition to `[T, D]`."""
        return paddle.index_select(x_nD, self.index_T)


class AdaptiveRMSNorm(nn.Layer):
    """`x / sqrt(mean(x^2) + epsilon) * (1 + scale) + shift`, and a gate for the sublayer's output.

    Scale, shift and gate are the thirds, in this order, of a linear of the condition; there is no
    other weight. Computes in float32.

    Source: GemmaRMSNorm of openpi with `cond_dim` (adaRMS).
    """

    def __init__(self, size: int, cond_size: int, epsilon: float):
        super().__init__()
        self.epsilon = epsilon
        self.dense = Linear(cond_size, 3 * size, True)

    def forward(self, x_TD: Tensor, condition: Tensor | SharedConditions) -> tuple[Tensor, Tensor]:
        """Normalized rows and gates, both `[T, D]` in the dtype of the rows.

        Args:
            condition: `[T, E]`, one per row, or shared ones.
        """
        is_shared = isinstance(condition, SharedConditions)
        terms = self.dense(condition.values_nE if is_shared else condition)
        scale, shift, gate = paddle.chunk(terms, 3, axis=-1)
        scale, shift = 1.0 + scale.astype("float32"), shift.astype("float32")
        gate = gate.astype(x_TD.dtype)
        if is_shared:
            scale, shift, gate = (condition.of_rows(term) for term in (scale, shift, gate))
        y = rms_quotient(x_TD, self.epsilon) * scale + shift
        return y.astype(x_TD.dtype), gate


@host_table
def _rotary_powers(head_dim: int, base: float) -> np.ndarray:
    slots = np.arange(head_dim // 2, dtype="float32")
    return np.float32(base) ** (np.float32(2.0 / head_dim) * slots)


def rotary_tables(position_ids_BL: Tensor, head_dim: int, base: float) -> RotaryTables:
    """Tables `[B, L, H]` of the layers with one base: `angle_j = position / base^(2j / H)`.

    `rope_scaling` and the expert's `rope_theta` are ignored. Source: `apply_rope` of OpenTau's pi07
    engine.

    Args:
        position_ids_BL: int64.
    """
    # Division by float32 powers, as in OpenTau: a product with inverses rounds differently.
    angle_BLF = position_ids_BL.astype("float32").unsqueeze(-1) / _rotary_powers(head_dim, base)
    return RotaryTables.of_angles(angle_BLF)


class PaddedEmbedding(nn.Layer):
    """A scaled embedding table; the row of `PAD_ID` gets no gradient.

    Paddle's `padding_idx` would return zeros for it.

    Args:
        table: an `Embedding`, or this rank's shard of one.
        scale: factor of the rows, rounded to the table's dtype as in OpenTau.
    """

    def __init__(self, table: nn.Layer, scale: float = 1.0):
        super().__init__()
        self.table, self.scale = table, scale

    @property
    def weight(self) -> Tensor:
        """`[num, D]`, or this rank's rows of it."""
        return self.table.weight

    def rows(self, ids_BL: Tensor) -> Tensor:
        """`forward` for inference: every row may have a gradient."""
        rows_BLD = self.table(ids_BL)
        if self.scale == 1.0:
            return rows_BLD
        return rows_BLD * paddle.full([], float(np.float32(self.scale)), rows_BLD.dtype)

    def forward(self, ids_BL: Tensor) -> Tensor:
        """int64 `[B, L]` to `[B, L, D]`."""
        return _MaskGradient.apply(self.rows(ids_BL), ids_BL != PAD_ID)


class _MaskGradient(PyLayer):
    """Identity; rows where `keep_BL` is False get a zero gradient."""

    @staticmethod
    def forward(ctx, rows_BLD, keep_BL):
        ctx.save_for_backward(keep_BL)
        return rows_BLD.clone()

    @staticmethod
    def backward(ctx, grad):
        (keep_BL,) = ctx.saved_tensor()
        return grad * keep_BL.astype(grad.dtype).unsqueeze(-1), None


def fresh_std(in_features: int) -> float:
    """Standard deviation of torch's default linear initialization, uniform in +-1/sqrt(I)."""
    return (3 * in_features) ** -0.5


class GroupLinear(nn.Layer):
    """`x @ weight[group] + bias[group]`, weights `[G, I, O]`; group 0 by default.

    A group is a data set or a robot with its own projection.
    """

    def __init__(self, in_features: int, out_features: int, num_groups: int):
        super().__init__()
        bound = in_features**-0.5
        self.num_groups = num_groups
        self.weight = self.create_parameter(
            [num_groups, in_features, out_features], default_initializer=Uniform(-bound, bound)
        )
        self.bias = self.create_parameter(
            [num_groups, out_features], default_initializer=Uniform(-bound, bound)
        )

    def forward(self, x_BLI: Tensor, group_B: Tensor | None = None) -> Tensor:
        """`[B, L, I]` to `[B, L, O]`.

        Args:
            group_B: int64 group of each sample.
        """
        if self.num_groups == 1 or group_B is None:
            return linear(x_BLI, self.weight[0], self.bias[0])
        weight_BIO = paddle.index_select(self.weight, group_B)
        bias_B1O = paddle.index_select(self.bias, group_B).unsqueeze(1)
        return paddle.matmul(x_BLI, weight_BIO) + bias_B1O


class GroupedProjection(nn.Layer):
    """A linear for all samples, or one per group.

    Args:
        num_groups: None for one linear, whose weights have no group axis.
    """

    def __init__(self, in_features: int, out_features: int, num_groups: int | None):
        super().__init__()
        self.is_grouped = num_groups is not None
        if num_groups is not None:
            self.linear = GroupLinear(in_features, out_features, num_groups)
        else:
            self.linear = Linear(in_features, out_features, True, init_std=fresh_std(in_features))

    def forward(self, x_BLI: Tensor, group_B: Tensor | None = None) -> Tensor:
        return self.linear(x_BLI, group_B) if self.is_grouped else self.linear(x_BLI)
