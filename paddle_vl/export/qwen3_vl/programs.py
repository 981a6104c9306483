"""Programs of an exported model: tower, prefill and decode step, of tensors alone.

Each is a layer whose forward is traced by `paddle.jit.to_static`. Only the last position's logits
leave a program.

Shapes: B batch, L prompt length, C capacity of the cache, T = B * L token rows, P patches, S
segments of attention in the tower and Q their longest length, M visual embeddings, D width, K key
heads, H head width, V vocabulary, G deepstack levels, N decoder layers.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from paddle import Tensor, nn
from paddle.static import InputSpec

from paddle_vl.checkpoint.adapter_files import folder_with
from paddle_vl.export.attention import PaddedSegments, query_blocks
from paddle_vl.export.qwen3_vl.program_caches import Buffers, NewKeys, Past
from paddle_vl.export.qwen3_vl.program_examples import (
    past_of,
    prompt_example,
    sizes,
    step_example,
    tower_example,
)
from paddle_vl.export.tracing import kernels_for_cpu
from paddle_vl.export.writing import Device, ModelToExport, ProgramToExport
from paddle_vl.families.qwen3_vl.model import Qwen3VLForConditionalGeneration
from paddle_vl.families.vlm.generate import step_logits
from paddle_vl.families.vlm.inputs.processor import VLProcessor
from paddle_vl.families.vlm.layers import decoder_positions
from paddle_vl.families.vlm.processor_fit import check_processor_fits
from paddle_vl.nn.attention_masks import MASKED_SCORE


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
        self.config, text = model.config, model.config.text_config
        self.key_heads = text.num_key_value_heads
        self.groups = text.num_attention_heads // self.key_heads
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
        is_image = input_ids == self.config.image_token_id
        is_video = input_ids == self.config.video_token_id
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
        bias = query_blocks((1.0 - visible_BLL) * MASKED_SCORE, self.groups)
        inputs["rotary_pos_emb"].prepare([self.groups * self.key_heads, self.key_heads])
        kept = [NewKeys(bias) for _ in range(len(self.language_model.layers))]
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
        self.config, text = model.config, model.config.text_config
        self.key_heads = text.num_key_value_heads
        self.groups = text.num_attention_heads // self.key_heads
        self.language_model, self.lm_head = model.language_model, model.lm_head

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        position_ids: Tensor,
        place_1: Tensor,
        buffers: list[Tensor],
    ) -> Tensor:
        bias = self.bias(attention_mask)
        caches = [
            Buffers(bias, buffers[2 * i], buffers[2 * i + 1], place_1)
            for i in range(len(self.language_model.layers))
        ]
        return self.logits(input_ids, position_ids, caches)

    def bias(self, attention_mask: Tensor) -> Tensor:
        """The bias of the scores that hides masked keys, `[B, K, groups, C]`."""
        hidden_BC = (1.0 - attention_mask.astype("float32")) * MASKED_SCORE
        return hidden_BC.unsqueeze([1, 2]).tile([1, self.key_heads, self.groups, 1])

    def logits(self, input_ids: Tensor, position_ids: Tensor, caches: Any) -> Tensor:
        """Logits `[B, V]` after one token, whose keys and values the caches get."""
        inputs = decoder_positions(self.config, {"position_ids": position_ids})
        inputs["rotary_pos_emb"].prepare([self.groups * self.key_heads, self.key_heads])
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
        shape = [None, self.key_heads, None, text.head_dim]
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
        bias = self.bias(attention_mask)
        caches = [
            Past(bias, past[2 * i], past[2 * i + 1]) for i in range(len(self.language_model.layers))
        ]
        outputs = [self.logits(input_ids, position_ids, caches)]
        for cache in caches:
            outputs += cache.pair
        return outputs

    def input_spec(self) -> list:
        """Its inputs; the mask `[B, S + 1]` is 1 at real keys, the new one among them."""
        return [*self._token_specs(), self._cache_specs()]


def to_export(folder: Path, base: str | None) -> ModelToExport:
    """The programs of a model folder with its processor, or of adapters and their base."""
    model = Qwen3VLForConditionalGeneration.from_pretrained(folder, base=base)
    processor = VLProcessor.from_pretrained(folder_with("tokenizer.json", folder, base))
    check_processor_fits(model.config, processor)

    def save_files(out: Path) -> None:
        processor.save_pretrained(out)
        if model.generation_config is not None:
            model.generation_config.save_pretrained(out)

    return model_to_export(model, save_files)


def model_to_export(
    model: Qwen3VLForConditionalGeneration, save_files: Callable[[Path], None]
) -> ModelToExport:
    """The three programs of a full model, with inputs to check them."""
    rng = np.random.default_rng(0)
    tower, prompt, step = (
        tower_example(model, rng),
        prompt_example(model, rng),
        step_example(model, rng),
    )
    return ModelToExport(
        "qwen3_vl",
        sizes(model.config),
        {
            "tower": ProgramToExport(TowerProgram(model), "tower", tower),
            "prefill": ProgramToExport(PrefillProgram(model), "decoder", prompt, True),
            "decode": ProgramToExport(DecodeProgram(model), "decoder", step, True),
        },
        save_files,
        {
            "tower": ProgramToExport(TowerProgram(model), "tower", tower),
            "prefill": ProgramToExport(PrefillProgram(model), "decoder", prompt),
            "decode": ProgramToExport(PastDecodeProgram(model), "decoder", past_of(step)),
        },
        computes_in_half=True,
        traced=traced_for,
    )


def traced_for(device: Device) -> AbstractContextManager:
    """For a CPU with kernels of their own; for a GPU as they are."""
    return kernels_for_cpu() if device == "cpu" else nullcontext()
