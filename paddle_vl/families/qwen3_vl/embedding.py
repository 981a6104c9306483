"""Embedding: token rows with visual embeddings in place, and the inputs that all layers share.

Shapes: B batch, L padded length, T = B * L token rows (this rank's shard under sequence
parallelism), D width, H head width, M visual embeddings of the batch, M_local those of this rank's
token rows, G deepstack levels.

Source: Qwen3VLModel of HF transformers; inputs and outputs as PaddleFleet's GPTEmbedding.
"""

from difflib import get_close_matches
from typing import Any, NamedTuple

import paddle
from paddle import Tensor, nn

from paddle_vl.batch.visual_index import (
    VisualIndices,
    check_visual_counts,
    check_visual_indices,
    compute_visual_indices,
)
from paddle_vl.families.qwen3_vl.config import Qwen3VLConfig
from paddle_vl.nn.placement import Placement
from paddle_vl.nn.rotary import mrope_tables

KINDS = ("image", "video")
# HF's and PaddleFleet's name of the levels of all visual tokens in reading order.
LEVELS_IN_ORDER = ("deepstack_visual_embeds", "deepstack_visual_emb")
INPUTS = (
    "input_ids", "decoder_input", "position_ids", "attention_mask", "packed", "routed_rows",
    "image_embeds", "video_embeds", "deepstack_image_embeds", "deepstack_video_embeds",
    *LEVELS_IN_ORDER, "visual_pos_masks", "visual_update_indices", "visual_gather_indices",
    "visual_source_indices", "num_unused_visual_rows",
)  # fmt: skip


def decoder_positions(config: Qwen3VLConfig, dict_args: dict[str, Any]) -> dict[str, Any]:
    """The inputs that all decoder layers share, see `GPTEmbedding.forward`."""
    text = config.text_config
    position_ids = dict_args["position_ids"]
    tables = mrope_tables(position_ids, text.head_dim, text.rope_theta, text.mrope_section)
    outputs = {"position_ids": position_ids, "rotary_pos_emb": tables}
    for name in ("attention_mask", "packed", "routed_rows"):
        if dict_args.get(name) is not None:
            outputs[name] = dict_args[name]
    return outputs


class VisualInputs(NamedTuple):
    """The visual tensors of a batch.

    Attributes:
        embeds: merged rows `[M, D]` by modality; empty if the hidden states have them already.
        levels: lists of G levels `[M, D]` by their input's name: one list per modality, or one
            list of all visual tokens in reading order.
        in_reading_order: whether it is the latter.
    """

    embeds: dict[str, Tensor]
    levels: dict[str, list[Tensor]]
    in_reading_order: bool

    @property
    def num_rows(self) -> int:
        """Visual embeddings of the batch; -1 if a traced program does not know them."""
        rows = self.embeds or {name: levels[0] for name, levels in self.levels.items() if levels}
        sizes = [tensor.shape[0] for tensor in rows.values()]
        return -1 if -1 in sizes else sum(sizes)

    @paddle.jit.not_to_static
    def by_level(self) -> list[list[Tensor]]:
        """The tensors of each level."""
        return [list(tensors) for tensors in zip(*self.levels.values(), strict=True)]

    @paddle.jit.not_to_static
    def check_level_rows(self) -> None:
        """Check that every level has as many rows as its merged embeddings."""
        wanted = [self.num_rows] * len(self.levels)
        if not self.in_reading_order:
            wanted = [rows.shape[0] for rows in self.embeds.values()]
        for (name, levels), num_rows in zip(self.levels.items(), wanted, strict=True):
            for g, level in enumerate(levels):
                if -1 not in (level.shape[0], num_rows) and level.shape[0] != num_rows:
                    raise ValueError(
                        f"{name}[{g}] has {level.shape[0]} rows for {num_rows} visual embeddings: "
                        "a level has one row per embedding; pass what the tower made for this batch"
                    )


# Shapes decide: a traced program must not turn these conditions into its own.
@paddle.jit.not_to_static
def visual_inputs(dict_args: dict[str, Any], num_levels: int, width: int) -> VisualInputs | None:
    """The visual tensors among the inputs of `GPTEmbedding`; None for a text batch.

    Raises:
        ValueError: see `GPTEmbedding.forward`.
    """
    embeds = {kind: dict_args.get(f"{kind}_embeds") for kind in KINDS}
    embeds = {kind: rows for kind, rows in embeds.items() if rows is not None}
    by_kind = {f"deepstack_{kind}_embeds": kind for kind in KINDS}
    levels = {name: dict_args.get(name) for name in (*by_kind, *LEVELS_IN_ORDER)}
    levels = {name: found for name, found in levels.items() if found is not None}
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
    named = {f"{kind}_embeds": rows for kind, rows in embeds.items()}
    named |= {f"{name}[{g}]": level for name in levels for g, level in enumerate(levels[name])}
    for name, rows in named.items():
        if len(rows.shape) != 2 or rows.shape[1] != width or not rows.is_floating_point():
            raise ValueError(
                f"{name} is {rows.dtype} of shape {list(rows.shape)} but must be floating point "
                f"with rows of {width}: pass what the vision tower returns"
            )
    return VisualInputs(embeds, levels, in_reading_order) if embeds or levels else None


