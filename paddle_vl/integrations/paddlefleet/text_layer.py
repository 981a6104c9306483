"""Text layers of PaddleFleet that add their deepstack level at given rows.

Shapes: D width; M visual embeddings of the batch, M_local those in this rank's token rows; G
deepstack levels. Hidden states as in `embedding.py`.

Source of the interface: `transformer/transformer_layer.py` of PaddleFleet;
`Qwen3VLTextTransformerLayer` in `transformers/qwen3_vl/modeling_fleet.py` of PaddleFleet, before of
PaddleFormers; the dictionary of a layer crosses pipeline stages as `dict_to_tuple_helper` of
fleet's `meta_parallel` makes it a tuple.
"""

import functools
from collections.abc import Sequence
from typing import Any

import paddle
from paddle import Tensor

from paddle_vl.integrations.paddlefleet.embedding import hidden_rows, local_rows

# What text layers receive for deepstack and hide from their parent class.
DEEPSTACK_KEYS = (
    "deepstack_visual_emb",
    "visual_pos_masks",
    "visual_update_indices",
    "visual_gather_indices",
)


@functools.cache
def indexed_text_layer(parent: Any) -> type:
    """A text layer over `TransformerLayer` or a subclass of it, for `config.specific_layer`.

    Its name contains the parent's, by which PaddleFleet cuts the layers into pipeline stages.
    """
    if getattr(parent, "_adds_indexed_level", False):
        return parent

    class IndexedTextLayer(parent):
        """A text layer which adds its deepstack level at given rows.

        The parent never sees the deepstack entries, so its own search of the mask does not run.
        """

        _adds_indexed_level = True

        def forward(self, dict_args: dict[str, Any]) -> dict[str, Any]:
            """The parent's output plus this layer's level, in the visual rows.

            After the last level the deepstack entries are dropped; before, they are handed on: the
            list keeps its length and order, and levels that were added carry no gradient.

            Raises:
                ValueError: levels without `visual_update_indices`.
            """
            deepstack = {k: dict_args[k] for k in DEEPSTACK_KEYS if dict_args.get(k) is not None}
            text_args = {k: v for k, v in dict_args.items() if k not in DEEPSTACK_KEYS}
            outputs = super().forward(text_args)
            levels = deepstack.get("deepstack_visual_emb") or []
            number = self.layer_number - num_head_empty_layers(self.config)
            if number >= len(levels):
                return outputs
            hidden = _add_level(self.config, outputs["hidden_states"], levels[number], deepstack)
            outputs = outputs | {"hidden_states": hidden}
            if number + 1 == len(levels):
                return outputs
            return outputs | deepstack | {"deepstack_visual_emb": _handed_on(levels, number + 1)}

    IndexedTextLayer.__name__ = IndexedTextLayer.__qualname__ = f"Indexed{parent.__name__}"
    return IndexedTextLayer


def num_head_empty_layers(config: Any) -> int:
    return getattr(config, "num_empty_layers_add_in_head", 0) or 0


def _add_level(config: Any, hidden: Tensor, level: Tensor, deepstack: dict[str, Tensor]) -> Tensor:
    """The hidden states with a level in their visual rows: one indexed add."""
    update = deepstack.get("visual_update_indices")
    if update is None:
        raise ValueError(
            "the text layer got deepstack_visual_emb without visual_update_indices: the embedding "
            "is not IndexedGPTEmbedding; install(spec) replaces both"
        )
    gather = deepstack.get("visual_gather_indices")
    if gather is None and level.shape[0] != update.shape[0]:
        raise ValueError(
            f"a deepstack level has {level.shape[0]} rows for {update.shape[0]} places of this "
            "rank and there are no visual_gather_indices to choose them by: add them"
        )
    level = local_rows(level, update, gather)
    rows_M = hidden_rows(config, update, hidden)
    rows_TD = hidden.reshape([-1, hidden.shape[-1]])
    # Not scatter_nd_add, which fails on no rows; a rank without visual tokens adds as well, so that
    # its backward takes part in the sum over the ranks.
    return paddle.index_add(rows_TD, rows_M, 0, level.astype(hidden.dtype)).reshape(hidden.shape)


def _handed_on(levels: Sequence[Tensor], num_added: int) -> list[Tensor]:
    """The list for the next layer. Its places are the numbers of the levels, so none is taken out.

    A stage sends back a gradient for every entry that needs one, and fails where there is none:
    levels that were added must not need it.
    """
    return [level.detach() for level in levels[:num_added]] + list(levels[num_added:])
