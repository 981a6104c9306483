"""Images to the patches and grids that the vision tower takes.

Source: the PIL backend of HF transformers' Qwen2-VL image processor, to the bit. The torchvision
backend rounds differently while resizing, by one step of 8 bits.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from paddle_vl.data.bad_sample import BadSampleError
from paddle_vl.data.vision.image_file import ImageSource, load_rgb
from paddle_vl.data.vision.patches import patchify, value_table
from paddle_vl.data.vision.resize_rule import smart_resize

CONFIG_FILE = "preprocessor_config.json"
# Where transformers 5 keeps the same settings, under "image_processor".
NESTED_CONFIG_FILE = "processor_config.json"

# Steps that are always done here; a checkpoint that turns one off cannot be honoured.
_ALWAYS_ON = ("do_rescale", "do_normalize", "do_convert_rgb")


@dataclass(frozen=True)
class ImageProcessor:
    """Resizes, normalises and cuts images into patches.

    Attributes:
        min_pixels, max_pixels: area of an image after resizing; pixels.
        patch_size: side of a patch; pixels.
        temporal_patch_size: frames per patch; an image is repeated to fill them.
        merge_size: side of a merge block; patches. One block becomes one visual token.
        image_mean, image_std: per channel, for values in [0, 1].
        do_resize: False takes images as they are; merge blocks must then tile them.
        source_config: settings as read from a checkpoint, kept for writing them back.
    """

    min_pixels: int
    max_pixels: int
    patch_size: int
    temporal_patch_size: int
    merge_size: int
    image_mean: tuple[float, ...]
    image_std: tuple[float, ...]
    do_resize: bool = True
    source_config: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 0 < self.min_pixels <= self.max_pixels:
            raise ValueError(
                f"min_pixels {self.min_pixels} and max_pixels {self.max_pixels}: "
                "0 < min_pixels <= max_pixels is needed"
            )

    @classmethod
    def from_pretrained(
        cls,
        directory: str | os.PathLike,
        *,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
    ) -> "ImageProcessor":
        """Read `preprocessor_config.json` (or `processor_config.json`) of a checkpoint.

        Args:
            min_pixels, max_pixels: replace the checkpoint's budget when given.

        Raises:
            RuntimeError: neither file exists.
            ValueError: a needed setting is missing, or one cannot be honoured; all are named.
        """
        directory = Path(directory)
        path = directory / CONFIG_FILE
        nested = directory / NESTED_CONFIG_FILE
        if path.is_file():
            config = _read_json(path)
        elif nested.is_file() and "image_processor" in (outer := _read_json(nested)):
            path, config = nested, outer["image_processor"]
        else:
            raise RuntimeError(
                f"{directory} has no {CONFIG_FILE}: it says how images are resized and "
                "normalised, and there is no safe default; copy it from the checkpoint"
            )
        processor = cls.from_dict(config, name=str(path))
        budget = {"min_pixels": min_pixels, "max_pixels": max_pixels}
        return replace(processor, **{k: v for k, v in budget.items() if v is not None})

    @classmethod
    def from_dict(cls, config: dict[str, Any], name: str = "the settings") -> "ImageProcessor":
        """Build from HF's settings, in either dialect of the pixel budget.

        `size` with `shortest_edge` and `longest_edge` (areas, despite the names), or `min_pixels`
        and `max_pixels`; where both stand the latter win, as in HF.

        Raises:
            ValueError: naming every setting that is missing or cannot be honoured.
        """
        size = config.get("size") or {}
        values = {
            "min_pixels": _first(config.get("min_pixels"), size.get("shortest_edge")),
            "max_pixels": _first(config.get("max_pixels"), size.get("longest_edge")),
        }
        names = {
            "min_pixels": "size.shortest_edge (or min_pixels)",
            "max_pixels": "size.longest_edge (or max_pixels)",
        }
        for key in ("patch_size", "temporal_patch_size", "merge_size", "image_mean", "image_std"):
            values[key] = config.get(key)
        missing = [names.get(key, key) for key, value in values.items() if value is None]
        if missing:
            raise ValueError(
                f"{name} lacks {', '.join(missing)}: Qwen3-VL's settings differ from the defaults "
                "of HF's class, so none is assumed; take the file from the checkpoint"
            )
        _refuse_unsupported(config, name)
        for key in ("image_mean", "image_std"):
            values[key] = tuple(float(value) for value in values[key])
        do_resize = config.get("do_resize")
        return cls(
            **values, do_resize=True if do_resize is None else do_resize, source_config=dict(config)
        )

    def to_dict(self) -> dict[str, Any]:
        """HF's settings, in the dialect of the published Qwen3-VL checkpoints."""
        kept = {
            key: value
            for key, value in self.source_config.items()
            if key not in ("min_pixels", "max_pixels")
        }
        return {
            "image_processor_type": "Qwen2VLImageProcessorFast",
            "processor_class": "Qwen3VLProcessor",
            **kept,
            "size": {"shortest_edge": self.min_pixels, "longest_edge": self.max_pixels},
            "patch_size": self.patch_size,
            "temporal_patch_size": self.temporal_patch_size,
            "merge_size": self.merge_size,
            "image_mean": list(self.image_mean),
            "image_std": list(self.image_std),
            **({} if self.do_resize else {"do_resize": False}),
        }

    def save_pretrained(self, directory: str | os.PathLike) -> None:
        """Write `preprocessor_config.json`."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.to_dict(), indent=2) + "\n"
        (directory / CONFIG_FILE).write_text(text, encoding="utf-8")

    def __call__(self, images: Sequence[ImageSource]) -> dict[str, np.ndarray]:
        """Patches of all images, in order.

        Args:
            images: paths, PIL images or uint8 `[H, W, 3]` arrays; at least one.

        Returns:
            pixel_values `[P, 3 * temporal_patch_size * patch_size ** 2]` float32 and
            image_grid_thw `[n, 3]` int64, in patches.

        Raises:
            BadSampleError: an image that cannot be read or resized, with its number.
        """
        if not images:
            raise ValueError("no image given: a text-only sample has no pixel_values")
        patches, grids = [], []
        for number, source in enumerate(images, start=1):
            try:
                image_patches, grid = self._process(source)
            except BadSampleError as error:
                name = f"image {number}"
                if isinstance(source, str | os.PathLike):
                    name += f" ({os.fspath(source)})"
                raise BadSampleError(error.kind, f"{name}: {error.reason}") from error
            patches.append(image_patches)
            grids.append(grid)
        return {
            "pixel_values": patches[0] if len(patches) == 1 else np.concatenate(patches),
            "image_grid_thw": np.array(grids, dtype=np.int64),
        }

    def num_tokens(self, image_grid_thw: np.ndarray) -> np.ndarray:
        """Visual tokens of every item of a `[n, 3]` grid: `[n]` int64."""
        return image_grid_thw.prod(axis=1) // self.merge_size**2

    def _process(self, source: ImageSource) -> tuple[np.ndarray, tuple[int, int, int]]:
        image = load_rgb(source)
        if self.do_resize:
            height, width = smart_resize(
                image.height,
                image.width,
                self.patch_size * self.merge_size,
                self.min_pixels,
                self.max_pixels,
            )
            image = image.resize((width, height), Image.Resampling.BICUBIC)
        return patchify(
            np.asarray(image)[None],
            self._table_CV,
            patch_size=self.patch_size,
            temporal_patch_size=self.temporal_patch_size,
            merge_size=self.merge_size,
        )

    @cached_property
    def _table_CV(self) -> np.ndarray:
        return value_table(self.image_mean, self.image_std)


def _refuse_unsupported(config: dict[str, Any], name: str) -> None:
    """Raise for every setting that would change the pixels and is not implemented."""
    refused = [
        f"{key} = {value}"
        for key, value in config.items()
        if (key in _ALWAYS_ON and value is False)
        or (key.startswith("do_") and value and key not in (*_ALWAYS_ON, "do_resize"))
    ]
    resample = config.get("resample")
    if resample is not None and resample != Image.Resampling.BICUBIC:
        refused.append(f"resample = {resample} (only {int(Image.Resampling.BICUBIC)}, bicubic)")
    scale = config.get("rescale_factor")
    if scale is not None and not np.isclose(scale, 1 / 255, rtol=1e-6, atol=0):
        refused.append(f"rescale_factor = {scale} (only 1/255)")
    if refused:
        raise ValueError(f"{name} asks for what is not implemented here: {'; '.join(refused)}")


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RuntimeError(f"{path} is not valid JSON: {error}") from error
