"""Configuration of Qwen3-VL, dense or mixture of experts, in both dialects of config.json.

The hub's files (transformers 4.57) have `rope_theta`, `rope_scaling` and `num_experts`;
transformers 5.x has `rope_parameters` and `num_local_experts`. Both are read, the first is written.

Source: configuration_qwen3_vl.py and configuration_qwen3_vl_moe.py of HF transformers.
"""

from dataclasses import asdict, field
from typing import Annotated, Any

from pydantic import Field

from paddle_vl.families.vlm.modeling.config import (
    TOKEN_IDS,
    DenseText,
    ExpertsText,
    Heads,
    Layers,
    RopeBase,
    Spread,
    VisionConfig,
    VLConfig,
    Vocabulary,
    Width,
    check_interleaves,
    text_rotary,
    tie_settings,
    tower_section,
    typed_section,
)
from paddle_vl.files.stored_settings import (
    INERT_KEYS,
    Listed,
    Number,
    check_mapping,
    checked,
    known_values,
)

# HF's name.
Qwen3VLVisionConfig = VisionConfig
_MOE_TYPE = "qwen3_vl_moe"
# Keys without effect: routing weights are always normalized.
_MOE_INERT_KEYS = frozenset({"norm_topk_prob", "sliding_window"})


@checked
class Qwen3VLTextConfig(DenseText):
    """The decoder. Defaults are those of HF's configuration class, as of 4.57."""

    vocab_size: Vocabulary = 151936
    hidden_size: Width = 4096
    intermediate_size: Width = 22016
    num_hidden_layers: Layers = 32
    num_attention_heads: Heads = 32
    num_key_value_heads: Heads = 32
    head_dim: Annotated[int, Field(ge=2, le=8192)] = 128
    hidden_act: str = "silu"
    max_position_embeddings: Annotated[int, Field(ge=1, le=1 << 40)] = 128000
    initializer_range: Spread = 0.02
    rms_norm_eps: Annotated[Number, Field(gt=0, le=1)] = 1e-6
    attention_bias: bool = False
    attention_dropout: Annotated[Number, Field(ge=0)] = 0.0
    rope_theta: RopeBase = 5000000.0
    mrope_section: Listed[list[Annotated[int, Field(ge=1)]]] = field(
        default_factory=lambda: [24, 20, 20]
    )

    def __post_init__(self):
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
        if self.head_dim % 2 or 2 * sum(self.mrope_section) != self.head_dim:
            raise ValueError(
                f"mrope_section {self.mrope_section} sums to "
                f"{sum(self.mrope_section)}; it must be half of head_dim {self.head_dim}"
            )
        check_interleaves(self.mrope_section)
        for name, only in (("hidden_act", "silu"), ("attention_bias", False)):
            if getattr(self, name) != only:
                raise ValueError(f"{name} is {getattr(self, name)!r}; only {only!r} is supported")
        if self.attention_dropout:
            raise ValueError(
                f"attention_dropout is {self.attention_dropout}; attention dropout is "
                "not supported (no Qwen3-VL checkpoint uses it): set it to 0"
            )


@checked
class Qwen3VLMoeTextConfig(ExpertsText, Qwen3VLTextConfig):
    """A decoder with mixtures of experts. Defaults are those of HF's configuration class."""

    hidden_size: Width = 2048
    intermediate_size: Width = 5632
    num_hidden_layers: Layers = 24
    num_attention_heads: Heads = 16
    num_key_value_heads: Heads = 16
    num_experts: Annotated[int, Field(ge=1, le=1 << 16)] = 60
    """experts per layer; each token is routed to num_experts_per_tok of them"""
    num_experts_per_tok: Annotated[int, Field(ge=1)] = 4
    moe_intermediate_size: Width = 1408
    """inner width of an expert"""
    decoder_sparse_step: Layers = 1
    """layer i has experts if this number divides i + 1"""
    mlp_only_layers: Listed[list[Annotated[int, Field(ge=0)]]] = field(default_factory=list)
    """layers without experts in any case"""
    router_aux_loss_coef: Annotated[Number, Field(ge=0)] = 0.001
    output_router_logits: bool = False
    """add the load-balancing loss, times router_aux_loss_coef"""

    def __post_init__(self):
        super().__post_init__()
        self.check_experts()
        if outside := [i for i in self.mlp_only_layers if i >= self.num_hidden_layers]:
            raise ValueError(
                f"mlp_only_layers {outside} lie outside the decoder's "
                f"{self.num_hidden_layers} layers"
            )

    def has_experts(self, layer: int) -> bool:
        is_sparse = (layer + 1) % self.decoder_sparse_step == 0
        return is_sparse and layer not in self.mlp_only_layers


