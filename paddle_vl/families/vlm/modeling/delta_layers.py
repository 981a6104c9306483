"""Layers of decoders whose token mixer is mostly a delta rule: gated DeltaNet, and experts with one
that every token goes to.

Shapes: T token rows (this rank's shard under sequence parallelism), D width.

Source: Qwen3_5GatedDeltaNet and Qwen3_5MoeSparseMoeBlock of HF transformers, modeling_qwen3_5.py
and modeling_qwen3_5_moe.py.
"""

from typing import Any

import paddle.nn.functional as F
from paddle import Tensor, nn

from paddle_vl.families.vlm.modeling.delta_config import DeltaExpertsText, DeltaText
from paddle_vl.families.vlm.modeling.layers import SwiGLUMLP
from paddle_vl.families.vlm.modeling.moe import SparseMoE
from paddle_vl.nn.attention import PackedSamples, RotaryTables
from paddle_vl.nn.delta_rule import (
    CausalConvSiLU,
    Decay,
    DeltaCache,
    DeltaRule,
    GatedRMSNorm,
    gated_delta_net,
)
from paddle_vl.nn.experts import RoutedRows
from paddle_vl.nn.linear import Columns, Linear
from paddle_vl.nn.placement import Placement
from paddle_vl.nn.residual_streams import write_streams


class GatedDeltaNet(nn.Layer):
    """A convolution, the gated delta rule, and a gated norm, between linears; see
    `paddle_vl.nn.delta_rule`.

    Tensor parallelism divides key heads, each with its value heads.

    Args:
        is_sigmoid: of the output's gate; else SiLU.
    """

    def __init__(self, config: DeltaText, placement: Placement, is_sigmoid: bool = False):
        super().__init__()
        width, std = config.hidden_size, config.initializer_range
        key_heads, heads = config.linear_num_key_heads, config.linear_num_value_heads
        self.key_dim, self.value_dim = config.linear_key_head_dim, config.linear_value_head_dim
        key_width, value_width = config.key_width, config.value_width
        qkv = (key_width, key_width, value_width)
        self.in_proj = placement.layers.projections(
            width,
            [
                Columns("in_proj_qkv", sum(qkv), key_heads, qkv),
                Columns("in_proj_z", value_width, key_heads),
                Columns("in_proj_b", heads, key_heads),
                Columns("in_proj_a", heads, key_heads),
            ],
            std,
        )
        taps = config.linear_conv_kernel_dim
        self.conv1d = placement.layers.channels(
            qkv, lambda channels: CausalConvSiLU(channels, taps, std)
        )
        self.decay = placement.layers.channels([heads], Decay)
        self.core = DeltaRule()
        self.norm = placement.layers.head_wise(
            GatedRMSNorm(self.value_dim, config.rms_norm_eps, is_sigmoid)
        )
        self.out_proj = placement.layers.row_linear(value_width, width, std)

    def forward(
        self,
        x_TD: Tensor,
        tables: RotaryTables,
        key_bias: Any = None,
        cache: DeltaCache | None = None,
        packed: PackedSamples | None = None,
    ) -> Tensor:
        return gated_delta_net(x_TD, self, tables, key_bias, cache, packed)


class SharedExpertMoE(SparseMoE):
    """Routed experts, and one that every token goes to, times the sigmoid of a gate per token."""

    def __init__(self, config: DeltaExpertsText, placement: Placement):
        super().__init__(config, placement)
        width, std = config.hidden_size, config.initializer_range
        self.shared_expert = SwiGLUMLP(
            width, config.shared_expert_intermediate_size, std, placement
        )
        self.shared_expert_gate = placement.layers.row_wise(Linear(width, 1, False, std))

    def forward(
        self, x_TD: Tensor, rows: RoutedRows | None = None, with_sums: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """As of `SparseMoE`; at padding only the shared expert's output."""
        routed = super().forward(x_TD, rows, with_sums)
        routed_TD, sums_2E = routed if isinstance(routed, tuple) else (routed, None)
        x_TD, routed_TD = self.placement.ops.in_turn(x_TD, routed_TD)
        share_T1 = F.sigmoid(self.shared_expert_gate(x_TD))
        out_TD = write_streams(routed_TD, self.shared_expert(x_TD), share_T1)
        return out_TD if sums_2E is None else (out_TD, sums_2E)
