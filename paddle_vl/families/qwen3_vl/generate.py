"""Generation with a key-value cache; the vision tower and deepstack run once, in the prefill.

Shapes: B batch, L prompt length, S keys so far, V vocabulary, n new tokens.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import paddle
from paddle import Tensor

from paddle_vl.compat import strided_views
from paddle_vl.families.qwen3_vl.decoder import KeyValueCache
from paddle_vl.generation.config import GenerationConfig
from paddle_vl.generation.loop import checked_prompts, chosen_tokens

if TYPE_CHECKING:
    from paddle_vl.families.qwen3_vl.model import Qwen3VLForConditionalGeneration


def stream(
    model: "Qwen3VLForConditionalGeneration",
    input_ids: np.ndarray,
    attention_mask: np.ndarray | None = None,
    pixel_values: np.ndarray | None = None,
    image_grid_thw: np.ndarray | None = None,
    pixel_values_videos: np.ndarray | None = None,
    video_grid_thw: np.ndarray | None = None,
    *,
    generation_config: GenerationConfig | None = None,
    on_logits: Callable[[np.ndarray], None] | None = None,
    **overrides: Any,
) -> Iterator[np.ndarray]:
    """Generate tokens until every prompt has ended; arguments are checked at the call.

    Each step reads `[B]` ids on the host and nothing else.

    Args:
        input_ids: `[B, L]` int64 prompts, padded on the left so that all end at the last column.
        attention_mask: `[B, L]`, 1 at real tokens.
        pixel_values, image_grid_thw, pixel_values_videos, video_grid_thw: as of the model.
        generation_config: None for the model's own `generation_config`, or the defaults.
        on_logits: called with the float32 logits `[B, V]` of every step, before any rule.
        overrides: settings that replace those of the configuration, see `GenerationConfig`.

    Returns:
        Iterator of `[B]` int64, one per step; a prompt that has ended gives the pad token.

    Raises:
        ValueError: a prompt padded on the right, a bad setting, or a model split over ranks.
    """
    config = generation_config or model.generation_config or GenerationConfig()
    config = config.updated(**overrides)
    config.check_vocabulary(model.config.text_config.vocab_size)
    if model.placement.splits_parameters:
        raise ValueError(
            "this model is split over ranks; to generate, load the checkpoint in a single process"
        )
    prompt_BL, mask_BL = checked_prompts(input_ids, attention_mask)
    visual = {
        "pixel_values": pixel_values,
        "image_grid_thw": image_grid_thw,
        "pixel_values_videos": pixel_values_videos,
        "video_grid_thw": video_grid_thw,
    }
    return _chosen_tokens(model, prompt_BL, mask_BL, visual, config, on_logits)


def generate(model: "Qwen3VLForConditionalGeneration", *args: Any, **batch: Any) -> np.ndarray:
    """All new tokens, `[B, n]` int64, n <= max_new_tokens; arguments and errors as of `stream`."""
    return np.stack(list(stream(model, *args, **batch)), axis=1)


def _chosen_tokens(
    model: "Qwen3VLForConditionalGeneration",
    prompt_BL: np.ndarray,
    mask_BL: np.ndarray,
    visual: dict[str, np.ndarray | None],
    config: GenerationConfig,
    on_logits: Callable[[np.ndarray], None] | None,
) -> Iterator[np.ndarray]:
    decoder = _CachedDecoder(model, prompt_BL, mask_BL, visual)
    vocab, was_training = model.config.text_config.vocab_size, model.training
    model.eval()
    try:
        yield from chosen_tokens(decoder, prompt_BL, mask_BL, vocab, config, on_logits)
    finally:
        if was_training:
            model.train()


class _CachedDecoder:
    """A batch of prompts with the tokens appended so far, in the caches."""

    def __init__(
        self,
        model: "Qwen3VLForConditionalGeneration",
        prompt_BL: np.ndarray,
        mask_BL: np.ndarray,
        visual: dict[str, np.ndarray | None],
    ):
        self._model, self._prompt_BL, self._mask_BS = model, prompt_BL, mask_BL
        self._visual = visual
        self._position_ids, rope_deltas_B = model.position_ids(
            prompt_BL, mask_BL, visual["image_grid_thw"], visual["video_grid_thw"]
        )
        self._next_position_B = mask_BL.sum(axis=1) + rope_deltas_B
        self._has_padding = bool((mask_BL == 0).any())
        self._caches = [KeyValueCache() for _ in model.decoder_layers]

    def prefill(self) -> Tensor:
        """Logits `[B, V]` float32 after the prompts."""
        return self._last_logits(self._prompt_BL, self._position_ids, **self._visual)

    def advance(self, token_B: np.ndarray) -> Tensor:
        """Append a token to every prompt; logits `[B, V]` float32 after it.

        Empty indices make a chosen visual placeholder an ordinary token.
        """
        token_B1 = token_B[:, None]
        self._mask_BS = np.concatenate([self._mask_BS, np.ones_like(token_B1)], axis=1)
        position_ids = np.broadcast_to(self._next_position_B[:, None], (3, len(token_B), 1))
        self._next_position_B = self._next_position_B + 1
        nothing = paddle.zeros([0], dtype="int64")
        with strided_views():
            return self._last_logits(
                token_B1,
                np.ascontiguousarray(position_ids),
                visual_update_indices=nothing,
                visual_gather_indices=nothing,
            ).contiguous()

    def _last_logits(self, input_ids: np.ndarray, position_ids: np.ndarray, **rest: Any) -> Tensor:
        output = self._model(
            input_ids=input_ids,
            attention_mask=self._mask_BS,
            position_ids=position_ids,
            has_left_padding=self._has_padding,
            caches=self._caches,
            logits_to_keep=1,
            output_router_logits=False,
            **rest,
        )
        return output.logits[:, -1].astype("float32")