@checked
class Qwen3VLConfig(VLConfig):
    """Configuration of the complete model."""

    text_config: Qwen3VLTextConfig = field(default_factory=Qwen3VLTextConfig)

    @classmethod
    def named(cls, name: str) -> "Qwen3VLConfig":
        """The configuration of a published size: `qwen3-vl-8b`, or `Qwen3-VL-8B-Instruct`.

        Raises:
            ValueError: there is no such size.
        """
        from paddle_vl.families.qwen3_vl.sizes import size_values

        return cls.from_dict(size_values(name))

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Qwen3VLConfig":
        """Build from the content of a config.json, in either dialect.

        Raises:
            ValueError: another model type, unknown keys, or values out of range.
        """
        values = check_mapping(values, "the configuration")
        model_type = values.get("model_type", "qwen3_vl")
        if model_type not in ("qwen3_vl", _MOE_TYPE):
            raise ValueError(f"model_type is {model_type!r}; 'qwen3_vl' or {_MOE_TYPE!r} is needed")
        text = check_mapping(values.pop("text_config", None), "text_config")
        vision = check_mapping(values.pop("vision_config", None), "vision_config")
        ties = tie_settings(values, text)
        text, text_class = text | text_rotary(text, "mrope_section"), Qwen3VLTextConfig
        if model_type == _MOE_TYPE:
            text, text_class = _with_experts(text), Qwen3VLMoeTextConfig
        vision = tower_section(vision)
        known, _ = known_values(cls, values, INERT_KEYS, "a configuration of Qwen3-VL")
        return cls(
            **known
            | {
                "text_config": typed_section(
                    text_class, text, "text_config", (f"{model_type}_text", model_type)
                ),
                "vision_config": typed_section(
                    VisionConfig, vision, "vision_config", (f"{model_type}_vision", model_type)
                ),
                **ties,
            }
        )

    def to_dict(self) -> dict[str, Any]:
        """The content of config.json in the hub's dialect, with both tie flags."""
        text, vision = asdict(self.text_config), asdict(self.vision_config)
        has_experts = isinstance(self.text_config, Qwen3VLMoeTextConfig)
        model_type = _MOE_TYPE if has_experts else "qwen3_vl"
        if has_experts:
            text["norm_topk_prob"] = True
        section = text.pop("mrope_section")
        text |= {
            "model_type": f"{model_type}_text",
            "rope_scaling": {
                "rope_type": "default",
                "mrope_section": section,
                "mrope_interleaved": True,
            },
            "tie_word_embeddings": self.tie_word_embeddings,
        }
        vision["model_type"] = model_type
        name = "Qwen3VLMoe" if has_experts else "Qwen3VL"
        return {
            "architectures": [f"{name}ForConditionalGeneration"],
            "model_type": model_type,
            **{name: getattr(self, name) for name in TOKEN_IDS},
            "tie_word_embeddings": self.tie_word_embeddings,
            "text_config": text,
            "vision_config": vision,
        }


def _with_experts(text: dict[str, Any]) -> dict[str, Any]:
    """The text configuration with `num_experts`, from either dialect, without inert keys.

    Raises:
        ValueError: both dialects are present and disagree.
    """
    text = {name: value for name, value in text.items() if name not in _MOE_INERT_KEYS}
    if text.get("mlp_only_layers", []) is None:
        text["mlp_only_layers"] = []
    # HF silently uses a default for the name of the other dialect.
    local = text.pop("num_local_experts", None)
    if local is not None and text.setdefault("num_experts", local) != local:
        raise ValueError(
            f"text_config: num_experts is {text['num_experts']} but num_local_experts {local}: "
            "both must be equal; keep the right one"
        )
    return text
