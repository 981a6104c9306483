"""PaddleOCR-VL: a SigLIP tower with a projector, and the ERNIE 4.5 decoder over token rows.

Shapes: P patches of all images, in merge-block order; U tower width; N heads; H head width; D
decoder width; M = P / merge^2 visual embeddings.

Source: PaddleOCRVisionModel, PaddleOCRProjector and PaddleOCRTextModel of HF transformers,
modeling_paddleocr_vl.py.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from paddle import Tensor, nn

from paddle_vl.batch.positions import PatchRows
from paddle_vl.families.paddleocr_vl import checkpoint_map
from paddle_vl.families.paddleocr_vl.config import (
    PaddleOCRTextConfig,
    PaddleOCRVisionConfig,
    PaddleOCRVLConfig,
)
from paddle_vl.families.paddleocr_vl.settings import PARTS
from paddle_vl.families.vlm.modeling.layers import (
    PositionTable,
    VisionFeatures,
    VLDecoderLayer,
    VLLanguageModel,
    VLSelfAttention,
)
from paddle_vl.families.vlm.modeling.model import VLForConditionalGeneration
from paddle_vl.nn.attention import RotaryTables, apply_rotary, vision_tables
from paddle_vl.nn.linear import Linear
from paddle_vl.nn.operations import LayerNorm, activation, gelu
from paddle_vl.nn.placement import Placement


class VisionTower(nn.Layer):
    """Patch embedding, learned positions, blocks, a last norm, and the projector."""

    def __init__(self, config: PaddleOCRVisionConfig):
        super().__init__()
        self.config = config
        std, width = config.initializer_range, config.hidden_size
        # A convolution whose stride is its kernel is one matrix product over flattened patches.
        self.patch_embed = Linear(config.patch_dim, width, True, std)
        self.pos_embed = PositionTable(config.num_position_embeddings, width, std)
        self.blocks = nn.LayerList([VisionBlock(config) for _ in range(config.depth)])
        self.post_layernorm = LayerNorm(width, config.layer_norm_eps)
        self.projector = Projector(config)

    def forward(self, pixel_values: Tensor, places: PatchRows, segments: Any) -> VisionFeatures:
        """Encode a batch of patches; arguments as of `vlm.modeling.layers.VisionTower`."""
        x_PU = self.patch_embed(pixel_values.astype(self.patch_embed.weight.dtype))
        x_PU = x_PU + self.pos_embed(places.tap_rows, places.tap_weights)
        head_dim = self.config.hidden_size // self.config.num_heads
        tables = vision_tables(places.coordinates, head_dim, self.config.rope_theta)
        for block in self.blocks:
            x_PU = block(x_PU, tables, segments)
        return VisionFeatures(self.projector(self.post_layernorm(x_PU)), [])


class VisionBlock(nn.Layer):
    """`x + attention(norm(x))`, then `x + mlp(norm(x))`."""

    def __init__(self, config: PaddleOCRVisionConfig):
        super().__init__()
        self.layer_norm1 = LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.layer_norm2 = LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.self_attn = VisionAttention(config)
        self.mlp = VisionMLP(config)

    def forward(self, x_PU: Tensor, tables: RotaryTables, segments: Any) -> Tensor:
        x_PU = x_PU + self.self_attn(self.layer_norm1(x_PU), tables, segments)
        return x_PU + self.mlp(self.layer_norm2(x_PU))


class VisionAttention(nn.Layer):
    """Self-attention within images, by four linears."""

    column_blocks: ClassVar[dict[str, int]] = {"q_proj": 1, "k_proj": 1, "v_proj": 1}
    row_linears: ClassVar[tuple[str, ...]] = ("out_proj",)

    def __init__(self, config: PaddleOCRVisionConfig):
        super().__init__()
        self.head_dim = config.hidden_size // config.num_heads
        width, std = config.hidden_size, config.initializer_range
        self.q_proj = Linear(width, width, True, std)
        self.k_proj = Linear(width, width, True, std)
        self.v_proj = Linear(width, width, True, std)
        self.out_proj = Linear(width, width, True, std)

    def forward(self, x_PU: Tensor, tables: RotaryTables, segments: Any) -> Tensor:
        # A rank may have some of the heads.
        q_PNH, k_PNH, v_PNH = (
            linear(x_PU).reshape([-1, linear.weight.shape[1] // self.head_dim, self.head_dim])
            for linear in (self.q_proj, self.k_proj, self.v_proj)
        )
        q_PNH, k_PNH = apply_rotary(q_PNH, k_PNH, tables)
        out_PNH = segments.attend(q_PNH, k_PNH, v_PNH)
        return self.out_proj(out_PNH.reshape([-1, self.out_proj.weight.shape[0]]))


class VisionMLP(nn.Layer):
    """`fc2(gelu(fc1(x)))` with the tanh form of GELU."""

    column_blocks: ClassVar[dict[str, int]] = {"fc1": 1}
    row_linears: ClassVar[tuple[str, ...]] = ("fc2",)

    def __init__(self, config: PaddleOCRVisionConfig):
        super().__init__()
        width, inner, std = config.hidden_size, config.intermediate_size, config.initializer_range
        self.fc1 = Linear(width, inner, True, std)
        self.fc2 = Linear(inner, width, True, std)
        self.act = activation(config.hidden_act)

    def forward(self, x_PU: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x_PU)))


class Projector(nn.Layer):
    """A norm of each patch, concatenation of the patches of a merge block, and an MLP with the erf
    GELU."""

    column_blocks: ClassVar[dict[str, int]] = {"linear_1": 1}
    row_linears: ClassVar[tuple[str, ...]] = ("linear_2",)

    def __init__(self, config: PaddleOCRVisionConfig):
        super().__init__()
        self.block_width = config.hidden_size * config.spatial_merge_size**2
        std = config.initializer_range
        self.pre_norm = LayerNorm(config.hidden_size, 1e-5)
        self.linear_1 = Linear(self.block_width, self.block_width, True, std)
        self.linear_2 = Linear(self.block_width, config.out_hidden_size, True, std)

    def forward(self, x_PU: Tensor) -> Tensor:
        """`[P, U]` in merge-block order to `[M, D]`."""
        blocks = self.pre_norm(x_PU).reshape([-1, self.block_width])
        return self.linear_2(gelu(self.linear_1(blocks)))


class LanguageModel(VLLanguageModel):
    """The decoder of ERNIE 4.5: queries and keys without norms, mRoPE in contiguous sections."""

    def make_layer(
        self, config: PaddleOCRTextConfig, placement: Placement, number: int
    ) -> nn.Layer:
        mixer = VLSelfAttention(config, placement, norm_class=None)
        return VLDecoderLayer(config, placement, number, mixer)


class PaddleOCRVLForConditionalGeneration(VLForConditionalGeneration):
    """The complete model. Build it with `from_pretrained` or `from_config`."""

    config_class = PaddleOCRVLConfig
    model_type = "paddleocr_vl"
    checkpoint_map = checkpoint_map
    tower_class = VisionTower
    decoder_class = LanguageModel

    @property
    def adapter_parts(self) -> Mapping[str, Sequence[str]]:
        return PARTS
