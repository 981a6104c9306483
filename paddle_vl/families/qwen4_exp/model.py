"""Qwen4-Exp: the shared vision-language model with a decoder of several residual streams, whose
layers are gated DeltaNet with experts, every fourth with attention to chosen blocks of keys; some
add embeddings of n-grams.

Shapes: T token rows, batch-major (this rank's shard under sequence parallelism); B batch, L padded
length; D width, C = D times the streams.

Source: Qwen4ExpTextModel and Qwen4ExpTextDecoderLayer of HF transformers, modeling_qwen4_exp.py.
"""

from typing import Any

import paddle
from paddle import Tensor, nn

from paddle_vl.families.qwen4_exp import checkpoint_map
from paddle_vl.families.qwen4_exp.attention import BlockSelfAttention
from paddle_vl.families.qwen4_exp.config import Qwen4ExpConfig, Qwen4ExpTextConfig
from paddle_vl.families.vlm.modeling.delta_layers import GatedDeltaNet, SharedExpertMoE
from paddle_vl.families.vlm.modeling.layers import VLLanguageModel
from paddle_vl.families.vlm.modeling.model import VLForConditionalGeneration
from paddle_vl.nn.attention import PackedSamples, RotaryTables, RowPool
from paddle_vl.nn.block_cache import BlockCache, BlockPool
from paddle_vl.nn.delta_rule import DeltaCache, DeltaPool
from paddle_vl.nn.experts import RoutedRows
from paddle_vl.nn.ngram_embedding import NgramCache, NgramPool, PerLayerEmbedding
from paddle_vl.nn.placement import Placement
from paddle_vl.nn.residual_streams import StreamReader, write_streams


class DecoderLayer(nn.Layer):
    """Adds embeddings of n-grams to the streams, if it has them; then a token mixer and experts
    each read the streams and write to them."""

    has_experts = True

    def __init__(self, config: Qwen4ExpTextConfig, placement: Placement, number: int):
        super().__init__()
        self.ple = _embedding(config, placement, number) if config.has_ngrams(number) else None
        self.attn_hyper_connection, self.mlp_hyper_connection = (
            placement.layers.row_wise(_reader(config)) for _ in range(2)
        )
        mixer: nn.Layer
        if config.is_full(number):
            self.mixer_name = "self_attn"
            mixer = BlockSelfAttention(config, placement)
        else:
            self.mixer_name = "linear_attn"
            mixer = GatedDeltaNet(config, placement, config.output_gate == "sigmoid")
        setattr(self, self.mixer_name, mixer)
        self.mlp = SharedExpertMoE(config, placement)

    def forward(
        self,
        x_TC: Tensor,
        tables: RotaryTables,
        key_bias: Any = None,
        cache: Any = None,
        packed: PackedSamples | None = None,
        rows: RoutedRows | None = None,
        with_sums: bool = False,
        ids_BL: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The streams `[T, C]`; arguments as of `VLDecoderLayer`, then ids of all rows."""
        if self.ple is not None:
            x_TC, added_TC = self.ple(x_TC, ids_BL, key_bias, cache, packed, rows)
            x_TC = x_TC + added_TC
        read_TD, weights_TS = self.attn_hyper_connection(x_TC)
        mixed_TD = getattr(self, self.mixer_name)(read_TD, tables, key_bias, cache, packed)
        x_TC = write_streams(x_TC, mixed_TD, weights_TS)
        read_TD, weights_TS = self.mlp_hyper_connection(x_TC)
        mlp = self.mlp(read_TD, rows, with_sums)
        if with_sums:
            return write_streams(x_TC, mlp[0], weights_TS), mlp[1]
        return write_streams(x_TC, mlp, weights_TS)


def _reader(config: Qwen4ExpTextConfig, is_last: bool = False) -> StreamReader:
    return StreamReader(
        config.hidden_size,
        config.hc_count,
        config.hc_lowrank,
        config.rms_norm_eps,
        config.initializer_range,
        is_last,
    )


def _embedding(config: Qwen4ExpTextConfig, placement: Placement, number: int) -> PerLayerEmbedding:
    return PerLayerEmbedding(
        config.ngram_hash(number),
        config.num_ngram_rows(number),
        config.ngram_boundary,
        config.hidden_size,
        config.hc_count,
        config.ple_embed_dim,
        config.ple_conv_kernel_size,
        config.rms_norm_eps,
        config.initializer_range,
        placement,
    )


class LanguageModel(VLLanguageModel):
    """The decoder of Qwen4-Exp. Its first layer gets a copy of the embedded rows as each stream;
    behind the last a reader, without a norm, makes one of them."""

    own_inputs = ("input_ids",)

    def make_layer(self, config: Qwen4ExpTextConfig, placement: Placement, number: int) -> nn.Layer:
        return DecoderLayer(config, placement, number)

    def make_norm(self, config: Qwen4ExpTextConfig) -> nn.Layer:
        return _reader(config, is_last=True)

    def row_width(self, config: Qwen4ExpTextConfig) -> int:
        return config.hc_count * config.hidden_size

    def entering(self, x_TD: Tensor) -> Tensor:
        return paddle.concat([x_TD] * self.embedding.text.hc_count, axis=-1)


class Qwen4ExpForConditionalGeneration(VLForConditionalGeneration):
    """The complete model. Build it with `from_pretrained` or `from_config`."""

    config_class = Qwen4ExpConfig
    model_type = "qwen4_exp"
    checkpoint_map = checkpoint_map
    decoder_class = LanguageModel

    def new_caches(self, prompt: int, most: int | None) -> list[Any]:
        text = self.config.text_config
        layers = range(text.num_hidden_layers)
        return [
            BlockCache(prompt, most)
            if text.is_full(i)
            else NgramCache()
            if text.has_ngrams(i)
            else DeltaCache()
            for i in layers
        ]

    def new_pool(self, number: int, places: int, num_rows: int) -> RowPool:
        text = self.config.text_config
        if text.is_full(number):
            return BlockPool(places)
        return NgramPool(num_rows) if text.has_ngrams(number) else DeltaPool(num_rows)
