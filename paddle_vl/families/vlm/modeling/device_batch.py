"""A micro-batch of a vision-language model on the device: the one place where its arrays become
tensors, and where a caller's arguments, HF's or a collator's, become what the model computes with.

Shapes: B batch, L padded length, T = B * L token rows, S keys with a cache, P patches, M visual
embeddings, N target rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import paddle
from paddle import Tensor

from paddle_vl.batch.positions import (
    PATCH_FIELDS,
    check_offsets,
    checked_grid,
    mrope_position_ids,
    restart_offsets,
)
from paddle_vl.batch.schema import GRIDS, WHOLE_ROWS
from paddle_vl.families.hf_interface import FORWARD, id_rows
from paddle_vl.families.vlm.modeling.moe import routed_rows
from paddle_vl.files.names import refuse_foreign
from paddle_vl.nn.attention import PackedSamples
from paddle_vl.nn.attention_masks import SliceMask
from paddle_vl.nn.experts import ExpertCapacity
from paddle_vl.nn.placement import RegionOps
from paddle_vl.nn.transfer import device_tensor, host_array

Array = np.ndarray | Tensor


class Patches(NamedTuple):
    """What the vision tower encodes, images before videos.

    Attributes:
        pixels: `[P, patch_dim]` of each kind, or of the items that this rank encodes.
        grids: `[n, 3]` int64 patches (t, h, w) of images and of videos, on the host.
        places: the tensors of `PATCH_FIELDS`, of the pixels given; none to compute them.
        has_own_only: whether pixels are of this rank's items, see `RegionOps.own_items`.
        rows_of_ranks: the visual rows that each rank gets, images first, in its order; in place of
            all rows for all ranks.
    """

    pixels: list[Tensor]
    grids: dict[str, np.ndarray]
    places: list[Tensor]
    has_own_only: bool = False
    rows_of_ranks: Sequence[np.ndarray] | None = None

    @classmethod
    def of(
        cls,
        pixel_values: Array | None = None,
        image_grid_thw: Array | None = None,
        pixel_values_videos: Array | None = None,
        video_grid_thw: Array | None = None,
        own_patches: Array | None = None,
        visual_rows_of_ranks: Sequence[np.ndarray] | None = None,
        **places: Array | None,
    ) -> "Patches | None":
        """Of a batch's fields; None without images and videos.

        Raises:
            ValueError: pixels without their grid or the reverse, or a different number of patches.
        """
        grids, pixels = {}, []
        for kind, of_kind, grid in (
            ("image", pixel_values, image_grid_thw),
            ("video", pixel_values_videos, video_grid_thw),
        ):
            if own_patches is not None and grid is not None:
                grids[kind] = host_array(grid)
            elif of_kind is not None or grid is not None:
                count = None if of_kind is None else of_kind.shape[0]
                grids[kind] = checked_grid(kind, count, host_array(grid))
                pixels.append(device_tensor(of_kind))
        if not grids:
            return None
        if own_patches is not None:
            pixels = [device_tensor(own_patches)]
        has_places = places.get(PATCH_FIELDS[0]) is not None
        laid_out = [device_tensor(places[name]) for name in PATCH_FIELDS] if has_places else []
        return cls(pixels, grids, laid_out, own_patches is not None, visual_rows_of_ranks)

    def tensors(self) -> list[Tensor]:
        """Pixels of all kinds together, and their places."""
        pixels = self.pixels[0] if len(self.pixels) == 1 else paddle.concat(self.pixels)
        return [pixels, *self.places]


class Targets(NamedTuple):
    """Token rows of which the head is to compute something, without the logits of others.

    Attributes:
        rows: `[2, N]` int64, the token rows that predict a label, and these labels.
        num_tokens: number of labels that count, if the host knows it.
        weights: `[N]` float32 factors of their cross entropies; None for 1.
        sources: `[N]` int64 numbers, below `num_sources`, of their sources; None for no such sums.
        wanted: their loss; their log-probabilities, for an objective over them; or the most likely
            tokens, to generate.
    """

    rows: Tensor
    num_tokens: int | None = None
    weights: Tensor | None = None
    sources: Tensor | None = None
    num_sources: int = 0
    wanted: Literal["loss", "log_probs", "choices"] = "loss"

    @classmethod
    def of(
        cls,
        target_rows: Array | None = None,
        num_target_tokens: int | None = None,
        target_weights: Array | None = None,
        target_sources: Array | None = None,
        num_sources: int = 0,
        returns_log_probs: bool = False,
        returns_choices: bool = False,
    ) -> "Targets | None":
        """Of a batch's fields; None without target rows."""
        if target_rows is None:
            return None
        return cls(
            device_tensor(target_rows),
            num_target_tokens,
            device_tensor(target_weights),
            device_tensor(target_sources),
            num_sources,
            "choices" if returns_choices else "log_probs" if returns_log_probs else "loss",
        )


