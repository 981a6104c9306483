"""Videos and still images to tokens of the backbone: SigLIP tower, temporal attention, projector.

Every `stride`-th layer of the tower attends over past frames too; only the current, last frame of a
video is output.

Shapes: B videos of F frames, S still images, P = B * F + S frames in all, videos first; N patches
of a frame, U tower width, h heads, H head width; M tokens of an image, D backbone width.

Tensor parallelism of the tower divides the linears that a layer names in `column_blocks`
(output features) and `row_linears` (input features); a rank then has some of the heads.

Source: SiglipVisionModel and Gemma3MultiModalProjector of HF transformers; the temporal part is
OpenTau's SpaceTimeSiglip video encoder.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import Tensor, nn
from paddle.nn.initializer import Constant, Normal

from paddle_vl.families.pi07.config import Gemma3Config, SiglipVisionConfig
from paddle_vl.nn.attention import Segments, masked_attention
from paddle_vl.nn.attention_masks import HistoryMask
from paddle_vl.nn.linear import Linear
from paddle_vl.nn.operations import GemmaRMSNorm, LayerNorm, activation, slice_axis
from paddle_vl.nn.placement import Placement
from paddle_vl.nn.transfer import host_table, rows_in_order

# Shortest and longest period of the code of a frame's age, in frames.
_SHORTEST, _LONGEST = 4e-3, 40.0


class FrameHistory:
    """Frame layout, B and F, for the layers with temporal attention.

    Not a tuple, which Paddle's recompute searches for tensors.

    Args:
        code_FU: code of each frame's age, added before attention; zero for the current frame.
        mask: of B * N entries of F frames, the same at every patch of a video.
    """

    def __init__(self, shape: Sequence[int], num_stills: int, code_FU: Tensor, mask: HistoryMask):
        (self.num_videos, self.num_frames), self.mask = shape, mask
        code_stills = paddle.zeros([num_stills, code_FU.shape[1]], dtype=code_FU.dtype)
        code_videos = code_FU.unsqueeze(0).expand([self.num_videos, -1, -1]).flatten(0, 1)
        self.code_P1U = paddle.concat([code_videos, code_stills]).unsqueeze(1)

    @property
    def num_video_frames(self) -> int:
        """B * F, the number of leading frames that belong to videos."""
        return self.num_videos * self.num_frames


class SiglipTower(nn.Layer):
    """Patch embedding, learned positions, layers and the last norm."""

    def __init__(self, config: SiglipVisionConfig, stride: int):
        super().__init__()
        self.config = config
        # A convolution whose stride is its kernel is one matrix product over flattened patches.
        self.patch_embedding = Linear(3 * config.patch_size**2, config.hidden_size, True)
        self.position_embedding = _Positions(config)
        # Behind the last layer that attends over past frames, past frames reach no output.
        self.num_layers_with_past = config.num_hidden_layers // stride * stride
        self.layers = nn.LayerList(
            [
                SiglipLayer(config, looks_back=(i + 1) % stride == 0)
                for i in range(config.num_hidden_layers)
            ]
        )
        self.post_layernorm = LayerNorm(config.hidden_size, config.layer_norm_eps)

    def forward(self, pixels_PCHW: Tensor, history: FrameHistory | None = None) -> Tensor:
        """Rows `[B + S, N, U]` of frames with values in [-1, 1]; of the current frame of a video.

        Without a history `[P, N, U]`: all are independent images.
        """
        x_PNU = self.patch_embedding(self._patches(pixels_PCHW))
        x_PNU = self.position_embedding(x_PNU)
        for number, layer in enumerate(self.layers):
            if history is not None and number == self.num_layers_with_past:
                x_PNU, history = _current_frames(x_PNU, history), None
            x_PNU = layer(x_PNU, history)
        if history is not None:
            x_PNU = _current_frames(x_PNU, history)
        return self.post_layernorm(x_PNU)

    def _patches(self, pixels_PCHW: Tensor) -> Tensor:
        size, side = self.config.patch_size, self.config.grid_side
        patches = pixels_PCHW.reshape([-1, 3, side, size, side, size]).transpose([0, 2, 4, 1, 3, 5])
        patches = patches.reshape([-1, side * side, 3 * size * size])
        return patches.astype(self.patch_embedding.weight.dtype)


def _current_frames(x_PNU: Tensor, history: FrameHistory) -> Tensor:
    """Rows of the last frame of each video, and of all stills."""
    _, patches, width = x_PNU.shape
    frames = history.num_video_frames
    videos, stills = slice_axis(x_PNU, 0, frames), slice_axis(x_PNU, frames, x_PNU.shape[0])
    x_BFNU = videos.reshape([-1, history.num_frames, patches, width])
    return paddle.concat([x_BFNU[:, -1], stills])


class _Positions(nn.Layer):
    def __init__(self, config: SiglipVisionConfig):
        super().__init__()
        self.weight = self.create_parameter(
            [config.num_patches, config.hidden_size],
            default_initializer=Normal(std=config.hidden_size**-0.5),
        )

    def forward(self, x_PNU: Tensor) -> Tensor:
        return x_PNU + self.weight


class SiglipLayer(nn.Layer):
    """`x + attention(norm(x))`, then `x + mlp(norm(x))`; the unit of recomputation and sharding."""

    def __init__(self, config: SiglipVisionConfig, looks_back: bool):
        super().__init__()
        self.looks_back = looks_back
        self.layer_norm1 = LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.self_attn = SiglipAttention(config)
        self.layer_norm2 = LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.mlp = SiglipMLP(config)

    def forward(self, x_PNU: Tensor, history: FrameHistory | None = None) -> Tensor:
        history = history if self.looks_back else None
        aged_PNU = x_PNU if history is None else x_PNU + history.code_P1U.astype(x_PNU.dtype)
        x_PNU = x_PNU + self.self_attn(self.layer_norm1(aged_PNU), history)
        return x_PNU + self.mlp(self.layer_norm2(x_PNU))


class SiglipAttention(nn.Layer):
    """Attention over the patches of a frame.

    With a history, each patch of a video first attends over the same patch in the frames up to its
    own; the result replaces its value. Both attentions use the same queries and keys.
    """

    column_blocks: ClassVar[dict[str, int]] = {"q_proj": 1, "k_proj": 1, "v_proj": 1}
    row_linears: ClassVar[tuple[str, ...]] = ("out_proj",)

    def __init__(self, config: SiglipVisionConfig):
        super().__init__()
        width = config.hidden_size
        self.head_dim = width // config.num_attention_heads
        self.q_proj = Linear(width, width, True)
        self.k_proj = Linear(width, width, True)
        self.v_proj = Linear(width, width, True)
        self.out_proj = Linear(width, width, True)

    def forward(self, x_PNU: Tensor, history: FrameHistory | None = None) -> Tensor:
        frames, patches, _ = x_PNU.shape
        q, k, v = self.q_proj(x_PNU), self.k_proj(x_PNU), self.v_proj(x_PNU)
        # A rank may have some of the heads.
        width = q.shape[-1]
        heads = [-1, width // self.head_dim, self.head_dim]
        q_QhH, k_QhH, v_QhH = q.reshape(heads), k.reshape(heads), v.reshape(heads)
        if history is not None:
            # Sliced and concatenated even without stills, for the same graph on all ranks.
            rows = history.num_video_frames * patches
            q, k, v = (slice_axis(x_QhH, 0, rows) for x_QhH in (q_QhH, k_QhH, v_QhH))
            videos = _attend_in_time(q, k, v, patches, history)
            v_QhH = paddle.concat([videos, slice_axis(v_QhH, rows, v_QhH.shape[0])])
        out = Segments([(frames, patches)]).attend(q_QhH, k_QhH, v_QhH)
        return self.out_proj(out.reshape([-1, patches, width]))


def _attend_in_time(
    q_QhH: Tensor, k_QhH: Tensor, v_QhH: Tensor, patches: int, history: FrameHistory
) -> Tensor:
    """Values `[Q, h, H]` of the patches of videos, Q = B * F * N, after temporal attention."""
    _, heads, width = q_QhH.shape
    videos, frames = history.num_videos, history.num_frames

    def by_patch(x_QhH: Tensor) -> Tensor:
        x = x_QhH.reshape([videos, frames, patches, heads * width]).transpose([0, 2, 1, 3])
        return x.reshape([-1, frames, heads, width])

    # "sdpa" gives zero for a frame that sees none; spatial attention uses it as a value.
    out = masked_attention(
        by_patch(q_QhH), by_patch(k_QhH), by_patch(v_QhH), history.mask, width**-0.5, "sdpa"
    )
    out = out.reshape([videos, patches, frames, heads * width]).transpose([0, 2, 1, 3])
    return out.reshape([-1, heads, width])


class SiglipMLP(nn.Layer):
    """`fc2(gelu(fc1(x)))` with the tanh form of GELU."""

    column_blocks: ClassVar[dict[str, int]] = {"fc1": 1}
    row_linears: ClassVar[tuple[str, ...]] = ("fc2",)

    def __init__(self, config: SiglipVisionConfig):
        super().__init__()
        self.fc1 = Linear(config.hidden_size, config.intermediate_size, True)
        self.fc2 = Linear(config.intermediate_size, config.hidden_size, True)
        self.act = activation("gelu_pytorch_tanh")

    def forward(self, x_PNU: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x_PNU)))


def frames_in_use(is_pad_BF: Tensor) -> Tensor:
    """The frames that are not padding, `[B, F]` bool; the last, current one never counts as it."""
    frames = is_pad_BF.shape[1]
    last = paddle.arange(frames) == frames - 1
    return paddle.logical_or(paddle.logical_not(is_pad_BF), last)


class MultiModalProjector(nn.Layer):
    """Norm of pooled rows, and a matrix that starts at zero."""

    def __init__(self, config: Gemma3Config):
        super().__init__()
        vision = config.vision_config
        self.mm_input_projection_weight = self.create_parameter(
            [vision.hidden_size, config.text_config.hidden_size],
            default_initializer=Constant(0.0),
        )
        self.mm_soft_emb_norm = GemmaRMSNorm(vision.hidden_size, vision.layer_norm_eps)

    def forward(self, rows_BMU: Tensor) -> Tensor:
        """`[B, M, U]` pooled rows to `[B, M, D]` tokens."""
        return paddle.matmul(self.mm_soft_emb_norm(rows_BMU), self.mm_input_projection_weight)


def pooled(x_BNU: Tensor, side: int, window: int) -> Tensor:
    """`[B, N, U]` patch rows to `[B, M, U]`: means over square windows, in row-major order.

    Apart from the projector: ranks that divide the tower's work exchange pooled rows.
    """
    width, num_tokens = x_BNU.shape[-1], (side // window) ** 2
    grid = x_BNU.transpose([0, 2, 1]).reshape([-1, width, side, side])
    means = F.avg_pool2d(grid, window, window)
    return means.reshape([-1, width, num_tokens]).transpose([0, 2, 1])


def frame_codes(num_frames: int, width: int) -> np.ndarray:
    """Code of the age of each frame, float64 `[F, U]`; that of the last, current frame is zero.

    Frame i has age i - (F - 1), in frames. The code is sine and cosine of `2 pi age / period`, with
    periods geometric from 0.004 to 40 frames, minus the code of age 0.
    """
    if num_frames - 1 > _LONGEST:
        raise ValueError(
            f"{num_frames} frames reach further back than {_LONGEST:g} frames, the longest period "
            "of the code of their age: lower n_obs_steps"
        )
    age_F1 = np.arange(num_frames, dtype=np.float64)[:, None] - (num_frames - 1)
    period = _SHORTEST * (_LONGEST / _SHORTEST) ** np.linspace(0.0, 1.0, width // 2)
    angle = 2 * np.pi * age_F1 / period
    codes = np.concatenate([np.sin(angle), np.cos(angle)], axis=1)
    return codes - codes[-1:]


_code_table = host_table(frame_codes)


class VideoEncoder(nn.Layer):
    """Tower and projector; on a pipeline stage without embeddings the tower alone.

    Args:
        max_num_frames: most frames of a video, `n_obs_steps`.
        stride: every `stride`-th layer of the tower attends over past frames.
    """

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
        self.window = config.vision_config.grid_side // round(config.mm_tokens_per_image**0.5)
        self.projector: Any = (
            MultiModalProjector(config) if placement.stage_layers.embedding else None
        )
        self.num_tokens = config.mm_tokens_per_image

    def forward(
        self,
        video_BFCHW: Tensor | None,
        is_pad_BF: Tensor | None = None,
        stills_SCHW: Tensor | None = None,
    ) -> Tensor:
        """Tokens `[B + S, M, D]` of the videos' current frames, then of the stills.

        All in one pass, so that every layer runs once for any data.

        Args:
            video_BFCHW: values in [0, 1]; a single frame needs no temporal attention.
            is_pad_BF: bool; None: all frames but the current one are padding.
            stills_SCHW: values in [-1, 1].
        """
        side = self.tower.config.image_size
        for images in (video_BFCHW, stills_SCHW):
            if images is not None and list(images.shape[-3:]) != [3, side, side]:
                raise ValueError(
                    f"frames are {list(images.shape[-3:])}; the tower takes {[3, side, side]} "
                    "(vision_config.image_size)"
                )
        videos, frames = (0, 0) if video_BFCHW is None else video_BFCHW.shape[:2]
        stills = 0 if stills_SCHW is None else stills_SCHW.shape[0]
        if frames > self.max_num_frames:
            raise ValueError(
                f"a video has {frames} frames; n_obs_steps allows {self.max_num_frames}"
            )
        if frames <= 1:
            is_pad_BF = None
        elif is_pad_BF is None:
            is_pad_BF = paddle.ones([videos, frames], dtype="bool")

        def encode(items: np.ndarray | None) -> Tensor:
            if items is None:
                return self.pooled_rows(video_BFCHW, is_pad_BF, stills_SCHW)
            own = items[items < videos]
            return self.pooled_rows(
                _chosen(video_BFCHW, own),
                _chosen(is_pad_BF, own),
                _chosen(stills_SCHW, items[items >= videos] - videos),
            )

        costs_I = np.array([frames] * videos + [1] * stills)
        rows_I = np.full(videos + stills, self.num_tokens)
        width = self.tower.config.hidden_size
        rows_MU = self.placement.ops.encode_items(encode, costs_I, rows_I, self.tower, width)
        return self.project(rows_MU)

    def project(self, rows_MU: Tensor) -> Tensor:
        """Tokens `[Z, M, D]` of Z images from the pooled rows of all of them."""
        width = self.tower.config.hidden_size
        return self.projector(rows_MU.reshape([-1, self.num_tokens, width]))

    def pooled_rows(
        self,
        video_BFCHW: Tensor | None,
        is_pad_BF: Tensor | None,
        stills_SCHW: Tensor | None,
    ) -> Tensor:
        """Pooled rows `[(B + S) * M, U]` of videos and stills; of a black image without any. Videos
        of one frame have no `is_pad_BF`, as they have no history."""
        vision, history, pixels = self.tower.config, None, []
        if video_BFCHW is not None:
            pixels.append(video_BFCHW.reshape([-1, *video_BFCHW.shape[2:]]) * 2.0 - 1.0)
        elif stills_SCHW is None:
            stills_SCHW = paddle.zeros([1, 3, vision.image_size, vision.image_size])
        if stills_SCHW is not None:
            pixels.append(stills_SCHW)
        if video_BFCHW is not None and is_pad_BF is not None:
            # The codes depend on the frames up to the current one only.
            (videos, frames), width = video_BFCHW.shape[:2], vision.hidden_size
            codes_FU = _code_table(self.max_num_frames, width)[self.max_num_frames - frames :]
            codes_FU = codes_FU.astype(self.tower.patch_embedding.weight.dtype)
            stills = 0 if stills_SCHW is None else stills_SCHW.shape[0]
            mask = HistoryMask(frames_in_use(is_pad_BF), vision.num_patches)
            history = FrameHistory((videos, frames), stills, codes_FU, mask)
        rows_ZNU = self.tower(pixels[0] if len(pixels) == 1 else paddle.concat(pixels), history)
        rows_ZMU = pooled(rows_ZNU, vision.grid_side, self.window)
        return rows_ZMU.reshape([-1, rows_ZNU.shape[-1]])


def _chosen(x: Tensor | None, items: np.ndarray) -> Tensor | None:
    """The batch entries at `items`; None if there are none."""
    if x is None or not items.size:
        return None
    return rows_in_order(x, items)
