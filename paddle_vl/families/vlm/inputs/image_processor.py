"""Image processor: resizing, normalized patches and grids; and the sizes of frames of videos.

Source: the PIL backend of HF transformers' Qwen2-VL image processor, bit-exact (the torchvision
backend differs by one 8-bit step when resizing), and `smart_resize` of the Qwen2-VL (images) and
Qwen3-VL (videos) processors.

Shapes: R frames, H and W pixels, C = 3 channels, P patches, n images.
"""

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import field
from functools import lru_cache
from typing import Any

import numpy as np
from PIL import Image

from paddle_vl.data.jsonl import BadSampleError
from paddle_vl.data.media_file import ImageSource, image_size, load_rgb
from paddle_vl.families.vlm.inputs.preprocessor_files import VisionProcessor
from paddle_vl.files.stored_settings import checked


@checked
class ImageProcessor(VisionProcessor):
    """Resizes and normalizes images and cuts them into patches.

    Attributes:
        do_resize: False leaves images as they are; merge blocks must then tile them.
        refuses_shrinking: whether an image of more pixels than `max_pixels` is refused. Of a run,
            not in files.
    """

    do_resize: bool = True
    refuses_shrinking: bool = field(default=False, compare=False, kw_only=True)

    config_file = "preprocessor_config.json"
    section = "image_processor"
    hf_class = ("image_processor_type", "Qwen2VLImageProcessorFast")
    always_on = ("do_rescale", "do_normalize", "do_convert_rgb")
    own = ("do_resize",)
    kind = "image"

    @classmethod
    def from_pretrained(
        cls,
        directory: str | os.PathLike,
        *,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
    ) -> "ImageProcessor":
        """Read `processor_config.json` or `preprocessor_config.json` of a checkpoint.

        Args:
            min_pixels, max_pixels: override the checkpoint's limits; pixels.

        Raises:
            RuntimeError: neither file exists.
            ValueError: settings are missing, out of range or not supported; all are named.
        """
        processor = cls.find(directory)
        if processor is None:
            raise RuntimeError(
                f"{directory} has no {cls.config_file}: it defines how images are resized and "
                "normalized, and there is no safe default; copy it from the checkpoint"
            )
        return processor.replaced(min_pixels=min_pixels, max_pixels=max_pixels)

    def __call__(
        self, images: Sequence[ImageSource], with_pixels: bool = True
    ) -> dict[str, np.ndarray]:
        """Patches of all images, in order.

        Args:
            images: paths, PIL images or uint8 `[H, W, 3]` arrays; at least one.
            with_pixels: False gives zeros `[P, 1]` and grids from headers alone, in which EXIF may
                exchange height and width.

        Returns:
            pixel_values `[P, 3 * temporal_patch_size * patch_size ** 2]` float32 and
            image_grid_thw `[n, 3]` int64, patches (t, h, w).

        Raises:
            BadSampleError: an image cannot be read or resized, with its number.
        """
        names = ("pixel_values", "image_grid_thw")
        return dict(zip(names, encode_each(self, images, with_pixels), strict=True))

    def num_tokens(self, image_grid_thw: np.ndarray) -> np.ndarray:
        """Visual tokens of every image of a `[n, 3]` grid: `[n]` int64."""
        return image_grid_thw.prod(axis=1) // self.merge_size**2

    def encode_one(self, source: ImageSource, with_pixels: bool) -> tuple[Any, ...]:
        if not with_pixels:
            width, height = image_size(source)
            return self.without_pixels(1, *self._fitted(height, width))
        image = load_rgb(source)
        if self.do_resize:
            height, width = self._fitted(image.height, image.width)
            image = image.resize((width, height), Image.Resampling.BICUBIC)
        return patchify(np.asarray(image)[None], self)

    def _fitted(self, height: int, width: int) -> tuple[int, int]:
        if self.refuses_shrinking and self.do_resize and height * width > self.max_pixels:
            raise BadSampleError(
                "large_image",
                f"image of {width} x {height} pixels (width x height) would be shrunk to "
                f"{self.max_pixels} pixels, which takes small print away: cut it into parts, raise "
                "data.max_pixels, or leave pixels out of data.checks",
            )
        return self._resized(height, width)

    def _resized(self, height: int, width: int) -> tuple[int, int]:
        if not self.do_resize:
            return height, width
        factor = self.patch_size * self.merge_size
        return smart_resize(height, width, factor, self.min_pixels, self.max_pixels)


