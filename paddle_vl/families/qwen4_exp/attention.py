"""Attention of Qwen4-Exp: Qwen3.5's gated attention to the tokens that an indexer chooses; see
`paddle_vl.nn.block_attention`."""

from typing import Any

from paddle import Tensor

from paddle_vl.families.vlm.modeling.layers import VLSelfAttention
from paddle_vl.nn.attention import PackedSamples, RotaryTables, self_attention
from paddle_vl.nn.block_attention import BlockSizes, Indexer
from paddle_vl.nn.operations import GemmaRMSNorm
from paddle_vl.nn.placement import Placement


class BlockSelfAttention(VLSelfAttention):
    """Gated attention with an `indexer`, which every rank has whole."""

    def __init__(self, config: Any, placement: Placement):
        super().__init__(config, placement, GemmaRMSNorm, is_gated=True)
        size = config.indexer_compress_ratio
        self.indexer = placement.layers.row_wise(
            Indexer(
                placement.ops,
                config.hidden_size,
                config.indexer_n_heads,
                config.indexer_head_dim,
                BlockSizes(size, config.indexer_budget // size),
                config.rms_norm_eps,
                config.initializer_range,
            )
        )

    def forward(
        self,
        x_TD: Tensor,
        tables: RotaryTables,
        key_bias: Any = None,
        cache: Any = None,
        packed: PackedSamples | None = None,
    ) -> Tensor:
        if cache is not None:
            cache.choose(x_TD, tables, key_bias, self.indexer)
        elif (samples := self.indexer.samples(tables, key_bias, packed)) is not None:
            cache = self.indexer.chosen(x_TD, tables, samples)
        return self_attention(x_TD, self, tables, key_bias, cache, packed)
