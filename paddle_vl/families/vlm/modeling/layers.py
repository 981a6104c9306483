"""Layers of a vision-language model in reading order: vision tower, embedding with visual tokens,
attention and layers of a decoder, and its frame, which adds deepstack levels after the first ones.

Shapes: P patches of all items, in merge-block order; U tower width; N heads; K key heads; H head
width; B batch, L padded length, T = B * L token rows, batch-major (this rank's shard under sequence
parallelism); D decoder width; M = P / merge^2 visual embeddings of the batch, M_local those of this
rank's token rows; G deepstack levels. The tower's attention is full within one frame of one image
or video.

Tensor parallelism of a colocated encoder divides the linears that a layer names in `column_blocks`
(output features, in so many equal blocks) and `row_linears` (input features).

Source: Qwen3VLVisionModel, Qwen3VLVisionPatchMerger, Qwen3VLModel and Qwen3VLTextModel of HF
transformers.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import paddle
import paddle.nn.functional as F
from paddle import Tensor, nn
from paddle.nn.initializer import Constant, Normal

from paddle_vl.batch.positions import PatchRows
from paddle_vl.batch.schema import VLBatch, check_array, name_of
from paddle_vl.batch.visual_index import check_indices
from paddle_vl.families.vlm.modeling.config import VLConfig
from paddle_vl.families.vlm.modeling.moe import LoadBalance, SparseMoE, routed_rows
from paddle_vl.nn.attention import (
    PackedSamples,
    RotaryTables,
    apply_rotary,
    mrope_tables,
    self_attention,
    vision_tables,
)
from paddle_vl.nn.attention_masks import MASKED_SCORE, SliceMask
from paddle_vl.nn.experts import RoutedRows
from paddle_vl.nn.key_value_cache import KeyValueCache
from paddle_vl.nn.linear import Columns, Linear, split_columns
from paddle_vl.nn.operations import (
    GemmaRMSNorm,
    LayerNorm,
    MaskGradient,
    RMSNorm,
    activation,
    gelu,
    swiglu,
    swiglu_mlp,
    times_constant,
)
from paddle_vl.nn.placement import Placement, RegionOps


class VisionFeatures(NamedTuple):
    """Output in the order of items: visual embeddings `[M, D]` and G deepstack levels `[M, D]`."""

    merged: Tensor
    levels: list[Tensor]


class VisionTower(nn.Layer):
    """Patch embedding, learned positions, blocks, a merger per deepstack level and a final one."""

    def __init__(self, config: Any):
        super().__init__()
        self.config = config
        std = config.initializer_range
        # A convolution whose stride is its kernel is one matrix product over flattened patches.
        self.patch_embed = Linear(config.patch_dim, config.hidden_size, True, std)
        self.pos_embed = PositionTable(config.num_position_embeddings, config.hidden_size, std)
        self.blocks = nn.LayerList([VisionBlock(config) for _ in range(config.depth)])
        self.merger = PatchMerger(config, norm_after_merge=False)
        self.deepstack_merger_list = nn.LayerList(
            [PatchMerger(config, norm_after_merge=True) for _ in config.deepstack_visual_indexes]
        )

    def forward(self, pixel_values: Tensor, places: PatchRows, segments: Any) -> VisionFeatures:
        """Encode a batch of patches.

        Args:
            pixel_values: `[P, patch_dim]` flattened patches (channel, frame, y, x), any float type.
            places: of the same patches, as tensors.
            segments: `Segments`, or what attends within segments that are known otherwise.
        """
        x_PU = self.patch_embed(pixel_values.astype(self.patch_embed.weight.dtype))
        x_PU = x_PU + self.pos_embed(places.tap_rows, places.tap_weights)
        head_dim = self.config.hidden_size // self.config.num_heads
        tables = vision_tables(places.coordinates, head_dim, self.config.rope_theta)
        levels: list[Any] = [None] * len(self.deepstack_merger_list)
        for i, block in enumerate(self.blocks):
            x_PU = block(x_PU, tables, segments)
            if i in self.config.deepstack_visual_indexes:
                level = self.config.deepstack_visual_indexes.index(i)
                levels[level] = self.deepstack_merger_list[level](x_PU)
        return VisionFeatures(self.merger(x_PU), levels)


class PositionTable(nn.Layer):
    """Learned positions on a square grid, interpolated for any size of a frame."""

    def __init__(self, num_positions: int, width: int, init_std: float):
        super().__init__()
        self.weight = self.create_parameter(
            [num_positions, width], default_initializer=Normal(std=init_std)
        )

    def forward(self, tap_rows_P4: Tensor, tap_weights_P4: Tensor) -> Tensor:
        """Bilinear interpolation in float32: `[P, U]` in the table's dtype."""
        table = self.weight.astype("float32")
        taps_PU = [
            times_constant(
                F.embedding(tap_rows_P4[:, tap], table), tap_weights_P4[:, tap : tap + 1]
            )
            for tap in range(4)
        ]
        value_PU = taps_PU[0] + taps_PU[1] + taps_PU[2] + taps_PU[3]
        return value_PU.astype(self.weight.dtype)


