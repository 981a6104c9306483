"""Batches: fields, axes, dtype, producer and consumer.

A loader's worker makes a `HostBatch`, complete and in NumPy; nothing about a batch is decided after
it but what depends on the rank (its slice of the rows) and on other ranks (a dummy image). The same
object with tensors in place of arrays, made by `HostBatch.placed`, is a device batch. A family
describes its own as a subclass, whose fields are `Annotated[Array, Axes(...)]`: `VLBatch` here,
those of pi07 in `paddle_vl.families.policy.model_inputs`.

Axes, package-wide: B batch, L padded length, T token rows (batch folded in), P patches, I media
items, R real token rows, N token rows with a target, S segments; a number is an axis of that size.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Annotated, Any, ClassVar, NamedTuple, TypeVar

import numpy as np

from paddle_vl.batch.rows import is_known

# A NumPy array from a loader worker; a Paddle tensor once on the device.
Array = Any
# A batch of any family.
Batch = Mapping[str, Any]
Own = TypeVar("Own", bound="HostBatch")
# Of images and of videos: patches, and patches in time, height and width of each item.
PIXELS = ("pixel_values", "pixel_values_videos")
GRIDS = ("image_grid_thw", "video_grid_thw")
PATCH_FIELDS = ("patch_coordinates", "patch_tap_rows", "patch_tap_weights")
# Fields of the vision tower's input, without the grids.
OF_PATCHES = (*PIXELS, "own_patches", *PATCH_FIELDS)
# Other data lanes' batches in a batch of this rank, in the order of the lanes, under the colocated
# schedule.
OTHER_LANES = "other_lanes"


class Axes(NamedTuple):
    """Letters of an array's axes, separated by spaces, and its dtype."""

    names: str
    dtype: str


