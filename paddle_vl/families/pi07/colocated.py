"""pi07's tower under the colocated schedule: videos and stills as items.

An `ItemEncoder` of `paddle_vl.parallel.colocated.encoder`. The items of a batch are its videos,
camera by camera, and then its goal images; the planner has stills only. An item has the pooled rows
of its image, which the first stage projects. Other encoders of the prefix (texts, states) are look-
ups and small products: they stay on the first stage.

Shapes: B batch, F frames, M rows of an item, U the tower's width.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import paddle
from paddle import Tensor

from paddle_vl.families.pi07.policy_model import PolicyModel
from paddle_vl.families.pi07.prefix import TOWER_ROWS
from paddle_vl.families.pi07.prefix_layout import presence_of


class Pictures(NamedTuple):
    """The tower's input of a batch.

    Attributes:
        videos: `[B, F, 3, H, W]` by camera.
        is_pad: `[B, F]` bool; None if all frames but the current one are padding.
        stills: `[B, 3, H, W]` each.
    """

    videos: Sequence[Any] = ()
    is_pad: Any = None
    stills: Sequence[Any] = ()

    @classmethod
    def of(cls, batch: Mapping[str, Any]) -> "Pictures":
        """Those that the prefix embeds; none of an empty batch."""
        if not batch:
            return cls()
        if "images" in batch:
            return cls(stills=batch["images"])
        presence = batch.get("presence")
        presence = presence_of(batch) if presence is None else presence
        goals = (batch.get("subgoal_images") or ()) if presence.subgoal else ()
        return cls(batch["videos"], batch.get("obs_history_is_pad"), goals)

    @property
    def num_frames(self) -> int:
        return self.videos[0].shape[1] if self.videos else 0

    @property
    def num_videos(self) -> int:
        return sum(video.shape[0] for video in self.videos)

    @property
    def num_stills(self) -> int:
        return sum(still.shape[0] for still in self.stills)

    def video(self, item: int) -> tuple[Any, Any]:
        """`[F, 3, H, W]` and its padding `[F]`."""
        camera, sample = divmod(item, self.videos[0].shape[0])
        if self.is_pad is None:
            return self.videos[camera][sample], np.ones([self.num_frames], dtype=bool)
        return self.videos[camera][sample], self.is_pad[sample]

    def still(self, item: int) -> Any:
        """`[3, H, W]`."""
        camera, sample = divmod(item, self.stills[0].shape[0])
        return self.stills[camera][sample]


class PI07Encoder:
    """The tower of a model whose every rank has it.

    Args:
        agrees_on_presence: see `PolicyBatchAdapter`.
    """

    # The prefix is whole on every mp rank, and cut into rows behind it.
    splits_rows = False

    def __init__(self, model: PolicyModel, agrees_on_presence: bool):
        assert model.prefix is not None, "every stage has the tower"
        self.video_encoder = model.prefix.video_encoder
        self.agrees_on_presence = agrees_on_presence
        self.section_widths = [self.video_encoder.tower.config.hidden_size]

    @property
    def is_known_early(self) -> bool:
        """Goal images are encoded if any rank has one, which ranks agree on before a step."""
        return not self.agrees_on_presence

    def parameters(self) -> list[Tensor]:
        """Of the tower."""
        return self.video_encoder.tower.parameters()

    def items(self, batch: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
        """Rows and relative costs of the items."""
        pictures = Pictures.of(batch)
        costs = [pictures.num_frames] * pictures.num_videos + [1] * pictures.num_stills
        rows = np.full(len(costs), self.video_encoder.num_tokens, dtype=np.int64)
        return rows, np.array(costs, dtype=np.int64)

    def has_items_anywhere(self, batch: Mapping[str, Any]) -> bool:
        """Every batch has images."""
        return True

    def in_lane(self, other: Mapping[str, Any], own: Mapping[str, Any]) -> Mapping[str, Any]:
        """Another data lane's batch as its ranks have it: with the presence agreed on."""
        if not other or not self.agrees_on_presence or "presence" not in own:
            return other
        return {**other, "presence": own["presence"]}

    def encode(self, batches: Sequence[Mapping[str, Any]], own: Sequence[np.ndarray]) -> Tensor:
        """`[M, U]`: rows of the given items of each batch, in one forward pass of the tower."""
        videos, pads, stills, is_video = [], [], [], []
        for batch, items in zip(batches, own, strict=True):
            pictures = Pictures.of(batch)
            for item in map(int, items):
                is_video.append(item < pictures.num_videos)
                if is_video[-1]:
                    video, pad = pictures.video(item)
                    videos.append(video)
                    pads.append(pad)
                else:
                    stills.append(pictures.still(item - pictures.num_videos))
        rows_MU = self.video_encoder.pooled_rows(_stacked(videos), _stacked(pads), _stacked(stills))
        # The tower returns videos first.
        kinds = np.array(is_video)
        place = np.where(kinds, kinds.cumsum() - 1, kinds.sum() + (~kinds).cumsum() - 1)
        if (np.diff(place) == 1).all():
            return rows_MU
        count = self.video_encoder.num_tokens
        rows = (place[:, None] * count + np.arange(count)).reshape(-1)
        return paddle.index_select(rows_MU, paddle.to_tensor(rows))

    def sections_of(self, chunk: Any) -> set[int]:
        """The first stage uses the rows."""
        return {0} if chunk.is_first else set()

    def language_batch(
        self, batch: Mapping[str, Any], sections: Mapping[int, Tensor]
    ) -> dict[str, Any]:
        """The batch with the tower's rows; its images stay for their shapes."""
        return {**batch, TOWER_ROWS: sections[0]} if sections else dict(batch)


def _stacked(arrays: Sequence[Any]) -> Any:
    """Arrays or tensors as one tensor; None for none."""
    if not arrays:
        return None
    if all(isinstance(array, np.ndarray) for array in arrays):
        return paddle.to_tensor(np.stack(arrays))
    return paddle.stack([paddle.to_tensor(array) for array in arrays])
