"""Pipeline stage of a model: consecutive layers as one function of a micro-batch.

A stage sends one tensor: the token rows, the rows of the deepstack levels that later layers add,
and, with the load-balancing loss, the routing sums so far. Every rank has the batch, so positions
and indices are not sent, and sender and receiver know the shape of a message.

Shapes: T token rows and M visual tokens of this rank, D width, E experts; R = T + M * (levels still
to add), plus the rows that hold `[2, E]` routing sums.
"""

import math
from collections.abc import Sequence
from typing import Any

import paddle
from paddle import Tensor

from paddle_vl.batch.schema import OF_PATCHES, VLBatch
from paddle_vl.families.vlm.modeling.layers import VisionFeatures, decoder_inputs
from paddle_vl.families.vlm.modeling.model import VLForConditionalGeneration, VLOutput
from paddle_vl.families.vlm.modeling.moe import LoadBalance
from paddle_vl.nn.transfer import on_device

# Assumed share of visual tokens in the cost of the vision tower.
VISUAL_SHARE = 0.5


def layer_costs(config: Any) -> tuple[list[float], float, float]:
    """Multiplications per token of every decoder layer, of the vision tower, and of the head.

    The tower encodes `merge^2` patches per visual token; `VISUAL_SHARE` of the tokens are visual.
    """
    text, vision = config.text_config, config.vision_config
    layers = [float(config.layer_size(layer)) for layer in range(text.num_hidden_layers)]
    block = 4 * vision.hidden_size**2 + 2 * vision.hidden_size * vision.intermediate_size
    tower = VISUAL_SHARE * vision.spatial_merge_size**2 * vision.depth * block
    return layers, float(tower), float(text.hidden_size * text.vocab_size)


