"""Images to the patches and grids that the vision tower takes.

Source: the PIL backend of HF transformers' Qwen2-VL image processor, to the bit. The torchvision
backend rounds differently while resizing, by one step of 8 bits.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from paddle_vl.data.bad_sample import BadSampleError
from paddle_vl.data.image_file import ImageSource, image_size, load_rgb
from paddle_vl.families.qwen3_vl.inputs.patches import patchify, value_table
from paddle_vl.families.qwen3_vl.inputs.preprocessor_files import (
    check_settings,
    common_settings,
    find_settings,
    refuse_unsupported,
    write_settings,
)
from paddle_vl.families.qwen3_vl.inputs.resize_rule import smart_resize

CONFIG_FILE = "preprocessor_config.json"

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
    image_mean: tuple[float, float, float]
    image_std: tuple[float, float, float]
    do_resize: bool = True
    source_config: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_settings(self, "")
        if self.min_pixels > self.max_pixels:
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
        found = find_settings(Path(directory), CONFIG_FILE, "image_processor")
        if found is None:
            raise RuntimeError(
                f"{directory} has no {CONFIG_FILE}: it says how images are resized and "
                "normalised, and there is no safe default; copy it from the checkpoint"
            )
        path, config = found
        processor = cls.from_dict(config, name=str(path))
        budget = {"min_pixels": min_pixels, "max_pixels": max_pixels}
        return replace(processor, **{k: v for k, v in budget.items() if v is not None})

    @classmethod
    def from_dict(cls, config: dict[str, Any], name: str = "the settings") -> "ImageProcessor":
        """Build from HF's settings, in either dialect of the pixel budget.

        Raises:
            ValueError: naming every setting that is missing, makes no sense or cannot be honoured.
        """
        values = common_settings(config, name)
        refuse_unsupported(config, name, always_on=_ALWAYS_ON, either=("do_resize",))
        do_resize = config.get("do_resize")
        try:
            return cls(
                **values,
                do_resize=True if do_resize is None else do_resize,
                source_config=dict(config),
            )
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error

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
        write_settings(Path(directory) / CONFIG_FILE, self.to_dict())

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
            with named_item("image", number, source):
                image_patches, grid = self._process(source)
            patches.append(image_patches)
            grids.append(grid)
        return {
            "pixel_values": patches[0] if len(patches) == 1 else np.concatenate(patches),
            "image_grid_thw": np.array(grids, dtype=np.int64),
        }

    def grids(self, images: Sequence[ImageSource]) -> np.ndarray:
        """Grids `[n, 3]` int64 of images from their headers; height and width may be exchanged.

        Raises:
            BadSampleError: as a call, as far as the header shows it.
        """
        grids = np.ones((len(images), 3), dtype=np.int64)
        for number, source in enumerate(images, start=1):
            with named_item("image", number, source):
                grids[number - 1, 1:] = self._resized(*image_size(source))
        grids[:, 1:] //= self.patch_size
        return grids

    def num_tokens(self, image_grid_thw: np.ndarray) -> np.ndarray:
        """Visual tokens of every item of a `[n, 3]` grid: `[n]` int64."""
        return image_grid_thw.prod(axis=1) // self.merge_size**2

    def _process(self, source: ImageSource) -> tuple[np.ndarray, tuple[int, int, int]]:
        image = load_rgb(source)
        if self.do_resize:
            height, width = self._resized(image.height, image.width)
            image = image.resize((width, height), Image.Resampling.BICUBIC)
        return patchify(
            np.asarray(image)[None],
            self._table_CV,
            patch_size=self.patch_size,
            temporal_patch_size=self.temporal_patch_size,
            merge_size=self.merge_size,
        )

    def _resized(self, height: int, width: int) -> tuple[int, int]:
        if not self.do_resize:
            return height, width
        factor = self.patch_size * self.merge_size
        return smart_resize(height, width, factor, self.min_pixels, self.max_pixels)

    @cached_property
    def _table_CV(self) -> np.ndarray:
        return value_table(self.image_mean, self.image_std)


@contextmanager
def named_item(kind: str, number: int, source: Any) -> Iterator[None]:
    """Gives the error of an image or a video its number, and its file."""
    try:
        yield
    except BadSampleError as error:
        name = f"{kind} {number}"
        if isinstance(source, str | os.PathLike):
            name += f" ({os.fspath(source)})"
        raise BadSampleError(error.kind, f"{name}: {error.reason}") from error
