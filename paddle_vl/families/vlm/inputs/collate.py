"""Conversations to samples, and samples to one batch with padding, positions and visual indices.

A row of the batch holds one sample (`VLCollator`) or several (`PackedCollator`). A collator's batch
is a dictionary, whose arrays have the axes of `paddle_vl.batch.schema.VLBatch`, and labels, maybe
with `loss_weights` and `label_sources`, `[B, L]` each. `prepared` makes a `VLBatch` of it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple

import numpy as np

from paddle_vl.batch.positions import (
    key_ends,
    mrope_position_ids,
    patch_places,
    real_lengths,
    segment_offsets,
    target_rows,
)
from paddle_vl.batch.rows import IGNORE_INDEX
from paddle_vl.batch.schema import GRIDS, PIXELS, VLBatch
from paddle_vl.batch.visual_index import RowPart, host_visual_indices
from paddle_vl.data.formats.canonical import Conversation
from paddle_vl.families.vlm.inputs.image_processor import ImageProcessor
from paddle_vl.families.vlm.inputs.video_processor import VideoProcessor
from paddle_vl.families.vlm.templates.encoding import TemplateEncoder, VideoPrompt

# What target rows have of the labels that they predict.
_OF_LABELS = {
    "target_weights": "loss_weights",
    "target_sources": "label_sources",
    "target_branches": "label_branches",
}
PaddingSide = Literal["left", "right"]

VISUAL_KEYS = ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw")


class EncodedMedia(NamedTuple):
    """Images and videos of a conversation.

    Attributes:
        visual: pixels and grids.
        num_image_tokens: of each image.
        video_prompts: of each video.
    """

    visual: dict[str, np.ndarray]
    num_image_tokens: Sequence[int]
    video_prompts: list[VideoPrompt]


class SampleEncoder:
    """The training samples of conversations.

    Attributes:
        template: writes and tokenizes a conversation.
        image_token_id, video_token_id: ids of the placeholders.
    """

    template: TemplateEncoder
    image_processor: ImageProcessor
    video_processor: VideoProcessor
    image_token_id: int
    video_token_id: int

    def encode_sample(
        self, conversation: Conversation, media: "EncodedMedia | None" = None
    ) -> dict[str, np.ndarray]:
        """One training sample.

        Args:
            media: the conversation's images and videos, where another conversation has the same.

        Returns:
            input_ids and labels `[L]` int64 (labels not shifted, -100 outside targets); with
            images, pixel_values `[P, 1536]` float32 and image_grid_thw `[n, 3]` int64; with videos,
            pixel_values_videos and video_grid_thw likewise.

        Raises:
            BadSampleError: an image or video cannot be used, or text contains a special token.
            RuntimeError: there is a video file and PyAV is not installed.
        """
        return self._encode(conversation, with_labels=True, media=media)

    def outline_sample(self, conversation: Conversation) -> dict[str, np.ndarray]:
        """A training sample from the headers of its images and videos, to measure its length.

        Pixels are zeros `[P, 1]`. Height and width may be exchanged in a grid. Errors are those of
        `encode_sample` that headers show.
        """
        return self.encode_sample(conversation, self.media(conversation, with_pixels=False))

    def media(self, conversation: Conversation, with_pixels: bool = True) -> "EncodedMedia":
        """The images and videos of a conversation; without pixels as in `outline_sample`."""
        visual: dict[str, np.ndarray] = {}
        num_image_tokens: Sequence[int] = ()
        video_prompts: list[VideoPrompt] = []
        if conversation.images:
            visual = self.image_processor(conversation.images, with_pixels)
            num_image_tokens = self.image_processor.num_tokens(visual["image_grid_thw"]).tolist()
        if conversation.videos:
            arrays, timestamps = self.video_processor(conversation.videos, with_pixels)
            counts = self.video_processor.tokens_per_patch(arrays["video_grid_thw"]).tolist()
            is_enclosed = self.video_processor.video_markers == "both"
            prompts = zip(timestamps, counts, strict=True)
            video_prompts = [VideoPrompt(*each, is_enclosed) for each in prompts]
            visual.update(arrays)
        return EncodedMedia(visual, num_image_tokens, video_prompts)

    def _encode(
        self,
        conversation: Conversation,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        *,
        with_labels: bool = False,
        media: "EncodedMedia | None" = None,
    ) -> dict[str, np.ndarray]:
        """A sample, see `encode_sample`."""
        visual, num_image_tokens, video_prompts = media or self.media(conversation)
        learns_all = conversation.train_on_prompt
        chat = self.template.encode(
            conversation,
            num_image_tokens,
            video_prompts,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            has_labels=with_labels and not learns_all,
        )
        ids = np.array(chat.input_ids, dtype=np.int64)
        labels = np.array(chat.labels, dtype=np.int64)
        if with_labels and learns_all:
            pads = (self.image_token_id, self.video_token_id)
            labels = np.where(np.isin(ids, pads), IGNORE_INDEX, ids)
        return {"input_ids": ids, "labels": labels, **visual}


def pad_rows(rows: Sequence[np.ndarray], length: int, value: int, side: PaddingSide) -> np.ndarray:
    """Rows of different lengths as one `[B, length]` int64 array, padded with `value`."""
    padded = np.full((len(rows), length), value, dtype=np.int64)
    for target, row in zip(padded, rows, strict=True):
        if side == "left":
            target[length - len(row) :] = row
        else:
            target[: len(row)] = row
    return padded


def joined_visual(samples: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Pixels and grids of all samples, of the kinds that there are."""
    arrays = {key: [each[key] for each in samples if key in each] for key in VISUAL_KEYS}
    return {key: np.concatenate(found) for key, found in arrays.items() if found}


