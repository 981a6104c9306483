"""What Megatron Energon keeps beside WebDataset files: `.nv-meta/dataset.yaml` names the members of
a sample, `.nv-meta/split.yaml` (or `.json`, where there is no such file) the files of each split.

Source: https://nvidia.github.io/Megatron-Energon/data_on_disk.html
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from paddle_vl.files.inner_path import inner_path
from paddle_vl.files.text_file import read_json_object, read_text

META = ".nv-meta"
_ROW_FIELDS = ("conversation", "conversations", "messages", "json")
_IMAGE_FIELDS = ("image", "images", "img", "imgs")
_TEXT_FIELDS = {"text": "txt", "caption": "txt"}
# `field_map`, and classes and tags that Energon gives the samples, which say nothing about files.
_DATASET = ("field_map", "__module__", "__class__", "sample_type", "subflavor", "subflavors")
_SPLIT_FILES = ("split.yaml", "split.json")
_SPLIT = ("split_parts", "exclude")
_MEMBER = re.compile(r"[\w-]+(\.[\w-]+)*")
_BRACES = re.compile(r"\{(\d{1,9})\.\.(\d{1,9})\}|\{([^{}]*)\}")
_MOST_FILES = 1 << 17


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
    if (file := next((each for each in found if each.is_file()), None)) is None:
        return Fields()
    row, images = None, []
    fields = _settings(file, _DATASET).get("field_map") or {}
    if not isinstance(fields, Mapping):
        raise RuntimeError(f"{file}: field_map is {fields!r:.100}; a mapping is needed")
    for field, member in fields.items():
        is_plain = isinstance(member, str) and _MEMBER.fullmatch(member)
        if is_plain and field in _ROW_FIELDS and row is None:
            row = member.lower()
        elif is_plain and field in _IMAGE_FIELDS:
            images.append(member.lower())
        elif _TEXT_FIELDS.get(field) != member:
            raise RuntimeError(
                f"{file}: field {field} ({member!r:.100}) is not read; {', '.join(_ROW_FIELDS)}, "
                f"{', '.join(_IMAGE_FIELDS)} can name the extension of one member, such as "
                "image.png: write the samples as rows (.json members)"
            )
    return Fields(row, tuple(images))


def files_of_split(folder: Path, split: str) -> list[Path]:
    """The WebDataset files of a split of a data set with a folder `.nv-meta`; of one without splits
    all are `train`.

    Raises:
        RuntimeError: there is no such split, or it cannot be read.
    """
    found = [file for name in _SPLIT_FILES if (file := folder / META / name).is_file()]
    if not found:
        others = sorted(file.name for file in (folder / META).glob("split*"))
        if others or split != "train":
            raise RuntimeError(
                f"{folder / META} has no {' or '.join(_SPLIT_FILES)}, which say the files of split "
                f"{split!r}: {f'rename {others[0]}' if others else 'write one, or name the files'}"
            )
        return visible(folder.rglob("*.tar"), folder)
    file = found[0]
    settings = _settings(file, _SPLIT)
    parts = settings.get("split_parts") or {}
    if split not in parts:
        raise RuntimeError(f"{file} has no split {split!r}: choose one of {', '.join(parts)}")
    names = _all_expanded(parts[split], file)
    excluded = {*_all_expanded(settings.get("exclude"), file)}
    if inside := [each for each in sorted(excluded) if not each.endswith(".tar")]:
        raise RuntimeError(
            f"{file} excludes {inside[0]}, which is no file: remove it from the data"
        )
    return [inner_path(folder, each, file) for each in names if each not in excluded]


def visible(files: Iterable[Path], folder: Path) -> list[Path]:
    """Files in their order, without hidden ones of the folder, such as `._a.tar` of macOS."""
    return [file for file in sorted(files) if "/." not in f"/{file.relative_to(folder)}"]


def _settings(file: Path, known: tuple[str, ...]) -> dict[str, Any]:
    what = "a description of a data set"
    try:
        is_json = file.suffix == ".json"
        found = read_json_object(file, what) if is_json else yaml.safe_load(read_text(file, what))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise RuntimeError(f"{file} is no YAML ({error}): write it again") from error
    if not isinstance(found, dict):
        raise RuntimeError(f"{file} has a {type(found).__name__}; a mapping is needed")
    if unknown := sorted(found.keys() - {*known}):
        raise RuntimeError(
            f"{file} has {', '.join(unknown)}, which needs Energon's Python: write the samples as "
            f"rows (.json members), and leave only {', '.join(known)}"
        )
    return found


def _all_expanded(texts: Sequence[str] | None, file: Path) -> list[str]:
    """Names for texts with braces.

    Raises:
        RuntimeError: there are too many.
    """
    texts = texts or []
    names = (name for text in texts for name in _expanded(text))
    found = [*islice(names, _MOST_FILES + 1)]
    if len(found) > _MOST_FILES:
        raise RuntimeError(f"{file} names more files than {_MOST_FILES}: write fewer")
    return found


def _expanded(text: str) -> Iterator[str]:
    """Names for braces: `{000..012}` and `{a,b}`."""
    if (match := _BRACES.search(text)) is None:
        yield text
        return
    first, last, names = match.groups()
    if names is None:
        step = 1 if int(first) <= int(last) else -1
        numbers = range(int(first), int(last) + step, step)
        found = (str(each).zfill(len(first)) for each in numbers)
    else:
        found = names.split(",")
    for each in found:
        yield from _expanded(text[: match.start()] + each + text[match.end() :])