@dataclass(frozen=True)
class DeviceBatch:
    """What the model computes with.

    Attributes:
        tokens: input of `GPTEmbedding` without the outputs of the tower.
        patches: None for an all-text batch, and where the tower is not.
        targets: None for the logits of all rows.
        labels, label_weights: `[B, L]`, not shifted, for a loss beside the logits of all rows.
        num_target_tokens: number of labels that count, if the host knows it.
        logits_to_keep: columns whose logits are computed, the last ones; 0 for all.
        has_balance_loss: whether the load-balancing loss of the experts is computed.
    """

    tokens: dict[str, Any]
    patches: Patches | None = None
    targets: Targets | None = None
    labels: Tensor | None = None
    label_weights: Tensor | None = None
    num_target_tokens: int | None = None
    logits_to_keep: int = 0
    has_balance_loss: bool = False


_OF_PATCHES = (
    "pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw", "own_patches",
    "visual_rows_of_ranks", *PATCH_FIELDS,
)  # fmt: skip
_OF_TARGETS = (
    "target_rows", "num_target_tokens", "target_weights", "target_sources", "num_sources",
    "returns_log_probs", "returns_choices",
)  # fmt: skip
# Of a batch before it is prepared; and what is counted on the host alone.
_NOT_READ = ("label_sources", WHOLE_ROWS)


def device_batch(
    config: Any,
    ops: RegionOps,
    input_ids: Array,
    attention_mask: Array | None = None,
    *,
    labels: Array | None = None,
    loss_weights: Array | None = None,
    output_router_logits: bool | None = None,
    logits_to_keep: int = 0,
    has_tower: bool = True,
    has_head: bool = True,
    **fields: Any,
) -> DeviceBatch:
    """A batch on the device, from HF's arguments or the fields of `paddle_vl.batch.schema.VLBatch`.

    Arrays may be NumPy arrays or tensors, ids with mask and labels also lists.

    Args:
        config: the model's.
        input_ids: `[B, L]` int64 with placeholders for visual tokens.
        attention_mask: `[B, L]`, 1 at real tokens; with caches `[B, S]` over all keys so far.
        labels: `[B, L]` int64, not shifted, -100 ignored; the logits of all rows are computed too.
            Not read beside `target_rows`, as `loss_weights`.
        loss_weights: `[B, L]` float32 factors of the labels' cross entropies; None for 1.
        output_router_logits: compute the load-balancing loss over the real tokens; None for the
            configuration's setting. Not with caches.
        logits_to_keep: compute the logits of that many last columns only, 0 for all; without
            labels.
        has_tower, has_head: whether patches and targets are needed here.
        fields: of `Patches.of`, `Targets.of` and `token_fields`.

    Raises:
        ValueError: placeholders, grids and patches do not agree; router logits of a model without
            experts, or of a padded batch in a traced program; labels with `logits_to_keep`;
            segments that do not tile the token rows.
    """
    if isinstance(input_ids, list):
        given = (input_ids, attention_mask, labels)
        input_ids, attention_mask, labels = (id_rows(rows) for rows in given)
    if labels is not None and logits_to_keep:
        raise ValueError(
            f"logits_to_keep is {logits_to_keep} but labels are given, whose loss needs the "
            "logits of all columns: leave one of them out"
        )
    of_patches = {name: fields[name] for name in _OF_PATCHES if name in fields}
    of_targets = {name: fields[name] for name in _OF_TARGETS if name in fields}
    patches = Patches.of(**of_patches) if has_tower else None
    targets = Targets.of(**of_targets) if has_head else None
    # Positions follow from the grids, too.
    taken = {*_OF_PATCHES, *_OF_TARGETS, *_NOT_READ} - {*GRIDS}
    layout = {name: value for name, value in fields.items() if name not in taken}
    tokens = token_fields(config, ops, input_ids, attention_mask, **layout)
    has_balance_loss = config.text_config.has_balance_loss(output_router_logits)
    if has_balance_loss and not isinstance(attention_mask, Array | None):
        raise ValueError(
            "the load-balancing loss leaves padding out, for which it needs the values of "
            "attention_mask: pass an array, or none, or output_router_logits=False"
        )
    reads_labels = targets is None
    return DeviceBatch(
        tokens,
        patches,
        targets,
        device_tensor(labels) if reads_labels else None,
        device_tensor(loss_weights) if reads_labels else None,
        fields.get("num_target_tokens"),
        logits_to_keep,
        has_balance_loss,
    )


