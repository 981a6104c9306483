"""Configuration of pi07's engine: the Gemma 3 backbone, its SigLIP tower and the action expert.

The sections have HF's field names. HF's keys that the engine does not use (`sliding_window`, token
ids and the like) are kept in `other` and written back unchanged; unknown keys are refused.

Source: Gemma3WithExpertConfig of OpenTau; Gemma3Config and SiglipVisionConfig of HF transformers.
"""

from dataclasses import field, fields
from math import isqrt
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator
from pydantic_core import ArgsKwargs

from paddle_vl.files.checked_values import (
    INERT_KEYS,
    Listed,
    Number,
    Part,
    check_mapping,
    checked,
    known_values,
)

Activation = Literal["gelu_pytorch_tanh"]
# Far beyond every published model; larger values are typing errors.
_Layers = Annotated[int, Field(ge=1, le=1024)]
_Width = Annotated[int, Field(ge=1, le=1 << 20)]
_Heads = Annotated[int, Field(ge=1, le=4096)]
_HeadDim = Annotated[int, Field(ge=2, le=8192, multiple_of=2)]
_Vocabulary = Annotated[int, Field(ge=1, le=1 << 24)]
_Epsilon = Annotated[Number, Field(gt=0, le=1)]
_RopeBase = Annotated[Number, Field(gt=1)]
LayerType = Literal["sliding_attention", "full_attention"]


def _inert(names: str) -> frozenset[str]:
    """Keys of HF's configuration classes that do not affect the engine's numbers."""
    return INERT_KEYS | set(names.split())


@checked
class ConfigSection:
    """A section of a policy's config.json.

    Attributes:
        type_key, type_name: the entry that says which section it is, and its value.
        inert_keys: keys without effect on the model's numbers.
    """

    other: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """keys of the file without effect, written back unchanged"""

    type_key: ClassVar[str] = "model_type"
    type_name: ClassVar[str]
    inert_keys: ClassVar[frozenset[str]]

    @classmethod
    def of_file(cls, values: dict[str, Any]) -> dict[str, Any]:
        """The keys of a file, those of other versions as those of today."""
        return values

    def to_dict(self) -> dict[str, Any]:
        """The section as HF and OpenTau write it."""
        own = {each.name: getattr(self, each.name) for each in fields(self)}
        kept = own.pop("other")
        return (
            kept
            | {name: _written(value) for name, value in own.items()}
            | {self.type_key: self.type_name}
        )

    @model_validator(mode="before")
    @classmethod
    def _sort_keys(cls, values: Any) -> Any:
        if not isinstance(values, ArgsKwargs):
            return values
        given = cls.of_file(dict(values.kwargs or {}))
        whose = f"a configuration of {cls.type_name}"
        known, other = known_values(cls, given, cls.inert_keys, whose)
        return known | {"other": {**known.get("other", {}), **other}}


@checked
class Gemma3TextConfig(ConfigSection):
    """The backbone's decoder."""

    hidden_size: _Width = 2560
    intermediate_size: _Width = 10240
    num_hidden_layers: _Layers = 34
    num_attention_heads: _Heads = 8
    num_key_value_heads: _Heads = 4
    head_dim: _HeadDim = 256
    query_pre_attn_scalar: Annotated[Number, Field(gt=0)] = 256
    rope_theta: _RopeBase = 1_000_000.0
    """rotary base of the full layers"""
    rope_local_base_freq: _RopeBase = 10_000.0
    """rotary base of the sliding layers"""
    rms_norm_eps: _Epsilon = 1e-6
    vocab_size: _Vocabulary = 262_208
    sliding_window_pattern: Annotated[int, Field(ge=1, le=1024)] = 6
    layer_types: Listed[tuple[LayerType, ...]] | None = None
    """selects a layer's rotary base, not its mask; default: every sliding_window_pattern-th layer
    is full"""
    attention_bias: Literal[False] = False
    hidden_activation: Activation = "gelu_pytorch_tanh"

    type_name: ClassVar[str] = "gemma3_text"
    inert_keys: ClassVar[frozenset[str]] = _inert(
        """attention_dropout attn_logit_softcapping cache_implementation final_logit_softcapping
        initializer_range max_position_embeddings rope_parameters rope_scaling sliding_window
        _sliding_window_pattern tie_word_embeddings use_bidirectional_attention"""
    )

    def __post_init__(self):
        _check_heads(self)
        if self.layer_types is None:
            types: list[LayerType] = [
                "sliding_attention" if (i + 1) % self.sliding_window_pattern else "full_attention"
                for i in range(self.num_hidden_layers)
            ]
            object.__setattr__(self, "layer_types", tuple(types))
        elif len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"layer_types has {len(self.layer_types)} entries; num_hidden_layers "
                f"{self.num_hidden_layers} needs as many"
            )

    @classmethod
    def of_file(cls, values: dict[str, Any]) -> dict[str, Any]:
        """transformers 5 has the two bases in `rope_parameters`."""
        rope = check_mapping(values.get("rope_parameters"), "rope_parameters")
        bases = {"full_attention": "rope_theta", "sliding_attention": "rope_local_base_freq"}
        for kind, name in bases.items():
            found = check_mapping(rope.get(kind), f"rope_parameters.{kind}").get("rope_theta")
            if found is not None:
                values.setdefault(name, found)
        return values

    def rope_base(self, layer: int) -> float:
        """Rotary base of a layer, for both streams."""
        assert self.layer_types is not None, "__post_init__ gives it a value"
        is_local = self.layer_types[layer] == "sliding_attention"
        return self.rope_local_base_freq if is_local else self.rope_theta


