"""The decoder: each layer has a backbone half and an expert half, for one or both streams.

The backbone half is Gemma 3 for the prefix, the expert half an adaptive Gemma for the actions. They
interact in attention only: the suffix reads keys and values of the prefix, never the reverse. So
three ways to run it give the same numbers: both streams at once; the prefix first and the suffix on
its cached keys; or, for decoding, the prefix in pieces.

Every layer sees the full prefix, and positions are not scaled, as in OpenTau. With
`use_gemma3_attention` prefix tokens follow Gemma 3: a window in sliding layers, scaled positions in
the full ones. The suffix sees the full prefix in any case.

Shapes: B batch, L prefix tokens of width D, C suffix tokens of width E, S keys; inside a layer D is
the width of its stream, E that of the condition, F inner width of the MLP, N query heads, K
key/value heads, H head width. Inside the layers, tokens are rows, batch-major: T = B * L of the
prefix and T' = B * C of the suffix; under sequence parallelism this rank's shard of them.

Source: OpenTau's Gemma3WithExpertModel, InterleavedDecoderLayer and make_att_2d_masks;
Gemma3DecoderLayer of HF transformers; the adaptive expert is openpi's.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import paddle
from paddle import Tensor, nn

from paddle_vl.families.pi07.config import (
    Gemma3TextConfig,
    Gemma3WithExpertConfig,
    GemmaExpertConfig,
)
from paddle_vl.nn.attention import (
    CachedKeys,
    RotaryTables,
    apply_rotary,
    masked_attention,
)
from paddle_vl.nn.attention_masks import AttentionMask, BlockMask
from paddle_vl.nn.key_value_cache import KeyValueCache
from paddle_vl.nn.linear import Columns, Linear
from paddle_vl.nn.operations import GemmaRMSNorm, geglu, rms_quotient
from paddle_vl.nn.placement import Placement
from paddle_vl.nn.transfer import host_table

# Keys and values `[B, S, K, H]`; keys are normalized and rotated.
KeyValue = tuple[Tensor, Tensor]
# What a call reads before its own keys: keys and values, or a cache, which also gets its own.
Past = KeyValue | tuple[KeyValueCache]
# Rotary base of a layer, and the number that divides its positions.
Rope = tuple[float, float]


def block_mask(pad_masks_BL: Tensor, att_masks_BL: Tensor) -> Tensor:
    """Which tokens each token sees: `[B, L, L]` bool, see `BlockMask`."""
    return BlockMask(pad_masks_BL, att_masks_BL).visible_BLS


def suffix_mask(prefix_pad_BL: Tensor, pad_masks_BC: Tensor, att_masks_BC: Tensor) -> Tensor:
    """`[B, C, L + C]` bool: a suffix sees all real tokens of the prefix, and itself by blocks."""
    cross = paddle.logical_and(prefix_pad_BL.unsqueeze(1), pad_masks_BC.unsqueeze(2))
    return paddle.concat([cross, block_mask(pad_masks_BC, att_masks_BC)], axis=2)


def prefix_positions(pad_masks_BL: Tensor) -> Tensor:
    """int64 `[B, L]`: real tokens count from 0; padding repeats the previous position, or -1."""
    return paddle.cumsum(pad_masks_BL.astype("int64"), axis=1) - 1


def suffix_positions(prefix_pad_BL: Tensor, num_tokens: int) -> Tensor:
    """int64 `[B, C]`: counts from the number of real tokens in the prefix."""
    first_B1 = prefix_pad_BL.astype("int64").sum(axis=1, keepdim=True)
    return first_B1 + paddle.arange(num_tokens, dtype="int64")


class SharedConditions:
    """The n distinct conditions of norms, and the one of each token row, int64.

    Not a tuple, which Paddle's recompute searches for tensors.
    """

    def __init__(self, values_nE: Tensor, index_T: Tensor):
        self.values_nE, self.index_T = values_nE, index_T

    def of_rows(self, x_nD: Tensor) -> Tensor:
        """A value of each condition to `[T, D]`."""
        return paddle.index_select(x_nD, self.index_T)


class AdaptiveRMSNorm(nn.Layer):
    """`x / sqrt(mean(x^2) + epsilon) * (1 + scale) + shift`, and a gate for the sublayer's output.

    Scale, shift and gate are the thirds, in this order, of a linear of the condition; there is no
    other weight. Computes in float32.

    Source: GemmaRMSNorm of openpi with `cond_dim` (adaRMS).
    """

    def __init__(self, size: int, cond_size: int, epsilon: float):
        super().__init__()
        self.epsilon = epsilon
        self.dense = Linear(cond_size, 3 * size, True)

    def forward(self, x_TD: Tensor, condition: Tensor | SharedConditions) -> tuple[Tensor, Tensor]:
        """Normalized rows and gates, both `[T, D]` in the dtype of the rows."""
        is_shared = isinstance(condition, SharedConditions)
        terms = self.dense(condition.values_nE if is_shared else condition)
        scale, shift, gate = paddle.chunk(terms, 3, axis=-1)
        scale, shift = 1.0 + scale.astype("float32"), shift.astype("float32")
        gate = gate.astype(x_TD.dtype)
        if is_shared:
            scale, shift, gate = (condition.of_rows(term) for term in (scale, shift, gate))
        y = rms_quotient(x_TD, self.epsilon) * scale + shift
        return y.astype(x_TD.dtype), gate


@host_table
def _rotary_powers(head_dim: int, base: float, factor: float) -> np.ndarray:
    slots = np.arange(head_dim // 2, dtype="float32")
    return np.float32(base) ** (np.float32(2.0 / head_dim) * slots) * np.float32(factor)


def rotary_tables(
    position_ids_BL: Tensor, head_dim: int, base: float, factor: float = 1.0
) -> RotaryTables:
    """Tables `[B, L, H]` of int64 positions: `angle_j = position / factor / base^(2j / H)`.

    The expert's `rope_theta` is ignored. Source: `apply_rope` of OpenTau's pi07 engine.
    """
    # Division by float32 powers, as in OpenTau: a product with inverses rounds differently.
    powers_F = _rotary_powers(head_dim, base, factor)
    return RotaryTables.of_angles(position_ids_BL.astype("float32").unsqueeze(-1) / powers_F)


class StreamView:
    """Positions and mask of a stream's tokens, the same for all layers.

    Not a tuple, which Paddle's recompute searches for tensors.

    Args:
        shape: B and L.
        rotary: tables of the rotary embedding by base and factor.
        mask: over keys of the cache or prefix, then the stream's own keys.
        scale: factor of the scores; the backbone's for both streams.
        implementation: `eager` or `sdpa` attention.

    Attributes:
        num_rows: B * L.
        output: view of the rows that are read after the last layer; None if all are.
        sliding: view of the layers with a window; None if all layers have this one.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        rotary: dict[Rope, RotaryTables],
        mask: AttentionMask,
        scale: float,
        implementation: str,
    ):
        self.shape, self.rotary, self.mask = shape, rotary, mask
        self.scale, self.implementation = scale, implementation
        self.num_rows = shape[0] * shape[1]
        self.output: StreamView | None = None
        self.sliding: StreamView | None = None
        self._rows = slice(None)

    def with_mask(self, mask: AttentionMask, num_tokens: int | None = None) -> "StreamView":
        """The view of the same tokens, or of some of them, with another mask."""
        shape = (self.shape[0], num_tokens or self.shape[1])
        return StreamView(shape, self.rotary, mask, self.scale, self.implementation)

    def output_only(self, rows: slice) -> None:
        """Set `output` to some rows of each sample."""
        self.output = self.with_mask(self.mask.of_queries(rows), rows.stop - rows.start)
        self.output._rows = rows
        if self.sliding is not None:
            self.sliding.output_only(rows)

    def own_rows(self, x_BLC: Tensor) -> Tensor:
        """The view's rows among all rows of each sample."""
        return x_BLC if self._rows == slice(None) else x_BLC[:, self._rows]

    def attend(
        self, q_BLNH: Tensor, k_BLKH: Tensor, v_BLKH: Tensor, past: Past | None
    ) -> tuple[Tensor, Any]:
        """Attention output `[B, L, N, H]` of the view's rows; all keys and values, `past` first."""
        new: KeyValue = k_BLKH, v_BLKH
        if past is None:
            key, value = new
        elif len(past) == 2:
            key, value = (paddle.concat(each, axis=1) for each in zip(past, new, strict=True))
        elif self.shape[1] > 1:
            buffers, length = past[0].append(*new), past[0].length
            key, value = (x_BKCH[:, :, :length].transpose([0, 2, 1, 3]) for x_BKCH in buffers)
        else:
            # The cache's attention scales by H^-0.5.
            factor = self.scale * q_BLNH.shape[-1] ** 0.5
            q_BLNH = q_BLNH if factor == 1.0 else q_BLNH * factor
            return past[0].attend(q_BLNH, *new, self._cached_keys), past
        q_BLNH = self.own_rows(q_BLNH)
        out_BLNH = masked_attention(q_BLNH, key, value, self.mask, self.scale, self.implementation)
        return out_BLNH, (key, value)

    @cached_property
    def _cached_keys(self) -> CachedKeys:
        """The mask of a single query."""
        bias_BS = self.mask.bias_B1LS[:, 0, 0]
        return CachedKeys(bias_BS.shape[1], bias_BS)


