"""Programs of an exported planner, of tensors alone: `images`, `prefill` and `decode`.

See `paddle_vl.export.pi07.programs`. Shapes: B batch, c cameras, Z = c * B images, camera-major,
M tokens of an image, D width, L prompt tokens, n new tokens, S capacity of the buffers, V
vocabulary, K key heads, H head width.
"""

from typing import cast

import paddle
from paddle import Tensor, nn

from paddle_vl.export.pi07.program_attention import BuffersView, ProgramView
from paddle_vl.export.pi07.program_inputs import (
    PLANNER_TEXTS,
    flat,
    key_value_specs,
    pairs,
    spec,
    text_fields,
    text_specs,
)
from paddle_vl.export.pi07.program_prefix import planner_prefix
from paddle_vl.families.pi07.decoder import DecoderOutput, StreamView
from paddle_vl.families.pi07.planner import PI07HighLevelPlannerModel


class ImagesProgram(nn.Layer):
    """The planner's images in [-1, 1] to tokens `[Z, M, D]`."""

    def __init__(self, model: PI07HighLevelPlannerModel):
        super().__init__()
        self.video_encoder = model.prefix.video_encoder

    def forward(self, images: Tensor) -> Tensor:
        return self.video_encoder.project(self.video_encoder.pooled_rows(None, None, images))

    def input_spec(self) -> list:
        """Its input."""
        side = self.video_encoder.tower.config.image_size
        return [spec("images", [None, 3, side, side], "float32")]


class PrefillProgram(nn.Layer):
    """Prompts to logits `[B, V]`, `pad_masks` `[B, L]`, keys and values `[B, L, K, H]`."""

    def __init__(self, model: PI07HighLevelPlannerModel):
        super().__init__()
        self.config = model.config
        self.decoder, self.lm_head = model.decoder, cast(nn.Layer, model.lm_head)
        self.prefix, self._prefix_view = model.prefix, model.prefix_view

    def forward(self, image_rows: Tensor, img_masks: Tensor, texts: list[Tensor]) -> list[Tensor]:
        batch = {"img_masks": img_masks, **text_fields(PLANNER_TEXTS, texts)}
        prefix = planner_prefix(self.prefix, batch, image_rows)
        text = self.config.vlm_config.gemma3_config.text_config
        view = ProgramView(self._prefix_view(prefix), text)
        out = self.decoder(prefix.embs, prefix_view=view, keep=True)
        logits_BV = self.lm_head(out.prefix[:, -1])
        return [logits_BV.astype("float32"), prefix.pad_masks, *flat(out.cache)]

    def input_spec(self) -> list:
        """Its inputs; rows of the images are camera-major."""
        backbone = self.config.vlm_config.gemma3_config
        rows = [None, backbone.mm_tokens_per_image, backbone.text_config.hidden_size]
        return [
            spec("image_rows", rows, "float32"),
            spec("img_masks", [None, None], "bool"),
            text_specs(PLANNER_TEXTS),
        ]


class DecodeProgram(nn.Layer):
    """n more tokens to the logits after them `[B, V]`; the buffers are written in place."""

    def __init__(self, model: PI07HighLevelPlannerModel):
        super().__init__()
        self.config = model.config
        self.decoder, self.lm_head = model.decoder, cast(nn.Layer, model.lm_head)
        self.embed_tokens = model.prefix.embed_tokens

    def forward(
        self, input_ids: Tensor, pad_masks: Tensor, place: Tensor, buffers: list[Tensor]
    ) -> Tensor:
        text = self.config.vlm_config.gemma3_config.text_config
        view = BuffersView(self.view(input_ids, pad_masks, place), text, place)
        rows = self.embed_tokens.rows(input_ids)
        out = self.decoder(rows, prefix_view=view, cache=pairs(buffers))
        return self.logits(out)

    def view(self, input_ids: Tensor, pad_masks: Tensor, place: Tensor) -> StreamView:
        """Positions and mask of new tokens at a place."""
        end = place + input_ids.shape[1]
        numbers_S = paddle.arange(pad_masks.shape[1], dtype="int64")
        numbers_n = place + paddle.arange(input_ids.shape[1], dtype="int64")
        earlier_nS = numbers_S.unsqueeze(0) <= numbers_n.unsqueeze(1)
        visible_BnS = paddle.logical_and(pad_masks.unsqueeze(1), earlier_nS.unsqueeze(0))
        position_BS = paddle.cumsum(pad_masks.astype("int64"), axis=1) - 1
        return self.decoder.view(position_BS[:, place:end], visible_BnS)

    def logits(self, out: DecoderOutput) -> Tensor:
        """Logits `[B, V]` after the last token."""
        return self.lm_head(out.prefix[:, -1]).astype("float32")

    def input_spec(self) -> list:
        """Its inputs; `pad_masks` `[B, C]` is True at real tokens, the new ones among them, and
        `place` is where the new ones are written."""
        ids, masks, caches = self._specs()
        return [ids, masks, spec("place", [1], "int64"), caches]

    def _specs(self) -> list:
        return [
            spec("input_ids", [None, None], "int64"),
            spec("pad_masks", [None, None], "bool"),
            key_value_specs(self.config.vlm_config.gemma3_config),
        ]


class PastDecodeProgram(DecodeProgram):
    """`DecodeProgram` for ONNX, whose programs cannot write into inputs: it returns longer copies.

    Outputs: logits, then each layer's keys and values with the new ones, `[B, S + n, K, H]`.
    """

    def forward(self, input_ids: Tensor, pad_masks: Tensor, past: list[Tensor]) -> list[Tensor]:
        place = paddle.shape(past[0])[1:2].astype("int64")
        text = self.config.vlm_config.gemma3_config.text_config
        view = ProgramView(self.view(input_ids, pad_masks, place), text)
        rows = self.embed_tokens.rows(input_ids)
        out = self.decoder(rows, prefix_view=view, cache=pairs(past), keep=True)
        return [self.logits(out), *flat(out.cache)]

    def input_spec(self) -> list:
        """Its inputs; `pad_masks` `[B, S + n]` is True at real tokens, the new ones among them."""
        return self._specs()
