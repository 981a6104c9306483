"""Settings that only some families have."""

from paddle_vl.config.families import FamilyEntry
from paddle_vl.config.load import raise_problems
from paddle_vl.config.schema import RunConfig

_POLICIES_ONLY = (
    "data.synthetic_samples",
    "data.groups",
    "data.fields",
    "data.statistics",
    "data.drops",
    "train.loss_weighting",
    "parallel.branch_sync",
)
_LANGUAGE_ONLY = (
    "model.lora",
    "data.max_length",
    "data.min_pixels",
    "data.max_pixels",
    "data.video_fps",
    "data.video_min_frames",
    "data.video_max_frames",
    "data.video_min_pixels",
    "data.video_max_pixels",
    "data.packing",
    "data.padding_side",
    "data.pad_to_multiple_of",
    "parallel.ep_degree",
)


def check_settings(config: RunConfig, entry: FamilyEntry) -> None:
    """Refuse settings that the run's family does not have.

    Raises:
        ValueError: all of them, named.
    """
    others = _LANGUAGE_ONLY if entry.name.startswith("pi07") else _POLICIES_ONLY
    raise_problems(
        [
            f"{name} is set, but the model is a {entry.name}, to which it says nothing: remove it"
            for name in others
            if _is_set(config, name)
        ]
    )


def _is_set(config: RunConfig, name: str) -> bool:
    section, setting = name.split(".")
    settings = getattr(config, section)
    default = type(settings).model_fields[setting].get_default(call_default_factory=True)
    return getattr(settings, setting) != default
