"""Vision tower: patches of images and videos to visual embeddings and deepstack levels.

Shapes: P patches of all items, in merge-block order; U tower width; N heads; H head width;
M = P / merge^2 visual embeddings; D decoder width; G deepstack levels. Attention is full within one
frame of one image or video.

Tensor parallelism of a colocated encoder divides the linears that a layer names in `column_blocks`
(output features, in so many equal blocks) and `row_linears` (input features).

Source: Qwen3VLVisionModel and Qwen3VLVisionPatchMerger of HF transformers.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import paddle
import paddle.nn.functional as F
from paddle import Tensor, nn
from paddle.nn.initializer import Normal

from paddle_vl.batch.positions import PATCH_FIELDS, PatchRows, VisionLayout
from paddle_vl.nn.attention import SegmentAttention, Segments, segment_attention
from paddle_vl.nn.linear import Linear, split_columns
from paddle_vl.nn.norm import LayerNorm
from paddle_vl.nn.operations import activation, device_tensor, gelu, times_constant
from paddle_vl.nn.rotary import RotaryTables, apply_rotary, vision_tables


class VisionFeatures(NamedTuple):
    """Output in the order of items: visual embeddings `[M, D]` and G deepstack levels `[M, D]`."""

    merged: Tensor
    levels: list[Tensor]


def patch_rows(batch: Mapping[str, Any]) -> PatchRows | None:
    """The places of the patches of a batch as tensors; None if it does not have them."""
    if batch.get(PATCH_FIELDS[0]) is None:
        return None
    return PatchRows(*(device_tensor(batch[name]) for name in PATCH_FIELDS))


class VisionTower(nn.Layer):
    """Patch embedding, learned positions, blocks, a merger per deepstack level and a final one."""

    def __init__(self, config: Any):
        super().__init__()
        self.config = config
        std = config.initializer_range
        # A convolution whose stride is its kernel is one matrix product over flattened patches.
        self.patch_embed = Linear(config.patch_dim, config.hidden_size, True, std)
        self.pos_embed = PositionTable(config.num_position_embeddings, config.hidden_size, std)
        self.blocks = nn.LayerList([VisionBlock(config) for _ in range(config.depth)])
        self.merger = PatchMerger(config, norm_after_merge=False)
        self.deepstack_merger_list = nn.LayerList(
            [PatchMerger(config, norm_after_merge=True) for _ in config.deepstack_visual_indexes]
        )

    def forward(self, pixel_values: Tensor, layout: VisionLayout) -> VisionFeatures:
        """Encode a batch of patches.

        Args:
            pixel_values: `[P, patch_dim]` flattened patches (channel, frame, y, x), any float type.
            layout: host-side description of the same patches.
        """
        return self.encode(
            pixel_values,
            paddle.to_tensor(layout.coordinates),
            paddle.to_tensor(layout.tap_rows),
            paddle.to_tensor(layout.tap_weights),
            Segments(layout.segments),
        )

    def encode(
        self,
        pixel_values: Tensor,
        coordinates_P2: Tensor,
        tap_rows_4P: Tensor,
        tap_weights_4P: Tensor,
        segments: SegmentAttention,
    ) -> VisionFeatures:
        """Encode patches whose layout is given as tensors, see `VisionLayout`."""
        x_PU = self.patch_embed(pixel_values.astype(self.patch_embed.weight.dtype))
        x_PU = x_PU + self.pos_embed(tap_rows_4P, tap_weights_4P)
        head_dim = self.config.hidden_size // self.config.num_heads
        tables = vision_tables(coordinates_P2, head_dim, self.config.rope_theta)
        levels: list[Any] = [None] * len(self.deepstack_merger_list)
        for i, block in enumerate(self.blocks):
            x_PU = block(x_PU, tables, segments)
            if i in self.config.deepstack_visual_indexes:
                level = self.config.deepstack_visual_indexes.index(i)
                levels[level] = self.deepstack_merger_list[level](x_PU)
        return VisionFeatures(self.merger(x_PU), levels)


class PositionTable(nn.Layer):
    """Learned positions on a square grid, interpolated for any size of a frame."""

    def __init__(self, num_positions: int, width: int, init_std: float):
        super().__init__()
        self.weight = self.create_parameter(
            [num_positions, width], default_initializer=Normal(std=init_std)
        )

    def forward(self, tap_rows_4P: Tensor, tap_weights_4P: Tensor) -> Tensor:
        """Bilinear interpolation in float32: `[P, U]` in the table's dtype."""
        table = self.weight.astype("float32")
        taps_PU = [
            times_constant(F.embedding(tap_rows_4P[tap], table), tap_weights_4P[tap].unsqueeze(-1))
            for tap in range(4)
        ]
        value_PU = taps_PU[0] + taps_PU[1] + taps_PU[2] + taps_PU[3]
        return value_PU.astype(self.weight.dtype)


