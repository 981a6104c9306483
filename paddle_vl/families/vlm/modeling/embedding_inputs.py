"""An embedding with the dictionaries of PaddleFleet's `GPTEmbedding`, and of HF's text model.

A caller names visual tensors as HF does (embeddings and levels by modality), or as HF's text model
and PaddleFleet (levels of all visual tokens in reading order), and their places by index arrays, by
a mask or by the placeholders in its ids. `visual_inputs` takes all of these, checks by shapes and
dtypes alone that they fit each other, and brings them into one form.

Shapes: as in `paddle_vl.batch.visual_index`; D width, G deepstack levels.
"""

from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, NamedTuple

import paddle
from paddle import Tensor

from paddle_vl.batch.rows import Array, RowPart, is_known
from paddle_vl.batch.schema import check_array, has_values
from paddle_vl.batch.visual_index import (
    VisualIndices,
    check_given,
    check_placeholders,
    compute_visual_indices,
)
from paddle_vl.families.vlm.modeling.layers import GPTEmbedding, decoder_positions, in_order
from paddle_vl.nn.transfer import true_positions

KINDS = ("image", "video")
# HF's and PaddleFleet's name of the levels of all visual tokens in reading order.
LEVELS_IN_ORDER = ("deepstack_visual_embeds", "deepstack_visual_emb")
INPUTS = (
    "input_ids", "decoder_input", "position_ids", "attention_mask", "packed", "routed_rows",
    "image_embeds", "video_embeds", "deepstack_image_embeds", "deepstack_video_embeds",
    *LEVELS_IN_ORDER, "visual_pos_masks", "visual_update_indices", "visual_gather_indices",
    "visual_source_indices", "num_unused_visual_rows",
)  # fmt: skip


def embedded(embedding: GPTEmbedding, dict_args: Mapping[str, Any]) -> dict[str, Any]:
    """The decoder's inputs.

    The visual indices come with the others or are computed here, without a host read; the rows of a
    shard are searched, as no shape tells their number.

    Args:
        dict_args: `position_ids` `[3, B, L]` int64; `input_ids` `[B, L]` int64, or `decoder_input`
            `[B, L, D]` or `[T, D]` in place of their embeddings; optionally `attention_mask`,
            `packed` and `routed_rows`, passed on. With visual tokens also

            - their embeddings: `image_embeds` / `video_embeds` `[M, D]`; neither if
              `decoder_input` has them in place, as in HF;
            - the deepstack levels, lists of G `[M, D]`: `deepstack_image_embeds` /
              `deepstack_video_embeds`, or, of all visual tokens in reading order,
              `deepstack_visual_embeds` (HF's name) or `deepstack_visual_emb` (PaddleFleet's);
            - their places: `visual_update_indices`, `visual_gather_indices` and, with both
              modalities, `visual_source_indices` (see `paddle_vl.batch.visual_index`), and
              `num_unused_visual_rows`, the number of embeddings that these indices leave out;
              or `visual_pos_masks` `[B, L]` bool; or the placeholders in `input_ids`.

    Returns:
        `hidden_states` `[T, D]`; `position_ids`; `rotary_pos_emb`, the `RotaryTables` `[B, L, H]`;
        what is passed on, if given; and, unless the batch is all text, `visual_pos_masks` `[B, L]`
        bool if known, `deepstack_visual_emb` (G tensors `[M_local, D]` in the dtype of the hidden
        states), `visual_update_indices` and `visual_gather_indices` `[M_local]`.

    Raises:
        ValueError: an unknown input, inputs whose shapes or dtypes do not fit each other, or token
            rows that sequence parallelism does not divide. In the checked mode of
            `paddle_vl.batch.visual_index` also values: placeholders, mask, indices and embeddings
            that contradict each other. Elsewhere, where indices are computed, NaN hidden states say
            so.
    """
    config, ops = embedding.config, embedding.placement.ops
    ids = (config.image_token_id, config.video_token_id)
    sizes = EmbeddingSizes(embedding.text.hidden_size, embedding.num_levels, ids, ops.row_part)
    visual = visual_inputs(dict_args, sizes, true_positions)
    outputs = decoder_positions(config, dict_args["position_ids"])
    passed_on = ("attention_mask", "packed", "routed_rows")
    outputs |= {name: dict_args[name] for name in passed_on if dict_args.get(name) is not None}
    rows = dict_args.get("decoder_input")
    rows = embedding.embed_tokens(dict_args["input_ids"]) if rows is None else rows
    hidden_TD = ops.enter_rows(rows.reshape([-1, rows.shape[-1]]))
    if visual is None:
        return outputs | {"hidden_states": hidden_TD}
    update = visual.indices.update
    if visual.rows:
        visual_MD = in_order(visual.rows, visual.row_order, hidden_TD.dtype)
        hidden_TD = paddle.scatter(hidden_TD, update, visual_MD)
    if visual.counts:
        hidden_TD = hidden_TD + _zero_or_nan(visual.counts).astype(hidden_TD.dtype)
    levels = [in_order(x, visual.level_order, hidden_TD.dtype) for x in visual.levels]
    outputs |= {
        "hidden_states": hidden_TD,
        "deepstack_visual_emb": levels,
        "visual_update_indices": update,
        "visual_gather_indices": visual.indices.gather,
    }
    return outputs if visual.mask is None else outputs | {"visual_pos_masks": visual.mask}


