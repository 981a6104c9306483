"""Random changes of the images of a training sample (`data.image_transforms`).

The frames of a camera are changed alike, each camera in its own way; goal images stay. As in
torchvision on pictures, all is done by Pillow with 8 bits a value.

Source: ranges and choice of `ImageTransforms` in LeRobot and of `preprocess_observation` in openpi.
Unlike there, images are always moved before their colours change, by bilinear interpolation.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import numpy as np
from PIL import Image, ImageEnhance

from paddle_vl.families.policy.features import ImageTransforms

Change = Callable[[Image.Image], Image.Image]
_BILINEAR = Image.Resampling.BILINEAR


def transformed(
    sample: Mapping[str, Any],
    cameras: Sequence[str],
    settings: ImageTransforms,
    rng: np.random.Generator,
) -> dict[str, Any]:
    """A sample with changed images; frames that are padding stay black."""
    sample = dict(sample)
    is_real_F = ~sample["obs_history_is_pad"]
    is_real_F[-1] = True
    for camera in cameras:
        if not sample.get(f"{camera}_is_pad"):
            frames = sample[camera].copy()
            frames[is_real_F] = changed(frames[is_real_F], camera, settings, rng)
            sample[camera] = frames
    return sample


def changed(
    images: np.ndarray, camera: str, settings: ImageTransforms, rng: np.random.Generator
) -> np.ndarray:
    """Images `[N, 3, H, W]` float32 in [0, 1], changed alike."""
    changes = drawn_changes(camera, settings, rng, (images.shape[-1], images.shape[-2]))
    pictures = np.rint(images.transpose(0, 2, 3, 1) * 255).clip(0, 255).astype(np.uint8)
    found = []
    for pixels in pictures:
        picture = Image.fromarray(pixels)
        for change in changes:
            picture = change(picture)
        found.append(np.asarray(picture))
    return np.stack(found).transpose(0, 3, 1, 2) / np.float32(255)


def drawn_changes(
    camera: str, settings: ImageTransforms, rng: np.random.Generator, size: tuple[int, int]
) -> list[Change]:
    """The changes of a camera's images of that width and height, in order."""
    moves = not any(fnmatchcase(camera, pattern) for pattern in settings.still_cameras)
    found: list[Change] = []
    if settings.crop is not None and moves:
        kept = [int(side * settings.crop) for side in size]
        spare = zip(size, kept, strict=True)
        left, top = (int(rng.integers(0, side - part, endpoint=True)) for side, part in spare)
        box = (left, top, left + kept[0], top + kept[1])
        found.append(partial(Image.Image.resize, size=size, resample=_BILINEAR, box=box))
    if (settings.rotation or settings.shift) and moves:
        angle = rng.uniform(-settings.rotation, settings.rotation)
        shift = [round(rng.uniform(-settings.shift, settings.shift) * side) for side in size]
        found.append(partial(_moved, angle=math.radians(angle), shift=shift))
    colours: list[tuple[Any, Sequence[float] | None]] = [
        (partial(_enhanced, kind=ImageEnhance.Brightness), settings.brightness),
        (partial(_enhanced, kind=ImageEnhance.Contrast), settings.contrast),
        (partial(_enhanced, kind=ImageEnhance.Color), settings.saturation),
        (_turned, settings.hue),
        (partial(_enhanced, kind=ImageEnhance.Sharpness), settings.sharpness),
    ]
    for change, limits in colours:
        if limits is not None:
            found.append(partial(change, factor=rng.uniform(limits[0], limits[1])))
    if settings.max_transforms is not None:
        chosen = sorted(rng.permutation(len(found))[: settings.max_transforms])
        found = [found[number] for number in chosen]
    return found


def _moved(picture: Image.Image, angle: float, shift: Sequence[int]) -> Image.Image:
    """Rotated around the centre and shifted to the right and down; black beyond the edges."""
    cos, sin, (width, height) = math.cos(angle), math.sin(angle), picture.size
    x, y = width / 2 + shift[0], height / 2 + shift[1]
    # From a place in the result to its place in the picture.
    rows = (cos, sin, width / 2 - cos * x - sin * y, -sin, cos, height / 2 + sin * x - cos * y)
    return picture.transform(picture.size, Image.Transform.AFFINE, rows, _BILINEAR)


def _turned(picture: Image.Image, factor: float) -> Image.Image:
    """The hue turned by a share of the circle."""
    hue, *others = picture.convert("HSV").split()
    hue = hue.point([(value + round(factor * 255)) % 256 for value in range(256)])
    return Image.merge("HSV", [hue, *others]).convert("RGB")


def _enhanced(picture: Image.Image, factor: float, kind: Any) -> Image.Image:
    return kind(picture).enhance(factor)
