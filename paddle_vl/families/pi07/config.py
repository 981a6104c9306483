"""pi07's configurations: of the low-level policy, of the planner, and of the engine in both: the
Gemma 3 backbone with its SigLIP tower, and the action expert. Fields and defaults are OpenTau's and
HF's.

A section keeps the keys of a file that do not affect its numbers (`sliding_window`, token ids and
the like) in `other` and writes them back; unknown keys are refused.

A policy's configuration contains the engine's as `vlm_config`. OpenTau has some of its settings at
the policy's level too, `shared_settings`: they are kept in `vlm_config`, may be given at either
level and are written at both. Values given at both must agree. OpenTau writes all settings, so in
its files (which have `model_type`) a default counts as not given.

Every field has its type, range, default and meaning here.

Source: Gemma3WithExpertConfig of OpenTau; Gemma3Config and SiglipVisionConfig of HF transformers.
"""

import logging
from collections.abc import Mapping
from dataclasses import field, fields, replace
from math import isqrt
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import ArgsKwargs

from paddle_vl.families.policy.features import (
    CONFIG_FILES,
    CURRENT_CONFIG_VERSION,
    MOST_DIMS,
    FeatureType,
    NormalizationMode,
    PolicyFeature,
    read_config,
)
from paddle_vl.files.stored_settings import (
    INERT_KEYS,
    Listed,
    Number,
    Part,
    SavedConfig,
    check_mapping,
    checked,
    known_values,
)
from paddle_vl.files.text_file import read_json_object, shown

logger = logging.getLogger(__name__)
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


# Keys of HF's configuration classes that affect no number in any section.
_INERT = INERT_KEYS | frozenset(
    """
    _sliding_window_pattern attention_dropout attn_logit_softcapping boi_token_index
    cache_implementation disable_internal_bf16_cast eoi_token_index final_logit_softcapping
    head_dtype ignore_index image_token_id image_token_index initializer_range
    max_position_embeddings num_image_tokens projection_dim projector_hidden_act
    tie_word_embeddings use_bidirectional_attention vision_use_head
    """.split()
)
_ROPE = {"rope_parameters", "rope_scaling"}


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
    inert_keys: ClassVar[frozenset[str]] = _INERT

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
    sliding_window_pattern: Annotated[int, Field(ge=1, le=1024)] = field(default=6, compare=False)
    """not written, as layer_types says it"""
    layer_types: Listed[tuple[LayerType, ...]] | None = None
    """selects a layer's rotary base, not its mask; default: every sliding_window_pattern-th layer
    is full"""
    attention_bias: Literal[False] = False
    hidden_activation: Activation = "gelu_pytorch_tanh"

    type_name: ClassVar[str] = "gemma3_text"
    inert_keys: ClassVar[frozenset[str]] = _INERT | _ROPE | {"sliding_window"}

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

    def to_dict(self) -> dict[str, Any]:
        return {n: v for n, v in super().to_dict().items() if n != "sliding_window_pattern"}

    def is_sliding(self, layer: int) -> bool:
        """Whether it is a layer with the local rotary base; with the window, if there is one."""
        assert self.layer_types is not None, "__post_init__ gives it a value"
        return self.layer_types[layer] == "sliding_attention"

    def rope_base(self, layer: int) -> float:
        """Rotary base of a layer, for both streams."""
        return self.rope_local_base_freq if self.is_sliding(layer) else self.rope_theta

    @property
    def rope_factor(self) -> float:
        """Number by which Gemma 3 divides the positions of its full layers.

        Raises:
            ValueError: the scaling is of another kind.
        """
        scaling = self.other.get("rope_scaling")
        if scaling is None:
            # As transformers 5 has it.
            scaling = (self.other.get("rope_parameters") or {}).get("full_attention") or {}
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        if kind not in ("default", "linear"):
            raise ValueError(f"rope_scaling is {kind!r}; use_gemma3_attention knows 'linear' only")
        return float(scaling["factor"]) if kind == "linear" else 1.0


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

    def __post_init__(self):
        for name, divisor in (("image_size", "patch_size"), ("hidden_size", "num_attention_heads")):
            if getattr(self, name) % getattr(self, divisor):
                raise ValueError(
                    f"{name} {getattr(self, name)} is not a multiple of {divisor} "
                    f"{getattr(self, divisor)}"
                )

    def to_dict(self) -> dict[str, Any]:
        """HF would add a head otherwise."""
        return {"vision_use_head": False} | super().to_dict()

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

    @classmethod
    def is_folder(cls, folder: Path) -> bool:
        """Whether a folder is one of Gemma 3, by its config.json."""
        file = folder / "config.json"
        values = read_json_object(file, "a model's configuration") if file.is_file() else {}
        return values.get("model_type") == cls.type_name

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
    inert_keys: ClassVar[frozenset[str]] = _INERT | _ROPE | {"layer_types", "rope_theta"}

    def __post_init__(self):
        _check_heads(self)


