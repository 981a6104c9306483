"""A linear with weights of its own for every group of samples (data sets, robots)."""

import paddle
from paddle import Tensor, nn
from paddle.nn.initializer import Uniform

from paddle_vl.nn.linear import Linear, linear


def fresh_std(in_features: int) -> float:
    """Standard deviation of the uniform weights that the original's projections begin with."""
    return (3 * in_features) ** -0.5


class GroupLinear(nn.Layer):
    """`x @ weight[group] + bias[group]`, weights `[G, in, out]`; row 0 where no group is known."""

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

    def forward(self, x_BTI: Tensor, group_B: Tensor | None = None) -> Tensor:
        """`[B, T, in]` to `[B, T, out]`.

        Args:
            group_B: int64 number of each sample's group.
        """
        if self.num_groups == 1 or group_B is None:
            return linear(x_BTI, self.weight[0], self.bias[0])
        weight_BIO = paddle.index_select(self.weight, group_B)
        bias_B1O = paddle.index_select(self.bias, group_B).unsqueeze(1)
        return paddle.matmul(x_BTI, weight_BIO) + bias_B1O


class GroupedProjection(nn.Layer):
    """A linear of the policy: one for all samples, or one per group."""

    def __init__(self, in_features: int, out_features: int, num_groups: int | None):
        """
        Args:
            num_groups: None for one linear, whose weights have no group axis.
        """
        super().__init__()
        self.is_grouped = num_groups is not None
        if self.is_grouped:
            self.linear = GroupLinear(in_features, out_features, num_groups)
        else:
            self.linear = Linear(in_features, out_features, True, init_std=fresh_std(in_features))

    def forward(self, x_BTI: Tensor, group_B: Tensor | None = None) -> Tensor:
        return self.linear(x_BTI, group_B) if self.is_grouped else self.linear(x_BTI)
