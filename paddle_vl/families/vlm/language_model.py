"""The frame of a decoder over token rows; deepstack levels are added after its first layers.

Shapes: B batch, L padded length, T = B * L token rows, batch-major (this rank's shard under
sequence parallelism); D width; M_local visual tokens of this rank.

Source: Qwen3VLTextModel of HF transformers.
"""

from abc import ABC, abstractmethod
from typing import Any

import paddle
from paddle import Tensor, nn

from paddle_vl.batch.visual_inputs import check_level
from paddle_vl.families.vlm.cache import KeyValueCache
from paddle_vl.families.vlm.config import VLConfig
from paddle_vl.families.vlm.embedding import GPTEmbedding
from paddle_vl.families.vlm.moe import LoadBalance
from paddle_vl.nn.attention import MASKED_SCORE
from paddle_vl.nn.norm import RMSNorm
from paddle_vl.nn.placement import Placement
from paddle_vl.nn.rotary import RotaryTables


class VLLanguageModel(nn.Layer, ABC):
    """Embedding, decoder layers with deepstack levels, and the final norm.

    A family makes the layers: called with the token rows, `RotaryTables`, the key bias or what the
    caches share, a cache, `PackedSamples` and `RoutedRows`, they return the token rows; those with
    `has_experts`, called with True besides, also their `routing_sums`.

    Under sequence parallelism the hidden states are this rank's shard of the token rows; attention
    and MLP gather them. A pipeline stage has `nn.Identity` in place of layers of other stages.
    """

    def __init__(self, config: VLConfig, placement: Placement):
        super().__init__()
        text = config.text_config
        # Embedding and final norm are None on pipeline stages without them.
        self.embedding: Any = (
            GPTEmbedding(config, placement) if placement.stage_layers.embedding else None
        )
        self.layers = nn.LayerList(
            [
                self.make_layer(text, placement, i)
                if placement.stage_layers.has_layer(i)
                else nn.Identity()
                for i in range(text.num_hidden_layers)
            ]
        )
        self.deepstack_layers = nn.LayerList(
            [DeepstackLayer() for _ in config.vision_config.deepstack_visual_indexes]
        )
        self.norm: Any = (
            placement.layers.row_wise(RMSNorm(text.hidden_size, text.rms_norm_eps))
            if placement.stage_layers.head
            else None
        )

    @abstractmethod
    def make_layer(self, config: Any, placement: Placement, number: int) -> nn.Layer:
        """The decoder layer of that number, of the text configuration."""

    def forward(
        self,
        dict_args: dict[str, Any],
        caches: list[KeyValueCache] | None = None,
        balance: LoadBalance | None = None,
    ) -> Tensor:
        """This rank's token rows after the final norm, `[T, D]`.

        Args:
            dict_args: the input of `GPTEmbedding`.
            caches: one per layer when generating; attention then sees their keys too.
            balance: collects the routing of layers with experts.
        """
        return self.run(self.embedding(dict_args), caches, balance)

    def run(
        self,
        inputs: dict[str, Any],
        caches: Any = None,
        balance: LoadBalance | None = None,
    ) -> Tensor:
        """All layers and the final norm on the embedding's output, `[T, D]`.

        Args:
            caches: one per layer, or None; objects with `mask` and `attend`, see `KeyValueCache`.
        """
        levels = dict(enumerate(inputs.get("deepstack_visual_emb", [])))
        every_layer = range(len(self.layers))
        return self.norm(
            self.run_layers(every_layer, inputs["hidden_states"], levels, inputs, caches, balance)
        )

    def run_layers(
        self,
        layers: range,
        x_TD: Tensor,
        levels: dict[int, Tensor],
        inputs: dict[str, Any],
        caches: list[KeyValueCache] | None = None,
        balance: LoadBalance | None = None,
    ) -> Tensor:
        """Run some layers in order and add each deepstack level after its layer.

        Args:
            layers: numbers of the layers.
            x_TD: this rank's token rows.
            levels: deepstack levels `[M_local, D]` by the layer that they follow.
            inputs: `rotary_pos_emb`, and optionally `attention_mask`, `packed`, `routed_rows` and
                `visual_update_indices`, as `GPTEmbedding` returns them.
            caches, balance: as of `forward`.
        """
        tables: RotaryTables = inputs["rotary_pos_emb"]
        key_bias = None
        if inputs.get("attention_mask") is not None:
            key_bias = (1.0 - inputs["attention_mask"].astype("float32")) * MASKED_SCORE
        if caches is not None:
            key_bias = caches[layers[0]].mask(inputs["position_ids"].shape[-1], key_bias)
        packed, rows = inputs.get("packed"), inputs.get("routed_rows")
        for i in layers:
            cache = None if caches is None else caches[i]
            shared = (tables, key_bias, cache, packed)
            if balance is not None and self.layers[i].has_experts:
                x_TD, sums_2E = self.layers[i](x_TD, *shared, rows, True)
                balance.add(sums_2E)
            else:
                x_TD = self.layers[i](x_TD, *shared, rows)
            if i in levels:
                x_TD = self.deepstack_layers[i](x_TD, levels[i], inputs["visual_update_indices"])
        return x_TD


class DeepstackLayer(nn.Layer):
    """Adds a deepstack level to the visual token rows: one indexed add, no mask, no host read."""

    def forward(self, x_TD: Tensor, level_MD: Tensor, update_M: Tensor) -> Tensor:
        """Add the rows of a level to their token rows; gradients reach both.

        Args:
            x_TD: this rank's token rows.
            level_MD: rows of the level for this rank, `[M_local, D]`.
            update_M: int64 token row in `[0, T)` of each of them.

        Raises:
            ValueError: shapes or dtypes that do not fit each other.
        """
        check_level(x_TD, level_MD, update_M)
        return paddle.index_add(x_TD, update_M, 0, level_MD)