@checked
class Gemma3WithExpertConfig(ConfigSection):
    """The engine: backbone and expert, and which of their parameters are trained."""

    gemma3_config: Part[Gemma3Config] = field(default_factory=Gemma3Config)
    gemma_expert_config: Part[GemmaExpertConfig] = field(default_factory=GemmaExpertConfig)
    attention_implementation: Literal["eager", "sdpa"] = "eager"
    """softmax in float32 over all keys (eager), or masked keys left out (sdpa)"""
    dropout: Annotated[Number, Field(ge=0, lt=1)] = 0.1
    """dropout probability after attention and MLP of both streams"""
    freeze_vision_encoder: bool = True
    """do not train the vision tower (the projector is trained)"""
    train_expert_only: bool = False
    """do not train the backbone, its heads and the tower"""
    train_vision_encoder_only: bool = False
    """train only the vision tower and the projector"""
    train_state_action_representation_only: bool = False
    """train only the projections of states and actions, and the discrete actions' embedding and
    head"""
    gradient_checkpointing: bool = False
    """activation recomputation; true does what train.recompute=full does"""
    disable_action_expert: bool = False
    """no expert, as in the planner"""
    discrete_action_vocab_size: _Vocabulary | None = None
    """of the action tokenizer; None until one is loaded"""
    use_gemma3_attention: bool = False
    """Gemma 3's own decoder: rope_scaling in full layers, and prefix tokens see sliding_window
    positions in the others; OpenTau has neither. Written only if it is on"""

    type_name: ClassVar[str] = "Gemma3WithExpertModel"
    inert_keys: ClassVar[frozenset[str]] = _INERT | {"load_pretrained_gemma3", "sub_configs"}

    def __post_init__(self):
        text, expert = self.gemma3_config.text_config, self.gemma_expert_config
        for name in ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"):
            if not self.disable_action_expert and getattr(text, name) != getattr(expert, name):
                raise ValueError(
                    f"gemma_expert_config.{name} {getattr(expert, name)} differs from "
                    f"text_config.{name} {getattr(text, name)}: both streams share every attention"
                )
        if self.use_gemma3_attention and type(text.other.get("sliding_window")) is not int:
            raise ValueError(
                f"use_gemma3_attention needs text_config.sliding_window, which is "
                f"{text.other.get('sliding_window')}: set it and rope_scaling, or start from a "
                "folder of Gemma 3, which has both"
            )

    def to_dict(self) -> dict[str, Any]:
        values = super().to_dict()
        if not self.use_gemma3_attention:
            # OpenTau does not know it.
            del values["use_gemma3_attention"]
        return values

    def rope(self, layer: int) -> tuple[float, float]:
        """Rotary base of a layer, and the number that divides its positions."""
        text = self.gemma3_config.text_config
        scales = self.use_gemma3_attention and not text.is_sliding(layer)
        return text.rope_base(layer), text.rope_factor if scales else 1.0

    @property
    def sliding_window(self) -> int | None:
        """Positions that a prefix token sees in sliding layers; None for all."""
        text = self.gemma3_config.text_config
        return text.other["sliding_window"] if self.use_gemma3_attention else None

    @classmethod
    def of_file(cls, values: dict[str, Any]) -> dict[str, Any]:
        if values.get("attention_implementation") == "fa2":
            logger.warning("attention_implementation fa2 computes as eager, as in OpenTau")
            values["attention_implementation"] = "eager"
        return values


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


