"""Indices of visual token rows, and of the visual embedding that each of them receives.

Computed once per step; the embedding merge and every deepstack level use them. The same code runs
on NumPy arrays (collator) and Paddle tensors (`GPTEmbedding`); only the 1-D `nonzero`, whose API
differs, is an argument.

Shapes: B batch, L padded length, T = B * L token rows, M visual embeddings of the batch, M_local
those of this rank's shard of the token rows.

Example: one sample, two image tokens (`#`) and one video token (`%`), two sequence-parallel shards:

    row      0  1  2  3 | 4  5  6  7      reading order of the embeddings: 1 -> 0, 3 -> 1, 4 -> 2
    token    a  #  b  % | #  c  d  e
    shard 0  update [1, 3]  gather [0, 1]
    shard 1  update [0]     gather [2]     (row 4 is row 0 of the shard)
    source   [0, 2, 1]                     (embeddings arrive as [image 0, image 1, video 0])

Layouts order the token rows `(b, l)` and say how a rank's shard is cut from them:

    token_rows      row b * L + l; contiguous shards. Hidden states `[T, D]` of this package.
    sequence_first  row l * B + b; contiguous shards. Hidden states `[L, B, D]` of Megatron.
    batch_slices    every sample's columns are cut, `[B, L / mp]` per rank; row b * L / mp + l.
                    What PaddleFleet's deepstack step indexes after its transpose.

Shapes and dtypes are always checked, values in NumPy arrays, as the collator's. Those of tensors
are on the device, so a step checks them only in the checked mode:

    with value_checks():
        model(**batch)  # reads the device for each check

A batch names its visual tensors as HF does (embeddings and levels by modality), or as HF's text
model and PaddleFleet (levels of all visual tokens in reading order), and their places by index
arrays, by a mask or by the placeholders in its ids. `visual_inputs` takes all of these, by their
shapes and dtypes alone, and brings them into one form: D width, G deepstack levels.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np

# NumPy array or Paddle tensor.
Array = Any
Layout = Literal["token_rows", "sequence_first", "batch_slices"]


_num_entered = 0


@contextmanager
def value_checks() -> Iterator[None]:
    """Check values of tensors too, in all threads, while entered; every check reads the device.

    For tests, and for the first steps with inputs of one's own.
    """
    global _num_entered
    _num_entered += 1
    try:
        yield
    finally:
        _num_entered -= 1


class RowPart(NamedTuple):
    """Shard of the token rows under sequence parallelism.

    Attributes:
        rank, size: this rank and the number of ranks in the model-parallel group.
        uneven: whether a length that `size` does not divide is cut with a remainder, one row more
            for each of the first ranks, instead of refused.
    """

    rank: int = 0
    size: int = 1
    uneven: bool = False

    def bounds(self, num_rows: int, of: str = "token rows (batch x padded length)"):
        """`[start, stop)` of this shard among `num_rows` rows.

        Args:
            num_rows: their number; with `uneven` also a 0-D tensor, whose bounds are tensors.
            of: what is cut, for the message.

        Raises:
            ValueError: `size` does not divide the rows, or the rank is out of range.
        """
        if not 0 <= self.rank < self.size:
            raise ValueError(f"row part has rank {self.rank}, outside [0, {self.size})")
        if not self.uneven and num_rows % self.size:
            raise ValueError(
                f"{num_rows} {of} do not divide by the model-parallel degree {self.size}: sequence "
                "parallelism needs equal shards; set data.pad_to_multiple_of to a multiple of "
                f"{self.size}, or cut with a remainder (RowPart(..., uneven=True))"
            )
        start = 0
        for rank in range(self.rank):
            start = start + (num_rows + self.size - 1 - rank) // self.size
        return start, start + (num_rows + self.size - 1 - self.rank) // self.size

    def of_rows(self, rows: Array) -> Array:
        """This shard of the first axis. A traced program checks the length when it runs."""
        if self.size == 1:
            return rows
        if not is_known(rows.shape[0]) and not self.uneven:
            return rows.reshape([self.size, -1, *rows.shape[1:]])[self.rank]
        start, stop = self.bounds(_length(rows.shape[0], rows))
        return rows[start:stop]

    def of_numbers(self, numbers_N: np.ndarray, num_rows: int) -> np.ndarray:
        """Those of ascending row numbers that are in this shard, counted from its first row."""
        start, stop = self.bounds(num_rows)
        begin, end = np.searchsorted(numbers_N, [start, stop])
        return numbers_N[begin:end] - start

    def of_columns(self, array_BL: Array) -> Array:
        """This shard of every row of a 2-D array. A traced program checks the width as it runs."""
        if self.size == 1:
            return array_BL
        if not is_known(array_BL.shape[1]) and not self.uneven:
            # Paddle reads 0 as "this dimension stays"; NumPy's shapes are always known.
            return array_BL.reshape([0, self.size, -1])[:, self.rank]
        length = _length(array_BL.shape[1], array_BL[:1])
        start, stop = self.bounds(length, of="tokens of a sample (padded length)")
        return array_BL[:, start:stop]


WHOLE_BATCH = RowPart()


def is_known(size: Any) -> bool:
    """Whether a dimension has a value; in a traced program it may be -1 or a tensor."""
    return isinstance(size, int) and size >= 0


def _length(size: Any, array: Array) -> Any:
    """A dimension; where a traced program does not know it, the array's size as a 0-D tensor."""
    return size if is_known(size) else (array == array).astype("int64").sum()