class VisionBlock(nn.Layer):
    """`x + attention(norm(x))`, then `x + mlp(norm(x))`."""

    def __init__(self, config: Any):
        super().__init__()
        self.norm1 = LayerNorm(config.hidden_size, 1e-6)
        self.norm2 = LayerNorm(config.hidden_size, 1e-6)
        self.attn = VisionAttention(config)
        self.mlp = VisionMLP(config)

    def forward(self, x_PU: Tensor, tables: RotaryTables, segments: Any) -> Tensor:
        x_PU = x_PU + self.attn(self.norm1(x_PU), tables, segments)
        return x_PU + self.mlp(self.norm2(x_PU))


class VisionAttention(nn.Layer):
    """Self-attention within segments; the fused projection is (q, k, v), each head-major."""

    column_blocks: ClassVar[dict[str, int]] = {"qkv": 3}
    row_linears: ClassVar[tuple[str, ...]] = ("proj",)

    def __init__(self, config: Any):
        super().__init__()
        self.head_dim = config.hidden_size // config.num_heads
        width, std = config.hidden_size, config.initializer_range
        self.qkv = Linear(width, 3 * width, True, std)
        self.proj = Linear(width, width, True, std)

    def forward(self, x_PU: Tensor, tables: RotaryTables, segments: Any) -> Tensor:
        # A rank may have some of the heads.
        width = self.qkv.weight.shape[1] // 3
        heads = [-1, width // self.head_dim, self.head_dim]
        # Split before the heads: views of the whole would each be copied later.
        q_PNH, k_PNH, v_PNH = (x.reshape(heads) for x in split_columns(self.qkv(x_PU), [width] * 3))
        q_PNH, k_PNH = apply_rotary(q_PNH, k_PNH, tables)
        out_PNH = segments.attend(q_PNH, k_PNH, v_PNH)
        return self.proj(out_PNH.reshape([-1, width]))


class VisionMLP(nn.Layer):
    """`fc2(gelu(fc1(x)))` with the configured GELU (tanh in every checkpoint)."""

    column_blocks: ClassVar[dict[str, int]] = {"linear_fc1": 1}
    row_linears: ClassVar[tuple[str, ...]] = ("linear_fc2",)

    def __init__(self, config: Any):
        super().__init__()
        width, inner, std = config.hidden_size, config.intermediate_size, config.initializer_range
        self.linear_fc1 = Linear(width, inner, True, std)
        self.linear_fc2 = Linear(inner, width, True, std)
        self.act = activation(config.hidden_act)

    def forward(self, x_PU: Tensor) -> Tensor:
        return self.linear_fc2(self.act(self.linear_fc1(x_PU)))


class PatchMerger(nn.Layer):
    """LayerNorm, concatenation of the patches of a merge block, and an MLP with the erf GELU.

    Args:
        norm_after_merge: False for the final merger, which normalizes each patch over U before the
            concatenation; True for deepstack mergers, which normalize over the block after it.
    """

    column_blocks: ClassVar[dict[str, int]] = {"linear_fc1": 1}
    row_linears: ClassVar[tuple[str, ...]] = ("linear_fc2",)

    def __init__(self, config: Any, norm_after_merge: bool):
        super().__init__()
        self.norm_after_merge = norm_after_merge
        self.block_width = config.hidden_size * config.spatial_merge_size**2
        norm_width = self.block_width if norm_after_merge else config.hidden_size
        std = config.initializer_range
        self.norm = LayerNorm(norm_width, 1e-6)
        self.linear_fc1 = Linear(self.block_width, self.block_width, True, std)
        self.linear_fc2 = Linear(self.block_width, config.out_hidden_size, True, std)

    def forward(self, x_PU: Tensor) -> Tensor:
        """`[P, U]` in merge-block order to `[M, D]`."""
        if self.norm_after_merge:
            x = self.norm(x_PU.reshape([-1, self.block_width]))
        else:
            x = self.norm(x_PU).reshape([-1, self.block_width])
        return self.linear_fc2(gelu(self.linear_fc1(x)))


def decoder_positions(config: VLConfig, position_ids: Tensor) -> dict[str, Any]:
    """Positions `[3, B, L]` as an input of all decoder layers, with their `RotaryTables`."""
    text = config.text_config
    # Two channels for every slot; of a head that is wider, the first ones are rotated.
    rotated = 2 * sum(text.mrope_section)
    tables = mrope_tables(
        position_ids, rotated, text.rope_theta, text.mrope_section, text.mrope_interleaves
    )
    return {"position_ids": position_ids, "rotary_pos_emb": tables}


def decoder_inputs(config: VLConfig, ops: RegionOps, batch: VLBatch) -> dict[str, Any]:
    """What all decoder layers share, of a batch on the device: positions, and where there are such
    the mask of left-padded rows, packed samples, and the rows that go to experts."""
    inputs = decoder_positions(config, batch.position_ids) | {"input_ids": batch.input_ids}
    offsets, shape = batch.cu_seqlens, tuple(batch.input_ids.shape)
    # With one segment per row, causal attention suffices.
    if offsets is not None and len(offsets) > shape[0] + 1:
        inputs["packed"] = PackedSamples(offsets, shape[1], batch.packed_key_ends)
    if (keys := batch.slice_key_rows) is not None:
        queries = shape[1] if batch.slice_orders is None else keys.shape[2]
        inputs["packed"] = SliceMask(keys, queries, batch.slice_orders)
    mask_BL = batch.attention_mask
    if mask_BL is not None and batch.has_left_padding is not False and offsets is None:
        inputs["attention_mask"] = mask_BL
    if getattr(config.text_config, "num_experts", 0):
        real = (batch.real_row_indices, batch.num_real_rows)
        inputs["routed_rows"] = routed_rows(
            shape, mask_BL, *real, ops.expert_part, batch.expert_capacity
        )
    return inputs


class GPTEmbedding(nn.Layer):
    """Embeds tokens, overwrites placeholders with visual embeddings, gathers the deepstack levels;
    each is one gather and one scatter, by the indices of the batch.

    `embedding_inputs.embedded` takes dictionaries as of PaddleFleet, and searches for indices.

    Attributes:
        num_levels: deepstack levels of a batch with visual tokens.
    """

    def __init__(self, config: VLConfig, placement: Placement):
        super().__init__()
        text = self.text = config.text_config
        self.config, self.placement = config, placement
        self.num_levels = len(config.vision_config.deepstack_visual_indexes)
        self.embed_tokens = placement.layers.vocab_embedding(
            text.vocab_size, text.hidden_size, text.initializer_range, config.tie_word_embeddings
        )

    def forward(self, batch: VLBatch, features: VisionFeatures | None = None) -> dict[str, Any]:
        """The decoder's inputs: token rows of this rank, and what its layers share.

        Args:
            batch: on the device, with `input_ids` and, for `features`, the visual indices.
            features: of the tower, images before videos.

        Returns:
            Those of `decoder_inputs`, and `hidden_states` `[T, D]`; with features also
            `deepstack_visual_emb` (G tensors `[M_local, D]` in the dtype of the hidden states) and
            `visual_update_indices` `[M_local]`, their rows.

        Raises:
            ValueError: indices or levels of another batch, or token rows that sequence parallelism
                does not divide. In the checked mode of `paddle_vl.batch.visual_index` also indices
                that are not those of the placeholders.
        """
        inputs = decoder_inputs(self.config, self.placement.ops, batch)
        rows = self.embed_tokens(batch.input_ids)
        if (padding := self.text.padding_idx) is not None:
            # As of torch's embedding: that token's row is read, and gets no gradient.
            rows = MaskGradient.apply(rows, batch.input_ids != padding)
        hidden_TD = self.placement.ops.enter_rows(rows.reshape([-1, rows.shape[-1]]))
        if features is None:
            return inputs | {"hidden_states": hidden_TD}
        ids = (self.config.image_token_id, self.config.video_token_id)
        check_indices(batch, features.merged.shape[0], ids, self.placement.ops.row_part)
        order_M, source_M = batch.visual_gather_indices, batch.visual_source_indices
        if source_M is not None:
            order_M = paddle.index_select(source_M, order_M)
        merged_MD, *levels = (
            in_order([x_MD], order_M, hidden_TD.dtype)
            for x_MD in (features.merged, *features.levels)
        )
        update_M = batch.visual_update_indices
        return inputs | {
            "hidden_states": paddle.scatter(hidden_TD, update_M, merged_MD),
            "deepstack_visual_emb": levels,
            "visual_update_indices": update_M,
        }


def in_order(sources: Sequence[Tensor], order: Tensor | None, dtype: Any) -> Tensor:
    """Rows of the concatenated sources in that order, all of them for None, in a dtype."""
    rows_MD = sources[0] if len(sources) == 1 else paddle.concat(list(sources), axis=0)
    rows_MD = rows_MD if order is None else paddle.index_select(rows_MD, order)
    return rows_MD if rows_MD.dtype == dtype else rows_MD.astype(dtype)


class Bias(nn.Layer):
    """`x + bias`, zeros at first: of a linear of `LayerFactory`, under whose name it is."""

    def __init__(self, width: int):
        super().__init__()
        self.bias = self.create_parameter([width], default_initializer=Constant(0.0))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias


class SwiGLUMLP(nn.Layer):
    """`down(silu(gate(x)) * up(x))`; the linears may have biases."""

    def __init__(
        self,
        width: int,
        inner: int,
        init_std: float,
        placement: Placement,
        has_biases: bool = False,
    ):
        super().__init__()
        columns = [Columns("gate_proj", inner), Columns("up_proj", inner)]
        self.gate_up_proj = placement.layers.projections(width, columns, init_std, splits=False)
        self.down_proj = placement.layers.row_linear(inner, width, init_std)
        self.has_biases = has_biases
        if has_biases:
            self.gate_proj, self.up_proj = (
                placement.layers.channels([inner], Bias) for _ in range(2)
            )
            self.down_proj.bias = placement.layers.row_wise(Bias(width)).bias

    def forward(self, x_TD: Tensor) -> Tensor:
        if not self.has_biases:
            return swiglu_mlp(x_TD, self.gate_up_proj, self.down_proj)
        parts = self.gate_up_proj(x_TD)
        gate, up = parts if len(parts) > 1 else paddle.chunk(parts[0], 2, axis=-1)
        return self.down_proj(swiglu(self.gate_proj(gate), self.up_proj(up)))


class VLSelfAttention(nn.Layer):
    """Causal grouped-query attention; queries and keys are normalized, then rotated: as many of
    their first channels as the rotary tables have.

    Args:
        norm_class: of queries and keys; None rotates them as they are.
        is_gated: a query head's projection has the query, then a gate, by whose sigmoid the head's
            output is multiplied.
    """

    def __init__(
        self,
        config: Any,
        placement: Placement,
        norm_class: type[RMSNorm | GemmaRMSNorm] | None = RMSNorm,
        is_gated: bool = False,
    ):
        super().__init__()
        self.head_dim, self.is_gated = config.head_dim, is_gated
        self.context = placement.ops.context
        width, std, epsilon = config.hidden_size, config.initializer_range, config.rms_norm_eps
        heads, key_heads = config.num_attention_heads, config.num_key_value_heads
        query_width, key_width = heads * config.head_dim, key_heads * config.head_dim
        columns = [
            Columns("q_proj", 2 * query_width if is_gated else query_width, heads),
            Columns("k_proj", key_width, key_heads),
            Columns("v_proj", key_width, key_heads),
        ]
        self.qkv_proj = placement.layers.projections(width, columns, std)
        self.o_proj = placement.layers.row_linear(query_width, width, std)
        self.has_biases, self.q_norm, self.k_norm = config.use_bias, None, None
        if self.has_biases:
            for one in columns:
                bias = placement.layers.channels([one.width], self._bias_of_heads)
                self.add_sublayer(one.name, bias)
            self.o_proj.bias = placement.layers.row_wise(Bias(width)).bias
        if norm_class is not None:
            self.q_norm = placement.layers.head_wise(norm_class(config.head_dim, epsilon))
            self.k_norm = placement.layers.head_wise(norm_class(config.head_dim, epsilon))

    @property
    def biases(self) -> Sequence[Bias]:
        return (self.q_proj, self.k_proj, self.v_proj) if self.has_biases else ()

    def _bias_of_heads(self, width: int) -> Bias:
        """
        Raises:
            ValueError: a rank has less than a head.
        """
        if width % self.head_dim:
            raise ValueError(
                "text_config.use_bias is true and there are fewer key heads than model-parallel "
                "ranks, which would share a bias: choose a smaller parallel.mp_degree"
            )
        return Bias(width)

    def forward(
        self,
        x_TD: Tensor,
        tables: RotaryTables,
        key_bias: Any = None,
        cache: KeyValueCache | None = None,
        packed: PackedSamples | SliceMask | None = None,
    ) -> Tensor:
        return self_attention(x_TD, self, tables, key_bias, cache, packed)


class VLDecoderLayer(nn.Layer):
    """`x + mixer(norm(x))`, then `x + mlp(norm(x))`; the MLP may be a mixture of experts.

    Args:
        number: of the layer.
        mixer: attention, or what is in its place, called with the arguments of `forward` up to
            `packed`.
        mixer_name: its name in the checkpoint.
        experts_class: of the mixture, in layers that have one.
    """

    def __init__(
        self,
        config: Any,
        placement: Placement,
        number: int,
        mixer: nn.Layer,
        mixer_name: str = "self_attn",
        norm_class: type[RMSNorm | GemmaRMSNorm] = RMSNorm,
        experts_class: type[SparseMoE] = SparseMoE,
    ):
        super().__init__()
        self.mixer_name, self.has_experts = mixer_name, config.has_experts(number)
        setattr(self, mixer_name, mixer)
        width, epsilon = config.hidden_size, config.rms_norm_eps
        self.mlp = (
            experts_class(config, placement)
            if self.has_experts
            else SwiGLUMLP(
                width,
                config.intermediate_size,
                config.initializer_range,
                placement,
                config.use_bias,
            )
        )
        self.input_layernorm = placement.layers.row_wise(norm_class(width, epsilon))
        self.post_attention_layernorm = placement.layers.row_wise(norm_class(width, epsilon))

    def forward(
        self,
        x_TD: Tensor,
        tables: RotaryTables,
        key_bias: Any = None,
        cache: Any = None,
        packed: PackedSamples | SliceMask | None = None,
        rows: RoutedRows | None = None,
        with_sums: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The token rows; with experts and `with_sums` also the layer's `routing_sums`."""
        mixer = getattr(self, self.mixer_name)
        mixed_TD = mixer(self.input_layernorm(x_TD), tables, key_bias, cache, packed)
        x_TD, rows_TD = self.post_attention_layernorm(mixed_TD, x_TD)
        if not self.has_experts:
            return x_TD + self.mlp(rows_TD)
        mlp = self.mlp(rows_TD, rows, with_sums)
        return (x_TD + mlp[0], mlp[1]) if with_sums else x_TD + mlp


class VLLanguageModel(nn.Layer, ABC):
    """Embedding, decoder layers with deepstack levels, and the final norm or what is in its place.

    A family makes the layers, see `VLDecoderLayer`: called with the token rows, `RotaryTables`, the
    key bias or what the caches share, a cache, `PackedSamples` and `RoutedRows`, they return the
    token rows; those with `has_experts`, called with True besides, also their `routing_sums`.

    Under sequence parallelism the hidden states are this rank's shard of the token rows; attention
    and MLP gather them. A pipeline stage has `nn.Identity` in place of layers of other stages.

    Attributes:
        norm_class: of the final norm.
        own_inputs: names of the decoder's inputs that layers take behind the arguments of
            `VLDecoderLayer`.
    """

    own_inputs: ClassVar[tuple[str, ...]] = ()
    norm_class: ClassVar[type[RMSNorm | GemmaRMSNorm]] = RMSNorm

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
            placement.layers.row_wise(self.make_norm(text)) if placement.stage_layers.head else None
        )

    @abstractmethod
    def make_layer(self, config: Any, placement: Placement, number: int) -> nn.Layer:
        """The decoder layer of that number, of the text configuration."""

    def make_norm(self, config: Any) -> nn.Layer:
        """What makes the head's rows `[T, D]` of the last layer's, of the text configuration."""
        return self.norm_class(config.hidden_size, config.rms_norm_eps)

    def row_width(self, config: Any) -> int:
        """Numbers of a token row between layers, of the text configuration."""
        return config.hidden_size

    def entering(self, x_TD: Tensor) -> Tensor:
        """What the first layer gets of the embedded token rows."""
        return x_TD

    def run(
        self,
        inputs: dict[str, Any],
        caches: Any = None,
        balance: LoadBalance | None = None,
    ) -> Tensor:
        """This rank's token rows after all layers and the final norm, `[T, D]`.

        Args:
            inputs: what `embedding` returns.
            caches: one per layer when generating, or None; objects with `mask` and `attend`, see
                `KeyValueCache`. Attention then sees their keys too.
            balance: collects the routing of layers with experts.
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
            x_TD: this rank's token rows; for the first layer the embedded ones.
            levels: deepstack levels `[M_local, D]` by the layer that they follow.
            inputs: `rotary_pos_emb`, and optionally `attention_mask`, `packed`, `routed_rows` and
                `visual_update_indices`, of `decoder_inputs` and `GPTEmbedding`.
            caches, balance: as of `run`.
        """
        tables: RotaryTables = inputs["rotary_pos_emb"]
        key_bias = None
        if inputs.get("attention_mask") is not None:
            key_bias = (1.0 - inputs["attention_mask"].astype("float32")) * MASKED_SCORE
        if caches is not None:
            key_bias = caches[layers[0]].mask(inputs["position_ids"].shape[-1], key_bias)
        packed, rows = inputs.get("packed"), inputs.get("routed_rows")
        own = [inputs[name] for name in self.own_inputs]
        if layers.start == 0:
            x_TD = self.entering(x_TD)
        for i in layers:
            cache = None if caches is None else caches[i]
            shared = (tables, key_bias, cache, packed)
            if balance is not None and self.layers[i].has_experts:
                x_TD, sums_2E = self.layers[i](x_TD, *shared, rows, True, *own)
                balance.add(sums_2E)
            else:
                x_TD = self.layers[i](x_TD, *shared, rows, *((False, *own) if own else ()))
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
        remedy = "take levels and visual_update_indices from one call of GPTEmbedding"
        check_array("visual_update_indices", update_M, [["M"]], "int64", remedy)
        check_array("a layer's input", x_TD, [["T", "D"]], "float", "pass token rows")
        wanted = [update_M.shape[0], x_TD.shape[1]]
        check_array("a deepstack level", level_MD, [wanted], name_of(x_TD.dtype), remedy)
        return paddle.index_add(x_TD, update_M, 0, level_MD)
