"""Embedding: token rows with visual embeddings in place, and the inputs that all layers share.

Shapes: B batch, L padded length, T = B * L token rows (this rank's shard under sequence
parallelism), D width, H head width, M visual embeddings of the batch, M_local those of this rank's
token rows, G deepstack levels.

Source: Qwen3VLModel of HF transformers; inputs and outputs as PaddleFleet's GPTEmbedding.
"""

from collections.abc import Sequence
from typing import Any

import paddle
from paddle import Tensor, nn

from paddle_vl.batch.visual_inputs import EmbeddingSizes, visual_inputs
from paddle_vl.families.vlm.config import VLConfig
from paddle_vl.nn.operations import true_positions, zero_or_nan
from paddle_vl.nn.placement import Placement
from paddle_vl.nn.rotary import mrope_tables


def decoder_positions(config: VLConfig, dict_args: dict[str, Any]) -> dict[str, Any]:
    """The inputs that all decoder layers share, see `GPTEmbedding.forward`."""
    text, position_ids = config.text_config, dict_args["position_ids"]
    tables = mrope_tables(position_ids, text.head_dim, text.rope_theta, text.mrope_section)
    passed_on = ("attention_mask", "packed", "routed_rows")
    shared = {name: dict_args[name] for name in passed_on if dict_args.get(name) is not None}
    return {"position_ids": position_ids, "rotary_pos_emb": tables, **shared}


class GPTEmbedding(nn.Layer):
    """Embeds tokens, overwrites placeholders with visual embeddings, gathers the deepstack levels.

    The visual indices come from the batch or are computed here, once per step, without a host read;
    the rows of a shard are searched, as no shape tells their number.

    Attributes:
        num_levels: deepstack levels that a batch with visual tokens must have.
    """

    def __init__(self, config: VLConfig, placement: Placement):
        super().__init__()
        text = self.text = config.text_config
        self.config, self.placement = config, placement
        self.num_levels = len(config.vision_config.deepstack_visual_indexes)
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
            ValueError: an unknown input, inputs whose shapes or dtypes do not fit each other, or
                token rows that sequence parallelism does not divide. In the checked mode of
                `paddle_vl.batch.visual_index` also values: placeholders, mask, indices and
                embeddings that contradict each other. Elsewhere, where indices are computed, NaN
                hidden states say so.
        """
        ops, ids = self.placement.ops, (self.config.image_token_id, self.config.video_token_id)
        sizes = EmbeddingSizes(self.text.hidden_size, self.num_levels, ids, ops.row_part)
        visual = visual_inputs(dict_args, sizes, true_positions)
        outputs = decoder_positions(self.config, dict_args)
        rows = dict_args.get("decoder_input")
        rows = self.embed_tokens(dict_args["input_ids"]) if rows is None else rows
        hidden_TD = ops.enter_rows(rows.reshape([-1, rows.shape[-1]]))
        if visual is None:
            return outputs | {"hidden_states": hidden_TD}
        update = visual.indices.update
        if visual.rows:
            visual_MD = _in_order(visual.rows, visual.row_order, hidden_TD.dtype)
            hidden_TD = paddle.scatter(hidden_TD, update, visual_MD)
        if visual.counts:
            hidden_TD = hidden_TD + zero_or_nan(visual.counts).astype(hidden_TD.dtype)
        levels = [_in_order(x, visual.level_order, hidden_TD.dtype) for x in visual.levels]
        outputs |= {
            "hidden_states": hidden_TD,
            "deepstack_visual_emb": levels,
            "visual_update_indices": update,
            "visual_gather_indices": visual.indices.gather,
        }
        return outputs if visual.mask is None else outputs | {"visual_pos_masks": visual.mask}


def _in_order(sources: Sequence[Tensor], order: Tensor | None, dtype: Any) -> Tensor:
    """Rows of the concatenated sources in that order, all of them for None, in a dtype."""
    rows_MD = sources[0] if len(sources) == 1 else paddle.concat(list(sources), axis=0)
    rows_MD = rows_MD if order is None else paddle.index_select(rows_MD, order)
    return rows_MD if rows_MD.dtype == dtype else rows_MD.astype(dtype)
