"""Documents of pretraining data as tokens and labels of Qwen3-VL.

A document is its texts and images in order, and `<|endoftext|>`:

    <|vision_start|><|image_pad|>...<|vision_end|>A red bridge.<|endoftext|>

All text tokens and the end are targets; the visual tokens and their markers are none. A source's
`targets` restricts them. Conversations keep their chat template and, unless `targets` says
otherwise, the targets of fine-tuning. Other formats of rows:

    {"text": "..."}                       text; a list of strings is joined by line breaks
    {"image": "a.jpg", "text": "..."}     image_text: an image, then its caption
    {"texts": ["...", null], "images": [null, "b.jpg"]}           interleaved, as OBELICS has it
    {"text_list": ["..."], "image_info": [{"image_name": "b.jpg", "matched_text_index": 0}]}  MMC4

An image is a path, the bytes of an image file, or as in Hugging Face's Parquet files a mapping with
`bytes` and `path`. Further entries of a row, such as a URL or scores, are not read.

Shapes: L tokens, n images.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from paddle_vl.batch.rows import IGNORE_INDEX
from paddle_vl.config.data_sources import DocumentFormat, SourceConfig
from paddle_vl.data.corpus.document import EncodedDocument, Sample
from paddle_vl.data.corpus.shard import needed, refuse_empty, text_of
from paddle_vl.data.formats.canonical import Conversation
from paddle_vl.data.formats.keys import unread_keys, unread_note
from paddle_vl.data.formats.reader import RowReader
from paddle_vl.data.jsonl import BadSampleError
from paddle_vl.data.media_file import ImageSource, MediaFolder, brief, media_source
from paddle_vl.families.vlm.inputs.dataset import truncate_sample
from paddle_vl.families.vlm.inputs.processor import VLProcessor

# Entries of a row of memory-mapped token files: ids, and optionally 0 where nothing is learned.
TOKENS, MASK = "tokens", "mask"


class ImagePart(NamedTuple):
    """An image of a document."""

    source: ImageSource


Parts = list[str | ImagePart]


class ImageDocument(EncodedDocument):
    """Texts and images in order."""

    def __init__(
        self,
        processor: VLProcessor,
        ids: np.ndarray,
        images: Sequence[ImageSource],
        targets: str,
        is_whole: bool,
    ):
        starts = visual = marks = np.zeros(len(ids), dtype=bool)
        if images:
            marks = np.isin(ids, visual_marks(processor))
            starts = ids == processor.vision_start_token_id
            visual = ids == processor.image_token_id
        labels = after_image(np.where(marks, IGNORE_INDEX, ids), marks, targets)
        super().__init__(ids, labels, visual, marks, starts, is_whole)
        self._processor, self._images = processor, images

    def piece(self, begin: int, end: int) -> Sample:
        sample = {"input_ids": self.input_ids[begin:end], "labels": self.labels[begin:end]}
        if not self._images:
            return sample
        starts = np.flatnonzero(self.input_ids == self._processor.vision_start_token_id)
        first, last = np.searchsorted(starts, [begin, end])
        if first < last:
            sample.update(self._processor.image_processor(self._images[first:last]))
        return sample


class ConversationDocument(EncodedDocument):
    """A conversation with its chat template, never cut."""

    def __init__(self, encoder: "DocumentEncoder", conversation: Conversation):
        self._encoder, self._conversation = encoder, conversation
        processor = encoder.processor
        has_media = bool(conversation.images or conversation.videos)
        encode = processor.outline_sample if has_media else processor.encode_sample
        outline = encoder.as_trained(encode(conversation))
        self._sample = None if has_media else outline
        ids = outline["input_ids"]
        nowhere = np.zeros(len(ids), dtype=bool)
        # All tokens are marks, between which there is no cut.
        visual = np.isin(ids, (processor.image_token_id, processor.video_token_id))
        super().__init__(ids, outline["labels"], visual, ~nowhere, nowhere, True)

    def piece(self, begin: int, end: int) -> Sample:
        if self._sample is not None:
            return self._sample
        return self._encoder.as_trained(self._encoder.processor.encode_sample(self._conversation))


@dataclass(frozen=True)
class DocumentEncoder:
    """Makes documents of the rows of one source; see `paddle_vl.data.corpus.sources.Encoder`.

    Attributes:
        source: format, targets and columns.
        max_length: longest conversation, in tokens; longer ones are cut at the right.
        reader: of conversations; its rules for paths hold for other documents too.
    """

    processor: VLProcessor
    source: SourceConfig
    max_length: int
    reader: RowReader = field(default_factory=RowReader)

    def __call__(self, row: Mapping[str, Any], folder: Path) -> EncodedDocument:
        """The document of a row.

        Raises:
            BadSampleError: the row or one of its images cannot be used, as far as headers show.
        """
        for name, column in self.source.columns.items():
            if column not in row:
                raise BadSampleError(
                    "missing_key",
                    f"the row has no {column!r}, which the source's columns name for {name!r}; its "
                    f"entries are {sorted(row)}",
                )
        columns = self.source.columns
        others = {name: value for name, value in row.items() if name not in columns.values()}
        row = {**others, **{name: row[column] for name, column in columns.items()}}
        kind = self.source.format
        if TOKENS in row:
            return self._of_tokens(row[TOKENS], row.get(MASK))
        if kind == "messages":
            conversation = self.reader(row, folder)
            if self.source.targets in (None, "answers"):
                conversation.check_targets()
            document = ConversationDocument(self, conversation)
            document.note = unread_note(unread_keys(conversation.extras))
            return document
        rules = MediaFolder(folder, self.reader.allow_outside, self.reader.remote)
        parts = parts_of(row, kind, rules)
        images = [part.source for part in parts if isinstance(part, ImagePart)]
        counts: list[int] = []
        if images:
            grids = self.processor.image_processor(images, False)["image_grid_thw"]
            counts = self.processor.image_processor.num_tokens(grids).tolist()
        processor, next_count = self.processor, iter(counts)
        ids: list[int] = []
        for part in parts:
            if isinstance(part, str):
                ids += processor.text_ids(part)
            else:
                pads = [processor.image_token_id] * next(next_count)
                ids += [processor.vision_start_token_id, *pads, processor.vision_end_token_id]
        return self._document(np.array([*ids, processor.pad_token_id]), images)

    def as_trained(self, sample: Sample) -> Sample:
        """A conversation's sample within `max_length`, with the labels of the source's targets."""
        processor = self.processor
        sample = truncate_sample(sample, self.max_length, processor)
        if self.source.targets in (None, "answers"):
            return sample
        ids = sample["input_ids"]
        marks = np.isin(ids, visual_marks(processor))
        labels = np.where(marks, IGNORE_INDEX, ids)
        return {**sample, "labels": after_image(labels, marks, self.source.targets)}

    def _document(self, ids: np.ndarray, images: Sequence[ImageSource]) -> ImageDocument:
        # A caption without its image would be learned from nothing.
        is_whole = self.source.format == "image_text"
        targets = self.source.targets or "all"
        return ImageDocument(self.processor, ids, images, targets, is_whole)

    def _of_tokens(self, ids: np.ndarray, mask: np.ndarray | None) -> EncodedDocument:
        if self.source.format != "text":
            raise BadSampleError(
                "unsupported",
                f"token files hold texts and the source's format is {self.source.format}: set "
                "format to text",
            )
        end = self.processor.pad_token_id
        has_end = bool(ids.size) and ids[-1] == end
        check_ids(ids[:-1] if has_end else ids, self.processor)
        document = self._document(ids if has_end else np.append(ids, end), [])
        if mask is not None:
            document.labels[: len(mask)][mask == 0] = IGNORE_INDEX
        return document


def visual_marks(processor: VLProcessor) -> list[int]:
    """Ids of the placeholders of images and videos, and of their markers."""
    return [
        processor.image_token_id,
        processor.video_token_id,
        processor.vision_start_token_id,
        processor.vision_end_token_id,
    ]


def after_image(labels_L: np.ndarray, marks_L: np.ndarray, targets: str) -> np.ndarray:
    """The labels; with targets after_image without those in front of the first image."""
    if targets == "after_image":
        first = int(np.argmax(marks_L)) if marks_L.any() else len(marks_L)
        labels_L[:first] = IGNORE_INDEX
    return labels_L


def check_ids(ids_L: np.ndarray, processor: VLProcessor) -> None:
    """Check the ids of a text from a token file.

    Raises:
        BadSampleError: no id, an id outside the vocabulary, or a special token.
    """
    if not ids_L.size:
        raise BadSampleError("empty_text", "the document has no token: leave it out")
    tokenizer, forbidden = processor.tokenizer, processor.forbidden
    highest = int(ids_L.max())
    if highest > tokenizer.highest_id or int(ids_L.min()) < 0:
        raise BadSampleError(
            "special_token",
            f"the document has the id {highest} and the highest of {tokenizer.name} is "
            f"{tokenizer.highest_id}: it was made with another tokenizer",
        )
    has_special = highest >= min(forbidden)
    if has_special and (special := np.isin(ids_L, list(forbidden))).any():
        raise BadSampleError(
            "special_token",
            f"the document contains the special token {forbidden[int(ids_L[special.argmax()])]}: "
            "tokenize texts without it",
        )


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


def _image(image: Any, where: str, folder: MediaFolder) -> ImagePart:
    return ImagePart(media_source(image, "image", where, folder))
