"""Floating point operations of vision-language models for the real tokens of a batch.

Tower: patch embedding and blocks per patch, attention within a frame, the final and the deepstack
mergers per visual embedding. Decoder: attention, or what a family has in its place, and MLPs, or
router and K experts, per real token; attention with L (L + 1) / 2 visible pairs per sample of
length L; and the head per token. See `paddle_vl.families.flops` for what is counted.
"""

from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import numpy as np

from paddle_vl.batch.schema import VLBatch
from paddle_vl.families.flops import FlopCounter, Operations, causal_pairs


class VLFlops(FlopCounter):
    """Counts the operations of batches, see `FlopCounter`.

    Args:
        trained: HF keys of all trained parameters of the model; None for all parameters.
        ranks: LoRA ranks by adapted HF module.

    Attributes:
        decoder: HF's module of the decoder.
    """

    decoder: ClassVar[str] = "model.language_model"

    def __init__(
        self,
        config: Any,
        trained: Collection[str] | None = None,
        ranks: Mapping[str, int] = {},
    ):
        self.config, self._trained, self._ranks = config, trained, ranks
        self._with_images, self._without = self._walk(True), self._walk(False)

    def units(self, batch: VLBatch) -> dict[str, int]:
        """Numbers of `patches`, `merged_rows`, `patch_pairs`, `tokens`, `token_pairs` and
        `predictions`.

        Predictions are the rows with a target. Pairs are those that attend to each other. Visual
        embeddings that no token receives (`num_unused_visual_rows`) do not count.
        """
        lengths = np.array(batch.lengths)
        t, h, w = _grids(batch).T
        patches = int((t * h * w).sum())
        return {
            "patches": patches,
            "merged_rows": patches // self.config.vision_config.spatial_merge_size**2,
            "patch_pairs": int((t * (h * w) ** 2).sum()),
            "tokens": int(lengths.sum()),
            "token_pairs": causal_pairs(lengths),
            # Of a batch without any target, one row.
            "predictions": max(batch.num_target_tokens or 0, 1),
        }

    def operations(self, batch: VLBatch) -> Operations:
        """See `FlopCounter`; without images no gradient flows into the tower."""
        return self._with_images if _grids(batch).size else self._without

    @classmethod
    def layer_size(cls, config: Any, number: int) -> int:
        """See `VLConfig.layer_size`."""
        operations = Operations()
        cls.decoder_layer(operations, config.text_config, number, False)
        return operations.forward["tokens"] // 2

    @classmethod
    def decoder_layer(cls, operations: Operations, text: Any, number: int, rows: bool) -> bool:
        """Count a decoder layer: whether gradients flow into its rows, and out of them."""
        layer = operations.at("tokens", f"{cls.decoder}.layers.{number}")
        width = text.hidden_size
        rows |= cls.mixer(layer, text, number, layer.norm("input_layernorm", rows))
        normed = layer.norm("post_attention_layernorm", rows)
        if not text.has_experts(number):
            return rows | layer.mlp("mlp", width, text.intermediate_size, normed)
        return rows | cls.experts(layer, text, normed)

    @classmethod
    def experts(cls, layer: Operations, text: Any, normed: bool) -> bool:
        """Count the experts of a token, with one that every token goes to if there is one."""
        width = text.hidden_size
        size = text.num_experts_per_tok * width * text.moe_intermediate_size
        rows = layer.linear("mlp.gate", width, text.num_experts, normed)
        hidden = layer.matrix("mlp.experts.gate_up_proj", 2 * size, normed)
        rows |= layer.matrix("mlp.experts.down_proj", size, hidden)
        if inner := getattr(text, "shared_expert_intermediate_size", 0):
            rows |= layer.mlp("mlp.shared_expert", width, inner, normed)
            rows |= layer.linear("mlp.shared_expert_gate", width, 1, normed)
        return rows

    @classmethod
    def mixer(cls, layer: Operations, text: Any, number: int, normed: bool) -> bool:
        """Count attention, or what a family has in its place in that layer."""
        return attention(layer, text, normed)

    def last_norm(self, head: Operations, rows: bool) -> bool:
        """Count what is between the last layer and the head."""
        return head.norm(f"{self.decoder}.norm", rows)

    def tower(self, operations: Operations) -> tuple[bool, list[bool]]:
        """Count the tower: whether gradients reach its output and each deepstack level."""
        return _tower(operations, self.config)

    def _walk(self, has_visual: bool) -> Operations:
        operations, text = Operations(self._trained, self._ranks), self.config.text_config
        merged, levels = self.tower(operations)
        embedding = self.config.embedding_key
        rows = operations.trains(embedding) or (has_visual and merged)
        for layer in range(text.num_hidden_layers):
            rows = self.decoder_layer(operations, text, layer, rows)
            if has_visual and layer < len(levels):
                rows |= levels[layer]
        head = operations.at("predictions")
        rows = self.last_norm(head, rows)
        if self.config.tie_word_embeddings:
            head.matrix(embedding, text.hidden_size * text.vocab_size, rows)
        else:
            head.linear("lm_head", text.hidden_size, text.vocab_size, rows)
        return operations


