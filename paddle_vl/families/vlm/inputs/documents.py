"""Documents of pretraining data as tokens and labels of Qwen3-VL.

A document is its texts and images in order, and `<|endoftext|>`:

    <|vision_start|><|image_pad|>...<|vision_end|>A red bridge.<|endoftext|>

All text tokens and the end are targets; the visual tokens and their markers are none. A source's
`targets` restricts them. Conversations keep their chat template and, unless `targets` says
otherwise, the targets of fine-tuning.

Shapes: L tokens, n images.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from paddle_vl.config.data_sources import SourceConfig
from paddle_vl.data.corpus.document import EncodedDocument, Sample
from paddle_vl.data.jsonl import BadSampleError
from paddle_vl.data.media_file import ImageSource, MediaFolder
from paddle_vl.families.vlm.inputs.collate import IGNORED_LABEL
from paddle_vl.families.vlm.inputs.conversation import Conversation, parse_record
from paddle_vl.families.vlm.inputs.dataset import truncate_sample
from paddle_vl.families.vlm.inputs.document_rows import ImagePlace, parts_of
from paddle_vl.families.vlm.inputs.processor import VLProcessor
from paddle_vl.families.vlm.inputs.record_keys import unread_keys, unread_note
from paddle_vl.families.vlm.inputs.tokenizer import IMAGE_PAD

# Entries of a row of memory-mapped token files: ids, and optionally 0 where nothing is learned.
TOKENS, MASK = "tokens", "mask"


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
        labels = after_image(np.where(marks, IGNORED_LABEL, ids), marks, targets)
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
        allow_outside: whether images may lie outside their data file's folder.
    """

    processor: VLProcessor
    source: SourceConfig
    max_length: int
    allow_outside: bool = True

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
            return self._of_messages(row, folder)
        parts = parts_of(row, kind, MediaFolder(folder, self.allow_outside))
        images = [part.source for part in parts if isinstance(part, ImagePlace)]
        counts: list[int] = []
        if images:
            grids = self.processor.image_processor.grids(images)
            counts = self.processor.image_processor.num_tokens(grids).tolist()
        template, next_count = self.processor.template, iter(counts)
        ids: list[int] = []
        for part in parts:
            if isinstance(part, str):
                ids += template.text_ids(part)
            else:
                ids += template.visual_ids(IMAGE_PAD, next(next_count))
        return self._document(np.array([*ids, self.processor.pad_token_id]), images)

    def as_trained(self, sample: Sample) -> Sample:
        """A conversation's sample within `max_length`, with the labels of the source's targets."""
        processor = self.processor
        sample = truncate_sample(
            sample,
            self.max_length,
            image_token_id=processor.image_token_id,
            video_token_id=processor.video_token_id,
            merge_size=processor.image_processor.merge_size,
        )
        if self.source.targets in (None, "answers"):
            return sample
        ids = sample["input_ids"]
        marks = np.isin(ids, visual_marks(processor))
        labels = np.where(marks, IGNORED_LABEL, ids)
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
            document.labels[: len(mask)][mask == 0] = IGNORED_LABEL
        return document

    def _of_messages(self, row: Mapping[str, Any], folder: Path) -> EncodedDocument:
        conversation = parse_record(row, folder, self.allow_outside)
        if self.source.targets in (None, "answers"):
            conversation.check_targets()
        document = ConversationDocument(self, conversation)
        document.note = unread_note(unread_keys(conversation.extra))
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
        labels_L[:first] = IGNORED_LABEL
    return labels_L


def check_ids(ids_L: np.ndarray, processor: VLProcessor) -> None:
    """Check the ids of a text from a token file.

    Raises:
        BadSampleError: no id, an id outside the vocabulary, or a special token.
    """
    if not ids_L.size:
        raise BadSampleError("empty_text", "the document has no token: leave it out")
    tokenizer, forbidden = processor.tokenizer, processor.template.forbidden
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
