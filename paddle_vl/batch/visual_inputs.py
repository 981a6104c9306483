"""The visual inputs of `GPTEmbedding`, checked and brought into one form.

A batch names its visual tensors as HF does (embeddings and levels by modality), or as HF's text
model and PaddleFleet (levels of all visual tokens in reading order), and their places by index
arrays, by a mask or by the placeholders in its ids. `visual_inputs` takes all of these, by their
shapes and dtypes alone, in NumPy or Paddle; values are compared in the checked mode of
`visual_index`.

Shapes: B batch, L padded length, T = B * L token rows, D width, M visual embeddings of the batch,
M_local those of this rank's token rows, G deepstack levels.

Over 350 lines: what is taken, and every check of it, in the order in which they are made.
"""

from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, NamedTuple

import numpy as np

from paddle_vl.batch.visual_index import (
    Array,
    RowPart,
    VisualIndices,
    check_visual_counts,
    compute_visual_indices,
    has_values,
    is_known,
)

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
    _check_tensors(embeds, levels, sizes.width)
    _check_tokens(dict_args, sizes)
    num_rows = {kind: rows.shape[0] for kind, rows in embeds.items()}
    num_rows = num_rows or {name: each[0].shape[0] for name, each in levels.items() if each}
    given = _given_indices(dict_args, num_rows, embeds, sizes.part)
    mask_BL = _visual_mask(dict_args)
    tokens = [array for array in (dict_args.get("input_ids"), mask_BL) if array is not None]
    if any(has_values(array) for array in tokens):
        check_visual_values(dict_args, given, num_rows, sizes.placeholder_ids, sizes.part)
    if not num_rows:
        return None
    _check_level_rows(levels, num_rows, in_reading_order)
    indices, counts = given, []
    if indices is None:
        indices, mask_BL, counts = _found_indices(dict_args, num_rows, embeds, sizes, nonzero)
    elif mask_BL is None and dict_args.get("input_ids") is not None:
        mask_BL = _placeholders(dict_args["input_ids"], sizes)[-1]
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
        mask=mask_BL,
        counts=counts,
    )


def check_visual_indices(
    update: Array, gather: Array, source: Array | None, num_embeddings: int, covers_all: bool
) -> None:
    """Check the index arrays of a batch by their shapes; a traced program's unknown sizes pass.

    Args:
        source: None unless the batch has images and videos.
        num_embeddings: those that the token rows of all ranks receive.
        covers_all: whether the indices are of all token rows, not of a shard.

    Raises:
        ValueError: one is missing, is not 1-D int64, or has another length than the embeddings.
    """
    arrays = {"update": update, "gather": gather} | ({} if source is None else {"source": source})
    for name, array in arrays.items():
        if array is None:
            other = "gather" if name == "update" else "update"
            raise ValueError(
                f"the batch has visual_{other}_indices without visual_{name}_indices: give both, "
                "or neither to have them computed"
            )
        if len(array.shape) != 1 or not str(array.dtype).endswith("int64"):
            raise ValueError(
                f"visual_{name}_indices is {array.dtype} of shape {list(array.shape)}: it must be "
                "1-D int64, as host_visual_indices makes it"
            )
    num_update, num_gather = update.shape[0], gather.shape[0]
    if is_known(num_update) and is_known(num_gather) and num_update != num_gather:
        raise ValueError(
            f"visual_update_indices has {num_update} entries but visual_gather_indices "
            f"{num_gather}: take both from one call"
        )
    if not (is_known(num_update) and is_known(num_embeddings)):
        return
    if num_update > num_embeddings or (covers_all and num_update != num_embeddings):
        raise ValueError(
            f"visual_update_indices has {num_update} token rows but the batch has {num_embeddings} "
            "visual embeddings: the indices belong to another batch"
        )
    if source is not None and is_known(source.shape[0]) and source.shape[0] != num_embeddings:
        raise ValueError(
            f"visual_source_indices has {source.shape[0]} entries but the batch has "
            f"{num_embeddings} visual embeddings: the indices belong to another batch"
        )


