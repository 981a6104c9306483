"""The settings class of a run's model family, and settings that belong to other families.

Every family registers a subclass of `RunConfig` in `paddle_vl.config.families`; the run's model
decides which one applies. A setting of another family is accepted at its default value, because
checkpoints of earlier versions list the settings of all families, and refused otherwise.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic.fields import FieldInfo

from paddle_vl.config.families import families, family_of, model_values
from paddle_vl.config.schema import RunConfig
from paddle_vl.config.section import Section, section_of, setting_descriptions

Key = tuple[str | int, ...]
Descriptions = dict[str, tuple[str, str]]


def settings_classes() -> list[type[RunConfig]]:
    """The settings of all families, each class once, in the order of registration."""
    return list(dict.fromkeys(entry.settings_class() for entry in families()))


def settings_class_of(values: Mapping[str, Any]) -> type[RunConfig]:
    """The settings class of the family that the model, or the checkpoint to resume from, is of.

    If its config.json cannot be read, which is reported when the run starts, this is the class that
    knows most of the settings.

    Args:
        values: the run's configuration, as read from YAML.
    """

    def setting(section: str, name: str) -> Any:
        found = values.get(section)
        return found.get(name) if isinstance(found, Mapping) else None

    pretrained, config = setting("model", "pretrained"), setting("model", "config")
    source = pretrained if config is None else config
    for each in (source, setting("train", "resume_from_checkpoint")):
        if isinstance(each, str | dict) and (content := model_values(each)):
            return family_of(content).settings_class()
    # A published size.
    if isinstance(config, str) and not config.endswith(".json"):
        return family_of({}).settings_class()
    return min(settings_classes(), key=lambda run: len(own_settings(values, run)[1]))


def own_settings(
    values: Mapping[str, Any], run: type[RunConfig]
) -> tuple[dict[str, Any], dict[Key, str]]:
    """Separate settings of other families from the rest.

    Returns:
        The values without settings of other families, and the settings of other families that are
        not at their default, with the names of these families. Unknown keys stay in the values.
    """
    found: dict[Key, str] = {}

    def own_part(
        values: Mapping[str, Any],
        section: type[Section],
        others: Sequence[tuple[str, type[Section]]],
        key: Key,
    ) -> dict[str, Any]:
        own = {}
        for name, value in values.items():
            theirs = [
                (family, other.model_fields[name])
                for family, other in others
                if name in other.model_fields
            ]
            field = section.model_fields.get(name)
            if field is None and theirs:
                if not any(_is_default(value, other) for _, other in theirs):
                    found[(*key, name)] = ", ".join(dict.fromkeys(family for family, _ in theirs))
                continue
            inner = None if field is None else section_of(field)
            if inner is not None and isinstance(value, Mapping):
                sections = [(family, section_of(other)) for family, other in theirs]
                nested = [(family, other) for family, other in sections if other is not None]
                value = own_part(value, inner, nested, (*key, name))
            own[name] = value
        return own

    others = [(other.family, other) for other in settings_classes() if other is not run]
    return own_part(values, run, others, ()), found


def settings_help() -> Iterator[tuple[str, tuple[str, ...], Descriptions]]:
    """Settings in groups for `--help`: those of every run, then those of each family, without what
    it shares with one before.

    Yields:
        The group's title, the family's named groups of parameters, and default and description of
        each setting.
    """
    common, classes = setting_descriptions(RunConfig), settings_classes()
    yield "settings of every run", (), common
    of_all = {run: setting_descriptions(run) for run in classes}
    for run, own in of_all.items():
        shared = set(common).union(*(of_all[o] for o in classes if o in run.__mro__[1:]))
        own = {name: described for name, described in own.items() if name not in shared}
        names = [each.name for each in families() if issubclass(each.settings_class(), run)]
        yield f"settings of {', '.join(names)} only", tuple(run.parts), own


def _is_default(value: Any, field: FieldInfo) -> bool:
    """Whether a value from YAML, nested settings included, is the field's default."""
    default = field.get_default(call_default_factory=True)
    if isinstance(default, Section) and isinstance(value, Mapping):
        inner = type(default).model_fields
        return all(name in inner and _is_default(value[name], inner[name]) for name in value)
    return value == default and isinstance(value, bool) == isinstance(default, bool)
