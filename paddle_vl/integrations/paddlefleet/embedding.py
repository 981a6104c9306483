"""`GPTEmbedding` of PaddleFleet with the visual indices of a step.

Shapes: B batch, S padded length, D width; mp ranks share a sequence under sequence parallelism;
M visual embeddings of the batch, M_local those in this rank's token rows; G deepstack levels.
Hidden states are `[B, S, D]`, or `[S / mp, B, D]` under sequence parallelism.

What the parent can do decides where images are placed, not its version:

    step                      parent has _merge_multimodal     parent has not (PaddleFleet <= 0.3)
    embed the text [B, S, D]  parent                           parent, which sees no images
    place images              here, one scatter of M rows      -
    cut off the MTP chunks    parent                           -
    cut the sequence, rotary  parent                           parent
    place images              -                                here, one scatter of M_local rows
    lists for text layers     here, if there are levels        here

Source of the interface: `models/gpt/gpt_embedding.py` of PaddleFleet, as stored in 2026-11 and as
of 0.3.
"""

import functools
from typing import Any

import paddle
from paddle import Tensor

from paddle_vl.batch.visual_index import RowPart, compute_visual_indices
from paddle_vl.integrations.paddlefleet.sources import (
    VISUAL_INPUTS,
    VisualRows,
    find_rows,
    given_sources,
    in_reading_order,
    joined,
    nonzero,
    sequence_group,
)

# The key under which `forward` gives the merge a place for what it finds. The parent neither reads
# nor hands on keys that it does not know.
_FOUND = "_paddle_vl_visual_rows"


@functools.cache
def indexed_embedding(parent: Any) -> type:
    """`IndexedGPTEmbedding` over PaddleFleet's `GPTEmbedding`, or over a subclass of it.

    It has the parent's constructor, parameters, inputs and outputs. With deepstack levels
    `deepstack_visual_emb` has G tensors `[M, D]` in reading order, also of images and videos
    together, and there are two outputs more, both int64: `visual_update_indices` `[M_local]`, rows
    of the local `[B, S / mp]` token rows, batch-major, that hold a visual token; and
    `visual_gather_indices` `[M_local]`, number of their embedding in reading order.

    With a `decoder_input` given it does what the parent does: images and videos are left out.
    `forward` raises ValueError where embeddings do not fit the placeholders, the levels or each
    other, or mp does not divide S.
    """
    if getattr(parent, "_has_visual_indices", False):
        return parent
    base = _MergesImages if hasattr(parent, "_merge_multimodal") else _PlacesImages
    name = f"Indexed{parent.__name__}"
    return type(name, (base, parent), {"__module__": __name__, "__qualname__": name})