def token_fields(
    config: Any,
    ops: RegionOps,
    input_ids: Array,
    attention_mask: Array | None = None,
    *,
    position_ids: Array | None = None,
    image_grid_thw: Array | None = None,
    video_grid_thw: Array | None = None,
    visual_update_indices: Array | None = None,
    visual_gather_indices: Array | None = None,
    visual_source_indices: Array | None = None,
    num_unused_visual_rows: int = 0,
    num_reused_visual_rows: int = 0,
    has_left_padding: bool | None = None,
    cu_seqlens: Array | None = None,
    packed_key_ends: Array | None = None,
    slice_key_rows: Array | None = None,
    slice_orders: Array | None = None,
    real_row_indices: Array | None = None,
    num_real_rows: int | None = None,
    expert_capacity: ExpertCapacity | None = None,
    **foreign: Any,
) -> dict[str, Any]:
    """The input of `GPTEmbedding` without the outputs of the vision tower.

    Args:
        input_ids, attention_mask: as of `device_batch`.
        position_ids: `[3, B, L]` int64, None to compute them on the host from ids and grids.
            Or `[4, B, L]` with a text position first, whose restarts mark packed samples if
            neither `cu_seqlens` nor an attention mask is given; that costs a host read.
        image_grid_thw, video_grid_thw: `[n, 3]` patches (t, h, w) per image or video, on the
            host: a Paddle tensor costs a transfer.
        visual_update_indices, visual_gather_indices, visual_source_indices: the collator's
            index arrays, see `paddle_vl.batch.visual_index`; None to compute them.
        num_unused_visual_rows: visual embeddings that no token receives, of the dummy image
            with which a batch without images runs the tower, so that all ranks issue the same
            collectives.
        num_reused_visual_rows: visual tokens beyond one for each visual embedding, of samples
            that share an image; the indices then name an embedding several times.
        has_left_padding: False if no real token follows padding; causality then hides the
            padding and no mask is applied.
        cu_seqlens: `[S + 1]` int32 offsets of packed samples on the host, see
            `paddle_vl.batch.positions`. Padding is a segment of its own; the first label of
            each sample must be -100. Not with caches.
        packed_key_ends: `[B, L]` int32, `batch.positions.key_ends` of the offsets; None to
            compute it where a kernel needs it.
        slice_key_rows, slice_orders: `[1, 1, T, 2]` int32 and `[2, T]` int64, of a slice of the
            token rows, see `paddle_vl.batch.schema`; None for all of them.
        real_row_indices, num_real_rows: token rows that are not padding, for a model with
            experts; None to take them from the mask, see `routed_rows`.
        expert_capacity: for a step with expert parallelism; None for exact sizes.
        foreign: arguments of HF at values that ask for nothing.

    Raises:
        ValueError: segments that do not tile the token rows; or another argument of HF, with
            what to do instead.
    """
    if foreign:
        refuse_foreign(foreign, FORWARD, "the model")
    offsets = host_array(cu_seqlens)
    if position_ids is None:
        given = (input_ids, attention_mask, image_grid_thw, video_grid_thw, offsets)
        position_ids, _ = compute_position_ids(config, *given)
    elif position_ids.shape[0] == 4:
        if offsets is None and attention_mask is None:
            offsets = restart_offsets(host_array(position_ids[0]))
        position_ids = position_ids[1:]
    packed = None
    if offsets is not None:
        batch, length = input_ids.shape
        check_offsets(offsets, batch, length)
        # With one segment per row, causal attention suffices.
        if len(offsets) > batch + 1:
            packed = PackedSamples(offsets, length, device_tensor(packed_key_ends))
    if slice_key_rows is not None:
        whole = slice_orders is not None
        queries = (slice_key_rows.shape[2:] if whole else input_ids.shape[1:])[0]
        packed = SliceMask(device_tensor(slice_key_rows), queries, device_tensor(slice_orders))
    mask_is_needed = (
        attention_mask is not None and has_left_padding is not False and offsets is None
    )
    rows = None
    if getattr(config.text_config, "num_experts", 0):
        shape, real = tuple(input_ids.shape), (real_row_indices, num_real_rows)
        rows = routed_rows(shape, attention_mask, *real, ops.expert_part, expert_capacity)
    return {
        "input_ids": device_tensor(input_ids),
        "position_ids": device_tensor(position_ids),
        "routed_rows": rows,
        "attention_mask": device_tensor(attention_mask) if mask_is_needed else None,
        "packed": packed,
        "visual_update_indices": device_tensor(visual_update_indices),
        "visual_gather_indices": device_tensor(visual_gather_indices),
        "visual_source_indices": device_tensor(visual_source_indices),
        "num_unused_visual_rows": (
            num_unused_visual_rows - num_reused_visual_rows if slice_key_rows is None else None
        ),
    }


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
