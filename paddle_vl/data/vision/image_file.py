"""Image files and PIL images to 8-bit RGB, upright."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from paddle_vl.data.bad_sample import BadSampleError

ImageSource = str | os.PathLike | Image.Image | np.ndarray

# Converting these modes to RGB clips to 255 instead of scaling, which leaves an almost white image.
_WIDE_MODES = ("I", "F", "I;16", "I;16L", "I;16B", "I;16N")


def image_size(source: ImageSource) -> tuple[int, int]:
    """Two sides of an image from the file's header alone, in any order: EXIF may turn it.

    Raises:
        BadSampleError: as `load_rgb`, as far as the header shows it.
    """
    if isinstance(source, np.ndarray | Image.Image):
        return load_rgb(source).size
    with _opened(Path(source)) as image:
        _check_mode(image)
        return image.size


def load_rgb(source: ImageSource) -> Image.Image:
    """Open an image as 8-bit RGB, turned upright by its EXIF orientation.

    Args:
        source: a path, a PIL image, or a uint8 `[H, W, 3]` array.

    Raises:
        BadSampleError: no such file, not an image, or more than 8 bits per channel.
    """
    if isinstance(source, np.ndarray):
        if source.dtype != np.uint8 or source.ndim != 3 or source.shape[2] != 3:
            raise BadSampleError(
                "unreadable_image",
                f"image array has dtype {source.dtype} and shape {list(source.shape)}; "
                "uint8 [height, width, 3] is needed",
            )
        return Image.fromarray(source)
    if isinstance(source, Image.Image):
        return _to_rgb(source)
    with _opened(Path(source)) as image:
        image.load()
        return _to_rgb(image)


@contextmanager
def _opened(path: Path) -> Iterator[Image.Image]:
    if not path.is_file():
        raise BadSampleError("missing_image", f"there is no file {path}")
    try:
        with Image.open(path) as image:
            yield image
    except BadSampleError:
        raise
    # Pillow's decoders report a broken file by any of these.
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise BadSampleError(
            "unreadable_image", f"the file cannot be decoded as an image: {error}"
        ) from error


def _to_rgb(image: Image.Image) -> Image.Image:
    _check_mode(image)
    return ImageOps.exif_transpose(image).convert("RGB")


def _check_mode(image: Image.Image) -> None:
    if image.mode in _WIDE_MODES:
        raise BadSampleError(
            "unreadable_image",
            f"it has mode {image.mode} (more than 8 bits per channel), which would be clipped; "
            "convert it to 8-bit RGB or grayscale first",
        )