class VisualIndices(NamedTuple):
    """The index tensors of one step, all 1-D int64.

    Attributes:
        update: `[M_local]` ascending token rows of the local shard that hold a visual token.
        gather: `[M_local]` number, in reading order, of the embedding for each of those rows.
        source: `[M]` row of each embedding, in reading order, within `[images; videos]`; None if
            the batch has one modality, whose order is the reading order.
    """

    update: Array
    gather: Array
    source: Array | None


def check_visual_counts(
    num_image_tokens: int, num_image_rows: int, num_video_tokens: int, num_video_rows: int
) -> None:
    """Check that each modality has as many placeholders as embeddings.

    Raises:
        ValueError: they differ; the message has both counts.
    """
    wrong = [
        f"{tokens} {kind} placeholder tokens in input_ids but {rows} {kind} embedding rows"
        for kind, tokens, rows in (
            ("image", num_image_tokens, num_image_rows),
            ("video", num_video_tokens, num_video_rows),
        )
        if tokens != rows
    ]
    if wrong:
        raise ValueError(
            "; ".join(wrong) + ": every placeholder takes exactly one visual embedding; check "
            "that no placeholder was truncated and that the grids belong to this batch"
        )


def compute_visual_indices(
    image_mask_BL: Array,
    video_mask_BL: Array | None,
    *,
    nonzero: Callable[..., Array],
    part: RowPart | None = None,
    layout: Layout = "token_rows",
    count: int | None = None,
) -> VisualIndices:
    """Indices of the visual token rows; no loop over samples, no boolean indexing.

    A visual token's index in reading order is the number of visual tokens before it, batch-major.
    Cumulative sums give it for every layout and shard, also where a traced program does not know
    the batch or the length.

    Args:
        image_mask_BL: bool, True at image placeholders.
        video_mask_BL: bool, True at video placeholders; None when the batch can have none.
        nonzero: 1-D bool array to the 1-D int64 positions of its True entries. Of a tensor it
            waits for the device, since the number of positions is not known.
        part: the shard of token rows to index; None for all of them.
        layout: order of the token rows and how they are cut, see the top of this file.
        count: number of visual tokens of the batch, if shapes tell it. `nonzero` is then called
            with `count` as well where that is its number of positions: always, except for the
            `update` of a shard, whose number only the values tell.

    Raises:
        ValueError: unknown layout, or `part.size` does not divide the rows that are cut (B * L;
            L for `batch_slices`) and `part.uneven` is not set; or masks that
            contradict each other, see `_bool_masks`.
    """
    part = RowPart() if part is None else part
    image_mask_BL, video_mask_BL = _bool_masks(image_mask_BL, video_mask_BL)
    of_batch = nonzero if count is None else partial(nonzero, count=count)
    visual_BL = image_mask_BL if video_mask_BL is None else image_mask_BL | video_mask_BL
    order_BL = _running_count(visual_BL) - 1
    is_visual_T = _shard(visual_BL, part, layout)
    update = (of_batch if part.size == 1 else nonzero)(is_visual_T)
    gather = _shard(order_BL, part, layout)[update]
    source = None
    if video_mask_BL is not None:
        source = _source_rows(image_mask_BL, video_mask_BL, visual_BL, of_batch)
    if count is not None:
        # Masks that do not keep the promise must not lead out of the embeddings.
        last = max(count - 1, 0)
        gather, source = gather.clip(0, last), None if source is None else source.clip(0, last)
    return VisualIndices(update, gather, source)


