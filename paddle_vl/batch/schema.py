"""Fields of a batch: axes, dtype, producer and consumer.

A batch is a mapping, since it crosses worker processes and a model takes HF's keyword names
(`model(**batch)`). A family describes its own batches with a `TypedDict` whose fields are
`Annotated[Array, Axes(...)]`; those of pi07 are in `paddle_vl.families.policy.model_inputs`.

Axes, package-wide: B batch, L padded length, T token rows (batch folded in), P patches, I media
items, R real token rows, N token rows with a target, S segments; a number is an axis of that size.
"""

from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple, TypedDict

# A NumPy array from a loader worker; a Paddle tensor once on the device.
Array = Any
# A batch of any family.
Batch = Mapping[str, Any]
# Of images and of videos: patches, and patches in time, height and width of each item.
PIXELS = ("pixel_values", "pixel_values_videos")
GRIDS = ("image_grid_thw", "video_grid_thw")
# Fields that a loader of a mix of sources adds: tokens, and documents that begin, of each source;
# int64, one number per source. They stay on the host and are taken out before the model.
SOURCE_COUNTS = ("source_tokens", "source_documents")
# Likewise of a batch with `label_sources`: target tokens of each source.
SOURCE_TARGETS = "source_targets"
# Of a slice of a batch (context parallelism): fields of the whole batch that its counts are taken
# from, which stay on the host and are taken out before the model.
WHOLE_ROWS = "whole_rows"
# Other data lanes' batches in a batch of this rank, in the order of the lanes, under the colocated
# schedule.
OTHER_LANES = "other_lanes"


class Axes(NamedTuple):
    """Letters of an array's axes, separated by spaces, and its dtype."""

    names: str
    dtype: str


class TextFields(TypedDict):
    """Fields that every batch of a vision-language model has."""

    # For the embedding; visual rows have placeholder ids.
    input_ids: Annotated[Array, Axes("B L", "int64")]
    # 1 at real tokens. For attention over left-padded rows, the load-balancing loss and counts.
    attention_mask: Annotated[Array, Axes("B L", "int64")]
    # Not shifted, -100 ignored. For the loss.
    labels: Annotated[Array, Axes("B L", "int64")]
    # Temporal, vertical and horizontal position. For rotary embedding.
    position_ids: Annotated[Array, Axes("3 B L", "int64")]
    # Labels that are not -100. The loss's divisor; read on the host.
    num_target_tokens: int
    # Whether a real token follows padding. Chooses the attention mask; read on the host.
    has_left_padding: bool


class VLBatch(TextFields, total=False):
    """A batch of a vision-language model; visual fields only where a sample has images or videos.

    All fields come from a collator in a loader worker (`VLCollator`, `PackedCollator`).
    """

    # Patches of all images, of all videos. For the vision tower.
    pixel_values: Annotated[Array, Axes("P patch_dim", "float32")]
    pixel_values_videos: Annotated[Array, Axes("P patch_dim", "float32")]
    # In place of both, where ranks encode different items: the patches of this rank's, images
    # first. For the vision tower; from `paddle_vl.families.vlm.training.own_pixels`.
    own_patches: Annotated[Array, Axes("P patch_dim", "float32")]
    # Patches in time, height and width of each item. For the vision tower; read on the host.
    image_grid_thw: Annotated[Array, Axes("I 3", "int64")]
    video_grid_thw: Annotated[Array, Axes("I 3", "int64")]
    # Places of these patches, images first: see `paddle_vl.batch.positions.PatchRows`. For the
    # vision tower; from `families.vlm.inputs.collate`, or with `own_patches`.
    patch_coordinates: Annotated[Array, Axes("P 2", "int64")]
    patch_tap_rows: Annotated[Array, Axes("P 4", "int64")]
    patch_tap_weights: Annotated[Array, Axes("P 4", "float32")]
    # Visual rows of this rank: see `paddle_vl.batch.visual_index`. For embedding and deepstack.
    visual_update_indices: Annotated[Array, Axes("M", "int64")]
    visual_gather_indices: Annotated[Array, Axes("M", "int64")]
    visual_source_indices: Annotated[Array, Axes("M", "int64")]
    # Offsets of packed samples, see `paddle_vl.batch.positions`. For attention; read on the host.
    cu_seqlens: Annotated[Array, Axes("S", "int32")]
    # Where the sample of each token ends. For attention on a GPU; from `prepared`.
    packed_key_ends: Annotated[Array, Axes("B L", "int32")]
    # Of a slice of the token rows under context parallelism, whose batch is one row: of each key of
    # all slices the places in this one after the last and of the first row that see it. For
    # attention; from `vlm.training.objective`. Where a rank attends with all rows, of
    # each the same in the batch, and `RowSlice.orders`. And where ranks get only the visual rows
    # of their tokens, the numbers of these for each rank, images first; for the vision tower.
    slice_key_rows: Annotated[Array, Axes("1 1 T 2", "int32")]
    slice_orders: Annotated[Array, Axes("2 T", "int64")]
    visual_rows_of_ranks: list[Array]
    # Factors of the labels' cross entropies, where sources have a loss_weight. For the loss.
    loss_weights: Annotated[Array, Axes("B L", "float32")]
    # Numbers of the sources that labels are from, of a training mix, and how many sources it has.
    # For the loss of each source.
    label_sources: Annotated[Array, Axes("B L", "int32")]
    num_sources: int
    # Token rows that are not padding, of models with experts; where a rank routes its own only,
    # these, from its first row. And the number of all in the batch. For the experts.
    real_row_indices: Annotated[Array, Axes("R", "int64")]
    num_real_rows: int
    # Room between the ranks that share experts, a `paddle_vl.nn.experts.ExpertCapacity`; none for
    # exact sizes. From `train_step`.
    expert_capacity: Any
    # Token rows that predict a label, and these labels; of a batch without any, row 0 and -100. The
    # loss then needs no logits of other rows. From `prepared`, in place of labels, and of their
    # factors and sources.
    target_rows: Annotated[Array, Axes("2 N", "int64")]
    target_weights: Annotated[Array, Axes("N", "float32")]
    target_sources: Annotated[Array, Axes("N", "int64")]
    # Visual rows that no token takes. From `VLBatchAdapter.synchronized`; read on the host.
    num_unused_visual_rows: int
    # Visual tokens beyond one for each visual row, where samples share images. Read on the host.
    num_reused_visual_rows: int
    # Whether the model gives the log-probabilities of `target_rows` in place of a loss.
    returns_log_probs: bool
