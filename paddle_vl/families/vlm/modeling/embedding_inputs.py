"""The visual inputs of `GPTEmbedding`, in any of the forms that callers have, as one.

A caller names visual tensors as HF does (embeddings and levels by modality), or as HF's text model
and PaddleFleet (levels of all visual tokens in reading order), and their places by index arrays, by
a mask or by the placeholders in its ids. `visual_inputs` takes all of these, checks by shapes and
dtypes alone that they fit each other, and brings them into one form.

Shapes: as in `paddle_vl.batch.visual_index`; D width, G deepstack levels.
"""

from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, NamedTuple

import numpy as np

from paddle_vl.batch.rows import Array, RowPart, is_known
from paddle_vl.batch.visual_index import (
    VisualIndices,
    check_visual_counts,
    compute_visual_indices,
    has_values,
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
