"""The two halves of a decoder layer: Gemma 3 for the prefix, an adaptive Gemma for the actions.

Shapes: B batch, L tokens of the stream, T = B * L token rows, batch-major (under sequence
parallelism this rank's shard of them); S keys; D width of the stream, E width of the condition, F
inner width of the MLP; N query heads, K key/value heads, H head width.

Source: Gemma3DecoderLayer of HF transformers; the adaptive expert is openpi's; both as in OpenTau's
InterleavedDecoderLayer.
"""

from collections.abc import Sequence

import paddle
import paddle.nn.functional as F
from paddle import Tensor, nn

from paddle_vl.families.pi07.engine_config import Gemma3TextConfig, GemmaExpertConfig
from paddle_vl.families.pi07.layers import AdaptiveRMSNorm, GemmaRMSNorm, SharedConditions
from paddle_vl.nn.attention import RotaryTables, apply_rotary, masked_attention
from paddle_vl.nn.attention_masks import AttentionMask
from paddle_vl.nn.linear import Columns
from paddle_vl.nn.operations import geglu
from paddle_vl.nn.placement import Placement

# Keys and values `[B, S, K, H]`; keys are normalized and rotated.
KeyValue = tuple[Tensor, Tensor]


class KeyValueBuffers:
    """Keys and values of fixed capacity, for programs; new ones are written in place.

    Args:
        key_BSKH, value_BSKH: the buffers.
        place_1: int64, where the first new token is written.
    """

    def __init__(self, key_BSKH: Tensor, value_BSKH: Tensor, place_1: Tensor):
        self.key_BSKH, self.value_BSKH, self.place_1 = key_BSKH, value_BSKH, place_1

    def written(self, key_BnKH: Tensor, value_BnKH: Tensor) -> KeyValue:
        """Both buffers in full, the new ones in place."""
        begin, end = self.place_1, self.place_1 + key_BnKH.shape[1]
        self.key_BSKH[:, begin:end] = key_BnKH
        self.value_BSKH[:, begin:end] = value_BnKH
        return self.key_BSKH, self.value_BSKH


def appended(past: KeyValue | KeyValueBuffers, key_BnKH: Tensor, value_BnKH: Tensor) -> KeyValue:
    """Earlier keys and values followed by new ones."""
    if isinstance(past, KeyValueBuffers):
        return past.written(key_BnKH, value_BnKH)
    keys = paddle.concat([past[0], key_BnKH], axis=1)
    return keys, paddle.concat([past[1], value_BnKH], axis=1)


class StreamView:
    """Positions and mask of a stream's tokens, the same for all layers.

    Not a tuple, which Paddle's recompute searches for tensors.

    Args:
        shape: B and L; in a program B may be -1.
        rotary: tables of the rotary embedding by base.
        mask: over keys of the cache or prefix, then the stream's own keys.
        scale: factor of the scores; the backbone's for both streams.
        implementation: `eager` or `sdpa` attention.
        num_rows: B * L, if the shape does not give it.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        rotary: dict[float, RotaryTables],
        mask: AttentionMask,
        scale: float,
        implementation: str,
        num_rows: int | None = None,
    ):
        self.shape, self.rotary, self.mask = shape, rotary, mask
        self.scale, self.implementation = scale, implementation
        self.num_rows = shape[0] * shape[1] if num_rows is None else num_rows
        self._output: StreamView | None = None
        self._rows = slice(None)

    @property
    def output(self) -> "StreamView":
        """The view of the rows that are read after the last layer; the view itself if all are."""
        return self._output or self

    def read_only(self, rows: slice, mask: AttentionMask) -> None:
        """Name the rows of each sample that are read after the last layer.

        Args:
            mask: that of these rows.
        """
        shape = (self.shape[0], rows.stop - rows.start)
        self._output = StreamView(shape, self.rotary, mask, self.scale, self.implementation)
        self._output._rows = rows

    def rows_of(self, x_BLC: Tensor) -> Tensor:
        """The view's rows among all rows of each sample."""
        return x_BLC if self._rows == slice(None) else x_BLC[:, self._rows]

    def prepare(self, num_heads: Sequence[int]) -> None:
        """Make what all layers share now, outside of a loop of a program that reads it."""
        for tables in self.rotary.values():
            tables.prepare(num_heads)

    def attend(self, q_BLNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor) -> Tensor:
        """Attention output `[B, L, N, H]`."""
        return masked_attention(q_BLNH, k_BSKH, v_BSKH, self.mask, self.scale, self.implementation)