def _bool_masks(image_mask_BL: Array, video_mask_BL: Array | None) -> tuple[Array, Array | None]:
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


def has_values(array: Array) -> bool:
    """Whether values may be read: of an array, and in the checked mode of a tensor."""
    # A traced program has `Value`s.
    is_tensor = type(array).__name__ == "Tensor"
    return isinstance(array, np.ndarray) or (is_tensor and _num_entered > 0)


def _shard(array_BL: Array, part: RowPart, layout: Layout) -> Array:
    """The values at this shard's token rows, 1-D."""
    if layout == "token_rows":
        return part.of_rows(array_BL.reshape([-1]))
    if layout == "sequence_first":
        return part.of_rows(array_BL.transpose([1, 0]).reshape([-1]))
    if layout == "batch_slices":
        return part.of_columns(array_BL).reshape([-1])
    raise ValueError(f"layout is {layout!r}; use 'token_rows', 'sequence_first' or 'batch_slices'")


def _source_rows(
    image_mask_BL: Array, video_mask_BL: Array, visual_BL: Array, nonzero: Callable
) -> Array:
    """Row in `[images; videos]` of every visual embedding in reading order: `[M]` int64."""
    image_BL, video_BL = _running_count(image_mask_BL), _running_count(video_mask_BL)
    is_video_BL = video_mask_BL.astype("int64")
    # The last count is the number of image tokens; slicing keeps it on the device.
    num_images_11 = image_BL[-1:, -1:]
    source_BL = (image_BL - 1) * (1 - is_video_BL) + (num_images_11 + video_BL - 1) * is_video_BL
    return source_BL.reshape([-1])[nonzero(visual_BL.reshape([-1]))]


def _running_count(mask_BL: Array) -> Array:
    """Number of True entries up to and including each place, batch-major: int64 `[B, L]`."""
    count_BL = mask_BL.astype("int64")
    if all(map(is_known, mask_BL.shape)):
        return count_BL.reshape([-1]).cumsum(0).reshape(list(mask_BL.shape))
    # A traced program cannot restore a shape that it does not know.
    count_BL = count_BL.cumsum(1)
    of_sample_B1 = count_BL[:, -1:]
    return count_BL + of_sample_B1.cumsum(0) - of_sample_B1


def host_visual_indices(
    input_ids_BL: np.ndarray,
    *,
    image_token_id: int,
    video_token_id: int,
    num_image_rows: int = 0,
    num_video_rows: int = 0,
    part: RowPart | None = None,
    layout: Layout = "token_rows",
) -> dict[str, np.ndarray]:
    """`compute_visual_indices` in NumPy, for the collator: index arrays under their batch keys.

    Args:
        input_ids_BL: int64 token ids with placeholders, padded.
        num_image_rows: image embeddings that the tower will produce: sum of t * h * w / merge^2.
        num_video_rows: the same for videos.
        part, layout: see `compute_visual_indices`.

    Returns:
        `visual_update_indices` `[M_local]`, `visual_gather_indices` `[M_local]` and, if the batch
        has images and videos, `visual_source_indices` `[M]`; all int64. The arrays of an all-text
        batch are empty, so that the model does not search for placeholders.

    Raises:
        ValueError: placeholders and embeddings differ in number; see `compute_visual_indices`.
    """
    image_mask_BL = input_ids_BL == image_token_id
    video_mask_BL = input_ids_BL == video_token_id
    num_image_tokens = int(np.count_nonzero(image_mask_BL))
    num_video_tokens = int(np.count_nonzero(video_mask_BL))
    check_visual_counts(num_image_tokens, num_image_rows, num_video_tokens, num_video_rows)
    indices = compute_visual_indices(
        video_mask_BL if num_video_rows and not num_image_rows else image_mask_BL,
        video_mask_BL if num_image_rows and num_video_rows else None,
        nonzero=np.flatnonzero,
        part=part,
        layout=layout,
    )
    arrays = {
        "visual_update_indices": indices.update,
        "visual_gather_indices": indices.gather,
        "visual_source_indices": indices.source,
    }
    return {name: array for name, array in arrays.items() if array is not None}


