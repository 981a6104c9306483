"""Pipeline stages of a pi07 model, each a function of a batch; and what the colocated schedule
needs of it: its tower with images as items, and its batches.

A stage sends one flat tensor: rows of the prefix, rows of the suffix and the condition of the
suffix's norms, concatenated. Every rank has the batch, so positions and masks are not sent, and
sender and receiver know the size from the batch's shapes and optional fields; micro-batches may
differ in both.

An item (see `ItemEncoder` of `paddle_vl.parallel.colocated.encoder`) is the video of a camera, or
the goal image of one. Images that are masked, of missing cameras and dropped goals, are no items:
no token sees theirs. A video without real past frames is encoded as its current frame alone, which
is the same: attention over one frame gives its value. Rows are the tower's, pooled: they are
narrower than the projector's, which stays on the first stage with the look-ups and small products
that embed texts, states and actions.

Shapes: T rows of the prefix of width D and T' of the suffix of width E on this rank;
R = T * D + 2 * T' * E. B batch, c cameras, F frames, I items, M rows of an image, U the tower's
width, Z = c * B images of a source, camera by camera.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle
from paddle import Tensor, nn

from paddle_vl.batch.schema import OTHER_LANES
from paddle_vl.families.pi07.config import PI07Config
from paddle_vl.families.pi07.decoder import SharedConditions, Streams
from paddle_vl.families.pi07.flow import PolicyModel, as_tensors
from paddle_vl.families.pi07.objective import PolicyBatchAdapter
from paddle_vl.families.pi07.prefix import CAMERA_MASKS, IMAGES, presence_of
from paddle_vl.families.policy.model_inputs import PromptBatch
from paddle_vl.nn.transfer import device_tensor

# Entry of a batch whose images the tower has read already: its `ImageRows`.
IMAGE_ROWS = "image_rows"
# Fields that stay on the host: images, and what tells which of them are items.
ON_HOST = (*IMAGES, *CAMERA_MASKS.values(), "obs_history_is_pad")


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
        shapes = self._shapes(batch, self.model.tokens.length(batch, presence_of(batch)))
        return (sum(rows * width for rows, width in shapes),)

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
        model, presence = self.model, presence_of(batch)
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
        if self.is_first or self.is_last:
            batch = model.with_draws(batch)
        if self.is_first:
            prefix = model.prefix(batch, presence, image_rows=image_rows)
            streams = model.decoder.enter(prefix.embs, *model.suffix_rows(batch))
        else:
            assert arrived_R is not None, "a later stage receives rows"
            prefix = model.tokens.masks(batch, presence)
            shapes = self._shapes(batch, prefix.pad_masks.shape[1])
            pieces = paddle.split(arrived_R, [rows * width for rows, width in shapes])
            found = [x.reshape(list(shape)) for x, shape in zip(pieces, shapes, strict=True)]
            streams = Streams(*found, *[None] * (len(Streams._fields) - len(found)))
        views = model.views(prefix)
        streams, _ = model.decoder.run_layers(self.layers, streams, *views)
        if self.is_last:
            return model.losses(model.decoder.leave(streams, *views), batch)
        sent = [rows for rows in streams if not isinstance(rows, SharedConditions | None)]
        return paddle.concat([rows.reshape([-1]) for rows in sent])

    def _shapes(self, batch: Mapping[str, Any], length: int) -> list[tuple[int, int]]:
        """(rows, width) of each tensor of `Streams` in a message: this rank's share.

        Args:
            length: L, of the prefix.
        """
        config, samples = self.model.config, batch["lang_tokens"].shape[0]
        text, ranks = config.vlm_config.gemma3_config.text_config, self.model.placement.ops.row_part
        shapes = [(samples * length, text.hidden_size)]
        if isinstance(config, PI07Config):
            shapes += [(samples * config.chunk_size, config.proj_width)] * 2
        return [(-(-rows // ranks.size), width) for rows, width in shapes]


@dataclass(frozen=True, eq=False)
class ImageItems:
    """The items of a batch, in the order of their rows: by source, camera and sample.

    Attributes:
        places: source, camera and sample of each item.
        frames: number of frames that the tower runs over, int64 `[I]`.
        item_of: for each source the item of each image, int64 `[Z]`; -1 for a masked image.
        is_pad: padded frames of videos, `[B, F]` bool.
    """

    places: list[tuple[str, int, int]]
    frames: np.ndarray
    item_of: dict[str, np.ndarray]
    is_pad: np.ndarray | None

    @classmethod
    def of(cls, batch: Mapping[str, Any]) -> "ImageItems":
        """From a batch of host arrays; an empty batch has no items."""
        places: list[tuple[str, int, int]] = []
        frames, item_of, is_pad_BF = [], {}, batch.get("obs_history_is_pad")
        for source, kind in IMAGES.items():
            masks = batch.get(CAMERA_MASKS[kind])
            if not masks:
                continue
            is_real_cB = np.stack([np.asarray(mask, dtype=bool) for mask in masks])
            own = np.argwhere(is_real_cB).tolist()
            numbers = np.full(is_real_cB.shape, -1, dtype=np.int64)
            numbers[is_real_cB] = len(places) + np.arange(len(own))
            item_of[source] = numbers.reshape(-1)
            places += [(source, camera, sample) for camera, sample in own]
            frames_B = np.ones(is_real_cB.shape[1], dtype=np.int64)
            if source == "videos" and is_pad_BF is not None:
                is_pad_BF = np.asarray(is_pad_BF, dtype=bool)
                frames_B[~is_pad_BF[:, :-1].all(axis=1)] = is_pad_BF.shape[1]
            frames += [frames_B[sample] for _, sample in own]
        return cls(places, np.array(frames, dtype=np.int64), item_of, is_pad_BF)


class PI07Encoder:
    """The tower of a model whose every rank has it."""

    # The prefix is whole on every mp rank, and its rows are divided behind it.
    splits_rows = False

    def __init__(self, model: PolicyModel):
        self.video_encoder = model.prefix.video_encoder
        self.section_widths = [self.video_encoder.tower.config.hidden_size]

    def parameters(self) -> list[Tensor]:
        """Of the tower."""
        return self.video_encoder.tower.parameters()

    def items(self, batch: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
        """Rows of each item, and its frames as its cost."""
        items = ImageItems.of(batch)
        return np.full(len(items.places), self.video_encoder.num_tokens), items.frames

    def has_items_anywhere(self, batch: Mapping[str, Any]) -> bool:
        """Always, as the tower of one device has gradients, if only zeros, in every step."""
        return True

    def encode(self, batches: Sequence[Mapping[str, Any]], own: Sequence[np.ndarray]) -> Tensor:
        """`[M, U]`: rows of the given items of each batch, in one forward pass of the tower."""
        # Pixels and places by kind, in the order in which the tower returns their rows.
        kinds: dict[str, list[np.ndarray]] = {"videos": [], "frames": [], "stills": []}
        places: dict[str, list[int]] = {kind: [] for kind in kinds}
        pads, number = [], 0
        for batch, chosen in zip(batches, own, strict=True):
            items = ImageItems.of(batch)
            for item in chosen.tolist():
                source, camera, sample = items.places[item]
                pixels, kind = np.asarray(batch[source][camera][sample]), "stills"
                if source == "videos" and items.frames[item] == 1:
                    # Frames of videos are in [0, 1], stills in [-1, 1].
                    pixels, kind = pixels[-1] * 2.0 - 1.0, "frames"
                elif source == "videos":
                    assert items.is_pad is not None, "else the past is padding"
                    kind = "videos"
                    pads.append(items.is_pad[sample])
                kinds[kind].append(pixels)
                places[kind].append(number)
                number += 1
        rows_MU = self.video_encoder.pooled_rows(
            _stacked(kinds["videos"]), _stacked(pads), _stacked(kinds["frames"] + kinds["stills"])
        )
        order = np.argsort([place for of_kind in places.values() for place in of_kind])
        if (order == np.arange(number)).all():
            return rows_MU
        rows_IMU = rows_MU.reshape([number, -1, rows_MU.shape[-1]])
        ordered = paddle.index_select(rows_IMU, device_tensor(order))
        return ordered.reshape([-1, rows_MU.shape[-1]])

    def sections_of(self, chunk: Any) -> set[int]:
        """The first stage uses the rows."""
        return {0} if chunk.is_first else set()

    def language_batch(
        self, batch: Mapping[str, Any], sections: Mapping[int, Tensor]
    ) -> dict[str, Any]:
        """The batch with the tower's rows; its images stay on the host, for their shapes."""
        rest = {name: value for name, value in batch.items() if name != OTHER_LANES}
        shape = [-1, self.video_encoder.num_tokens, self.section_widths[0]]
        dtype = self.video_encoder.tower.patch_embedding.weight.dtype
        rows = [sections[0].reshape(shape)] if sections else []
        # Of an image that is masked; the last one.
        rows_IMU = paddle.concat([*rows, paddle.zeros([1, *shape[1:]], dtype=dtype)])
        items = ImageItems.of(batch)

        def rows_of(sources: Sequence[str]) -> Tensor:
            items_Z = np.concatenate([items.item_of[source] for source in sources])
            numbers_Z = np.where(items_Z < 0, len(items.places), items_Z)
            rows_ZMU = paddle.index_select(rows_IMU, device_tensor(numbers_Z))
            return rows_ZMU.reshape([-1, rows_ZMU.shape[-1]])

        return {**rest, IMAGE_ROWS: rows_of}


def _stacked(arrays: Sequence[np.ndarray]) -> Tensor | None:
    return device_tensor(np.stack(arrays)) if arrays else None


class ColocatedBatchAdapter(PolicyBatchAdapter):
    """Batches whose images stay on the host: the encoder copies those that it encodes."""

    def idle_batch(self, model: nn.Layer) -> PromptBatch:
        # Without images: ranks of other data lanes know that this lane has ended, no more.
        idle = super().idle_batch(model)
        masks = {name: idle[name] for name in CAMERA_MASKS.values() if name in idle}
        nothing = {name: list(map(np.zeros_like, masks[name])) for name in masks}
        return self.as_prepared(idle | nothing)
