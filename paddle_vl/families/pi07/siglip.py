"""The SigLIP tower: frames to patch rows, some layers also looking back in time.

Shapes: F frames, those of all videos, batch-major, and behind them S that stand alone; N patches of
a frame; U tower width; h heads; H head width; B videos of T frames each, F = B * T + S.

Source: SiglipVisionModel of HF transformers; the temporal part is OpenTau's.
"""

import paddle
from paddle import Tensor, nn
from paddle.nn.initializer import Normal

from paddle_vl.families.pi07.engine_config import SiglipVisionConfig
from paddle_vl.nn.attention import AttentionMask, masked_attention, segment_attention
from paddle_vl.nn.functional import activation, slice_axis
from paddle_vl.nn.linear import Linear
from paddle_vl.nn.norm import LayerNorm


class FrameHistory:
    """How the frames of videos follow each other: for the layers that look back in time.

    Not a tuple: Paddle would look for tensors in it.

    Args:
        num_videos, num_frames: B and T.
        code_TU: what tells a frame's age, added in front of attention; zero for the current frame.
        mask: `[B * N, T, T]`, which frames each frame sees, the same at every patch.
        num_stills: S.
    """

    def __init__(
        self,
        num_videos: int,
        num_frames: int,
        code_TU: Tensor,
        mask: AttentionMask,
        num_stills: int = 0,
    ):
        self.num_videos, self.num_frames = num_videos, num_frames
        self.mask = mask
        code_stills = paddle.zeros([num_stills, code_TU.shape[1]], dtype=code_TU.dtype)
        self.code_F1U = paddle.concat([code_TU] * num_videos + [code_stills]).unsqueeze(1)

    @property
    def num_video_frames(self) -> int:
        """The first so many frames are those of videos."""
        return self.num_videos * self.num_frames


class SiglipTower(nn.Layer):
    """Patch embedding, learned positions and layers."""

    def __init__(self, config: SiglipVisionConfig, stride: int):
        """
        Args:
            stride: every so many layers, the last of them looks back in time.
        """
        super().__init__()
        self.config = config
        # A convolution whose stride is its kernel is one matrix product over flattened patches.
        self.patch_embedding = Linear(3 * config.patch_size**2, config.hidden_size, True)
        self.position_embedding = _Positions(config)
        self.layers = nn.LayerList(
            [
                SiglipLayer(config, looks_back=(i + 1) % stride == 0)
                for i in range(config.num_hidden_layers)
            ]
        )
        self.post_layernorm = LayerNorm(config.hidden_size, config.layer_norm_eps)

    def forward(self, pixels_FCHW: Tensor, history: FrameHistory | None = None) -> Tensor:
        """Encode frames; of videos only the current ones, which are the last, come out.

        Args:
            pixels_FCHW: values in [-1, 1].
            history: None for images that have nothing to do with each other.

        Returns:
            `[B + S, N, U]`, or `[F, N, U]` without a history.

        Raises:
            ValueError: frames of another size than the tower's.
        """
        x_FNU = self.patch_embedding(self._patches(pixels_FCHW))
        x_FNU = self.position_embedding(x_FNU)
        for layer in self.layers:
            x_FNU = layer(x_FNU, history)
        if history is not None:
            _, patches, width = x_FNU.shape
            frames = history.num_video_frames
            videos, stills = slice_axis(x_FNU, 0, frames), slice_axis(x_FNU, frames, x_FNU.shape[0])
            x_BTNU = videos.reshape([history.num_videos, history.num_frames, patches, width])
            x_FNU = paddle.concat([x_BTNU[:, -1], stills])
        return self.post_layernorm(x_FNU)

    def _patches(self, pixels_FCHW: Tensor) -> Tensor:
        frames, size, side = pixels_FCHW.shape[0], self.config.patch_size, self.config.grid_side
        wanted = [3, side * size, side * size]
        if list(pixels_FCHW.shape[1:]) != wanted:
            raise ValueError(
                f"frames are {list(pixels_FCHW.shape[1:])}; the tower takes {wanted} "
                "(vision_config.image_size)"
            )
        patches = pixels_FCHW.reshape([frames, 3, side, size, side, size])
        patches = patches.transpose([0, 2, 4, 1, 3, 5]).reshape([frames, side * side, -1])
        return patches.astype(self.patch_embedding.weight.dtype)


