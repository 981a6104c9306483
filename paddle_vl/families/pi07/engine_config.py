"""Configuration of pi07's engine: the Gemma 3 backbone, its SigLIP tower and the action expert.

The sections have HF's field names. HF's keys that the engine does not use (`sliding_window`, token
ids and the like) are kept in `other` and written back unchanged; unknown keys are refused.

Source: Gemma3WithExpertConfig of OpenTau; Gemma3Config and SiglipVisionConfig of HF transformers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from math import isqrt
from typing import TYPE_CHECKING, Any, TypeVar

from paddle_vl.files.checked_values import INERT_KEYS, Range, check_mapping, check_values

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

# Keys of HF's configuration classes without effect on the engine's numbers.
_UNUSED = {
    "text_config": """attention_dropout attn_logit_softcapping cache_implementation
        final_logit_softcapping initializer_range max_position_embeddings rope_parameters
        rope_scaling sliding_window _sliding_window_pattern tie_word_embeddings
        use_bidirectional_attention""",
    "vision_config": """attention_dropout initializer_range num_image_tokens projection_dim
        projector_hidden_act tie_word_embeddings vision_use_head""",
    "gemma3_config": """attention_dropout boi_token_index eoi_token_index head_dtype
        ignore_index image_token_id image_token_index initializer_range tie_word_embeddings""",
    "gemma_expert_config": """attention_dropout initializer_range layer_types rope_parameters
        max_position_embeddings rope_scaling rope_theta tie_word_embeddings
        use_bidirectional_attention""",
    "vlm_config": """disable_internal_bf16_cast load_pretrained_gemma3 sub_configs
        tie_word_embeddings""",
}
_ACTIVATION = "gelu_pytorch_tanh"
# Far beyond every published model; larger values are typing errors.
_LAYERS, _WIDTH, _HEADS = Range(1, 1024), Range(1, 1 << 20), Range(1, 4096)
_EPSILON, _BASE = Range(0, 1, is_above=True), Range(1, is_above=True)
_RANGES = {
    "hidden_size": _WIDTH,
    "intermediate_size": _WIDTH,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": _HEADS,
    "num_key_value_heads": _HEADS,
    "head_dim": Range(2, 8192),
    "query_pre_attn_scalar": Range(0, is_above=True),
    "rope_theta": _BASE,
    "rope_local_base_freq": _BASE,
    "rms_norm_eps": _EPSILON,
    "layer_norm_eps": _EPSILON,
    "vocab_size": Range(1, 1 << 24),
    "sliding_window_pattern": Range(1, 1024),
    "patch_size": Range(1, 256),
    "image_size": Range(1, 1 << 14),
    "mm_tokens_per_image": Range(1, 1 << 20),
    "adarms_cond_dim": _WIDTH,
    "dropout": Range(0, 1),
    "discrete_action_vocab_size": Range(1, 1 << 24),
}
Section = TypeVar("Section", bound="DataclassInstance")


@dataclass(frozen=True)
class Gemma3TextConfig:
    """The backbone's decoder.

    Attributes:
        rope_theta, rope_local_base_freq: rotary bases of the full and the sliding layers.
        layer_types: `full_attention` or `sliding_attention` per layer; selects its rotary base, not
            its mask. None: every `sliding_window_pattern`-th layer is full.
    """

    hidden_size: int = 2560
    intermediate_size: int = 10240
    num_hidden_layers: int = 34
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    head_dim: int = 256
    query_pre_attn_scalar: float = 256
    rope_theta: float = 1_000_000.0
    rope_local_base_freq: float = 10_000.0
    rms_norm_eps: float = 1e-6
    vocab_size: int = 262_208
    sliding_window_pattern: int = 6
    layer_types: tuple[str, ...] | None = None
    attention_bias: bool = False
    hidden_activation: str = _ACTIVATION
    other: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self):
        where = "vlm_config.gemma3_config.text_config"
        check_values(self, where, _RANGES)
        _fixed(self, where, attention_bias=False, hidden_activation=_ACTIVATION)
        _check_heads(self, where)
        types = self.layer_types
        if types is None:
            types = [
                "sliding_attention" if (i + 1) % self.sliding_window_pattern else "full_attention"
                for i in range(self.num_hidden_layers)
            ]
        object.__setattr__(self, "layer_types", tuple(types))
        strange = sorted(set(types) - {"sliding_attention", "full_attention"})
        if len(types) != self.num_hidden_layers or strange:
            raise ValueError(
                f"{where}: layer_types has {len(types)} entries"
                + (f", {strange} among them" if strange else "")
                + f"; num_hidden_layers {self.num_hidden_layers} needs as many, each "
                "sliding_attention or full_attention"
            )

    def rope_base(self, layer: int) -> float:
        """Rotary base of a layer, for both streams."""
        assert self.layer_types is not None, "__post_init__ gives it a value"
        is_local = self.layer_types[layer] == "sliding_attention"
        return self.rope_local_base_freq if is_local else self.rope_theta


@dataclass(frozen=True)
class SiglipVisionConfig:
    """The image tower."""

    hidden_size: int = 1152
    intermediate_size: int = 4304
    num_attention_heads: int = 16
    num_hidden_layers: int = 27
    num_channels: int = 3
    patch_size: int = 14
    image_size: int = 448
    layer_norm_eps: float = 1e-6
    hidden_act: str = _ACTIVATION
    other: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self):
        where = "vlm_config.gemma3_config.vision_config"
        check_values(self, where, _RANGES)
        _fixed(self, where, num_channels=3, hidden_act=_ACTIVATION)
        if self.image_size % self.patch_size:
            raise ValueError(
                f"{where}: image_size {self.image_size} is not a multiple of patch_size "
                f"{self.patch_size}"
            )
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"{where}: hidden_size {self.hidden_size} is not a multiple of "
                f"num_attention_heads {self.num_attention_heads}"
            )

    @property
    def grid_side(self) -> int:
        """Patches along one side of the image."""
        return self.image_size // self.patch_size

    @property
    def num_patches(self) -> int:
        return self.grid_side**2


@dataclass(frozen=True)
class Gemma3Config:
    """The backbone: tower, projector and decoder."""

    text_config: Gemma3TextConfig = field(default_factory=Gemma3TextConfig)
    vision_config: SiglipVisionConfig = field(default_factory=SiglipVisionConfig)
    mm_tokens_per_image: int = 256
    other: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self):
        check_values(self, "vlm_config.gemma3_config", _RANGES)
        side, patches = isqrt(self.mm_tokens_per_image), self.vision_config.grid_side
        if side**2 != self.mm_tokens_per_image or not side or patches % side:
            raise ValueError(
                f"vlm_config.gemma3_config: mm_tokens_per_image {self.mm_tokens_per_image} must be "
                f"the square of a divisor of {patches}, the patches along a side of the image"
            )


@dataclass(frozen=True)
class GemmaExpertConfig:
    """The action expert: as many layers and heads as the backbone, with adaptive norms."""

    hidden_size: int = 1280
    intermediate_size: int = 5120
    num_hidden_layers: int = 34
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    head_dim: int = 256
    rms_norm_eps: float = 1e-6
    use_adarms: bool = True
    adarms_cond_dim: int = 1280
    vocab_size: int = 262_208
    attention_bias: bool = False
    hidden_act: str = _ACTIVATION
    hidden_activation: str = _ACTIVATION
    other: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self):
        where = "vlm_config.gemma_expert_config"
        check_values(self, where, _RANGES)
        _fixed(self, where, attention_bias=False, use_adarms=True, hidden_activation=_ACTIVATION)
        _check_heads(self, where)


@dataclass(frozen=True)
class Gemma3WithExpertConfig:
    """The engine: backbone and expert, and which of their parameters are trained.

    Settings that default to None also exist at the policy's level, see `policy_config.py`; inside a
    policy's configuration they have values.

    Attributes:
        freeze_vision_encoder: do not train the tower; the projector is trained.
        train_expert_only: do not train the backbone.
        train_vision_encoder_only: train only the tower and the projector.
        train_state_action_representation_only: train only the projections of states and actions,
            and the embedding and head of discrete actions.
        disable_action_expert: no expert, as in the planner.
        discrete_action_vocab_size: of the action tokenizer; None until one is loaded.
    """

    gemma3_config: Gemma3Config = field(default_factory=Gemma3Config)
    gemma_expert_config: GemmaExpertConfig = field(default_factory=GemmaExpertConfig)
    attention_implementation: str | None = None
    dropout: float | None = None
    freeze_vision_encoder: bool | None = None
    train_expert_only: bool | None = None
    train_vision_encoder_only: bool = False
    train_state_action_representation_only: bool | None = None
    gradient_checkpointing: bool | None = None
    disable_action_expert: bool = False
    discrete_action_vocab_size: int | None = None
    other: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self):
        check_values(self, "vlm_config", _RANGES)
        text, expert = self.gemma3_config.text_config, self.gemma_expert_config
        for name in ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"):
            if not self.disable_action_expert and getattr(text, name) != getattr(expert, name):
                raise ValueError(
                    f"gemma_expert_config.{name} {getattr(expert, name)} differs from "
                    f"text_config.{name} {getattr(text, name)}: both streams share every attention"
                )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Gemma3WithExpertConfig":
        """From the `vlm_config` section of a config.json; absent keys have their defaults.

        Raises:
            ValueError: a wrong value or an unknown key.
        """
        values = check_mapping(values, "vlm_config")
        backbone = check_mapping(values.pop("gemma3_config", None), "gemma3_config")
        text = _with_plain_rope(check_mapping(backbone.pop("text_config", None), "text_config"))
        text = section(Gemma3TextConfig, text, "text_config")
        vision = section(SiglipVisionConfig, backbone.pop("vision_config", None), "vision_config")
        backbone |= {"text_config": text, "vision_config": vision}
        values["gemma3_config"] = section(Gemma3Config, backbone, "gemma3_config")
        expert = values.pop("gemma_expert_config", None)
        values["gemma_expert_config"] = section(GemmaExpertConfig, expert, "gemma_expert_config")
        return section(cls, values, "vlm_config")

    def to_dict(self) -> dict[str, Any]:
        """The section as OpenTau writes it."""
        text, vision = self.gemma3_config.text_config, self.gemma3_config.vision_config
        backbone = {
            "model_type": "gemma3",
            "text_config": written(text) | {"model_type": "gemma3_text"},
            "vision_config": written(vision) | {"model_type": "siglip_vision_model"},
        }
        return written(self) | {
            "model_type": "Gemma3WithExpertModel",
            "gemma3_config": written(self.gemma3_config) | backbone,
            "gemma_expert_config": written(self.gemma_expert_config) | {"model_type": "gemma"},
        }


def check_training(config: Gemma3WithExpertConfig) -> None:
    """Refuse training settings that contradict each other.

    Raises:
        ValueError: two settings contradict each other.
    """
    refused = (
        ("train_expert_only", "without", "freeze_vision_encoder"),
        ("train_expert_only", "with", "disable_action_expert"),
        ("train_vision_encoder_only", "with", "train_expert_only"),
        ("train_vision_encoder_only", "with", "freeze_vision_encoder"),
        ("train_state_action_representation_only", "with", "train_expert_only"),
        ("train_state_action_representation_only", "with", "train_vision_encoder_only"),
    )
    for first, how, second in refused:
        if getattr(config, first) and bool(getattr(config, second)) == (how == "with"):
            remedy = f"set {first} to False or {second} to {how != 'with'}"
            raise ValueError(
                f"{first} {how} {second}: these settings contradict each other; {remedy}"
            )


def section(cls: type[Section], values: Mapping[str, Any] | None, name: str) -> Section:
    """A section from its dictionary, keys without effect in `other`.

    Raises:
        ValueError: unknown keys.
    """
    values = check_mapping(values, name)
    names = {f.name for f in fields(cls)} - {"other"}
    unused = INERT_KEYS | set(_UNUSED[name].split())
    unknown = sorted(set(values) - names - unused)
    if unknown:
        raise ValueError(
            f"{name} has keys that this model does not know: {unknown}; correct or remove them"
        )
    other = {key: value for key, value in values.items() if key not in names}
    return cls(**{k: v for k, v in values.items() if k in names} | {"other": other})


def written(config: Any) -> dict[str, Any]:
    """A section's own values and those in `other`; tuples become lists."""
    own = {f.name: getattr(config, f.name) for f in fields(config) if f.name != "other"}
    own = {name: list(v) if isinstance(v, tuple) else v for name, v in own.items()}
    return config.other | own


def _with_plain_rope(text: Mapping[str, Any]) -> dict[str, Any]:
    """Move the two bases of transformers 5's `rope_parameters` to the fields of transformers 4."""
    text = dict(text)
    rope = check_mapping(text.get("rope_parameters"), "text_config: rope_parameters")
    bases = {"full_attention": "rope_theta", "sliding_attention": "rope_local_base_freq"}
    for kind, name in bases.items():
        where = f"text_config: rope_parameters.{kind}"
        base = check_mapping(rope.get(kind), where).get("rope_theta")
        if base is not None:
            text.setdefault(name, base)
    return text


def _fixed(config: Any, where: str, **values: Any) -> None:
    for name, wanted in values.items():
        if (found := getattr(config, name)) != wanted:
            raise ValueError(f"{where}: {name} is {found!r}; this model has {wanted!r} only")


def _check_heads(config: Any, where: str) -> None:
    heads, kv = config.num_attention_heads, config.num_key_value_heads
    if heads % kv:
        raise ValueError(
            f"{where}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv}"
        )
    if config.head_dim % 2:
        raise ValueError(f"{where}: head_dim {config.head_dim} is odd; rotary pairs need it even")
