"""Image files to 8-bit RGB, and paths of images and videos in data files.

Images are turned upright; an animation gives its first frame; transparent pixels become white. Only
the formats of `FORMATS` are opened.
"""

import math
import os
import reprlib
import stat
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from paddle_vl.data.jsonl import BadSampleError

_SHOWN, _BRIEF = 200, 80


class MediaFolder(NamedTuple):
    """The folder that paths of a data file are relative to.

    Attributes:
        directory: folder of the data file; None leaves paths as they are.
        allow_outside: whether absolute paths, `../` and links may lead out of the folder.
        remote: makes a file of an http(s) address; None refuses addresses.
    """

    directory: Path | None = None
    allow_outside: bool = True
    remote: Callable[[str], os.PathLike] | None = None

    def path(self, text: str, what: str) -> str:
        """The path of a line joined to the folder.

        Args:
            text: path as the line has it.
            what: kind of file for messages: `image`, `video`.

        Raises:
            BadSampleError: the path has a NUL character, or leads outside against `allow_outside`.
        """
        if "\0" in text:
            raise BadSampleError(
                "bad_path", f"{what} path {shown(text)!r} contains a NUL character"
            )
        if self.directory is None:
            return text
        joined = str(self.directory / text)
        if not self.allow_outside:
            _check_inside(self.directory, text, joined, what)
        return joined


def _check_inside(directory: Path, text: str, joined: str, what: str) -> None:
    folder, found = os.path.realpath(directory), os.path.realpath(joined)
    if os.path.commonpath([folder, found]) != folder:
        raise BadSampleError(
            "outside_path",
            f"{what} path {shown(text)!r} leads to {shown(found)}, outside the folder of the data "
            f"file ({folder}), and data.allow_outside is false: move the file into the folder, or "
            "set data.allow_outside to true",
        )


def shown(path: str) -> str:
    """A path for a message: very long ones shortened, NUL characters escaped."""
    text = path.replace("\0", "\\0")
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... ({len(text)} characters)"


class _Brief(reprlib.Repr):
    """Values for messages: bytes, as of images, by their number alone."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = _BRIEF

    def repr_bytes(self, value: bytes, level: int) -> str:
        return f"<{len(value)} bytes>"


def brief(value: object) -> str:
    """A value of a row for a message: shortened, without bytes."""
    return value[:_BRIEF] if isinstance(value, str) else _Brief().repr(value)[: 2 * _BRIEF]


def media_source(
    value: Any, what: str, where: str, folder: MediaFolder
) -> "str | bytes | os.PathLike | ImageSection":
    """An image or a video of a row: the path of a file in the folder, its bytes, a remote file, or
    a section of an image.

    Args:
        value: a path, or of an image also its bytes or, as Hugging Face writes it, `{bytes, path}`.
        what: `image` or `video`.
        where: place in the row, for messages.

    Raises:
        BadSampleError: neither, or an unusable path.
    """
    if isinstance(value, ImageSection):
        return replace(value, file=media_source(value.file, what, where, folder))
    if what == "image" and isinstance(value, Mapping):
        value = value.get("bytes") or value.get("path")
    if what == "image" and isinstance(value, bytes) and value:
        return value
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        others = " or an image's bytes are" if what == "image" else " is"
        raise BadSampleError(
            "missing_key", f"{where} {brief(value)!r} is not a path; a file name{others} needed"
        )
    text = os.fspath(value).removeprefix("file://")
    if text.startswith(("http://", "https://")) and folder.remote is not None:
        return folder.remote(text)
    if text.startswith(("http://", "https://", "data:")):
        raise BadSampleError(
            "remote",
            f"{where} {text[:80]!r} is not a file name; save it as a file and write its path, or "
            "for an address set data.allow_remote: true",
        )
    return folder.path(text, what)


def file_size(path: str | os.PathLike, what: str) -> int:
    """Size of a file in bytes.

    Raises:
        BadSampleError: the file does not exist, of kind `missing_image` or `missing_video`.
    """
    with suppress(OSError, ValueError):
        found = os.stat(path)
        if stat.S_ISREG(found.st_mode):
            return found.st_size
    raise BadSampleError(f"missing_{what}", f"{what} file {shown(os.fspath(path))} does not exist")


def files_of(source: Any) -> list[str]:
    """Paths of a source's files; none for what is not fetched yet and for objects in memory."""
    if isinstance(source, str | Path):
        return [str(source)]
    if isinstance(source, ImageSection):
        return files_of(source.file)
    return [path for each in getattr(source, "files", ()) for path in files_of(each)]


@dataclass(frozen=True)
class ImageSection:
    """The rectangle around some corners of an image, cut out whenever it is loaded.

    Attributes:
        file: path or bytes of the image.
        corners: x and y of each, in pixels of the upright image; what lies outside of it is left.
    """

    file: Any
    corners: tuple[float, ...]

    def of(self, image: Image.Image) -> Image.Image:
        """
        Raises:
            BadSampleError: the rectangle has no pixel of the image.
        """
        x, y = ([*self.corners[axis::2]] for axis in (0, 1))
        left, top = max(0, math.floor(min(x))), max(0, math.floor(min(y)))
        right, bottom = min(image.width, math.ceil(max(x))), min(image.height, math.ceil(max(y)))
        if left >= right or top >= bottom:
            raise BadSampleError(
                "unreadable_image",
                f"the corners {brief([*self.corners])} have no pixel of the image of "
                f"{image.width} x {image.height}: correct them",
            )
        return image.crop((left, top, right, bottom))


