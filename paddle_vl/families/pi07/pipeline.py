"""Consecutive layers of a pi07 model as one function of a batch, for a pipeline.

What travels from a part to the next is one tensor without dims: the rows of the prefix, those of
the suffix, and the condition of the suffix's norms, one behind the other. Positions and masks do
not travel: every process has the batch. So both ends of a message know its size beforehand, from
the shapes of the batch and which optional parts are laid out, and micro-batches may differ in both.

Shapes: T rows of the prefix and T' of the suffix of this rank, D and E wide; R = T D + 2 T' E.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import paddle
from paddle import Tensor

from paddle_vl.families.pi07.flow_matching import PI07LowLevelFlowMatching, as_tensors
from paddle_vl.families.pi07.interleaved import DecoderOutput, Streams, SuffixView
from paddle_vl.families.pi07.placed_model import PlacedModel
from paddle_vl.families.pi07.planner_model import PI07HighLevelPlannerModel
from paddle_vl.families.pi07.prefix_layout import Presence, presence_of
from paddle_vl.families.pi07.prefix_tokens import PrefixMasks

_IMAGES = ("videos", "images", "subgoal_images")
_DRAWN = ("noise", "time", "delay")


class PI07Stage(ABC):
    """Some of a model's layers; with the first the embeddings, with the last the losses.

    Args:
        model: one that holds these layers.
        layers: their numbers.
    """

    def __init__(self, model: PlacedModel, layers: range):
        self.model, self.layers = model, layers
        text = model.config.vlm_config.gemma3_config.text_config
        self.is_first = layers.start == 0
        self.is_last = layers.stop == text.num_hidden_layers
        self.width = text.hidden_size

    def input_shape(self, batch: Mapping[str, Any]) -> tuple[int]:
        """(R,) of what arrives, from the batch on the host alone."""
        shapes = self._shapes(batch, _presence(batch))
        return (sum(rows * width for rows, width in shapes),)

    def __call__(
        self, batch: Mapping[str, Any], arrived_R: Tensor | None = None
    ) -> Tensor | dict[str, Any]:
        """What the next part gets, `[R]`; of the last part the losses.

        Args:
            batch: as the collator makes it; with a `presence`, where that is not its own.
            arrived_R: what the part before returned; None for the first.
        """
        model, presence = self.model, _presence(batch)
        batch = {name: value for name, value in batch.items() if name != "presence"}
        # Of images a part that embeds none needs to know only that there are some.
        unread = () if self.is_first else _IMAGES
        batch |= as_tensors({name: batch[name] for name in batch if name not in unread})
        masks = model.tokens.masks(batch, presence)
        prefix_view, suffix_view = model.prefix_view(masks), self._suffix_view(masks)
        if self.is_first:
            streams = self._embedded(batch, presence)
        else:
            streams = self._unpacked(arrived_R, self._shapes(batch, presence))
        decoder = model.decoder
        streams, _ = decoder.run_layers(self.layers, streams, prefix_view, suffix_view)
        if self.is_last:
            return self._losses(decoder.leave(streams, prefix_view, suffix_view), batch)
        return paddle.concat([rows.reshape([-1]) for rows in streams if rows is not None])

    def _shapes(self, batch: Mapping[str, Any], presence: Presence) -> list[tuple[int, int]]:
        """Rows and widths of the streams, see `Streams`."""
        size, length = batch["lang_tokens"].shape[0], self.model.tokens.length(batch, presence)
        return [(self._num_rows(size * length), self.width)]

    def _num_rows(self, of_all: int) -> int:
        """This rank's rows of so many."""
        return -(-of_all // self.model.placement.ops.row_part.size)

    def _unpacked(self, arrived_R: Tensor, shapes: list[tuple[int, int]]) -> Streams:
        parts = paddle.split(arrived_R, [rows * width for rows, width in shapes])
        streams = [x.reshape(list(shape)) for x, shape in zip(parts, shapes, strict=True)]
        return Streams(*streams, *[None] * (len(Streams._fields) - len(streams)))

    def _suffix_view(self, masks: PrefixMasks) -> SuffixView | None:
        return None

    @abstractmethod
    def _embedded(self, batch: Mapping[str, Any], presence: Presence) -> Streams:
        """The rows in front of the first layer."""

    @abstractmethod
    def _losses(self, out: DecoderOutput, batch: Mapping[str, Any]) -> dict[str, Any]: ...


class PI07LowLevelStage(PI07Stage):
    """A part of the low-level policy's model: layers of both streams."""

    model: PI07LowLevelFlowMatching

    def __call__(
        self, batch: Mapping[str, Any], arrived_R: Tensor | None = None
    ) -> Tensor | dict[str, Any]:
        """See `PI07Stage`.

        Raises:
            ValueError: noise, time or delay are not given: every part would draw others.
        """
        if missing := [name for name in _DRAWN if batch.get(name) is None]:
            raise ValueError(
                f"the batch has no {', '.join(missing)}: a batch that goes through a pipeline "
                "needs them, as the first part mixes the actions with the noise and the last one "
                "compares; the collator adds them"
            )
        return super().__call__(batch, arrived_R)

    def _shapes(self, batch: Mapping[str, Any], presence: Presence) -> list[tuple[int, int]]:
        config = self.model.config
        steps = self._num_rows(batch["lang_tokens"].shape[0] * config.chunk_size)
        return [*super()._shapes(batch, presence), *[(steps, config.proj_width)] * 2]

    def _suffix_view(self, masks: PrefixMasks) -> SuffixView:
        return self.model.suffix_view(masks)

    def _embedded(self, batch: Mapping[str, Any], presence: Presence) -> Streams:
        model, noisy = self.model, self.model.noisy_actions(batch)
        rows, cond = model.suffix(noisy.x_t, noisy.time, batch.get("group_index"))
        return model.decoder.enter(model.prefix(batch, presence).embs, rows, cond)

    def _losses(self, out: DecoderOutput, batch: Mapping[str, Any]) -> dict[str, Any]:
        return self.model.losses(out, self.model.noisy_actions(batch), batch)


class PI07PlannerStage(PI07Stage):
    """A part of the planner: layers of the prefix alone."""

    model: PI07HighLevelPlannerModel

    def _embedded(self, batch: Mapping[str, Any], presence: Presence) -> Streams:
        return self.model.decoder.enter(self.model.prefix(batch, presence, training=True).embs)

    def _losses(self, out: DecoderOutput, batch: Mapping[str, Any]) -> dict[str, Any]:
        return self.model.losses(out, batch)


def _presence(batch: Mapping[str, Any]) -> Presence:
    """Which optional parts are laid out: those that the batch has, unless it says otherwise."""
    given = batch.get("presence")
    return presence_of(batch) if given is None else given
