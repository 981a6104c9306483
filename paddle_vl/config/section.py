"""The base class of all sections of a run's settings, and the descriptions that `--help` prints."""

import json
from typing import get_args

from pydantic import BaseModel, ConfigDict
from pydantic.fields import FieldInfo


class Section(BaseModel):
    """Settings that are frozen and strict: no unknown key, no conversion, no NaN or infinity.

    The docstring below a setting is its description in `--help` and in errors.
    """

    model_config = ConfigDict(
        frozen=True,
        strict=True,
        extra="forbid",
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )


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
    described, nested = {}, {}
    for name, field in section.model_fields.items():
        if field.description is not None:
            described[prefix + name] = (_shown_default(field), " ".join(field.description.split()))
        if (inner := section_of(field)) is not None:
            nested |= setting_descriptions(inner, f"{prefix}{name}.")
    return described | nested


def _shown_default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, Section):
        return "its settings below"
    return value if isinstance(value, str) else json.dumps(value)
