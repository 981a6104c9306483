"""Several linears of one input: queries, keys and values, or gate and up.

They share one weight and one product, or have a weight each where something treats one of them by
itself: a frozen part, a learning rate of its own, an adapter. Both kinds are called alike.
"""

from collections.abc import Callable, Iterable, Sequence

import paddle
from paddle import Tensor, nn
from paddle.nn.initializer import Initializer, Normal

from paddle_vl.nn.fused import Columns, fused_columns, mark_fused, split_columns
from paddle_vl.nn.linear import AdaptableLinear, linear


class FusedLinear(nn.Layer):
    """Linears without bias in one weight `[in, sum of out]`, see `paddle_vl.nn.fused`.

    Args:
        splits: give the output of each linear, otherwise all side by side as one tensor.
    """

    def __init__(
        self,
        in_features: int,
        columns: Sequence[Columns],
        init_std: float = 0.02,
        splits: bool = True,
    ):
        super().__init__()
        widths = [one.width for one in columns]
        self.weight = self.create_parameter(
            [in_features, sum(widths)], default_initializer=NormalColumns(widths, init_std)
        )
        mark_fused(self.weight, columns)
        self.own_widths = widths if splits else []

    def forward(self, x: Tensor, num_rows: int | None = None) -> list[Tensor]:
        """What each of the linears makes of the input; on one device it has no other rows."""
        return split_columns(linear(x, self.weight), self.own_widths)


class SeparateLinears(nn.Layer):
    """The same linears with a weight each; each is a sublayer of its own name.

    Args:
        enter: what the input passes once for all of them.
        make: makes one of them.
    """

    def __init__(
        self,
        columns: Sequence[Columns],
        enter: Callable[..., Tensor],
        make: Callable[[Columns], AdaptableLinear],
    ):
        super().__init__()
        self.enter = enter
        for one in columns:
            self.add_sublayer(one.name, make(one))

    def forward(self, x: Tensor, num_rows: int | None = None) -> list[Tensor]:
        """What each of the linears makes of the input."""
        x = self.enter(x, num_rows)
        return [layer(x) for layer in self.children()]


class NormalColumns(Initializer):
    """Draws every linear of a fused weight by itself, as if each had a weight of its own."""

    def __init__(self, widths: Sequence[int], std: float):
        super().__init__()
        self.widths, self.normal = list(widths), Normal(std=std)

    def forward(self, var: Tensor, block=None) -> Tensor | None:
        if not isinstance(var, Tensor):
            # A traced graph is not run for its weights.
            return self.normal(var, block)
        drawn = []
        for width in self.widths:
            one = paddle.empty([var.shape[0], width], dtype=var.dtype)
            self.normal(one, block)
            drawn.append(one)
        paddle.concat(drawn, axis=1)._share_underline_tensor_to(var)
        return None


@paddle.no_grad()
def separate(
    model: nn.Layer,
    weights: Iterable[Tensor],
    make: Callable[[int, Sequence[Columns]], SeparateLinears],
) -> None:
    """Put linears with a weight each in place of some fused ones, with the values that they have.

    Args:
        weights: fused ones, of this model.
        make: linears of so many input features and these columns, on this rank.
    """
    chosen = {id(weight) for weight in weights}
    if not chosen:
        return
    for parent in model.sublayers(include_self=True):
        for name, layer in list(parent.named_children()):
            weight = getattr(layer, "weight", None)
            if weight is not None and id(weight) in chosen:
                parent.add_sublayer(name, _separated(weight, make))


def _separated(
    weight: Tensor, make: Callable[[int, Sequence[Columns]], SeparateLinears]
) -> SeparateLinears:
    default_dtype = paddle.get_default_dtype()
    paddle.set_default_dtype(weight.dtype)
    try:
        with paddle.LazyGuard():
            layers = make(weight.shape[0], fused_columns(weight))
    finally:
        paddle.set_default_dtype(default_dtype)
    own = [layer.weight for layer in layers.children()]
    for one in own:
        one.stop_gradient = weight.stop_gradient
    if weight._is_initialized():
        values = paddle.split(weight, [one.shape[1] for one in own], axis=1)
        for one, value in zip(own, values, strict=True):
            value.clone()._share_buffer_to(one)
    return layers
