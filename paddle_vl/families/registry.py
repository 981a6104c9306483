"""Which family of models a run trains, by the configuration of its model."""

import json
from pathlib import Path
from typing import Any

from paddle_vl.config.schema import RunConfig
from paddle_vl.families.pi07.config import PI07Config
from paddle_vl.families.pi07.planner_config import PI07PlannerConfig
from paddle_vl.families.pi07.planner_recipe import PI07PlannerRecipe
from paddle_vl.families.pi07.recipe import PI07Recipe
from paddle_vl.families.qwen3_vl.recipe import Qwen3VLRecipe

Family = Qwen3VLRecipe | PI07Recipe

# By `type` in a policy's config.json.
_POLICIES = {
    "pi07_low_level": (PI07Config, PI07Recipe),
    "pi07_high_level": (PI07PlannerConfig, PI07PlannerRecipe),
}


def model_family(config: RunConfig, checkpoint: Path | None) -> Family:
    """The family of the run's model, with its data.

    Raises:
        ValueError: what each family refuses.
        RuntimeError: files that are missing or damaged.
    """
    pretrained = config.model.pretrained
    folder = checkpoint or (None if pretrained is None else Path(pretrained))
    values = _model_values(config, folder)
    if not _is_type(values.get("type")):
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
