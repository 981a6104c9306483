"""Indices of visual token rows, and of the visual embedding that each of them receives.

Computed once per step; the embedding merge and every deepstack level use them. The same code runs
on NumPy arrays (collator) and Paddle tensors (`GPTEmbedding`); only the 1-D `nonzero`, whose API
differs, is an argument.

Shapes: B batch, L padded length, T = B * L token rows, M visual embeddings of the batch, M_local
those of this rank's shard of the token rows.

Example: one sample, two image tokens (`#`) and one video token (`%`), two sequence-parallel shards:

    row      0  1  2  3 | 4  5  6  7      reading order of the embeddings: 1 -> 0, 3 -> 1, 4 -> 2
    token    a  #  b  % | #  c  d  e
    shard 0  update [1, 3]  gather [0, 1]
    shard 1  update [0]     gather [2]     (row 4 is row 0 of the shard)
    source   [0, 2, 1]                     (embeddings arrive as [image 0, image 1, video 0])
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import numpy as np

# NumPy array or Paddle tensor.
Array = Any
Layout = Literal["token_rows", "sequence_first"]


class RowPart(NamedTuple):
    """Contiguous shard of the token rows under sequence parallelism.

    Attributes:
        rank, size: this rank and the number of ranks in the model-parallel group.
    """

    rank: int = 0
    size: int = 1

    def bounds(self, num_rows: int) -> tuple[int, int]:
        """`[start, stop)` of this shard among `num_rows` token rows.

        Raises:
            ValueError: `size` does not divide the token rows, or the rank is out of range.
        """
        if not 0 <= self.rank < self.size:
            raise ValueError(f"row part has rank {self.rank}, outside [0, {self.size})")
        if num_rows % self.size:
            raise ValueError(
                f"{num_rows} token rows (batch x padded length) do not divide by the "
                f"model-parallel degree {self.size}: sequence parallelism needs equal shards; "
                f"set data.pad_to_multiple_of to a multiple of {self.size}"
            )
        rows = num_rows // self.size
        return self.rank * rows, (self.rank + 1) * rows


class VisualIndices(NamedTuple):
    """The index tensors of one step, all 1-D int64.

    Attributes:
        update: `[M_local]` ascending token rows of the local shard that hold a visual token.
        gather: `[M_local]` number, in reading order, of the embedding for each of those rows.
        source: `[M]` row of each embedding, in reading order, within `[images; videos]`; None if
            the batch has one modality, whose order is the reading order.
    """

    update: Array
    gather: Array
    source: Array | None


def check_visual_counts(
    num_image_tokens: int, num_image_rows: int, num_video_tokens: int, num_video_rows: int
) -> None:
    """Check that each modality has as many placeholders as embeddings.

    Raises:
        ValueError: they differ; the message has both counts.
    """
    wrong = [
        f"{tokens} {kind} placeholder tokens in input_ids but {rows} {kind} embedding rows"
        for kind, tokens, rows in (
            ("image", num_image_tokens, num_image_rows),
            ("video", num_video_tokens, num_video_rows),
        )
        if tokens != rows
    ]
    if wrong:
        raise ValueError(
            "; ".join(wrong) + ": every placeholder takes exactly one visual embedding; check "
            "that no placeholder was truncated and that the grids belong to this batch"
        )


def compute_visual_indices(
    image_mask_BL: Array,
    video_mask_BL: Array | None,
    *,
    nonzero: Callable[[Array], Array],
    part: RowPart | None = None,
    layout: Layout = "token_rows",
) -> VisualIndices:
    """Indices of the visual token rows; no loop over samples, no host read, no boolean indexing.

    A visual token's index in reading order is the number of visual tokens before it, batch-major:
    a cumulative sum gives it for every layout and shard.

    Args:
        image_mask_BL: bool, True at image placeholders.
        video_mask_BL: bool, True at video placeholders; None when the batch can have none.
        nonzero: 1-D bool array to the 1-D int64 positions of its True entries.
        part: the shard of token rows to index; None for all of them.
        layout: order of token rows: `token_rows` is batch-major (`b * L + l`); `sequence_first` is
            `l * B + b`, as in PaddleFleet's `[S, B, H]` hidden states.

    Raises:
        ValueError: `part.size` does not divide B * L.
    """
    batch, length = image_mask_BL.shape
    visual_BL = image_mask_BL if video_mask_BL is None else image_mask_BL | video_mask_BL
    order_BL = (_running_count(visual_BL) - 1).reshape([batch, length])
    if layout == "sequence_first":
        rows_mask = visual_BL.transpose([1, 0]).reshape([-1])
        rows_order = order_BL.transpose([1, 0]).reshape([-1])
    elif layout == "token_rows":
        rows_mask = visual_BL.reshape([-1])
        rows_order = order_BL.reshape([-1])
    else:
        raise ValueError(f"layout is {layout!r}; use 'token_rows' or 'sequence_first'")
    # An export with dynamic shapes does not know the number of rows; it is never sharded.
    if part is not None and part.size > 1:
        start, stop = part.bounds(batch * length)
        rows_mask, rows_order = rows_mask[start:stop], rows_order[start:stop]
    update = nonzero(rows_mask)
    gather = rows_order[update]
    source = None
    if video_mask_BL is not None:
        source = _source_rows(image_mask_BL, video_mask_BL, visual_BL, nonzero)
    return VisualIndices(update, gather, source)


def _source_rows(
    image_mask_BL: Array, video_mask_BL: Array, visual_BL: Array, nonzero: Callable
) -> Array:
    """Row in `[images; videos]` of every visual embedding in reading order: `[M]` int64."""
    image_T = _running_count(image_mask_BL)
    video_T = _running_count(video_mask_BL)
    is_video_T = video_mask_BL.reshape([-1]).astype("int64")
    # The last cumulative sum is the number of image tokens; slicing keeps it on the device.
    source_T = (image_T - 1) * (1 - is_video_T) + (image_T[-1:] + video_T - 1) * is_video_T
    return source_T[nonzero(visual_BL.reshape([-1]))]


def _running_count(mask_BL: Array) -> Array:
    return mask_BL.reshape([-1]).astype("int64").cumsum(0)


def host_visual_indices(
    input_ids_BL: np.ndarray,
    *,
    image_token_id: int,
    video_token_id: int,
    num_image_rows: int = 0,
    num_video_rows: int = 0,
    part: RowPart | None = None,
    layout: Layout = "token_rows",
) -> dict[str, np.ndarray]:
    """`compute_visual_indices` in NumPy, for the collator: index arrays under their batch keys.

    Args:
        input_ids_BL: int64 token ids with placeholders, padded.
        num_image_rows: image embeddings that the tower will produce: sum of t * h * w / merge^2.
        num_video_rows: the same for videos.
        part, layout: see `compute_visual_indices`.

    Returns:
        `visual_update_indices` `[M_local]`, `visual_gather_indices` `[M_local]` and, if the batch
        has images and videos, `visual_source_indices` `[M]`; all int64. The arrays of an all-text
        batch are empty, so that the model does not search for placeholders.

    Raises:
        ValueError: placeholders and embeddings differ in number, or `part.size` does not divide
            the token rows.
    """
    image_mask_BL = input_ids_BL == image_token_id
    video_mask_BL = input_ids_BL == video_token_id
    num_image_tokens = int(np.count_nonzero(image_mask_BL))
    num_video_tokens = int(np.count_nonzero(video_mask_BL))
    check_visual_counts(num_image_tokens, num_image_rows, num_video_tokens, num_video_rows)
    indices = compute_visual_indices(
        video_mask_BL if num_video_rows and not num_image_rows else image_mask_BL,
        video_mask_BL if num_image_rows and num_video_rows else None,
        nonzero=np.flatnonzero,
        part=part,
        layout=layout,
    )
    arrays = {
        "visual_update_indices": indices.update,
        "visual_gather_indices": indices.gather,
        "visual_source_indices": indices.source,
    }
    return {name: array for name, array in arrays.items() if array is not None}
