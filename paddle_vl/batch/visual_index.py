"""Indices of visual token rows, and of the visual embedding that each of them receives.

Computed once per step; the embedding merge and every deepstack level use them. The same code runs
on NumPy arrays (collator) and Paddle tensors (`embedding_inputs`); only the 1-D `nonzero`, whose
API differs, is an argument.

Shapes: B batch, L padded length, T = B * L token rows, M visual embeddings of the batch, M_local
those of this rank's shard of the token rows.

Example: one sample, two image tokens (`#`) and one video token (`%`), two sequence-parallel shards:

    row      0  1  2  3 | 4  5  6  7      reading order of the embeddings: 1 -> 0, 3 -> 1, 4 -> 2
    token    a  #  b  % | #  c  d  e
    shard 0  update [1, 3]  gather [0, 1]
    shard 1  update [0]     gather [2]     (row 4 is row 0 of the shard)
    source   [0, 2, 1]                     (embeddings arrive as [image 0, image 1, video 0])

Layouts order the token rows `(b, l)` and say how a rank's shard is cut from them:

    token_rows      row b * L + l; contiguous shards. Hidden states `[T, D]` of this package.
    sequence_first  row l * B + b; contiguous shards. Hidden states `[L, B, D]` of Megatron.
    batch_slices    every sample's columns are cut, `[B, L / mp]` per rank; row b * L / mp + l.
                    What PaddleFleet's deepstack step indexes after its transpose.

Shapes and dtypes are always checked, values in NumPy arrays, as the collator's. Those of tensors
are on the device, so a step checks them only in the checked mode:

    with checked_values():
        model(**batch)  # reads the device for each check
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np

from paddle_vl.batch.rows import Array, RowPart, is_known
from paddle_vl.batch.schema import (
    GRIDS,
    VLBatch,
    bool_masks,
    check_array,
    has_values,
)
from paddle_vl.batch.schema import checked_values as checked_values

Layout = Literal["token_rows", "sequence_first", "batch_slices"]


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
    nonzero: Callable[..., Array],
    part: RowPart | None = None,
    layout: Layout = "token_rows",
    count: int | None = None,
) -> VisualIndices:
    """Indices of the visual token rows; no loop over samples, no boolean indexing.

    A visual token's index in reading order is the number of visual tokens before it, batch-major.
    Cumulative sums give it for every layout and shard, also where a traced program does not know
    the batch or the length.

    Args:
        image_mask_BL: bool, True at image placeholders.
        video_mask_BL: bool, True at video placeholders; None when the batch can have none.
        nonzero: 1-D bool array to the 1-D int64 positions of its True entries. Of a tensor it
            waits for the device, since the number of positions is not known.
        part: the shard of token rows to index; None for all of them.
        layout: order of the token rows and how they are cut, see the top of this file.
        count: number of visual tokens of the batch, if shapes tell it. `nonzero` is then called
            with `count` as well where that is its number of positions: always, except for the
            `update` of a shard, whose number only the values tell.

    Raises:
        ValueError: unknown layout, or `part.size` does not divide the rows that are cut (B * L;
            L for `batch_slices`) and `part.uneven` is not set; or masks that
            contradict each other, see `bool_masks`.
    """
    part = RowPart() if part is None else part
    image_mask_BL, video_mask_BL = bool_masks(image_mask_BL, video_mask_BL)
    of_batch = nonzero if count is None else partial(nonzero, count=count)
    visual_BL = image_mask_BL if video_mask_BL is None else image_mask_BL | video_mask_BL
    order_BL = _running_count(visual_BL) - 1
    is_visual_T = _shard(visual_BL, part, layout)
    update = (of_batch if part.size == 1 else nonzero)(is_visual_T)
    gather = _shard(order_BL, part, layout)[update]
    source = None
    if video_mask_BL is not None:
        source = _source_rows(image_mask_BL, video_mask_BL, visual_BL, of_batch)
    if count is not None:
        # Masks that do not keep the promise must not lead out of the embeddings.
        last = max(count - 1, 0)
        gather, source = gather.clip(0, last), None if source is None else source.clip(0, last)
    return VisualIndices(update, gather, source)


def _shard(array_BL: Array, part: RowPart, layout: Layout) -> Array:
    """The values at this shard's token rows, 1-D."""
    if layout == "token_rows":
        array_T = array_BL.reshape([-1])
        return array_T if part.size == 1 else part.of_rows(array_T)
    if layout == "sequence_first":
        return part.of_rows(array_BL.transpose([1, 0]).reshape([-1]))
    if layout == "batch_slices":
        return part.of_columns(array_BL).reshape([-1])
    raise ValueError(f"layout is {layout!r}; use 'token_rows', 'sequence_first' or 'batch_slices'")


def _source_rows(
    image_mask_BL: Array, video_mask_BL: Array, visual_BL: Array, nonzero: Callable
) -> Array:
    """Row in `[images; videos]` of every visual embedding in reading order: `[M]` int64."""
    image_BL, video_BL = _running_count(image_mask_BL), _running_count(video_mask_BL)
    is_video_BL = video_mask_BL.astype("int64")
    # The last count is the number of image tokens; slicing keeps it on the device.
    num_images_11 = image_BL[-1:, -1:]
    source_BL = (image_BL - 1) * (1 - is_video_BL) + (num_images_11 + video_BL - 1) * is_video_BL
    return source_BL.reshape([-1])[nonzero(visual_BL.reshape([-1]))]