class SuffixView:
    """How a suffix reads the prefix. Not a tuple, which Paddle's recompute searches for tensors.

    Args:
        num_keys: number of leading prefix keys that it sees; None for all.
        insulated: stop gradients from it into the prefix (`knowledge_insulation`).
    """

    def __init__(self, own: StreamView, num_keys: int | None, insulated: bool):
        self.own, self.num_keys, self.insulated = own, num_keys, insulated

    def read(self, prefix: KeyValue) -> KeyValue:
        """The keys and values that the suffix sees."""
        key, value = prefix
        if self.num_keys is not None and key.shape[1] != self.num_keys:
            key, value = key[:, : self.num_keys], value[:, : self.num_keys]
        return (key.detach(), value.detach()) if self.insulated else (key, value)


class BackboneLayer(nn.Layer):
    """`x + norm(attention(norm(x)))`, then `x + norm(mlp(norm(x)))`.

    Args:
        is_sliding: the layer has the window of a view that has one.
        serves_tokens_alone: True for the last layer of a model with an expert. Its attention output
            reaches the token loss only, but its keys and values also the action loss. Queries may
            then get no gradient when keys and values do, so they are not fused with these; and all
            behind keys and values runs for the rows that the token loss reads.
    """

    def __init__(
        self,
        config: Gemma3TextConfig,
        rope: Rope,
        is_sliding: bool,
        dropout: float,
        placement: Placement,
        serves_tokens_alone: bool = False,
    ):
        super().__init__()
        self.rope, self.is_sliding = rope, is_sliding
        self.serves_tokens_alone = serves_tokens_alone
        width, head_dim, epsilon = config.hidden_size, config.head_dim, config.rms_norm_eps
        self.input_layernorm = placement.layers.row_wise(GemmaRMSNorm(width, epsilon))
        self.self_attn = Attention(config, width, placement, is_fused=not serves_tokens_alone)
        self.self_attn.q_norm = placement.layers.head_wise(GemmaRMSNorm(head_dim, epsilon))
        self.self_attn.k_norm = placement.layers.head_wise(GemmaRMSNorm(head_dim, epsilon))
        self.post_attention_layernorm = placement.layers.row_wise(GemmaRMSNorm(width, epsilon))
        self.pre_feedforward_layernorm = placement.layers.row_wise(GemmaRMSNorm(width, epsilon))
        self.mlp = GemmaMLP(width, config.intermediate_size, placement)
        self.post_feedforward_layernorm = placement.layers.row_wise(GemmaRMSNorm(width, epsilon))
        self.dropout = placement.layers.row_dropout(dropout)

    def forward(
        self, x_TD: Tensor, view: StreamView, past: Past | None = None
    ) -> tuple[Tensor, Past]:
        """The rows `[T, D]`, in the last layer those of `view.output`; and the keys and values of
        `past` followed by this call's."""
        view = (view.sliding or view) if self.is_sliding else view
        output = (view.output or view) if self.serves_tokens_alone else view
        attended_TD, *key_value = self.self_attn(
            self.input_layernorm(x_TD), view, self.rope, output, *(past or ())
        )
        if output is not view:
            x_TD = output.own_rows(x_TD.reshape([*view.shape, -1])).flatten(0, 1)
        x_TD = x_TD + self.post_attention_layernorm(self.dropout(attended_TD))
        mlp_TD = self.mlp(self.pre_feedforward_layernorm(x_TD))
        return x_TD + self.post_feedforward_layernorm(self.dropout(mlp_TD)), tuple(key_value)