PLANNER_TYPE = "pi07_high_level"
Config = TypeVar("Config", bound="PolicyConfig")
# Values outside are typing errors, and would exhaust memory before any other check.
_Steps = Annotated[int, Field(ge=1, le=10_000)]
_Dims = Annotated[int, Field(ge=1, le=MOST_DIMS)]
_Tokens = Annotated[int, Field(ge=1, le=1 << 17)]
_Pixels = Annotated[int, Field(ge=1, le=1 << 14)]
_ImageSize = Listed[tuple[_Pixels, _Pixels]]
_NotNegative = Annotated[Number, Field(ge=0)]
Modes = dict[FeatureType, NormalizationMode]
_Features = Annotated[
    dict[str, Part[PolicyFeature]], BeforeValidator(lambda values: {} if values is None else values)
]
# OpenTau's settings that would change the results; only these values are supported.
ONLY_VALUES = {"accel_prefix": None, "n_candidates": 1, "action_chunk_critic_path": None}
# OpenTau's settings without effect here: how it runs, optimizes (here `train.*`) and publishes.
UNUSED_SETTINGS = frozenset(
    """
    action_decoder_latency_lower action_decoder_latency_mean action_decoder_latency_std
    action_decoder_latency_upper cloud_vlm_latency_lower cloud_vlm_latency_mean
    cloud_vlm_latency_std cloud_vlm_latency_upper compile_mode compile_model device init_strategy
    license opentau_version optimizer_betas optimizer_eps optimizer_lr optimizer_weight_decay
    pretrained_path private push_to_hub repo_id scheduler_decay_lr scheduler_decay_steps
    scheduler_warmup_steps skip_input_resolution_check tags torch_compile_mode type use_amp use_peft
    use_torch_compile
    """.split()
)
# Training settings, of the second level, that contradict each other.
_CONTRADICTIONS = (
    ("train_expert_only", "without", "freeze_vision_encoder"),
    ("train_expert_only", "with", "disable_action_expert"),
    ("train_vision_encoder_only", "with", "train_expert_only"),
    ("train_vision_encoder_only", "with", "freeze_vision_encoder"),
    ("train_state_action_representation_only", "with", "train_expert_only"),
    ("train_state_action_representation_only", "with", "train_vision_encoder_only"),
)


def _of_engine(name: str) -> Any:
    """A setting of `vlm_config` at the policy's level."""
    return property(lambda config: getattr(config.vlm_config, name))


