"""Which family of models a run trains, by the configuration of its model."""

import json
from pathlib import Path
from typing import Any

from paddle_vl.config.load import raise_problems
from paddle_vl.config.schema import RunConfig
from paddle_vl.families.pi07.config import PI07Config, PI07PlannerConfig
from paddle_vl.families.pi07.planner_recipe import PI07PlannerRecipe
from paddle_vl.families.pi07.recipe import PI07Recipe
from paddle_vl.families.qwen3_vl.recipe import Qwen3VLRecipe

Family = Qwen3VLRecipe | PI07Recipe

# By `type` in a policy's config.json.
_POLICIES = {
    "pi07_low_level": (PI07Config, PI07Recipe),
    "pi07_high_level": (PI07PlannerConfig, PI07PlannerRecipe),
}

# Settings that say nothing to models of the other family.
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


def model_family(config: RunConfig, checkpoint: Path | None) -> Family:
    """The family of the run's model, with its data.

    Raises:
        ValueError: settings of the other family, all named; what each family refuses.
        RuntimeError: files that are missing or damaged.
    """
    pretrained = config.model.pretrained
    folder = checkpoint or (None if pretrained is None else Path(pretrained))
    values = _model_values(config, folder)
    trains_policy = _is_type(values.get("type"))
    found, others = (
        ("pi07 policy", _LANGUAGE_ONLY) if trains_policy else ("Qwen3-VL", _POLICIES_ONLY)
    )
    raise_problems(
        [
            f"{name} is set, but the model is a {found}, to which it says nothing: remove it"
            for name in others
            if _is_set(config, name)
        ]
    )
    if not trains_policy:
        return Qwen3VLRecipe(config, checkpoint)
    form_class, family = _POLICIES[values["type"]]
    form = form_class.from_dict(values) if folder is None else form_class.from_pretrained(folder)
    return family(config, form, folder)


def is_policy(folder: Path) -> bool:
    """Whether a model folder is a policy's."""
    return _is_type(_json_object(folder / "config.json").get("type"))


def _is_type(value: Any) -> bool:
    return isinstance(value, str) and value in _POLICIES


def _model_values(config: RunConfig, folder: Path | None) -> dict[str, Any]:
    """What a config.json says; nothing of one that cannot be read, which its family names."""
    source = config.model.config if folder is None else folder / "config.json"
    return source if isinstance(source, dict) else _json_object(Path(source))


def _json_object(file: Path) -> dict[str, Any]:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}


def _is_set(config: RunConfig, name: str) -> bool:
    section, setting = name.split(".")
    settings = getattr(config, section)
    default = type(settings).model_fields[setting].get_default(call_default_factory=True)
    return getattr(settings, setting) != default