def attention(layer: Operations, text: Any, normed: bool, query_parts: int = 1) -> bool:
    """Count grouped-query attention.

    Args:
        query_parts: width of the queries' projection, in that of the queries: 2 with gates.
    """
    width, queries = text.hidden_size, text.num_attention_heads * text.head_dim
    keys = text.num_key_value_heads * text.head_dim
    q = layer.linear("self_attn.q_proj", width, query_parts * queries, normed)
    k = layer.norm("self_attn.k_norm", layer.linear("self_attn.k_proj", width, keys, normed))
    v = layer.linear("self_attn.v_proj", width, keys, normed)
    q = layer.norm("self_attn.q_norm", q)
    seen = layer.attention("token_pairs", queries, q, k, v)
    return layer.linear("self_attn.o_proj", queries, width, seen)


def _grids(batch: Mapping[str, Any]) -> np.ndarray:
    """`[n, 3]` patches (t, h, w) of every image and video with tokens in the batch."""
    names = () if batch.get("num_unused_visual_rows") else ("image_grid_thw", "video_grid_thw")
    grids = [np.asarray(batch[name]) for name in names if batch.get(name) is not None]
    return np.concatenate([np.zeros([0, 3], dtype=np.int64), *grids])


def _tower(operations: Operations, config: Any) -> tuple[bool, list[bool]]:
    vision, tower = config.vision_config, operations.at("patches", "model.visual")
    width, inner = vision.hidden_size, vision.intermediate_size
    rows = tower.linear("patch_embed.proj", vision.patch_dim, width, False)
    rows |= tower.trains("pos_embed.weight")
    levels = [False] * len(vision.deepstack_visual_indexes)
    for i in range(vision.depth):
        block = operations.at("patches", f"model.visual.blocks.{i}")
        qkv = block.linear("attn.qkv", width, 3 * width, block.norm("norm1", rows))
        seen = block.attention("patch_pairs", width, qkv, qkv, qkv)
        rows |= block.linear("attn.proj", width, width, seen)
        hidden = block.linear("mlp.linear_fc1", width, inner, block.norm("norm2", rows))
        rows |= block.linear("mlp.linear_fc2", inner, width, hidden)
        if i in vision.deepstack_visual_indexes:
            level = vision.deepstack_visual_indexes.index(i)
            levels[level] = _merger(operations, vision, f"deepstack_merger_list.{level}", rows)
    return _merger(operations, vision, "merger", rows), levels


def _merger(operations: Operations, vision: Any, name: str, rows: bool) -> bool:
    merger = operations.at("merged_rows", f"model.visual.{name}")
    block = vision.hidden_size * vision.spatial_merge_size**2
    rows = merger.linear("linear_fc1", block, block, merger.norm("norm", rows))
    return merger.linear("linear_fc2", block, vision.out_hidden_size, rows)
