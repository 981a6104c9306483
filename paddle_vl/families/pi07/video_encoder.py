"""Videos and still images to tokens of the backbone.

Shapes: B videos, T frames, the current one last; S still images; N patches, U tower width; M tokens
of a camera, D backbone width.
"""

import numpy as np
import paddle
from paddle import Tensor, nn

from paddle_vl.families.pi07.engine_config import Gemma3Config
from paddle_vl.families.pi07.projector import MultiModalProjector
from paddle_vl.families.pi07.siglip import FrameHistory, SiglipTower, visible_frames
from paddle_vl.nn.attention import AttentionMask
from paddle_vl.nn.placement import Placement

_SHORTEST, _LONGEST = 4e-3, 40.0


def frame_codes(num_frames: int, width: int) -> np.ndarray:
    """What tells the age of each frame, the current one last: float64 `[T, U]`.

    Frame i has age i - (T - 1), in frames; sine and cosine of `2 pi age / period`, the periods
    geometric from 0.004 to 40, less the current frame's own, so that this one's code is zero.

    Raises:
        ValueError: ages beyond the longest period.
    """
    if num_frames - 1 > _LONGEST:
        raise ValueError(
            f"{num_frames} frames reach further back than {_LONGEST:g} frames, the longest period "
            "of the code of their age: lower n_obs_steps"
        )
    age_T1 = np.arange(num_frames, dtype=np.float64)[:, None] - (num_frames - 1)
    period = _SHORTEST * (_LONGEST / _SHORTEST) ** np.linspace(0.0, 1.0, width // 2)
    angle = 2 * np.pi * age_T1 / period
    codes = np.concatenate([np.sin(angle), np.cos(angle)], axis=1)
    return codes - codes[-1:]


class VideoEncoder(nn.Layer):
    """Tower and projector; the tower's layers at every `stride` look back in time."""

    def __init__(
        self,
        config: Gemma3Config,
        max_num_frames: int,
        stride: int,
        placement: Placement,
    ):
        super().__init__()
        self.max_num_frames, self.placement = max_num_frames, placement
        self.tower = placement.layers.tower(SiglipTower(config.vision_config, stride))
        self.projector = MultiModalProjector(config)
        self.num_tokens = config.mm_tokens_per_image

    def forward(
        self,
        video_BTCHW: Tensor | None,
        is_pad_BT: Tensor | None = None,
        stills_SCHW: Tensor | None = None,
    ) -> Tensor:
        """Tokens of the current frames, which have seen the others, and of stills behind them.

        All in one pass, so that every layer is called once, whatever the data.

        Args:
            video_BTCHW: values in [0, 1]; with one frame the temporal part has nothing to do.
            is_pad_BT: bool; None takes all but the current frame for padded.
            stills_SCHW: values in [-1, 1].

        Returns:
            `[B + S, M, D]`.

        Raises:
            ValueError: more frames than `n_obs_steps`.
        """
        videos, frames = (0, 0) if video_BTCHW is None else video_BTCHW.shape[:2]
        stills = 0 if stills_SCHW is None else stills_SCHW.shape[0]
        if frames > self.max_num_frames:
            raise ValueError(
                f"a video has {frames} frames; n_obs_steps allows {self.max_num_frames}"
            )

        def encode(items: np.ndarray | None) -> Tensor:
            if items is None:
                return self._pooled_rows(video_BTCHW, is_pad_BT, stills_SCHW)
            own = items[items < videos]
            return self._pooled_rows(
                _chosen(video_BTCHW, own),
                _chosen(is_pad_BT, own),
                _chosen(stills_SCHW, items[items >= videos] - videos),
            )

        costs_I = np.array([frames] * videos + [1] * stills)
        rows_I = np.full(videos + stills, self.num_tokens)
        width = self.tower.config.hidden_size
        rows_MU = self.placement.ops.encode_items(encode, costs_I, rows_I, self.tower, width)
        return self.projector(rows_MU.reshape([-1, self.num_tokens, width]))

    def embed_image(self, images_SCHW: Tensor) -> Tensor:
        """Tokens of images that stand alone, values in [-1, 1]: `[S, M, D]`."""
        return self(None, stills_SCHW=images_SCHW)

    def _pooled_rows(
        self,
        video_BTCHW: Tensor | None,
        is_pad_BT: Tensor | None,
        stills_SCHW: Tensor | None,
    ) -> Tensor:
        """What the tower makes of videos and stills, `[(B + S) * M, U]`; of a black still, if there
        are neither."""
        pixels, history, num_stills = [], None, 0
        if video_BTCHW is None and stills_SCHW is None:
            side = self.tower.config.image_size
            stills_SCHW = paddle.zeros([1, 3, side, side])
        if stills_SCHW is not None:
            num_stills = stills_SCHW.shape[0]
            pixels = [stills_SCHW]
        if video_BTCHW is not None:
            videos, frames = video_BTCHW.shape[:2]
            unit = video_BTCHW.reshape([videos * frames, *video_BTCHW.shape[2:]])
            pixels = [unit * 2.0 - 1.0, *pixels]
            history = None if frames == 1 else self._history(videos, frames, is_pad_BT, num_stills)
        rows_ZNU = self.tower(pixels[0] if len(pixels) == 1 else paddle.concat(pixels), history)
        return self.projector.pooled(rows_ZNU).reshape([-1, rows_ZNU.shape[-1]])

    def _history(
        self, batch: int, frames: int, is_pad_BT: Tensor | None, num_stills: int
    ) -> FrameHistory:
        vision = self.tower.config
        if is_pad_BT is None:
            is_pad_BT = paddle.ones([batch, frames], dtype="bool")
        visible_B1TT = visible_frames(is_pad_BT).unsqueeze(1)
        per_patch = visible_B1TT.expand([batch, vision.num_patches, frames, frames])
        dtype = self.tower.patch_embedding.weight.dtype
        code = paddle.to_tensor(frame_codes(frames, vision.hidden_size)).astype(dtype)
        mask = AttentionMask(per_patch.reshape([-1, frames, frames]))
        return FrameHistory(batch, frames, code, mask, num_stills)


def _chosen(x: Tensor | None, items: np.ndarray) -> Tensor | None:
    """Some of a batch's entries; None of none."""
    if x is None or not items.size:
        return None
    return paddle.index_select(x, paddle.to_tensor(items))
