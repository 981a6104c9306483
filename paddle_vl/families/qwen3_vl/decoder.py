"""The Qwen3 decoder over token rows; deepstack levels are added after its first layers.

Shapes: B batch, L padded length, T = B * L token rows, batch-major (this rank's shard under
sequence parallelism); D width; N query heads, K key heads, H head width; S cached and new keys;
M_local visual tokens of this rank.

Source: Qwen3VLTextModel of HF transformers.
"""

from typing import Any

import paddle
from paddle import Tensor, nn

from paddle_vl.families.qwen3_vl.config import Qwen3VLConfig
from paddle_vl.families.qwen3_vl.embedding import GPTEmbedding
from paddle_vl.families.qwen3_vl.moe import LoadBalance, SparseMoE
from paddle_vl.families.qwen3_vl.text_config import Qwen3VLTextConfig
from paddle_vl.nn.attention import (
    MASKED_SCORE,
    PackedSamples,
    causal_attention,
)
from paddle_vl.nn.cached_attention import CachedKeys, cached_attention
from paddle_vl.nn.experts import RoutedRows
from paddle_vl.nn.linear import Columns
from paddle_vl.nn.norm import RMSNorm
from paddle_vl.nn.operations import swiglu
from paddle_vl.nn.placement import Placement
from paddle_vl.nn.rotary import RotaryTables, apply_rotary


