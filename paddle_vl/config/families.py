"""The registry of model families: model types, settings class and recipe of each.

Classes are named as "module:Class" and imported on first use, so that reading a run's settings
loads neither Paddle nor the other families. A family outside of the package registers itself with
one call of `register_family`.
"""

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from paddle_vl.files.text_file import read_json_object


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder that the parallel plan divides over ranks.

    Attributes:
        moe_intermediate_size: inner width of an expert; 0 without experts.
        num_experts: experts of a layer; 0 without experts.
        shared_expert_intermediate_size: inner width of an expert of all tokens; 0 without one.
        linear_num_key_heads: key heads of layers with a state in place of keys; 0 without such.
    """

    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int
    intermediate_size: int
    num_hidden_layers: int
    moe_intermediate_size: int = 0
    num_experts: int = 0
    shared_expert_intermediate_size: int = 0
    linear_num_key_heads: int = 0


@dataclass(frozen=True)
class EncoderShape:
    """Sizes of an encoder that tensor parallelism divides, under `schedule: colocated`.

    Attributes:
        widths: by the name of the setting in the model's configuration.
    """

    widths: dict[str, int]


@dataclass(frozen=True)
class FamilyEntry:
    """A registered model family.

    Attributes:
        name: for errors and help texts.
        model_types: values of `model_type` (HF) or `type` (LeRobot) in a config.json of the family.
        settings: "module:Class" of its run settings, a `paddle_vl.config.schema.RunConfig`.
        recipe: "module:Class" of its `paddle_vl.families.base.Family`.
        exported: "module:Class" that runs its exported programs, see `paddle_vl.export`; None if
            it has none.
        exporter: "module:function" that makes a `paddle_vl.export.writing.ModelToExport` of a model
            folder and the base of its adapters; None if the family cannot be exported.
        not_exported: why it cannot, for the error.
        sizes: how the names of its published sizes begin, in small letters; not needed of the
            first family.
    """

    name: str
    model_types: tuple[str, ...]
    settings: str
    recipe: str
    exported: str | None = None
    exporter: str | None = None
    not_exported: str = ""
    sizes: tuple[str, ...] = ()

    def settings_class(self) -> Any:
        return _loaded(self.settings)

    def recipe_class(self) -> Any:
        return _loaded(self.recipe)

    def exported_class(self) -> Any:
        """See `exported`.

        Raises:
            ValueError: the family has no exported programs.
        """
        return _loaded(self.exported, self._cannot)

    def to_export(self, folder: Path, base: str | None) -> Any:
        """The programs of a model folder, or of adapters merged into their base
        (`paddle-vl export`).

        Raises:
            ValueError: the family has no programs.
        """
        return _loaded(self.exporter, self._cannot)(folder, base)

    @property
    def _cannot(self) -> str:
        reason = f": {self.not_exported}" if self.not_exported else " yet"
        return f"models of the family {self.name} cannot be exported{reason}"


_FAMILIES: list[FamilyEntry] = []


def register_family(entry: FamilyEntry) -> None:
    """Add a family; every command knows it from then on.

    Raises:
        ValueError: one of its model types belongs to another family.
    """
    for other in _FAMILIES:
        if taken := set(entry.model_types) & set(other.model_types):
            raise ValueError(
                f"model type {', '.join(sorted(taken))} of family {entry.name} is registered for "
                f"family {other.name}: choose another type"
            )
    _FAMILIES.append(entry)


def families() -> tuple[FamilyEntry, ...]:
    """All families, in the order of registration."""
    return tuple(_FAMILIES)


def family_of(model_values: dict[str, Any]) -> FamilyEntry:
    """The family of a model by its config.json; the first family where nothing names a type.

    Args:
        model_values: content of config.json; empty where it cannot be read.

    Raises:
        ValueError: no family has the model type.
    """
    named = [model_values.get(key) for key in ("type", "model_type")]
    named = [name for name in named if name and isinstance(name, str)]
    for entry in _FAMILIES:
        if any(model_type in entry.model_types for model_type in named):
            return entry
    for entry in _FAMILIES if named else ():
        if named[0] in entry.settings_class().backbones:
            raise ValueError(
                f"{named[0]} is the backbone of a {entry.name}, not a whole one: to start a run "
                "from it, describe the policy in model.config beside model.pretrained"
            )
    if named:
        known = ", ".join(each for entry in _FAMILIES for each in entry.model_types)
        raise ValueError(
            f"the model type {str(named[0])!r:.100} belongs to no family of this package, which "
            f"has {known}: correct model.config, or its config.json, or register its family"
        )
    return _FAMILIES[0]


def family_of_folder(folder: Path) -> FamilyEntry:
    """The family of a model folder; of adapters, which have no config.json, give the base's."""
    return family_of(model_values(folder))


