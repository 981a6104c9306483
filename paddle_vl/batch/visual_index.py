"""Which token rows hold a visual token, and which visual embedding belongs in each of them.

Computed once per step and used by everything that touches visual rows: the embedding merge and
every deepstack level. One formula serves NumPy (the collator) and Paddle (`GPTEmbedding`): it is
written with the array methods the two share, and the one call they spell differently, a 1-D
`nonzero`, is passed in.

Shapes: B batch, L padded length, T = B * L token rows, M visual rows of the batch.

A batch of one row, two image tokens (`#`) and one video token (`%`), cut in two parts:

    row      0  1  2  3 | 4  5  6  7      reading order of the visual rows: 1 -> 0, 3 -> 1, 4 -> 2
    token    a  #  b  % | #  c  d  e
    part 0   update [1, 3]  gather [0, 1]
    part 1   update [0]     gather [2]     (row 4 is the part's row 0)
    source   [0, 2, 1]                     (embeddings arrive as [image 0, image 1, video 0])
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import numpy as np

# NumPy array or Paddle tensor; the formula does not care which.
Array = Any
Layout = Literal["token_rows", "sequence_first"]


class RowPart(NamedTuple):
    """One of `size` equal contiguous parts of the token rows; rank and size of the mp group."""

    rank: int = 0
    size: int = 1

    def bounds(self, num_rows: int) -> tuple[int, int]:
        """`[start, stop)` of this part among `num_rows` rows.

        Raises:
            ValueError: the rows do not divide into `size` parts, or the rank is outside them.
        """
        if not 0 <= self.rank < self.size:
            raise ValueError(f"row part has rank {self.rank}, outside [0, {self.size})")
        if num_rows % self.size:
            raise ValueError(
                f"{num_rows} token rows (batch x padded length) do not divide by the "
                f"model-parallel degree {self.size}: sequence parallelism needs equal parts; "
                f"set data.pad_to_multiple_of to a multiple of {self.size}"
            )
        rows = num_rows // self.size
        return self.rank * rows, (self.rank + 1) * rows


class VisualIndices(NamedTuple):
    """The index tensors of one step, all 1-D int64.

    Attributes:
        update: `[M_local]` rows of the local part that hold a visual token, ascending.
        gather: `[M_local]` visual embedding, counted in reading order, of each of those rows.
        source: `[M]` for each embedding in reading order its row in `[images; videos]`, or None
            when the batch has one modality only and that order is the reading order already.
    """

    update: Array
    gather: Array
    source: Array | None


def check_visual_counts(
    num_image_tokens: int, num_image_rows: int, num_video_tokens: int, num_video_rows: int
) -> None:
    """Raise unless placeholders and embedding rows agree for each modality.

    Raises:
        ValueError: naming both counts of every modality that disagrees.
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
            "; ".join(wrong) + ": every placeholder takes exactly one merged visual row, so check "
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
    """The one formula. No loop over samples, no host read, no boolean indexing.

    A visual row's place in reading order is the number of visual rows before it, batch-major, so
    one running count gives it for any layout and any part.

    Args:
        image_mask_BL: bool, True at image placeholders.
        video_mask_BL: bool, True at video placeholders; None when the batch can have none.
        nonzero: 1-D bool array to the 1-D int64 positions of its True entries.
        part: the slice of rows to index; None for all of them.
        layout: `token_rows` orders rows batch-major (`b * L + l`); `sequence_first` orders them
            `l * B + b`, the layout of PaddleFleet's `[S, B, H]` hidden states.

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
    # Without parts the number of rows may stay unknown, as in an export with dynamic shapes.
    if part is not None and part.size > 1:
        start, stop = part.bounds(batch * length)
        rows_mask, rows_order = rows_mask[start:stop], rows_order[start:stop]
    update = nonzero(rows_mask)
    gather = rows_order[update]
    source = None if video_mask_BL is None else _source_rows(image_mask_BL, video_mask_BL, nonzero)
    return VisualIndices(update, gather, source)


def _source_rows(image_mask_BL: Array, video_mask_BL: Array, nonzero: Callable) -> Array:
    """Row in `[images; videos]` of every visual embedding in reading order: `[M]` int64."""
    image_T = _running_count(image_mask_BL)
    video_T = _running_count(video_mask_BL)
    is_video_T = video_mask_BL.reshape([-1]).astype("int64")
    # The last running count is the number of image rows; a slice of it stays on the device.
    source_T = (image_T - 1) * (1 - is_video_T) + (image_T[-1:] + video_T - 1) * is_video_T
    return source_T[nonzero((image_mask_BL | video_mask_BL).reshape([-1]))]


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
    """The collator's call: index arrays under their batch keys.

    Args:
        input_ids_BL: int64 token ids with placeholders, padded.
        num_image_rows: merged image rows that the tower will produce (sum of t*h*w / merge^2).
        num_video_rows: the same for videos.

    Returns:
        `visual_update_indices` `[M_local]`, `visual_gather_indices` `[M_local]` and, when images
        and videos are both present, `visual_source_indices` `[M]`. An all-text batch has empty
        index arrays: carrying them spares the model the search.

    Raises:
        ValueError: placeholder and row counts differ, or the part does not divide the rows.
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
