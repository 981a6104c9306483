"""What image and video processors share: settings in HF's preprocessor files."""

import json
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

import numpy as np
from PIL import Image
from pydantic import Field

from paddle_vl.families.vlm.templates.template_files import NESTED_CONFIG_FILE
from paddle_vl.files.stored_settings import Listed, Number, check_mapping, checked
from paddle_vl.files.text_file import read_json_object, shown, write_text

V = TypeVar("V", bound="VisionProcessor")

_REMEDY = "copy it from the checkpoint"
# For pixels in [0, 1]; beyond it they would collapse to one value, or overflow.
_Mean = Annotated[Number, Field(ge=-10, le=10)]
_Spread = Annotated[Number, Field(ge=1e-4, le=1e4)]
_Side = Annotated[int, Field(ge=1, le=64)]
# Limit of the pixels of one visual token, which is the smallest image.
_MOST_TOKEN_PIXELS = 1 << 24
# Names of the limits in messages.
_LIMITS = {"min_pixels": "size.shortest_edge", "max_pixels": "size.longest_edge"}
_REQUIRED = ("patch_size", "temporal_patch_size", "merge_size", "image_mean", "image_std")


@checked
class VisionProcessor(ABC):
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
        never_on: settings that a checkpoint cannot turn on, beside other steps.
        own: settings that the other processor does not have.
        bounds: pairs of settings, the first at most the second, and the least of the first.
        kind: what is processed.
        family: for messages; and HF's name of its processor.
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
    never_on: ClassVar[tuple[str, ...]] = ()
    own: ClassVar[tuple[str, ...]]
    bounds: ClassVar[tuple[tuple[str, str, int], ...]] = (("min_pixels", "max_pixels", 1),)
    kind: ClassVar[str]
    family: ClassVar[tuple[str, str]] = ("Qwen3-VL", "Qwen3VLProcessor")

    def __post_init__(self) -> None:
        prefix = "" if self.kind == "image" else f"{self.kind}_"
        for low, high, least in self.bounds:
            values = getattr(self, low), getattr(self, high)
            if not least <= values[0] <= values[1]:
                raise ValueError(
                    f"{prefix.replace('_', ' ')}{low} {values[0]} and {high} {values[1]}: {least} "
                    f"<= {low} <= {high} is needed; set data.{prefix}{low} and data.{prefix}{high} "
                    f"together, or correct {self.config_file}"
                )
        side = self.patch_size * self.merge_size
        if self.temporal_patch_size * side**2 > _MOST_TOKEN_PIXELS:
            raise ValueError(
                f"patch_size {self.patch_size}, merge_size "
                f"{self.merge_size} and temporal_patch_size {self.temporal_patch_size} give a "
                f"visual token more than {_MOST_TOKEN_PIXELS:,} pixels; correct them"
            )

    @classmethod
    def find(cls: type[V], directory: str | os.PathLike) -> V | None:
        """The processor that a checkpoint's files describe; None without.

        Raises:
            RuntimeError: a file cannot be read, or is damaged.
            ValueError: settings are missing, out of range or not supported; all are named.
        """
        return next(cls.stored_in(Path(directory)), None)

    @classmethod
    def stored_in(cls: type[V], directory: Path) -> Iterator[V]:
        """What the files of a checkpoint say, in the order in which transformers 5 takes them: the
        section of `processor_config.json`, then the processor's own file. Raises as `find` does."""
        outer = _outer(directory)
        if outer.get(cls.section) is not None:
            where = str(directory / NESTED_CONFIG_FILE)
            config = check_mapping(outer[cls.section], f"{where}: {cls.section}")
            yield cls.from_dict(config, where)
        if (path := directory / cls.config_file).is_file():
            config = read_json_object(path, "a preprocessor's settings", _REMEDY)
            yield cls.from_dict(config, str(path))

    @classmethod
    def from_dict(cls: type[V], config: dict[str, Any], name: str = "the settings") -> V:
        """Build from HF's settings.

        The limits are `size` with `shortest_edge` and `longest_edge` (numbers of pixels, despite
        the names). Those of images may also be `min_pixels` and `max_pixels`, which take
        precedence; for videos HF does not read these, so they must be equal.

        Args:
            name: where they are from, for messages.

        Raises:
            ValueError: settings are missing, out of range or not supported; all are named.
        """
        cls._refuse_unsupported(config, name)
        size = config.get("size") or {}
        if not isinstance(size, dict):
            raise ValueError(
                f"{name} has size {shown(size)}; {{'shortest_edge': ..., 'longest_edge': ...}} is "
                "needed"
            )
        limits = {"min_pixels": size.get("shortest_edge"), "max_pixels": size.get("longest_edge")}
        values = {key: config.get(key) for key in (*limits, *_REQUIRED, *cls.own)}
        if cls.kind == "video":
            for key, value in limits.items():
                if values[key] not in (None, value):
                    raise ValueError(
                        f"{name}: {key} is {shown(values[key])}, but for videos HF reads "
                        f"{_LIMITS[key]} alone, which is {shown(value)}: set that, remove {key}"
                    )
        values |= {key: value for key, value in limits.items() if values[key] is None}
        missing = [_LIMITS.get(key, key) for key in (*limits, *_REQUIRED) if values[key] is None]
        if missing:
            raise ValueError(
                f"{name} lacks {', '.join(missing)}: {cls.family[0]}'s settings differ from the "
                "defaults of HF's class, so none is assumed; take the file from the checkpoint"
            )
        values = {key: value for key, value in values.items() if value is not None}
        try:
            return cls(**values, source_config=dict(config))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error

    @classmethod
    def _refuse_unsupported(cls, config: dict[str, Any], name: str) -> None:
        """Raise a ValueError with all settings that change the pixels and are not supported."""
        refused = [
            f"{key} = {shown(value)}"
            for key, value in config.items()
            if (key in cls.always_on and value is False)
            or (key in cls.never_on and value)
            or (key.startswith("do_") and value and key not in (*cls.always_on, *cls.own))
        ]
        refused += [
            f"{key} = {shown(value)} (only true or false)"
            for key, value in config.items()
            if key.startswith("do_") and value is not None and not isinstance(value, bool)
        ]
        resample, bicubic = config.get("resample"), Image.Resampling.BICUBIC
        if resample is not None and resample != bicubic:
            refused.append(f"resample = {shown(resample)} (only {int(bicubic)}, bicubic)")
        scale = config.get("rescale_factor")
        is_close = type(scale) is float and np.isclose(scale, 1 / 255, rtol=1e-6, atol=0)
        if scale is not None and not is_close:
            refused.append(f"rescale_factor = {shown(scale)} (only 1/255)")
        if refused:
            raise ValueError(f"{name} has settings that are not supported: {'; '.join(refused)}")

    def replaced(self: V, **values: Any) -> V:
        """A copy with other settings; None keeps one as it is."""
        return replace(self, **{key: v for key, v in values.items() if v is not None})

    def to_dict(self) -> dict[str, Any]:
        """HF's settings, in the dialect of the family's published checkpoints."""
        kind, class_name = self.hf_class
        values: dict[str, Any] = {kind: class_name, "processor_class": self.family[1]}
        values |= {k: v for k, v in self.source_config.items() if k not in _LIMITS}
        values["size"] = {"shortest_edge": self.min_pixels, "longest_edge": self.max_pixels}
        for key in _REQUIRED:
            value = getattr(self, key)
            values[key] = list(value) if isinstance(value, tuple) else value
        own = {key: getattr(self, key) for key in self.own}
        # A step that is on is not mentioned, nor what is open.
        return values | {k: v for k, v in own.items() if v is not True and v is not None}

    @abstractmethod
    def encode_one(self, source: Any, with_pixels: bool) -> tuple[Any, ...]:
        """Pixels of a source, its grid (t, h, w), and what else there is.

        Args:
            with_pixels: False gives zeros `[P, 1]`; of a file only the header is read.
        """

    def without_pixels(self, frames: int, height: int, width: int) -> tuple[np.ndarray, Any]:
        """Zeros `[P, 1]` float32 and the grid of frames of that size, in pixels."""
        grid = (frames, height // self.patch_size, width // self.patch_size)
        return np.broadcast_to(np.float32(0), (math.prod(grid), 1)), grid

    def save_pretrained(self, directory: str | os.PathLike) -> None:
        """Write the processor's file, and its folder if it is missing."""
        path = Path(directory) / self.config_file
        path.parent.mkdir(parents=True, exist_ok=True)
        # FastDeploy reads the older names of an image's limits, and no others.
        older = {key: getattr(self, key) for key in _LIMITS if self.kind == "image"}
        write_text(path, json.dumps(self.to_dict() | older, indent=2) + "\n")
        if self.section in (outer := _outer(path.parent)):
            # It would be read in place of the new file.
            text = json.dumps(outer | {self.section: self.to_dict()}, indent=2) + "\n"
            write_text(path.with_name(NESTED_CONFIG_FILE), text)


def _outer(directory: Path) -> dict[str, Any]:
    """What `processor_config.json` holds; empty without that file."""
    nested = directory / NESTED_CONFIG_FILE
    if not nested.is_file():
        return {}
    return read_json_object(nested, "a processor's settings", _REMEDY)
