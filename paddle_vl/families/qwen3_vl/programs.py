"""Programs of an exported model: tower, prefill and decode step, of tensors alone.

Each is a layer whose forward is traced by `paddle.jit.to_static`. Only the last position's logits
leave a program.

Shapes: B batch, L prompt length, C capacity of the cache, T = B * L token rows, P patches, S
segments of attention in the tower and Q their longest length, M visual embeddings, D width, K key
heads, H head width, V vocabulary, G deepstack levels, N decoder layers.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from paddle import Tensor, nn
from paddle.static import InputSpec

from paddle_vl.batch.positions import padded_segments, vision_layout
from paddle_vl.export.writing import DTYPES, ModelToExport, ProgramToExport
from paddle_vl.families.qwen3_vl.embedding import decoder_positions
from paddle_vl.families.qwen3_vl.generate import step_logits
from paddle_vl.families.qwen3_vl.model import Qwen3VLForConditionalGeneration
from paddle_vl.families.qwen3_vl.program_caches import Buffers, NewKeys, Past
from paddle_vl.nn.attention import (
    MASKED_SCORE,
    PaddedSegments,
)
from paddle_vl.nn.cached_attention import query_blocks
from paddle_vl.nn.cpu import inference as _kernels  # noqa: F401  Registers them.
from paddle_vl.nn.operations import without_gradient


def spec(name: str, shape: Any, dtype: Any) -> InputSpec:
    """An input of a program, without a gradient: a program keeps what a backward pass needs."""
    return InputSpec(shape, dtype, name, stop_gradient=True)


class TowerProgram(nn.Layer):
    """Patches in reading order to visual embeddings and deepstack levels, `[M, D]` each."""

    def __init__(self, model: Qwen3VLForConditionalGeneration):
        super().__init__()
        self.visual = model.visual

    def forward(
        self,
        pixel_values: Tensor,
        coordinates_P2: Tensor,
        tap_rows_4P: Tensor,
        tap_weights_4P: Tensor,
        segment_rows_SQ: Tensor,
        segment_bias_SQ: Tensor,
        segment_place_P: Tensor,
    ) -> list[Tensor]:
        segments = PaddedSegments(segment_rows_SQ, segment_bias_SQ, segment_place_P)
        features = self.visual.encode(
            pixel_values, coordinates_P2, tap_rows_4P, tap_weights_4P, segments
        )
        return [features.merged, *features.levels]

    def input_spec(self) -> list[InputSpec]:
        """Its inputs, see `paddle_vl.batch.positions.VisionLayout` and `PaddedSegments`."""
        return [
            spec("pixel_values", [None, self.visual.config.patch_dim], "float32"),
            spec("coordinates", [None, 2], "int64"),
            spec("tap_rows", [4, None], "int64"),
            spec("tap_weights", [4, None], "float32"),
            spec("segment_rows", [None, None], "int64"),
            spec("segment_bias", [None, None], "float32"),
            spec("segment_place", [None], "int64"),
        ]


class PrefillProgram(nn.Layer):
    """Prompts to the logits after them `[B, V]`; each layer's keys and values `[B, K, L, H]`."""

    def __init__(self, model: Qwen3VLForConditionalGeneration):
        super().__init__()
        self.config = model.config
        text = model.config.text_config
        self.groups = text.num_attention_heads // text.num_key_value_heads
        self.language_model, self.lm_head = model.language_model, model.lm_head

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        position_ids: Tensor,
        visual_embeds: Tensor,
        levels: list[Tensor],
    ) -> list[Tensor]:
        embedding = self.language_model.embedding
        is_image, is_video = embedding.placeholder_masks(input_ids)
        inputs = embedding(
            {
                "decoder_input": embedding.embed_tokens(input_ids),
                "position_ids": position_ids,
                "visual_pos_masks": is_image | is_video,
                "image_embeds": visual_embeds,
                "deepstack_image_embeds": levels,
            }
        )
        place_L = paddle.arange(input_ids.shape[1], dtype="int64")
        causal_LL = (place_L.unsqueeze(0) <= place_L.unsqueeze(1)).astype("float32")
        visible_BLL = causal_LL.unsqueeze(0) * attention_mask.astype("float32").unsqueeze(1)
        inputs["score_bias"] = query_blocks((1.0 - visible_BLL) * MASKED_SCORE, self.groups)
        text = self.config.text_config
        inputs["rotary_pos_emb"].prepare([text.num_attention_heads, text.num_key_value_heads])
        kept = [NewKeys() for _ in range(len(self.language_model.layers))]
        hidden_TD = self.language_model.run(inputs, kept)
        hidden_BLD = hidden_TD.reshape([input_ids.shape[0], -1, hidden_TD.shape[-1]])
        logits_BV = self.lm_head(hidden_BLD[:, -1])
        keys_values = []
        for one in kept:
            keys_values += one.pair
        return [logits_BV.astype("float32"), *keys_values]

    def input_spec(self) -> list:
        """Its inputs; visual embeddings and levels `[M, D]` are in reading order, M may be 0."""
        width = self.config.text_config.hidden_size
        num_levels = self.language_model.embedding.num_levels
        return [
            spec("input_ids", [None, None], "int64"),
            spec("attention_mask", [None, None], "int64"),
            spec("position_ids", [3, None, None], "int64"),
            spec("visual_embeds", [None, width], self.lm_head.weight.dtype),
            [
                spec(f"level_{g}", [None, width], self.lm_head.weight.dtype)
                for g in range(num_levels)
            ],
        ]


