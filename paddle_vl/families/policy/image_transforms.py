"""Random changes of the images of a training sample (`data.image_transforms`).

The frames of a camera are changed alike, each camera in its own way; goal images stay. Images are
`[N, 3, H, W]` float32 in [0, 1], and so are the changed ones.

Source: ranges and choice of `ImageTransforms` in LeRobot and of `preprocess_observation` in openpi;
formulas of torchvision's v2 transforms. Unlike there, images are moved before their colours are
changed, always by bilinear interpolation.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
from PIL import Image

from paddle_vl.families.policy.features import ImageTransforms

# Weights of red, green and blue in grey.
_GREY = np.array([0.2989, 0.587, 0.114], dtype=np.float32)[:, None, None]
Change = Callable[[np.ndarray, ImageTransforms, np.random.Generator], np.ndarray]


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
        if sample.get(f"{camera}_is_pad"):
            continue
        frames = sample[camera].copy()
        frames[is_real_F] = changed(frames[is_real_F], camera, settings, rng)
        sample[camera] = frames
    return sample


def changed(
    images: np.ndarray, camera: str, settings: ImageTransforms, rng: np.random.Generator
) -> np.ndarray:
    """Images of a camera, changed alike."""
    stays = any(fnmatchcase(camera, pattern) for pattern in settings.still_cameras)
    given = {
        "crop": settings.crop is not None and not stays,
        "affine": bool(settings.rotation or settings.shift) and not stays,
        **{name: getattr(settings, name) is not None for name in _COLOURS},
    }
    names = [name for name, is_given in given.items() if is_given]
    if settings.max_transforms is not None:
        chosen = sorted(rng.permutation(len(names))[: settings.max_transforms])
        names = [names[number] for number in chosen]
    for name in names:
        if name in _COLOURS:
            images = _COLOURS[name](images, np.float32(rng.uniform(*getattr(settings, name))))
        else:
            images = _MOVES[name](images, settings, rng)
        images = np.clip(images, 0.0, 1.0)
    return images


def _crop(images: np.ndarray, settings: ImageTransforms, rng: np.random.Generator) -> np.ndarray:
    """A random part, scaled to the size of the image."""
    height, width = images.shape[-2:]
    assert settings.crop is not None, "chosen if it is given"
    rows, columns = int(height * settings.crop), int(width * settings.crop)
    top, left = (int(rng.integers(0, n, endpoint=True)) for n in (height - rows, width - columns))
    box = (left, top, left + columns, top + rows)
    return _by_plane(images, lambda p: p.resize((width, height), Image.Resampling.BILINEAR, box))


def _affine(images: np.ndarray, settings: ImageTransforms, rng: np.random.Generator) -> np.ndarray:
    """Rotated around the centre and shifted by whole pixels; black beyond the edges."""
    height, width = images.shape[-2:]
    angle = math.radians(rng.uniform(-settings.rotation, settings.rotation))
    down, right = (round(rng.uniform(-settings.shift, settings.shift) * n) for n in (height, width))
    cos, sin = math.cos(angle), math.sin(angle)
    x, y = width / 2 + right, height / 2 + down
    # From a place in the result to its place in the image.
    rows = (cos, sin, width / 2 - cos * x - sin * y, -sin, cos, height / 2 + sin * x - cos * y)
    kind, filter_ = Image.Transform.AFFINE, Image.Resampling.BILINEAR
    return _by_plane(images, lambda p: p.transform((width, height), kind, rows, filter_))


def _by_plane(images: np.ndarray, change: Callable[[Image.Image], Image.Image]) -> np.ndarray:
    planes = images.reshape([-1, *images.shape[-2:]])
    found = [np.asarray(change(Image.fromarray(plane))) for plane in planes]
    return np.stack(found).reshape(images.shape)


def _brightness(images: np.ndarray, factor: np.float32) -> np.ndarray:
    return images * factor


def _contrast(images: np.ndarray, factor: np.float32) -> np.ndarray:
    return _blended(images, _grey(images).mean(axis=(-2, -1), keepdims=True), factor)


def _saturation(images: np.ndarray, factor: np.float32) -> np.ndarray:
    return _blended(images, _grey(images), factor)


def _hue(images: np.ndarray, turn: np.float32) -> np.ndarray:
    """The hue turned by a share of the circle."""
    red, green, blue = np.moveaxis(images, -3, 0)
    high, span = images.max(axis=-3), np.ptp(images, axis=-3)
    divisor = np.where(span > 0, span, np.float32(1))
    sixths = np.where(
        high == red,
        (green - blue) / divisor,
        np.where(high == green, (blue - red) / divisor + 2, (red - green) / divisor + 4),
    )
    places = [(number + sixths + 6 * turn) % 6 for number in (5, 3, 1)]
    return np.stack([high - span * np.clip(np.minimum(k, 4 - k), 0, 1) for k in places], axis=-3)


def _sharpness(images: np.ndarray, factor: np.float32) -> np.ndarray:
    """0 smooths by the mean of 3 x 3 pixels, the middle one five times; edges stay."""
    height, width = images.shape[-2:]
    smooth, inner = images.copy(), np.s_[..., 1:-1, 1:-1]
    total = 4 * images[inner]
    for down in range(3):
        for right in range(3):
            total = total + images[..., down : height - 2 + down, right : width - 2 + right]
    smooth[inner] = total / 13
    return _blended(images, smooth, factor)


def _blended(images: np.ndarray, others: np.ndarray, factor: np.float32) -> np.ndarray:
    return others + (images - others) * factor


def _grey(images: np.ndarray) -> np.ndarray:
    return (images * _GREY).sum(axis=-3, keepdims=True)


_MOVES: dict[str, Change] = {"crop": _crop, "affine": _affine}
_COLOURS: dict[str, Callable[[np.ndarray, np.float32], np.ndarray]] = {
    "brightness": _brightness,
    "contrast": _contrast,
    "saturation": _saturation,
    "hue": _hue,
    "sharpness": _sharpness,
}
