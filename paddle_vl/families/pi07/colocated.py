"""pi07 under the colocated schedule: its tower with images as items, and its batches.

An `ItemEncoder` of `paddle_vl.parallel.colocated.encoder`. An item is the video of a camera, or the
goal image of one. Images that are masked, of missing cameras and dropped goals, are no items: no
token sees theirs. A video without real past frames is encoded as its current frame alone, which is
the same: attention over one frame gives its value.

Rows are the tower's, pooled: they are narrower than the projector's, which stays on the first stage
with the look-ups and small products that embed texts, states and actions.

Shapes: B batch, c cameras, F frames, I items, M rows of an image, U the tower's width, Z = c * B
images of a source, camera by camera.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle
from paddle import Tensor, nn

from paddle_vl.batch.schema import Batch
from paddle_vl.families.pi07.objective import PolicyBatchAdapter
from paddle_vl.families.pi07.pipeline import IMAGE_ROWS
from paddle_vl.families.pi07.policy_model import PolicyModel
from paddle_vl.families.pi07.prefix_layout import CAMERA_MASKS, IMAGES

# Entry of a batch with its `ImageItems`, taken on the host before masks go to the device.
IMAGE_ITEMS = "image_items"
# The masks of each of `IMAGES`.
_MASKS = dict(zip(IMAGES, CAMERA_MASKS.values(), strict=True))


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
        for source, masks in _MASKS.items():
            if not batch.get(masks):
                continue
            is_real_cB = np.stack([np.asarray(mask, dtype=bool) for mask in batch[masks]])
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
        items = _items(batch)
        return np.full(len(items.places), self.video_encoder.num_tokens), items.frames

    def has_items_anywhere(self, batch: Mapping[str, Any]) -> bool:
        """Always, as the tower of one device has gradients, if only zeros, in every step."""
        return True

    def encode(self, batches: Sequence[Mapping[str, Any]], own: Sequence[np.ndarray]) -> Tensor:
        """`[M, U]`: rows of the given items of each batch, in one forward pass of the tower."""
        # Pixels by kind, in the order in which the tower returns their rows, and their places.
        videos, pads, frames, stills = [], [], [], []
        places: dict[str, list[int]] = {"videos": [], "frames": [], "stills": []}
        number = 0
        for batch, chosen in zip(batches, own, strict=True):
            items = _items(batch)
            for item in chosen.tolist():
                source, camera, sample = items.places[item]
                pixels = np.asarray(batch[source][camera][sample])
                if source != "videos":
                    stills.append(pixels)
                    places["stills"].append(number)
                elif items.frames[item] == 1:
                    frames.append(pixels[-1])
                    places["frames"].append(number)
                else:
                    assert items.is_pad is not None, "else the past is padding"
                    videos.append(pixels)
                    pads.append(items.is_pad[sample])
                    places["videos"].append(number)
                number += 1
        images = [_stacked(frames), _stacked(stills)]
        if images[0] is not None:
            # Frames of videos are in [0, 1], stills in [-1, 1].
            images[0] = images[0] * 2.0 - 1.0
        images = [image for image in images if image is not None]
        rows_MU = self.video_encoder.pooled_rows(
            _stacked(videos), _stacked(pads), paddle.concat(images) if images else None
        )
        order = np.argsort([place for of_kind in places.values() for place in of_kind])
        if (order == np.arange(number)).all():
            return rows_MU
        rows_IMU = rows_MU.reshape([number, -1, rows_MU.shape[-1]])
        ordered = paddle.index_select(rows_IMU, paddle.to_tensor(order))
        return ordered.reshape([-1, rows_MU.shape[-1]])

    def sections_of(self, chunk: Any) -> set[int]:
        """The first stage uses the rows."""
        return {0} if chunk.is_first else set()

    def language_batch(
        self, batch: Mapping[str, Any], sections: Mapping[int, Tensor]
    ) -> dict[str, Any]:
        """The batch with the tower's rows; its images stay on the host, for their shapes."""
        rest = {name: value for name, value in batch.items() if name != IMAGE_ITEMS}
        shape = [-1, self.video_encoder.num_tokens, self.section_widths[0]]
        dtype = self.video_encoder.tower.patch_embedding.weight.dtype
        rows = [sections[0].reshape(shape)] if sections else []
        # Of an image that is masked; the last one.
        rows_IMU = paddle.concat([*rows, paddle.zeros([1, *shape[1:]], dtype=dtype)])
        items = _items(batch)

        def rows_of(sources: Sequence[str]) -> Tensor:
            items_Z = np.concatenate([items.item_of[source] for source in sources])
            numbers_Z = np.where(items_Z < 0, len(items.places), items_Z)
            rows_ZMU = paddle.index_select(rows_IMU, paddle.to_tensor(numbers_Z))
            return rows_ZMU.reshape([-1, rows_ZMU.shape[-1]])

        return {**rest, IMAGE_ROWS: rows_of}


def _items(batch: Mapping[str, Any]) -> ImageItems:
    items = batch.get(IMAGE_ITEMS)
    return ImageItems.of(batch) if items is None else items


def _stacked(arrays: Sequence[np.ndarray]) -> Tensor | None:
    return paddle.to_tensor(np.stack(arrays)) if arrays else None


class ColocatedBatchAdapter(PolicyBatchAdapter):
    """Batches whose images stay on the host: the encoder copies those that it encodes."""

    def prepared(self, batch: Batch) -> Batch:
        return {**super().prepared(batch), IMAGE_ITEMS: ImageItems.of(batch)}

    def is_for_device(self, name: str) -> bool:
        return name not in IMAGES

    def idle_batch(self, model: nn.Layer) -> Batch:
        # Without images: ranks of other data lanes know that this lane has ended, no more.
        idle = super().idle_batch(model)
        masks = {name: idle[name] for name in CAMERA_MASKS.values() if name in idle}
        return {**idle, **{name: list(map(np.zeros_like, masks[name])) for name in masks}}