@dataclass(frozen=True, eq=False, kw_only=True)
class HostBatch(Mapping[str, Any]):
    """A micro-batch of one family, and its counts.

    As a mapping it has what its model computes with: the fields of the subclass that are not None.
    The attributes here are for the trainer, and stay on the host. `batch | {name: value}` is the
    batch with other fields, None for none.

    Attributes:
        counts: what it adds to the divisor of each loss term.
        optional_branches: whether it needs each optional branch of the model.
        num_samples: of the loss; a pair of answers is one.
        num_tokens: tokens without padding; 0 where throughput is not measured in tokens.
        num_packed_places: token capacity of packed rows, padding included; 0 without packing.
        lengths: tokens of each sample without padding; empty where tokens are not counted.
        source_tokens, source_documents: tokens, and documents that begin, of each source of a mix;
            empty without one.
        source_targets: target tokens of each source, where the loss of each is reported.
        expert_rows: that experts on other ranks are to have room for, see
            `paddle_vl.nn.experts.ExpertCapacity`; None for exact sizes.
        flops: operations of forward and backward; 0 where they are not counted.
        on_host: fields whose arrays are not copied to the device.
    """

    counts: tuple[int, ...] = ()
    optional_branches: tuple[bool, ...] = ()
    num_samples: int = 0
    num_tokens: int = 0
    num_packed_places: int = 0
    lengths: tuple[int, ...] = ()
    source_tokens: tuple[int, ...] = ()
    source_documents: tuple[int, ...] = ()
    source_targets: tuple[int, ...] = ()
    expert_rows: int | None = None
    flops: int = 0
    on_host: tuple[str, ...] = ()

    # Subclasses by name, for ranks that share a batch.
    kinds: ClassVar[dict[str, type["HostBatch"]]] = {}

    __eq__ = object.__eq__
    __hash__ = object.__hash__  # type: ignore[assignment]

    def __init_subclass__(cls) -> None:
        HostBatch.kinds[cls.__name__] = cls

    @classmethod
    @cache
    def names(cls) -> tuple[str, ...]:
        """Of the fields that a model computes with."""
        of_trainer = {each.name for each in fields(HostBatch)}
        return tuple(each.name for each in fields(cls) if each.name not in of_trainer)

    def __getitem__(self, name: str) -> Any:
        value = getattr(self, name) if name in self.names() else None
        if value is None:
            raise KeyError(name)
        return value

    def __iter__(self) -> Iterator[str]:
        return (name for name in self.names() if getattr(self, name) is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __or__(self: Own, changes: Mapping[Any, Any]) -> Own:
        return replace(self, **changes)

    def placed(self: Own, place: Callable[[tuple, np.ndarray], Any], *key: Any) -> Own:
        """The batch with what `place` makes of the name and the array, of each that is copied to
        the device, also in lists and in batches within it."""

        def made(name: tuple, value: Any) -> Any:
            if isinstance(value, list):
                return [made((*name, i), entry) for i, entry in enumerate(value)]
            if isinstance(value, HostBatch):
                return value.placed(place, *name)
            return place(name, value) if isinstance(value, np.ndarray) else value

        copied = {name: made((*key, name), self[name]) for name in self if name not in self.on_host}
        return replace(self, **copied)


@dataclass(frozen=True, eq=False, kw_only=True)
class VLBatch(HostBatch):
    """A batch of a vision-language model, or HF's arguments of a model as one; visual fields only
    where a sample has images or videos.

    All fields come from a collator and `families.vlm.inputs.collate.prepared`, in a loader's
    worker, where nothing else is said.
    """

    # For the embedding; visual rows have placeholder ids.
    input_ids: Annotated[Array, Axes("B L", "int64")] = None
    # 1 at real tokens. For attention over left-padded rows, the load-balancing loss and counts.
    attention_mask: Annotated[Array, Axes("B L", "int64")] = None
    # Temporal, vertical and horizontal position. For rotary embedding.
    position_ids: Annotated[Array, Axes("3 B L", "int64")] = None
    # Labels that are not -100. The loss's divisor.
    num_target_tokens: int | None = None
    # Whether a real token follows padding. Chooses the attention mask.
    has_left_padding: bool | None = None
    # Patches of all images, of all videos. For the vision tower.
    pixel_values: Annotated[Array, Axes("P patch_dim", "float32")] = None
    pixel_values_videos: Annotated[Array, Axes("P patch_dim", "float32")] = None
    # In place of both, where ranks encode different items: the patches of this rank's, images
    # first. For the vision tower; from `paddle_vl.families.vlm.training.own_pixels`.
    own_patches: Annotated[Array, Axes("P patch_dim", "float32")] = None
    # Patches in time, height and width of each item. For the vision tower; read on the host.
    image_grid_thw: Annotated[Array, Axes("I 3", "int64")] = None
    video_grid_thw: Annotated[Array, Axes("I 3", "int64")] = None
    # Places of these patches, images first: see `paddle_vl.batch.positions.PatchRows`. For the
    # vision tower; from `families.vlm.inputs.collate`, or with `own_patches`.
    patch_coordinates: Annotated[Array, Axes("P 2", "int64")] = None
    patch_tap_rows: Annotated[Array, Axes("P 4", "int64")] = None
    patch_tap_weights: Annotated[Array, Axes("P 4", "float32")] = None
    # Visual rows of this rank: see `paddle_vl.batch.visual_index`. For embedding and deepstack.
    visual_update_indices: Annotated[Array, Axes("M", "int64")] = None
    visual_gather_indices: Annotated[Array, Axes("M", "int64")] = None
    visual_source_indices: Annotated[Array, Axes("M", "int64")] = None
    # Offsets of packed samples, see `paddle_vl.batch.positions`. For attention; read on the host.
    cu_seqlens: Annotated[Array, Axes("S", "int32")] = None
    # Where the sample of each token ends. For attention on a GPU.
    packed_key_ends: Annotated[Array, Axes("B L", "int32")] = None
    # Of a slice of the token rows under context parallelism, whose batch is one row: of each key of
    # all slices the places in this one after the last and of the first row that see it. For
    # attention; from `vlm.training.objective`. Where a rank attends with all rows, of
    # each the same in the batch, and `RowSlice.orders`. And where ranks get only the visual rows
    # of their tokens, the numbers of these for each rank, images first; for the vision tower.
    slice_key_rows: Annotated[Array, Axes("1 1 T 2", "int32")] = None
    slice_orders: Annotated[Array, Axes("2 T", "int64")] = None
    visual_rows_of_ranks: list[Array] | None = None
    # Token rows that are not padding, of models with experts; where a rank routes its own only,
    # these, from its first row. And the number of all in the batch. For the experts.
    real_row_indices: Annotated[Array, Axes("R", "int64")] = None
    num_real_rows: int | None = None
    # Room between the ranks that share experts, a `paddle_vl.nn.experts.ExpertCapacity`; none for
    # exact sizes. From `train_step`.
    expert_capacity: Any = None
    # Token rows that predict a label, and these labels; of a batch without any, row 0 and -100. The
    # loss then needs no logits of other rows. And factors of their cross entropies, and the numbers
    # of the sources that they are from, of a training mix with so many sources.
    target_rows: Annotated[Array, Axes("2 N", "int64")] = None
    target_weights: Annotated[Array, Axes("N", "float32")] = None
    target_sources: Annotated[Array, Axes("N", "int64")] = None
    num_sources: int = 0
    # Visual rows that no token takes. From `VLBatchAdapter.synchronized`.
    num_unused_visual_rows: int = 0
    # Visual tokens beyond one for each visual row, where samples share images.
    num_reused_visual_rows: int = 0
    # Whether the model gives the log-probabilities of `target_rows` in place of a loss, of logits
    # that are divided by the temperature.
    returns_log_probs: bool = False
    temperature: float = 1.0
    # Or the most likely tokens behind them, or the scores of all, to answer; then with the numbers
    # of the prompts that are the first rows, and with caches of their keys. From
    # `answering.questions`.
    returns_choices: bool = False
    returns_scores: bool = False
    numbers: list[int] | None = None
    caches: list[Any] | None = None
    # Of a call with HF's arguments alone: labels with -100 ignored, not shifted, and factors of
    # their cross entropies, for a loss beside the logits of all rows, or of so many last columns;
    # and whether to compute the load-balancing loss.
    labels: Annotated[Array, Axes("B L", "int64")] = None
    loss_weights: Annotated[Array, Axes("B L", "float32")] = None
    logits_to_keep: int = 0
    output_router_logits: bool | None = None
    # Under the colocated schedule: data-parallel ranks with images or videos in this micro-batch,
    # and the tower's rows by section number.
    num_ranks_with_visual: int | None = None
    visual_sections: Any = None
    other_lanes: list[Any] | None = None
    on_host: tuple[str, ...] = (*GRIDS, "cu_seqlens", "visual_rows_of_ranks", OTHER_LANES)


def check_array(
    name: str, array: Array | None, shapes: Sequence[Sequence[Any]], dtype: str, remedy: str
) -> None:
    """Raise a ValueError for an array of none of these shapes or of another dtype.

    Args:
        shapes: a size that is unknown, such as a letter or one of a traced program, fits any.
        dtype: its name, or `float` or `int` for all such ones.
    """
    if array is None:
        return
    found = name_of(array.dtype)
    fits = found == dtype or (dtype in ("float", "int") and dtype in found)
    if not fits or not any(_fits(array.shape, shape) for shape in shapes):
        wanted = " or ".join(f"[{', '.join(map(str, shape))}]" for shape in shapes)
        raise ValueError(
            f"{name} is {found} of shape {list(array.shape)}: it must be {dtype} of shape "
            f"{wanted}; {remedy}"
        )


def name_of(dtype: Any) -> str:
    """A dtype of NumPy or Paddle without the library's name."""
    return str(dtype).removeprefix("paddle.")


def _fits(shape: Sequence[Any], wanted: Sequence[Any]) -> bool:
    pairs = zip(shape, wanted, strict=False)
    known = [(one, other) for one, other in pairs if is_known(one) and is_known(other)]
    return len(shape) == len(wanted) and all(one == other for one, other in known)


_num_entered = 0


@contextmanager
def checked_values() -> Iterator[None]:
    """Check values of tensors too, in all threads, while entered; every check reads the device.

    For tests, and for the first steps with inputs of one's own.
    """
    global _num_entered
    _num_entered += 1
    try:
        yield
    finally:
        _num_entered -= 1


def has_values(array: Array) -> bool:
    """Whether values may be read: of an array, and in the checked mode of a tensor."""
    # A traced program has `Value`s.
    is_tensor = type(array).__name__ == "Tensor"
    return isinstance(array, np.ndarray) or (is_tensor and _num_entered > 0)


def bool_masks(image_mask_BL: Array, video_mask_BL: Array | None) -> tuple[Array, Array | None]:
    """The masks of image and video tokens as bool; integers must be 0 and 1.

    Raises:
        ValueError: another dtype or shape, or masks of two shapes; in NumPy arrays, and in the
            checked mode, also other integers, and tokens of both kinds.
    """
    image_BL = _bool_mask("image", image_mask_BL)
    if video_mask_BL is None:
        return image_BL, None
    video_BL = _bool_mask("video", video_mask_BL)
    for axis in (0, 1):
        one, other = image_BL.shape[axis], video_BL.shape[axis]
        if is_known(one) and is_known(other) and one != other:
            raise ValueError(
                f"the image mask has shape {list(image_BL.shape)} but the video mask "
                f"{list(video_BL.shape)}: pass masks of one batch"
            )
    if has_values(image_BL):
        both = np.argwhere(np.asarray(image_BL) & np.asarray(video_BL))
        if len(both):
            raise ValueError(
                f"{len(both)} tokens are of an image and of a video, the first is token "
                f"{both[0][1]} of sample {both[0][0]}: a token takes one embedding"
            )
    return image_BL, video_BL


def _bool_mask(kind: str, mask_BL: Array) -> Array:
    dtype = str(mask_BL.dtype).removeprefix("paddle.")
    if len(mask_BL.shape) != 2 or not (dtype == "bool" or "int" in dtype):
        raise ValueError(
            f"the {kind} mask is {dtype} of shape {list(mask_BL.shape)}: it must be bool of shape "
            "[batch, length]"
        )
    if dtype == "bool":
        return mask_BL
    if has_values(mask_BL):
        values = np.unique(np.asarray(mask_BL))
        if not np.isin(values, (0, 1)).all():
            raise ValueError(
                f"the {kind} mask has the integers {values.tolist()[:8]}: make it bool, or 0 and 1"
            )
    return mask_BL.astype("bool")