class ExpertLayer(nn.Layer):
    """`x + gate * attention(norm(x))`, then `x + gate * mlp(norm(x))`; norms return the gates."""

    def __init__(
        self,
        config: GemmaExpertConfig,
        rope: Rope,
        dropout: float,
        placement: Placement,
    ):
        super().__init__()
        self.rope = rope
        width, cond, epsilon = config.hidden_size, config.adarms_cond_dim, config.rms_norm_eps
        self.input_layernorm = placement.layers.row_wise(AdaptiveRMSNorm(width, cond, epsilon))
        self.self_attn = Attention(config, width, placement)
        self.post_attention_layernorm = placement.layers.row_wise(
            AdaptiveRMSNorm(width, cond, epsilon)
        )
        self.mlp = GemmaMLP(width, config.intermediate_size, placement)
        self.dropout = placement.layers.row_dropout(dropout)

    def forward(
        self, x_TD: Tensor, cond_TE: Tensor | SharedConditions, view: StreamView, prefix: KeyValue
    ) -> Tensor:
        """Rows `[T, D]`, which see the prefix's keys and values and each other."""
        rows_TD, gate_TD = self.input_layernorm(x_TD, cond_TE)
        attended_TD, *_ = self.self_attn(rows_TD, view, self.rope, view, *prefix)
        x_TD = x_TD + self.dropout(attended_TD) * gate_TD
        rows_TD, gate_TD = self.post_attention_layernorm(x_TD, cond_TE)
        return x_TD + self.dropout(self.mlp(rows_TD)) * gate_TD


