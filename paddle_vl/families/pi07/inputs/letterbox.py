"""Images fitted into a size: scaled with their sides' ratio kept, the rest filled up."""

import numpy as np


def letterbox(images: np.ndarray, size: tuple[int, int], fill: float = 0.0) -> np.ndarray:
    """Images scaled to fit, bilinearly, and filled up on top and left.

    The larger of both ratios scales both sides, which are cut to whole pixels; images of the right
    size are returned as they are.

    Args:
        images: `[..., height, width]` float32.
        size: (height, width) to reach.

    Raises:
        ValueError: an image that would vanish.
    """
    height, width = images.shape[-2:]
    if (height, width) == tuple(size):
        return images
    ratio = max(width / size[1], height / size[0])
    inner = int(height / ratio), int(width / ratio)
    if 0 in inner:
        raise ValueError(
            f"an image of {height} x {width} has no pixel left when it is fitted into "
            f"{size[0]} x {size[1]}"
        )
    scaled = _resized(_resized(images, inner[1], axis=-1), inner[0], axis=-2)
    boxed = np.full((*images.shape[:-2], *size), fill, dtype=np.float32)
    boxed[..., size[0] - inner[0] :, size[1] - inner[1] :] = scaled
    return boxed


def _resized(images: np.ndarray, length: int, axis: int) -> np.ndarray:
    """Linear interpolation along one axis, pixel centres at halves, edges held."""
    source = images.shape[axis]
    if length == source:
        return images
    position = (np.arange(length, dtype=np.float32) + 0.5) * np.float32(source / length) - 0.5
    position = np.maximum(position, np.float32(0))
    first = np.minimum(position.astype(np.int64), source - 1)
    second = np.minimum(first + 1, source - 1)
    share = (position - first).astype(np.float32)
    share = share if axis == -1 else share[:, None]
    low, high = np.take(images, first, axis=axis), np.take(images, second, axis=axis)
    return low * (1 - share) + high * share