def encode_each(
    processor: VisionProcessor, sources: Sequence[Any], with_pixels: bool
) -> Iterator[Any]:
    """Pixels of all sources, their grids `[n, 3]` int64, and lists of what else there is.

    Raises:
        BadSampleError: a source cannot be used, with its number and file name.
    """
    if not sources:
        raise ValueError(f"no {processor.kind} given: a sample without any has no pixels of them")
    found = []
    for number, source in enumerate(sources, start=1):
        try:
            found.append(processor.encode_one(source, with_pixels))
        except BadSampleError as error:
            name = f"{processor.kind} {number}"
            if isinstance(source, str | os.PathLike):
                name += f" ({os.fspath(source)})"
            raise BadSampleError(error.kind, f"{name}: {error.reason}") from error
    pixels, grids, *more = zip(*found, strict=True)
    yield pixels[0] if len(pixels) == 1 else np.concatenate(pixels)
    yield np.array(grids, np.int64)
    yield from map(list, more)


MAX_ASPECT_RATIO = 200


def smart_resize(
    height: int,
    width: int,
    factor: int,
    min_pixels: int,
    max_pixels: int,
    num_frames: int | None = None,
    temporal_factor: int = 2,
) -> tuple[int, int]:
    """Height and width of an image, or of the frames of a video, after resizing: multiples of
    `factor`, area within the limits.

    Sides are rounded half to even; a side that becomes 0 is repaired by `min_pixels`.

    Args:
        factor: patch size x merge size; pixels.
        min_pixels, max_pixels: limits of the area after resizing; pixels. Of a video they hold for
            all frames together.
        num_frames: of a video; None for an image.
        temporal_factor: frames per temporal patch.

    Raises:
        BadSampleError: one side is more than 200 times the other, or there are fewer frames than
            one temporal patch holds.

    Example: 480 x 640 with factor 32 and at most 12288 pixels -> (96, 128).
    """
    kind, frames, padded = "image", 1, 1
    if num_frames is not None:
        if num_frames < temporal_factor:
            raise BadSampleError(
                "too_few_frames",
                f"the video has {num_frames} frame(s); at least {temporal_factor} are needed to "
                "fill a temporal patch: use an image instead",
            )
        if height < factor or width < factor:
            scale = max(factor / height, factor / width)
            height, width = int(height * scale), int(width * scale)
        kind, frames = "video", num_frames
        padded = round(num_frames / temporal_factor) * temporal_factor
    if max(height, width) > MAX_ASPECT_RATIO * min(height, width):
        raise BadSampleError(
            "aspect_ratio",
            f"{kind} of {width} x {height} pixels (width x height): one side may be at most "
            f"{MAX_ASPECT_RATIO} times the other; crop it",
        )
    # The limits are compared with the padded frames of the rounded sides.
    new_height, new_width = (round(side / factor) * factor for side in (height, width))
    area, rounded = frames * height * width, padded * new_height * new_width
    if rounded > max_pixels:
        scale = math.sqrt(area / max_pixels)
        sides = (math.floor(side / scale / factor) * factor for side in (height, width))
        new_height, new_width = (max(factor, side) for side in sides)
    elif rounded < min_pixels:
        scale = math.sqrt(min_pixels / area)
        sides = (math.ceil(side * scale / factor) * factor for side in (height, width))
        new_height, new_width = sides
    return new_height, new_width


@lru_cache(maxsize=16)
def value_table(mean: tuple[float, ...], std: tuple[float, ...]) -> np.ndarray:
    """`[C, 256]` float32: the normalized value of every 8-bit value, per channel.

    As in HF: rescaled in float64, cast to float32, normalized in float32. With a table the
    arithmetic runs once per value, not once per pixel.
    """
    scaled = (np.arange(256, dtype=np.float64) * (1 / 255)).astype(np.float32)
    mean_C, std_C = (np.array(values, dtype=np.float32) for values in (mean, std))
    return (scaled[None] - mean_C[:, None]) / std_C[:, None]


def patchify(
    frames_RHWC: np.ndarray, settings: VisionProcessor
) -> tuple[np.ndarray, tuple[int, int, int]]:
    """Cut frames into normalized patches in merge-block order.

    Patches are ordered (t, block row, block column, row in block, column in block); values of a
    patch (channel, frame, y, x). The last frame is repeated to fill a temporal patch, so that an
    image is one temporal patch.

    Args:
        frames_RHWC: uint8, H and W multiples of `patch_size * merge_size`.

    Returns:
        `[P, C * temporal_patch_size * patch_size ** 2]` float32 and the grid (t, h, w) in patches.

    Raises:
        ValueError: merge blocks do not tile the frames.
    """
    patch, merge, of_time = settings.patch_size, settings.merge_size, settings.temporal_patch_size
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
    table_CV = value_table(tuple(settings.image_mean), tuple(settings.image_std))
    patches = np.empty(blocks.shape, dtype=np.float32)
    for channel in range(channels):
        patches[:, channel] = table_CV[channel][blocks[:, channel]]
    return patches.reshape(t * h * w, -1), (t, h, w)
