"""The pixels that a rank's vision tower takes, where ranks encode different items of a batch.

Which items a rank encodes follows from the grids. So each takes their patches on the host, out of
memory that the ranks of a machine share (`paddle_vl.data.lane_share`): it neither reads the pixels
of other ranks nor copies them to its device.

Shapes: I items, P patches.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from paddle_vl.batch.positions import patch_places
from paddle_vl.batch.schema import GRIDS, OF_PATCHES, PIXELS, VLBatch
from paddle_vl.nn.placement import RegionOps


def with_own_pixels(batch: VLBatch, vision: Any, ops: RegionOps | None) -> VLBatch:
    """A batch with `own_patches` and their places in place of all pixels.

    Unchanged without images and videos. A rank without an item gets no patches, or a black row
    where its tower's layers are collective.

    Args:
        vision: the tower's configuration.
        ops: of the rank; None without a tower, as on later pipeline stages: it gets no pixels.
    """
    pixels = [batch[name] for name in PIXELS if name in batch]
    if not pixels:
        return batch
    found: dict[str, Any] = dict.fromkeys(OF_PATCHES)
    if ops is None:
        return batch | found
    grids = [batch[name] for name in GRIDS if name in batch]
    grid_thw, items = ops.own_items(np.concatenate(grids))
    if items.size:
        found["own_patches"], own_grid = _rows_of(pixels, grid_thw, items), grid_thw[items]
    else:
        merge, count = vision.spatial_merge_size, int(ops.layers_are_collective)
        shape = count * merge**2, vision.patch_dim
        found["own_patches"] = np.zeros(shape, dtype=np.float32)
        own_grid = np.array([[1, merge, merge]] * count)
    return batch | (found | (patch_places(own_grid, vision) if len(own_grid) else {}))


def _rows_of(arrays: Sequence[np.ndarray], grid_thw: np.ndarray, items: np.ndarray) -> np.ndarray:
    """Patches of some items, of arrays that have those of all items one after the other; without a
    copy if they are one interval."""
    sizes_I = grid_thw.prod(axis=1)
    ends_N = sizes_I.cumsum()[items]
    begins_N = ends_N - sizes_I[items]
    is_gap = begins_N[1:] != ends_N[:-1]
    runs = zip(begins_N[np.append(True, is_gap)], ends_N[np.append(is_gap, True)], strict=True)
    pieces, runs, first = [], list(runs), 0
    for array in arrays:
        stop = first + len(array)
        pieces += [
            array[max(begin, first) - first : end - first]
            for begin, end in runs
            if begin < stop and end > first
        ]
        first = stop
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