def check_visual_values(
    batch: Mapping[str, Array],
    indices: VisualIndices | None,
    num_rows: Mapping[str, int],
    placeholder_ids: tuple[int, int],
    part: RowPart | None = None,
) -> None:
    """Check that ids, mask, indices and embeddings are of one batch, by their values.

    Args:
        batch: `input_ids` and `visual_pos_masks` `[B, L]` and `num_unused_visual_rows`, those that
            it has; tensors are read.
        indices: those of the batch; None if it has none.
        num_rows: embeddings by kind, `image` and `video`; by another name those of both kinds.
        placeholder_ids: of images and of videos.
        part: the shard that the indices are of.

    Raises:
        ValueError: two of them contradict each other.
    """
    ids_BL, visual_BL = (
        None if batch.get(name) is None else np.asarray(batch[name])
        for name in ("input_ids", "visual_pos_masks")
    )
    num_unused = batch.get("num_unused_visual_rows", 0)
    kinds = {}
    if ids_BL is not None:
        kinds = {k: ids_BL == i for k, i in zip(("image", "video"), placeholder_ids, strict=True)}
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
    if visual_BL is None:
        return
    num_tokens, num_taken = int(visual_BL.sum()), sum(num_rows.values()) - num_unused
    if num_tokens != num_taken:
        raise ValueError(
            f"{num_tokens} visual tokens but {num_taken} visual embeddings: every visual token "
            "takes exactly one; check that mask and embeddings are of one batch"
        )
    has_order = indices is not None and indices.source is not None
    if indices is None or (has_order and not kinds):
        return
    first_BL, second_BL = (kinds["image"], kinds["video"]) if has_order else (visual_BL, None)
    wanted = compute_visual_indices(first_BL, second_BL, nonzero=np.flatnonzero, part=part)
    for name, found, expected in zip(VisualIndices._fields, indices, wanted, strict=True):
        if expected is not None and not np.array_equal(np.asarray(found), expected):
            raise ValueError(
                f"visual_{name}_indices are not those of this batch's visual tokens: pass what "
                "host_visual_indices makes of its input_ids for this rank, or none"
            )


def check_level(x_TD: Array, level_MD: Array, update_M: Array) -> None:
    """Check by shapes and dtypes that a deepstack level fits the hidden states and its places.

    Raises:
        ValueError: they do not fit each other.
    """
    num_rows, num_places = level_MD.shape[0], update_M.shape[0]
    if (
        len(x_TD.shape) != 2
        or len(level_MD.shape) != 2
        or level_MD.shape[1] != x_TD.shape[1]
        or level_MD.dtype != x_TD.dtype
    ):
        raise ValueError(
            f"a deepstack level is {level_MD.dtype} {list(level_MD.shape)} but the hidden states "
            f"are {x_TD.dtype} {list(x_TD.shape)}: cast the level, pass rows of one width"
        )
    if len(update_M.shape) != 1 or not str(update_M.dtype).endswith("int64"):
        raise ValueError(
            f"visual_update_indices is {update_M.dtype} of shape {list(update_M.shape)}: it "
            "must be 1-D int64, as GPTEmbedding returns it"
        )
    if not _fits([num_rows], [num_places]):
        raise ValueError(
            f"a deepstack level has {num_rows} rows for {num_places} visual token rows: take "
            "levels and visual_update_indices from one call of GPTEmbedding"
        )


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


def _check_tensors(
    embeds: Mapping[str, Array], levels: Mapping[str, Sequence[Array]], width: int
) -> None:
    named = {f"{kind}_embeds": rows for kind, rows in embeds.items()}
    named |= {f"{name}[{g}]": level for name in levels for g, level in enumerate(levels[name])}
    for name, rows in named.items():
        if len(rows.shape) != 2 or rows.shape[1] != width or "float" not in str(rows.dtype):
            raise ValueError(
                f"{name} is {rows.dtype} of shape {list(rows.shape)} but must be floating point "
                f"with rows of {width}: pass what the vision tower returns"
            )


def _check_level_rows(
    levels: Mapping[str, Sequence[Array]], num_rows: Mapping[str, int], in_reading_order: bool
) -> None:
    """Check that every level has as many rows as its merged embeddings."""
    wanted = [_total(num_rows)] * len(levels) if in_reading_order else list(num_rows.values())
    for (name, each), number in zip(levels.items(), wanted, strict=True):
        for g, level in enumerate(each):
            if not _fits(level.shape[:1], [number]):
                raise ValueError(
                    f"{name}[{g}] has {level.shape[0]} rows for {number} visual embeddings: "
                    "a level has one row per embedding; pass what the tower made for this batch"
                )


def _check_tokens(dict_args: Mapping[str, Any], sizes: EmbeddingSizes) -> None:
    """Check ids `[B, L]` and hidden states `[B, L, D]` or `[T, D]` against the positions."""
    ids_BL, hidden = dict_args.get("input_ids"), dict_args.get("decoder_input")
    if hidden is None and ids_BL is None:
        raise ValueError("neither input_ids nor decoder_input is given: pass one of them")
    batch, length = dict_args["position_ids"].shape[1:]
    num_rows = batch * length if is_known(batch) and is_known(length) else -1
    fitting = {
        "input_ids": [[batch, length]],
        "decoder_input": [[batch, length, sizes.width], [num_rows, sizes.width]],
    }
    for name, array in (("input_ids", ids_BL), ("decoder_input", hidden)):
        if array is not None and not any(_fits(array.shape, each) for each in fitting[name]):
            raise ValueError(
                f"{name} has shape {list(array.shape)} but position_ids are of {batch} x {length} "
                f"tokens, for which it is {' or '.join(map(str, fitting[name]))}: pass both of one "
                "batch, samples first, with all rows also under sequence parallelism"
            )
    if hidden is not None and "float" not in str(hidden.dtype):
        raise ValueError(
            f"decoder_input is {hidden.dtype}: it must be floating point, as the embedding's"
        )
    if is_known(num_rows):
        sizes.part.bounds(num_rows)