def own_indices(
    batch: Mapping[str, Any], part: RowPart, expert_part: RowPart = WHOLE_BATCH
) -> dict[str, Any]:
    """The batch of a collator, whose indices are of all token rows, with those of a shard; so are
    those of a batch within it.

    Args:
        part: token rows of this rank, for the visual indices.
        expert_part: token rows that its experts take.

    Raises:
        ValueError: `part.size` does not divide the token rows.
    """
    update_M, gather_M = batch["visual_update_indices"], batch["visual_gather_indices"]
    start, stop = part.bounds(batch["input_ids"].size)
    own = slice(*np.searchsorted(update_M, [start, stop]))
    found: dict[str, Any] = {
        "visual_update_indices": update_M[own] - start,
        "visual_gather_indices": gather_M[own],
    }
    if "real_row_indices" in batch:
        rows = expert_part.of_numbers(batch["real_row_indices"], batch["input_ids"].size)
        found["real_row_indices"] = rows
    for name, value in batch.items():
        if isinstance(value, dict) and "visual_update_indices" in value:
            found[name] = own_indices(value, part, expert_part)
    return {**batch, **found}


KINDS = ("image", "video")
# HF's and PaddleFleet's name of the levels of all visual tokens in reading order.
LEVELS_IN_ORDER = ("deepstack_visual_embeds", "deepstack_visual_emb")
INPUTS = (
    "input_ids", "decoder_input", "position_ids", "attention_mask", "packed", "routed_rows",
    "image_embeds", "video_embeds", "deepstack_image_embeds", "deepstack_video_embeds",
    *LEVELS_IN_ORDER, "visual_pos_masks", "visual_update_indices", "visual_gather_indices",
    "visual_source_indices", "num_unused_visual_rows",
)  # fmt: skip


class EmbeddingSizes(NamedTuple):
    """What the inputs must fit.

    Attributes:
        num_levels: deepstack levels that a batch with visual tokens must have.
        placeholder_ids: of images and of videos.
        part: this rank's shard of the token rows.
    """

    width: int
    num_levels: int
    placeholder_ids: tuple[int, int]
    part: RowPart


class VisualInputs(NamedTuple):
    """The visual tensors of a batch and their places in this rank's token rows.

    Attributes:
        rows: merged embeddings `[M, D]`, one tensor per modality; none if the hidden states have
            them already.
        row_order: `[M_local]` int64 rows of the concatenated `rows`; None for all, in order.
        levels: tensors of each of the G levels, to be concatenated as `rows`.
        level_order: the same for the levels.
        indices: of this rank's token rows.
        mask: `[B, L]` True at visual tokens; None if only indices are given.
        counts: masks with the number of True entries that they must have, where nothing has
            compared these: shapes cannot.
    """

    rows: Sequence[Array]
    row_order: Array | None
    levels: Sequence[Sequence[Array]]
    level_order: Array | None
    indices: VisualIndices
    mask: Array | None
    counts: Sequence[tuple[Array, int]]


