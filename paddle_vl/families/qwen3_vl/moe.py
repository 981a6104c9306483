"""The mixture of experts in place of a layer's MLP, and the loss that keeps its experts in use.

Shapes: T token rows, D width, E experts, K experts of each token.

Source: Qwen3VLMoeTextSparseMoeBlock and load_balancing_loss_func of HF transformers.
"""

from typing import NamedTuple

import paddle
import paddle.nn.functional as F
from paddle import Tensor, nn

from paddle_vl.families.qwen3_vl.text_config import Qwen3VLMoeTextConfig, Qwen3VLTextConfig
from paddle_vl.nn.kernels import column_sum
from paddle_vl.nn.placement import Placement


class Routing(NamedTuple):
    """Where token rows go.

    Attributes:
        logits: `[T, E]` in the dtype of the rows; probabilities: their softmax, float32.
        weights: `[T, K]` of the experts of largest probability, of sum 1, in the rows' dtype.
        indices: `[T, K]` int64, these experts.
    """

    logits: Tensor
    probabilities: Tensor
    weights: Tensor
    indices: Tensor


class Router(nn.Layer):
    """Softmax over all experts in float32, the K largest of it, their weights made to sum to 1."""

    def __init__(self, linear: nn.Layer, num_experts_per_tok: int):
        super().__init__()
        # The checkpoint's name of the matrix is the router's own.
        self.weight, self.num_experts_per_tok = linear.weight, num_experts_per_tok

    def forward(self, x_TD: Tensor) -> Routing:
        logits_TE = paddle.matmul(x_TD, self.weight)
        probabilities_TE = F.softmax(logits_TE.astype("float32"), axis=-1)
        weights_TK, indices_TK = probabilities_TE.topk(self.num_experts_per_tok, axis=-1)
        weights_TK = weights_TK / weights_TK.sum(axis=-1, keepdim=True)
        # Paddle takes the indices for something that has a gradient, and would ask for that of
        # rows that have none, where the router is the first thing that trains.
        indices_TK = indices_TK.detach()
        return Routing(logits_TE, probabilities_TE, weights_TK.astype(x_TD.dtype), indices_TK)


class SparseMoE(nn.Layer):
    """Each token row through its K experts."""

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
        """The rows' sums over their experts, and `routing_sums` when `real_T` is given."""
        x_TD = self.placement.ops.enter_columns(x_TD)
        routing = self.gate(x_TD)
        sums_2E = None
        if real_T is not None:
            probabilities_TE = self.placement.ops.enter_replicated(routing.probabilities)
            sums_2E = routing_sums(probabilities_TE, routing.indices, real_T)
        return self.experts(x_TD, routing.indices, routing.weights), sums_2E


def routing_sums(probabilities_TE: Tensor, indices_TK: Tensor, real_T: Tensor) -> Tensor:
    """Of each expert, over the real rows: how often it was chosen, and its summed probability.

    These sums, and the number of rows, are all that the load-balancing loss takes from a layer; the
    sums of layers, or of parts of a batch, add up.

    Args:
        real_T: float32, 1 at real tokens, 0 at padding.

    Returns:
        `[2, E]` float32; a gradient flows through the second row only.
    """
    chosen_TE = paddle.put_along_axis(
        paddle.zeros(probabilities_TE.shape, dtype="float32"),
        indices_TK,
        paddle.ones([1, 1], dtype="float32"),
        axis=1,
    )
    real_T1 = real_T.unsqueeze(1)
    return paddle.stack([column_sum(chosen_TE * real_T1), column_sum(probabilities_TE * real_T1)])


def asked_balance(
    text: Qwen3VLTextConfig,
    asked: bool | None,
    attention_mask_BL: Tensor | None,
    shape_BL: tuple[int, int],
) -> "LoadBalance | None":
    """What collects the routing of a call, None if nobody asked for the loss.

    Args:
        asked: whether the call does; None leaves it to the configuration.

    Raises:
        ValueError: the call asks a model without experts.
    """
    if not isinstance(text, Qwen3VLMoeTextConfig):
        if asked:
            raise ValueError(
                "output_router_logits is true but this model has no experts: leave it out"
            )
        return None
    is_asked = text.output_router_logits if asked is None else asked
    return LoadBalance(attention_mask_BL, shape_BL) if is_asked else None


class LoadBalance:
    """Collects the routing of a forward pass over all layers that have experts.

    Attributes:
        real_T: float32, 1 at real tokens of the whole batch, 0 at padding.
        sums_2E: of all layers so far, `[2, E]` float32; None before the first.
        num_layers: how many these are.
    """

    def __init__(self, attention_mask_BL: Tensor | None, shape_BL: tuple[int, int]):
        if attention_mask_BL is None:
            attention_mask_BL = paddle.ones(shape_BL)
        self.real_T = attention_mask_BL.astype("float32").reshape([-1])
        self.sums_2E: Tensor | None = None
        self.num_layers = 0

    def add(self, sums_2E: Tensor) -> None:
        """One layer's `routing_sums`."""
        self.sums_2E = sums_2E if self.sums_2E is None else self.sums_2E + sums_2E
        self.num_layers += 1

    def loss(self) -> Tensor:
        """`E * sum_e f_e * P_e` with the tokens of all layers pooled, a float32 scalar.

        f_e is how often a token had expert e among its K, P_e the expert's mean probability; the
        value is about K when all experts are used alike. Without a layer of experts it is 0.
        """
        if self.sums_2E is None:
            return paddle.zeros([])
        means_2E = self.sums_2E / (self.real_T.sum() * self.num_layers)
        return means_2E.shape[1] * (means_2E[0] * means_2E[1]).sum()
