"""Configuration of Qwen3-VL's decoder, dense or with experts, and the two dialects of its files."""

from dataclasses import dataclass, field
from typing import Any

# Read without effect: routing weights are always normalised.
_MOE_INERT_KEYS = frozenset({"norm_topk_prob", "sliding_window"})


@dataclass(frozen=True)
class Qwen3VLTextConfig:
    """The decoder. Defaults are those of HF's configuration class."""

    vocab_size: int = 151936
    hidden_size: int = 4096
    intermediate_size: int = 22016
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int = 32
    head_dim: int = 128
    hidden_act: str = "silu"
    max_position_embeddings: int = 128000
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    attention_dropout: float = 0.0
    rope_theta: float = 5000000.0
    mrope_section: list[int] = field(default_factory=lambda: [24, 20, 20])

    def __post_init__(self):
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"text_config: num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
        if self.head_dim % 2 or 2 * sum(self.mrope_section) != self.head_dim:
            raise ValueError(
                f"text_config: mrope_section {self.mrope_section} sums to "
                f"{sum(self.mrope_section)}; it must be half of head_dim {self.head_dim}"
            )
        for name, only in (("hidden_act", "silu"), ("attention_bias", False)):
            if getattr(self, name) != only:
                raise ValueError(
                    f"text_config: {name} is {getattr(self, name)!r}; Qwen3-VL has {only!r} only"
                )
        if self.attention_dropout:
            raise ValueError(
                f"text_config: attention_dropout is {self.attention_dropout}; no Qwen3-VL "
                "checkpoint uses it and this model does not have it: set it to 0"
            )

    def has_experts(self, layer: int) -> bool:
        """Whether that decoder layer has experts in place of one MLP."""
        return False


@dataclass(frozen=True)
class Qwen3VLMoeTextConfig(Qwen3VLTextConfig):
    """A decoder with experts. Defaults are those of HF's configuration class.

    Attributes:
        num_experts: in each layer that has them; `num_experts_per_tok` of them see a token.
        moe_intermediate_size: inner width of an expert.
        decoder_sparse_step: every so many layers one has experts, the last of them.
        mlp_only_layers: numbers of layers that have none whatever the step.
        output_router_logits: add the load-balancing loss to the loss, `router_aux_loss_coef` times.
    """

    hidden_size: int = 2048
    intermediate_size: int = 5632
    num_hidden_layers: int = 24
    num_attention_heads: int = 16
    num_key_value_heads: int = 16
    num_experts: int = 60
    num_experts_per_tok: int = 4
    moe_intermediate_size: int = 1408
    decoder_sparse_step: int = 1
    mlp_only_layers: list[int] = field(default_factory=list)
    router_aux_loss_coef: float = 0.001
    output_router_logits: bool = False

    def __post_init__(self):
        super().__post_init__()
        if not 1 <= self.num_experts_per_tok <= self.num_experts:
            raise ValueError(
                f"text_config: num_experts_per_tok is {self.num_experts_per_tok}; it must be at "
                f"least 1 and at most num_experts {self.num_experts}"
            )
        if self.decoder_sparse_step < 1:
            raise ValueError(
                f"text_config: decoder_sparse_step is {self.decoder_sparse_step}; it must be at "
                "least 1, which gives every layer experts"
            )
        outside = [i for i in self.mlp_only_layers if not 0 <= i < self.num_hidden_layers]
        if outside:
            raise ValueError(
                f"text_config: mlp_only_layers {outside} lie outside the decoder's "
                f"{self.num_hidden_layers} layers"
            )

    def has_experts(self, layer: int) -> bool:
        return layer not in self.mlp_only_layers and (layer + 1) % self.decoder_sparse_step == 0


def plain_text(text: dict[str, Any]) -> dict[str, Any]:
    """Either rotary dialect of a text configuration to `rope_theta` and `mrope_section`.

    Raises:
        ValueError: another kind of rotary positions.
    """
    rope = dict(text.pop("rope_parameters", None) or text.pop("rope_scaling", None) or {})
    text.pop("rope_scaling", None)
    kind = rope.pop("rope_type", rope.pop("type", "default"))
    rope.pop("type", None)
    if kind != "default" or rope.pop("mrope_interleaved", True) is not True:
        raise ValueError(
            f"text_config: rotary type {kind!r} with mrope_interleaved false or scaled positions "
            "is not Qwen3-VL's; it has rope_type 'default' and mrope_interleaved true"
        )
    return text | rope


def plain_experts(text: dict[str, Any]) -> dict[str, Any]:
    """Either dialect of the number of experts to `num_experts`, what has no effect left out.

    Raises:
        ValueError: both dialects are there and disagree.
    """
    text = {name: value for name, value in text.items() if name not in _MOE_INERT_KEYS}
    if text.get("mlp_only_layers", []) is None:
        text["mlp_only_layers"] = []
    # A reader of either dialect would silently take a default for the other's name.
    local = text.pop("num_local_experts", None)
    if local is not None and text.setdefault("num_experts", local) != local:
        raise ValueError(
            f"text_config: num_experts is {text['num_experts']} and num_local_experts {local}: "
            "they are two names of one number; keep the right one"
        )
    return text
