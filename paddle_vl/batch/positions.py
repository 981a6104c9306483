"""Host-side layout of a batch: rotary positions, offsets of packed samples, target rows, layout of
patches.

Rotary positions have three axes (time, height, width). Source: `get_rope_index` of HF transformers'
Qwen3-VL (5.x), which walks each sample token by token. Here one running sum over the batch gives
the same numbers: a text token advances the position by 1, a visual item by `max(h, w) / merge` at
its last token; positions inside an item are relative to the position at its start.
Padding positions are 0, as in 5.x (4.57: 1). Differs: `rope_deltas` counts real tokens.

Packing: `cu_seqlens` `[S + 1]` int32 are the offsets of S segments in the T = B * L token rows,
batch-major, from 0 to T. A segment is a sample, or the padding at the end of a batch row; no
segment crosses a row's end. Two samples of 3 and 2 tokens in a row of 6, one of 4 in the next:

    row 0    a a a b b .          cu_seqlens = [0, 3, 5, 6, 10, 12]
    row 1    c c c c . .

Patches come in merge-block order: (frame, block row, block column, row in block, column in block),
so that the m * m patches of a merged token are neighbours. Source: `rot_pos_emb` and
`fast_pos_embed_interpolate` of HF transformers' Qwen3-VL.

Shapes: B batch, L padded length, T token rows, S segments, V visual tokens of one modality,
I items (images, videos or frames), P patches.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from paddle_vl.batch.rows import IGNORE_INDEX
from paddle_vl.batch.schema import PATCH_FIELDS


def mrope_position_ids(
    input_ids_BL: np.ndarray,
    attention_mask_BL: np.ndarray | None = None,
    image_grid_thw: np.ndarray | None = None,
    video_grid_thw: np.ndarray | None = None,
    *,
    image_token_id: int,
    video_token_id: int,
    spatial_merge_size: int = 2,
    cu_seqlens: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Positions for the interleaved rotary embedding.

    Example: 6 text tokens, then an image of grid (1, 4, 6). Text has 0..5 on all three axes; the
    six image tokens have time 6, height 6 6 6 7 7 7, width 6 7 8 6 7 8; the next text token is at
    6 + max(2, 3) = 9.

    Args:
        input_ids_BL: int64 ids; every image or video frame is one unbroken run of placeholders.
        attention_mask_BL: 1 at real tokens, 0 at padding on either side; None means all real.
        image_grid_thw: `[n, 3]` patches (t, h, w) per image, in reading order over the batch.
        video_grid_thw: `[n, 3]` per video; each of its t frames is a run of its own.
        cu_seqlens: `[S + 1]` offsets of packed samples; positions restart in each segment.

    Returns:
        position_ids `[3, B, L]` int64 and rope_deltas `[B]` int64 (`[S]` if packed). The position
        of the first generated token is the number of real tokens plus the delta.

    Raises:
        ValueError: placeholders and grids do not match, or a run is broken by other tokens.
    """
    real_BL = (
        np.ones(input_ids_BL.shape, dtype=bool)
        if attention_mask_BL is None
        else np.asarray(attention_mask_BL).astype(bool)
    )
    advance_T = real_BL.astype(np.int64).reshape(-1)
    offset_3T = np.zeros((3, advance_T.size), dtype=np.int64)
    batch, length = input_ids_BL.shape
    starts_S = np.arange(batch) * length if cu_seqlens is None else np.asarray(cu_seqlens)[:-1]
    segment_T = np.repeat(np.arange(starts_S.size), np.diff(starts_S, append=advance_T.size))
    # A video (t, h, w) is t items (1, h, w); the text's timestamps encode time.
    videos = _as_grid(video_grid_thw)
    frames_thw = np.repeat(videos * [0, 1, 1] + [1, 0, 0], videos[:, 0], axis=0)
    for kind, token_id, frames in (
        ("image", image_token_id, _as_grid(image_grid_thw)),
        ("video", video_token_id, frames_thw),
    ):
        rows_V = np.flatnonzero((input_ids_BL == token_id) & real_BL)
        _place_items(
            kind,
            rows_V,
            frames // [1, spatial_merge_size, spatial_merge_size],
            segment_T,
            advance_T,
            offset_3T,
        )
    begin_T = advance_T.cumsum() - advance_T
    begin_T -= begin_T[starts_S][segment_T]
    position_ids = (begin_T + offset_3T).reshape(3, batch, length) * real_BL
    real_T = real_BL.reshape(-1).astype(np.int64)
    return position_ids, np.add.reduceat(advance_T - real_T, starts_S)


