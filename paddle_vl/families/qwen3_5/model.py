"""Qwen3.5: the shared vision-language model with a decoder of gated DeltaNet layers and, mostly
every fourth, gated attention.

Shapes: B batch, L padded length, T = B * L token rows, batch-major (this rank's shard under
sequence parallelism); D width. Attention: N query heads, K key heads, H head width, R rotated
channels. DeltaNet: K key heads, N value heads, C key width, V value width, E channels of the
convolution, J its taps.

Source: Qwen3_5TextModel, Qwen3_5GatedDeltaNet and Qwen3_5MoeSparseMoeBlock of HF transformers,
modeling_qwen3_5.py and modeling_qwen3_5_moe.py.
"""

from typing import Any

import paddle
import paddle.nn.functional as F
from paddle import Tensor, nn
from paddle.nn.initializer import Constant, Initializer, Normal

from paddle_vl.families.qwen3_5 import checkpoint_map
from paddle_vl.families.qwen3_5.config import (
    Qwen3_5Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
)
from paddle_vl.families.vlm.modeling.layers import (
    SwiGLUMLP,
    VLDecoderLayer,
    VLLanguageModel,
    VLSelfAttention,
)
from paddle_vl.families.vlm.modeling.model import VLForConditionalGeneration
from paddle_vl.families.vlm.modeling.moe import SparseMoE
from paddle_vl.nn.attention import (
    CachedKeys,
    PackedSamples,
    RotaryTables,
)
from paddle_vl.nn.delta_rule import causal_conv_silu, gated_delta_rule, gated_rms_norm
from paddle_vl.nn.experts import RoutedRows
from paddle_vl.nn.key_value_cache import KeyValueCache, RowPool
from paddle_vl.nn.linear import Columns, Linear, precise_dtype, split_columns
from paddle_vl.nn.operations import GemmaRMSNorm
from paddle_vl.nn.placement import Placement


class DeltaCache:
    """What a DeltaNet layer keeps during generation, whatever the number of tokens.

    Attributes:
        inputs_BJE: `[B, J - 1, E]` the last inputs of the convolution.
        state_BNCV: float32 state of the delta rule.
        length: number of tokens so far.
    """

    def __init__(self):
        self.inputs_BJE: Tensor | None = None
        self.state_BNCV: Tensor | None = None
        self.length = 0

    def mask(self, num_new: int, key_bias_BS: Tensor | None) -> CachedKeys:
        """As `KeyValueCache.mask`: the first layer's cache makes it for all layers."""
        return CachedKeys(self.length + num_new, key_bias_BS)


class DeltaPool(RowPool):
    """`DeltaCache` of many rows: what the rows that run have is taken when the layer asks for it,
    and put back when it sets it."""

    def __init__(self, num_rows: int):
        self._num_rows, self.length = num_rows, 0
        self._memories: dict[str, Tensor] = {}

    @property
    def inputs_BJE(self) -> Tensor | None:
        return self._taken("inputs")

    @inputs_BJE.setter
    def inputs_BJE(self, new: Tensor) -> None:
        self._put("inputs", new)

    @property
    def state_BNCV(self) -> Tensor | None:
        return self._taken("state")

    @state_BNCV.setter
    def state_BNCV(self, new: Tensor) -> None:
        self._put("state", new)

    def _taken(self, name: str) -> Tensor | None:
        if self.paged.begins:
            return None
        return paddle.index_select(self._memories[name], self.paged.rows)

    def _put(self, name: str, new: Tensor) -> None:
        if name not in self._memories:
            self._memories[name] = paddle.zeros([self._num_rows, *new.shape[1:]], new.dtype)
        paddle.scatter_(self._memories[name], self.paged.rows, new)


