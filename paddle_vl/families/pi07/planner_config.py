"""Configuration of pi07's high-level planner, under OpenTau's field names."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paddle_vl.families.pi07.config import (
    ATTENTION_IMPLEMENTATIONS,
    CURRENT_CONFIG_VERSION,
    SETTING_RANGES,
    check_groups,
)
from paddle_vl.families.pi07.config_files import (
    known_values,
    read_config,
    without_defaults,
    write_config,
    written_values,
)
from paddle_vl.families.pi07.engine_config import Gemma3WithExpertConfig, check_training
from paddle_vl.families.pi07.features import PolicyFeature, check_normalization
from paddle_vl.files.checked_values import check_mapping, check_values

PLANNER_TYPE = "pi07_high_level"
# Settings that stand in `vlm_config` too, with their defaults.
_SHARED = {
    "attention_implementation": "eager",
    "dropout": 0.1,
    "freeze_vision_encoder": True,
    "gradient_checkpointing": False,
}


def _engine_without_expert() -> Gemma3WithExpertConfig:
    return Gemma3WithExpertConfig(disable_action_expert=True)


def _default_normalization() -> dict[str, str]:
    return {"VISUAL": "IDENTITY", "STATE": "MEAN_STD"}


@dataclass(frozen=True)
class PI07PlannerConfig:
    """The planner: what it reads and writes, in tokens.

    Attributes:
        n_obs_steps: 1, it sees no history.
        memory_max_length, response_max_length: tokens that it writes at most, BOS among them.
        subtask_indicator_max_length, memory_indicator_max_length: tokens of the labels
            `Subtask: ` and `Updated Memory: `; None takes what the tokenizer gives.
        input_features and what else is not said here: as in `PI07Config`; None for
            `resize_imgs_with_padding` is the tower's image.
    """

    vlm_config: Gemma3WithExpertConfig = field(default_factory=_engine_without_expert)
    n_obs_steps: int = 1
    input_features: dict[str, PolicyFeature] = field(default_factory=dict)
    output_features: dict[str, PolicyFeature] = field(default_factory=dict)
    normalization_mapping: dict[str, str] = field(default_factory=_default_normalization)
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

    # The planner has no projections, so none for groups.
    per_group_projection = False

    def __post_init__(self):
        check_values(self, "", SETTING_RANGES)
        check_groups(self)
        if self.n_obs_steps != 1:
            raise ValueError(f"n_obs_steps is {self.n_obs_steps}; the planner sees one frame only")
        settled = {}
        for name, default in _SHARED.items():
            own, engine = getattr(self, name), getattr(self.vlm_config, name)
            if None not in (own, engine) and own != engine:
                raise ValueError(
                    f"{name} is {own} in the planner's configuration and {engine} in vlm_config: "
                    "give one of them, or the same value twice"
                )
            settled[name] = next((v for v in (own, engine) if v is not None), default)
        for name, value in settled.items():
            object.__setattr__(self, name, value)
        if self.attention_implementation not in ATTENTION_IMPLEMENTATIONS:
            raise ValueError(
                f"attention_implementation is {self.attention_implementation!r}; choose one of "
                f"{', '.join(ATTENTION_IMPLEMENTATIONS)}"
            )
        object.__setattr__(self, "vlm_config", replace(self.vlm_config, **settled))
        object.__setattr__(self, "optimizer_betas", tuple(self.optimizer_betas))
        self._check_images()
        check_training(self.vlm_config)
        check_normalization(self.normalization_mapping)
        if self.config_version not in (None, 0, CURRENT_CONFIG_VERSION):
            raise ValueError(
                f"config_version is {self.config_version!r}; this package knows 0 and "
                f"{CURRENT_CONFIG_VERSION}: a newer checkpoint needs a newer package"
            )

    @classmethod
    def from_pretrained(cls, path: str | Path) -> "PI07PlannerConfig":
        """Read the configuration of a model folder, or a JSON file.

        Raises:
            RuntimeError: there is none, or it is damaged.
            ValueError: it is not a planner's, naming what is wrong.
        """
        file, values = read_config(path)
        try:
            return cls.from_dict(values)
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from error

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "PI07PlannerConfig":
        """From the content of config.json.

        Raises:
            ValueError: unknown or contradictory settings, named.
        """
        values = check_mapping(values, "the configuration")
        vlm = values.get("vlm_config")
        vlm = None if vlm is None else check_mapping(vlm, "vlm_config")
        if vlm and "model_type" in vlm:
            values, vlm = without_defaults(values, _SHARED), without_defaults(vlm, _SHARED)
        own = known_values(cls, values, PLANNER_TYPE)
        # null stands for the default, as in the policy's.
        own.pop("vlm_config", None)
        if vlm is not None:
            own["vlm_config"] = Gemma3WithExpertConfig.from_dict(
                {"disable_action_expert": True} | dict(vlm)
            )
        return cls(**own)

    def to_dict(self) -> dict[str, Any]:
        """The content of config.json in the original's form."""
        return written_values(self, PLANNER_TYPE)

    def save_pretrained(self, path: str | Path) -> None:
        """Write `config.json` into a folder."""
        write_config(path, self.to_dict())

    @property
    def num_groups(self) -> int:
        """Groups of data with statistics of their own."""
        return max(1, len(self.dataset_names or ()))

    @property
    def normalization_version(self) -> int:
        """The convention that is computed by."""
        version = self.config_version
        return CURRENT_CONFIG_VERSION if version is None else version

    def _check_images(self) -> None:
        side = self.vlm_config.gemma3_config.vision_config.image_size
        size = tuple(self.resize_imgs_with_padding or (side, side))
        object.__setattr__(self, "resize_imgs_with_padding", size)
        if size != (side, side):
            raise ValueError(
                f"resize_imgs_with_padding {size} differs from the image of the tower, "
                f"vision_config.image_size {side}: set it to ({side}, {side})"
            )