def _place_items(
    kind: str,
    rows_V: np.ndarray,
    merged_thw: np.ndarray,
    segment_T: np.ndarray,
    advance_T: np.ndarray,
    offset_3T: np.ndarray,
) -> None:
    """Write the advance and the (t, y, x) offsets of every token of every item, in place."""
    counts_I = merged_thw.prod(axis=1)
    if rows_V.size != counts_I.sum():
        raise ValueError(
            f"{rows_V.size} {kind} placeholder tokens in input_ids but {kind}_grid_thw "
            f"describes {counts_I.sum()}: every merged patch needs one placeholder"
        )
    if not rows_V.size:
        return
    item_V = np.repeat(np.arange(len(counts_I)), counts_I)
    last_I = counts_I.cumsum() - 1
    first_I = last_I - counts_I + 1
    broken = (rows_V[last_I] - rows_V[first_I] != counts_I - 1) | (
        segment_T[rows_V[last_I]] != segment_T[rows_V[first_I]]
    )
    if broken.any():
        item = int(np.flatnonzero(broken)[0])
        raise ValueError(
            f"{kind} item {item} (merged grid {merged_thw[item].tolist()}) is not one unbroken run "
            f"of {counts_I[item]} placeholders in sample {segment_T[rows_V[first_I[item]]]}: check "
            "the order of the grids and that no other token stands between the placeholders"
        )
    within_V = np.arange(rows_V.size) - first_I[item_V]
    _, height_V, width_V = merged_thw[item_V].T
    offset_3T[:, rows_V] = (
        within_V // (height_V * width_V),
        within_V // width_V % height_V,
        within_V % width_V,
    )
    advance_T[rows_V] = 0
    advance_T[rows_V[last_I]] = merged_thw[:, 1:].max(axis=1)


def _as_grid(grid_thw: np.ndarray | None) -> np.ndarray:
    return np.asarray(grid_thw if grid_thw is not None else (), dtype=np.int64).reshape(-1, 3)


def segment_offsets(lengths: Sequence[Sequence[int]], padded_length: int) -> np.ndarray:
    """`cu_seqlens` of right-padded batch rows with samples of these lengths."""
    segments: list[int] = []
    for row in lengths:
        segments += row
        if padding := padded_length - sum(row):
            segments.append(padding)
    return np.concatenate([[0], np.cumsum(segments)]).astype(np.int32)


def restart_offsets(text_positions_BL: np.ndarray) -> np.ndarray:
    """`cu_seqlens` from text positions: a segment begins where the position does not grow by 1.

    Source: `find_packed_sequence_indices` of HF transformers.
    """
    begins_BL = np.diff(text_positions_BL, axis=1, prepend=0) != 1
    begins_BL[:, 0] = True
    return np.append(np.flatnonzero(begins_BL), begins_BL.size).astype(np.int32)


def check_offsets(cu_seqlens: np.ndarray, batch: int, length: int) -> None:
    """Check that the segments tile the rows of a `[batch, length]` batch.

    Raises:
        ValueError: the offsets do not increase from 0 to B * L, or a segment crosses a row's end.
    """
    offsets = np.asarray(cu_seqlens)
    tiles = (
        offsets.ndim == 1
        and offsets.size > 1
        and offsets[0] == 0
        and offsets[-1] == batch * length
        and (np.diff(offsets) > 0).all()
    )
    if not tiles:
        raise ValueError(
            f"cu_seqlens {_shown(offsets)} must increase from 0 to {batch * length}, the number of "
            f"token rows of a [{batch}, {length}] batch; padding is a segment of its own"
        )
    if missing := sorted(set(range(0, batch * length, length)) - set(offsets.tolist())):
        raise ValueError(
            f"a segment of cu_seqlens {_shown(offsets)} crosses token row {missing[0]}, where a "
            f"row of {length} tokens begins: samples are packed within rows"
        )


