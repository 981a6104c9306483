"""What image and video processors share: their settings in HF's files, and the cut into patches.

Shapes: R frames, H and W pixels, C = 3 channels, P patches.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import field, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

import numpy as np
from PIL import Image
from pydantic import Field

from paddle_vl.data.jsonl import BadSampleError
from paddle_vl.files.checked_values import Listed, Number, check_mapping, checked
from paddle_vl.files.text_file import read_json_object, shown, write_text

V = TypeVar("V", bound="VisionProcessor")
# File of transformers 5 with the settings of all processors, each under its name.
NESTED_CONFIG_FILE = "processor_config.json"

_REMEDY = "copy it from the checkpoint"
# For pixels in [0, 1]; beyond it they would collapse to one value, or overflow.
_Mean = Annotated[Number, Field(ge=-10, le=10)]
_Spread = Annotated[Number, Field(ge=1e-4, le=1e4)]
_Side = Annotated[int, Field(ge=1, le=64)]
# Limit of the pixels of one visual token, which is the smallest image.
_MOST_TOKEN_PIXELS = 1 << 24
_REQUIRED = ("patch_size", "temporal_patch_size", "merge_size", "image_mean", "image_std")


@checked
class VisionProcessor:
    """Settings of an image or a video processor.

    Attributes:
        min_pixels, max_pixels: area of an image, or frames x height x width of a video, after
            resizing; pixels.
        patch_size: side of a patch; pixels.
        temporal_patch_size: frames per patch; an image is repeated to fill them.
        merge_size: side of a merge block; patches. One block becomes one visual token.
        image_mean, image_std: per channel, for values in [0, 1].
        source_config: settings as read from a checkpoint, for writing them back.
        config_file: name of the processor's own file.
        section: its key in `processor_config.json`.
        hf_class: HF's key for the class of the processor, and the name of that class.
        always_on: steps that a checkpoint cannot turn off.
        own: settings that the other processor does not have.
    """

    # Smaller images are enlarged to min_pixels: at most 4096 x 4096 pixels.
    min_pixels: Annotated[int, Field(ge=1, le=1 << 24)]
    max_pixels: Annotated[int, Field(ge=1, le=1 << 40)]
    patch_size: Annotated[int, Field(ge=1, le=256)]
    temporal_patch_size: _Side
    merge_size: _Side
    image_mean: Listed[tuple[_Mean, _Mean, _Mean]]
    image_std: Listed[tuple[_Spread, _Spread, _Spread]]
    source_config: dict[str, Any] = field(
        default_factory=dict, repr=False, compare=False, kw_only=True
    )

    config_file: ClassVar[str]
    section: ClassVar[str]
    hf_class: ClassVar[tuple[str, str]]
    always_on: ClassVar[tuple[str, ...]]
    own: ClassVar[tuple[str, ...]]

    def __post_init__(self) -> None:
        side = self.patch_size * self.merge_size
        if self.temporal_patch_size * side**2 > _MOST_TOKEN_PIXELS:
            raise ValueError(
                f"patch_size {self.patch_size}, merge_size "
                f"{self.merge_size} and temporal_patch_size {self.temporal_patch_size} give a "
                f"visual token more than {_MOST_TOKEN_PIXELS:,} pixels; correct them"
            )

    @classmethod
    def find(cls: type[V], directory: str | os.PathLike) -> V | None:
        """Read the processor's file in a checkpoint, or `processor_config.json`; None without.

        Raises:
            RuntimeError: a file cannot be read, or is damaged.
            ValueError: settings are missing, out of range or not supported; all are named.
        """
        path, nested = (Path(directory) / name for name in (cls.config_file, NESTED_CONFIG_FILE))
        if path.is_file():
            config = read_json_object(path, "a preprocessor's settings", _REMEDY)
            return cls.from_dict(config, str(path))
        outer = {}
        if nested.is_file():
            outer = read_json_object(nested, "a processor's settings", _REMEDY)
        if cls.section not in outer:
            return None
        config = check_mapping(outer[cls.section], f"{nested}: {cls.section}")
        return cls.from_dict(config, str(nested))

    @classmethod
    def from_dict(cls: type[V], config: dict[str, Any], name: str = "the settings") -> V:
        """Build from HF's settings, see `common_settings`.

        Args:
            name: where they are from, for messages.

        Raises:
            ValueError: settings are missing, out of range or not supported; all are named.
        """
        refuse_unsupported(config, name, cls.always_on, cls.own)
        values = common_settings(config, name)
        values.update({key: config[key] for key in cls.own if config.get(key) is not None})
        try:
            return cls(**values, source_config=dict(config))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error

    def replaced(self: V, **values: Any) -> V:
        """A copy with other settings; None keeps one as it is."""
        return replace(self, **{key: v for key, v in values.items() if v is not None})

    def to_dict(self) -> dict[str, Any]:
        """HF's settings, in the dialect of the published Qwen3-VL checkpoints."""
        kind, class_name = self.hf_class
        values: dict[str, Any] = {kind: class_name, "processor_class": "Qwen3VLProcessor"}
        values |= {k: v for k, v in self.source_config.items() if k not in _LIMITS}
        values["size"] = {"shortest_edge": self.min_pixels, "longest_edge": self.max_pixels}
        for key in _REQUIRED:
            value = getattr(self, key)
            values[key] = list(value) if isinstance(value, tuple) else value
        return values

    def save_pretrained(self, directory: str | os.PathLike) -> None:
        """Write the processor's file, and its folder if it is missing."""
        path = Path(directory) / self.config_file
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(self.to_dict(), indent=2) + "\n")

    def cut(self, frames_RHWC: np.ndarray) -> tuple[np.ndarray, tuple[int, int, int]]:
        """Frames as normalized patches in merge-block order.

        Patches are ordered (t, block row, block column, row in block, column in block); values of a
        patch (channel, frame, y, x). The last frame is repeated to fill a temporal patch, so that
        an image is one temporal patch.

        Args:
            frames_RHWC: uint8, H and W multiples of `patch_size * merge_size`.

        Returns:
            `[P, C * temporal_patch_size * patch_size ** 2]` float32 and the grid (t, h, w) in
            patches.

        Raises:
            ValueError: merge blocks do not tile the frames.
        """
        patch, merge, of_time = self.patch_size, self.merge_size, self.temporal_patch_size
        num_frames, height, width, channels = frames_RHWC.shape
        block = patch * merge
        if height % block or width % block or not height or not width:
            raise ValueError(
                f"frames of {width} x {height} pixels (width x height) are not tiled by blocks of "
                f"{block} x {block} pixels: resize them, or set do_resize to true"
            )
        if missing := -num_frames % of_time:
            last = frames_RHWC[-1:].repeat(missing, axis=0)
            frames_RHWC = np.concatenate([frames_RHWC, last])
        t, h, w = len(frames_RHWC) // of_time, height // patch, width // patch
        blocks = (
            frames_RHWC.reshape(
                t, of_time, h // merge, merge, patch, w // merge, merge, patch, channels
            )
            .transpose(0, 2, 5, 3, 6, 8, 1, 4, 7)
            .reshape(t * h * w, channels, -1)
        )
        patches = np.empty(blocks.shape, dtype=np.float32)
        for channel in range(channels):
            patches[:, channel] = self._table_CV[channel][blocks[:, channel]]
        return patches.reshape(t * h * w, -1), (t, h, w)

    @cached_property
    def _table_CV(self) -> np.ndarray:
        """`[C, 256]` float32: the normalized value of every 8-bit value, per channel.

        As in HF: rescaled in float64, cast to float32, normalized in float32. With a table the
        arithmetic runs once per value, not once per pixel.
        """
        scaled = (np.arange(256, dtype=np.float64) * (1 / 255)).astype(np.float32)
        mean_C, std_C = (np.array(v, dtype=np.float32) for v in (self.image_mean, self.image_std))
        return (scaled[None] - mean_C[:, None]) / std_C[:, None]


@contextmanager
def named_item(kind: str, number: int, source: Any) -> Iterator[None]:
    """Add the number and file name of an image or video to its error."""
    try:
        yield
    except BadSampleError as error:
        name = f"{kind} {number}"
        if isinstance(source, str | os.PathLike):
            name += f" ({os.fspath(source)})"
        raise BadSampleError(error.kind, f"{name}: {error.reason}") from error


# Names of the limits in messages.
_LIMITS = {
    "min_pixels": "size.shortest_edge (or min_pixels)",
    "max_pixels": "size.longest_edge (or max_pixels)",
}


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
    values.update({key: config.get(key) for key in _REQUIRED})
    missing = [_LIMITS.get(key, key) for key, value in values.items() if value is None]
    if missing:
        raise ValueError(
            f"{name} lacks {', '.join(missing)}: Qwen3-VL's settings differ from the defaults "
            "of HF's class, so none is assumed; take the file from the checkpoint"
        )
    return values


def refuse_unsupported(
    config: dict[str, Any], name: str, always_on: tuple[str, ...], either: tuple[str, ...]
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


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)
