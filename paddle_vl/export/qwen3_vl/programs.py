"""Programs of an exported model: tower, prefill and decode step, of tensors alone.

Each is a function that `ProgramToExport` traces, with its inputs' specs. Only the
last position's logits leave a program.

Shapes: B batch, L prompt length, C capacity of the cache, S keys so far, P patches, Q the longest
segment of attention in the tower, M visual embeddings in reading order, D width, N query heads, K
key heads, H head width, V vocabulary, G deepstack levels.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from paddle import Tensor
from paddle.static import InputSpec

from paddle_vl.batch.positions import PatchRows
from paddle_vl.checkpoint.adapter_files import folder_with
from paddle_vl.config.families import FamilyEntry
from paddle_vl.export.attention import PaddedSegments, biased_attention, query_blocks
from paddle_vl.export.qwen3_vl.exported import ModelSizes, tower_inputs
from paddle_vl.export.writing import ModelToExport, ProgramToExport, cache_specs, spec
from paddle_vl.families.vlm.answering.generate import step_logits
from paddle_vl.families.vlm.folders.processor_fit import check_processor_fits
from paddle_vl.families.vlm.inputs.processor import VLProcessor
from paddle_vl.families.vlm.modeling.embedding_inputs import embedded
from paddle_vl.families.vlm.modeling.layers import decoder_positions
from paddle_vl.families.vlm.modeling.model import VLForConditionalGeneration
from paddle_vl.nn.attention_masks import MASKED_SCORE

Given = Mapping[str, Tensor]


class ProgramCache:
    """Keys and values of a decoder layer in a program, heads first; see `LanguageModel.run`.

    Args:
        bias: of the scores of all layers, see `biased_attention`.
        pair: keys and values so far, `[B, K, S, H]`, to copies of which new ones are appended; None
            without any. With a place, buffers `[B, K, C, H]`.
        place_1: the position of the buffers that is written, in place.

    Attributes:
        pair: all that the last queries attended to.
    """

    def __init__(self, bias: Any, pair: Any = None, place_1: Tensor | None = None):
        self.bias, self.pair, self.place_1 = bias, pair, place_1

    def mask(self, num_new: Any, key_bias: Any) -> Any:
        """The bias of all layers."""
        return self.bias

    def attend(self, q_BLNH: Tensor, key_BLKH: Tensor, value_BLKH: Tensor, bias: Tensor) -> Tensor:
        """Attention `[B, L, N, H]` over the keys so far and new ones."""
        key, value = key_BLKH.transpose([0, 2, 1, 3]), value_BLKH.transpose([0, 2, 1, 3])
        if self.place_1 is not None:
            begin, end = self.place_1, self.place_1 + 1
            self.pair[0][:, :, begin:end] = key
            self.pair[1][:, :, begin:end] = value
        elif self.pair is not None:
            self.pair = (
                paddle.concat([self.pair[0], key], axis=2),
                paddle.concat([self.pair[1], value], axis=2),
            )
        else:
            self.pair = (key, value)
        return biased_attention(q_BLNH, self.pair[0], self.pair[1], bias)


def tower(visual: Any, given: Given) -> list[Tensor]:
    """Patches in reading order to visual embeddings and deepstack levels, `[M, D]` each."""
    segments = PaddedSegments(given["segment_rows"], given["segment_bias"], given["segment_place"])
    taps = (given[name].transpose([1, 0]) for name in ("tap_rows", "tap_weights"))
    features = visual(given["pixel_values"], PatchRows(given["coordinates"], *taps), segments)
    return [features.merged, *features.levels]


def tower_specs(visual: Any) -> list[InputSpec]:
    """See `paddle_vl.batch.positions.PatchRows`, here `[4, P]`, and `PaddedSegments`."""
    return [
        spec("pixel_values", [None, visual.config.patch_dim], "float32"),
        spec("coordinates", [None, 2], "int64"),
        spec("tap_rows", [4, None], "int64"),
        spec("tap_weights", [4, None], "float32"),
        spec("segment_rows", [None, None], "int64"),
        spec("segment_bias", [None, None], "float32"),
        spec("segment_place", [None], "int64"),
    ]


def prefill(model: Any, given: Given) -> list[Tensor]:
    """Prompts to the logits after them `[B, V]`; each layer's keys and values `[B, K, L, H]`."""
    config, language_model, input_ids = model.config, model.language_model, given["input_ids"]
    embedding = language_model.embedding
    inputs = embedded(
        embedding,
        {
            "decoder_input": embedding.embed_tokens(input_ids),
            "position_ids": given["position_ids"],
            "visual_pos_masks": (input_ids == config.image_token_id)
            | (input_ids == config.video_token_id),
            "image_embeds": given["visual_embeds"],
            "deepstack_image_embeds": [given[f"level_{g}"] for g in range(embedding.num_levels)],
        },
    )
    place_L = paddle.arange(input_ids.shape[1], dtype="int64")
    causal_LL = (place_L.unsqueeze(0) <= place_L.unsqueeze(1)).astype("float32")
    visible_BLL = causal_LL.unsqueeze(0) * given["attention_mask"].astype("float32").unsqueeze(1)
    heads, key_heads = _heads(config)
    bias = query_blocks((1.0 - visible_BLL) * MASKED_SCORE, heads // key_heads)
    inputs["rotary_pos_emb"].prepare([heads, key_heads])
    caches = [ProgramCache(bias) for _ in range(len(language_model.layers))]
    hidden_TD = language_model.run(inputs, caches)
    hidden_BLD = hidden_TD.reshape([input_ids.shape[0], -1, hidden_TD.shape[-1]])
    logits_BV = model.lm_head(hidden_BLD[:, -1])
    return [logits_BV.astype("float32"), *[x for cache in caches for x in cache.pair]]


def prefill_specs(model: Any) -> list[InputSpec]:
    """Visual embeddings and levels are `[M, D]`, M may be 0."""
    rows = [None, model.config.text_config.hidden_size]
    return [
        spec("input_ids", [None, None], "int64"),
        spec("attention_mask", [None, None], "int64"),
        spec("position_ids", [3, None, None], "int64"),
        spec("visual_embeds", rows, "float32"),
        *[
            spec(f"level_{g}", rows, "float32")
            for g in range(model.language_model.embedding.num_levels)
        ],
    ]


def decode(model: Any, given: Given) -> Tensor:
    """One more token per prompt: logits `[B, V]`; keys and values are written into the buffers."""
    return _step(model, given, given["place"])[0]


def decode_with_past(model: Any, given: Given) -> list[Tensor]:
    """`decode` for ONNX, whose programs cannot write into inputs: it returns longer copies.

    Logits, then each layer's keys and values with the new ones, `[B, K, S + 1, H]`.
    """
    logits_BV, caches = _step(model, given, None)
    return [logits_BV, *[x for cache in caches for x in cache.pair]]


def _step(model: Any, given: Given, place_1: Tensor | None) -> tuple[Tensor, list[ProgramCache]]:
    """Logits after one token, and the caches."""
    heads, key_heads = _heads(model.config)
    # Of the keys of all query heads, `[B, K, N / K, C]`.
    hidden_BC = (1.0 - given["attention_mask"].astype("float32")) * MASKED_SCORE
    bias = hidden_BC.unsqueeze([1, 2]).tile([1, key_heads, heads // key_heads, 1])
    caches = [
        ProgramCache(bias, (given[f"key_{i}"], given[f"value_{i}"]), place_1)
        for i in range(len(model.language_model.layers))
    ]
    inputs = decoder_positions(model.config, given["position_ids"])
    inputs["rotary_pos_emb"].prepare([heads, key_heads])
    return step_logits(model, given["input_ids"], inputs, caches), caches


def decode_with_past_specs(model: Any) -> list[InputSpec]:
    """The mask `[B, S + 1]` is 1 at real keys, the new one among them."""
    text = model.config.text_config
    shape = [None, text.num_key_value_heads, None, text.head_dim]
    return [
        spec("input_ids", [None, 1], "int64"),
        spec("attention_mask", [None, None], "int64"),
        spec("position_ids", [3, None, 1], "int64"),
        *cache_specs(text.num_hidden_layers, shape),
    ]


def decode_specs(model: Any) -> list[InputSpec]:
    """The same with the place of the new token; the mask is `[B, C]`."""
    return [*decode_with_past_specs(model), spec("place", [1], "int64")]


def _heads(config: Any) -> tuple[int, int]:
    return config.text_config.num_attention_heads, config.text_config.num_key_value_heads


def to_export(family: FamilyEntry, folder: Path, base: str | None) -> ModelToExport:
    """The programs of a model folder with its processor, or of adapters and their base."""
    model = family.model_class().from_pretrained(folder, base=base)
    processor = VLProcessor.from_pretrained(folder_with("tokenizer.json", folder, base))
    check_processor_fits(model.config, processor)

    def save_files(out: Path) -> None:
        processor.save_pretrained(out)
        if model.generation_config is not None:
            model.generation_config.save_pretrained(out)

    return model_to_export(model, save_files)


def model_to_export(
    model: VLForConditionalGeneration, save_files: Callable[[Path], None]
) -> ModelToExport:
    """The three programs of a full model, with inputs to check them."""
    config, text, rng = model.config, model.config.text_config, np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(np.float32)

    # An image and a video of other sizes.
    vision = config.vision_config
    side = vision.spatial_merge_size
    grid = np.array([[1, side, 2 * side], [2, 2 * side, 3 * side]])
    pixels = normal(int(grid.prod(axis=1).sum()), vision.patch_dim)
    sizes = {
        "image_token_id": config.image_token_id,
        "video_token_id": config.video_token_id,
        "vocab_size": text.vocab_size,
        "table_side": vision.table_side,
        "merge": side,
    }
    if not vision.aligns_corners:
        sizes["aligns_corners"] = False
    pictures = tower_inputs(pixels, grid, ModelSizes(**sizes))
    # Two prompts of nine tokens, one padded on the left, with six visual tokens.
    ids_BL = np.full((2, 9), config.vision_start_token_id, dtype=np.int64)
    ids_BL[0, 2:6], ids_BL[1, 5:7] = config.image_token_id, config.video_token_id
    mask_BL = np.ones_like(ids_BL)
    mask_BL[1, :3] = 0
    names = ["visual_embeds"]
    names += [f"level_{g}" for g in range(len(model.language_model.deepstack_layers))]
    prompts = {
        "input_ids": ids_BL,
        "attention_mask": mask_BL,
        "position_ids": np.stack([np.maximum(mask_BL.cumsum(axis=1) - 1, 0)] * 3),
        **{name: normal(6, text.hidden_size) for name in names},
    }
    # One token after five, and buffers of eight with them.
    place, capacity = 5, 8
    caches = {
        str(one.name): normal(2, text.num_key_value_heads, capacity, text.head_dim)
        for one in cache_specs(text.num_hidden_layers, [])
    }
    token = {
        "input_ids": np.full((2, 1), config.vision_start_token_id, dtype=np.int64),
        "attention_mask": np.ones((2, place + 1), np.int64),
        "position_ids": np.full((3, 2, 1), place, dtype=np.int64),
    }
    past = token | {name: array[:, :, :place] for name, array in caches.items()}
    mask_BC = np.pad(token["attention_mask"], ((0, 0), (0, capacity - place - 1)))
    step = token | {"attention_mask": mask_BC, "place": np.array([place])} | caches
    programs = {
        "tower": ProgramToExport(model.visual, tower, tower_specs(model.visual), "tower", pictures),
        "prefill": ProgramToExport(model, prefill, prefill_specs(model), "decoder", prompts),
        "decode": ProgramToExport(model, decode, decode_specs(model), "decoder", step),
    }
    with_past = ProgramToExport(
        model, decode_with_past, decode_with_past_specs(model), "decoder", past
    )
    return ModelToExport(
        str(model.model_type),
        sizes,
        programs,
        save_files,
        programs | {"decode": with_past},
        takes_cpu_kernels=True,
    )
