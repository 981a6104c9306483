"""Base of the configurations of both policies: features, checks, and OpenTau's files.

A policy's configuration contains the engine's as `vlm_config`. Some settings exist at both levels.
A value given at one level applies to both; values given at both must agree. OpenTau writes all
settings, so in its files (which have `model_type`) a default counts as not given.
"""

import json
from collections.abc import Mapping
from dataclasses import Field, dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from paddle_vl.families.pi07.engine_config import Gemma3WithExpertConfig, check_training
from paddle_vl.files.checked_values import Range, check_mapping, check_values
from paddle_vl.files.text_file import read_json_object, shown, write_text

CURRENT_CONFIG_VERSION = 1
FEATURE_TYPES = ("STATE", "VISUAL", "ENV", "ACTION", "REWARD")
NORMALIZATION_MODES = ("MEAN_STD", "MIN_MAX", "QUANTILE", "IDENTITY")
ATTENTION_IMPLEMENTATIONS = ("eager", "sdpa")
# Files with a configuration, in order of preference; in the last two it is a section.
CONFIG_FILES = ("config.json", "train_config.json", "hf_config.json")
_OF_KNOWN_SHAPE = ("STATE", "VISUAL", "ACTION")
_MOST_DIMS = 1 << 16
_STEPS, _DIMS, _TOKENS = Range(1, 10_000), Range(1, _MOST_DIMS), Range(1, 1 << 17)
# Values outside are typing errors, and would exhaust memory before any other check.
SETTING_RANGES = {
    # OpenTau has no time embedding beyond 40 past frames.
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
Config = TypeVar("Config", bound="PolicyConfig")


@dataclass(frozen=True)
class PolicyFeature:
    """One feature of a policy's data.

    Attributes:
        type: one of `FEATURE_TYPES`.
        shape: (channels, height, width) of an image, (dims,) of a vector.
    """

    type: str
    shape: tuple[int, ...]

    def __post_init__(self):
        if self.type not in FEATURE_TYPES:
            raise ValueError(f"feature type {self.type!r} is not one of {', '.join(FEATURE_TYPES)}")
        check_values(self, "", {"shape": _DIMS})
        object.__setattr__(self, "shape", tuple(self.shape))
        num_dims = 3 if self.type == "VISUAL" else 1
        if self.type in _OF_KNOWN_SHAPE and len(self.shape) != num_dims:
            raise ValueError(
                f"shape is {list(self.shape)}; {self.type} has {num_dims} "
                f"{'dims: channels, height, width' if num_dims == 3 else 'dim'}"
            )

    def to_dict(self) -> dict[str, Any]:
        """As in configuration files."""
        return {"type": self.type, "shape": list(self.shape)}


class PolicyConfig:
    """Base of the frozen dataclasses `PI07Config` and `PI07PlannerConfig`.

    Attributes:
        policy_type: `type` in configuration files.
        shared_settings: settings that `vlm_config` has too, with their defaults.
        engine_defaults: defaults of `vlm_config` that differ from the engine's.
    """

    policy_type: ClassVar[str]
    shared_settings: ClassVar[Mapping[str, Any]]
    engine_defaults: ClassVar[Mapping[str, Any]] = {}
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    # Fields of both subclasses, described there.
    vlm_config: Gemma3WithExpertConfig
    input_features: dict[str, PolicyFeature]
    output_features: dict[str, PolicyFeature]
    normalization_mapping: dict[str, str]
    resize_imgs_with_padding: tuple[int, int] | None
    attention_implementation: str | None
    optimizer_betas: tuple[float, float]
    dataset_names: list[str] | None
    dataset_to_norm_index: dict[str, int] | None
    config_version: int | None
    other: dict[str, Any]

    @classmethod
    def from_pretrained(cls: type[Config], path: str | Path) -> Config:
        """Read the configuration of a model folder, or a JSON file.

        Raises:
            RuntimeError: there is none, or it is damaged.
            ValueError: it is another model's, or has a wrong setting; names it.
        """
        file, values = read_config(path)
        try:
            return cls.from_dict(values)
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from error

    @classmethod
    def from_dict(cls: type[Config], values: Mapping[str, Any]) -> Config:
        """From the content of config.json.

        Raises:
            ValueError: another policy's type, unknown keys, or contradictory settings; names them.
        """
        values = check_mapping(values, "the configuration")
        vlm = check_mapping(values.get("vlm_config"), "vlm_config")
        if "model_type" in vlm:
            values = _without_defaults(values, cls.shared_settings)
            vlm = _without_defaults(vlm, cls.shared_settings)
        engine = Gemma3WithExpertConfig.from_dict({**cls.engine_defaults, **vlm})
        return cls(**_known_values(cls, values) | {"vlm_config": engine})

    def to_dict(self) -> dict[str, Any]:
        """The content of config.json, as OpenTau writes it."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "other"}
        values |= {name: list(v) for name, v in values.items() if isinstance(v, tuple)}
        values["vlm_config"] = self.vlm_config.to_dict()
        for name in ("input_features", "output_features"):
            values[name] = {key: feature.to_dict() for key, feature in values[name].items()}
        return {"type": self.policy_type, **self.other, **values}

    def save_pretrained(self, path: str | Path) -> None:
        """Write `config.json` into a folder."""
        text = json.dumps(self.to_dict(), indent=2) + "\n"
        write_text(Path(path) / CONFIG_FILES[0], text)

    @property
    def num_groups(self) -> int:
        """Number of groups of data with statistics of their own."""
        return max(1, len(self.dataset_names or ()))

    @property
    def normalization_version(self) -> int:
        """The normalization convention in use, see `inputs/normalize.py`."""
        version = self.config_version
        return CURRENT_CONFIG_VERSION if version is None else version

    def check_common(self) -> None:
        """Check the settings that both policies have, and set the shared ones at both levels.

        Raises:
            ValueError: a wrong setting; names it and what is needed.
        """
        check_values(self, "", SETTING_RANGES)
        self._check_groups()
        object.__setattr__(self, "optimizer_betas", tuple(self.optimizer_betas))
        shared = self._agreed_settings()
        for name, value in shared.items():
            object.__setattr__(self, name, value)
        object.__setattr__(self, "vlm_config", replace(self.vlm_config, **shared))
        check_training(self.vlm_config)
        if self.attention_implementation not in ATTENTION_IMPLEMENTATIONS:
            raise ValueError(
                f"attention_implementation is {self.attention_implementation!r}; choose one of "
                f"{', '.join(ATTENTION_IMPLEMENTATIONS)}"
            )
        if self.config_version not in (None, 0, CURRENT_CONFIG_VERSION):
            raise ValueError(
                f"config_version is {self.config_version!r}; this package knows 0 and "
                f"{CURRENT_CONFIG_VERSION}: a newer checkpoint needs a newer package"
            )
        side = self.vlm_config.gemma3_config.vision_config.image_size
        size = tuple(self.resize_imgs_with_padding or (side, side))
        object.__setattr__(self, "resize_imgs_with_padding", size)
        if size != (side, side):
            raise ValueError(
                f"resize_imgs_with_padding {size} differs from the image of the tower, "
                f"vision_config.image_size {side}: set it to ({side}, {side})"
            )
        check_normalization(self.normalization_mapping)

    def _agreed_settings(self) -> dict[str, Any]:
        """The shared settings, from either level or their defaults."""
        found = {}
        for name, default in self.shared_settings.items():
            own, engine = getattr(self, name), getattr(self.vlm_config, name)
            if None not in (own, engine) and own != engine:
                raise ValueError(
                    f"{name} is {own} in the policy's configuration and {engine} in vlm_config: "
                    "give one of them, or the same value twice"
                )
            found[name] = next((v for v in (own, engine) if v is not None), default)
        return found

    def _check_groups(self) -> None:
        names, rows = self.dataset_names, self.dataset_to_norm_index
        if names is not None and (not names or len(set(names)) < len(names)):
            raise ValueError(f"dataset_names is {shown(names)}; each group must be there once")
        for name, row in (rows or {}).items():
            if type(row) is not int or not 0 <= row < self.num_groups:
                raise ValueError(
                    f"dataset_to_norm_index of {name!r} is {shown(row)}; it must be a row of the "
                    f"statistics, from 0 to {self.num_groups - 1}"
                )


def read_config(path: str | Path) -> tuple[Path, dict[str, Any]]:
    """File and content of the configuration in a policy's folder, or of a JSON file.

    Raises:
        RuntimeError: there is none, or it is damaged.
    """
    path = Path(path)
    candidates = [path / name for name in CONFIG_FILES] if path.is_dir() else [path]
    file = next((file for file in candidates if file.is_file()), None)
    if file is None:
        raise RuntimeError(
            f"{path} has no configuration: none of {', '.join(f.name for f in candidates)}"
        )
    values = read_json_object(file, "a policy's configuration")
    if isinstance(values.get("policy"), dict):
        values = values["policy"]
    return file, values


def check_normalization(mapping: Mapping[str, str]) -> None:
    """Refuse unknown normalization modes and feature types.

    Raises:
        ValueError: names the entry and the choices.
    """
    for kind, mode in mapping.items():
        if kind not in FEATURE_TYPES:
            raise ValueError(
                f"normalization_mapping has {kind!r}; feature types are {', '.join(FEATURE_TYPES)}"
            )
        if mode not in NORMALIZATION_MODES:
            raise ValueError(
                f"normalization_mapping of {kind} is {mode!r}; choose one of "
                f"{', '.join(NORMALIZATION_MODES)}"
            )


def _known_values(cls: type[PolicyConfig], values: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a file as arguments of `cls`, keys without effect in `other`."""
    values, kind = {n: v for n, v in values.items() if n != "other"}, cls.policy_type
    if (found := values.get("type", kind)) != kind:
        raise ValueError(f"type is {found!r}; this configuration reads {kind!r}")
    for name, only in ONLY_VALUES.items():
        if (found := values.pop(name, only)) != only:
            raise ValueError(f"{name} is {found!r}, which is not supported; it must be {only}")
    names = {f.name for f in fields(cls)}
    if unknown := sorted(set(values) - names - UNUSED_SETTINGS):
        raise ValueError(
            f"the configuration has keys that {kind} does not know: {unknown}; correct or remove "
            "them"
        )
    for name in ("input_features", "output_features"):
        features = check_mapping(values.get(name), name)
        values[name] = {key: _feature(key, f) for key, f in features.items()}
    other = {name: value for name, value in values.items() if name not in names}
    return {n: v for n, v in values.items() if n in names} | {"other": other}


def _feature(name: str, values: Mapping[str, Any] | PolicyFeature) -> PolicyFeature:
    if isinstance(values, PolicyFeature):
        return values
    if not isinstance(values, Mapping) or set(values) != {"type", "shape"}:
        raise ValueError(f"feature {name!r} is {values!r}; it needs a type and a shape")
    try:
        return PolicyFeature(**values)
    except ValueError as error:
        raise ValueError(f"feature {name!r}: {error}") from error


def _without_defaults(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Settings without those that have their default."""
    return {
        name: value
        for name, value in values.items()
        if name not in defaults or value != defaults[name]
    }
