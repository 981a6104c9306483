"""Mixture of experts in place of a layer's MLP, and the load-balancing loss.

Padded token rows are not routed (`paddle_vl.nn.experts.RoutedRows`): they take no expert's time,
are in no count and in no balance, and keep their residual. Attention hides them from real tokens,
whose values are HF's.

Shapes: B batch, L padded length, T token rows, R of them routed, D width, E experts, K experts per
token, S keys with a cache.

Source: Qwen3VLMoeTextSparseMoeBlock and load_balancing_loss_func of HF transformers.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import Tensor, nn

from paddle_vl.batch.rows import WHOLE_BATCH, RowPart
from paddle_vl.nn.experts import ExpertCapacity, RoutedRows
from paddle_vl.nn.operations import column_sum
from paddle_vl.nn.placement import Placement
from paddle_vl.nn.transfer import device_tensor, host_array


class Routing(NamedTuple):
    """Routing of token rows to experts.

    Attributes:
        logits: `[R, E]` in the dtype of the token rows.
        probabilities: `[R, E]` float32, the softmax of the logits.
        weights: `[R, K]` weights of the K most probable experts, in the rows' dtype.
        indices: `[R, K]` int64 numbers of these experts.
    """

    logits: Tensor
    probabilities: Tensor
    weights: Tensor
    indices: Tensor


class Router(nn.Layer):
    """Softmax over all experts in float32, the K largest of it, which `normalizes` scales to sum
    1."""

    def __init__(self, linear: nn.Layer, num_experts_per_tok: int, normalizes: bool = True):
        super().__init__()
        self.normalizes = normalizes
        # The checkpoint key is `gate.weight`, so the linear itself is not a sublayer.
        self.weight, self.num_experts_per_tok = linear.weight, num_experts_per_tok

    def forward(self, x_RD: Tensor, indices_RK: Tensor | None = None) -> Routing:
        """Route rows; to given experts, if a first pass has chosen them."""
        logits_RE = paddle.matmul(x_RD, self.weight)
        probabilities_RE = F.softmax(logits_RE.astype("float32"), axis=-1)
        if indices_RK is None:
            weights_RK, chosen_RK = probabilities_RE.topk(self.num_experts_per_tok, axis=-1)
        else:
            chosen_RK = indices_RK
            weights_RK = paddle.take_along_axis(probabilities_RE, chosen_RK, axis=-1)
        if self.normalizes:
            weights_RK = weights_RK / weights_RK.sum(axis=-1, keepdim=True)
        # Paddle treats the indices as differentiable, which fails if the router is the first
        # trained layer.
        chosen_RK = chosen_RK.detach()
        return Routing(logits_RE, probabilities_RE, weights_RK.astype(x_RD.dtype), chosen_RK)


class SparseMoE(nn.Layer):
    """Runs each token row that is not padding through its K experts."""

    def __init__(self, config: Any, placement: Placement):
        super().__init__()
        self.placement = placement
        width, std = config.hidden_size, config.initializer_range
        self.gate = Router(
            placement.layers.router(width, config.num_experts, std),
            config.num_experts_per_tok,
            getattr(config, "norm_topk_prob", True),
        )
        self.experts = placement.layers.experts(
            config.num_experts, width, config.moe_intermediate_size, std
        )

    def forward(
        self, x_TD: Tensor, rows: RoutedRows | None = None, with_sums: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The weighted sums of the experts' outputs `[T, D]`, zeros at padding.

        Args:
            x_TD: this rank's token rows.
            rows: those of the batch to route; None if none is padding.
            with_sums: also return `routing_sums` of the rows that this rank routes.
        """
        ops = self.placement.ops
        takes_own_rows = ops.expert_part.size > 1
        if not takes_own_rows:
            x_TD = ops.enter_columns(x_TD)
        rows = rows or RoutedRows(x_TD.shape[0])
        x_RD = rows.taken(x_TD)
        kept = rows.kept_plan(self.experts)
        routing = self.gate(x_RD) if kept is None else self.gate(x_RD, kept.indices)
        out_TD = self.experts(x_RD, routing.indices, routing.weights, rows)
        if not with_sums:
            return out_TD
        probabilities_RE = routing.probabilities
        if not takes_own_rows:
            probabilities_RE = ops.enter_replicated(probabilities_RE)
        sums_2E = routing_sums(probabilities_RE, routing.indices)
        # Of an empty part: of a row of padding that stands in for a real one.
        return out_TD, sums_2E * 0.0 if rows.is_empty else sums_2E


