"""Image files and PIL images to 8-bit RGB, upright; of an animation the first frame.

Files are opened in the formats of `FORMATS` alone. Transparent pixels are put on white.
"""

import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from paddle_vl.data.bad_sample import BadSampleError
from paddle_vl.data.media_path import shown

ImageSource = str | os.PathLike | Image.Image | np.ndarray

# Not all that Pillow knows: it would run Ghostscript for EPS, and parse formats that nobody keeps
# pictures in.
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")

# Up to 13 bytes a pixel are in memory at a time, 1 GB.
_MOST_PIXELS = 80_000_000

# Converting these modes to RGB clips to 255 instead of scaling, which leaves an almost white image.
_WIDE_MODES = ("I", "F", "I;16", "I;16L", "I;16B", "I;16N")
_TRANSPARENT_MODES = ("RGBA", "RGBa", "LA", "PA")


# What Pillow's decoders report a broken file by; MemoryError where a size is beyond this machine.
_BROKEN = (
    OSError, SyntaxError, ValueError, EOFError, struct.error, ArithmeticError, LookupError,
    TypeError, MemoryError,
)  # fmt: skip


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
        BadSampleError: no such file, not an image of `FORMATS`, too large to be decoded, or more
            than 8 bits per channel.
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
        _check_mode(source)
        return _to_rgb(ImageOps.exif_transpose(source))
    with _opened(Path(source)) as image:
        image.load()
        _check_mode(image)
        # In place, as of what is returned: large images fit into memory few times.
        ImageOps.exif_transpose(image, in_place=True)
        return _to_rgb(image)


@contextmanager
def _opened(path: Path) -> Iterator[Image.Image]:
    if not os.path.isfile(path):
        raise BadSampleError("missing_image", f"there is no file {shown(str(path))}")
    try:
        with Image.open(path, formats=FORMATS) as image:
            _check_size(image)
            yield image
    except BadSampleError:
        raise
    except Image.DecompressionBombError as error:
        raise BadSampleError(
            "unreadable_image",
            f"the file cannot be decoded as an image: {error} Shrink it, or cut it into tiles",
        ) from error
    except _BROKEN as error:
        if found := _other_format(path):
            raise BadSampleError(
                "unreadable_image",
                f"the file has the format {found}, which is not opened; convert it to one of "
                f"{', '.join(FORMATS)}",
            ) from error
        raise BadSampleError(
            "unreadable_image",
            f"the file cannot be decoded as an image ({', '.join(FORMATS)}): {error}",
        ) from error


def _other_format(path: Path) -> str | None:
    """Pillow's name for what the file is by its first bytes, which is all that is looked at."""
    with path.open("rb") as file:
        # Some of the questions read beyond the end of a shorter head.
        head = file.read(16).ljust(16, b"\0")
    Image.init()
    accepting = {name: accept for name, (_, accept) in Image.OPEN.items() if accept}
    if any(accepting[name](head) for name in FORMATS if name in accepting):
        return None
    return next((name for name, accept in accepting.items() if accept(head) is True), None)


def _check_size(image: Image.Image) -> None:
    if image.width * image.height > _MOST_PIXELS:
        raise BadSampleError(
            "unreadable_image",
            f"the file states {image.width} x {image.height} pixels, and at most {_MOST_PIXELS} "
            "are decoded. Shrink it, or cut it into tiles",
        )


def _to_rgb(image: Image.Image) -> Image.Image:
    """The image as RGB, maybe itself."""
    if image.mode not in _TRANSPARENT_MODES and "transparency" not in image.info:
        return image if image.mode == "RGB" else image.convert("RGB")
    rgba = image if image.mode == "RGBA" else image.convert("RGBA")
    on_white = Image.new("RGB", rgba.size, "white")
    on_white.paste(rgba, mask=rgba.getchannel("A"))
    return on_white


def _check_mode(image: Image.Image) -> None:
    if image.mode in _WIDE_MODES:
        raise BadSampleError(
            "unreadable_image",
            f"it has mode {image.mode} (more than 8 bits per channel), which would be clipped; "
            "convert it to 8-bit RGB or grayscale first",
        )