class Attention(nn.Layer):
    """Grouped-query attention; `q_norm` and `k_norm`, if set, are applied before the rotation."""

    def __init__(
        self,
        config: Gemma3TextConfig | GemmaExpertConfig,
        width: int,
        placement: Placement,
        is_fused: bool = True,
    ):
        super().__init__()
        self.placement, self.head_dim = placement, config.head_dim
        heads, key_heads = config.num_attention_heads, config.num_key_value_heads
        query_width, key_width = heads * config.head_dim, key_heads * config.head_dim
        columns = [
            Columns("q_proj", query_width, heads),
            Columns("k_proj", key_width, key_heads),
            Columns("v_proj", key_width, key_heads),
        ]
        make = placement.layers.projections if is_fused else placement.layers.separate_projections
        self.qkv_proj = make(width, columns)
        self.o_proj = placement.layers.row_linear(query_width, width)
        self.q_norm: GemmaRMSNorm | None = None
        self.k_norm: GemmaRMSNorm | None = None

    def forward(
        self,
        x_TD: Tensor,
        view: StreamView,
        rope: Rope,
        output: StreamView,
        *past: Any,
    ) -> tuple[Any, ...]:
        """Rows of the view `output`, and keys and values or their cache; see `Past`."""
        rows_TC = self.qkv_proj(x_TD, view.num_rows)
        q_BLNH = self._of_heads(rows_TC[0], view)
        k_BLKH = self._of_heads(rows_TC[1], view)
        v_BLKH = self._of_heads(rows_TC[2], view)
        if self.q_norm is not None and self.k_norm is not None:
            q_BLNH, k_BLKH = self.q_norm(q_BLNH), self.k_norm(k_BLKH)
        q_BLNH, k_BLKH = apply_rotary(q_BLNH, k_BLKH, view.rotary[rope])
        out_BLNH, key_value = output.attend(q_BLNH, k_BLKH, v_BLKH, past or None)
        out_TD = out_BLNH.reshape([-1, rows_TC[0].shape[-1]])
        return self.o_proj(self.placement.ops.pad_rows(out_TD)), *key_value

    def _of_heads(self, rows_TC: Tensor, view: StreamView) -> Tensor:
        num_heads = rows_TC.shape[-1] // self.head_dim
        return rows_TC.reshape([*view.shape, num_heads, self.head_dim])


class GemmaMLP(nn.Layer):
    """`down(gelu(gate(x)) * up(x))` with the tanh form of GELU."""

    def __init__(self, width: int, inner: int, placement: Placement):
        super().__init__()
        columns = [Columns("gate_proj", inner), Columns("up_proj", inner)]
        self.gate_up_proj = placement.layers.projections(width, columns, splits=False)
        self.down_proj = placement.layers.row_linear(inner, width)

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.down_proj(geglu(*self.gate_up_proj(x_TD)))