def key_ends(cu_seqlens: np.ndarray, length: int) -> np.ndarray:
    """End of each token's segment within its batch row: `[B, L]` int32.

    As an attention key, a token is visible only to queries before this end.
    """
    ends_T = np.repeat(cu_seqlens[1:], np.diff(cu_seqlens))
    row_starts_T = np.arange(ends_T.size) // length * length
    return (ends_T - row_starts_T).reshape(-1, length).astype(np.int32)


def real_lengths(attention_mask_BL: np.ndarray, cu_seqlens: np.ndarray | None = None) -> np.ndarray:
    """Real tokens of every sample: `[B]`, or one number per segment that is not padding."""
    if cu_seqlens is None:
        return attention_mask_BL.sum(axis=1)
    lengths = np.add.reduceat(attention_mask_BL.reshape(-1), cu_seqlens[:-1])
    return lengths[lengths > 0]


def _shown(offsets: np.ndarray) -> str:
    values = offsets.reshape(-1).tolist()
    return str(values) if len(values) <= 8 else f"[{', '.join(map(str, values[:8]))}, ...]"


def target_rows(targets_T: np.ndarray) -> np.ndarray:
    """Numbers of the rows whose target is not `IGNORE_INDEX`, and these targets: `[2, N]` int64.

    Row 0 if there is none: all ranks run the head, whatever their data.
    """
    rows_N = np.flatnonzero(targets_T != IGNORE_INDEX)
    if not rows_N.size:
        rows_N = np.zeros(1, dtype=np.int64)
    return np.stack([rows_N, targets_T[rows_N]])


class PatchRows(NamedTuple):
    """Places of a batch of patches: a row per patch, to travel and to be divided with the patches.

    Attributes:
        coordinates: `[P, 2]` int64 row and column of each patch in its frame.
        tap_rows: `[P, 4]` int64 rows of the learned position table to interpolate between.
        tap_weights: `[P, 4]` float32 bilinear weights of those rows; they sum to 1.
    """

    coordinates: Any
    tap_rows: Any
    tap_weights: Any