class GatedDeltaNet(nn.Layer):
    """A convolution, the gated delta rule, and a gated norm, between linears; see
    `paddle_vl.nn.delta_rule`.

    Tensor parallelism divides key heads, each with its value heads.
    """

    def __init__(self, config: Qwen3_5TextConfig, placement: Placement):
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
        self.norm = placement.layers.head_wise(GatedRMSNorm(self.value_dim, config.rms_norm_eps))
        self.out_proj = placement.layers.row_linear(value_width, width, std)

    def forward(
        self,
        x_TD: Tensor,
        tables: RotaryTables,
        key_bias: Any = None,
        cache: DeltaCache | None = None,
        packed: PackedSamples | None = None,
    ) -> Tensor:
        length = tables.cos_TH.shape[1]
        rows_T = self.in_proj(x_TD)
        u_BLE, z_BLF, b_BLN, a_BLN = (x.reshape([-1, length, x.shape[-1]]) for x in rows_T)
        if (real_BL1 := real_tokens(key_bias, length)) is not None:
            # As if the rows of padding were zero before the linears: the state stays zero.
            real_BL1 = real_BL1.astype(u_BLE.dtype)
            u_BLE, b_BLN, a_BLN = u_BLE * real_BL1, b_BLN * real_BL1, a_BLN * real_BL1
        y_BLE = self.conv1d(u_BLE, cache, packed)
        heads = a_BLN.shape[-1]
        value_width = heads * self.value_dim
        key_width = (y_BLE.shape[-1] - value_width) // 2
        q_BLKC, k_BLKC, v_BLNV = (
            x.reshape([*x.shape[:2], -1, width])
            for x, width in zip(
                split_columns(y_BLE, [key_width, key_width, value_width]),
                (self.key_dim, self.key_dim, self.value_dim),
                strict=True,
            )
        )
        out_BLNV = self.core(
            q_BLKC, k_BLKC, v_BLNV, self.decay(a_BLN), F.sigmoid(b_BLN), cache, packed
        )
        gate = z_BLF.reshape([-1, self.value_dim])
        normed = self.norm(out_BLNV.reshape([-1, self.value_dim]), gate)
        return self.out_proj(normed.reshape([-1, value_width]))


def real_tokens(key_bias: Any, length: int) -> Tensor | None:
    """`[B, L, 1]` bool, True at the last tokens that are not padding; None if nothing is hidden.

    Args:
        key_bias: `[B, S]` as attention gets it, or what caches share.
    """
    bias_BS = key_bias.key_bias_BS if isinstance(key_bias, CachedKeys) else key_bias
    if bias_BS is None:
        return None
    return (bias_BS[:, -length:] == 0.0).unsqueeze(-1)


class CausalConvSiLU(nn.Layer):
    """`causal_conv_silu` with a kernel `[E, 1, J]`, drawn from a normal of std `init_std`."""

    def __init__(self, channels: int, taps: int, init_std: float):
        super().__init__()
        self.weight = self.create_parameter(
            [channels, 1, taps], default_initializer=Normal(std=init_std)
        )

    def forward(
        self, u_BLE: Tensor, cache: DeltaCache | None = None, packed: PackedSamples | None = None
    ) -> Tensor:
        weight_EJ = self.weight.squeeze(1)
        if cache is None:
            return causal_conv_silu(u_BLE, weight_EJ, None, packed)
        before_BJE = cache.inputs_BJE
        if before_BJE is None:
            shape = [u_BLE.shape[0], weight_EJ.shape[1] - 1, u_BLE.shape[2]]
            before_BJE = paddle.zeros(shape, u_BLE.dtype)
        cache.length += u_BLE.shape[1]
        # Copied, so that a cache does not keep the prompt's inputs alive.
        last = paddle.concat([before_BJE, u_BLE], axis=1)[:, -before_BJE.shape[1] :]
        cache.inputs_BJE = last.clone()
        return causal_conv_silu(u_BLE, weight_EJ, before_BJE)


