"""The model families by name: which settings a run of each has, and which recipe trains it.

Classes stand here as "module:Class" and are imported when they are needed, so that reading a run's
settings loads neither Paddle nor the other families. A family outside of the package joins with one
call of `register_family`.
"""

from dataclasses import dataclass
from importlib import import_module
from typing import Any


@dataclass(frozen=True)
class FamilyEntry:
    """A model family.

    Attributes:
        name: as errors and help texts say it.
        model_types: values of `model_type` (HF) or `type` (LeRobot) in config.json that belong to
            the family.
        settings: "module:Class" of its run settings, a `paddle_vl.config.schema.RunConfig`.
        recipe: "module:Class" of what implements `paddle_vl.families.base.Family`.
    """

    name: str
    model_types: tuple[str, ...]
    settings: str
    recipe: str

    def settings_class(self) -> Any:
        return _loaded(self.settings)

    def recipe_class(self) -> Any:
        return _loaded(self.recipe)


_FAMILIES: list[FamilyEntry] = []


def register_family(entry: FamilyEntry) -> None:
    """Add a family; `paddle-vl train` and the other commands know it from then on.

    Raises:
        ValueError: a model type of it belongs to another family already.
    """
    for other in _FAMILIES:
        if taken := set(entry.model_types) & set(other.model_types):
            raise ValueError(
                f"model type {', '.join(sorted(taken))} of family {entry.name} belongs to family "
                f"{other.name} already: name another type"
            )
    _FAMILIES.append(entry)


def families() -> tuple[FamilyEntry, ...]:
    """All families in the order of their registration."""
    return tuple(_FAMILIES)


def family_of(model_values: dict[str, Any]) -> FamilyEntry:
    """The family of a model by its config.json; Qwen3-VL where it names no known type.

    Args:
        model_values: the content of config.json, empty where it cannot be read.
    """
    named = {model_values.get("type"), model_values.get("model_type")} - {None}
    for entry in _FAMILIES:
        if named & set(entry.model_types):
            return entry
    return _FAMILIES[0]


def _loaded(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


register_family(
    FamilyEntry(
        "Qwen3-VL",
        ("qwen3_vl", "qwen3_vl_moe"),
        "paddle_vl.families.qwen3_vl.settings:Qwen3VLRun",
        "paddle_vl.families.qwen3_vl.recipe:Qwen3VLRecipe",
    )
)
register_family(
    FamilyEntry(
        "pi07 policy",
        ("pi07_low_level",),
        "paddle_vl.families.pi07.settings:PI07Run",
        "paddle_vl.families.pi07.recipe:PI07Recipe",
    )
)
register_family(
    FamilyEntry(
        "pi07 planner",
        ("pi07_high_level",),
        "paddle_vl.families.pi07.settings:PI07Run",
        "paddle_vl.families.pi07.planner_recipe:PI07PlannerRecipe",
    )
)