@checked
class PolicyConfig(ConfigSection, SavedConfig):
    """What policy and planner have in common.

    Attributes:
        shared_settings: settings of `vlm_config` that OpenTau has at the policy's level too.
        engine_defaults: defaults of `vlm_config` that differ from the engine's.
    """

    vlm_config: Part[Gemma3WithExpertConfig] = field(default_factory=Gemma3WithExpertConfig)
    """the engine's level of the configuration, where OpenTau has some of these settings too"""
    n_obs_steps: Annotated[int, Field(ge=1, le=41)] = 6
    """frames of an observation, the current one included; OpenTau has no time embedding beyond 40
    past frames"""
    input_features: _Features = field(default_factory=dict)
    """features of an observation by name, all of them; over weights only the cameras may differ"""
    output_features: _Features = field(default_factory=dict)
    normalization_mapping: Modes = field(
        default_factory=lambda: {"VISUAL": "IDENTITY", "STATE": "MEAN_STD", "ACTION": "MEAN_STD"}
    )
    max_state_dim: _Dims = 32
    """dims to which states are padded"""
    resize_imgs_with_padding: _ImageSize | None = None
    """(height, width) of the tower's images; None for its image size, the only one allowed"""
    empty_cameras: Annotated[int, Field(ge=0, le=64)] = 0
    """most cameras that a sample may lack; they are black and masked"""
    prompt_max_length: _Tokens = 256
    """tokens to which prompts are padded or cut"""
    response_max_length: _Tokens = 52
    """tokens to which responses are padded or cut"""
    metadata_max_length: _Tokens = 52
    """tokens to which metadata are padded or cut"""
    dataset_names: Annotated[list[str], Field(min_length=1)] | None = None
    """the groups of the statistics, in the order of their rows"""
    dataset_to_norm_index: dict[str, int] | None = None
    """row of the statistics by name of a data set"""
    config_version: int | None = None
    """version of the normalization convention; None for the current one"""
    skip_normalization_weights: bool = False
    """do not load a checkpoint's statistics"""
    save_normalization_stats: bool = True

    file_name: ClassVar[str] = CONFIG_FILES[0]
    type_key: ClassVar[str] = "type"
    inert_keys: ClassVar[frozenset[str]] = UNUSED_SETTINGS | ONLY_VALUES.keys()
    engine_defaults: ClassVar[dict[str, Any]] = {}
    shared_settings: ClassVar[tuple[str, ...]] = (
        "attention_implementation",
        "dropout",
        "freeze_vision_encoder",
        "gradient_checkpointing",
    )
    attention_implementation = _of_engine("attention_implementation")
    dropout = _of_engine("dropout")
    freeze_vision_encoder = _of_engine("freeze_vision_encoder")
    gradient_checkpointing = _of_engine("gradient_checkpointing")

    def __post_init__(self):
        engine = self.vlm_config
        side = engine.gemma3_config.vision_config.image_size
        size = self.resize_imgs_with_padding or (side, side)
        object.__setattr__(self, "resize_imgs_with_padding", size)
        if size != (side, side):
            raise ValueError(
                f"resize_imgs_with_padding {size} differs from the image of the tower, "
                f"vision_config.image_size {side}: set it to ({side}, {side})"
            )
        for first, how, second in _CONTRADICTIONS:
            if getattr(engine, first) and getattr(engine, second) == (how == "with"):
                raise ValueError(
                    f"{first} {how} {second}: these settings contradict each other; set {first} to "
                    f"False or {second} to {how != 'with'}"
                )
        if self.config_version not in (None, 0, CURRENT_CONFIG_VERSION):
            raise ValueError(
                f"config_version is {self.config_version!r}; this package knows 0 and "
                f"{CURRENT_CONFIG_VERSION}: a newer checkpoint needs a newer package"
            )
        for name, feature in (self.input_features | self.output_features).items():
            limit = {"STATE": "max_state_dim", "ACTION": "max_action_dim"}.get(feature.type)
            if limit is not None and feature.shape[0] > (most := getattr(self, limit, 1 << 16)):
                raise ValueError(
                    f"features: {name} has {feature.shape[0]} dims; {feature.type} has at most "
                    f"{limit} {most}"
                )
        names, rows = self.dataset_names or [], self.dataset_to_norm_index or {}
        if len(set(names)) < len(names):
            raise ValueError(f"dataset_names is {shown(names)}; each group must be there once")
        for name, row in rows.items():
            if not 0 <= row < self.num_groups:
                raise ValueError(
                    f"dataset_to_norm_index of {name!r} is {shown(row)}; it must be a row of the "
                    f"statistics, from 0 to {self.num_groups - 1}"
                )

    @classmethod
    def read_file(cls, path: Path) -> tuple[Path, dict[str, Any]]:
        return read_config(path)

    @classmethod
    def from_dict(cls: type[Config], values: Mapping[str, Any]) -> Config:
        """From the content of config.json, of this or an earlier version of OpenTau.

        Raises:
            ValueError: another policy's type, unknown keys, or contradictory settings; names them.
        """
        values = check_mapping(values, "the configuration")
        if (found := values.get("type", cls.type_name)) != cls.type_name:
            raise ValueError(f"type is {found!r}; this configuration reads {cls.type_name!r}")
        return cls(**values)

    @classmethod
    def of_file(cls, values: dict[str, Any]) -> dict[str, Any]:
        for name, only in ONLY_VALUES.items():
            if (found := values.get(name, only)) != only:
                raise ValueError(f"{name} is {found!r}, which is not supported; it must be {only}")
        given = {n: v for n in cls.shared_settings if (v := values.pop(n, None)) is not None}
        vlm, kept = values.get("vlm_config") or {}, dict(values.get("other") or {})
        if isinstance(vlm, Gemma3WithExpertConfig):
            values["vlm_config"] = replace(vlm, **given)
            values["other"] = {name: value for name, value in kept.items() if name not in given}
        elif isinstance(vlm, Mapping):
            values["vlm_config"] = engine = cls._engine_values(vlm, given)
            # Defaults of OpenTau's that do not count are written back as they were.
            values["other"] = kept | {n: v for n, v in given.items() if engine.get(n, v) != v}
        return values

    @classmethod
    def _engine_values(cls, vlm: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
        """`vlm_config` of a file with the settings that are given at the policy's level."""
        defaults = {each.name: each.default for each in fields(Gemma3WithExpertConfig)}
        merged = {**cls.engine_defaults, **vlm}
        for name in cls.shared_settings:
            levels = [v for v in (given.get(name), merged.pop(name, None)) if v is not None]
            if "model_type" in vlm:
                levels = [value for value in levels if value != defaults[name]]
            if len(levels) == 2 and levels[0] != levels[1]:
                raise ValueError(
                    f"{name} is {levels[0]} in the policy's configuration and {levels[1]} in "
                    "vlm_config: give one of them, or the same value twice"
                )
            if levels:
                merged[name] = levels[0]
        return merged

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.shared_settings} | super().to_dict()

    @property
    def num_groups(self) -> int:
        """Number of groups of data with statistics of their own."""
        return max(1, len(self.dataset_names or ()))

    @property
    def normalization_version(self) -> int:
        """The normalization convention in use, see `paddle_vl.families.policy.normalize`."""
        version = self.config_version
        return CURRENT_CONFIG_VERSION if version is None else version


