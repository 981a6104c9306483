"""A vision-language model under the colocated schedule: its encoder, stages and batches.

Images and videos are the items of an `ItemEncoder` of `paddle_vl.parallel.colocated.encoder`. Rows
of a batch are those of its images and then of its videos, as the tower returns them. Section 0 is
the merged rows, section 1 + g deepstack level g. A batch comes to a stage with the tower's rows:
the merged ones on the first stage, each level on the stage that adds it, and no level is sent.

Shapes: I items, P patches, M rows, D decoder width, G levels, C = (1 + G) * D.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import paddle
from paddle import Tensor, nn

from paddle_vl.batch.schema import OF_PATCHES, OTHER_LANES, PATCH_FIELDS, VLBatch
from paddle_vl.families.vlm.modeling.layers import VisionFeatures
from paddle_vl.families.vlm.modeling.model import VLForConditionalGeneration
from paddle_vl.families.vlm.training.objective import VLBatchAdapter
from paddle_vl.families.vlm.training.pipeline import VLStage
from paddle_vl.nn.transfer import device_tensor, rows_in_order

# Kinds of items in the order of their rows: their pixels and grids.
KINDS = {
    "image": ("pixel_values", "image_grid_thw"),
    "video": ("pixel_values_videos", "video_grid_thw"),
}


class VisualEncoder:
    """The vision tower of a model whose every rank has it.

    Args:
        model: with its tower, whole or divided.
    """

    splits_rows = True

    def __init__(self, model: VLForConditionalGeneration):
        self.model, self.vision = model, model.config.vision_config
        num_levels = len(self.vision.deepstack_visual_indexes)
        self.section_widths = [self.vision.out_hidden_size] * (1 + num_levels)

    def parameters(self) -> list[Tensor]:
        """Of the tower."""
        return self.model.visual.parameters()

    def items(self, batch: VLBatch) -> tuple[np.ndarray, np.ndarray]:
        """Rows of each image and video, and its multiplications in the tower's blocks."""
        grid_thw = np.concatenate([_grid(batch, kind) for kind in KINDS])
        patches_I, frame_I = grid_thw.prod(axis=1), grid_thw[:, 1:].prod(axis=1)
        width, inner = self.vision.hidden_size, self.vision.intermediate_size
        costs_I = patches_I * (4 * width**2 + 2 * width * inner + 2 * width * frame_I)
        return patches_I // self.vision.spatial_merge_size**2, costs_I

    def has_items_anywhere(self, batch: VLBatch) -> bool:
        """Whether any data-parallel rank's batch has images or videos, as the ranks agreed."""
        return bool(batch.num_ranks_with_visual)

    def encode(self, batches: Sequence[VLBatch], own: Sequence[np.ndarray]) -> Tensor:
        """`[M, C]`: rows of the given items of each batch, in one forward pass of the tower."""
        patches, grids = [], []
        for batch, items in zip(batches, own, strict=True):
            start = start_P = 0
            for kind in KINDS:
                grid_thw = _grid(batch, kind)
                chosen = items[(items >= start) & (items < start + len(grid_thw))] - start
                if chosen.size:
                    rows = _rows_of(grid_thw, chosen)
                    patches.append(_patches(batch, KINDS[kind][0], rows, start_P))
                    grids.append(grid_thw[chosen])
                start += len(grid_thw)
                start_P += int(grid_thw.prod(axis=1).sum())
        has_places = all(len(parts) == 1 + len(PATCH_FIELDS) for parts in patches)
        columns = zip(*(parts if has_places else parts[:1] for parts in patches), strict=True)
        whole = [each[0] if len(each) == 1 else paddle.concat(list(each)) for each in columns]
        merged, levels = self.model.encode_items(whole, np.concatenate(grids))
        return paddle.concat([merged, *levels], axis=1)

    def sections_of(self, chunk: Any) -> set[int]:
        """Sections that a `VLStage` uses."""
        levels = range(len(self.section_widths) - 1)
        own = {1 + level for level in levels if level in chunk.layers}
        return own | {0} if chunk.is_first else own

    def language_batch(self, batch: VLBatch, sections: Mapping[int, Tensor]) -> VLBatch:
        """The batch with rows in place of pixels."""
        unread = (*OF_PATCHES, "num_ranks_with_visual", OTHER_LANES)
        return batch | dict.fromkeys(unread) | {"visual_sections": dict(sections)}


def _grid(batch: Mapping[str, Any], kind: str) -> np.ndarray:
    grid_thw = batch.get(KINDS[kind][1])
    return np.zeros([0, 3], dtype=np.int64) if grid_thw is None else np.asarray(grid_thw)


def _patches(batch: Mapping[str, Any], pixels: str, rows: np.ndarray, start_P: int) -> list[Tensor]:
    """Pixels `[P, patch_dim]` of some patches of a kind, and their places if the batch has them.

    Args:
        start_P: patches of the kinds before it.
    """
    places = [_taken(batch[name], start_P + rows) for name in PATCH_FIELDS if name in batch]
    return [_taken(batch[pixels], rows), *places]


def _rows_of(grid_thw: np.ndarray, items: np.ndarray) -> np.ndarray:
    """Patches of some items among those of their grids."""
    sizes_I = grid_thw.prod(axis=1)
    starts_I = sizes_I.cumsum() - sizes_I
    return np.concatenate([np.arange(starts_I[i], starts_I[i] + sizes_I[i]) for i in items])


def _taken(array: Any, rows: np.ndarray) -> Tensor:
    """Some rows of an array or tensor in order, on the device, where the feed's tensors are."""
    if len(rows) == array.shape[0]:
        return device_tensor(array)
    return (
        device_tensor(array[rows]) if isinstance(array, np.ndarray) else rows_in_order(array, rows)
    )


class ColocatedStage(VLStage):
    """A stage whose batches come with the tower's rows."""

    def __init__(self, model: VLForConditionalGeneration, layers: range):
        super().__init__(model, layers)
        self.runs_tower = False

    def travelling(self, layer: int) -> range:
        return range(0)

    def features(self, batch: VLBatch) -> VisionFeatures | None:
        """The merged rows of a batch, as features without levels; None for an all-text batch."""
        merged_MD = batch.visual_sections.get(0)
        return None if merged_MD is None else VisionFeatures(merged_MD, [])

    def own_levels(self, batch: VLBatch) -> dict[int, Tensor]:
        """This rank's rows of the deepstack levels in a batch, by level."""
        levels = {section - 1: rows for section, rows in batch.visual_sections.items() if section}
        if not levels:
            return {}
        gather, source = batch.visual_gather_indices, batch.visual_source_indices
        if source is not None:
            gather = paddle.index_select(source, gather)
        return {level: paddle.index_select(rows_MD, gather) for level, rows_MD in levels.items()}


class ColocatedBatchAdapter(VLBatchAdapter):
    """Batches without a dummy image: the encoder skips what no rank needs."""

    def synchronized(self, batch: VLBatch, needed: Sequence[int], model: nn.Layer) -> VLBatch:
        return batch | {"num_ranks_with_visual": needed[0]}