class InterleavedDecoderLayer(nn.Layer):
    """One layer of each stream; the unit of recomputation and parameter sharding."""

    def __init__(self, config: Gemma3WithExpertConfig, number: int, placement: Placement):
        super().__init__()
        text = config.gemma3_config.text_config
        rope, dropout = config.rope(number), config.dropout
        has_expert = not config.disable_action_expert
        is_last = number == text.num_hidden_layers - 1
        self.backbone_layer = BackboneLayer(
            text,
            rope,
            text.is_sliding(number),
            dropout,
            placement,
            serves_tokens_alone=has_expert and is_last,
        )
        self.expert_layer: Any = (
            ExpertLayer(config.gemma_expert_config, rope, dropout, placement)
            if has_expert
            else None
        )

    def forward(
        self,
        prefix_TD: Tensor | None,
        suffix_TE: Tensor | None = None,
        cond_TE: Tensor | SharedConditions | None = None,
        prefix_view: Any = None,
        suffix_view: Any = None,
        past: Any = None,
        keep: bool = False,
    ) -> tuple[Tensor, ...]:
        """The given streams, in order; then keys and values of the prefix with `keep`. A suffix
        alone needs those of its prefix as `past`."""
        rows: list[Tensor] = []
        if prefix_TD is not None:
            out_TD, past = self.backbone_layer(prefix_TD, prefix_view, past)
            rows.append(out_TD)
        if suffix_TE is not None:
            seen = suffix_view.read(past)
            rows.append(self.expert_layer(suffix_TE, cond_TE, suffix_view.own, seen))
        return (*rows, *past) if keep else tuple(rows)


class DecoderOutput(NamedTuple):
    """Both streams after the final norms; None for a stream that was not given.

    Attributes:
        prefix: `[B, L, D]`, or the rows that its view's `output` names.
        suffix: `[B, C, E]`.
        cache: keys and values of the prefix by layer, if they were to be kept.
    """

    prefix: Any
    suffix: Any
    cache: Any


class Streams(NamedTuple):
    """This rank's token rows of both streams, `[T, D]` and `[T', E]`, None for one that is not
    given; and the condition of the suffix's norms, `[T', E]` or shared ones of all T' rows."""

    prefix: Tensor | None
    suffix: Tensor | None
    cond: Tensor | SharedConditions | None