def routed_rows(
    shape_BL: tuple[int, int],
    attention_mask: np.ndarray | Tensor | None,
    real_row_indices: np.ndarray | Tensor | None = None,
    num_real_rows: int | None = None,
    part: RowPart = WHOLE_BATCH,
    capacity: ExpertCapacity | None = None,
) -> RoutedRows:
    """The rows of a batch that are not padding.

    Args:
        attention_mask: `[B, L]`, 1 at real tokens, or with a cache `[B, S]`, whose last L columns
            count; None if nothing is padding. A tensor without `real_row_indices` costs a host
            read; of anything without values all rows are routed.
        real_row_indices: `[R]` int64, from the collator: of the part, counted from its first row.
        num_real_rows: of the whole batch, with `real_row_indices` of a part.
        part: the rows that this rank routes.
        capacity: see `RoutedRows`.
    """
    num_rows = shape_BL[0] * shape_BL[1]
    if real_row_indices is None:
        real_row_indices, num_real_rows = real_rows(shape_BL, attention_mask, part)
    start, stop = part.bounds(num_rows)
    return RoutedRows(stop - start, device_tensor(real_row_indices), num_real_rows, capacity)


def real_rows(
    shape_BL: tuple[int, int], attention_mask: Any, part: RowPart
) -> tuple[np.ndarray | None, int]:
    """`real_row_indices` and `num_real_rows` of a mask, see `routed_rows`."""
    num_rows, length = shape_BL[0] * shape_BL[1], shape_BL[1]
    if not isinstance(attention_mask, np.ndarray | Tensor):
        return None, num_rows
    every = np.flatnonzero(host_array(attention_mask)[:, -length:])
    return part.of_numbers(every, num_rows), len(every)


def routing_sums(probabilities_RE: Tensor, indices_RK: Tensor) -> Tensor:
    """Per expert, the number of tokens routed to it and its summed probability.

    The load-balancing loss needs only these sums and the number of tokens. Sums of layers or of
    shards of a batch may be added.

    Args:
        probabilities_RE, indices_RK: of `Routing`.

    Returns:
        `[2, E]` float32; the gradient flows through the second row only.
    """
    chosen_RE = paddle.put_along_axis(
        paddle.zeros(probabilities_RE.shape, dtype="float32"),
        indices_RK,
        paddle.ones([1, 1], dtype="float32"),
        axis=1,
    )
    return paddle.stack([column_sum(chosen_RE), column_sum(probabilities_RE)])


class LoadBalance:
    """Collects the routing of all layers with experts in a forward pass.

    Attributes:
        num_tokens: tokens of the batch without padding.
        over_ranks: `RegionOps.sum_routing`.
        sums_2E: `routing_sums` of all layers so far; None before the first.
        num_layers: number of these layers.
    """

    def __init__(self, num_tokens: int, over_ranks: Callable[[Tensor], Tensor] = lambda sums: sums):
        self.num_tokens, self.over_ranks = num_tokens, over_ranks
        self.sums_2E: Tensor | None = None
        self.num_layers = 0

    def add(self, sums_2E: Tensor) -> None:
        """Add the `routing_sums` of a layer."""
        self.sums_2E = sums_2E if self.sums_2E is None else self.sums_2E + sums_2E
        self.num_layers += 1

    def loss(self) -> Tensor:
        """`E * sum_e f_e * P_e` with the tokens of all layers pooled: a float32 scalar.

        f_e is the share of tokens with expert e among their K, P_e its mean probability. The value
        is about K if all experts are used equally, and 0 without layers with experts or tokens.
        """
        if self.sums_2E is None:
            return paddle.zeros([])
        if self.num_tokens == 0:
            return self.sums_2E.sum() * 0.0
        means_2E = self.over_ranks(self.sums_2E) / (self.num_tokens * self.num_layers)
        return means_2E.shape[1] * (means_2E[0] * means_2E[1]).sum()
