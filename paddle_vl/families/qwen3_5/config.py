"""Configuration of Qwen3.5, dense or mixture of experts.

The hub's files (transformers 4.57) and those of transformers 5.x are read; written is what 5.x
writes, with what it drops and other software reads: MTP layers and both tie flags.

Source: configuration_qwen3_5.py and configuration_qwen3_5_moe.py of HF transformers.
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
    TokenId,
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
from paddle_vl.files.text_file import shown

LINEAR, FULL = "linear_attention", "full_attention"
_TYPE, _MOE_TYPE = "qwen3_5", "qwen3_5_moe"
_HeadWidth = Annotated[int, Field(ge=2, le=8192)]
# Layer i has attention if this number divides i + 1, where a file lists no layers.
_INTERVAL = 4
_ROPE = ("rope_theta", "partial_rotary_factor", "mrope_section")
# Keys without effect: routing weights are always normalized, and every layer has experts.
_INERT = INERT_KEYS | {"norm_topk_prob", "mlp_only_layers", "decoder_sparse_step"}
# What a file may say of the layers, and the only values that this family has.
_ONLY = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "attn_output_gate": (True,),
    "output_gate_type": ("swish", "silu"),
    "mamba_ssm_dtype": ("float32",),
    "mtp_use_dedicated_embeddings": (False,),
}


@checked
class Qwen3_5TextConfig(DenseText):
    """The decoder. Defaults are those of HF's configuration class, rope_theta that of the
    published models."""

    vocab_size: Vocabulary = 248320
    hidden_size: Width = 4096
    intermediate_size: Width = 12288
    num_hidden_layers: Layers = 32
    layer_types: Listed[list[str]] = field(default_factory=list)
    """mixer of every layer, linear_attention or full_attention; empty for every fourth full"""
    num_attention_heads: Heads = 16
    num_key_value_heads: Heads = 4
    head_dim: _HeadWidth = 256
    linear_conv_kernel_dim: Annotated[int, Field(ge=2, le=64)] = 4
    """taps of the convolution before a delta rule"""
    linear_num_key_heads: Heads = 16
    linear_num_value_heads: Heads = 32
    linear_key_head_dim: _HeadWidth = 128
    linear_value_head_dim: _HeadWidth = 128
    max_position_embeddings: Annotated[int, Field(ge=1, le=1 << 40)] = 262144
    initializer_range: Spread = 0.02
    rms_norm_eps: Annotated[Number, Field(gt=0, le=1)] = 1e-6
    rope_theta: RopeBase = 10000000.0
    partial_rotary_factor: Annotated[Number, Field(gt=0, le=1)] = 0.25
    """share of a head's channels that are rotated, the first ones"""
    mrope_section: Listed[list[Annotated[int, Field(ge=1)]]] = field(
        default_factory=lambda: [11, 11, 10]
    )
    mtp_num_hidden_layers: Annotated[int, Field(ge=0, le=1024)] = 0
    """layers for multi-token prediction in the checkpoint, which are kept as they are"""

    def __post_init__(self):
        types = list(self.layer_types) or [
            LINEAR if (i + 1) % _INTERVAL else FULL for i in range(self.num_hidden_layers)
        ]
        object.__setattr__(self, "layer_types", types)
        if len(types) != self.num_hidden_layers or set(types) - {LINEAR, FULL}:
            raise ValueError(
                f"layer_types lists {len(types)} layers of the types {sorted(set(types))}, "
                f"num_hidden_layers is {self.num_hidden_layers}: every layer must have its type, "
                f"{LINEAR!r} or {FULL!r}"
            )
        for heads, key_heads in (
            ("num_attention_heads", "num_key_value_heads"),
            ("linear_num_value_heads", "linear_num_key_heads"),
        ):
            if getattr(self, heads) % getattr(self, key_heads):
                raise ValueError(
                    f"{heads} {getattr(self, heads)} is not a multiple of "
                    f"{key_heads} {getattr(self, key_heads)}"
                )
        if 2 * sum(self.mrope_section) != self.rotary_dim:
            raise ValueError(
                f"mrope_section {self.mrope_section} sums to {sum(self.mrope_section)}; it must be "
                f"half of the {self.rotary_dim} rotated channels, head_dim {self.head_dim} x "
                f"partial_rotary_factor {self.partial_rotary_factor}"
            )
        check_interleaves(self.mrope_section)

    @property
    def rotary_dim(self) -> int:
        """Channels of a head that are rotated."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def key_width(self) -> int:
        """Channels of all queries of a delta rule, as many as of all keys."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def value_width(self) -> int:
        """Channels of all values of a delta rule."""
        return self.linear_num_value_heads * self.linear_value_head_dim

    def is_full(self, layer: int) -> bool:
        """Whether that layer has attention, and no delta rule."""
        return self.layer_types[layer] == FULL