def _zero_or_nan(counts: Sequence[tuple[Tensor, int]]) -> Tensor:
    """-0.0 if every mask has its number of True entries, else NaN: 0-D, without a host read.

    Added to a tensor it changes no bit, or makes it NaN.
    """
    value = paddle.full([], -0.0)
    for mask, count in counts:
        value = paddle.where(mask.astype("int64").sum() == count, value, float("nan"))
    return value


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
    """The visual tensors among the inputs; None for a text batch.

    Args:
        nonzero: as of `compute_visual_indices`, for a batch without indices.

    Raises:
        ValueError: see `embedded`.
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
        check_array(f"{kind}_embeds", rows, [["M", sizes.width]], "float", remedy)
    num_rows = {kind: rows.shape[0] for kind, rows in embeds.items()}
    num_rows = num_rows or {name: each[0].shape[0] for name, each in levels.items() if each}
    total = sum(num_rows.values()) if all(map(is_known, num_rows.values())) else -1
    of_lists = [total] if in_reading_order else num_rows.values()
    for (name, each), number in zip(levels.items(), of_lists, strict=True):
        remedy = "a level has one row per visual embedding; pass what the tower made for this batch"
        for g, level in enumerate(each):
            check_array(f"{name}[{g}]", level, [[number, sizes.width]], "float", remedy)
    _check_tokens(dict_args, sizes)
    ids_BL, mask_BL = dict_args.get("input_ids"), dict_args.get("visual_pos_masks")
    given = _given_indices(dict_args, total, len(embeds) == len(KINDS), sizes.part)
    tokens_BL = mask_BL if ids_BL is None else ids_BL
    num_unused = dict_args.get("num_unused_visual_rows", 0)
    if tokens_BL is not None and has_values(tokens_BL) and num_unused is not None:
        is_kind_BL = _placeholders(ids_BL, sizes.placeholder_ids)
        check_placeholders(is_kind_BL, mask_BL, given, num_rows, num_unused, sizes.part)
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
    check_array("input_ids", ids_BL, [[batch, length]], "int", remedy)
    check_array(
        "visual_pos_masks", dict_args.get("visual_pos_masks"), [[batch, length]], "bool", remedy
    )
    shapes = [batch, length, sizes.width], [num_rows, sizes.width]
    check_array("decoder_input", hidden, shapes, "float", remedy)
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
    check_given(given, total, dict_args.get("num_unused_visual_rows", 0), has_both, part)
    return given


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