class VLStage:
    """Some decoder layers of a model; the first stage also embeds, the last computes the loss.

    Args:
        model: a model that has these layers.
        layers: numbers of the layers.
    """

    def __init__(self, model: VLForConditionalGeneration, layers: range):
        self.model, self.layers = model, layers
        config = model.config
        self.is_first = layers.start == 0
        self.is_last = layers.stop == config.text_config.num_hidden_layers
        self.runs_tower = self.is_first
        self.num_levels = len(config.vision_config.deepstack_visual_indexes)
        # Shape of the routing sums in messages, if there is a load-balancing loss.
        text = config.text_config
        self.sends_sums = text.has_balance_loss(None)
        self.sums_shape = (2, getattr(text, "num_experts", 0))
        self.num_layers_before = sum(text.has_experts(i) for i in range(layers.start))
        self._dtype = model.parameters()[0].dtype

    def input_shape(self, batch: VLBatch) -> tuple[int, int]:
        """(R, D) of the message that this stage receives, from the shapes of the batch.

        Raises:
            ValueError: the batch has visual tokens without their indices.
        """
        return self._shape(self._num_token_rows(batch), _num_visual_rows(batch))

    def reserved_shape(self, batch: VLBatch, rows: Any) -> tuple[int, int]:
        """(R, D) of the message for the largest supported micro-batch.

        Args:
            rows: its `tokens` and `visual` token rows, over all model- and context-parallel ranks.

        Raises:
            ValueError: the batch is larger, or has visual tokens without their indices.
        """
        ops = self.model.placement.ops
        ranks = ops.row_part.size * ops.context.size
        tokens = -(-rows.tokens // ranks)
        if (found := self._num_token_rows(batch)) > tokens:
            raise ValueError(
                f"a micro-batch has {found * ranks} tokens with its padding, but the messages of "
                f"the pipeline have room for {rows.tokens} (parallel.pp_token_rows): set "
                f"parallel.pp_token_rows={found * ranks} or more, or use shorter or fewer samples"
            )
        if (found := _num_visual_rows(batch)) > rows.visual:
            raise ValueError(
                f"a micro-batch has {found} visual tokens, but the messages of the pipeline have "
                f"room for {rows.visual} (parallel.pp_visual_rows): set "
                f"parallel.pp_visual_rows={found} or more, or use fewer or smaller images"
            )
        return self._shape(tokens, min(rows.visual, tokens))

    def _num_token_rows(self, batch: VLBatch) -> int:
        return batch.input_ids.size // self.model.placement.ops.row_part.size

    def _shape(self, tokens: int, visual: int) -> tuple[int, int]:
        rows = tokens + len(self.travelling(self.layers.start)) * visual
        width = self.model.language_model.row_width(self.model.config.text_config)
        if self.sends_sums:
            rows += num_float32_rows(self.sums_shape, width, self._dtype)
        return rows, width

    def __call__(self, batch: VLBatch, rows_RD: Tensor | None = None) -> Tensor | VLOutput:
        """The message for the next stage `[R, D]`; for the last stage the output with losses.

        Args:
            rows_RD: output of the previous stage; None for the first.
        """
        model, batch, balance = self.model, self.on_device(batch), None
        if self.is_first:
            inputs = model.language_model.embedding(batch, self.features(batch))
        else:
            inputs = decoder_inputs(model.config, model.placement.ops, batch)
        if self.sends_sums:
            rows = inputs["routed_rows"]
            balance = LoadBalance(rows.num_real, model.placement.ops.sum_routing)
        if self.is_first:
            x_TD = inputs["hidden_states"]
            levels = dict(enumerate(inputs.get("deepstack_visual_emb", [])))
        else:
            assert rows_RD is not None, "a later stage needs the message of the previous one"
            x_TD, levels = self._unpack(rows_RD, _num_visual_rows(batch), balance)
            inputs["visual_update_indices"] = batch.visual_update_indices
        levels |= self.own_levels(batch)
        x_TD = model.language_model.run_layers(
            self.layers, x_TD, levels, inputs, batch.caches, balance
        )
        if self.is_last:
            return model.losses(model.language_model.norm(x_TD), batch, balance)
        left = [levels[g] for g in self.travelling(self.layers.stop) if g in levels]
        if balance is not None:
            sums_2E = balance.sums_2E
            if sums_2E is None:
                sums_2E = paddle.zeros(self.sums_shape)
            left.append(float32_to_rows(sums_2E, x_TD.shape[1], x_TD.dtype))
        return paddle.concat([x_TD, *left]) if left else x_TD

    def on_device(self, batch: VLBatch) -> VLBatch:
        """What this stage needs of a batch, on the device."""
        unread = () if self.runs_tower else OF_PATCHES
        if not self.is_last:
            unread += ("target_rows", "target_weights", "target_sources")
        return on_device(batch | dict.fromkeys(unread))

    def own_levels(self, batch: VLBatch) -> dict[int, Tensor]:
        """This rank's rows of deepstack levels that come with the batch itself, by level."""
        return {}

    def features(self, batch: VLBatch) -> VisionFeatures | None:
        """Of the tower, for the embedding."""
        return self.model.encode_visual(batch)

    def _unpack(
        self, rows_RD: Tensor, num_visual: int, balance: LoadBalance | None
    ) -> tuple[Tensor, dict[int, Tensor]]:
        travelling = self.travelling(self.layers.start) if num_visual else range(0)
        sizes = [num_visual] * len(travelling)
        if balance is not None:
            sizes.append(num_float32_rows(self.sums_shape, rows_RD.shape[1], rows_RD.dtype))
        if not sizes:
            return rows_RD, {}
        x_TD, *others = paddle.split(rows_RD, [rows_RD.shape[0] - sum(sizes), *sizes])
        if balance is not None:
            balance.sums_2E = float32_from_rows(others.pop(), self.sums_shape)
            balance.num_layers = self.num_layers_before
        return x_TD, dict(zip(travelling, others, strict=True))

    def travelling(self, layer: int) -> range:
        """Deepstack levels in the message before that layer; level g is added after layer g."""
        return range(min(layer, self.num_levels), self.num_levels)


def _num_visual_rows(batch: VLBatch) -> int:
    indices = batch.visual_update_indices
    if indices is None and batch.image_grid_thw is not None:
        raise ValueError(
            "a batch with visual tokens needs visual_update_indices and visual_gather_indices in a "
            "pipeline, to know the shape of messages: the collator adds them"
        )
    return 0 if indices is None else indices.shape[0]


# A stage sends one tensor of one dtype. A bfloat16 has a third of a float32's significant bits: a
# float32 is the sum of three, each the rounded remainder of those before it. Gradients come
# back in the dtype of the rows.


def num_float32_rows(shape: Sequence[int], width: int, dtype: paddle.dtype) -> int:
    """Number of rows of `width` that values of this shape take."""
    return -(-math.prod(shape) * _num_pieces(dtype) // width)


def float32_to_rows(values: Tensor, width: int, dtype: paddle.dtype) -> Tensor:
    """Float32 values of any shape as rows `[num_float32_rows, width]` of `dtype`."""
    pieces, left = [], values.reshape([-1])
    for _ in range(_num_pieces(dtype)):
        pieces.append(left.astype(dtype))
        left = left - pieces[-1].astype("float32")
    rows = num_float32_rows(values.shape, width, dtype)
    missing = rows * width - len(pieces) * values.size
    if missing:
        pieces.append(paddle.zeros([missing], dtype=dtype))
    return paddle.concat(pieces).reshape([rows, width])


def float32_from_rows(rows: Tensor, shape: Sequence[int]) -> Tensor:
    """The inverse of `float32_to_rows`, for values of this shape."""
    size = math.prod(shape)
    flat, count = rows.reshape([-1]), _num_pieces(rows.dtype)
    pieces = [flat[i * size : (i + 1) * size].astype("float32") for i in range(count)]
    return sum(pieces[1:], pieces[0]).reshape(shape)


def _num_pieces(dtype: paddle.dtype) -> int:
    return 1 if dtype == paddle.float32 else 3