def _visual_mask(dict_args: Mapping[str, Any]) -> Array | None:
    """The batch's own mask, checked; None without one."""
    mask_BL = dict_args.get("visual_pos_masks")
    if mask_BL is None:
        return None
    shape = dict_args["position_ids"].shape[1:]
    if not (_fits(mask_BL.shape, shape) and str(mask_BL.dtype).endswith("bool")):
        raise ValueError(
            f"visual_pos_masks is {mask_BL.dtype} of shape {list(mask_BL.shape)}: it must be "
            f"bool of shape {list(shape)}, as the tokens of position_ids"
        )
    return mask_BL


def _given_indices(
    dict_args: Mapping[str, Any],
    num_rows: Mapping[str, int],
    embeds: Mapping[str, Array],
    part: RowPart,
) -> VisualIndices | None:
    """The batch's own indices, checked; None if they must be computed from ids or a mask."""
    update, gather, source = (
        dict_args.get(f"visual_{name}_indices") for name in ("update", "gather", "source")
    )
    if update is None and gather is None:
        _check_places(dict_args, num_rows, embeds)
        return None
    has_both = len(embeds) == len(KINDS)
    if has_both and source is None:
        raise ValueError(
            "the batch has images and videos and visual indices without visual_source_indices, "
            "which give their order: add them (the collator does), or leave all indices out"
        )
    source = source if has_both else None
    total = _total(num_rows)
    total = total - dict_args.get("num_unused_visual_rows", 0) if is_known(total) else total
    check_visual_indices(update, gather, source, total, covers_all=part.size == 1)
    return VisualIndices(update, gather, source)


def _check_places(
    dict_args: Mapping[str, Any], num_rows: Mapping[str, int], embeds: Mapping[str, Array]
) -> None:
    """Check that the places of visual tokens are known without indices."""
    if not num_rows or dict_args.get("input_ids") is not None:
        return
    if dict_args.get("visual_pos_masks") is None:
        raise ValueError(
            f"the places of {_total(num_rows)} visual embeddings are unknown: pass input_ids, "
            "visual_pos_masks, or visual_update_indices and visual_gather_indices"
        )
    if len(embeds) == len(KINDS):
        raise ValueError(
            f"visual_pos_masks does not tell {num_rows['image']} image from {num_rows['video']} "
            "video embeddings: pass input_ids, or the three index tensors of host_visual_indices"
        )


def _found_indices(
    dict_args: Mapping[str, Any],
    num_rows: Mapping[str, int],
    embeds: Mapping[str, Array],
    sizes: EmbeddingSizes,
    nonzero: Callable[..., Array],
) -> tuple[VisualIndices, Array, list[tuple[Array, int]]]:
    """Indices of this rank's visual rows from the mask or the placeholders, the mask of visual
    tokens, and the counts that nothing has compared."""
    ids_BL: Any = dict_args.get("input_ids")
    mask_BL: Any = dict_args.get("visual_pos_masks")
    total = _total(num_rows)
    masks, counts = [mask_BL, None], [(mask_BL, total)]
    if ids_BL is not None:
        image_BL, video_BL, placeholders_BL = _placeholders(ids_BL, sizes)
        counts = []
        if mask_BL is not None:
            counts.append((mask_BL ^ placeholders_BL, 0))
        of_kinds: dict[str, Array] = {"image": image_BL, "video": video_BL}
        mask_BL = placeholders_BL if mask_BL is None else mask_BL
        masks = [mask_BL, None]
        if embeds:
            masks = [*(of_kinds[kind] for kind in embeds), None]
            counts += [(of_kinds[kind], num_rows.get(kind, 0)) for kind in KINDS]
        else:
            counts.append((mask_BL, total))
    known = is_known(total) and all(map(is_known, mask_BL.shape))
    indices = compute_visual_indices(
        masks[0], masks[1], nonzero=nonzero, part=sizes.part, count=total if known else None
    )
    return indices, mask_BL, counts if known else []


def _placeholders(ids_BL: Array, sizes: EmbeddingSizes) -> tuple[Array, Array, Array]:
    """True at the placeholders of images, of videos, and of either."""
    image_BL, video_BL = (ids_BL == token_id for token_id in sizes.placeholder_ids)
    return image_BL, video_BL, image_BL | video_BL


def _total(num_rows: Mapping[str, int]) -> int:
    """Visual embeddings of the batch; -1 if a traced program does not know them."""
    return sum(num_rows.values()) if all(map(is_known, num_rows.values())) else -1


def _fits(shape: Sequence[int], wanted: Sequence[int]) -> bool:
    """Whether two shapes can be equal; a size that a traced program does not know fits any."""
    if len(shape) != len(wanted):
        return False
    pairs = zip(shape, wanted, strict=True)
    return all(one == other for one, other in pairs if is_known(one) and is_known(other))
