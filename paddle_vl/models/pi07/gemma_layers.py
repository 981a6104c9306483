"""The two halves of a decoder layer: Gemma 3 for what is seen and read, Gemma for the actions.

Shapes: B batch, L tokens of the own stream, S keys; D width of the stream; N query heads, K key
heads, H head width.

Source: Gemma3DecoderLayer of HF transformers; the adaptive expert is openpi's.
"""

import paddle
from paddle import Tensor, nn

from paddle_vl.models.pi07.engine_config import Gemma3TextConfig, GemmaExpertConfig
from paddle_vl.models.pi07.norms import AdaptiveRMSNorm, GemmaRMSNorm
from paddle_vl.models.pi07.rotary import Rotary
from paddle_vl.nn.activation import activation
from paddle_vl.nn.linear import Linear
from paddle_vl.nn.masked_attention import AttentionMask, masked_attention

# Keys and values `[B, S, K, H]`, keys normalised and rotated.
KeyValue = tuple[Tensor, Tensor]


class StreamView:
    """Where the tokens of a stream stand and what they see, the same for all layers.

    Not a tuple: Paddle would look for tensors in it.

    Args:
        rotary: by the base of a layer's angles.
        mask: over the keys that the stream is given and its own behind them.
        scale: of scores, the backbone's for both streams.
        implementation: of attention, `eager` or `sdpa`.
    """

    def __init__(
        self, rotary: dict[float, Rotary], mask: AttentionMask, scale: float, implementation: str
    ):
        self.rotary, self.mask = rotary, mask
        self.scale, self.implementation = scale, implementation

    def attend(self, q_BLNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor) -> Tensor:
        """`[B, L, N, H]`."""
        return masked_attention(q_BLNH, k_BSKH, v_BSKH, self.mask, self.scale, self.implementation)


class BackboneLayer(nn.Layer):
    """`x + norm(attention(norm(x)))`, then `x + norm(mlp(norm(x)))`, norms on both sides.

    Args:
        rope_base: of this layer's rotary angles.
    """

    def __init__(self, config: Gemma3TextConfig, rope_base: float, dropout: float):
        super().__init__()
        self.rope_base = rope_base
        width, epsilon = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = GemmaRMSNorm(width, epsilon)
        self.self_attn = Attention(config, width)
        self.self_attn.q_norm = GemmaRMSNorm(config.head_dim, epsilon)
        self.self_attn.k_norm = GemmaRMSNorm(config.head_dim, epsilon)
        self.post_attention_layernorm = GemmaRMSNorm(width, epsilon)
        self.pre_feedforward_layernorm = GemmaRMSNorm(width, epsilon)
        self.mlp = GemmaMLP(width, config.intermediate_size)
        self.post_feedforward_layernorm = GemmaRMSNorm(width, epsilon)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, x_BLD: Tensor, view: StreamView, past: KeyValue | None = None
    ) -> tuple[Tensor, KeyValue]:
        """The rows, and the keys and values of `past` and of this call behind them."""
        attended, key_value = self.self_attn(
            self.input_layernorm(x_BLD), view, self.rope_base, past
        )
        x_BLD = x_BLD + self.post_attention_layernorm(self.dropout(attended))
        rows = self.mlp(self.pre_feedforward_layernorm(x_BLD))
        return x_BLD + self.post_feedforward_layernorm(self.dropout(rows)), key_value


class ExpertLayer(nn.Layer):
    """Attention and MLP behind adaptive norms, each let in by the gate of its norm."""

    def __init__(self, config: GemmaExpertConfig, rope_base: float, dropout: float):
        super().__init__()
        self.rope_base = rope_base
        width, cond, epsilon = config.hidden_size, config.adarms_cond_dim, config.rms_norm_eps
        self.input_layernorm = AdaptiveRMSNorm(width, cond, epsilon)
        self.self_attn = Attention(config, width)
        self.post_attention_layernorm = AdaptiveRMSNorm(width, cond, epsilon)
        self.mlp = GemmaMLP(width, config.intermediate_size)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, x_BCE: Tensor, cond_BCE: Tensor, view: StreamView, prefix: KeyValue
    ) -> Tensor:
        """The rows; they see the prefix and each other.

        Args:
            cond_BCE: condition of the norms; leading dims may be 1.
        """
        rows, gate = self.input_layernorm(x_BCE, cond_BCE)
        attended, _ = self.self_attn(rows, view, self.rope_base, prefix)
        x_BCE = x_BCE + self.dropout(attended) * gate
        rows, gate = self.post_attention_layernorm(x_BCE, cond_BCE)
        return x_BCE + self.dropout(self.mlp(rows)) * gate


class Attention(nn.Layer):
    """Grouped-query attention; queries and keys pass `q_norm` and `k_norm` where there are any."""

    def __init__(self, config: Gemma3TextConfig | GemmaExpertConfig, width: int):
        super().__init__()
        self.head_dim = config.head_dim
        query_width = config.num_attention_heads * config.head_dim
        key_width = config.num_key_value_heads * config.head_dim
        self.q_proj = Linear(width, query_width, False)
        self.k_proj = Linear(width, key_width, False)
        self.v_proj = Linear(width, key_width, False)
        self.o_proj = Linear(query_width, width, False)
        self.q_norm: GemmaRMSNorm | None = None
        self.k_norm: GemmaRMSNorm | None = None

    def forward(
        self, x_BLD: Tensor, view: StreamView, rope_base: float, past: KeyValue | None
    ) -> tuple[Tensor, KeyValue]:
        heads = [*x_BLD.shape[:2], -1, self.head_dim]
        q_BLNH = self.q_proj(x_BLD).reshape(heads)
        k_BSKH = self.k_proj(x_BLD).reshape(heads)
        v_BSKH = self.v_proj(x_BLD).reshape(heads)
        if self.q_norm is not None:
            q_BLNH, k_BSKH = self.q_norm(q_BLNH), self.k_norm(k_BSKH)
        rotary = view.rotary[rope_base]
        q_BLNH, k_BSKH = rotary.queries(q_BLNH), rotary.keys(k_BSKH)
        if past is not None:
            k_BSKH = paddle.concat([past[0], k_BSKH], axis=1)
            v_BSKH = paddle.concat([past[1], v_BSKH], axis=1)
        out_BLNH = view.attend(q_BLNH, k_BSKH, v_BSKH)
        return self.o_proj(out_BLNH.reshape([*heads[:2], -1])), (k_BSKH, v_BSKH)


class GemmaMLP(nn.Layer):
    """`down(gelu(gate(x)) * up(x))`, the tanh form of GELU."""

    def __init__(self, width: int, inner: int):
        super().__init__()
        self.gate_proj = Linear(width, inner, False)
        self.up_proj = Linear(width, inner, False)
        self.down_proj = Linear(inner, width, False)
        self.act = activation("gelu_pytorch_tanh")

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))
