"""Qwen3-VL's encoder under the colocated schedule: images and videos as items.

An `ItemEncoder` of `paddle_vl.parallel.colocated.encoder`. Rows of a batch are those of its images
and then of its videos, as the tower returns them. Section 0 is the merged rows, section 1 + g
deepstack level g, which the chunk with decoder layer g adds.

Shapes: I items, P patches, M rows, D decoder width, G levels, C = (1 + G) * D.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import paddle
from paddle import Tensor

from paddle_vl.batch.schema import VLBatch
from paddle_vl.families.qwen3_vl.model import Qwen3VLForConditionalGeneration, device_tensor
from paddle_vl.families.qwen3_vl.objective import RANKS_WITH_VISUAL
from paddle_vl.families.qwen3_vl.pipeline import SECTIONS

# Kinds of items in the order of their rows: their pixels and grids.
KINDS = {
    "image": ("pixel_values", "image_grid_thw"),
    "video": ("pixel_values_videos", "video_grid_thw"),
}


class VisualItems(NamedTuple):
    """The items of a batch, `[I]` each.

    Attributes:
        rows: rows of each.
        costs: relative cost of encoding each.
    """

    rows: np.ndarray
    costs: np.ndarray


class Qwen3VLEncoder:
    """The vision tower of a model whose every rank has it.

    Args:
        model: with its tower, whole or divided.
    """

    splits_rows = True

    def __init__(self, model: Qwen3VLForConditionalGeneration):
        self.model, self.vision = model, model.config.vision_config
        num_levels = len(self.vision.deepstack_visual_indexes)
        self.section_widths = [self.vision.out_hidden_size] * (1 + num_levels)

    def parameters(self) -> list[Tensor]:
        """Of the tower."""
        return self.model.visual.parameters()

    def items(self, batch: VLBatch) -> VisualItems:
        """Rows of each image and video, and its multiplications in the tower's blocks."""
        grid_thw = np.concatenate([_grid(batch, kind) for kind in KINDS])
        patches_I, frame_I = grid_thw.prod(axis=1), grid_thw[:, 1:].prod(axis=1)
        width, inner = self.vision.hidden_size, self.vision.intermediate_size
        costs_I = patches_I * (4 * width**2 + 2 * width * inner + 2 * width * frame_I)
        return VisualItems(patches_I // self.vision.spatial_merge_size**2, costs_I)

    def has_items_anywhere(self, batch: VLBatch) -> bool:
        """Whether any data-parallel rank's batch has images or videos, as the ranks agreed."""
        return bool(batch.get(RANKS_WITH_VISUAL, 0))

    def encode(self, batches: Sequence[VLBatch], own: Sequence[np.ndarray]) -> Tensor:
        """`[M, C]`: rows of the given items of each batch, in one forward pass of the tower."""
        pixels, grids = [], []
        for batch, items in zip(batches, own, strict=True):
            start = 0
            for kind in KINDS:
                grid_thw = _grid(batch, kind)
                chosen = items[(items >= start) & (items < start + len(grid_thw))] - start
                start += len(grid_thw)
                if chosen.size:
                    pixels.append(_pixels_of(batch, kind, grid_thw, chosen))
                    grids.append(grid_thw[chosen])
        whole = pixels[0] if len(pixels) == 1 else paddle.concat(pixels)
        merged, levels = self.model.encode_items(whole, np.concatenate(grids))
        return paddle.concat([merged, *levels], axis=1)

    def sections_of(self, chunk: Any) -> set[int]:
        """Sections that a `Qwen3VLStage` uses."""
        levels = range(len(self.section_widths) - 1)
        own = {1 + level for level in levels if level in chunk.layers}
        return own | {0} if chunk.is_first else own

    def language_batch(self, batch: VLBatch, sections: Mapping[int, Tensor]) -> dict[str, Any]:
        """The batch with rows in place of pixels."""
        without = {RANKS_WITH_VISUAL, *(pixels for pixels, _ in KINDS.values())}
        rest = {name: value for name, value in batch.items() if name not in without}
        return {**rest, SECTIONS: sections}


def _grid(batch: Mapping[str, Any], kind: str) -> np.ndarray:
    grid_thw = batch.get(KINDS[kind][1])
    return np.zeros([0, 3], dtype=np.int64) if grid_thw is None else np.asarray(grid_thw)


def _pixels_of(
    batch: Mapping[str, Any], kind: str, grid_thw: np.ndarray, items: np.ndarray
) -> Tensor:
    """Patches of some items of a kind `[P, patch_dim]`, on the device."""
    pixels = batch[KINDS[kind][0]]
    if len(items) == len(grid_thw):
        return device_tensor(pixels)
    ends_I = grid_thw.prod(axis=1).cumsum()
    starts_I = ends_I - grid_thw.prod(axis=1)
    rows = np.concatenate([np.arange(starts_I[i], ends_I[i]) for i in items])
    if isinstance(pixels, np.ndarray):
        return device_tensor(pixels[rows])
    return paddle.index_select(pixels, paddle.to_tensor(rows))
