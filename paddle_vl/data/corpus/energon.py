"""What Megatron Energon keeps beside WebDataset files: `.nv-meta/dataset.yaml` names the members of
a sample, `.nv-meta/split.yaml` the files of each split.

Source: https://nvidia.github.io/Megatron-Energon/data_on_disk.html
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from paddle_vl.files.text_file import read_text

META = ".nv-meta"
_ROW_FIELDS = ("conversation", "conversations", "messages", "json")
_IMAGE_FIELDS = ("image", "images", "img", "imgs")
_TEXT_FIELDS = {"text": "txt", "caption": "txt"}
# They say which classes and tags Energon gives the samples, nothing about the files.
_INERT = ("__module__", "__class__", "sample_type", "subflavor", "subflavors", "__subflavors__")
_MEMBER = re.compile(r"[\w-]+(\.[\w-]+)*")
_BRACES = re.compile(r"\{(\d+)\.\.(\d+)\}|\{([^{}]*)\}")


class Fields(NamedTuple):
    """Extensions of members that a data set names.

    Attributes:
        row: of the member with the row or its messages; None for the usual ones.
        images: of images.
    """

    row: str | None = None
    images: tuple[str, ...] = ()


def fields_of(shard: Path) -> Fields:
    """What the data set of a WebDataset file says about its members.

    Raises:
        RuntimeError: it says something that is not supported here.
    """
    found = (folder / META / "dataset.yaml" for folder in shard.absolute().parents[:2])
    file = next((each for each in found if each.is_file()), None)
    if file is None:
        return Fields()
    settings = _mapping(file)
    if unknown := sorted(settings.keys() - {"field_map", *_INERT}):
        raise RuntimeError(
            f"{file} has {', '.join(unknown)}, which runs or needs Energon's Python: write the "
            "samples as rows (.json members), and remove it"
        )
    row, images = None, []
    for field, member in (settings.get("field_map") or {}).items():
        if not isinstance(member, str) or not _MEMBER.fullmatch(member):
            raise RuntimeError(
                f"{file}: field {field} is {member!r:.100}; the extension of one member is read, "
                "such as image.png: write the samples as rows (.json members)"
            )
        if field in _ROW_FIELDS and row is None:
            row = member.lower()
        elif field in _IMAGE_FIELDS:
            images.append(member.lower())
        elif _TEXT_FIELDS.get(field) != member:
            raise RuntimeError(
                f"{file}: field {field} (member {member}) has no meaning in a row: one of "
                f"{', '.join((*_ROW_FIELDS, *_IMAGE_FIELDS))} is needed, or text in .txt"
            )
    return Fields(row, tuple(images))


def files_of_split(folder: Path, split: str) -> list[Path]:
    """The WebDataset files of a split of a data set with a folder `.nv-meta`; all if it has no
    splits.

    Raises:
        RuntimeError: there is no such split, or it cannot be read.
    """
    file = folder / META / "split.yaml"
    if not file.is_file():
        return sorted(folder.rglob("*.tar"))
    settings = _mapping(file)
    parts = settings.get("split_parts") or {}
    if unknown := sorted(settings.keys() - {"split_parts", "exclude"}):
        raise RuntimeError(
            f"{file} has {', '.join(unknown)}; only split_parts and exclude are read"
        )
    if not isinstance(parts, dict) or split not in parts:
        raise RuntimeError(f"{file} has no split {split!r}: choose one of {', '.join(parts)}")
    excluded = {each for text in settings.get("exclude") or [] for each in _expanded(text)}
    if inside := [each for each in excluded if "/" in each and ".tar/" in each]:
        raise RuntimeError(f"{file} excludes samples within files ({inside[0]}): remove them there")
    names = [each for text in parts[split] or [] for each in _expanded(text)]
    return [folder / each for each in names if each not in excluded]


def _mapping(file: Path) -> dict[str, Any]:
    try:
        found = yaml.safe_load(read_text(file, "a description of a data set"))
    except yaml.YAMLError as error:
        raise RuntimeError(f"{file} is no YAML ({error}): write it again") from error
    if not isinstance(found, dict):
        raise RuntimeError(f"{file} has a {type(found).__name__}; a mapping is needed")
    return found


def _expanded(text: str) -> Iterator[str]:
    """Names for braces: `{000..012}` and `{a,b}`."""
    if (match := _BRACES.search(text)) is None:
        yield text
        return
    first, last, names = match.groups()
    found = names.split(",") if first is None else map(str, range(int(first), int(last) + 1))
    for each in found:
        number = each if first is None else each.zfill(len(first))
        yield from _expanded(text[: match.start()] + number + text[match.end() :])
