"""Layers of both families, alone, with inputs to count what they do."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import paddle
from paddle import Tensor

from paddle_vl.families.pi07.decoder_layers import BackboneLayer, ExpertLayer, StreamView
from paddle_vl.families.pi07.engine_config import (
    Gemma3TextConfig,
    GemmaExpertConfig,
    SiglipVisionConfig,
)
from paddle_vl.families.pi07.layers import rotary_tables
from paddle_vl.families.pi07.vision import SiglipLayer
from paddle_vl.families.qwen3_vl.config import Qwen3VLConfig
from paddle_vl.families.qwen3_vl.decoder import DecoderLayer
from paddle_vl.families.qwen3_vl.vision_tower import VisionBlock
from paddle_vl.nn.attention import AttentionMask, BlockMask, KeyMask
from paddle_vl.nn.linear import default_dtype
from paddle_vl.nn.placement import SingleDevicePlacement
from paddle_vl.nn.rotary import RotaryTables
from tests.support.gpu_stubs.counting import LayerCounts, counted

# The dtype that stands for bfloat16.
_HALF = "float64"
_BATCH = 2


@dataclass(frozen=True)
class Case:
    """A layer to count.

    Attributes:
        run: the layer, of its inputs.
        inputs: with gradients.
        shared: what is kept anyway: parameters, and what all layers have in common.
        tokens: number of token rows.
    """

    run: Callable[..., Any]
    inputs: list[Tensor]
    shared: list[Tensor]
    tokens: int

    def counted(self, kernels: Literal["gpu", "plain"]) -> LayerCounts:
        return counted(self.run, self.inputs, kernels, self.shared)

    def saved_per_token(self, counts: LayerCounts) -> float:
        return counts.saved / self.tokens


def _rows(*shape: int) -> Tensor:
    x = paddle.randn(list(shape), dtype=_HALF)
    x.stop_gradient = False
    return x


def _tables(*shape: int) -> tuple[RotaryTables, list[Tensor]]:
    tables = RotaryTables(paddle.rand(list(shape)), paddle.rand(list(shape)))
    return tables, [*tables, *tables.astype(paddle.float64)]


def qwen3_vl_decoder(config: Qwen3VLConfig, length: int) -> Case:
    """A decoder layer of Qwen3-VL, with experts if the configuration has them."""
    text = config.text_config
    with default_dtype(_HALF):
        layer = DecoderLayer(text, SingleDevicePlacement(), 0)
    tables, shared = _tables(_BATCH, length, text.head_dim)
    tokens = _BATCH * length
    return Case(
        lambda x: layer(x, tables),
        [_rows(tokens, text.hidden_size)],
        [*shared, *layer.parameters()],
        tokens,
    )


def qwen3_vl_tower(config: Qwen3VLConfig, patches: int) -> Case:
    """A block of Qwen3-VL's vision tower on images of one size."""
    vision = config.vision_config
    with default_dtype(_HALF):
        block = VisionBlock(vision)
    tables, shared = _tables(_BATCH * patches, vision.hidden_size // vision.num_heads)
    segments = ((_BATCH, patches),)
    tokens = _BATCH * patches
    return Case(
        lambda x: block(x, tables, segments),
        [_rows(tokens, vision.hidden_size)],
        [*shared, *block.parameters()],
        tokens,
    )


def _view(text: Gemma3TextConfig, length: int, mask: AttentionMask) -> tuple[StreamView, list]:
    position_ids = paddle.arange(length).unsqueeze(0).expand([_BATCH, length]).contiguous()
    base = text.rope_base(0)
    tables = rotary_tables(position_ids, text.head_dim, base)
    scale = text.query_pre_attn_scalar**-0.5
    view = StreamView((_BATCH, length), {base: tables}, mask, scale, "eager")
    shared = [mask.visible_BLS, mask.has_key_BL11, mask.bias_B1LS]
    return view, [*tables, *tables.astype(paddle.float64), *shared]


def pi07_backbone(text: Gemma3TextConfig, length: int) -> Case:
    """The backbone's half of a decoder layer of pi07."""
    with default_dtype(_HALF):
        layer = BackboneLayer(text, text.rope_base(0), 0.0, SingleDevicePlacement())
    real_BL, marks_BL = paddle.ones([_BATCH, length], "bool"), paddle.zeros([_BATCH, length])
    view, shared = _view(text, length, BlockMask(real_BL, marks_BL))
    tokens = _BATCH * length

    def run(x_TD: Tensor) -> tuple[Tensor, ...]:
        out_TD, (key, value) = layer(x_TD, view)
        return out_TD, key, value

    return Case(run, [_rows(tokens, text.hidden_size)], [*shared, *layer.parameters()], tokens)


def pi07_expert(
    text: Gemma3TextConfig, expert: GemmaExpertConfig, prefix: int, length: int
) -> Case:
    """The action expert's half of a decoder layer of pi07."""
    with default_dtype(_HALF):
        layer = ExpertLayer(expert, text.rope_base(0), 0.0, SingleDevicePlacement())
    seen_BS = paddle.ones([_BATCH, prefix + length], "bool")
    view, shared = _view(text, length, KeyMask(seen_BS, length))
    tokens = _BATCH * length
    past = _rows(_BATCH, prefix, expert.num_key_value_heads, expert.head_dim)
    return Case(
        lambda x_TE, cond_TE, key, value: layer(x_TE, cond_TE, view, (key, value)),
        [
            _rows(tokens, expert.hidden_size),
            _rows(tokens, expert.adarms_cond_dim),
            past,
            _rows(*past.shape),
        ],
        [*shared, *layer.parameters()],
        tokens,
    )


def pi07_tower(vision: SiglipVisionConfig) -> Case:
    """A layer of pi07's SigLIP tower on single frames."""
    with default_dtype(_HALF):
        layer = SiglipLayer(vision, looks_back=False)
    rows = _rows(_BATCH, vision.num_patches, vision.hidden_size)
    return Case(layer, [rows], layer.parameters(), _BATCH * vision.num_patches)


def few_experts(config: Qwen3VLConfig, number: int) -> Qwen3VLConfig:
    """The configuration with fewer experts: their number changes no launch."""
    text: Any = config.text_config
    return replace(config, text_config=replace(text, num_experts=number))