def visual_inputs(
    dict_args: Mapping[str, Any], sizes: EmbeddingSizes, nonzero: Callable[..., Array]
) -> VisualInputs | None:
    """The visual tensors among the inputs of `GPTEmbedding`; None for a text batch.

    Args:
        nonzero: as of `compute_visual_indices`, for a batch without indices.

    Raises:
        ValueError: see `GPTEmbedding.forward`.
    """
    for name in dict_args:
        if name not in INPUTS:
            near = ", ".join(get_close_matches(name, INPUTS)) or ", ".join(INPUTS)
            raise ValueError(f"GPTEmbedding does not know the input {name!r}; it takes {near}")
    embeds = {kind: dict_args.get(f"{kind}_embeds") for kind in KINDS}
    embeds = {kind: rows for kind, rows in embeds.items() if rows is not None}
    levels = _levels(dict_args, embeds, sizes.num_levels)
    in_reading_order = any(name in levels for name in LEVELS_IN_ORDER)
    for kind, rows in embeds.items():
        remedy = "pass what the vision tower returns"
        _check(f"{kind}_embeds", rows, [["M", sizes.width]], "float", remedy)
    num_rows = {kind: rows.shape[0] for kind, rows in embeds.items()}
    num_rows = num_rows or {name: each[0].shape[0] for name, each in levels.items() if each}
    total = sum(num_rows.values()) if all(map(is_known, num_rows.values())) else -1
    of_lists = [total] if in_reading_order else num_rows.values()
    for (name, each), number in zip(levels.items(), of_lists, strict=True):
        remedy = "a level has one row per visual embedding; pass what the tower made for this batch"
        for g, level in enumerate(each):
            _check(f"{name}[{g}]", level, [[number, sizes.width]], "float", remedy)
    _check_tokens(dict_args, sizes)
    ids_BL, mask_BL = dict_args.get("input_ids"), dict_args.get("visual_pos_masks")
    given = _given_indices(dict_args, total, len(embeds) == len(KINDS), sizes.part)
    tokens_BL = mask_BL if ids_BL is None else ids_BL
    num_unused = dict_args.get("num_unused_visual_rows", 0)
    if tokens_BL is not None and has_values(tokens_BL) and num_unused is not None:
        is_kind_BL = _placeholders(ids_BL, sizes.placeholder_ids)
        _check_values(is_kind_BL, mask_BL, given, num_rows, num_unused, sizes.part)
    if not num_rows:
        return None
    needs_ids = given is None or mask_BL is None
    is_kind_BL = _placeholders(ids_BL if needs_ids else None, sizes.placeholder_ids)
    placeholders_BL = is_kind_BL["image"] | is_kind_BL["video"] if is_kind_BL else None
    indices, counts = given, []
    if indices is None:
        masks_BL, counts = _places(is_kind_BL, placeholders_BL, mask_BL, embeds, num_rows, total)
        known = is_known(total) and all(map(is_known, masks_BL[0].shape))
        indices = compute_visual_indices(
            *masks_BL, nonzero=nonzero, part=sizes.part, count=total if known else None
        )
        counts = counts if known else []
    # On one device the embeddings of one modality are in reading order and none is left out.
    takes_all = given is None and sizes.part.size == 1
    in_order = by_kind = None if takes_all else indices.gather
    if indices.source is not None:
        by_kind = indices.source[indices.gather]
    return VisualInputs(
        rows=list(embeds.values()),
        row_order=by_kind,
        levels=[list(tensors) for tensors in zip(*levels.values(), strict=True)],
        level_order=in_order if in_reading_order else by_kind,
        indices=indices,
        mask=placeholders_BL if mask_BL is None else mask_BL,
        counts=counts,
    )


def _placeholders(ids_BL: Array | None, token_ids: tuple[int, int]) -> dict[str, Array]:
    """True at the placeholders of images and of videos; nothing without ids."""
    if ids_BL is None:
        return {}
    return {kind: ids_BL == token_id for kind, token_id in zip(KINDS, token_ids, strict=True)}


def check_level(x_TD: Array, level_MD: Array, update_M: Array) -> None:
    """Check by shapes and dtypes that a deepstack level fits the hidden states and its places.

    Raises:
        ValueError: they do not fit each other.
    """
    remedy = "take levels and visual_update_indices from one call of GPTEmbedding"
    _check("visual_update_indices", update_M, [["M"]], "int64", remedy)
    _check("a layer's input", x_TD, [["T", "D"]], "float", "pass token rows")
    wanted = [update_M.shape[0], x_TD.shape[1]]
    _check("a deepstack level", level_MD, [wanted], _name_of(x_TD.dtype), remedy)


def _check(
    name: str, array: Array | None, shapes: Sequence[Sequence[Any]], dtype: str, remedy: str
) -> None:
    """Raise a ValueError for an array of none of these shapes or of another dtype.

    Args:
        shapes: a size that is unknown, such as a letter or one of a traced program, fits any.
        dtype: its name, or `float` or `int` for all such ones.
    """
    if array is None:
        return
    found = _name_of(array.dtype)
    fits = found == dtype or (dtype in ("float", "int") and dtype in found)
    if not fits or not any(_fits(array.shape, shape) for shape in shapes):
        wanted = " or ".join(f"[{', '.join(map(str, shape))}]" for shape in shapes)
        raise ValueError(
            f"{name} is {found} of shape {list(array.shape)}: it must be {dtype} of shape "
            f"{wanted}; {remedy}"
        )


def _name_of(dtype: Any) -> str:
    return str(dtype).removeprefix("paddle.")


