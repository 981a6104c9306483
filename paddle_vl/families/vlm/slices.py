"""A context-parallel rank's slice of a batch, see `paddle_vl.batch.row_slices`.

The slice is a batch of one row. Images are in it whole, as every rank may hold some tokens of each.
Labels are shifted before the cut: a slice has the targets of its rows, and no labels.
"""

from typing import Any, cast

import numpy as np

from paddle_vl.batch.row_slices import RowSlice
from paddle_vl.batch.schema import WHOLE_ROWS, VLBatch
from paddle_vl.families.vlm.objective import with_target_rows
from paddle_vl.nn.objective import IGNORE_INDEX

_TARGETS = ("target_weights", "target_sources")
# Of the whole batch, for its counts.
_COUNTED = ("attention_mask", "cu_seqlens", "target_rows", "image_grid_thw", "video_grid_thw")
_CUT = ("labels", "loss_weights", "label_sources", "cu_seqlens", "visual_source_indices")


def sliced(batch: VLBatch, rank: int, size: int) -> VLBatch:
    """The slice of a rank of a context-parallel group of `size` ranks.

    Args:
        batch: of the collator, or `empty_batch`; padded on the right.

    Raises:
        ValueError: `size` does not divide the token rows.
    """
    whole: Any = with_target_rows(batch)
    rows, length = whole["input_ids"].shape
    offsets_S = whole.get("cu_seqlens", np.arange(rows + 1) * length)
    own = RowSlice.of(offsets_S.astype(np.int64), rank, size)
    found = {name: value for name, value in whole.items() if name not in _CUT}
    found[WHOLE_ROWS] = {name: whole[name] for name in _COUNTED if name in whole}
    for name in ("input_ids", "attention_mask", "position_ids"):
        axes = [*whole[name].shape[:-2], -1]
        found[name] = whole[name].reshape(axes)[..., own.rows][..., None, :]
    found["slice_key_rows"] = own.key_rows
    found |= _own_targets(whole, own)
    if "visual_update_indices" in whole:
        found |= _own_visual(whole, own)
    if "real_row_indices" in whole:
        real_R = whole["real_row_indices"]
        found["real_row_indices"] = own.places(real_R[own.chosen(real_R)])
    return cast(VLBatch, found)


def _own_targets(whole: Any, own: RowSlice) -> dict[str, np.ndarray]:
    rows_N, targets_N = whole["target_rows"]
    chosen_N = own.chosen(rows_N)
    if chosen_N.any():
        found = {"target_rows": np.stack([own.places(rows_N[chosen_N]), targets_N[chosen_N]])}
        return found | {name: whole[name][chosen_N] for name in _TARGETS if name in whole}
    # The head runs on a row without a target, see `paddle_vl.nn.objective.target_rows`.
    found = {"target_rows": np.array([[0], [IGNORE_INDEX]])}
    return found | {name: np.zeros_like(whole[name][:1]) for name in _TARGETS if name in whole}


def _own_visual(whole: Any, own: RowSlice) -> dict[str, Any]:
    """The visual rows of the slice. Of images and videos `source` is in the order of these rows."""
    chosen_M = own.chosen(whole["visual_update_indices"])
    found: dict[str, Any] = {
        "visual_update_indices": own.places(whole["visual_update_indices"][chosen_M]),
        "visual_gather_indices": whole["visual_gather_indices"][chosen_M],
        "num_other_visual_rows": int(np.count_nonzero(~chosen_M)),
    }
    if (source_M := whole.get("visual_source_indices")) is not None:
        taken = source_M[found["visual_gather_indices"]]
        found |= {"visual_source_indices": taken, "visual_gather_indices": np.arange(len(taken))}
    return found
