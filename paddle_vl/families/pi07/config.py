"""Configurations of pi07's low-level policy and planner; fields and defaults are OpenTau's.

See `policy_config.py` for what both share, and for settings at two levels.
"""

import logging
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from paddle_vl.families.pi07.engine_config import (
    Gemma3Config,
    Gemma3TextConfig,
    Gemma3WithExpertConfig,
    GemmaExpertConfig,
    SiglipVisionConfig,
)
from paddle_vl.families.pi07.policy_config import (
    CURRENT_CONFIG_VERSION,
    PolicyConfig,
    PolicyFeature,
)

__all__ = [
    "CURRENT_CONFIG_VERSION",
    "PLANNER_TYPE",
    "Gemma3Config",
    "Gemma3TextConfig",
    "Gemma3WithExpertConfig",
    "GemmaExpertConfig",
    "PI07Config",
    "PI07PlannerConfig",
    "PolicyFeature",
    "SiglipVisionConfig",
]
logger = logging.getLogger(__name__)

POLICY_TYPE, PLANNER_TYPE = "pi07_low_level", "pi07_high_level"


def _policy_normalization() -> dict[str, str]:
    return {"VISUAL": "IDENTITY", "STATE": "MEAN_STD", "ACTION": "MEAN_STD"}


def _planner_normalization() -> dict[str, str]:
    return {"VISUAL": "IDENTITY", "STATE": "MEAN_STD"}


@dataclass(frozen=True)
class PI07Config(PolicyConfig):
    """The low-level policy.

    Attributes:
        vlm_config: the engine. The `shared_settings` have the same value there.
        n_obs_steps: frames of an observation, the current one included.
        history_interval: environment steps between two frames.
        chunk_size: actions that the model predicts at once.
        n_action_steps: actions that are executed before the next prediction.
        input_features, output_features: features of the data by name.
        normalization_mapping: MEAN_STD, MIN_MAX, QUANTILE or IDENTITY for STATE, ACTION and VISUAL.
        max_state_dim, max_action_dim: dims to which states and actions are padded.
        resize_imgs_with_padding: (height, width) of the tower's images, in pixels.
        empty_cameras: number of cameras that a batch may lack.
        prompt_max_length, response_max_length, metadata_max_length, discrete_action_max_length:
            tokens to which texts and discrete actions are padded or cut.
        discrete_action_tokenizer_path: folder of the FAST tokenizer, or a name on the hub, which
            is not fetched.
        proj_width: width of the action rows; equal to the expert's `hidden_size`.
        num_steps: Euler steps from noise to actions.
        max_delay: actions of the previous chunk that may still run while the next is computed.
        per_group_projection: each group of data has its own state and action projections.
        knowledge_insulation: the action loss does not train the backbone.
        spacetime_layer_stride: every N-th vision layer attends over past frames.
        optimizer_*, scheduler_*: OpenTau's, only read and written back; a run uses `train.*`.
        warn_outlier_threshold: absolute value of normalized training data that logs a warning; 0
            for never.
        dataset_names: the groups of the statistics, in the order of their rows.
        dataset_to_norm_index: row of the statistics by name of a data set.
        config_version: version of the normalization convention; None for the current one.
        skip_normalization_weights: do not load a checkpoint's statistics.
        save_normalization_stats: save the statistics.
        other: settings of the file without effect, written back unchanged.
    """

    vlm_config: Gemma3WithExpertConfig = field(default_factory=Gemma3WithExpertConfig)
    n_obs_steps: int = 6
    history_interval: int = 1
    chunk_size: int = 50
    n_action_steps: int = 50
    input_features: dict[str, PolicyFeature] = field(default_factory=dict)
    output_features: dict[str, PolicyFeature] = field(default_factory=dict)
    normalization_mapping: dict[str, str] = field(default_factory=_policy_normalization)
    max_state_dim: int = 32
    max_action_dim: int = 32
    resize_imgs_with_padding: tuple[int, int] = (448, 448)
    empty_cameras: int = 0
    prompt_max_length: int = 256
    response_max_length: int = 52
    metadata_max_length: int = 52
    discrete_action_max_length: int = 32
    discrete_action_tokenizer_path: str = "physical-intelligence/fast"
    proj_width: int = 1280
    num_steps: int = 5
    max_delay: int = 0
    per_group_projection: bool = False
    knowledge_insulation: bool = True
    spacetime_layer_stride: int = 4
    attention_implementation: str | None = None
    dropout: float | None = None
    freeze_vision_encoder: bool | None = None
    train_expert_only: bool | None = None
    train_state_action_representation_only: bool | None = None
    gradient_checkpointing: bool | None = None
    optimizer_lr: float = 2.5e-5
    optimizer_betas: tuple[float, float] = (0.9, 0.95)
    optimizer_eps: float = 1e-8
    optimizer_weight_decay: float = 1e-10
    scheduler_warmup_steps: int = 1_000
    scheduler_decay_steps: int = 30_000
    scheduler_decay_lr: float = 2.5e-6
    warn_outlier_threshold: float = 32.0
    dataset_names: list[str] | None = None
    dataset_to_norm_index: dict[str, int] | None = None
    config_version: int | None = None
    skip_normalization_weights: bool = False
    save_normalization_stats: bool = True
    other: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    policy_type: ClassVar[str] = POLICY_TYPE
    shared_settings: ClassVar[dict[str, Any]] = {
        "attention_implementation": "eager",
        "dropout": 0.1,
        "freeze_vision_encoder": True,
        "train_expert_only": False,
        "train_state_action_representation_only": False,
        "gradient_checkpointing": False,
    }

    def __post_init__(self):
        self.check_common()
        assert self.dropout is not None, "check_common gives it a value"
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout is {self.dropout}; it must be in [0, 1)")
        self._check_horizon()
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

    @property
    def obs_buffer_size(self) -> int:
        """Environment steps to remember for one observation."""
        return (self.n_obs_steps - 1) * self.history_interval + 1

    def _agreed_settings(self) -> dict[str, Any]:
        agreed = super()._agreed_settings()
        if agreed["attention_implementation"] == "fa2":
            logger.warning("attention_implementation fa2 computes as eager, as in OpenTau")
            agreed["attention_implementation"] = "eager"
        return agreed

    def _check_horizon(self) -> None:
        chunk = f"chunk_size {self.chunk_size}"
        if self.n_action_steps > self.chunk_size:
            raise ValueError(f"n_action_steps {self.n_action_steps} exceeds {chunk}")
        if self.max_delay > self.chunk_size:
            raise ValueError(f"max_delay {self.max_delay} exceeds {chunk}")
        if self.n_action_steps < self.chunk_size and self.max_delay:
            raise ValueError(
                f"max_delay {self.max_delay} needs whole chunks to be executed, but n_action_steps "
                f"{self.n_action_steps} is less than {chunk}: set max_delay to 0 or n_action_steps "
                f"to {self.chunk_size}"
            )