class GPTEmbedding(nn.Layer):
    """Embeds tokens, overwrites placeholders with visual embeddings, gathers the deepstack levels.

    The visual indices come from the batch or are computed here, once per step.

    Attributes:
        num_levels: deepstack levels that a batch with visual tokens must have.
    """

    def __init__(self, config: Qwen3VLConfig, placement: Placement):
        super().__init__()
        self.config = config
        self.placement = placement
        # Under the colocated schedule levels do not pass through the embedding.
        has_levels = not placement.stage_layers.encoder_everywhere
        self.num_levels = len(config.vision_config.deepstack_visual_indexes) if has_levels else 0
        text = config.text_config
        self.embed_tokens = placement.layers.vocab_embedding(
            text.vocab_size, text.hidden_size, text.initializer_range, config.tie_word_embeddings
        )

    def forward(self, dict_args: dict[str, Any]) -> dict[str, Any]:
        """Prepare the decoder's input.

        Args:
            dict_args: `position_ids` `[3, B, L]` int64; `input_ids` `[B, L]` int64, or
                `decoder_input` `[B, L, D]` or `[T, D]` in place of their embeddings; optionally
                `attention_mask`, `packed` and `routed_rows`, passed on. With visual tokens also

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
            `hidden_states` `[T, D]`; `position_ids`; `rotary_pos_emb`, the `RotaryTables`
            `[B, L, H]`; what is passed on, if given; and, unless the batch is all text,
            `visual_pos_masks` `[B, L]` bool if known, `deepstack_visual_emb` (G tensors
            `[M_local, D]` in the dtype of the hidden states), `visual_update_indices` and
            `visual_gather_indices` `[M_local]`.

        Raises:
            ValueError: an unknown input, inputs whose numbers, shapes or dtypes do not fit each
                other (nothing is read on the host for this), or token rows that sequence
                parallelism does not divide.
        """
        _check_names(dict_args)
        visual = visual_inputs(dict_args, self.num_levels, self.config.text_config.hidden_size)
        outputs = decoder_positions(self.config, dict_args)
        outputs["hidden_states"] = hidden = self._token_rows(dict_args)
        carried = self._carried_indices(dict_args, visual)
        if visual is None:
            return outputs
        visual.check_level_rows()
        mask_BL = self._visual_mask(dict_args)
        indices = carried or self._computed_indices(dict_args, visual, mask_BL)
        # One modality's embeddings are in reading order; on one device none is left out.
        takes_all = carried is None and self.placement.ops.row_part.size == 1
        in_order = by_kind = None if takes_all else indices.gather
        if indices.source is not None:
            by_kind = paddle.index_select(indices.source, indices.gather)
        if visual.embeds:
            rows_MD = _local_rows(list(visual.embeds.values()), by_kind, hidden.dtype)
            outputs["hidden_states"] = paddle.scatter(hidden, indices.update, rows_MD)
        order = in_order if visual.in_reading_order else by_kind
        outputs["deepstack_visual_emb"] = [
            _local_rows(level, order, hidden.dtype) for level in visual.by_level()
        ]
        if mask_BL is not None:
            outputs["visual_pos_masks"] = mask_BL
        outputs["visual_update_indices"] = indices.update
        outputs["visual_gather_indices"] = indices.gather
        return outputs

    def _token_rows(self, dict_args: dict[str, Any]) -> Tensor:
        """This rank's token rows `[T, D]`, with the embeddings of placeholders."""
        hidden = dict_args.get("decoder_input")
        if hidden is None:
            if dict_args.get("input_ids") is None:
                raise ValueError("neither input_ids nor decoder_input is given: pass one of them")
            hidden = self.embed_tokens(dict_args["input_ids"])
        hidden = hidden.reshape([-1, hidden.shape[-1]])
        if paddle.in_dynamic_mode():
            _, batch, length = dict_args["position_ids"].shape
            if hidden.shape[0] != batch * length:
                raise ValueError(
                    f"{hidden.shape[0]} token rows but position_ids of {batch} x {length} tokens: "
                    "pass both of one batch, with all rows also under sequence parallelism"
                )
            self.placement.ops.row_part.bounds(hidden.shape[0])
        return self.placement.ops.enter_rows(hidden)

    def _visual_mask(self, dict_args: dict[str, Any]) -> Tensor | None:
        """True at visual tokens, `[B, L]`; None if only indices are given."""
        mask_BL = dict_args.get("visual_pos_masks")
        if mask_BL is None:
            if dict_args.get("input_ids") is None:
                return None
            image_mask_BL, video_mask_BL = self.placeholder_masks(dict_args["input_ids"])
            return image_mask_BL | video_mask_BL
        shape = dict_args["position_ids"].shape[1:]
        fits = len(mask_BL.shape) == 2 and str(mask_BL.dtype).endswith("bool")
        fits = fits and (not paddle.in_dynamic_mode() or mask_BL.shape == shape)
        if not fits:
            raise ValueError(
                f"visual_pos_masks is {mask_BL.dtype} of shape {list(mask_BL.shape)}: it must be "
                f"bool of shape {list(shape)}, as the tokens of position_ids"
            )
        return mask_BL

    def placeholder_masks(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        """True at the placeholders of images, and of videos."""
        return input_ids == self.config.image_token_id, input_ids == self.config.video_token_id

    def _carried_indices(
        self, dict_args: dict[str, Any], visual: VisualInputs | None
    ) -> VisualIndices | None:
        """The batch's own indices, checked; None if they must be computed."""
        update, gather, source = (
            dict_args.get(f"visual_{name}_indices") for name in ("update", "gather", "source")
        )
        if update is None and gather is None:
            self._check_places(dict_args, visual)
            return None
        has_both = visual is not None and len(visual.embeds) == 2
        if has_both and source is None:
            raise ValueError(
                "the batch has images and videos and visual indices without visual_source_indices, "
                "which give their order: add them (the collator does), or leave all indices out"
            )
        source = source if has_both else None
        num_rows = visual.num_rows if visual is not None else 0
        num_rows -= dict_args.get("num_unused_visual_rows", 0)
        is_whole = self.placement.ops.row_part.size == 1
        check_visual_indices(update, gather, source, num_rows, covers_all=is_whole)
        return VisualIndices(update, gather, source)

    def _computed_indices(
        self, dict_args: dict[str, Any], visual: VisualInputs, mask_BL: Tensor | None
    ) -> VisualIndices:
        """Indices of this rank's visual rows from the mask or the placeholders."""
        first_BL, second_BL = mask_BL, None
        if dict_args.get("input_ids") is not None and visual.embeds:
            image_mask_BL, video_mask_BL = self.placeholder_masks(dict_args["input_ids"])
            first_BL = image_mask_BL if "image" in visual.embeds else video_mask_BL
            second_BL = video_mask_BL if len(visual.embeds) == 2 else None
        part = self.placement.ops.row_part
        return compute_visual_indices(first_BL, second_BL, nonzero=_nonzero, part=part)

    def _check_places(self, dict_args: dict[str, Any], visual: VisualInputs | None) -> None:
        """Compare the numbers of visual tokens and embeddings, as far as a traced program can."""
        ids, mask_BL = dict_args.get("input_ids"), dict_args.get("visual_pos_masks")
        embeds = visual.embeds if visual is not None else {}
        num_rows = visual.num_rows if visual is not None else 0
        if ids is None and mask_BL is None:
            if visual is not None:
                raise ValueError(
                    f"the places of {num_rows} visual embeddings are unknown: pass input_ids, "
                    "visual_pos_masks, or visual_update_indices and visual_gather_indices"
                )
            return
        if ids is None and len(embeds) == 2:
            raise ValueError(
                f"visual_pos_masks does not tell {embeds['image'].shape[0]} image from "
                f"{embeds['video'].shape[0]} video embeddings: pass input_ids, or the three index "
                "tensors of host_visual_indices"
            )
        if not paddle.in_dynamic_mode():
            return
        if ids is not None and (embeds or visual is None):
            image_mask_BL, video_mask_BL = self.placeholder_masks(ids)
            check_visual_counts(
                _count(image_mask_BL), embeds["image"].shape[0] if "image" in embeds else 0,
                _count(video_mask_BL), embeds["video"].shape[0] if "video" in embeds else 0,
            )  # fmt: skip
        if mask_BL is not None or not embeds:
            visual_mask_BL = self._visual_mask(dict_args)
            assert visual_mask_BL is not None, "a mask or ids are given"
            num_tokens = _count(visual_mask_BL)
            if num_tokens != num_rows:
                raise ValueError(
                    f"{num_tokens} visual tokens but {num_rows} visual embeddings: every visual "
                    "token takes exactly one; check that mask and embeddings are of one batch"
                )


def _check_names(dict_args: dict[str, Any]) -> None:
    for name in dict_args:
        if name not in INPUTS:
            near = ", ".join(get_close_matches(name, INPUTS)) or ", ".join(INPUTS)
            raise ValueError(f"GPTEmbedding does not know the input {name!r}; it takes {near}")


def _count(mask_BL: Tensor) -> int:
    return _nonzero(mask_BL.reshape([-1])).shape[0]


def _nonzero(mask: Tensor) -> Tensor:
    return paddle.nonzero(mask).reshape([-1])


def _local_rows(sources: list[Tensor], order: Tensor | None, dtype: Any) -> Tensor:
    """Rows of the concatenated sources in that order, all of them for None, in a dtype."""
    rows_MD = sources[0] if len(sources) == 1 else paddle.concat(sources, axis=0)
    rows_MD = rows_MD if order is None else paddle.index_select(rows_MD, order)
    return rows_MD if rows_MD.dtype == dtype else rows_MD.astype(dtype)
