"""Features of a policy's data: what they are, and how each kind is normalised."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paddle_vl.files.checked_values import Range, check_values

FEATURE_TYPES = ("STATE", "VISUAL", "ENV", "ACTION", "REWARD")
_OF_KNOWN_SHAPE = ("STATE", "VISUAL", "ACTION")
_MOST_DIMS = 1 << 16
NORMALIZATION_MODES = ("MEAN_STD", "MIN_MAX", "QUANTILE", "IDENTITY")


@dataclass(frozen=True)
class PolicyFeature:
    """One feature.

    Attributes:
        type: one of `FEATURE_TYPES`.
        shape: of one value: (channels, height, width) of an image, (dims,) of a vector.
    """

    type: str
    shape: tuple[int, ...]

    def __post_init__(self):
        if self.type not in FEATURE_TYPES:
            raise ValueError(f"feature type {self.type!r} is not one of {', '.join(FEATURE_TYPES)}")
        check_values(self, "", {"shape": Range(1, _MOST_DIMS)})
        object.__setattr__(self, "shape", tuple(self.shape))
        num_dims = 3 if self.type == "VISUAL" else 1
        if self.type in _OF_KNOWN_SHAPE and len(self.shape) != num_dims:
            raise ValueError(
                f"shape is {list(self.shape)}; {self.type} has {num_dims} "
                f"{'dims: channels, height, width' if num_dims == 3 else 'dim'}"
            )

    def to_dict(self) -> dict[str, Any]:
        """As configuration files have it."""
        return {"type": self.type, "shape": list(self.shape)}


def feature_from_dict(name: str, values: Mapping[str, Any] | PolicyFeature) -> PolicyFeature:
    """A feature from a configuration file.

    Raises:
        ValueError: it has no type and shape, or they are unknown.
    """
    if isinstance(values, PolicyFeature):
        return values
    if not isinstance(values, Mapping) or set(values) != {"type", "shape"}:
        raise ValueError(f"feature {name!r} is {values!r}; it needs a type and a shape")
    try:
        return PolicyFeature(**values)
    except ValueError as error:
        raise ValueError(f"feature {name!r}: {error}") from error


def check_normalization(mapping: Mapping[str, str]) -> None:
    """Refuse unknown modes and kinds of features.

    Raises:
        ValueError: naming the entry and what there is.
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