class DecodeProgram(nn.Layer):
    """One more token per prompt: logits `[B, V]`; keys and values are written into the buffers."""

    def __init__(self, model: Qwen3VLForConditionalGeneration):
        super().__init__()
        self.config = model.config
        self.language_model, self.lm_head = model.language_model, model.lm_head

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        position_ids: Tensor,
        place_1: Tensor,
        buffers: list[Tensor],
    ) -> Tensor:
        caches = [
            Buffers(buffers[2 * i], buffers[2 * i + 1], place_1)
            for i in range(len(self.language_model.layers))
        ]
        return self.logits(input_ids, attention_mask, position_ids, caches)

    def logits(
        self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, caches: Any
    ) -> Tensor:
        """Logits `[B, V]` after one token, whose keys and values the caches get."""
        inputs = decoder_positions(self.config, {"position_ids": position_ids})
        hidden_BC = (1.0 - attention_mask.astype("float32")) * MASKED_SCORE
        text = self.config.text_config
        key_heads = text.num_key_value_heads
        groups = text.num_attention_heads // key_heads
        inputs["rotary_pos_emb"].prepare([text.num_attention_heads, key_heads])
        inputs["score_bias"] = hidden_BC.unsqueeze([1, 2]).tile([1, key_heads, groups, 1])
        return step_logits(self, input_ids, inputs, caches)

    def input_spec(self) -> list:
        """Its inputs; the mask `[B, C]` is 1 at real keys, the new one among them."""
        return [*self._token_specs(), spec("place", [1], "int64"), self._cache_specs()]

    def _token_specs(self) -> list[InputSpec]:
        return [
            spec("input_ids", [None, 1], "int64"),
            spec("attention_mask", [None, None], "int64"),
            spec("position_ids", [3, None, 1], "int64"),
        ]

    def _cache_specs(self) -> list[InputSpec]:
        text = self.config.text_config
        shape = [None, text.num_key_value_heads, None, text.head_dim]
        return [
            spec(f"{kind}_{i}", shape, self.lm_head.weight.dtype)
            for i in range(text.num_hidden_layers)
            for kind in ("key", "value")
        ]


class PastDecodeProgram(DecodeProgram):
    """`DecodeProgram` for ONNX, whose programs cannot write into inputs: it returns longer copies.

    Outputs: logits, then each layer's keys and values with the new ones, `[B, K, S + 1, H]`.
    """

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, past: list[Tensor]
    ) -> list[Tensor]:
        caches = [
            Past(past[2 * i], past[2 * i + 1]) for i in range(len(self.language_model.layers))
        ]
        outputs = [self.logits(input_ids, attention_mask, position_ids, caches)]
        for cache in caches:
            outputs += cache.pair
        return outputs

    def input_spec(self) -> list:
        """Its inputs; the mask `[B, S + 1]` is 1 at real keys, the new one among them."""
        return [*self._token_specs(), self._cache_specs()]