class _Positions(nn.Layer):
    def __init__(self, config: SiglipVisionConfig):
        super().__init__()
        self.weight = self.create_parameter(
            [config.num_patches, config.hidden_size],
            default_initializer=Normal(std=config.hidden_size**-0.5),
        )

    def forward(self, x_FNU: Tensor) -> Tensor:
        return x_FNU + self.weight


class SiglipLayer(nn.Layer):
    """`x + attention(norm(x))`, then `x + mlp(norm(x))`; a unit for recomputation and sharding.

    Args:
        looks_back: whether it uses a history that it is given.
    """

    def __init__(self, config: SiglipVisionConfig, looks_back: bool):
        super().__init__()
        self.looks_back = looks_back
        self.layer_norm1 = LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.self_attn = SiglipAttention(config)
        self.layer_norm2 = LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.mlp = SiglipMLP(config)

    def forward(self, x_FNU: Tensor, history: FrameHistory | None = None) -> Tensor:
        history = history if self.looks_back else None
        aged_FNU = x_FNU if history is None else x_FNU + history.code_F1U.astype(x_FNU.dtype)
        x_FNU = x_FNU + self.self_attn(self.layer_norm1(aged_FNU), history)
        return x_FNU + self.mlp(self.layer_norm2(x_FNU))


class SiglipAttention(nn.Layer):
    """Attention over the patches of a frame.

    With a history the values of videos are first those that each patch finds at its own place in
    the frames up to its own, by attention with the same queries and keys.
    """

    def __init__(self, config: SiglipVisionConfig):
        super().__init__()
        width = config.hidden_size
        self.head_dim = width // config.num_attention_heads
        self.q_proj = Linear(width, width, True)
        self.k_proj = Linear(width, width, True)
        self.v_proj = Linear(width, width, True)
        self.out_proj = Linear(width, width, True)

    def forward(self, x_FNU: Tensor, history: FrameHistory | None = None) -> Tensor:
        frames, patches, width = x_FNU.shape
        rows = [frames * patches, -1, self.head_dim]
        q_PhH, k_PhH, v_PhH = (
            project(x_FNU).reshape(rows) for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        if history is not None:
            # Cut and joined even where nothing stands alone: one graph on all ranks.
            rows = history.num_video_frames * patches
            videos = _attend_in_time(
                *(slice_axis(x_PhH, 0, rows) for x_PhH in (q_PhH, k_PhH, v_PhH)), patches, history
            )
            v_PhH = paddle.concat([videos, slice_axis(v_PhH, rows, v_PhH.shape[0])])
        out = segment_attention(q_PhH, k_PhH, v_PhH, ((frames, patches),))
        return self.out_proj(out.reshape([frames, patches, width]))


def _attend_in_time(
    q_PhH: Tensor, k_PhH: Tensor, v_PhH: Tensor, patches: int, history: FrameHistory
) -> Tensor:
    rows, heads, width = q_PhH.shape
    videos, frames = history.num_videos, history.num_frames

    def by_patch(x_PhH: Tensor) -> Tensor:
        x = x_PhH.reshape([videos, frames, patches, heads * width]).transpose([0, 2, 1, 3])
        return x.reshape([videos * patches, frames, heads, width])

    # A frame that sees none must give zero: it is a value of the attention that follows.
    out = masked_attention(
        by_patch(q_PhH), by_patch(k_PhH), by_patch(v_PhH), history.mask, width**-0.5, "sdpa"
    )
    out = out.reshape([videos, patches, frames, heads * width]).transpose([0, 2, 1, 3])
    return out.reshape([rows, heads, width])


class SiglipMLP(nn.Layer):
    """`fc2(gelu(fc1(x)))`, the tanh form of GELU."""

    def __init__(self, config: SiglipVisionConfig):
        super().__init__()
        self.fc1 = Linear(config.hidden_size, config.intermediate_size, True)
        self.fc2 = Linear(config.intermediate_size, config.hidden_size, True)
        self.act = activation("gelu_pytorch_tanh")

    def forward(self, x_FNU: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x_FNU)))


def visible_frames(is_pad_BT: Tensor) -> Tensor:
    """Which frames each frame sees: `[B, T, T]` bool.

    Those up to its own that are not padded; the current one, the last, counts as never padded. A
    padded frame may see none.
    """
    frames = is_pad_BT.shape[1]
    last = paddle.arange(frames) == frames - 1
    real_BT = paddle.logical_or(paddle.logical_not(is_pad_BT), last)
    order = paddle.arange(frames)
    causal_TT = order.unsqueeze(1) >= order.unsqueeze(0)
    return paddle.logical_and(real_BT.unsqueeze(1), causal_TT)