class Decay(nn.Layer):
    """`-exp(A_log) * softplus(a + dt_bias)` per value head: the logarithm of what a token leaves of
    the state."""

    def __init__(self, heads: int):
        super().__init__()
        self.A_log = self.create_parameter(
            [heads], dtype=precise_dtype.get(), default_initializer=LogUniform(0.01, 16.0)
        )
        self.dt_bias = self.create_parameter([heads], default_initializer=Constant(1.0))

    def forward(self, a_BLN: Tensor) -> Tensor:
        """float32 `[B, L, N]`."""
        rate_N = paddle.exp(self.A_log.astype("float32"))
        wide = a_BLN.astype("float32") + self.dt_bias.astype("float32")
        # Above the threshold softplus(x) is x in float32.
        return -rate_N * F.softplus(wide, threshold=20.0)


class DeltaRule(nn.Layer):
    """`gated_delta_rule`, whose state is in the cache during generation."""

    def forward(
        self,
        q_BLKC: Tensor,
        k_BLKC: Tensor,
        v_BLNV: Tensor,
        decay_BLN: Tensor,
        beta_BLN: Tensor,
        cache: DeltaCache | None = None,
        packed: PackedSamples | None = None,
    ) -> Tensor:
        state = None if cache is None else cache.state_BNCV
        out_BLNV, state = gated_delta_rule(
            q_BLKC, k_BLKC, v_BLNV, decay_BLN, beta_BLN, state, packed, cache is not None
        )
        if cache is not None:
            cache.state_BNCV = state
        return out_BLNV


class GatedRMSNorm(nn.Layer):
    """`gated_rms_norm` over the last dim; the weight starts at one."""

    def __init__(self, size: int, epsilon: float):
        super().__init__()
        self.epsilon = epsilon
        self.weight = self.create_parameter(
            [size], dtype=precise_dtype.get(), default_initializer=Constant(1.0)
        )

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return gated_rms_norm(x, gate, self.weight, self.epsilon)


class LogUniform(Initializer):
    """The logarithm of numbers drawn uniformly between two."""

    def __init__(self, low: float, high: float):
        super().__init__()
        self.low, self.high = low, high

    def forward(self, var: Tensor, block=None) -> None:
        drawn = paddle.uniform(var.shape, "float32", self.low, self.high)
        paddle.log(drawn).astype(var.dtype)._share_underline_tensor_to(var)


class SharedExpertMoE(SparseMoE):
    """Routed experts, and one that every token goes to, times the sigmoid of a gate per token."""

    def __init__(self, config: Qwen3_5MoeTextConfig, placement: Placement):
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
        shared_TD = F.sigmoid(self.shared_expert_gate(x_TD)) * self.shared_expert(x_TD)
        if isinstance(routed, tuple):
            return routed[0] + shared_TD, routed[1]
        return routed + shared_TD


class LanguageModel(VLLanguageModel):
    """The decoder of Qwen3.5."""

    norm_class = GemmaRMSNorm

    def make_layer(self, config: Qwen3_5TextConfig, placement: Placement, number: int) -> nn.Layer:
        if config.is_full(number):
            name = "self_attn"
            mixer = VLSelfAttention(config, placement, GemmaRMSNorm, is_gated=True)
        else:
            name, mixer = "linear_attn", GatedDeltaNet(config, placement)
        return VLDecoderLayer(config, placement, number, mixer, name, GemmaRMSNorm, SharedExpertMoE)


class Qwen3_5ForConditionalGeneration(VLForConditionalGeneration):
    """The complete model. Build it with `from_pretrained` or `from_config`."""

    config_class = Qwen3_5Config
    model_type = "qwen3_5"
    checkpoint_map = checkpoint_map
    decoder_class = LanguageModel

    def new_caches(self, prompt: int, most: int | None) -> list[Any]:
        text = self.config.text_config
        return [
            KeyValueCache(prompt, most) if text.is_full(i) else DeltaCache()
            for i in range(text.num_hidden_layers)
        ]

    def new_pool(self, number: int, places: int, num_rows: int) -> RowPool:
        is_full = self.config.text_config.is_full(number)
        return super().new_pool(number, places, num_rows) if is_full else DeltaPool(num_rows)


class Qwen3_5MoeForConditionalGeneration(Qwen3_5ForConditionalGeneration):
    """HF's name of a model whose layers have experts; the configuration says whether they do."""
