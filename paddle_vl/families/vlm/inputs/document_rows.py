"""Rows of pretraining data as texts and images in document order.

    {"text": "..."}                       text; a list of strings is joined by line breaks
    {"image": "a.jpg", "text": "..."}     image_text: an image, then its caption
    {"texts": ["...", null], "images": [null, "b.jpg"]}           interleaved, as OBELICS has it
    {"text_list": ["..."], "image_info": [{"image_name": "b.jpg", "matched_text_index": 0}]}  MMC4

An image is a path, the bytes of an image file, or as in Hugging Face's Parquet files a mapping with
`bytes` and `path`. Further entries of a row, such as a URL or scores, are not read.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from paddle_vl.config.data_sources import DocumentFormat
from paddle_vl.data.corpus.shard import needed, refuse_empty, text_of
from paddle_vl.data.jsonl import BadSampleError
from paddle_vl.data.media_file import ImageSource, MediaFolder, brief, media_source

Parts = list["str | ImagePlace"]


class ImagePlace(NamedTuple):
    """An image of a document: a path or the bytes of a file."""

    source: ImageSource


def parts_of(row: Mapping[str, Any], kind: DocumentFormat, folder: MediaFolder) -> Parts:
    """Texts and images of a row in document order; texts are not empty.

    Args:
        kind: text, image_text or interleaved.

    Raises:
        BadSampleError: an entry is missing, of a wrong type or unusable, or there is no text.
    """
    if kind == "text":
        parts: Parts = [text_of(row, kind)]
    elif kind == "image_text":
        image = _image(needed(row, "image", kind), "'image'", folder)
        parts = [image, text_of(row, kind)]
    elif "text_list" in row and "texts" not in row:
        parts = _mmc4(row, folder)
    else:
        parts = _interleaved(row, kind, folder)
    parts = [part for part in parts if part != ""]
    refuse_empty(any(isinstance(part, str) and part.strip() for part in parts))
    return parts


def _interleaved(row: Mapping[str, Any], kind: str, folder: MediaFolder) -> Parts:
    texts, images = (needed(row, key, kind) for key in ("texts", "images"))
    for key, values in (("texts", texts), ("images", images)):
        if not isinstance(values, Sequence) or isinstance(values, str | bytes):
            raise BadSampleError("missing_key", f"{key!r} must be a list")
    if len(texts) != len(images):
        raise BadSampleError(
            "tag_count",
            f"'texts' has {len(texts)} entries and 'images' {len(images)}; they must be equally "
            "long, with null in 'texts' where an image stands and in 'images' where a text stands",
        )
    parts: Parts = []
    for place, (text, image) in enumerate(zip(texts, images, strict=True)):
        if (text is None) == (image is None):
            found = "neither" if text is None else "both"
            raise BadSampleError(
                "tag_count",
                f"entry {place + 1} has {found} of text and image; exactly one of them must not be "
                "null",
            )
        if image is not None:
            parts.append(_image(image, f"entry {place + 1} of 'images'", folder))
        else:
            _add_text(parts, _string(text, f"entry {place + 1} of 'texts'"), "\n\n")
    return parts


def _mmc4(row: Mapping[str, Any], folder: MediaFolder) -> Parts:
    """Sentences, each behind the images that match it."""
    sentences, infos = row["text_list"], row.get("image_info") or []
    for name, value in (("text_list", sentences), ("image_info", infos)):
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise BadSampleError("missing_key", f"{name!r} must be a list")
    before: dict[int, Parts] = {}
    for number, info in enumerate(infos, 1):
        name, place = (
            info.get(key) if isinstance(info, Mapping) else None
            for key in ("image_name", "matched_text_index")
        )
        if name is None or not isinstance(place, int) or not 0 <= place < len(sentences):
            raise BadSampleError(
                "missing_key",
                f"image {number} of 'image_info' needs 'image_name' and a 'matched_text_index' "
                f"from 0 to {len(sentences) - 1}; it has {brief(info)}",
            )
        before.setdefault(place, []).append(_image(name, f"image {number}", folder))
    parts: Parts = []
    for place, sentence in enumerate(sentences):
        parts += before.get(place, [])
        _add_text(parts, _string(sentence, f"entry {place + 1} of 'text_list'"), " ")
    return parts


def _add_text(parts: Parts, text: str, separator: str) -> None:
    """Add a text, joined to a text in front of it."""
    if parts and isinstance(last := parts[-1], str):
        parts[-1] = f"{last}{separator}{text}"
    else:
        parts.append(text)


def _string(text: Any, where: str) -> str:
    if not isinstance(text, str):
        raise BadSampleError(
            "missing_key", f"{where} is of type {type(text).__name__}; a string is needed"
        )
    return text


def _image(image: Any, where: str, folder: MediaFolder) -> ImagePlace:
    return ImagePlace(media_source(image, "image", where, folder))
