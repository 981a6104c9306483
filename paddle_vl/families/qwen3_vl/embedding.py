"""Embedding: token rows with visual embeddings in place, and the inputs that all layers share.

Shapes: B batch, L padded length, T = B * L token rows (this rank's shard under sequence
parallelism), D width, H head width, M visual embeddings of the batch, M_local those of this rank's
token rows, G deepstack levels.

Source: Qwen3VLModel of HF transformers; inputs and outputs as PaddleFleet's GPTEmbedding.
"""

from typing import Any

import paddle
from paddle import Tensor, nn

from paddle_vl.batch.visual_index import (
    VisualIndices,
    check_visual_counts,
    compute_visual_indices,
)
from paddle_vl.families.qwen3_vl.config import Qwen3VLConfig
from paddle_vl.nn.attention import mrope_cos_sin
from paddle_vl.nn.placement import Placement


def decoder_positions(config: Qwen3VLConfig, dict_args: dict[str, Any]) -> dict[str, Any]:
    """The inputs that all decoder layers share, see `GPTEmbedding.forward`."""
    text = config.text_config
    position_ids = dict_args["position_ids"]
    cos_sin = mrope_cos_sin(position_ids, text.head_dim, text.rope_theta, text.mrope_section)
    outputs = {"position_ids": position_ids, "rotary_pos_emb": cos_sin}
    for name in ("attention_mask", "packed", "routed_rows"):
        if dict_args.get(name) is not None:
            outputs[name] = dict_args[name]
    return outputs