@checked
class Qwen3_5MoeTextConfig(ExpertsText, Qwen3_5TextConfig):
    """A decoder with experts in every layer. Defaults are those of HF's configuration class."""

    hidden_size: Width = 2048
    # Only experts have an inner width.
    intermediate_size: Annotated[int, Field(ge=0, le=0)] = 0
    num_hidden_layers: Layers = 40
    num_key_value_heads: Heads = 2
    num_experts: Annotated[int, Field(ge=1, le=1 << 16)] = 256
    """experts per layer; each token is routed to num_experts_per_tok of them"""
    num_experts_per_tok: Annotated[int, Field(ge=1)] = 8
    moe_intermediate_size: Width = 512
    """inner width of an expert"""
    shared_expert_intermediate_size: Width = 512
    """inner width of the expert that every token goes to"""
    router_aux_loss_coef: Annotated[Number, Field(ge=0)] = 0.001
    output_router_logits: bool = False
    """add the load-balancing loss, times router_aux_loss_coef"""

    def __post_init__(self):
        super().__post_init__()
        self.check_experts()

    def has_experts(self, layer: int) -> bool:
        return True


def _tower() -> VisionConfig:
    return VisionConfig(out_hidden_size=4096, deepstack_visual_indexes=[])


@checked
class Qwen3_5Config(VLConfig):
    """Configuration of the complete model."""

    text_config: Qwen3_5TextConfig = field(default_factory=Qwen3_5TextConfig)
    vision_config: VisionConfig = field(default_factory=_tower)
    image_token_id: TokenId = 248056
    video_token_id: TokenId = 248057
    vision_start_token_id: TokenId = 248053
    vision_end_token_id: TokenId = 248054

    def __post_init__(self):
        super().__post_init__()
        if levels := self.vision_config.deepstack_visual_indexes:
            raise ValueError(
                f"vision_config.deepstack_visual_indexes is {shown(levels)}; Qwen3.5 has no "
                "deepstack levels: leave it empty"
            )

    def layer_size(self, layer: int) -> int:
        from paddle_vl.families.qwen3_5.flops import Qwen3_5Flops

        return Qwen3_5Flops.layer_size(self, layer)

    @classmethod
    def named(cls, name: str) -> "Qwen3_5Config":
        """The configuration of a published size: `qwen3.5-4b`, or `Qwen3.5-35B-A3B`.

        Raises:
            ValueError: there is no such size.
        """
        from paddle_vl.families.qwen3_5.sizes import size_values

        return cls.from_dict(size_values(name))

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Qwen3_5Config":
        """Build from the content of a config.json, in either dialect.

        Raises:
            ValueError: another model type, unknown keys, or values out of range.
        """
        values = check_mapping(values, "the configuration")
        model_type = values.get("model_type", _TYPE)
        if model_type in (f"{_TYPE}_text", f"{_MOE_TYPE}_text"):
            raise ValueError(
                f"model_type is {model_type!r}, a decoder alone: its vision tower is missing; take "
                "the vision-language checkpoint that it was exported from"
            )
        if model_type not in (_TYPE, _MOE_TYPE):
            raise ValueError(f"model_type is {model_type!r}; {_TYPE!r} or {_MOE_TYPE!r} is needed")
        text = check_mapping(values.pop("text_config", None), "text_config")
        vision = check_mapping(values.pop("vision_config", None), "vision_config")
        ties = tie_settings(values, text)
        vision = {"deepstack_visual_indexes": []} | tower_section(vision)
        text_class = Qwen3_5TextConfig
        if model_type == _MOE_TYPE:
            text_class = Qwen3_5MoeTextConfig
            # HF ignores it: every layer has experts.
            text.pop("intermediate_size", None)
        known, _ = known_values(cls, values, INERT_KEYS, "a configuration of Qwen3.5")

        def types(section: str) -> tuple[str, ...]:
            # Files of quantized models have the outer type, dense or not.
            return (f"{model_type}_{section}", model_type, _TYPE)

        return cls(
            **known
            | {
                "text_config": typed_section(
                    text_class, _text(text), "text_config", types("text"), _INERT
                ),
                "vision_config": typed_section(
                    VisionConfig, vision, "vision_config", types("vision"), _INERT
                ),
                **ties,
            }
        )

    def to_dict(self) -> dict[str, Any]:
        """The content of config.json as transformers 5.x writes it, with both tie flags."""
        text, vision = asdict(self.text_config), asdict(self.vision_config)
        has_experts = isinstance(self.text_config, Qwen3_5MoeTextConfig)
        model_type = _MOE_TYPE if has_experts else _TYPE
        if has_experts:
            text.pop("intermediate_size")
        if not text["mtp_num_hidden_layers"]:
            text.pop("mtp_num_hidden_layers")
        text |= {
            "model_type": f"{model_type}_text",
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "rope_parameters": {
                "rope_type": "default",
                "mrope_interleaved": True,
                **{name: text.pop(name) for name in _ROPE},
            },
            "tie_word_embeddings": self.tie_word_embeddings,
        }
        vision["model_type"] = f"{model_type}_vision"
        vision["rope_parameters"] = {
            "rope_type": "axial",
            "rope_theta": vision.pop("rope_theta"),
        }
        name = "Qwen3_5Moe" if has_experts else "Qwen3_5"
        return {
            "architectures": [f"{name}ForConditionalGeneration"],
            "model_type": model_type,
            **{name: getattr(self, name) for name in TOKEN_IDS},
            "tie_word_embeddings": self.tie_word_embeddings,
            "text_config": text,
            "vision_config": vision,
        }