class VisionBlock(nn.Layer):
    """`x + attention(norm(x))`, then `x + mlp(norm(x))`."""

    def __init__(self, config: Any):
        super().__init__()
        self.norm1 = LayerNorm(config.hidden_size, 1e-6)
        self.norm2 = LayerNorm(config.hidden_size, 1e-6)
        self.attn = VisionAttention(config)
        self.mlp = VisionMLP(config)

    def forward(self, x_PU: Tensor, tables: RotaryTables, segments: SegmentAttention) -> Tensor:
        x_PU = x_PU + self.attn(self.norm1(x_PU), tables, segments)
        return x_PU + self.mlp(self.norm2(x_PU))


class VisionAttention(nn.Layer):
    """Self-attention within segments; the fused projection is (q, k, v), each head-major."""

    column_blocks: ClassVar[dict[str, int]] = {"qkv": 3}
    row_linears: ClassVar[tuple[str, ...]] = ("proj",)

    def __init__(self, config: Any):
        super().__init__()
        self.head_dim = config.hidden_size // config.num_heads
        width, std = config.hidden_size, config.initializer_range
        self.qkv = Linear(width, 3 * width, True, std)
        self.proj = Linear(width, width, True, std)

    def forward(self, x_PU: Tensor, tables: RotaryTables, segments: SegmentAttention) -> Tensor:
        # A rank may have some of the heads.
        width = self.qkv.weight.shape[1] // 3
        heads = [-1, width // self.head_dim, self.head_dim]
        # Split before the heads: views of the whole would each be copied later.
        q_PNH, k_PNH, v_PNH = (x.reshape(heads) for x in split_columns(self.qkv(x_PU), [width] * 3))
        q_PNH, k_PNH = apply_rotary(q_PNH, k_PNH, tables)
        out_PNH = segment_attention(q_PNH, k_PNH, v_PNH, segments)
        return self.proj(out_PNH.reshape([-1, width]))


class VisionMLP(nn.Layer):
    """`fc2(gelu(fc1(x)))` with the configured GELU (tanh in every checkpoint)."""

    column_blocks: ClassVar[dict[str, int]] = {"linear_fc1": 1}
    row_linears: ClassVar[tuple[str, ...]] = ("linear_fc2",)

    def __init__(self, config: Any):
        super().__init__()
        width, inner, std = config.hidden_size, config.intermediate_size, config.initializer_range
        self.linear_fc1 = Linear(width, inner, True, std)
        self.linear_fc2 = Linear(inner, width, True, std)
        self.act = activation(config.hidden_act)

    def forward(self, x_PU: Tensor) -> Tensor:
        return self.linear_fc2(self.act(self.linear_fc1(x_PU)))


class PatchMerger(nn.Layer):
    """LayerNorm, concatenation of the patches of a merge block, and an MLP with the erf GELU.

    Args:
        norm_after_merge: False for the final merger, which normalizes each patch over U before the
            concatenation; True for deepstack mergers, which normalize over the block after it.
    """

    column_blocks: ClassVar[dict[str, int]] = {"linear_fc1": 1}
    row_linears: ClassVar[tuple[str, ...]] = ("linear_fc2",)

    def __init__(self, config: Any, norm_after_merge: bool):
        super().__init__()
        self.norm_after_merge = norm_after_merge
        self.block_width = config.hidden_size * config.spatial_merge_size**2
        norm_width = self.block_width if norm_after_merge else config.hidden_size
        std = config.initializer_range
        self.norm = LayerNorm(norm_width, 1e-6)
        self.linear_fc1 = Linear(self.block_width, self.block_width, True, std)
        self.linear_fc2 = Linear(self.block_width, config.out_hidden_size, True, std)

    def forward(self, x_PU: Tensor) -> Tensor:
        """`[P, U]` in merge-block order to `[M, D]`."""
        if self.norm_after_merge:
            x = self.norm(x_PU.reshape([-1, self.block_width]))
        else:
            x = self.norm(x_PU).reshape([-1, self.block_width])
        return self.linear_fc2(gelu(self.linear_fc1(x)))
