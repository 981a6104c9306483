"""Configuration that families share whose decoders mix gated DeltaNet layers and attention.

The hub's files (transformers 4.57) and those of transformers 5.x are read; written is what 5.x
writes, with what it drops and other software reads: MTP layers and both tie flags.

Source: configuration_qwen3_5.py, configuration_qwen3_5_moe.py and configuration_qwen4_exp.py of HF
transformers.
"""

from collections.abc import Mapping
from dataclasses import asdict, field
from typing import Annotated, Any, ClassVar

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
_HeadWidth = Annotated[int, Field(ge=2, le=8192)]
# Layer i has attention if this number divides i + 1, where a file lists no layers.
_INTERVAL = 4
_ROPE = ("rope_theta", "partial_rotary_factor", "mrope_section")
# What a file may say of the layers, and the only values that they have.
_ONLY = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "attn_output_gate": (True,),
    "mamba_ssm_dtype": ("float32",),
    "mtp_use_dedicated_embeddings": (False,),
}


@checked
class DeltaText(DenseText):
    """The decoder. Defaults are those that HF's configuration classes have in common."""

    # Keys of a file without effect, the only values that others may have, and those that may be
    # null for a default that is not null.
    inert: ClassVar[frozenset[str]] = INERT_KEYS
    only: ClassVar[Mapping[str, tuple[Any, ...]]] = _ONLY
    optional: ClassVar[tuple[str, ...]] = ("layer_types",)

    vocab_size: Vocabulary = 248320
    hidden_size: Width = 2048
    intermediate_size: Width = 12288
    num_hidden_layers: Layers = 40
    layer_types: Listed[list[str]] = field(default_factory=list)
    """mixer of every layer, linear_attention or full_attention; empty for every fourth full"""
    num_attention_heads: Heads = 16
    num_key_value_heads: Heads = 2
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

    def written(self) -> dict[str, Any]:
        """The section of a config.json without what every one has."""
        text = asdict(self)
        if not text["mtp_num_hidden_layers"]:
            text.pop("mtp_num_hidden_layers")
        return text


@checked
class DeltaExpertsText(ExpertsText, DeltaText):
    """A decoder with experts in every layer, and one that every token goes to."""

    # Only experts have an inner width.
    intermediate_size: Annotated[int, Field(ge=0, le=0)] = 0
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

    def written(self) -> dict[str, Any]:
        text = super().written()
        text.pop("intermediate_size")
        return text


@checked
class DeltaConfig(VLConfig):
    """Configuration of the complete model."""

    # Its name in messages, and the class of the decoder's section by model type, of which the first
    # is that of sections too.
    family: ClassVar[str] = ""
    text_classes: ClassVar[Mapping[str, type[DeltaText]]] = {}

    image_token_id: TokenId = 248056
    video_token_id: TokenId = 248057
    vision_start_token_id: TokenId = 248053
    vision_end_token_id: TokenId = 248054

    def __post_init__(self):
        super().__post_init__()
        if levels := self.vision_config.deepstack_visual_indexes:
            raise ValueError(
                f"vision_config.deepstack_visual_indexes is {shown(levels)}; {self.family} has no "
                "deepstack levels: leave it empty"
            )

    def layer_size(self, layer: int) -> int:
        from paddle_vl.families.vlm.modeling.delta_flops import DeltaFlops

        return DeltaFlops.layer_size(self, layer)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Any:
        """Build from the content of a config.json, in either dialect.

        Raises:
            ValueError: another model type, unknown keys, or values out of range.
        """
        values = check_mapping(values, "the configuration")
        model_types = list(cls.text_classes)
        model_type = values.get("model_type", model_types[0])
        if model_type in [f"{each}_text" for each in model_types]:
            raise ValueError(
                f"model_type is {model_type!r}, a decoder alone: its vision tower is missing; take "
                "the vision-language checkpoint that it was exported from"
            )
        if model_type not in model_types:
            needed = " or ".join(repr(each) for each in model_types)
            raise ValueError(f"model_type is {model_type!r}; {needed} is needed")
        text = check_mapping(values.pop("text_config", None), "text_config")
        vision = check_mapping(values.pop("vision_config", None), "vision_config")
        ties = tie_settings(values, text)
        vision = {"deepstack_visual_indexes": []} | tower_section(vision)
        text_class = cls.text_classes[model_type]
        if issubclass(text_class, DeltaExpertsText):
            # HF ignores it: every layer has experts.
            text.pop("intermediate_size", None)
        text = _text(text, text_class, cls.family)
        known, _ = known_values(cls, values, INERT_KEYS, f"a configuration of {cls.family}")

        def section(kind: Any, values: dict[str, Any], name: str) -> Any:
            # Files of quantized models have the outer type, dense or not.
            types = (f"{model_type}_{name}", model_type, model_types[0])
            return typed_section(kind, values, f"{name}_config", types, text_class.inert)

        return cls(
            **known
            | {
                "text_config": section(text_class, text, "text"),
                "vision_config": section(VisionConfig, vision, "vision"),
                **ties,
            }
        )

    def written(self, name: str, model_type: str) -> dict[str, Any]:
        """The content of config.json as transformers 5.x writes it, with both tie flags.

        Args:
            name: with which HF's names of classes begin.
        """
        text, vision = self.text_config.written(), asdict(self.vision_config)
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
        return {
            "architectures": [f"{name}ForConditionalGeneration"],
            "model_type": model_type,
            **{name: getattr(self, name) for name in TOKEN_IDS},
            "tie_word_embeddings": self.tie_word_embeddings,
            "text_config": text,
            "vision_config": vision,
        }


def _text(text: dict[str, Any], cls: type[DeltaText], family: str) -> dict[str, Any]:
    """The text configuration under this package's names.

    Raises:
        ValueError: another kind of layer, or two values of one rotary setting.
    """
    for name, allowed in cls.only.items():
        if (found := text.pop(name, None)) is not None and found not in allowed:
            only = " or ".join(repr(each) for each in allowed)
            raise ValueError(f"text_config: {name} is {shown(found)}; only {only} is supported")
    if dropout := text.pop("attention_dropout", None):
        raise ValueError(
            f"text_config: attention_dropout is {shown(dropout)}; attention dropout is not "
            f"supported (no {family} checkpoint uses it): set it to 0"
        )
    interval = text.pop("full_attention_interval", None)
    if interval not in (None, _INTERVAL) and not text.get("layer_types"):
        if isinstance(interval, bool) or not isinstance(interval, int) or interval < 1:
            raise ValueError(
                f"text_config: full_attention_interval is {shown(interval)}; it must be a whole "
                "number of at least 1"
            )
        layers = text.get("num_hidden_layers", cls.num_hidden_layers)
        if isinstance(layers, int):
            types = [FULL if (i + 1) % interval == 0 else LINEAR for i in range(layers)]
            text["layer_types"] = types
    for name in cls.optional:
        if text.get(name, ...) is None:
            text.pop(name)
    return text | text_rotary(text, *_ROPE[1:])