def _text(text: dict[str, Any]) -> dict[str, Any]:
    """The text configuration under this package's names.

    Raises:
        ValueError: another kind of layer, or two values of one rotary setting.
    """
    for name, allowed in _ONLY.items():
        if (found := text.pop(name, None)) is not None and found not in allowed:
            only = " or ".join(repr(each) for each in allowed)
            raise ValueError(f"text_config: {name} is {shown(found)}; only {only} is supported")
    if dropout := text.pop("attention_dropout", None):
        raise ValueError(
            f"text_config: attention_dropout is {shown(dropout)}; attention dropout is not "
            "supported (no Qwen3.5 checkpoint uses it): set it to 0"
        )
    interval = text.pop("full_attention_interval", None)
    if interval not in (None, _INTERVAL) and not text.get("layer_types"):
        if isinstance(interval, bool) or not isinstance(interval, int) or interval < 1:
            raise ValueError(
                f"text_config: full_attention_interval is {shown(interval)}; it must be a whole "
                "number of at least 1"
            )
        layers = text.get("num_hidden_layers", Qwen3_5TextConfig.num_hidden_layers)
        if isinstance(layers, int):
            types = [FULL if (i + 1) % interval == 0 else LINEAR for i in range(layers)]
            text["layer_types"] = types
    if text.get("layer_types", []) is None:
        text.pop("layer_types")
    return text | text_rotary(text, *_ROPE[1:])