class PrefixKeys:
    """Keys and values of a prefix, laid out for suffixes that read them again and again.

    For programs, which do that once, outside of their loop over the Euler steps. Each query of a
    suffix must see a key.

    Args:
        prefix: keys and values `[B, L, K, H]`.
        bias: see `group_bias`.
        scale: factor of the scores.
    """

    def __init__(self, prefix: KeyValue, bias_BKRS: Tensor, scale: float):
        key_BLKH, value_BLKH = prefix
        self.key_BKHL = key_BLKH.transpose([0, 2, 3, 1])
        self.value_BKLH = value_BLKH.transpose([0, 2, 1, 3])
        self.bias_BKRS, self.scale = bias_BKRS, scale

    def attend(self, q_BCNH: Tensor, k_BCKH: Tensor, v_BCKH: Tensor) -> Tensor:
        """Attention output `[B, C, N, H]` of a suffix over the prefix and itself."""
        steps, heads, width = q_BCNH.shape[1:]
        key_heads = k_BCKH.shape[2]
        # The G query heads of a key head become R = G * C rows of one product.
        q_BNCH = (q_BCNH * self.scale).transpose([0, 2, 1, 3])
        q_BKRH = q_BNCH.reshape([-1, key_heads, heads // key_heads * steps, width])
        k_BKHC, v_BKCH = k_BCKH.transpose([0, 2, 3, 1]), v_BCKH.transpose([0, 2, 1, 3])
        scores_BKRS = paddle.concat(
            [paddle.matmul(q_BKRH, self.key_BKHL), paddle.matmul(q_BKRH, k_BKHC)], axis=-1
        )
        weights_BKRS = F.softmax(scores_BKRS.astype("float32") + self.bias_BKRS)
        weights_BKRS = weights_BKRS.astype(v_BKCH.dtype)
        out_BKRH = paddle.matmul(weights_BKRS[..., :-steps], self.value_BKLH)
        out_BKRH = out_BKRH + paddle.matmul(weights_BKRS[..., -steps:], v_BKCH)
        return out_BKRH.reshape([-1, heads, steps, width]).transpose([0, 2, 1, 3])


class BackboneLayer(nn.Layer):
    """`x + norm(attention(norm(x)))`, then `x + norm(mlp(norm(x)))`.

    Args:
        rope_base: base of this layer's rotary angles.
        serves_tokens_alone: True for the last layer of a model with an expert. Its attention output
            reaches the token loss only, but its keys and values also the action loss. Queries may
            then get no gradient when keys and values do, so they are not fused with these; and all
            behind keys and values runs for the rows that the token loss reads.
    """

    def __init__(
        self,
        config: Gemma3TextConfig,
        rope_base: float,
        dropout: float,
        placement: Placement,
        serves_tokens_alone: bool = False,
    ):
        super().__init__()
        self.rope_base, self.serves_tokens_alone = rope_base, serves_tokens_alone
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
        self, x_TD: Tensor, view: StreamView, past: KeyValue | None = None
    ) -> tuple[Tensor, KeyValue]:
        """The rows `[T, D]`, in the last layer those of `view.output`; and the keys and values of
        `past` followed by this call's."""
        output = view.output if self.serves_tokens_alone else view
        attended_TD, key_value = self.self_attn(
            self.input_layernorm(x_TD), view, self.rope_base, past, output
        )
        if output is not view:
            x_TD = output.rows_of(x_TD.reshape([*view.shape, -1])).flatten(0, 1)
        x_TD = x_TD + self.post_attention_layernorm(self.dropout(attended_TD))
        mlp_TD = self.mlp(self.pre_feedforward_layernorm(x_TD))
        return x_TD + self.post_feedforward_layernorm(self.dropout(mlp_TD)), key_value


class ExpertLayer(nn.Layer):
    """`x + gate * attention(norm(x))`, then `x + gate * mlp(norm(x))`; norms return the gates."""

    def __init__(
        self,
        config: GemmaExpertConfig,
        rope_base: float,
        dropout: float,
        placement: Placement,
    ):
        super().__init__()
        self.rope_base = rope_base
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
        """Rows `[T, D]`, which see the prefix and each other.

        Args:
            cond_TE: condition of the norms, see `AdaptiveRMSNorm`.
            prefix: the keys and values that the suffix sees.
        """
        rows_TD, gate_TD = self.input_layernorm(x_TD, cond_TE)
        attended_TD, _ = self.self_attn(rows_TD, view, self.rope_base, prefix)
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
        """
        Args:
            is_fused: queries, keys and values come from one weight.
        """
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
        rope_base: float,
        past: KeyValue | None,
        output: StreamView | None = None,
    ) -> tuple[Tensor, KeyValue]:
        """Rows of the output, and keys and values.

        Args:
            output: the view of the rows whose output is needed; None for all.
        """
        output = output or view
        rows_TC = self.qkv_proj(x_TD, view.num_rows)
        q_BLNH = self._of_heads(rows_TC[0], view)
        k_BSKH = self._of_heads(rows_TC[1], view)
        v_BSKH = self._of_heads(rows_TC[2], view)
        if self.q_norm is not None and self.k_norm is not None:
            q_BLNH, k_BSKH = self.q_norm(q_BLNH), self.k_norm(k_BSKH)
        q_BLNH, k_BSKH = apply_rotary(q_BLNH, k_BSKH, view.rotary[rope_base])
        if isinstance(past, PrefixKeys):
            out_BLNH = past.attend(q_BLNH, k_BSKH, v_BSKH)
        else:
            if past is not None:
                k_BSKH, v_BSKH = appended(past, k_BSKH, v_BSKH)
            out_BLNH = output.attend(output.rows_of(q_BLNH), k_BSKH, v_BSKH)
        out_TD = out_BLNH.reshape([-1, rows_TC[0].shape[-1]])
        return self.o_proj(self.placement.ops.pad_rows(out_TD)), (k_BSKH, v_BSKH)

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
