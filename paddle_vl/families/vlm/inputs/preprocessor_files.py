"""HF's preprocessor files: the settings that image and video processors share."""

import json
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from PIL import Image
from pydantic import Field

from paddle_vl.files.checked_values import Listed, Number, check_mapping
from paddle_vl.files.text_file import read_json_object, shown, write_text

# File of transformers 5 with the settings of all processors, each under its name.
NESTED_CONFIG_FILE = "processor_config.json"

_REMEDY = "copy it from the checkpoint"
# Smaller images are enlarged to this size: at most 4096 x 4096 pixels.
MinPixels = Annotated[int, Field(ge=1, le=1 << 24)]
MaxPixels = Annotated[int, Field(ge=1, le=1 << 40)]
PatchSize = Annotated[int, Field(ge=1, le=256)]
MergeSize = Annotated[int, Field(ge=1, le=64)]
_Mean = Annotated[Number, Field(ge=-10, le=10)]
# For pixels in [0, 1]; beyond it they would collapse to one value, or overflow.
_Spread = Annotated[Number, Field(ge=1e-4, le=1e4)]
ImageMean = Listed[tuple[_Mean, _Mean, _Mean]]
ImageSpread = Listed[tuple[_Spread, _Spread, _Spread]]
# Limit of the pixels of one visual token, which is the smallest image.
_MOST_TOKEN_PIXELS = 1 << 24
_REQUIRED = ("patch_size", "temporal_patch_size", "merge_size", "image_mean", "image_std")


def find_settings(
    directory: Path, file_name: str, processor: str
) -> tuple[Path, dict[str, Any]] | None:
    """The file with a processor's settings, and the settings; None if there is none.

    Args:
        file_name: the processor's own file, which is preferred.
        processor: its key in `processor_config.json`.

    Raises:
        RuntimeError: a file cannot be read, or is damaged.
        ValueError: the settings are not a JSON object.
    """
    path = directory / file_name
    if path.is_file():
        return path, read_json_object(path, "a preprocessor's settings", _REMEDY)
    nested = directory / NESTED_CONFIG_FILE
    if nested.is_file():
        outer = read_json_object(nested, "a processor's settings", _REMEDY)
        if processor in outer:
            return nested, check_mapping(outer[processor], f"{nested}: {processor}")
    return None


def common_settings(config: dict[str, Any], name: str) -> dict[str, Any]:
    """Pixel limits, patch sizes, mean and standard deviation, under the names of the fields here.

    The limits are read in either dialect: `size` with `shortest_edge` and `longest_edge` (numbers
    of pixels, despite the names), or `min_pixels` and `max_pixels`, which take precedence as in HF.

    Raises:
        ValueError: settings are missing; all are named.
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
    return values


def refuse_unsupported(
    config: dict[str, Any], name: str, *, always_on: tuple[str, ...], either: tuple[str, ...] = ()
) -> None:
    """Raise for settings that would change the pixels and are not supported.

    Args:
        always_on: steps that cannot be turned off.
        either: steps that can be turned off.

    Raises:
        ValueError: with all such settings.
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
        raise ValueError(f"{name} has settings that are not supported: {'; '.join(refused)}")


def hf_settings(settings: Any, kind: dict[str, str]) -> dict[str, Any]:
    """The settings of a processor in the dialect of the published Qwen3-VL checkpoints.

    Args:
        settings: a dataclass with the fields of `common_settings` and `source_config`.
        kind: name of HF's class, which `source_config` overrides.
    """
    kept = {
        key: value
        for key, value in settings.source_config.items()
        if key not in ("min_pixels", "max_pixels")
    }
    return {
        **kind,
        "processor_class": "Qwen3VLProcessor",
        **kept,
        "size": {"shortest_edge": settings.min_pixels, "longest_edge": settings.max_pixels},
        "patch_size": settings.patch_size,
        "temporal_patch_size": settings.temporal_patch_size,
        "merge_size": settings.merge_size,
        "image_mean": list(settings.image_mean),
        "image_std": list(settings.image_std),
    }


def write_settings(path: Path, settings: dict[str, Any]) -> None:
    """Write a settings file, and its folder if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(settings, indent=2) + "\n")


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def check_token_size(settings: Any) -> None:
    """Refuse patch sizes of an image or video processor that make a visual token too large.

    Args:
        settings: a dataclass with the fields of `common_settings`.

    Raises:
        ValueError: with the three sizes.
    """
    side = settings.patch_size * settings.merge_size
    if settings.temporal_patch_size * side**2 > _MOST_TOKEN_PIXELS:
        raise ValueError(
            f"patch_size {settings.patch_size}, merge_size "
            f"{settings.merge_size} and temporal_patch_size {settings.temporal_patch_size} give a "
            f"visual token more than {_MOST_TOKEN_PIXELS:,} pixels; correct them"
        )
