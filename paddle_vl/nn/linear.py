"""Linear projections and embeddings of one device.

Weights are `[in, out]`, as everywhere in Paddle; checkpoints hold them transposed.
"""

from collections.abc import Callable
from typing import Any

import paddle
import paddle.nn.functional as F
from paddle import Tensor, nn
from paddle.autograd import PyLayer
from paddle.nn.initializer import Constant, Normal

from paddle_vl.nn.backend import column_sum, is_eager_cpu
from paddle_vl.nn.lora import LowRank, LowRankSettings


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x @ weight + bias` with weight `[in, out]`.

    On the CPU the bias is added in place and its gradient is a product with ones: Paddle's own sum
    over rows takes longer than the matrix product beside it.
    """
    product = getattr(weight, "product", None)
    if product is not None:
        return product(x, weight, bias)
    if bias is None:
        return paddle.matmul(x, weight)
    if is_eager_cpu(x):
        return _BiasedLinear.apply(x, weight, bias)
    return F.linear(x, weight, bias)


def use_product(weight: Tensor, product: Callable[[Tensor, Tensor, Tensor | None], Tensor]) -> None:
    """Compute `linear` with this weight in another way from now on."""
    weight.product = product


class _BiasedLinear(PyLayer):
    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        ctx.needs = (not x.stop_gradient, not weight.stop_gradient, not bias.stop_gradient)
        return paddle.matmul(x, weight).add_(bias)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensor()
        needs_x, needs_weight, needs_bias = ctx.needs
        grad_NO = grad.reshape([-1, grad.shape[-1]])
        grad_x = paddle.matmul(grad, weight, transpose_y=True) if needs_x else None
        grad_weight = None
        if needs_weight:
            x_NI = x.reshape([-1, x.shape[-1]])
            grad_weight = paddle.matmul(x_NI, grad_NO, transpose_x=True)
        return grad_x, grad_weight, column_sum(grad_NO) if needs_bias else None


class AdaptableLinear(nn.Layer):
    """A product with a weight, beside which a low-rank adapter may stand.

    Attributes:
        input_axis: the dim of `weight` that the input's features meet.
        lora: the adapter, None without.
    """

    input_axis = 0

    def __init__(self, *args: Any, **kwargs: Any):
        """
        Args:
            args, kwargs: of the layer that this is mixed into.
        """
        super().__init__(*args, **kwargs)
        self.lora: LowRank | None = None

    def add_low_rank(self, settings: LowRankSettings) -> None:
        """Put an adapter beside the weight, as large as this rank's weight is."""
        sizes = self.weight.shape
        in_features, out_features = sizes[self.input_axis], sizes[1 - self.input_axis]
        self.lora = LowRank(in_features, out_features, settings, self.weight.dtype)

    def adapted(self, y: Tensor, x: Tensor, columns: slice | None = None) -> Tensor:
        """The product `y` of `x`, or some columns of it, with the adapter's."""
        return y if self.lora is None else y + self.lora(x, columns)

    @paddle.no_grad()
    def merge_low_rank(self) -> None:
        """Add the adapter to the weight and take it away."""
        if self.lora is None:
            return
        delta = self.lora.product()
        delta = delta.t() if self.input_axis else delta
        merged = (self.weight.astype("float32") + delta).astype(self.weight.dtype)
        paddle.assign(merged, self.weight)
        self.lora = None


class Linear(AdaptableLinear):
    """`y = x @ weight + bias`, weights drawn from a normal of width `init_std`, bias zero."""

    def __init__(self, in_features: int, out_features: int, bias: bool, init_std: float = 0.02):
        super().__init__()
        self.weight = self.create_parameter(
            [in_features, out_features], default_initializer=Normal(std=init_std)
        )
        self.bias = (
            self.create_parameter([out_features], default_initializer=Constant(0.0))
            if bias
            else None
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.adapted(linear(x, self.weight, self.bias), x)


class Embedding(nn.Layer):
    """A table `[num, dim]` read by row."""

    def __init__(self, num_embeddings: int, embedding_dim: int, init_std: float = 0.02):
        super().__init__()
        self.weight = self.create_parameter(
            [num_embeddings, embedding_dim], default_initializer=Normal(std=init_std)
        )

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)


class VocabHead(AdaptableLinear):
    """Logits over the vocabulary; the weight is `[vocab, dim]` so that it can be the embedding's.

    Args:
        tied_weight: the embedding's parameter to use instead of one of its own.
    """

    input_axis = 1

    def __init__(
        self,
        embedding_dim: int,
        vocab_size: int,
        init_std: float = 0.02,
        tied_weight: Tensor | None = None,
    ):
        super().__init__()
        if tied_weight is None:
            self.weight = self.create_parameter(
                [vocab_size, embedding_dim], default_initializer=Normal(std=init_std)
            )
        else:
            # A plain attribute would register the parameter a second time.
            object.__setattr__(self, "weight", tied_weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.adapted(paddle.matmul(x, self.weight, transpose_y=True), x)
