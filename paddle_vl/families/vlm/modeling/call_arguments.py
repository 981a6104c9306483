"""A call of a model with HF's arguments, or with the fields of a batch by name, as a batch.

What a loader's worker decides for a run is decided here for the caller: positions, places of visual
tokens, rows that are not padding.
"""

from typing import Any

import numpy as np
from paddle import Tensor

from paddle_vl.batch.positions import (
    check_offsets,
    checked_grid,
    in_blocks,
    mrope_position_ids,
    restart_offsets,
)
from paddle_vl.batch.schema import GRIDS, PIXELS, Array, VLBatch
from paddle_vl.batch.visual_index import host_visual_indices
from paddle_vl.families.hf_interface import FORWARD, id_rows
from paddle_vl.families.vlm.modeling.moe import real_rows
from paddle_vl.files.names import refuse_foreign
from paddle_vl.nn.placement import RegionOps
from paddle_vl.nn.transfer import device_tensor, host_array, on_device

_INDICES = ("visual_update_indices", "visual_gather_indices")


def called_batch(
    config: Any, ops: RegionOps, input_ids: Array, attention_mask: Array | None = None, **given: Any
) -> VLBatch:
    """A batch on the device, from HF's arguments or the fields of `paddle_vl.batch.schema.VLBatch`.

    Arrays may be NumPy arrays or tensors, ids with mask and labels also lists. What is not given is
    made of `input_ids` and the grids on the host, where tensors are read.

    Args:
        config: the model's.
        input_ids: `[B, L]` int64 with placeholders for visual tokens.
        attention_mask: `[B, L]`, 1 at real tokens; with caches `[B, S]` over all keys so far.
        given: other fields. Pixels may be `[P, channels, y, x]`, patches in raster order, as of
            some of HF's processors. `position_ids` may be `[4, B, L]` with a text position first,
            whose restarts mark packed samples if neither `cu_seqlens` nor an attention mask is
            given.
            `labels` are not read beside `target_rows`, nor `loss_weights`. Arguments of HF at
            values that ask for nothing are left out.

    Raises:
        ValueError: placeholders, grids and patches do not agree, or indices and patches; router
            logits of a model without experts, or of a padded batch in a traced program; labels with
            `logits_to_keep`; segments that do not
            tile the token rows; or another argument of HF, with what to do instead.
    """
    foreign = {name: value for name, value in given.items() if name not in VLBatch.names()}
    # What a collator's batch has besides; a loss of sources is of target rows.
    foreign.pop("label_sources", None)
    if foreign:
        refuse_foreign(foreign, FORWARD, "the model")
    batch = VLBatch(**{name: given[name] for name in given if name in VLBatch.names()})
    labels = batch.labels
    if isinstance(input_ids, list):
        input_ids, attention_mask, labels = map(id_rows, (input_ids, attention_mask, labels))
    if labels is not None and batch.logits_to_keep:
        raise ValueError(
            f"logits_to_keep is {batch.logits_to_keep} but labels are given, whose loss needs the "
            "logits of all columns: leave one of them out"
        )
    if config.text_config.has_balance_loss(batch.output_router_logits) and not isinstance(
        attention_mask, np.ndarray | Tensor | None
    ):
        raise ValueError(
            "the load-balancing loss leaves padding out, for which it needs the values of "
            "attention_mask: pass an array, or none, or output_router_logits=False"
        )
    offsets = host_array(batch.cu_seqlens)
    found: dict[str, Any] = _grids(batch, config.vision_config.spatial_merge_size)
    found |= {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}
    if batch.position_ids is None:
        images, videos = (found.get(name) for name in GRIDS)
        found["position_ids"], _ = compute_position_ids(
            config, input_ids, attention_mask, images, videos, offsets
        )
    elif batch.position_ids.shape[0] == 4:
        if offsets is None and attention_mask is None:
            offsets = restart_offsets(host_array(batch.position_ids[0]))
        found["position_ids"] = batch.position_ids[1:]
    if offsets is not None:
        check_offsets(offsets, *input_ids.shape)
    found["cu_seqlens"] = offsets
    found |= _visual_indices(config, ops, batch, input_ids, found)
    if getattr(config.text_config, "num_experts", 0) and batch.real_row_indices is None:
        found["real_row_indices"], found["num_real_rows"] = real_rows(
            tuple(input_ids.shape), attention_mask, ops.expert_part
        )
    return on_device(batch | found)


def _grids(batch: VLBatch, merge: int) -> dict[str, Any]:
    """The grids, checked against the pixels, on the host; and pixels in raster order as flattened
    patches in merge-block order."""
    found: dict[str, Any] = {}
    for name, pixels in zip(GRIDS, PIXELS, strict=True):
        grid: Any = host_array(batch.get(name))
        of_kind: Any = batch.get(pixels)
        if grid is not None or of_kind is not None:
            if batch.own_patches is None and batch.visual_sections is None:
                count = None if of_kind is None else of_kind.shape[0]
                grid = checked_grid(name.partition("_")[0], count, grid)
            found[name] = grid
        if grid is not None and of_kind is not None and len(of_kind.shape) == 4:
            order: Any = in_blocks(grid, merge)
            if isinstance(of_kind, Tensor):
                order = device_tensor(order)
            flat = of_kind.reshape([of_kind.shape[0], -1])
            found[pixels] = flat[order]
    return found


def _visual_indices(
    config: Any, ops: RegionOps, batch: VLBatch, input_ids: Array, grids: dict[str, Any]
) -> dict[str, Any]:
    """Indices of the visual tokens, where the batch has none."""
    merge = config.vision_config.spatial_merge_size**2
    counts = [int(grids[n].prod(axis=1).sum()) // merge if n in grids else 0 for n in GRIDS]
    given = [name for name in _INDICES if name in batch]
    if not sum(counts) or len(given) == len(_INDICES):
        return {}
    if given:
        (missing,) = {*_INDICES} - {*given}
        raise ValueError(
            f"the batch has visual indices without {missing}: add them (the collator does), or "
            "leave all indices out to have them computed"
        )
    ids = config.image_token_id, config.video_token_id
    return indices_of(host_array(input_ids), ids, ops, counts)


def indices_of(
    ids_BL: np.ndarray, token_ids: tuple[int, int], ops: RegionOps, counts: Any
) -> dict[str, np.ndarray]:
    """`host_visual_indices` of this rank, of so many rows of images and of videos."""
    return host_visual_indices(
        ids_BL,
        image_token_id=token_ids[0],
        video_token_id=token_ids[1],
        num_image_rows=counts[0],
        num_video_rows=counts[1],
        part=ops.row_part,
    )


def compute_position_ids(
    config: Any,
    input_ids: Array,
    attention_mask: Array | None = None,
    image_grid_thw: Array | None = None,
    video_grid_thw: Array | None = None,
    cu_seqlens: Array | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Positions `[3, B, L]` and rope deltas `[B]`, int64; see `mrope_position_ids`."""
    return mrope_position_ids(
        host_array(input_ids),
        host_array(attention_mask),
        host_array(image_grid_thw),
        host_array(video_grid_thw),
        image_token_id=config.image_token_id,
        video_token_id=config.video_token_id,
        spatial_merge_size=config.vision_config.spatial_merge_size,
        cu_seqlens=host_array(cu_seqlens),
    )
