"""Pipeline stages of a pi07 model, each a function of a batch.

A stage sends one flat tensor: rows of the prefix, rows of the suffix and the condition of the
suffix's norms, concatenated. Every rank has the batch, so positions and masks are not sent, and
sender and receiver know the size from the batch's shapes and optional fields; micro-batches may
differ in both.

Shapes: T rows of the prefix of width D and T' of the suffix of width E on this rank;
R = T * D + 2 * T' * E.
"""

from collections.abc import Mapping
from typing import Any

import paddle
from paddle import Tensor

from paddle_vl.families.pi07.decoder import Streams
from paddle_vl.families.pi07.layers import SharedConditions
from paddle_vl.families.pi07.policy_model import PolicyModel, as_tensors
from paddle_vl.families.pi07.prefix_layout import IMAGES, Presence, presence_of

# Entry of a batch whose images the tower has read already: its `ImageRows`.
IMAGE_ROWS = "image_rows"


class PI07Stage:
    """Consecutive decoder layers; the first stage also embeds, the last one computes the losses.

    Args:
        model: a model with these layers.
        layers: numbers of the layers.
    """

    def __init__(self, model: PolicyModel, layers: range):
        self.model, self.layers = model, layers
        self.is_first = layers.start == 0
        self.is_last = layers.stop == len(model.decoder.layers)

    def input_shape(self, batch: Mapping[str, Any]) -> tuple[int]:
        """(R,), the shape of the message that this stage receives, from the batch on the host."""
        return (sum(rows * width for rows, width in self._shapes(batch, _presence(batch))),)

    def __call__(
        self, batch: Mapping[str, Any], arrived_R: Tensor | None = None
    ) -> Tensor | dict[str, Any]:
        """`[R]` for the next stage; the losses on the last stage.

        Args:
            batch: of the collator; `presence`, if given, replaces the batch's own, and
                `IMAGE_ROWS`, a function, runs in place of the tower.
            arrived_R: result of the previous stage; None on the first.

        Raises:
            ValueError: noise, time or delay is missing: every stage would draw its own.
        """
        model, presence = self.model, _presence(batch)
        if missing := [name for name in model.drawn if batch.get(name) is None]:
            raise ValueError(
                f"the batch has no {', '.join(missing)}: a batch that goes through a pipeline "
                "needs them, as the first stage mixes the actions with the noise and the last one "
                "compares; the collator adds them"
            )
        image_rows = batch.get(IMAGE_ROWS)
        # Other stages need the masks of the images, not the images.
        unread = () if self.is_first and image_rows is None else IMAGES
        batch = {name: value for name, value in batch.items() if name != "presence"}
        batch |= as_tensors({name: batch[name] for name in batch if name not in unread})
        views = model.views(model.tokens.masks(batch, presence))
        if self.is_first:
            prefix = model.prefix(batch, presence, image_rows=image_rows)
            streams = model.decoder.enter(prefix.embs, *model.suffix_rows(batch))
        else:
            assert arrived_R is not None, "a later stage receives rows"
            shapes = self._shapes(batch, presence)
            pieces = paddle.split(arrived_R, [rows * width for rows, width in shapes])
            found = [x.reshape(list(shape)) for x, shape in zip(pieces, shapes, strict=True)]
            streams = Streams(*found, *[None] * (len(Streams._fields) - len(found)))
        streams, _ = model.decoder.run_layers(self.layers, streams, *views)
        if self.is_last:
            return model.losses(model.decoder.leave(streams, *views), batch)
        sent = [rows for rows in streams if not isinstance(rows, SharedConditions | None)]
        return paddle.concat([rows.reshape([-1]) for rows in sent])

    def _shapes(self, batch: Mapping[str, Any], presence: Presence) -> list[tuple[int, int]]:
        """(rows, width) of each tensor of `Streams` in a message: this rank's share."""
        ranks = self.model.placement.ops.row_part.size
        shapes = self.model.stream_shapes(batch, presence)
        return [(-(-rows // ranks), width) for rows, width in shapes]


def _presence(batch: Mapping[str, Any]) -> Presence:
    """The optional fields to lay out: the batch's `presence`, or those with content."""
    given = batch.get("presence")
    return presence_of(batch) if given is None else given