def model_to_export(
    model: Qwen3VLForConditionalGeneration, save_files: Callable[[Path], None]
) -> ModelToExport:
    """The three programs of a full model, with inputs to check them."""
    config, text = model.config, model.config.text_config
    vision, rng = config.vision_config, np.random.default_rng(0)
    tower, prompt, step = _tower_example(model, rng), _prompt(model, rng), _step(model, rng)
    return ModelToExport(
        "qwen3_vl",
        {
            "image_token_id": config.image_token_id,
            "video_token_id": config.video_token_id,
            "vocab_size": text.vocab_size,
            "table_side": vision.table_side,
            "merge": vision.spatial_merge_size,
        },
        {
            "tower": ProgramToExport(TowerProgram(model), "tower", tower, without_gradient),
            "prefill": ProgramToExport(PrefillProgram(model), "decoder", prompt, without_gradient),
            "decode": ProgramToExport(DecodeProgram(model), "decoder", step, without_gradient),
        },
        save_files,
        {
            "tower": ProgramToExport(TowerProgram(model), "tower", tower),
            "prefill": ProgramToExport(PrefillProgram(model), "decoder", prompt),
            "decode": ProgramToExport(PastDecodeProgram(model), "decoder", _past_of(step)),
        },
        DTYPES,
    )


def _tower_example(
    model: Qwen3VLForConditionalGeneration, rng: np.random.Generator
) -> dict[str, np.ndarray]:
    """An image and a video of other sizes."""
    vision = model.config.vision_config
    side = vision.spatial_merge_size
    layout = vision_layout(
        np.array([[1, side, 2 * side], [2, 2 * side, 3 * side]]),
        table_side=vision.table_side,
        merge=side,
    )
    rows_SQ, bias_SQ, place_P = padded_segments(layout.segments)
    return {
        "pixel_values": _normal(rng, len(place_P), vision.patch_dim),
        "coordinates": layout.coordinates,
        "tap_rows": layout.tap_rows,
        "tap_weights": layout.tap_weights,
        "segment_rows": rows_SQ,
        "segment_bias": bias_SQ,
        "segment_place": place_P,
    }


def _prompt(
    model: Qwen3VLForConditionalGeneration, rng: np.random.Generator
) -> dict[str, np.ndarray]:
    """Two prompts, one padded on the left, with six visual tokens."""
    config = model.config
    ids_BL = np.full((2, 9), config.vision_start_token_id, dtype=np.int64)
    ids_BL[0, 2:6], ids_BL[1, 5:7] = config.image_token_id, config.video_token_id
    mask_BL = np.ones_like(ids_BL)
    mask_BL[1, :3] = 0
    places_BL = np.maximum(mask_BL.cumsum(axis=1) - 1, 0)
    width, num_levels = config.text_config.hidden_size, len(model.language_model.deepstack_layers)
    return {
        "input_ids": ids_BL,
        "attention_mask": mask_BL,
        "position_ids": np.stack([places_BL] * 3),
        "visual_embeds": _normal(rng, 6, width),
        **{f"level_{g}": _normal(rng, 6, width) for g in range(num_levels)},
    }


def _step(
    model: Qwen3VLForConditionalGeneration, rng: np.random.Generator
) -> dict[str, np.ndarray]:
    """One token after five, in buffers of eight."""
    config, text = model.config, model.config.text_config
    mask_BC = (np.arange(8) < 6).astype(np.int64)[None].repeat(2, axis=0)
    shape = (2, text.num_key_value_heads, 8, text.head_dim)
    return {
        "input_ids": np.full((2, 1), config.vision_start_token_id, dtype=np.int64),
        "attention_mask": mask_BC,
        "position_ids": np.full((3, 2, 1), 5, dtype=np.int64),
        "place": np.array([5], dtype=np.int64),
        **{
            f"{kind}_{i}": _normal(rng, *shape)
            for i in range(text.num_hidden_layers)
            for kind in ("key", "value")
        },
    }


def _past_of(step: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same step with the keys and values before it."""
    place = int(step["place"][0])
    cut = {name: array[:, :, :place] for name, array in step.items() if array.ndim == 4}
    mask_BS = step["attention_mask"][:, : place + 1]
    given = {name: step[name] for name in ("input_ids", "position_ids")}
    return {**given, "attention_mask": mask_BS, **cut}


def _normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.normal(size=shape).astype(np.float32)
