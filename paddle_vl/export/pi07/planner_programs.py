"""Programs of an exported planner, of tensors alone: `images`, `prefill` and `decode`.

See `paddle_vl.export.pi07.programs`. Shapes: B batch, c cameras, Z = c * B images, camera-major,
M tokens of an image, D width, L prompt tokens, n new tokens, S capacity of the buffers, V
vocabulary, K key heads, H head width.
"""

from typing import cast

import paddle
from paddle import Tensor, nn

from paddle_vl.export.pi07.program_attention import ProgramView
from paddle_vl.export.pi07.program_inputs import (
    PLANNER_TEXTS,
    flat,
    key_value_specs,
    pairs,
    spec,
    text_fields,
    text_specs,
)
from paddle_vl.families.pi07.decoder_layers import KeyValue, KeyValueBuffers
from paddle_vl.families.pi07.planner import PI07HighLevelPlannerModel


class ImagesProgram(nn.Layer):
    """The planner's images in [-1, 1] to tokens `[Z, M, D]`."""

    def __init__(self, model: PI07HighLevelPlannerModel):
        super().__init__()
        assert model.prefix is not None, "a full model has all layers"
        self.video_encoder = model.prefix.video_encoder

    def forward(self, images: Tensor) -> Tensor:
        return self.video_encoder.tokens(None, None, images)

    def input_spec(self) -> list:
        """Its input."""
        side = self.video_encoder.tower.config.image_size
        return [spec("images", [None, 3, side, side], "float32")]


class PrefillProgram(nn.Layer):
    """Prompts to logits `[B, V]`, `pad_masks` `[B, L]`, keys and values `[B, L, K, H]`."""

    def __init__(self, model: PI07HighLevelPlannerModel):
        super().__init__()
        self.config = model.config
        assert model.prefix is not None, "a full model has all layers"
        self.decoder, self.lm_head = model.decoder, cast(nn.Layer, model.lm_head)
        self.embed_tokens = model.prefix.embed_tokens
        self._embed_all, self._view_of = model.prefix.embed_all, model.view_of

    def forward(self, image_rows: Tensor, img_masks: Tensor, texts: list[Tensor]) -> list[Tensor]:
        batch = {"img_masks": img_masks, **text_fields(PLANNER_TEXTS, texts)}
        embs_BLD, pad_BL, marks_BL = self._embed_all(batch, image_rows)
        view = ProgramView(self._view_of(pad_BL, marks_BL), self.config.vlm_config)
        out = self.decoder(embs_BLD, prefix_view=view, keep=True)
        logits_BV = self.lm_head(out.prefix[:, -1])
        return [logits_BV.astype("float32"), pad_BL, *flat(out.cache)]

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
        assert model.prefix is not None, "a full model has all layers"
        self.decoder, self.lm_head = model.decoder, cast(nn.Layer, model.lm_head)
        self.embed_tokens = model.prefix.embed_tokens

    def forward(
        self, input_ids: Tensor, pad_masks: Tensor, place: Tensor, buffers: list[Tensor]
    ) -> Tensor:
        caches = [
            KeyValueBuffers(buffers[2 * i], buffers[2 * i + 1], place)
            for i in range(len(buffers) // 2)
        ]
        return self.run(input_ids, pad_masks, place, caches)[0]

    def run(
        self, input_ids: Tensor, pad_masks: Tensor, place: Tensor, caches: list, keep: bool = False
    ) -> tuple[Tensor, list[KeyValue] | None]:
        """Logits `[B, V]` after new tokens at a place, and with `keep` all keys and values."""
        end = place + input_ids.shape[1]
        numbers_S = paddle.arange(pad_masks.shape[1], dtype="int64")
        numbers_n = place + paddle.arange(input_ids.shape[1], dtype="int64")
        earlier_nS = numbers_S.unsqueeze(0) <= numbers_n.unsqueeze(1)
        visible_BnS = paddle.logical_and(pad_masks.unsqueeze(1), earlier_nS.unsqueeze(0))
        position_BS = paddle.cumsum(pad_masks.astype("int64"), axis=1) - 1
        view = self.decoder.view(position_BS[:, place:end], visible_BnS)
        view = ProgramView(view, self.config.vlm_config)
        rows = self.embed_tokens(input_ids)
        out = self.decoder(rows, prefix_view=view, cache=caches, keep=keep)
        return self.lm_head(out.prefix[:, -1]).astype("float32"), out.cache

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
        logits_BV, cache = self.run(input_ids, pad_masks, place, pairs(past), keep=True)
        assert cache is not None, "the keys are kept"
        return [logits_BV, *flat(cache)]

    def input_spec(self) -> list:
        """Its inputs; `pad_masks` `[B, S + n]` is True at real tokens, the new ones among them."""
        return self._specs()
