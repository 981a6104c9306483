"""What the vision tower needs to know about its patches, from the grids alone, in NumPy.

Patches come in merge-block order: (frame, block row, block column, row in block, column in block),
so that the m * m patches of a merged token are neighbours. Shapes: P patches, I items.

Source: `rot_pos_emb` and `fast_pos_embed_interpolate` of HF transformers' Qwen3-VL.
"""

from typing import NamedTuple

import numpy as np


class VisionLayout(NamedTuple):
    """Host description of a batch of patches.

    Attributes:
        segments: (count, length) of runs of equal consecutive attention segments; a segment is
            one frame of one item. A tuple, so that it can be hashed.
        coordinates: `[P, 2]` int64 row and column of each patch in its frame.
        tap_rows: `[4, P]` int64 rows of the learned position table to interpolate between.
        tap_weights: `[4, P]` float32 bilinear weights of those rows, summing to 1.
    """

    segments: tuple[tuple[int, int], ...]
    coordinates: np.ndarray
    tap_rows: np.ndarray
    tap_weights: np.ndarray


def vision_layout(grid_thw: np.ndarray, *, table_side: int, merge: int = 2) -> VisionLayout:
    """Lay out the patches of all items in order.

    Args:
        grid_thw: `[I, 3]` patches (t, h, w) per image or video.
        table_side: rows (and columns) of the square learned position table.
        merge: side of a merge block.

    Raises:
        ValueError: a grid that is empty or that merge blocks do not tile, with its item number.
    """
    grid_thw = np.asarray(grid_thw, dtype=np.int64).reshape(-1, 3)
    for item, (t, h, w) in enumerate(grid_thw):
        if min(t, h, w) < 1 or h % merge or w % merge:
            raise ValueError(
                f"vision item {item} has grid {[int(t), int(h), int(w)]}: frames must be at least "
                f"1, and height and width positive multiples of the merge size {merge}"
            )
    coordinates, rows, weights = [], [], []
    for t, h, w in grid_thw:
        y, x = _block_order(h, w, merge)
        item_rows, item_weights = _bilinear_taps(y, x, h, w, table_side)
        coordinates.append(np.tile(np.stack([y, x], axis=1), (t, 1)))
        rows.append(np.tile(item_rows, (1, t)))
        weights.append(np.tile(item_weights, (1, t)))
    lengths = np.repeat(grid_thw[:, 1] * grid_thw[:, 2], grid_thw[:, 0])
    return VisionLayout(
        _equal_runs(lengths),
        np.concatenate(coordinates),
        np.concatenate(rows, axis=1),
        np.concatenate(weights, axis=1),
    )


def _block_order(h: int, w: int, merge: int) -> tuple[np.ndarray, np.ndarray]:
    """Row and column of each patch of one frame, in merge-block order."""
    blocks = (h // merge, merge, w // merge, merge)
    y, x = (
        axis.reshape(blocks).transpose(0, 2, 1, 3).reshape(-1)
        for axis in np.indices((h, w), dtype=np.int64)
    )
    return y, x


def _bilinear_taps(
    y: np.ndarray, x: np.ndarray, h: int, w: int, side: int
) -> tuple[np.ndarray, np.ndarray]:
    """Four table rows and their weights per patch; corners of the frame meet corners of the table.

    A frame of 4 rows over a table of 6 reads rows 0, 5/3, 10/3 and 5.
    """

    def axis_taps(i: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        source = i * (side - 1) / max(n - 1, 1)
        low = np.floor(source).astype(np.int64)
        return low, np.minimum(low + 1, side - 1), source - low

    y0, y1, fy = axis_taps(y, h)
    x0, x1, fx = axis_taps(x, w)
    rows = np.stack([y0 * side + x0, y0 * side + x1, y1 * side + x0, y1 * side + x1])
    weights = np.stack([(1 - fy) * (1 - fx), (1 - fy) * fx, fy * (1 - fx), fy * fx])
    return rows, weights.astype(np.float32)


def _equal_runs(lengths: np.ndarray) -> tuple[tuple[int, int], ...]:
    starts = np.flatnonzero(np.diff(lengths, prepend=-1))
    counts = np.diff(starts, append=lengths.size)
    return tuple((int(n), int(lengths[s])) for n, s in zip(counts, starts, strict=True))


def checked_grid(kind: str, num_patches: int | None, grid: np.ndarray | None) -> np.ndarray:
    """The grid of a batch's images or videos as int64 `[n, 3]`.

    Args:
        kind: `image` or `video`.
        num_patches: rows of their pixels; None without pixels.

    Raises:
        ValueError: pixels without a grid or the reverse, or of another number of patches.
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