def _running_count(mask_BL: Array) -> Array:
    """Number of True entries up to and including each place, batch-major: int64 `[B, L]`."""
    count_BL = mask_BL.astype("int64")
    if all(map(is_known, mask_BL.shape)):
        return count_BL.reshape([-1]).cumsum(0).reshape(list(mask_BL.shape))
    # A traced program cannot restore a shape that it does not know.
    count_BL = count_BL.cumsum(1)
    of_sample_B1 = count_BL[:, -1:]
    return count_BL + of_sample_B1.cumsum(0) - of_sample_B1


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
        ValueError: placeholders and embeddings differ in number; see `compute_visual_indices`.
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


def check_indices(batch: VLBatch, num_rows: int, token_ids: tuple[int, int], part: RowPart) -> None:
    """Check that the indices of a batch are of so many visual embeddings.

    Raises:
        ValueError: see `check_given` and, where values may be read, `check_placeholders`.
    """
    given = VisualIndices(*(getattr(batch, f"visual_{n}_indices") for n in VisualIndices._fields))
    num_unused = batch.num_unused_visual_rows - batch.num_reused_visual_rows
    if batch.slice_key_rows is not None:
        check_given(given, num_rows, None, False, part)
        return
    has_both = all(name in batch for name in GRIDS)
    check_given(given, num_rows, num_unused, has_both, part)
    if has_values(batch.input_ids):
        kinds = zip(("image", "video"), token_ids, strict=True)
        is_kind_BL = {kind: batch.input_ids == token_id for kind, token_id in kinds}
        check_placeholders(is_kind_BL, None, given, {"visual": num_rows}, num_unused, part)


def check_given(
    given: VisualIndices, total: int, num_unused: int | None, has_both: bool, part: RowPart
) -> None:
    """Check by shapes and dtypes that indices are of so many visual embeddings.

    Args:
        num_unused: embeddings that they leave out; None for any number.
        has_both: whether the embeddings are of images and of videos.

    Raises:
        ValueError: they are not, or one of them is missing.
    """
    for name in VisualIndices._fields if has_both else ("update", "gather"):
        if getattr(given, name) is None:
            raise ValueError(
                f"the batch has visual indices without visual_{name}_indices: add them (the "
                "collator does), or leave all indices out to have them computed"
            )
    num_taken = total - num_unused if is_known(total) and num_unused is not None else -1
    num_update: Any = given.update.shape[0] if len(given.update.shape) == 1 else "M"
    if is_known(num_taken) and is_known(num_update) and num_update > num_taken:
        raise ValueError(
            f"visual_update_indices has {num_update} token rows but the batch has {num_taken} "
            "visual embeddings: the indices belong to another batch"
        )
    remedy = "take all indices from one call of host_visual_indices, of this batch"
    wanted = {"update": num_taken if part.size == 1 else "M", "gather": num_update}
    for name, number in (wanted | {"source": num_taken}).items():
        check_array(f"visual_{name}_indices", getattr(given, name), [[number]], "int64", remedy)


def check_placeholders(
    is_kind_BL: Mapping[str, Array],
    mask_BL: Array | None,
    indices: VisualIndices | None,
    num_rows: Mapping[str, int],
    num_unused: int,
    part: RowPart,
) -> None:
    """Check that placeholders, mask, indices and embeddings are of one batch; reads tensors.

    Args:
        is_kind_BL: placeholders of images and of videos; none without ids.
        num_rows: embeddings by kind, `image` and `video`; by another name those of both kinds.

    Raises:
        ValueError: two of them contradict each other.
    """
    kinds = {kind: np.asarray(is_BL) for kind, is_BL in is_kind_BL.items()}
    visual_BL: Any = None if mask_BL is None else np.asarray(mask_BL)
    if kinds:
        if not num_unused and num_rows.keys() <= kinds.keys():
            counts = [(int(kinds[kind].sum()), num_rows.get(kind, 0)) for kind in kinds]
            check_visual_counts(*counts[0], *counts[1])
        placeholders_BL = kinds["image"] | kinds["video"]
        visual_BL = placeholders_BL if visual_BL is None else visual_BL
        if len(wrong := np.argwhere(visual_BL != placeholders_BL)):
            raise ValueError(
                f"visual_pos_masks differs from the placeholders of input_ids at {len(wrong)} "
                f"tokens, the first is token {wrong[0][1]} of sample {wrong[0][0]}: pass the mask "
                "of this batch, or none"
            )
    num_tokens, num_taken = int(np.sum(visual_BL)), sum(num_rows.values()) - num_unused
    if num_tokens != num_taken:
        raise ValueError(
            f"{num_tokens} visual tokens but {num_taken} visual embeddings: every visual token "
            "takes exactly one; check that mask and embeddings are of one batch"
        )
    has_order = indices is not None and indices.source is not None
    # Samples that share an image have indices of their own, see `num_reused_visual_rows`.
    if indices is None or (has_order and not kinds) or num_unused < 0:
        return
    masks_BL = (kinds["image"], kinds["video"]) if has_order else (visual_BL, None)
    wanted = compute_visual_indices(*masks_BL, nonzero=np.flatnonzero, part=part)
    for name, found, expected in zip(VisualIndices._fields, indices, wanted, strict=True):
        if expected is not None and not np.array_equal(np.asarray(found), expected):
            raise ValueError(
                f"visual_{name}_indices are not those of this batch's visual tokens: pass what "
                "host_visual_indices makes of its input_ids for this rank, or none"
            )
