"""Batches that make every process run the same layers, whatever its samples.

Where processes share parameters or gradients layer by layer (sharding stages 2 and 3), a layer is
collective: a process whose batch has no image runs the vision tower on one that no token takes, and
one that has run out of batches goes on with an empty one. Neither changes a number.
"""

from typing import Any

import numpy as np

Batch = dict[str, Any]


def has_visual(batch: Batch) -> bool:
    """Whether the vision tower runs for a batch."""
    return "pixel_values" in batch or "pixel_values_videos" in batch


def with_unused_image(batch: Batch, vision: Any) -> Batch:
    """The batch and one more image of a single merged row, which no token takes."""
    merge = vision.spatial_merge_size
    nothing = np.zeros([0], dtype=np.int64)
    return batch | {
        "pixel_values": np.zeros([merge**2, vision.patch_dim], dtype=np.float32),
        "image_grid_thw": np.array([[1, merge, merge]], dtype=np.int64),
        "visual_update_indices": nothing,
        "visual_gather_indices": nothing,
        "num_unused_visual_rows": 1,
    }


def empty_batch(length: int) -> Batch:
    """One sample of padding, without targets."""
    ids = np.zeros([1, length], dtype=np.int64)
    return {
        "input_ids": ids,
        "attention_mask": np.ones_like(ids),
        "labels": np.full_like(ids, -100),
        "position_ids": np.zeros([3, 1, length], dtype=np.int64),
        "num_target_tokens": 0,
        "has_left_padding": False,
    }
