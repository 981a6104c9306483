"""Features of a policy's data, and what shared code asks of a policy's configuration."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol, get_args

from pydantic import Field

from paddle_vl.files.checked_values import Listed, checked
from paddle_vl.files.text_file import read_json_object

CURRENT_CONFIG_VERSION = 1
FeatureType = Literal["STATE", "VISUAL", "ENV", "ACTION", "REWARD"]
NormalizationMode = Literal["MEAN_STD", "MIN_MAX", "QUANTILE", "IDENTITY"]
MOST_DIMS = 1 << 16
# Files with a configuration, in order of preference; in the last two it is a section.
CONFIG_FILES = ("config.json", "train_config.json", "hf_config.json")
_DIMS_OF = {"STATE": "1 dim", "ACTION": "1 dim", "VISUAL": "3 dims: channels, height, width"}


@checked
class PolicyFeature:
    """One feature of a policy's data."""

    type: FeatureType
    shape: Listed[tuple[Annotated[int, Field(ge=1, le=MOST_DIMS)], ...]]
    """(channels, height, width) of an image, (dims,) of a vector"""

    def __post_init__(self):
        dims = _DIMS_OF.get(self.type, "")
        if dims and len(self.shape) != int(dims[0]):
            raise ValueError(f"shape is {list(self.shape)}; {self.type} has {dims}")

    def to_dict(self) -> dict[str, Any]:
        """As in configuration files."""
        return {"type": self.type, "shape": list(self.shape)}


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
        for name, choices in ((kind, get_args(FeatureType)), (mode, get_args(NormalizationMode))):
            if name not in choices:
                raise ValueError(
                    f"normalization_mapping has {kind!r}: {mode!r}; choose one of "
                    f"{', '.join(choices)}"
                )


def cameras_of(features: Mapping[str, PolicyFeature]) -> list[str]:
    """Names of the image features."""
    return [name for name, feature in features.items() if feature.type == "VISUAL"]


class ObservingConfig(Protocol):
    """Configuration of what a policy or a planner observes, under OpenTau's names.

    Attributes:
        dataset_names: groups of the statistics in the order of their rows; None without names.
        dataset_to_norm_index: row by data set; None where the names are those of data sets.
    """

    @property
    def input_features(self) -> Any: ...
    @property
    def normalization_mapping(self) -> Any: ...
    @property
    def normalization_version(self) -> Any: ...
    @property
    def dataset_names(self) -> Any: ...
    @property
    def dataset_to_norm_index(self) -> Any: ...
    @property
    def resize_imgs_with_padding(self) -> Any: ...
    @property
    def empty_cameras(self) -> Any: ...
    @property
    def max_state_dim(self) -> Any: ...
    @property
    def prompt_max_length(self) -> Any: ...
    @property
    def response_max_length(self) -> Any: ...
    @property
    def metadata_max_length(self) -> Any: ...


class ActingConfig(ObservingConfig, Protocol):
    """The same of a policy that acts."""

    @property
    def output_features(self) -> Any: ...
    @property
    def n_obs_steps(self) -> Any: ...
    @property
    def history_interval(self) -> Any: ...
    @property
    def chunk_size(self) -> Any: ...
    @property
    def n_action_steps(self) -> Any: ...
    @property
    def max_delay(self) -> Any: ...
    @property
    def max_action_dim(self) -> Any: ...
    @property
    def discrete_action_max_length(self) -> Any: ...
    @property
    def warn_outlier_threshold(self) -> Any: ...


class PlanningConfig(ObservingConfig, Protocol):
    """The same of a planner."""

    @property
    def memory_max_length(self) -> Any: ...