def source_size(source: Any, what: str) -> int:
    """Size of a source in bytes, of several frames together; 0 for what is not fetched yet and for
    objects in memory.

    Raises:
        BadSampleError: as `file_size`.
    """
    if isinstance(source, bytes):
        return len(source)
    if isinstance(source, str | Path):
        return file_size(source, what)
    return sum(source_size(each, "image") for each in getattr(source, "files", ()))


ImageSource = str | os.PathLike | bytes | Image.Image | np.ndarray | ImageSection

# A selection: Pillow would run Ghostscript for EPS, and its rare formats are an attack surface.
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")

# Decoding takes up to 13 bytes per pixel, 1 GB here.
_MOST_PIXELS = 80_000_000

# Pillow converts these modes to RGB by clipping at 255, which gives an almost white image.
_WIDE_MODES = ("I", "F", "I;16", "I;16L", "I;16B", "I;16N")
# EXIF orientations from here on exchange width and height.
_FIRST_TURNED = 5
_TRANSPARENT_MODES = ("RGBA", "RGBa", "LA", "PA")
# What Pillow's decoders raise for broken files; MemoryError for impossible sizes.
_BROKEN = (
    OSError, SyntaxError, ValueError, EOFError, struct.error, ArithmeticError, LookupError,
    TypeError, MemoryError, Image.DecompressionBombError,
)  # fmt: skip


def image_size(source: ImageSource) -> tuple[int, int]:
    """Width and height in pixels from the file's header; EXIF may exchange them on loading.

    Raises:
        BadSampleError: as `load_rgb`, for faults that the header shows.
    """
    if isinstance(source, np.ndarray | Image.Image | ImageSection):
        return load_rgb(source).size
    if isinstance(source, str):
        with suppress(OSError, ValueError):
            found = os.stat(source)
            return _size_in_header(source, found.st_size, found.st_mtime_ns)
    return _size_in_header.__wrapped__(source)


@lru_cache(maxsize=1 << 14)
def _size_in_header(source: str | os.PathLike | bytes, *state: int) -> tuple[int, int]:
    """The size of an image; that of a file is remembered with its state, as many samples may show
    the same image."""
    with _opened(source) as image:
        _check_mode(image)
        return image.size


def upright_size(source: ImageSource) -> tuple[int, int]:
    """Width and height of an image after loading, from the header; errors as of `image_size`."""
    if isinstance(source, np.ndarray | ImageSection):
        return image_size(source)
    with nullcontext(source) if isinstance(source, Image.Image) else _opened(source) as image:
        _check_mode(image)
        is_turned = image.getexif().get(ExifTags.Base.Orientation, 1) >= _FIRST_TURNED
        return (image.height, image.width) if is_turned else image.size


def load_rgb(source: ImageSource) -> Image.Image:
    """Open an image as 8-bit RGB, turned upright by its EXIF orientation.

    Args:
        source: a path, the bytes of a file, a PIL image, or a uint8 `[H, W, 3]` array.

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
    if isinstance(source, ImageSection):
        return source.of(load_rgb(source.file))
    if isinstance(source, Image.Image):
        _check_mode(source)
        return _to_rgb(ImageOps.exif_transpose(source))
    with _opened(source) as image:
        image.load()
        _check_mode(image)
        # In place: a second copy of a large image may not fit into memory.
        ImageOps.exif_transpose(image, in_place=True)
        return _to_rgb(image)


@contextmanager
def _opened(source: str | os.PathLike | bytes) -> Iterator[Image.Image]:
    if not isinstance(source, bytes) and not os.path.isfile(source):
        raise BadSampleError("missing_image", f"there is no file {shown(os.fspath(source))}")
    try:
        opened = BytesIO(source) if isinstance(source, bytes) else source
        with Image.open(opened, formats=FORMATS) as image:
            _check_size(image)
            yield image
    except BadSampleError:
        raise
    except _BROKEN as error:
        # Pillow names a file of bytes by its address in memory.
        why = "" if isinstance(error, UnidentifiedImageError) else f": {error}"
        raise BadSampleError(
            "unreadable_image",
            f"the file cannot be decoded as an image ({', '.join(FORMATS)}){why}",
        ) from error


def _check_size(image: Image.Image) -> None:
    if image.width * image.height > _MOST_PIXELS:
        raise BadSampleError(
            "unreadable_image",
            f"the file states {image.width} x {image.height} pixels; at most {_MOST_PIXELS} are "
            "decoded. Shrink it or cut it into tiles",
        )


def _to_rgb(image: Image.Image) -> Image.Image:
    """The image as RGB; itself if it is RGB already."""
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
            f"the image has mode {image.mode} (more than 8 bits per channel), which would be "
            "clipped; convert it to 8-bit RGB or grayscale first",
        )
