"""Mixture of experts in place of a layer's MLP, and the load-balancing loss.

Shapes: B batch, L padded length, T token rows, D width, E experts, K experts per token.

Source: Qwen3VLMoeTextSparseMoeBlock and load_balancing_loss_func of HF transformers.
"""

from typing import NamedTuple

import paddle
import paddle.nn.functional as F
from paddle import Tensor, nn

from paddle_vl.families.qwen3_vl.text_config import Qwen3VLMoeTextConfig
from paddle_vl.nn.operations import column_sum
from paddle_vl.nn.placement import Placement


class Routing(NamedTuple):
    """Routing of token rows to experts.

    Attributes:
        logits: `[T, E]` in the dtype of the token rows.
        probabilities: `[T, E]` float32, the softmax of the logits.
        weights: `[T, K]` weights of the K most probable experts, of sum 1, in the rows' dtype.
        indices: `[T, K]` int64 numbers of these experts.
    """

    logits: Tensor
    probabilities: Tensor
    weights: Tensor
    indices: Tensor


class Router(nn.Layer):
    """Softmax over all experts in float32, the K largest of it, normalized to sum 1."""

    def __init__(self, linear: nn.Layer, num_experts_per_tok: int):
        super().__init__()
        # The checkpoint key is `gate.weight`, so the linear itself is not a sublayer.
        self.weight, self.num_experts_per_tok = linear.weight, num_experts_per_tok

    def forward(self, x_TD: Tensor) -> Routing:
        logits_TE = paddle.matmul(x_TD, self.weight)
        probabilities_TE = F.softmax(logits_TE.astype("float32"), axis=-1)
        weights_TK, indices_TK = probabilities_TE.topk(self.num_experts_per_tok, axis=-1)
        weights_TK = weights_TK / weights_TK.sum(axis=-1, keepdim=True)
        # Paddle treats the indices as differentiable, which fails if the router is the first
        # trained layer.
        indices_TK = indices_TK.detach()
        return Routing(logits_TE, probabilities_TE, weights_TK.astype(x_TD.dtype), indices_TK)


class SparseMoE(nn.Layer):
    """Runs each token row through its K experts."""

    def __init__(self, config: Qwen3VLMoeTextConfig, placement: Placement):
        super().__init__()
        self.placement = placement
        width, std = config.hidden_size, config.initializer_range
        self.gate = Router(
            placement.layers.router(width, config.num_experts, std), config.num_experts_per_tok
        )
        self.experts = placement.layers.experts(
            config.num_experts, width, config.moe_intermediate_size, std
        )

    def forward(self, x_TD: Tensor, real_T: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """The weighted sums of the experts' outputs `[T, D]`, and `routing_sums` with `real_T`."""
        x_TD = self.placement.ops.enter_columns(x_TD)
        routing = self.gate(x_TD)
        sums_2E = None
        if real_T is not None:
            probabilities_TE = self.placement.ops.enter_replicated(routing.probabilities)
            sums_2E = routing_sums(probabilities_TE, routing.indices, real_T)
        return self.experts(x_TD, routing.indices, routing.weights), sums_2E


def routing_sums(probabilities_TE: Tensor, indices_TK: Tensor, real_T: Tensor) -> Tensor:
    """Per expert, the number of real tokens routed to it and its summed probability.

    The load-balancing loss needs only these sums and the number of tokens. Sums of layers or of
    shards of a batch may be added.

    Args:
        probabilities_TE, indices_TK: of `Routing`.
        real_T: float32, 1 at real tokens, 0 at padding.

    Returns:
        `[2, E]` float32; the gradient flows through the second row only.
    """
    chosen_TE = paddle.put_along_axis(
        paddle.zeros(probabilities_TE.shape, dtype="float32"),
        indices_TK,
        paddle.ones([1, 1], dtype="float32"),
        axis=1,
    )
    real_T1 = real_T.unsqueeze(1)
    return paddle.stack([column_sum(chosen_TE * real_T1), column_sum(probabilities_TE * real_T1)])


class LoadBalance:
    """Collects the routing of all layers with experts in a forward pass.

    Attributes:
        real_T: float32, 1 at real tokens of the batch, 0 at padding.
        sums_2E: `routing_sums` of all layers so far; None before the first.
        num_layers: number of these layers.
    """

    def __init__(self, attention_mask_BL: Tensor | None, shape_BL: tuple[int, int]):
        if attention_mask_BL is None:
            attention_mask_BL = paddle.ones(shape_BL)
        self.real_T = attention_mask_BL.astype("float32").reshape([-1])
        self.sums_2E: Tensor | None = None
        self.num_layers = 0

    def add(self, sums_2E: Tensor) -> None:
        """Add the `routing_sums` of a layer."""
        self.sums_2E = sums_2E if self.sums_2E is None else self.sums_2E + sums_2E
        self.num_layers += 1

    def loss(self) -> Tensor:
        """`E * sum_e f_e * P_e` with the tokens of all layers pooled: a float32 scalar.

        f_e is the share of tokens with expert e among their K, P_e its mean probability. The value
        is about K if all experts are used equally, and 0 without layers with experts.
        """
        if self.sums_2E is None:
            return paddle.zeros([])
        means_2E = self.sums_2E / (self.real_T.sum() * self.num_layers)
        return means_2E.shape[1] * (means_2E[0] * means_2E[1]).sum()