@checked
class PI07Config(PolicyConfig):
    """The low-level policy."""

    history_interval: _Steps = 1
    """steps of the data between two frames of an observation"""
    chunk_size: _Steps = 50
    """actions that the policy predicts at once"""
    n_action_steps: _Steps = 50
    """actions that the saved policy executes before its next prediction"""
    max_action_dim: _Dims = 32
    """dims to which actions are padded"""
    resize_imgs_with_padding: _ImageSize = (448, 448)
    discrete_action_max_length: _Tokens = 32
    """tokens to which discrete actions are padded or cut"""
    discrete_action_tokenizer_path: str = "physical-intelligence/fast"
    """folder of the FAST tokenizer, or its name on a hub; a new policy in training takes it where
    data.processor has no action_tokenizer"""
    proj_width: Annotated[int, Field(ge=1, le=1 << 20)] = 1280
    """width of the action rows; equal to the expert's hidden_size"""
    num_steps: _Steps = 5
    """steps of the saved policy from noise to actions"""
    max_delay: Annotated[int, Field(ge=0, le=10_000)] = 0
    """most actions of a chunk that are already given"""
    per_group_projection: bool = False
    """each group of data has its own state and action projections"""
    knowledge_insulation: bool = True
    """the action loss does not train the backbone"""
    spacetime_layer_stride: Annotated[int, Field(ge=1, le=1024)] = 4
    """every N-th vision layer attends over past frames"""
    warn_outlier_threshold: _NotNegative = 32.0
    """absolute value of normalized training data that logs a warning; 0 for never"""

    type_name: ClassVar[str] = "pi07_low_level"
    shared_settings: ClassVar[tuple[str, ...]] = (
        *PolicyConfig.shared_settings,
        *("train_expert_only", "train_state_action_representation_only"),
    )
    train_expert_only = _of_engine("train_expert_only")
    train_state_action_representation_only = _of_engine("train_state_action_representation_only")

    def __post_init__(self):
        super().__post_init__()
        for name in ("n_action_steps", "max_delay"):
            if (value := getattr(self, name)) > self.chunk_size:
                raise ValueError(f"{name} {value} exceeds chunk_size {self.chunk_size}")
        if self.n_action_steps < self.chunk_size and self.max_delay:
            raise ValueError(
                f"max_delay {self.max_delay} needs whole chunks to be executed, but n_action_steps "
                f"{self.n_action_steps} is less than chunk_size {self.chunk_size}: set max_delay "
                f"to 0 or n_action_steps to {self.chunk_size}"
            )
        width = self.vlm_config.gemma_expert_config.hidden_size
        if self.proj_width != width:
            raise ValueError(
                f"proj_width {self.proj_width} differs from gemma_expert_config.hidden_size {width}"
            )

    def changed(self, **settings: Any) -> "PI07Config":
        """A copy with other settings, shared ones among them.

        To change settings that only `vlm_config` has, pass a new `vlm_config`.
        """
        return replace(self, **settings)

    @classmethod
    def of_file(cls, values: dict[str, Any]) -> dict[str, Any]:
        """`n_obs_history` was the number of frames that a policy sees, null for one; `n_obs_steps`
        was only the most that its tower can take. A `history_interval` of null was 1.
        """
        if "n_obs_history" in values:
            frames = values.pop("n_obs_history")
            if frames is not None and (type(frames) is not int or frames < 1):
                raise ValueError(
                    f"n_obs_history is {shown(frames)}; it must be at least 1, or null"
                )
            values["n_obs_steps"] = frames or 1
            logger.info(
                "n_obs_history %s of an older OpenTau is read as n_obs_steps %s",
                "null" if frames is None else frames,
                values["n_obs_steps"],
            )
        if values.get("history_interval", 1) is None:
            values["history_interval"] = 1
            logger.info("history_interval null of an older OpenTau is read as 1")
        return super().of_file(values)


@checked
class PI07PlannerConfig(PolicyConfig):
    """The planner: one frame, no history, no actions."""

    n_obs_steps: Literal[1] = 1
    normalization_mapping: Modes = field(
        default_factory=lambda: {"VISUAL": "IDENTITY", "STATE": "MEAN_STD"}
    )
    memory_max_length: _Tokens = 52
    """tokens to which the planner's memories are padded or cut"""
    subtask_indicator_max_length: _Tokens | None = None
    """tokens of the label `Subtask: `; None for what the tokenizer gives"""
    memory_indicator_max_length: _Tokens | None = None
    """tokens of the label `Updated Memory: `; None for what the tokenizer gives"""

    type_name: ClassVar[str] = PLANNER_TYPE
    # It has no discrete actions.
    inert_keys: ClassVar[frozenset[str]] = PolicyConfig.inert_keys | {
        "discrete_action_tokenizer_path"
    }
    engine_defaults: ClassVar[dict[str, Any]] = {"disable_action_expert": True}
    # It has no projections of states and actions, and no past frames.
    per_group_projection: ClassVar[bool] = False
    spacetime_layer_stride: ClassVar[int] = 1
