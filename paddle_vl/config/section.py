"""The base class of all sections of a run's settings, and the descriptions that `--help` prints."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict
from pydantic.fields import FieldInfo

from paddle_vl.files.stored_settings import descriptions


def named(settings: Mapping[str, dict[str, Any]]) -> BeforeValidator:
    """Lets a section be given as the name of settings, instead of these."""

    def settings_of(given: Any) -> Any:
        if not isinstance(given, str):
            return given
        if given not in settings:
            raise ValueError(f"there are {' and '.join(settings)}; or give settings in their place")
        return settings[given]

    return BeforeValidator(settings_of)


def _named(path: str) -> str:
    if not path.strip():
        raise ValueError("it must name a file or folder")
    return path


# An empty path would be the current folder, or count as not set.
FilePath = Annotated[str, AfterValidator(_named)]


@dataclass(frozen=True)
class OnlyWith:
    """Metadata of a setting that has an effect only with certain values of another.

    Attributes:
        setting: dotted name of the other.
        values: those with which it has one.
    """

    setting: str
    values: Sequence[Any]


class Section(BaseModel):
    """Settings that are frozen and strict: no unknown key, no conversion, no NaN or infinity.

    The docstring below a setting is its description in `--help` and in errors.
    """

    model_config = ConfigDict(
        frozen=True,
        strict=True,
        extra="forbid",
        allow_inf_nan=False,
        # A run has the settings of one family.
        defer_build=True,
    )


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one mapping with dotted keys."""
    flat = {}
    for name, value in values.items():
        if isinstance(value, dict) and value:
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def section_of(field: FieldInfo) -> type[Section] | None:
    """The section class of a field, optional or not; None for a plain setting."""
    for kind in get_args(field.annotation) or (field.annotation,):
        if isinstance(kind, type) and issubclass(kind, Section):
            return kind
    return None


def setting_descriptions(section: type[Section], prefix: str = "") -> dict[str, tuple[str, str]]:
    """The default in YAML ("required" if there is none) and description of a section's settings.

    Settings of nested sections follow under dotted names. A section is listed itself only if it has
    a description.
    """
    described, nested, meanings = {}, {}, descriptions(section)
    for name, field in section.model_fields.items():
        if (description := meanings[name]) is not None:
            default = "required"
            if not field.is_required():
                value = field.get_default(call_default_factory=True)
                default = "its settings below" if isinstance(value, Section) else _in_yaml(value)
            described[prefix + name] = (default, description)
        if (inner := section_of(field)) is not None:
            nested |= setting_descriptions(inner, f"{prefix}{name}.")
    return described | nested


def settings_without_effect(
    run: Section, section: Section | None = None, prefix: str = ""
) -> Iterator[str]:
    """Messages about settings that need another value of another setting, see `OnlyWith`."""
    section = section or run
    for name, field in type(section).model_fields.items():
        value, setting = getattr(section, name), prefix + name
        if isinstance(value, Section):
            yield from settings_without_effect(run, value, f"{setting}.")
        default = field.get_default(call_default_factory=True)
        # What the run decides by itself, and need not have, may also be turned off.
        if value == default or (default is None and value is False):
            continue
        for needed in (each for each in field.metadata if isinstance(each, OnlyWith)):
            found: Any = run
            for part in needed.setting.split("."):
                found = getattr(found, part)
            if found not in needed.values:
                yield (
                    f"{setting} is {_in_yaml(value)} but {needed.setting} is {_in_yaml(found)}, so "
                    f"it has no effect: set {needed.setting}={_in_yaml(needed.values[0])}, or "
                    "remove it"
                )
                break


def _in_yaml(value: Any) -> str:
    if isinstance(value, Section):
        value = value.model_dump(exclude_defaults=True)
    return value if isinstance(value, str) else json.dumps(value)