def _fits(shape: Sequence[Any], wanted: Sequence[Any]) -> bool:
    pairs = zip(shape, wanted, strict=False)
    known = [(one, other) for one, other in pairs if is_known(one) and is_known(other)]
    return len(shape) == len(wanted) and all(one == other for one, other in known)


def _levels(
    dict_args: Mapping[str, Any], embeds: Mapping[str, Array], num_levels: int
) -> dict[str, Sequence[Array]]:
    """The lists of levels by their input's name: one per modality, or one in reading order."""
    by_kind = {f"deepstack_{kind}_embeds": kind for kind in KINDS}
    given = {name: dict_args.get(name) for name in (*by_kind, *LEVELS_IN_ORDER)}
    levels: dict[str, Any] = {name: found for name, found in given.items() if found is not None}
    in_reading_order = any(name in levels for name in LEVELS_IN_ORDER)
    if in_reading_order and len(levels) > 1:
        raise ValueError(
            f"{len(levels)} lists of deepstack levels are given ({', '.join(levels)}) where one of "
            "all visual tokens is: pass it alone, or one list per modality"
        )
    for name, found in levels.items():
        if name in by_kind and by_kind[name] not in embeds:
            raise ValueError(
                f"{name} has {len(found)} levels but there is no {by_kind[name]}_embeds: pass "
                "both, as the vision tower returns them"
            )
    if in_reading_order and not embeds and dict_args.get("decoder_input") is None:
        raise ValueError(
            f"{next(iter(levels))} is given without merged visual rows: pass image_embeds or "
            "video_embeds, or a decoder_input with the visual rows in place"
        )
    if not in_reading_order:
        levels = {f"deepstack_{kind}_embeds": [] for kind in embeds} | levels
    for name, found in levels.items():
        count = len(found) if isinstance(found, list | tuple) else f"{type(found).__name__} for"
        if count != num_levels:
            raise ValueError(
                f"{name} has {count} levels but the configuration {num_levels} "
                "(vision_config.deepstack_visual_indexes): pass a list with every level"
            )
    return levels


def _check_tokens(dict_args: Mapping[str, Any], sizes: EmbeddingSizes) -> None:
    """Check ids and mask `[B, L]` and hidden states `[B, L, D]` or `[T, D]` by the positions."""
    ids_BL, hidden = dict_args.get("input_ids"), dict_args.get("decoder_input")
    if hidden is None and ids_BL is None:
        raise ValueError("neither input_ids nor decoder_input is given: pass one of them")
    batch, length = dict_args["position_ids"].shape[1:]
    num_rows: Any = batch * length if is_known(batch) and is_known(length) else "T"
    remedy = (
        f"position_ids are of {batch} x {length} tokens: pass both of one batch, samples first, "
        "with all rows also under sequence parallelism"
    )
    _check("input_ids", ids_BL, [[batch, length]], "int", remedy)
    _check("visual_pos_masks", dict_args.get("visual_pos_masks"), [[batch, length]], "bool", remedy)
    shapes = [batch, length, sizes.width], [num_rows, sizes.width]
    _check("decoder_input", hidden, shapes, "float", remedy)
    if is_known(num_rows):
        sizes.part.bounds(num_rows)


def _given_indices(
    dict_args: Mapping[str, Any], total: int, has_both: bool, part: RowPart
) -> VisualIndices | None:
    """The batch's own indices, checked; None if they must be computed from ids or a mask."""
    given = VisualIndices(*(dict_args.get(f"visual_{n}_indices") for n in VisualIndices._fields))
    if given.update is None and given.gather is None:
        return None
    given = given if has_both else given._replace(source=None)
    for name in VisualIndices._fields if has_both else ("update", "gather"):
        if getattr(given, name) is None:
            raise ValueError(
                f"the batch has visual indices without visual_{name}_indices: add them (the "
                "collator does), or leave all indices out to have them computed"
            )
    num_unused = dict_args.get("num_unused_visual_rows", 0)
    num_taken = total - num_unused if is_known(total) and num_unused is not None else -1
    num_update: Any = given.update.shape[0] if len(given.update.shape) == 1 else "M"
    if is_known(num_taken) and is_known(num_update) and num_update > num_taken:
        raise ValueError(
            f"visual_update_indices has {num_update} token rows but the batch has {num_taken} "
            "visual embeddings: the indices belong to another batch"
        )
    remedy = "take all indices from one call of host_visual_indices, of this batch"
    wanted = {"update": num_taken if part.size == 1 else "M", "gather": num_update}
    for name, number in (wanted | {"source": num_taken}).items():
        _check(f"visual_{name}_indices", getattr(given, name), [[number]], "int64", remedy)
    return given


