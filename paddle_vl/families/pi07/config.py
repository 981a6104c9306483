"""Configurations of pi07's low-level policy and planner; fields and defaults are OpenTau's.

A policy's configuration contains the engine's as `vlm_config`. Some settings exist at both levels.
A value given at one level applies to both; values given at both must agree. OpenTau writes all
settings, so in its files (which have `model_type`) a default counts as not given.

Over 350 lines, since every field has its type, range, default and meaning here.
"""

import logging
from collections.abc import Mapping
from dataclasses import field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BeforeValidator, Field

from paddle_vl.families.pi07.engine_config import ConfigSection, Gemma3WithExpertConfig
from paddle_vl.families.policy.features import (
    CONFIG_FILES,
    CURRENT_CONFIG_VERSION,
    MOST_DIMS,
    PolicyFeature,
    check_normalization,
    read_config,
)
from paddle_vl.files.checked_values import Listed, Number, Part, SavedConfig, check_mapping, checked
from paddle_vl.files.text_file import shown

logger = logging.getLogger(__name__)

PLANNER_TYPE = "pi07_high_level"
Config = TypeVar("Config", bound="PolicyConfig")
# Values outside are typing errors, and would exhaust memory before any other check.
_Steps = Annotated[int, Field(ge=1, le=10_000)]
_Dims = Annotated[int, Field(ge=1, le=MOST_DIMS)]
_Tokens = Annotated[int, Field(ge=1, le=1 << 17)]
_Pixels = Annotated[int, Field(ge=1, le=1 << 14)]
_ImageSize = Listed[tuple[_Pixels, _Pixels]]
_NotNegative = Annotated[Number, Field(ge=0)]
_Features = Annotated[
    dict[str, Part[PolicyFeature]], BeforeValidator(lambda values: {} if values is None else values)
]
# OpenTau's settings that would change the results; only these values are supported.
ONLY_VALUES = {"accel_prefix": None, "n_candidates": 1, "action_chunk_critic_path": None}
# OpenTau's settings without effect here: how it runs and where it publishes.
UNUSED_SETTINGS = frozenset(
    """
    action_decoder_latency_lower action_decoder_latency_mean action_decoder_latency_std
    action_decoder_latency_upper cloud_vlm_latency_lower cloud_vlm_latency_mean
    cloud_vlm_latency_std cloud_vlm_latency_upper compile_mode compile_model device init_strategy
    license opentau_version pretrained_path private push_to_hub repo_id
    skip_input_resolution_check tags torch_compile_mode type use_amp use_peft use_torch_compile
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


@checked
class PolicyConfig(ConfigSection, SavedConfig):
    """What policy and planner have in common.

    Attributes:
        shared_settings: settings that `vlm_config` has too, with their defaults.
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
    normalization_mapping: dict[str, str] = field(
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
    attention_implementation: Literal["eager", "sdpa"] | None = None
    """softmax in float32 over all keys (eager), or masked keys left out (sdpa)"""
    dropout: Annotated[Number, Field(ge=0, lt=1)] | None = None
    """dropout probability after attention and MLP of both streams"""
    freeze_vision_encoder: bool | None = None
    """do not train the vision tower (the projector is trained)"""
    gradient_checkpointing: bool | None = None
    """activation recomputation; true does what train.recompute=full does"""
    # OpenTau's optimizer, only read and written back; a run uses `train.*`.
    optimizer_lr: _NotNegative = 2.5e-5
    optimizer_betas: Listed[
        tuple[Annotated[Number, Field(ge=0, le=1)], Annotated[Number, Field(ge=0, le=1)]]
    ] = (0.9, 0.95)
    optimizer_eps: _NotNegative = 1e-8
    optimizer_weight_decay: _NotNegative = 1e-10
    scheduler_warmup_steps: Annotated[int, Field(ge=0)] = 1_000
    scheduler_decay_steps: Annotated[int, Field(ge=0)] = 30_000
    scheduler_decay_lr: _NotNegative = 2.5e-6
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
    inert_keys: ClassVar[frozenset[str]] = UNUSED_SETTINGS
    engine_defaults: ClassVar[dict[str, Any]] = {}
    shared_settings: ClassVar[dict[str, Any]] = {
        "attention_implementation": "eager",
        "dropout": 0.1,
        "freeze_vision_encoder": True,
        "gradient_checkpointing": False,
    }

    def __post_init__(self):
        shared = {}
        for name, default in self.shared_settings.items():
            own, engine = getattr(self, name), getattr(self.vlm_config, name)
            if None not in (own, engine) and own != engine:
                raise ValueError(
                    f"{name} is {own} in the policy's configuration and {engine} in vlm_config: "
                    "give one of them, or the same value twice"
                )
            shared[name] = next((v for v in (own, engine) if v is not None), default)
        engine = replace(self.vlm_config, **shared)
        side = engine.gemma3_config.vision_config.image_size
        size = self.resize_imgs_with_padding or (side, side)
        derived = shared | {"vlm_config": engine, "resize_imgs_with_padding": size}
        for name, value in derived.items():
            object.__setattr__(self, name, value)
        if size != (side, side):
            raise ValueError(
                f"resize_imgs_with_padding {size} differs from the image of the tower, "
                f"vision_config.image_size {side}: set it to ({side}, {side})"
            )
        for first, how, second in _CONTRADICTIONS:
            if getattr(engine, first) and bool(getattr(engine, second)) == (how == "with"):
                raise ValueError(
                    f"{first} {how} {second}: these settings contradict each other; set {first} to "
                    f"False or {second} to {how != 'with'}"
                )
        if self.config_version not in (None, 0, CURRENT_CONFIG_VERSION):
            raise ValueError(
                f"config_version is {self.config_version!r}; this package knows 0 and "
                f"{CURRENT_CONFIG_VERSION}: a newer checkpoint needs a newer package"
            )
        check_normalization(self.normalization_mapping)
        for name, feature in self.input_features.items():
            if feature.type == "STATE" and feature.shape[0] > self.max_state_dim:
                raise ValueError(
                    f"input_features: {name} has {feature.shape[0]} dims; a state has at most "
                    f"max_state_dim {self.max_state_dim}"
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
            if (found := values.pop(name, only)) != only:
                raise ValueError(f"{name} is {found!r}, which is not supported; it must be {only}")
        vlm, shared = values.get("vlm_config") or {}, cls.shared_settings
        if isinstance(vlm, Mapping):
            if "model_type" in vlm:
                values, vlm = (
                    {n: v for n, v in level.items() if n not in shared or v != shared[n]}
                    for level in (values, vlm)
                )
            values["vlm_config"] = vlm = {**cls.engine_defaults, **vlm}
        for level in (values, vlm):
            if isinstance(level, dict) and level.get("attention_implementation") == "fa2":
                logger.warning("attention_implementation fa2 computes as eager, as in OpenTau")
                level["attention_implementation"] = "eager"
        return values

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
    """folder of the FAST tokenizer, or a name on the hub, which is not fetched"""
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
    train_expert_only: bool | None = None
    """do not train the backbone, its heads and the tower"""
    train_state_action_representation_only: bool | None = None
    """train only the projections of states and actions, and the discrete actions' embedding and
    head"""
    warn_outlier_threshold: _NotNegative = 32.0
    """absolute value of normalized training data that logs a warning; 0 for never"""

    type_name: ClassVar[str] = "pi07_low_level"
    shared_settings: ClassVar[dict[str, Any]] = PolicyConfig.shared_settings | {
        "train_expert_only": False,
        "train_state_action_representation_only": False,
    }

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
        """A copy with other settings; shared ones change at both levels.

        To change settings that only `vlm_config` has, pass a new `vlm_config`.
        """
        shared = {name: settings[name] for name in self.shared_settings if name in settings}
        vlm = replace(settings.pop("vlm_config", self.vlm_config), **shared)
        return replace(self, **settings, vlm_config=vlm)

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
    normalization_mapping: dict[str, str] = field(
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
    inert_keys: ClassVar[frozenset[str]] = UNUSED_SETTINGS | {"discrete_action_tokenizer_path"}
    engine_defaults: ClassVar[dict[str, Any]] = {"disable_action_expert": True}
    # It has no projections of states and actions, and no past frames.
    per_group_projection: ClassVar[bool] = False
    spacetime_layer_stride: ClassVar[int] = 1
