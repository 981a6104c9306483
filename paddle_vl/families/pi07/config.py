"""Configuration of pi07's low-level policy, under the field names and defaults of OpenTau.

A policy's configuration holds `vlm_config`, the engine's, which holds the two towers'. Some
settings stand at both levels; the original lets several of the policy's have no effect. Here a
setting that is given at one level holds for both, and given at both it must be the same. A file
that OpenTau wrote holds every setting whether anyone gave it or not: there, a level that has the
default has said nothing.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paddle_vl.families.pi07.config_files import (
    known_values,
    read_config,
    without_defaults,
    write_config,
    written_values,
)
from paddle_vl.families.pi07.engine_config import (
    Gemma3Config,
    Gemma3TextConfig,
    Gemma3WithExpertConfig,
    GemmaExpertConfig,
    SiglipVisionConfig,
    check_training,
)
from paddle_vl.families.pi07.features import PolicyFeature, check_normalization
from paddle_vl.files.checked_values import Range, check_mapping, check_values
from paddle_vl.files.json_file import shown

__all__ = [
    "SHARED_SETTINGS",
    "Gemma3Config",
    "Gemma3TextConfig",
    "Gemma3WithExpertConfig",
    "GemmaExpertConfig",
    "PI07Config",
    "SiglipVisionConfig",
]
logger = logging.getLogger(__name__)

POLICY_TYPE = "pi07_low_level"
CURRENT_CONFIG_VERSION = 1
# Settings that stand in the policy's configuration and in `vlm_config`, with their defaults.
SHARED_SETTINGS: dict[str, Any] = {
    "attention_implementation": "eager",
    "dropout": 0.1,
    "freeze_vision_encoder": True,
    "train_expert_only": False,
    "train_state_action_representation_only": False,
    "gradient_checkpointing": False,
}
ATTENTION_IMPLEMENTATIONS = ("eager", "sdpa")
_STEPS, _DIMS, _TOKENS = Range(1, 10_000), Range(1, 1 << 16), Range(1, 1 << 17)
# What is beyond them is a slip of the hand, and would take all memory before anything could tell.
SETTING_RANGES = {
    # Beyond 40 past frames the original has no time embedding.
    "n_obs_steps": Range(1, 41),
    "history_interval": _STEPS,
    "chunk_size": _STEPS,
    "n_action_steps": _STEPS,
    "num_steps": _STEPS,
    "max_delay": Range(0, 10_000),
    "max_state_dim": _DIMS,
    "max_action_dim": _DIMS,
    "proj_width": Range(1, 1 << 20),
    "prompt_max_length": _TOKENS,
    "response_max_length": _TOKENS,
    "memory_max_length": _TOKENS,
    "metadata_max_length": _TOKENS,
    "subtask_indicator_max_length": _TOKENS,
    "memory_indicator_max_length": _TOKENS,
    "discrete_action_max_length": _TOKENS,
    "resize_imgs_with_padding": Range(1, 1 << 14),
    "empty_cameras": Range(0, 64),
    "spacetime_layer_stride": Range(1, 1024),
    "optimizer_lr": Range(0),
    "optimizer_betas": Range(0, 1),
    "optimizer_eps": Range(0),
    "optimizer_weight_decay": Range(0),
    "scheduler_warmup_steps": Range(0),
    "scheduler_decay_steps": Range(0),
    "scheduler_decay_lr": Range(0),
    "warn_outlier_threshold": Range(0),
}


def check_groups(config: Any) -> None:
    """Refuse names and rows of groups that do not tell one from another.

    Raises:
        ValueError: naming the entry.
    """
    names, rows = config.dataset_names, config.dataset_to_norm_index
    if names is not None and (not names or len(set(names)) < len(names)):
        raise ValueError(f"dataset_names is {shown(names)}; each group must be there once")
    for name, row in (rows or {}).items():
        if type(row) is not int or not 0 <= row < config.num_groups:
            raise ValueError(
                f"dataset_to_norm_index of {name!r} is {shown(row)}; it must be a row of the "
                f"statistics, from 0 to {config.num_groups - 1}"
            )


def _default_normalization() -> dict[str, str]:
    return {"VISUAL": "IDENTITY", "STATE": "MEAN_STD", "ACTION": "MEAN_STD"}


@dataclass(frozen=True)
class PI07Config:
    """The low-level policy.

    Attributes:
        vlm_config: the engine. The settings of `SHARED_SETTINGS` have the same value there.
        n_obs_steps: frames of an observation, the current one included.
        history_interval: environment steps between two of them.
        chunk_size: actions that the model predicts at once.
        n_action_steps: how many of them are executed before it predicts anew.
        input_features, output_features: the data's features by name.
        normalization_mapping: for STATE, ACTION and VISUAL: MEAN_STD, MIN_MAX, QUANTILE, IDENTITY.
        resize_imgs_with_padding: (height, width) of the images that the tower sees.
        empty_cameras: how many cameras may be absent from a batch.
        *_max_length: tokens, to which the texts and the discrete actions are padded or cut.
        discrete_action_tokenizer_path: folder of the FAST tokenizer, or a name on the hub, which
            is not fetched.
        proj_width: width of the action rows; the expert's `hidden_size`.
        per_group_projection: state and action projections of their own for each group of data.
        num_steps: Euler steps from noise to actions.
        max_delay: actions of the previous chunk that may still run while the next is computed.
        knowledge_insulation: the action loss does not train the backbone.
        spacetime_layer_stride: every so-manieth layer of the tower looks back in time.
        warn_outlier_threshold: normalised values beyond it are warned of in training; 0 for never.
        dataset_names: the groups of the statistics, in the order of their rows.
        dataset_to_norm_index: row by name of the data set that a group consists of.
        config_version: of the normalisation's convention; None before it is settled, which
            computes as the current one.
        skip_normalization_weights: loading leaves a checkpoint's statistics out.
        save_normalization_stats: saving writes the statistics.
    """

    vlm_config: Gemma3WithExpertConfig = field(default_factory=Gemma3WithExpertConfig)
    n_obs_steps: int = 6
    history_interval: int = 1
    chunk_size: int = 50
    n_action_steps: int = 50
    input_features: dict[str, PolicyFeature] = field(default_factory=dict)
    output_features: dict[str, PolicyFeature] = field(default_factory=dict)
    normalization_mapping: dict[str, str] = field(default_factory=_default_normalization)
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

    def __post_init__(self):
        check_values(self, "", SETTING_RANGES)
        check_groups(self)
        for name in ("resize_imgs_with_padding", "optimizer_betas"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        self._settle_shared()
        check_training(self.vlm_config)
        self._check_ranges()
        self._check_horizon()
        self._check_engine()
        check_normalization(self.normalization_mapping)

    @classmethod
    def from_pretrained(cls, path: str | Path) -> "PI07Config":
        """Read the configuration of a model folder, or a JSON file.

        Raises:
            RuntimeError: there is none, or it is damaged.
            ValueError: it is not a pi07 policy's, naming what is wrong.
        """
        file, values = read_config(path)
        try:
            return cls.from_dict(values)
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from error

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "PI07Config":
        """From the content of config.json.

        Raises:
            ValueError: another policy's type, unknown keys, contradictory settings, named.
        """
        values = check_mapping(values, "the configuration")
        vlm = check_mapping(values.get("vlm_config"), "vlm_config")
        if "model_type" in vlm:
            values = without_defaults(values, SHARED_SETTINGS)
            vlm = without_defaults(vlm, SHARED_SETTINGS)
        own = known_values(cls, values, POLICY_TYPE)
        return cls(**own | {"vlm_config": Gemma3WithExpertConfig.from_dict(vlm)})

    def to_dict(self) -> dict[str, Any]:
        """The content of config.json in the original's form."""
        return written_values(self, POLICY_TYPE)

    def save_pretrained(self, path: str | Path) -> None:
        """Write `config.json` into a folder."""
        write_config(path, self.to_dict())

    def changed(self, **settings: Any) -> "PI07Config":
        """The same configuration with other settings, shared ones at both levels.

        `discrete_action_vocab_size` and other settings of `vlm_config` alone are given in a whole
        `vlm_config`.
        """
        shared = {name: settings[name] for name in SHARED_SETTINGS if name in settings}
        vlm = replace(settings.pop("vlm_config", self.vlm_config), **shared)
        return replace(self, **settings, vlm_config=vlm)

    @property
    def obs_buffer_size(self) -> int:
        """Environment steps that must be remembered to make up an observation."""
        return (self.n_obs_steps - 1) * self.history_interval + 1

    @property
    def num_groups(self) -> int:
        """Groups of data with statistics, and maybe projections, of their own."""
        return max(1, len(self.dataset_names or ()))

    @property
    def normalization_version(self) -> int:
        """The convention that is computed by."""
        version = self.config_version
        return CURRENT_CONFIG_VERSION if version is None else version

    def _settle_shared(self) -> None:
        settled = {}
        for name, default in SHARED_SETTINGS.items():
            own, engine = getattr(self, name), getattr(self.vlm_config, name)
            if None not in (own, engine) and own != engine:
                raise ValueError(
                    f"{name} is {own} in the policy's configuration and {engine} in vlm_config: "
                    "give one of them, or the same value twice"
                )
            settled[name] = next((v for v in (own, engine) if v is not None), default)
        if settled["attention_implementation"] == "fa2":
            logger.warning("attention_implementation fa2 computes as eager, as in the original")
            settled["attention_implementation"] = "eager"
        for name, value in settled.items():
            object.__setattr__(self, name, value)
        object.__setattr__(self, "vlm_config", replace(self.vlm_config, **settled))

    def _check_ranges(self) -> None:
        if self.attention_implementation not in ATTENTION_IMPLEMENTATIONS:
            raise ValueError(
                f"attention_implementation is {self.attention_implementation!r}; choose one of "
                f"{', '.join(ATTENTION_IMPLEMENTATIONS)}"
            )
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout is {self.dropout}; it must be in [0, 1)")
        if self.config_version not in (None, 0, CURRENT_CONFIG_VERSION):
            raise ValueError(
                f"config_version is {self.config_version!r}; this package knows 0 and "
                f"{CURRENT_CONFIG_VERSION}: a newer checkpoint needs a newer package"
            )

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

    def _check_engine(self) -> None:
        width = self.vlm_config.gemma_expert_config.hidden_size
        if self.proj_width != width:
            raise ValueError(
                f"proj_width {self.proj_width} differs from gemma_expert_config.hidden_size {width}"
            )
        side = self.vlm_config.gemma3_config.vision_config.image_size
        if self.resize_imgs_with_padding != (side, side):
            raise ValueError(
                f"resize_imgs_with_padding {self.resize_imgs_with_padding} differs from the image "
                f"of the tower, vision_config.image_size {side}: set it to ({side}, {side})"
            )