def _check_values(
    is_kind_BL: Mapping[str, Array],
    mask_BL: Array | None,
    indices: VisualIndices | None,
    num_rows: Mapping[str, int],
    num_unused: int,
    part: RowPart,
) -> None:
    """Check that placeholders, mask, indices and embeddings are of one batch; reads tensors.

    Args:
        is_kind_BL: placeholders of images and of videos; none without ids.
        num_rows: embeddings by kind, `image` and `video`; by another name those of both kinds.

    Raises:
        ValueError: two of them contradict each other.
    """
    kinds = {kind: np.asarray(is_BL) for kind, is_BL in is_kind_BL.items()}
    visual_BL: Any = None if mask_BL is None else np.asarray(mask_BL)
    if kinds:
        if not num_unused and num_rows.keys() <= kinds.keys():
            counts = [(int(kinds[kind].sum()), num_rows.get(kind, 0)) for kind in kinds]
            check_visual_counts(*counts[0], *counts[1])
        placeholders_BL = kinds["image"] | kinds["video"]
        visual_BL = placeholders_BL if visual_BL is None else visual_BL
        if len(wrong := np.argwhere(visual_BL != placeholders_BL)):
            raise ValueError(
                f"visual_pos_masks differs from the placeholders of input_ids at {len(wrong)} "
                f"tokens, the first is token {wrong[0][1]} of sample {wrong[0][0]}: pass the mask "
                "of this batch, or none"
            )
    num_tokens, num_taken = int(np.sum(visual_BL)), sum(num_rows.values()) - num_unused
    if num_tokens != num_taken:
        raise ValueError(
            f"{num_tokens} visual tokens but {num_taken} visual embeddings: every visual token "
            "takes exactly one; check that mask and embeddings are of one batch"
        )
    has_order = indices is not None and indices.source is not None
    # Samples that share an image have indices of their own, see `num_reused_visual_rows`.
    if indices is None or (has_order and not kinds) or num_unused < 0:
        return
    masks_BL = (kinds["image"], kinds["video"]) if has_order else (visual_BL, None)
    wanted = compute_visual_indices(*masks_BL, nonzero=np.flatnonzero, part=part)
    for name, found, expected in zip(VisualIndices._fields, indices, wanted, strict=True):
        if expected is not None and not np.array_equal(np.asarray(found), expected):
            raise ValueError(
                f"visual_{name}_indices are not those of this batch's visual tokens: pass what "
                "host_visual_indices makes of its input_ids for this rank, or none"
            )


def _places(
    is_kind_BL: Mapping[str, Array],
    placeholders_BL: Array | None,
    mask_BL: Array | None,
    embeds: Mapping[str, Array],
    num_rows: Mapping[str, int],
    total: int,
) -> tuple[tuple[Array, Array | None], list[tuple[Array, int]]]:
    """Masks of the visual tokens, of two modalities two, for a batch without indices; and the
    counts that nothing has compared, see `VisualInputs`."""
    if placeholders_BL is None:
        if mask_BL is None:
            raise ValueError(
                f"the places of {total} visual embeddings are unknown: pass input_ids, "
                "visual_pos_masks, or visual_update_indices and visual_gather_indices"
            )
        if len(embeds) == len(KINDS):
            raise ValueError(
                f"visual_pos_masks does not tell {num_rows['image']} image from "
                f"{num_rows['video']} video embeddings: pass input_ids, or the three index tensors "
                "of host_visual_indices"
            )
        return (mask_BL, None), [(mask_BL, total)]
    counts = [] if mask_BL is None else [(mask_BL ^ placeholders_BL, 0)]
    visual_BL = placeholders_BL if mask_BL is None else mask_BL
    if not embeds:
        return (visual_BL, None), [*counts, (visual_BL, total)]
    first_BL, *second_BL = (is_kind_BL[kind] for kind in embeds)
    counts += [(is_kind_BL[kind], num_rows.get(kind, 0)) for kind in KINDS]
    return (first_BL, second_BL[0] if second_BL else None), counts