class _MergesImages:
    """Over a `GPTEmbedding` with `_merge_multimodal`: in place of that method."""

    _has_visual_indices = True
    config: Any

    def forward(
        self,
        dict_args: dict[str, Any],
        decoder_input: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> dict[str, Any]:
        parent: Any = super()
        if _has_rows(dict_args, decoder_input) or not given_sources(self.config, dict_args):
            return parent.forward(dict_args, decoder_input, packed_seq_params)
        found: list[VisualRows] = []
        args = {**dict_args, _FOUND: found}
        outputs = parent.forward(args, decoder_input, packed_seq_params)
        # The parent may write other ids into the dictionary that it is given.
        dict_args["input_ids"] = args["input_ids"]
        if outputs.get("deepstack_visual_emb") is None:
            return outputs
        return outputs | _lists(found[0], sequence_group(self))

    def _merge_multimodal(
        self,
        dict_args: dict[str, Any],
        input_ids: Tensor,
        decoder_input: Tensor,
        deepstack_image_embeds: list[Tensor] | None,
        deepstack_video_embeds: list[Tensor] | None,
    ) -> tuple[Tensor, Tensor | None, list[Tensor] | None]:
        """Rows `[B, S, D]` with the visual embeddings in place, their mask `[B, S]`, the levels."""
        args = {
            **dict_args,
            "input_ids": input_ids,
            "deepstack_image_embeds": deepstack_image_embeds,
            "deepstack_video_embeds": deepstack_video_embeds,
        }
        sources = given_sources(self.config, args)
        if not sources:
            return decoder_input, None, None
        rows = find_rows(self.config, input_ids, sources)
        dict_args.get(_FOUND, []).append(rows)
        # Each kind brings its embeddings along, so that these need no order.
        embeds_MD = joined([source[0] for source in sources.values()], decoder_input.dtype)
        hidden_TD = decoder_input.reshape([-1, decoder_input.shape[-1]])
        hidden_TD = paddle.scatter(hidden_TD, rows.by_kind, embeds_MD)
        # Of the rows every rank gets whole gradients, as the parent cuts the sequence afterwards.
        levels = [source[1:] for source in sources.values()]
        levels = in_reading_order(levels, rows, sequence_group(self), hidden_TD.dtype)
        return hidden_TD.reshape(decoder_input.shape), rows.mask, levels or None


class _PlacesImages:
    """Over a `GPTEmbedding` that merges within its `forward`: after that."""

    _has_visual_indices = True
    config: Any

    def forward(
        self,
        dict_args: dict[str, Any],
        decoder_input: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> dict[str, Any]:
        parent: Any = super()
        if _has_rows(dict_args, decoder_input):
            return parent.forward(dict_args, decoder_input, packed_seq_params)
        sources = given_sources(self.config, dict_args)
        if not sources:
            return parent.forward(dict_args, decoder_input, packed_seq_params)
        without = dict_args | dict.fromkeys(VISUAL_INPUTS)
        outputs = parent.forward(without, decoder_input, packed_seq_params)
        hidden, group = outputs["hidden_states"], sequence_group(self)
        _check_layout(hidden, dict_args["input_ids"], self.config.sequence_parallel, group)
        rows = find_rows(self.config, dict_args["input_ids"], sources)
        lists = _lists(rows, group)
        merged_MD, *levels = in_reading_order(list(sources.values()), rows, group, hidden.dtype)
        update = lists["visual_update_indices"]
        hidden_TD = paddle.scatter(
            hidden.reshape([-1, hidden.shape[-1]]),
            hidden_rows(self.config, update, hidden),
            local_rows(merged_MD, update, lists["visual_gather_indices"]),
        )
        visual = {
            "hidden_states": hidden_TD.reshape(hidden.shape),
            "visual_pos_masks": rows.mask,
        }
        return outputs | visual | lists | ({"deepstack_visual_emb": levels} if levels else {})


def hidden_rows(config: Any, update: Tensor, hidden: Tensor) -> Tensor:
    """Row in the flattened hidden states of each row in the local `[B, S / mp]` token rows."""
    if not config.sequence_parallel or hidden.ndim != 3 or hidden.shape[1] == 1:
        return update
    length, batch = hidden.shape[:2]
    return update % length * batch + update // length


def local_rows(whole: Tensor, update: Tensor, gather: Any) -> Tensor:
    """This rank's rows of embeddings in reading order; all of them are in order already."""
    return whole if whole.shape[0] == update.shape[0] else paddle.index_select(whole, gather)


def _has_rows(dict_args: dict[str, Any], decoder_input: Tensor | None) -> bool:
    """Whether the parent takes rows that it is given, in place of those that it would embed."""
    if decoder_input is None and dict_args.get("input_ids") is None:
        decoder_input = dict_args.get("decoder_input")
    return decoder_input is not None


def _lists(rows: VisualRows, group: Any) -> dict[str, Tensor]:
    """The index lists of this rank."""
    if group is None or group.nranks == 1:
        update = rows.in_order
        gather = paddle.arange(update.shape[0], dtype="int64")
    else:
        update, gather, _ = compute_visual_indices(
            rows.mask,
            None,
            nonzero=nonzero,
            part=RowPart(group.rank, group.nranks),
            layout="batch_slices",
        )
    return {"visual_update_indices": update, "visual_gather_indices": gather}


def _check_layout(hidden: Tensor, input_ids: Tensor, by_sequence: bool, group: Any) -> None:
    batch, length = input_ids.shape
    part = RowPart() if group is None else RowPart(group.rank, group.nranks)
    start, stop = part.bounds(length, of="tokens of a sample (padded length)")
    expected = [stop - start, batch] if by_sequence else [batch, length]
    if hidden.ndim != 3 or hidden.shape[:2] != expected:
        raise ValueError(
            f"GPTEmbedding gave hidden states {hidden.shape} for input_ids {input_ids.shape}; "
            f"expected {[*expected, 'D']} with sequence_parallel={by_sequence} and {part.size} "
            "tensor-parallel ranks: with images this release of PaddleFleet has neither "
            "multi-token prediction nor context parallelism"
        )