@dataclass(frozen=True)
class VLCollator:
    """Collates samples of `VLProcessor.encode_sample`.

    Attributes:
        spatial_merge_size: patches per side of a visual token.
        pad_to_multiple_of: divides the padded length.
        num_parts: model-parallel ranks that divide the token rows. Indices are those of the whole
            batch; `paddle_vl.batch.row_slices.own_indices` takes a rank's.
        lists_real_rows: whether batches have `real_row_indices`, for a model with experts.
    """

    pad_token_id: int
    image_token_id: int
    video_token_id: int
    spatial_merge_size: int = 2
    padding_side: PaddingSide = "right"
    pad_to_multiple_of: int = 1
    num_parts: int = 1
    lists_real_rows: bool = False

    def __call__(
        self,
        samples: Sequence[dict[str, np.ndarray]],
        segments: Sequence[Sequence[int]] | None = None,
    ) -> dict[str, Any]:
        """Collate samples.

        Args:
            samples: input_ids and labels `[L]` int64; optionally pixel_values and image_grid_thw,
                and pixel_values_videos and video_grid_thw.
            segments: for packed rows, the lengths of the samples in each.

        Returns:
            Ids, mask, labels and positions; pixels and grids if samples have any; the visual
            indices, `visual_source_indices` only with images and videos; `cu_seqlens` only with
            `segments`; `real_row_indices` and `num_real_rows` only if asked for.

        Raises:
            ValueError: no sample, placeholders that do not match the grids, or B * L token rows
                that `num_parts` does not divide.
        """
        if not samples:
            raise ValueError("cannot collate a batch without samples")
        ids = [sample["input_ids"] for sample in samples]
        # A packed row may be padding only.
        longest = max(1, *(len(row) for row in ids))
        length = -(-longest // self.pad_to_multiple_of) * self.pad_to_multiple_of
        side = self.padding_side
        batch: dict[str, Any] = {
            "input_ids": pad_rows(ids, length, self.pad_token_id, side),
            "attention_mask": pad_rows([np.ones_like(row) for row in ids], length, 0, side),
            "labels": pad_rows([s["labels"] for s in samples], length, IGNORE_INDEX, side),
        }
        RowPart(size=self.num_parts).bounds(batch["input_ids"].size)
        batch |= joined_visual(samples)
        batch.update(
            host_visual_indices(
                batch["input_ids"],
                image_token_id=self.image_token_id,
                video_token_id=self.video_token_id,
                num_image_rows=self._num_rows(batch.get("image_grid_thw")),
                num_video_rows=self._num_rows(batch.get("video_grid_thw")),
            )
        )
        if self.lists_real_rows:
            every = np.flatnonzero(batch["attention_mask"])
            batch |= {"real_row_indices": every, "num_real_rows": len(every)}
        if segments is not None:
            batch["cu_seqlens"] = segment_offsets(segments, length)
        batch["position_ids"], _ = mrope_position_ids(
            batch["input_ids"],
            batch["attention_mask"],
            batch.get("image_grid_thw"),
            batch.get("video_grid_thw"),
            image_token_id=self.image_token_id,
            video_token_id=self.video_token_id,
            spatial_merge_size=self.spatial_merge_size,
            cu_seqlens=batch.get("cu_seqlens"),
        )
        batch["num_target_tokens"] = int(np.count_nonzero(batch["labels"][:, 1:] != IGNORE_INDEX))
        batch["has_left_padding"] = bool((batch["attention_mask"][:, 0] == 0).any())
        return batch

    def _num_rows(self, grid_thw: np.ndarray | None) -> int:
        if grid_thw is None:
            return 0
        return int(grid_thw.prod(axis=1).sum()) // self.spatial_merge_size**2


@dataclass(frozen=True)
class PackedCollator:
    """Collates rows of several concatenated samples.

    Positions restart in each sample, attention stays within it, and its first token is not a
    target, since the previous sample would predict it. Padding is a segment of its own.

    Attributes:
        collator: collator of the concatenated rows; pads at the right.
    """

    collator: VLCollator

    def __call__(self, rows: Sequence[Sequence[dict[str, np.ndarray]]]) -> dict[str, Any]:
        """Collate rows.

        Args:
            rows: the samples of each row, in order; an empty row becomes padding.

        Returns:
            As `VLCollator`, with `cu_seqlens`.
        """
        segments = [[len(sample["input_ids"]) for sample in row] for row in rows]
        return self.collator([joined_samples(row) for row in rows], segments)


class TokenSpan(NamedTuple):
    """Real tokens that follow each other in a row of a batch, and the number of their source."""

    length: int
    source: int


def sources_of_tokens(
    attention_mask: np.ndarray, rows: Sequence[Sequence[TokenSpan]]
) -> np.ndarray:
    """The source of each token, `[B, L]` int32; 0 at padding.

    Args:
        attention_mask: `[B, L]`, 1 at real tokens.
        rows: the spans of each row in order, which cover its real tokens.
    """
    sources_BL = np.zeros(attention_mask.shape, dtype=np.int32)
    for row, sources_L, mask_L in zip(rows, sources_BL, attention_mask, strict=True):
        lengths, sources = [span.length for span in row], [span.source for span in row]
        sources_L[mask_L == 1] = np.repeat(np.array(sources, dtype=np.int32), lengths)
    return sources_BL


def with_label_sources(
    batch: dict[str, Any], rows: Sequence[Sequence[TokenSpan]], num_sources: int
) -> dict[str, Any]:
    """The batch with `label_sources`, and `source_targets`, the target tokens of each source.

    Args:
        rows: see `sources_of_tokens`.
    """
    sources_BL = sources_of_tokens(batch["attention_mask"], rows)
    of_targets = sources_BL[:, 1:][batch["labels"][:, 1:] != IGNORE_INDEX]
    counts = tuple(np.bincount(of_targets, minlength=num_sources).tolist())
    added = {"label_sources": sources_BL, "num_sources": num_sources, "source_targets": counts}
    return {**batch, **added}


@dataclass(frozen=True)
class SourcesCollator:
    """Collates samples that have the number of their `source`, for the loss of each source.

    Attributes:
        collator: of the samples, or of packed rows of them.
        target_sources: names of the sources.
    """

    collator: VLCollator | PackedCollator
    target_sources: tuple[str, ...]

    def __call__(self, rows: Sequence[Any]) -> dict[str, Any]:
        samples = rows if isinstance(self.collator, PackedCollator) else [[row] for row in rows]
        spans = [
            [TokenSpan(len(each["input_ids"]), int(each["source"])) for each in row]
            for row in samples
        ]
        return with_label_sources(self.collator(rows), spans, len(self.target_sources))


def joined_samples(samples: Sequence[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """The samples of a row as one; the first token of each is not a target."""
    if not samples:
        empty = np.zeros(0, dtype=np.int64)
        return {"input_ids": empty, "labels": empty}
    labels = [sample["labels"].copy() for sample in samples]
    for labels_L in labels:
        labels_L[0] = IGNORE_INDEX
    ids = np.concatenate([sample["input_ids"] for sample in samples])
    return {"input_ids": ids, "labels": np.concatenate(labels), **joined_visual(samples)}


def prepared(
    batch: Mapping[str, Any],
    vision: Any = None,
    divisors: Sequence[str] = ("num_target_tokens",),
    kind: type[VLBatch] = VLBatch,
) -> VLBatch:
    """A collator's batch, and one within it, complete.

    Labels become target rows; what would else be laid out in every step, places of patches and ends
    of packed samples, comes with the batch; and what the trainer counts is counted.

    Args:
        vision: a tower's configuration, to lay out the patches; None where the model does it.
        divisors: entries with the divisors of the loss terms.
        kind: class of the batch.
    """
    found = {**batch, **_of_targets(batch)}
    for name, value in found.items():
        if isinstance(value, dict):
            found[name] = prepared(value, vision, divisors, kind)
    grids = [found[name] for name in GRIDS if name in found]
    if vision is not None and not found.keys().isdisjoint(PIXELS):
        found |= patch_places(np.concatenate(grids), vision)
    mask_BL, offsets = found["attention_mask"], found.get("cu_seqlens")
    if offsets is not None:
        found["packed_key_ends"] = key_ends(offsets, found["input_ids"].shape[1])
        found["num_packed_places"] = mask_BL.size
    lengths = real_lengths(mask_BL, offsets)
    counted = {
        "counts": tuple(found.get(name, 0) for name in divisors),
        "optional_branches": (bool(grids),),
        "lengths": tuple(lengths.tolist()),
        "num_samples": len(lengths),
        "num_tokens": int(mask_BL.sum()),
    }
    taken = {each.name for each in fields(kind)} - {"labels", "loss_weights"}
    return kind(**{name: value for name, value in (counted | found).items() if name in taken})


@dataclass(frozen=True)
class PreparedCollator:
    """Collates with another collator, and prepares its batches, in a loader's workers.

    Attributes:
        vision, divisors, kind: see `prepared`.
    """

    collator: Any
    vision: Any
    divisors: Sequence[str] = ("num_target_tokens",)
    kind: type[VLBatch] = VLBatch

    def __call__(self, rows: Sequence[Any]) -> VLBatch:
        return prepared(self.collator(rows), self.vision, self.divisors, self.kind)

    @property
    def target_sources(self) -> tuple[str, ...]:
        """Names of the sources whose target tokens the batches count."""
        return getattr(self.collator, "target_sources", ())


def _of_targets(batch: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """`target_rows` of a batch, and `target_weights`, `target_sources` and `target_branches` if its
    labels have factors, sources and answers of pairs that they belong to."""
    if "target_rows" in batch:
        return {}
    # Row i predicts label i + 1; the last row of a sample predicts nothing.
    targets_BL = np.full_like(batch["labels"], IGNORE_INDEX)
    targets_BL[:, :-1] = batch["labels"][:, 1:]
    found = {"target_rows": target_rows(targets_BL.reshape(-1))}
    for name, of_labels in _OF_LABELS.items():
        if of_labels in batch:
            values_T = np.roll(batch[of_labels], -1, axis=1).reshape(-1)
            values_N = values_T[found["target_rows"][0]]
            found[name] = values_N if name == "target_weights" else values_N.astype(np.int64)
    return found