def _engine_without_expert() -> Gemma3WithExpertConfig:
    return Gemma3WithExpertConfig(disable_action_expert=True)


@dataclass(frozen=True)
class PI07PlannerConfig(PolicyConfig):
    """The planner. For other attributes see `PI07Config`.

    Attributes:
        n_obs_steps: 1: no history.
        resize_imgs_with_padding: None for the tower's image size.
        memory_max_length, response_max_length: most tokens that it writes, BOS included.
        subtask_indicator_max_length, memory_indicator_max_length: tokens of the labels
            `Subtask: ` and `Updated Memory: `; None for what the tokenizer gives.
    """

    vlm_config: Gemma3WithExpertConfig = field(default_factory=_engine_without_expert)
    n_obs_steps: int = 1
    input_features: dict[str, PolicyFeature] = field(default_factory=dict)
    output_features: dict[str, PolicyFeature] = field(default_factory=dict)
    normalization_mapping: dict[str, str] = field(default_factory=_planner_normalization)
    max_state_dim: int = 32
    resize_imgs_with_padding: tuple[int, int] | None = None
    empty_cameras: int = 0
    prompt_max_length: int = 256
    memory_max_length: int = 52
    response_max_length: int = 52
    metadata_max_length: int = 52
    subtask_indicator_max_length: int | None = None
    memory_indicator_max_length: int | None = None
    attention_implementation: str | None = None
    dropout: float | None = None
    freeze_vision_encoder: bool | None = None
    gradient_checkpointing: bool | None = None
    optimizer_lr: float = 2.5e-5
    optimizer_betas: tuple[float, float] = (0.9, 0.95)
    optimizer_eps: float = 1e-8
    optimizer_weight_decay: float = 1e-10
    scheduler_warmup_steps: int = 1_000
    scheduler_decay_steps: int = 30_000
    scheduler_decay_lr: float = 2.5e-6
    dataset_names: list[str] | None = None
    dataset_to_norm_index: dict[str, int] | None = None
    config_version: int | None = None
    skip_normalization_weights: bool = False
    save_normalization_stats: bool = True
    other: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    # The planner has no projections of states and actions.
    per_group_projection: ClassVar[bool] = False
    policy_type: ClassVar[str] = PLANNER_TYPE
    shared_settings: ClassVar[dict[str, Any]] = {
        "attention_implementation": "eager",
        "dropout": 0.1,
        "freeze_vision_encoder": True,
        "gradient_checkpointing": False,
    }
    engine_defaults: ClassVar[dict[str, Any]] = {"disable_action_expert": True}

    def __post_init__(self):
        self.check_common()
        if self.n_obs_steps != 1:
            raise ValueError(f"n_obs_steps is {self.n_obs_steps}; the planner sees one frame only")
