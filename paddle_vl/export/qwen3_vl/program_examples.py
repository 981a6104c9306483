"""Inputs that check the programs of an exported model, and the sizes that its runtime must know."""

import numpy as np

from paddle_vl.batch.positions import padded_segments, vision_layout
from paddle_vl.families.qwen3_vl.config import Qwen3VLConfig
from paddle_vl.families.qwen3_vl.model import Qwen3VLForConditionalGeneration


def sizes(config: Qwen3VLConfig) -> dict[str, int]:
    """What the runtime must know, see `paddle_vl.export.qwen3_vl.exported.Sizes`."""
    return {
        "image_token_id": config.image_token_id,
        "video_token_id": config.video_token_id,
        "vocab_size": config.text_config.vocab_size,
        "table_side": config.vision_config.table_side,
        "merge": config.vision_config.spatial_merge_size,
    }


def tower_example(
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


def prompt_example(
    model: Qwen3VLForConditionalGeneration, rng: np.random.Generator, length: int = 9
) -> dict[str, np.ndarray]:
    """Two prompts of at least nine tokens, one padded on the left, with six visual tokens."""
    config = model.config
    ids_BL = np.full((2, length), config.vision_start_token_id, dtype=np.int64)
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


def step_example(
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


def past_of(step: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same step with the keys and values before it."""
    place = int(step["place"][0])
    cut = {name: array[:, :, :place] for name, array in step.items() if array.ndim == 4}
    mask_BS = step["attention_mask"][:, : place + 1]
    given = {name: step[name] for name in ("input_ids", "position_ids")}
    return {**given, "attention_mask": mask_BS, **cut}


def _normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.normal(size=shape).astype(np.float32)