class GPTEmbedding(nn.Layer):
    """Embeds tokens, overwrites placeholders with visual embeddings, gathers the deepstack levels.

    The visual indices come from the batch or are computed here, once per step.
    """

    def __init__(self, config: Qwen3VLConfig, placement: Placement):
        super().__init__()
        self.config = config
        self.placement = placement
        text = config.text_config
        self.embed_tokens = placement.layers.vocab_embedding(
            text.vocab_size, text.hidden_size, text.initializer_range, config.tie_word_embeddings
        )

    def forward(self, dict_args: dict[str, Any]) -> dict[str, Any]:
        """Prepare the decoder's input.

        Args:
            dict_args: `input_ids` `[B, L]` int64; `position_ids` `[3, B, L]` int64; optionally
                `attention_mask`, `packed` and `routed_rows`, passed on;
                `image_embeds` / `video_embeds` `[M, D]`;
                `deepstack_image_embeds` / `deepstack_video_embeds`, lists of G `[M, D]`;
                `visual_update_indices`, `visual_gather_indices` and, with both modalities,
                `visual_source_indices` (see `paddle_vl.batch.visual_index`);
                `num_unused_visual_rows`, the number of embeddings that these indices leave out;
                `decoder_input` `[B, L, D]` or `[T, D]` instead of the embedded `input_ids`.

        Returns:
            `hidden_states` `[T, D]`; `position_ids`; `rotary_pos_emb`, cosine and sine `[B, L, H]`;
            what is passed on, if given; and, unless the batch is all text,
            `visual_pos_masks` `[B, L]` bool, `deepstack_visual_emb` (G tensors `[M_local, D]`),
            `visual_update_indices` and `visual_gather_indices` `[M_local]`.

        Raises:
            ValueError: placeholders and visual embeddings differ in number for a modality, or
                sequence parallelism does not divide the token rows.
        """
        outputs = decoder_positions(self.config, dict_args)
        outputs["hidden_states"] = self._token_rows(dict_args)
        indices, gather = self._visual_indices(dict_args)
        if indices is None:
            return outputs
        merged_MD = _in_one(dict_args.get("image_embeds"), dict_args.get("video_embeds"))
        levels = _levels_in_one(
            dict_args.get("deepstack_image_embeds"), dict_args.get("deepstack_video_embeds")
        )
        if gather is not None:
            merged_MD = paddle.index_select(merged_MD, gather)
            levels = [paddle.index_select(level, gather) for level in levels]
        hidden = outputs["hidden_states"]
        outputs["hidden_states"] = paddle.scatter(
            hidden, indices.update, merged_MD.astype(hidden.dtype)
        )
        if dict_args.get("input_ids") is not None:
            image_mask_BL, video_mask_BL = self._masks(dict_args["input_ids"])
            outputs["visual_pos_masks"] = image_mask_BL | video_mask_BL
        return outputs | {
            "deepstack_visual_emb": levels,
            "visual_update_indices": indices.update,
            "visual_gather_indices": indices.gather,
        }

    def _token_rows(self, dict_args: dict[str, Any]) -> Tensor:
        """This rank's token rows `[T, D]`, with the embeddings of placeholders."""
        hidden = dict_args.get("decoder_input")
        if hidden is None:
            hidden = self.embed_tokens(dict_args["input_ids"])
        hidden = hidden.reshape([-1, hidden.shape[-1]])
        part = self.placement.ops.row_part
        if part.size > 1:
            part.bounds(hidden.shape[0])
        return self.placement.ops.enter_rows(hidden)

    def _masks(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        return input_ids == self.config.image_token_id, input_ids == self.config.video_token_id

    def _visual_indices(
        self, dict_args: dict[str, Any]
    ) -> tuple[VisualIndices | None, Tensor | None]:
        """The visual indices, None for an all-text batch; and the row in `[images; videos]` of each
        local visual token, None for all rows in order.
        """
        image_embeds, video_embeds = dict_args.get("image_embeds"), dict_args.get("video_embeds")
        both = image_embeds is not None and video_embeds is not None
        update, gather, source = (
            dict_args.get(f"visual_{name}_indices") for name in ("update", "gather", "source")
        )
        carried = update is not None
        if carried:
            _check_carried(dict_args, self.placement.ops.row_part.size == 1)
        else:
            self._check_counts(dict_args, image_embeds, video_embeds)
        if image_embeds is None and video_embeds is None:
            return None, None
        if carried:
            indices = VisualIndices(update, gather, source if both else None)
        else:
            image_mask_BL, video_mask_BL = self._masks(dict_args["input_ids"])
            indices = compute_visual_indices(
                video_mask_BL if image_embeds is None else image_mask_BL,
                video_mask_BL if both else None,
                nonzero=_nonzero,
                part=self.placement.ops.row_part,
            )
        if indices.source is not None:
            return indices, paddle.index_select(indices.source, indices.gather)
        takes_all = not carried and self.placement.ops.row_part.size == 1
        return indices, None if takes_all else indices.gather

    def _check_counts(
        self, dict_args: dict[str, Any], image_embeds: Tensor | None, video_embeds: Tensor | None
    ) -> None:
        """Compare the numbers of placeholders and embeddings, except in a traced program."""
        if dict_args.get("input_ids") is None:
            if image_embeds is not None or video_embeds is not None:
                raise ValueError(
                    "decoder_input is given without input_ids and without visual_update_indices "
                    "and visual_gather_indices, so the places of the visual embeddings are "
                    "unknown: pass input_ids or the indices"
                )
        elif paddle.in_dynamic_mode():
            image_mask_BL, video_mask_BL = self._masks(dict_args["input_ids"])
            check_visual_counts(
                _nonzero(image_mask_BL.reshape([-1])).shape[0],
                _num_rows(image_embeds),
                _nonzero(video_mask_BL.reshape([-1])).shape[0],
                _num_rows(video_embeds),
            )


def _check_carried(dict_args: dict[str, Any], is_whole: bool) -> None:
    """Check the index tensors of a batch by their shapes.

    Args:
        is_whole: whether the indices cover all token rows, not a shard.

    Raises:
        ValueError: one of them is missing, or they do not fit the visual embeddings.
    """
    image_embeds, video_embeds = dict_args.get("image_embeds"), dict_args.get("video_embeds")
    update = dict_args["visual_update_indices"]
    if dict_args.get("visual_gather_indices") is None:
        raise ValueError(
            "the batch has visual_update_indices without visual_gather_indices: give both, or "
            "neither to have them computed"
        )
    if (
        image_embeds is not None
        and video_embeds is not None
        and dict_args.get("visual_source_indices") is None
    ):
        raise ValueError(
            "the batch has images and videos and visual indices without visual_source_indices, "
            "which give their order: add them (the collator does), or leave all indices out"
        )
    num_rows = _num_rows(image_embeds) + _num_rows(video_embeds)
    num_rows -= dict_args.get("num_unused_visual_rows", 0)
    if paddle.in_dynamic_mode() and is_whole and update.shape[0] != num_rows:
        raise ValueError(
            f"visual_update_indices has {update.shape[0]} token rows but the batch has {num_rows} "
            f"visual embeddings ({_num_rows(image_embeds)} image, {_num_rows(video_embeds)} "
            "video): the indices belong to another batch"
        )


def _num_rows(embeds: Tensor | None) -> int:
    return 0 if embeds is None else embeds.shape[0]


def _nonzero(mask: Tensor) -> Tensor:
    return paddle.nonzero(mask).reshape([-1])


def _in_one(image: Tensor | None, video: Tensor | None) -> Tensor:
    present = [embeds for embeds in (image, video) if embeds is not None]
    return present[0] if len(present) == 1 else paddle.concat(present, axis=0)


def _levels_in_one(image: list[Tensor] | None, video: list[Tensor] | None) -> list[Tensor]:
    if image and video:
        return [_in_one(image[g], video[g]) for g in range(len(image))]
    return list(image or video or [])