class KeyValueCache:
    """Keys and values of one decoder layer: buffers `[B, K, C, H]` that grow in chunks.

    New keys are written in place, so that no step copies the past. Heads come before positions, as
    in attention on the CPU, and free positions are zero.

    Args:
        prompt: number of keys that come first, maybe in parts: room for them is made at once.
        most: number of keys that there can be; None if it is not known.

    Attributes:
        length: S, the number of keys so far.
    """

    CHUNK = 64

    def __init__(self, prompt: int = 0, most: int | None = None):
        self.length, self._prompt, self._most = 0, prompt, most
        self._key_BKCH: Tensor | None = None
        self._value_BKCH: Tensor | None = None

    def mask(self, num_new: int, key_bias_BS: Tensor | None) -> CachedKeys:
        """What the caches of all layers share when `num_new` keys are appended to each."""
        return CachedKeys(self.length + num_new, key_bias_BS)

    def append(self, key_BLKH: Tensor, value_BLKH: Tensor) -> tuple[Tensor, Tensor]:
        """The buffers of keys and values, with new ones behind the last."""
        begin, self.length = self.length, self.length + key_BLKH.shape[1]
        self._key_BKCH = self._written(self._key_BKCH, key_BLKH, begin)
        self._value_BKCH = self._written(self._value_BKCH, value_BLKH, begin)
        return self._key_BKCH, self._value_BKCH

    def attend(
        self, q_BLNH: Tensor, key_BLKH: Tensor, value_BLKH: Tensor, cached: CachedKeys
    ) -> Tensor:
        """Attention `[B, L, N, H]` over all keys so far and new ones, which are appended."""
        buffers = self.append(key_BLKH, value_BLKH)
        if self.length == key_BLKH.shape[1]:
            return causal_attention(q_BLNH, key_BLKH, value_BLKH, cached.key_bias_BS)
        return cached_attention(q_BLNH, *buffers, cached)

    def _written(self, buffer_BKCH: Tensor | None, new_BLKH: Tensor, begin: int) -> Tensor:
        batch, _, heads, width = new_BLKH.shape
        if buffer_BKCH is None or self.length > buffer_BKCH.shape[2]:
            shape = [batch, heads, self._capacity(), width]
            grown = paddle.zeros(shape, dtype=new_BLKH.dtype)
            if buffer_BKCH is not None:
                grown[:, :, :begin] = buffer_BKCH[:, :, :begin]
            buffer_BKCH = grown
        buffer_BKCH[:, :, begin : self.length] = new_BLKH.transpose([0, 2, 1, 3])
        return buffer_BKCH

    def _capacity(self) -> int:
        """Room for the keys and an eighth more, so that growing copies each key a few times."""
        needed = max(self.length, self._prompt)
        roomy = needed + max(self.CHUNK, needed // 8)
        return roomy if self._most is None else max(needed, min(roomy, self._most))


class LanguageModel(nn.Layer):
    """Embedding, decoder layers with deepstack levels, and the final norm.

    Under sequence parallelism the hidden states are this rank's shard of the token rows; attention
    and MLP gather them. A pipeline stage has `nn.Identity` in place of layers of other stages.
    """

    def __init__(self, config: Qwen3VLConfig, placement: Placement):
        super().__init__()
        text = config.text_config
        # Embedding and final norm are None on pipeline stages without them.
        self.embedding: Any = (
            GPTEmbedding(config, placement) if placement.stage_layers.embedding else None
        )
        self.layers = nn.LayerList(
            [
                DecoderLayer(text, placement, i)
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
        key_bias = inputs.get("score_bias")
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
        _check_level(x_TD, level_MD, update_M)
        return paddle.index_add(x_TD, update_M, 0, level_MD)


@paddle.jit.not_to_static
def _check_level(x_TD: Tensor, level_MD: Tensor, update_M: Tensor) -> None:
    """Compare shapes and dtypes, see `DeepstackLayer.forward`."""
    num_rows, num_places = level_MD.shape[0], update_M.shape[0]
    if (
        len(x_TD.shape) != 2
        or len(level_MD.shape) != 2
        or level_MD.shape[1] != x_TD.shape[1]
        or level_MD.dtype != x_TD.dtype
    ):
        raise ValueError(
            f"a deepstack level is {level_MD.dtype} {list(level_MD.shape)} but the hidden states "
            f"are {x_TD.dtype} {list(x_TD.shape)}: cast the level, pass rows of one width"
        )
    if len(update_M.shape) != 1 or not str(update_M.dtype).endswith("int64"):
        raise ValueError(
            f"visual_update_indices is {update_M.dtype} of shape {list(update_M.shape)}: it "
            "must be 1-D int64, as GPTEmbedding returns it"
        )
    # A traced program may not know them.
    if -1 not in (num_rows, num_places) and num_rows != num_places:
        raise ValueError(
            f"a deepstack level has {num_rows} rows for {num_places} visual token rows: take "
            "levels and visual_update_indices from one call of GPTEmbedding"
        )


class DecoderLayer(nn.Layer):
    """`x + attention(norm(x))`, then `x + mlp(norm(x))`; the MLP may be a mixture of experts."""

    def __init__(self, config: Qwen3VLTextConfig, placement: Placement, number: int):
        super().__init__()
        experts = config.experts_of(number)
        self.has_experts = experts is not None
        self.self_attn = SelfAttention(config, placement)
        self.mlp = (
            SwiGLUMLP(config, placement) if experts is None else SparseMoE(experts, placement)
        )
        width, epsilon = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = placement.layers.row_wise(RMSNorm(width, epsilon))
        self.post_attention_layernorm = placement.layers.row_wise(RMSNorm(width, epsilon))

    def forward(
        self,
        x_TD: Tensor,
        tables: RotaryTables,
        key_bias: Any = None,
        cache: KeyValueCache | None = None,
        packed: PackedSamples | None = None,
        rows: RoutedRows | None = None,
        with_sums: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The token rows; with experts and `with_sums` also the layer's `routing_sums`."""
        attended_TD = self.self_attn(self.input_layernorm(x_TD), tables, key_bias, cache, packed)
        x_TD, rows_TD = self.post_attention_layernorm(attended_TD, x_TD)
        if not self.has_experts:
            return x_TD + self.mlp(rows_TD)
        mlp_TD, sums_2E = self.mlp(rows_TD, rows, with_sums)
        return x_TD + mlp_TD if sums_2E is None else (x_TD + mlp_TD, sums_2E)


class SelfAttention(nn.Layer):
    """Causal grouped-query attention; queries and keys are normalized, then rotated."""

    def __init__(self, config: Qwen3VLTextConfig, placement: Placement):
        super().__init__()
        self.head_dim = config.head_dim
        width, std = config.hidden_size, config.initializer_range
        heads, key_heads = config.num_attention_heads, config.num_key_value_heads
        query_width, key_width = heads * config.head_dim, key_heads * config.head_dim
        columns = [
            Columns("q_proj", query_width, heads),
            Columns("k_proj", key_width, key_heads),
            Columns("v_proj", key_width, key_heads),
        ]
        self.qkv_proj = placement.layers.projections(width, columns, std)
        self.o_proj = placement.layers.row_linear(query_width, width, std)
        self.q_norm = placement.layers.head_wise(RMSNorm(config.head_dim, config.rms_norm_eps))
        self.k_norm = placement.layers.head_wise(RMSNorm(config.head_dim, config.rms_norm_eps))

    def forward(
        self,
        x_TD: Tensor,
        tables: RotaryTables,
        key_bias: Any = None,
        cache: KeyValueCache | None = None,
        packed: PackedSamples | None = None,
    ) -> Tensor:
        length = tables.cos_TH.shape[1]
        q_BLNH, k_BLKH, v_BLKH = [
            rows.reshape([-1, length, rows.shape[-1] // self.head_dim, self.head_dim])
            for rows in self.qkv_proj(x_TD)
        ]
        q_BLNH, k_BLKH = self.q_norm(q_BLNH), self.k_norm(k_BLKH)
        q_BLNH, k_BLKH = apply_rotary(q_BLNH, k_BLKH, tables.astype(x_TD.dtype))
        if cache is not None:
            out_BLNH = cache.attend(q_BLNH, k_BLKH, v_BLKH, key_bias)
        else:
            out_BLNH = causal_attention(q_BLNH, k_BLKH, v_BLKH, key_bias, packed)
        return self.o_proj(out_BLNH.reshape([-1, out_BLNH.shape[2] * self.head_dim]))


class SwiGLUMLP(nn.Layer):
    """`down(silu(gate(x)) * up(x))`."""

    def __init__(self, config: Qwen3VLTextConfig, placement: Placement):
        super().__init__()
        width, inner, std = config.hidden_size, config.intermediate_size, config.initializer_range
        columns = [Columns("gate_proj", inner), Columns("up_proj", inner)]
        self.gate_up_proj = placement.layers.projections(width, columns, std, splits=False)
        self.down_proj = placement.layers.row_linear(inner, width, init_std=std)

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.down_proj(swiglu(*self.gate_up_proj(x_TD)))