def family_of_run(config: Any, checkpoint: Path | None = None) -> FamilyEntry:
    """The family that a run trains.

    Args:
        config: a `RunConfig`.
        checkpoint: to resume from; its config.json takes precedence.

    Raises:
        ValueError, RuntimeError: the settings are those of another family; or the model's
            config.json cannot be read, so that only the settings say which family it is of.
    """
    model = config.model
    # Beside model.config, model.pretrained is a backbone.
    source = model.pretrained if model.config is None else model.config
    entry = family_of((checkpoint and model_values(checkpoint)) or model_values(source))
    if not isinstance(config, entry.settings_class()):
        if isinstance(source, str):
            file = Path(source) / "config.json" if Path(source).is_dir() else Path(source)
            read_json_object(file, "a model's configuration")
        raise ValueError(
            f"the model is of the family {entry.name}, but the settings are those of "
            f"{config.family}: check model.pretrained or model.config ({source!r:.200})"
        )
    return entry


def model_values(source: str | Path | dict[str, Any] | None) -> dict[str, Any]:
    """The content of a model's config.json; empty if it cannot be read (the family reports that).
    Of a published size only the model type.

    Args:
        source: a model folder, a config.json, its content, or the name of a published size.
    """
    if isinstance(source, dict) or source is None:
        return source or {}
    file, name = Path(source), str(source).lower().removeprefix("qwen/")
    of_size = [entry for entry in _FAMILIES if name.startswith(entry.sizes)]
    try:
        file = file / "config.json" if file.is_dir() else file
        # Opening a pipe would block.
        if of_size and not file.exists():
            return {"model_type": of_size[0].model_types[0]}
        return read_json_object(file, "a config.json") if file.is_file() else {}
    except (OSError, RuntimeError):
        return {}


def _loaded(path: str | None, absent: str = "") -> Any:
    if path is None:
        raise ValueError(absent)
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


for _entry in (
    FamilyEntry(
        "Qwen3-VL",
        ("qwen3_vl", "qwen3_vl_moe"),
        "paddle_vl.families.vlm.settings:VLRun",
        "paddle_vl.families.qwen3_vl.recipe:Qwen3VLRecipe",
        "paddle_vl.export.qwen3_vl.exported:ExportedQwen3VL",
        "paddle_vl.export.qwen3_vl.programs:to_export",
    ),
    FamilyEntry(
        "Qwen3.5",
        ("qwen3_5", "qwen3_5_moe"),
        "paddle_vl.families.vlm.settings:VLRun",
        "paddle_vl.families.qwen3_5.recipe:Qwen3_5Recipe",
        not_exported="the number of chunks that its states pass through depends on the length of a "
        "prompt, which a traced program does not know; generate with the model itself",
        sizes=("qwen3.5-", "qwen3.6-", "qwen3.8-"),
    ),
    FamilyEntry(
        "pi07 policy",
        ("pi07_low_level",),
        "paddle_vl.families.pi07.settings:PI07Run",
        "paddle_vl.families.pi07.recipe:PI07Recipe",
        "paddle_vl.export.pi07.exported:ExportedPI07Policy",
        "paddle_vl.export.pi07.programs:to_export",
    ),
    FamilyEntry(
        "pi07 planner",
        ("pi07_high_level",),
        "paddle_vl.families.pi07.settings:PI07Run",
        "paddle_vl.families.pi07.recipe:PI07PlannerRecipe",
        "paddle_vl.export.pi07.exported:ExportedPI07Planner",
        "paddle_vl.export.pi07.programs:to_export",
    ),
):
    register_family(_entry)