class InterleavedDecoder(nn.Layer):
    """The layers, and the final norm of each stream.

    A pipeline stage has placeholders for the layers of other stages; only the last stage has the
    norms. `attention_implementation` starts as configured and is read at every call.
    """

    norm: Any
    expert_norm: Any

    def __init__(self, config: Gemma3WithExpertConfig, placement: Placement):
        super().__init__()
        self.config, self.placement = config, placement
        implementation = config.attention_implementation
        self.attention_implementation: str = implementation
        text, expert = config.gemma3_config.text_config, config.gemma_expert_config
        self.layers = nn.LayerList(
            [
                InterleavedDecoderLayer(config, i, placement)
                if placement.stage_layers.has_layer(i)
                else nn.Identity()
                for i in range(text.num_hidden_layers)
            ]
        )
        self.norm, self.expert_norm = None, None
        if not placement.stage_layers.head:
            return
        self.norm = placement.layers.row_wise(GemmaRMSNorm(text.hidden_size, text.rms_norm_eps))
        if not config.disable_action_expert:
            sizes = (expert.hidden_size, expert.adarms_cond_dim, expert.rms_norm_eps)
            self.expert_norm = placement.layers.row_wise(AdaptiveRMSNorm(*sizes))

    def view(
        self,
        position_ids_BL: Tensor,
        mask: AttentionMask | Tensor,
        key_positions_BS: Tensor | None = None,
    ) -> StreamView:
        """Positions and mask of a stream, shared by all layers.

        Args:
            position_ids_BL: int64.
            mask: over cached keys and then the stream's own; or `[B, L, S]` bool, True if seen.
            key_positions_BS: int64 positions of all keys, of a prefix behind cached keys.
        """
        text, window = self.config.gemma3_config.text_config, self.config.sliding_window
        rotary = {
            rope: rotary_tables(position_ids_BL, text.head_dim, *rope)
            for rope in {self.config.rope(i) for i in range(text.num_hidden_layers)}
        }
        view = StreamView(
            tuple(position_ids_BL.shape),
            rotary,
            mask if isinstance(mask, AttentionMask) else AttentionMask(mask),
            text.query_pre_attn_scalar**-0.5,
            self.attention_implementation,
        )
        if window is not None:
            keys_BS = position_ids_BL if key_positions_BS is None else key_positions_BS
            view.sliding = view.with_mask(view.mask.within(window, position_ids_BL, keys_BS))
        return view

    def forward(
        self,
        prefix_BLD: Tensor | None,
        suffix_BCE: Tensor | None = None,
        cond_BCE: Tensor | SharedConditions | None = None,
        prefix_view: StreamView | None = None,
        suffix_view: SuffixView | None = None,
        cache: Sequence[Past] | None = None,
        keep: bool = False,
    ) -> DecoderOutput:
        """Run the given streams through all layers.

        Args:
            cond_BCE: condition of the suffix's norms, `[1, C, E]` if all samples share it; or
                shared ones of all B * C rows.
            cache: keys and values by layer, from an earlier call with `keep`; or caches of them.
            keep: return all keys and values, the cached ones first.
        """
        if suffix_BCE is not None and self.config.disable_action_expert:
            raise ValueError(
                "a suffix was given but disable_action_expert leaves no expert to run it"
            )
        streams, every_layer = self.enter(prefix_BLD, suffix_BCE, cond_BCE), range(len(self.layers))
        streams, kept = self.run_layers(every_layer, streams, prefix_view, suffix_view, cache, keep)
        return self.leave(streams, prefix_view, suffix_view)._replace(cache=kept)

    def enter(
        self,
        prefix_BLD: Tensor | None,
        suffix_BCE: Tensor | None = None,
        cond_BCE: Tensor | SharedConditions | None = None,
    ) -> Streams:
        """This rank's token rows, the layers' input."""
        prefix_TD = None if prefix_BLD is None else self._enter(prefix_BLD)
        if suffix_BCE is None or cond_BCE is None:
            return Streams(prefix_TD, None, None)
        if isinstance(cond_BCE, SharedConditions):
            if self.placement.ops.row_part.size == 1:
                return Streams(prefix_TD, self._enter(suffix_BCE), cond_BCE)
            cond_BCE = cond_BCE.of_rows(cond_BCE.values_nE)
        elif cond_BCE.shape[0] != suffix_BCE.shape[0]:
            cond_BCE = cond_BCE.expand([*suffix_BCE.shape[:2], -1])
        return Streams(prefix_TD, self._enter(suffix_BCE), self._enter(cond_BCE))

    def run_layers(
        self,
        layers: range,
        streams: Streams,
        prefix_view: StreamView | None = None,
        suffix_view: SuffixView | None = None,
        cache: Sequence[Past] | None = None,
        keep: bool = False,
    ) -> tuple[Streams, list[KeyValue] | None]:
        """Run some layers in order; also returns their keys and values with `keep`."""
        kept: list[KeyValue] = []
        for i in layers:
            past = None if cache is None else cache[i]
            rows = list(self.layers[i](*streams, prefix_view, suffix_view, past, keep))
            if streams.prefix is not None:
                streams = streams._replace(prefix=rows.pop(0))
            if streams.suffix is not None:
                streams = streams._replace(suffix=rows.pop(0))
            if keep:
                kept.append((rows[0], rows[1]))
        return streams, kept if keep else None

    def leave(self, streams: Streams, prefix_view: Any, suffix_view: Any) -> DecoderOutput:
        """All token rows after the final norms."""
        prefix_TD, suffix_TE, cond_TE = streams
        prefix_BLD = suffix_BCE = None
        if prefix_TD is not None:
            prefix_BLD = self._leave(self.norm(prefix_TD), prefix_view.output or prefix_view)
        if suffix_TE is not None:
            suffix_BCE = self._leave(self.expert_norm(suffix_TE, cond_TE)[0], suffix_view.own)
        return DecoderOutput(prefix_BLD, suffix_BCE, None)

    def _enter(self, x_BLD: Tensor) -> Tensor:
        x_TD = x_BLD.reshape([-1, x_BLD.shape[-1]])
        return self.placement.ops.enter_rows(self.placement.ops.pad_rows(x_TD))

    def _leave(self, x_TD: Tensor, view: StreamView) -> Tensor:
        x_TD = self.placement.ops.leave_rows(x_TD, view.num_rows)
        return x_TD.reshape([*view.shape, x_TD.shape[-1]])
