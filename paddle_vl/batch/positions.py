"""Three-axis rotary positions (time, height, width) of every token, from ids and grids.

Source: `get_rope_index` of HF transformers' Qwen3-VL (5.x), which walks each sample token by
token. Here one running sum over the batch gives the same numbers: a text token advances the
position by 1, a visual item by `max(h, w) / merge` at its last token, and every token of an item
sees the position at which the item began.

Differs: padding positions hold 0, as in 5.x (4.57 puts 1 there); `rope_deltas` counts real tokens.

Shapes: B batch, L padded length, V visual tokens of one modality, I items (images or frames).
"""

import numpy as np


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

    A text of 6 tokens, then an image of grid (1, 4, 6): text has 0..5 on all three axes; the six
    image tokens T = 6, H = 6 6 6 7 7 7, W = 6 7 8 6 7 8; the next text token is 6 + max(2, 3) = 9.

    Args:
        input_ids_BL: int64 ids; every image or video frame is one run of placeholders.
        attention_mask_BL: 1 at real tokens, 0 at padding on either side; None means all real.
        image_grid_thw: `[n, 3]` patches (t, h, w) per image, in reading order over the batch.
        video_grid_thw: `[n, 3]` per video; each of its t frames is a run of its own.
        cu_seqlens: offsets of several samples in a row, see `paddle_vl.batch.packing`: positions
            begin anew in each.

    Returns:
        position_ids `[3, B, L]` int64 and rope_deltas `[B]` int64, of a packed batch one per
        segment: the position of the first generated token is the number of real tokens plus the
        delta.

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
    for kind, token_id, frames in (
        ("image", image_token_id, _as_grid(image_grid_thw)),
        ("video", video_token_id, _split_frames(_as_grid(video_grid_thw))),
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
            f"describes {counts_I.sum()}: every merged patch takes one placeholder"
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


def _split_frames(grid_thw: np.ndarray) -> np.ndarray:
    """A video of grid (t, h, w) is t items of grid (1, h, w): time is told by timestamp text."""
    frames = np.repeat(grid_thw, grid_thw[:, 0], axis=0)
    frames[:, 0] = 1
    return frames