def vision_layout(
    grid_thw: np.ndarray, *, table_side: int, merge: int = 2, aligns_corners: bool = True
) -> PatchRows:
    """Lay out the patches of all items in order.

    Args:
        grid_thw: `[I, 3]` patches (t, h, w) per image or video.
        table_side: side of the square table of learned positions.
        merge: side of a merge block, in patches.
        aligns_corners: whether the corners of frame and table coincide; else their edges do.

    Raises:
        ValueError: an empty grid, or one that merge blocks do not tile, with its item number.
    """
    places = []
    for t, h, w in _tiled(grid_thw, merge):
        blocks = (h // merge, merge, w // merge, merge)
        y, x = (
            axis.reshape(blocks).transpose(0, 2, 1, 3).reshape(-1)
            for axis in np.indices((h, w), dtype=np.int64)
        )
        of_frame = np.stack([y, x], axis=1), *_bilinear_taps(y, x, h, w, table_side, aligns_corners)
        places.append([np.tile(each, (t, 1)) for each in of_frame])
    return PatchRows(*(np.concatenate(each) for each in zip(*places, strict=True)))


def patch_places(grid_thw: np.ndarray, vision: Any) -> dict[str, np.ndarray]:
    """`PATCH_FIELDS` of the patches of some items, for a tower of that configuration."""
    layout = vision_layout(
        grid_thw,
        table_side=vision.table_side,
        merge=vision.spatial_merge_size,
        aligns_corners=vision.aligns_corners,
    )
    return dict(zip(PATCH_FIELDS, layout, strict=True))


def in_blocks(grid_thw: np.ndarray, merge: int) -> np.ndarray:
    """Of patches in raster order (frame, row, column), the numbers in merge-block order: `[P]`.

    Raises:
        ValueError: as of `vision_layout`.
    """
    orders, start = [], 0
    for t, h, w in _tiled(grid_thw, merge):
        numbers = np.arange(start, start + t * h * w)
        blocks = numbers.reshape(t, h // merge, merge, w // merge, merge)
        orders.append(blocks.transpose(0, 1, 3, 2, 4).reshape(-1))
        start += t * h * w
    return np.concatenate(orders)


def _tiled(grid_thw: np.ndarray, merge: int) -> np.ndarray:
    """Grids as int64 `[I, 3]`, of frames that merge blocks tile."""
    grid_thw = np.asarray(grid_thw, dtype=np.int64).reshape(-1, 3)
    for item, (t, h, w) in enumerate(grid_thw):
        if min(t, h, w) < 1 or h % merge or w % merge:
            raise ValueError(
                f"vision item {item} has grid {[int(t), int(h), int(w)]}: frames must be at least "
                f"1, and height and width positive multiples of the merge size {merge}"
            )
    return grid_thw


def frame_runs(grid_thw: np.ndarray) -> tuple[tuple[int, int], ...]:
    """(count, length) of runs of consecutive attention segments of equal length, of the items
    `[I, 3]`; a segment is one frame of one item."""
    lengths = np.repeat(grid_thw[:, 1] * grid_thw[:, 2], grid_thw[:, 0])
    starts = np.flatnonzero(np.diff(lengths, prepend=-1))
    counts = np.diff(starts, append=lengths.size)
    return tuple((int(n), int(lengths[s])) for n, s in zip(counts, starts, strict=True))


def padded_segments(
    segments: Sequence[tuple[int, int]],
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Attention segments as arrays, for programs that do not know their number or lengths.

    Args:
        segments: of `frame_runs`.

    Returns:
        Shapes: S segments, each padded to the longest length Q. int64 `[S, Q]` patch at each place
        (0 at padding); float32 `[S, Q]`, 0 at patches and -1e30 at padding; int64 `[P]` place of
        each patch among the S * Q.
    """
    lengths_S = np.concatenate([[length] * count for count, length in segments])
    places_Q = np.arange(lengths_S.max())
    is_real_SQ = places_Q < lengths_S[:, None]
    starts_S = np.cumsum(lengths_S) - lengths_S
    rows_SQ = np.where(is_real_SQ, starts_S[:, None] + places_Q, 0)
    bias_SQ = np.where(is_real_SQ, 0.0, -1e30).astype(np.float32)
    return rows_SQ, bias_SQ, np.flatnonzero(is_real_SQ)


def _bilinear_taps(
    y: np.ndarray, x: np.ndarray, h: int, w: int, side: int, aligns_corners: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Table rows and their weights, `[P, 4]`.

    Example: a frame of 4 rows over a table of 6 rows reads rows 0, 5/3, 10/3 and 5 if the corners
    coincide; else 1/4, 7/4, 13/4 and 19/4, or of a frame of 12 rows first -1/4, which is row 0.
    """

    def axis_taps(i: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        if aligns_corners:
            source = i * (side - 1) / max(n - 1, 1)
        else:
            source = ((i + 0.5) * side / n - 0.5).clip(0, side - 1)
        low = np.floor(source).astype(np.int64)
        return low, np.minimum(low + 1, side - 1), source - low

    y0, y1, fy = axis_taps(y, h)
    x0, x1, fx = axis_taps(x, w)
    rows = [y0 * side + x0, y0 * side + x1, y1 * side + x0, y1 * side + x1]
    weights = np.stack([(1 - fy) * (1 - fx), (1 - fy) * fx, fy * (1 - fx), fy * fx], axis=1)
    return np.stack(rows, axis=1), weights.astype(np.float32)


def checked_grid(kind: str, num_patches: int | None, grid: np.ndarray | None) -> np.ndarray:
    """The grid of a batch's images or videos as int64 `[n, 3]`.

    Args:
        kind: `image` or `video`.
        num_patches: rows of its pixels; None without pixels.

    Raises:
        ValueError: pixels without a grid or the reverse, or unequal numbers of patches.
    """
    names = ("pixel_values", "image_grid_thw")
    if kind == "video":
        names = ("pixel_values_videos", "video_grid_thw")
    if num_patches is None or grid is None:
        absent, present = names if num_patches is None else names[::-1]
        raise ValueError(f"the batch has {present} without {absent}: give both or neither")
    grid = np.asarray(grid, dtype=np.int64).reshape(-1, 3)
    described = int(grid.prod(axis=1).sum())
    if num_patches != described:
        raise ValueError(
            f"{names[0]} has {num_patches} patches but {names[1]} {grid.tolist()} describes "
            f"{described}: they belong to different batches"
        )
    return grid
