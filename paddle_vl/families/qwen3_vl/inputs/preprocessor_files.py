"""HF's preprocessor files: what images and videos have in common in them, read and checked."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from paddle_vl.files.checked_values import Range, check_mapping, check_values
from paddle_vl.files.json_file import read_json_object, shown
from paddle_vl.files.named_errors import write_text

# Where transformers 5 keeps all settings together, each under the name of its part.
NESTED_CONFIG_FILE = "processor_config.json"

_REMEDY = "copy it from the checkpoint"
_RANGES = {
    # What is smaller is enlarged to it: 4096 x 4096 pixels.
    "min_pixels": Range(1, 1 << 24),
    "max_pixels": Range(1, 1 << 40),
    "patch_size": Range(1, 256),
    "temporal_patch_size": Range(1, 64),
    "merge_size": Range(1, 64),
    "image_mean": Range(-10, 10),
    # Pixels lie between 0 and 1; beyond such numbers they would all be one value, or overflow.
    "image_std": Range(1e-4, 1e4),
    "fps": Range(0, 1000, is_above=True),
    "min_frames": Range(1, 1 << 20),
    "max_frames": Range(1, 1 << 20),
}
# Of a visual token, which the smallest image is enlarged to.
_MOST_TOKEN_PIXELS = 1 << 24
_REQUIRED = ("patch_size", "temporal_patch_size", "merge_size", "image_mean", "image_std")


def find_settings(directory: Path, file_name: str, part: str) -> tuple[Path, dict[str, Any]] | None:
    """The file that holds the settings of a part, and its settings; None where there is none.

    Args:
        file_name: the part's own file, which is looked for first.
        part: its name in `processor_config.json`.

    Raises:
        RuntimeError: a file cannot be read, or is damaged.
        ValueError: a part's settings are something else.
    """
    path = directory / file_name
    if path.is_file():
        return path, read_json_object(path, "a preprocessor's settings", _REMEDY)
    nested = directory / NESTED_CONFIG_FILE
    if nested.is_file():
        outer = read_json_object(nested, "a processor's settings", _REMEDY)
        if part in outer:
            return nested, check_mapping(outer[part], f"{nested}: {part}")
    return None


def common_settings(config: dict[str, Any], name: str) -> dict[str, Any]:
    """Pixel budget, patch sizes, mean and standard deviation, by the names of our fields.

    The budget is read in either dialect: `size` with `shortest_edge` and `longest_edge` (numbers of
    pixels, despite the names), or `min_pixels` and `max_pixels`; where both stand the latter win,
    as in HF.

    Raises:
        ValueError: naming every setting that is missing.
    """
    size = config.get("size") or {}
    if not isinstance(size, dict):
        raise ValueError(
            f"{name} has size {shown(size)}; {{'shortest_edge': ..., 'longest_edge': ...}} is "
            "needed"
        )
    values = {
        "min_pixels": _first(config.get("min_pixels"), size.get("shortest_edge")),
        "max_pixels": _first(config.get("max_pixels"), size.get("longest_edge")),
    }
    names = {
        "min_pixels": "size.shortest_edge (or min_pixels)",
        "max_pixels": "size.longest_edge (or max_pixels)",
    }
    values.update({key: config.get(key) for key in _REQUIRED})
    missing = [names.get(key, key) for key, value in values.items() if value is None]
    if missing:
        raise ValueError(
            f"{name} lacks {', '.join(missing)}: Qwen3-VL's settings differ from the defaults "
            "of HF's class, so none is assumed; take the file from the checkpoint"
        )
    for key in ("image_mean", "image_std"):
        if isinstance(values[key], list):
            values[key] = tuple(values[key])
    return values


def refuse_unsupported(
    config: dict[str, Any], name: str, *, always_on: tuple[str, ...], either: tuple[str, ...] = ()
) -> None:
    """Raise for every setting that would change the pixels and is not implemented.

    Args:
        always_on: steps that are always done here.
        either: steps that a checkpoint may turn off.

    Raises:
        ValueError: naming all of them.
    """
    refused = [
        f"{key} = {shown(value)}"
        for key, value in config.items()
        if (key in always_on and value is False)
        or (key.startswith("do_") and value and key not in (*always_on, *either))
    ]
    for key, value in config.items():
        if key.startswith("do_") and value is not None and not isinstance(value, bool):
            refused.append(f"{key} = {shown(value)} (only true or false)")
    resample = config.get("resample")
    if resample is not None and resample != Image.Resampling.BICUBIC:
        refused.append(
            f"resample = {shown(resample)} (only {int(Image.Resampling.BICUBIC)}, bicubic)"
        )
    scale = config.get("rescale_factor")
    if scale is not None and not (
        type(scale) is float and np.isclose(scale, 1 / 255, rtol=1e-6, atol=0)
    ):
        refused.append(f"rescale_factor = {shown(scale)} (only 1/255)")
    if refused:
        raise ValueError(f"{name} asks for what is not implemented here: {'; '.join(refused)}")


def write_settings(path: Path, settings: dict[str, Any]) -> None:
    """Write a settings file, and its folder where it is new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(settings, indent=2) + "\n")


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def check_settings(settings: Any, where: str) -> None:
    """Refuse numbers of an image or video processor that make no sense.

    Args:
        settings: a dataclass with the fields of `common_settings`.
        where: what they are from, for the message.

    Raises:
        ValueError: naming every setting, its value and what is needed.
    """
    check_values(settings, where, _RANGES)
    side = settings.patch_size * settings.merge_size
    if settings.temporal_patch_size * side**2 > _MOST_TOKEN_PIXELS:
        raise ValueError(
            f"{where + ': ' if where else ''}patch_size {settings.patch_size}, merge_size "
            f"{settings.merge_size} and temporal_patch_size {settings.temporal_patch_size} give a "
            f"token more than {_MOST_TOKEN_PIXELS:,} pixels; correct them"
        )
