"""Which size an image or a video is resized to, so that merge blocks tile it within a pixel budget.

Source: `smart_resize` of HF transformers' Qwen2-VL (images) and Qwen3-VL (videos) processors.
"""

import math

from paddle_vl.data.bad_sample import BadSampleError

MAX_ASPECT_RATIO = 200


def smart_resize(
    height: int, width: int, factor: int, min_pixels: int, max_pixels: int
) -> tuple[int, int]:
    """Height and width of an image after resizing: multiples of `factor`, area within the budget.

    Sides are rounded half to even, as Python rounds; a side may reach 0 that way, which the
    minimum of the budget then repairs.

    Args:
        factor: patch size x merge size; pixels.
        min_pixels, max_pixels: area of the result; pixels.

    Raises:
        BadSampleError: one side is more than 200 times the other.

    Example: 480 x 640 with factor 32 and at most 12288 pixels -> (96, 128).
    """
    _check_aspect_ratio("image", height, width)
    new_height, new_width = (round(side / factor) * factor for side in (height, width))
    if new_height * new_width > max_pixels:
        return _shrink(height, width, factor, height * width, max_pixels)
    if new_height * new_width < min_pixels:
        return _grow(height, width, factor, height * width, min_pixels)
    return new_height, new_width


def smart_resize_video(
    num_frames: int,
    height: int,
    width: int,
    factor: int,
    min_pixels: int,
    max_pixels: int,
    temporal_factor: int = 2,
) -> tuple[int, int]:
    """Height and width of every frame of a video; the budget counts the pixels of all frames.

    Args:
        temporal_factor: frames per temporal patch.
        min_pixels, max_pixels: frames x height x width of the result; pixels.

    Raises:
        BadSampleError: fewer frames than one temporal patch holds, or too long and thin.
    """
    if num_frames < temporal_factor:
        raise BadSampleError(
            "too_few_frames",
            f"video has {num_frames} frame(s); at least {temporal_factor} are needed to fill one "
            "temporal patch",
        )
    if height < factor or width < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    _check_aspect_ratio("video", height, width)
    new_height, new_width = (round(side / factor) * factor for side in (height, width))
    pixels = round(num_frames / temporal_factor) * temporal_factor * new_height * new_width
    if pixels > max_pixels:
        return _shrink(height, width, factor, num_frames * height * width, max_pixels)
    if pixels < min_pixels:
        return _grow(height, width, factor, num_frames * height * width, min_pixels)
    return new_height, new_width


def _shrink(height: int, width: int, factor: int, pixels: int, budget: int) -> tuple[int, int]:
    scale = math.sqrt(pixels / budget)
    new_height, new_width = (
        max(factor, math.floor(side / scale / factor) * factor) for side in (height, width)
    )
    return new_height, new_width


def _grow(height: int, width: int, factor: int, pixels: int, budget: int) -> tuple[int, int]:
    scale = math.sqrt(budget / pixels)
    new_height, new_width = (math.ceil(side * scale / factor) * factor for side in (height, width))
    return new_height, new_width


def _check_aspect_ratio(kind: str, height: int, width: int) -> None:
    if max(height, width) > MAX_ASPECT_RATIO * min(height, width):
        raise BadSampleError(
            "aspect_ratio",
            f"{kind} of {width} x {height} pixels (width x height) is too long and thin: one side "
            f"may be at most {MAX_ASPECT_RATIO} times the other; crop it",
        )