@checked
class SiglipVisionConfig(ConfigSection):
    """The image tower."""

    hidden_size: _Width = 1152
    intermediate_size: _Width = 4304
    num_attention_heads: _Heads = 16
    num_hidden_layers: _Layers = 27
    num_channels: Literal[3] = 3
    patch_size: Annotated[int, Field(ge=1, le=256)] = 14
    image_size: Annotated[int, Field(ge=1, le=1 << 14)] = 448
    layer_norm_eps: _Epsilon = 1e-6
    hidden_act: Activation = "gelu_pytorch_tanh"

    type_name: ClassVar[str] = "siglip_vision_model"
    inert_keys: ClassVar[frozenset[str]] = _inert(
        """attention_dropout initializer_range num_image_tokens projection_dim projector_hidden_act
        tie_word_embeddings vision_use_head"""
    )

    def __post_init__(self):
        for name, divisor in (("image_size", "patch_size"), ("hidden_size", "num_attention_heads")):
            if getattr(self, name) % getattr(self, divisor):
                raise ValueError(
                    f"{name} {getattr(self, name)} is not a multiple of {divisor} "
                    f"{getattr(self, divisor)}"
                )

    @property
    def grid_side(self) -> int:
        """Patches along one side of the image."""
        return self.image_size // self.patch_size

    @property
    def num_patches(self) -> int:
        return self.grid_side**2


@checked
class Gemma3Config(ConfigSection):
    """The backbone: tower, projector and decoder."""

    text_config: Part[Gemma3TextConfig] = field(default_factory=Gemma3TextConfig)
    vision_config: Part[SiglipVisionConfig] = field(default_factory=SiglipVisionConfig)
    mm_tokens_per_image: Annotated[int, Field(ge=1, le=1 << 20)] = 256

    type_name: ClassVar[str] = "gemma3"
    inert_keys: ClassVar[frozenset[str]] = _inert(
        """attention_dropout boi_token_index eoi_token_index head_dtype ignore_index image_token_id
        image_token_index initializer_range tie_word_embeddings"""
    )

    def __post_init__(self):
        side, patches = isqrt(self.mm_tokens_per_image), self.vision_config.grid_side
        if side**2 != self.mm_tokens_per_image or patches % side:
            raise ValueError(
                f"mm_tokens_per_image {self.mm_tokens_per_image} must be the square of a divisor "
                f"of {patches}, the patches along a side of the image"
            )


@checked
class GemmaExpertConfig(ConfigSection):
    """The action expert: as many layers and heads as the backbone, with adaptive norms."""

    hidden_size: _Width = 1280
    intermediate_size: _Width = 5120
    num_hidden_layers: _Layers = 34
    num_attention_heads: _Heads = 8
    num_key_value_heads: _Heads = 4
    head_dim: _HeadDim = 256
    rms_norm_eps: _Epsilon = 1e-6
    use_adarms: Literal[True] = True
    adarms_cond_dim: _Width = 1280
    vocab_size: _Vocabulary = 262_208
    attention_bias: Literal[False] = False
    hidden_act: str = "gelu_pytorch_tanh"
    hidden_activation: Activation = "gelu_pytorch_tanh"

    type_name: ClassVar[str] = "gemma"
    inert_keys: ClassVar[frozenset[str]] = _inert(
        """attention_dropout initializer_range layer_types rope_parameters max_position_embeddings
        rope_scaling rope_theta tie_word_embeddings use_bidirectional_attention"""
    )

    def __post_init__(self):
        _check_heads(self)


@checked
class Gemma3WithExpertConfig(ConfigSection):
    """The engine: backbone and expert, and which of their parameters are trained.

    Settings that default to None also exist at the policy's level, see `config.py`; inside a
    policy's configuration they have values.
    """

    gemma3_config: Part[Gemma3Config] = field(default_factory=Gemma3Config)
    gemma_expert_config: Part[GemmaExpertConfig] = field(default_factory=GemmaExpertConfig)
    attention_implementation: Literal["eager", "sdpa"] | None = None
    dropout: Annotated[Number, Field(ge=0, lt=1)] | None = None
    freeze_vision_encoder: bool | None = None
    train_expert_only: bool | None = None
    train_vision_encoder_only: bool = False
    """train only the vision tower and the projector"""
    train_state_action_representation_only: bool | None = None
    gradient_checkpointing: bool | None = None
    disable_action_expert: bool = False
    """no expert, as in the planner"""
    discrete_action_vocab_size: _Vocabulary | None = None
    """of the action tokenizer; None until one is loaded"""

    type_name: ClassVar[str] = "Gemma3WithExpertModel"
    inert_keys: ClassVar[frozenset[str]] = _inert(
        "disable_internal_bf16_cast load_pretrained_gemma3 sub_configs tie_word_embeddings"
    )

    def __post_init__(self):
        text, expert = self.gemma3_config.text_config, self.gemma_expert_config
        for name in ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"):
            if not self.disable_action_expert and getattr(text, name) != getattr(expert, name):
                raise ValueError(
                    f"gemma_expert_config.{name} {getattr(expert, name)} differs from "
                    f"text_config.{name} {getattr(text, name)}: both streams share every attention"
                )


def _written(value: Any) -> Any:
    """A field's value as JSON has it."""
    if isinstance(value, dict):
        return {name: _written(item) for name, item in value.items()}
    value = list(value) if isinstance(value, tuple) else value
    return value.to_dict() if hasattr(value, "to_dict") else value


def _check_heads(config: Gemma3TextConfig | GemmaExpertConfig) -> None:
    heads, kv = config.num_attention_heads, config.num_key_value_heads
    if heads % kv:
        raise ValueError(
            f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv}"
        )
