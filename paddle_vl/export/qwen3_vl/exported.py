"""An exported Qwen3-VL or PaddleOCR-VL: text from messages and pictures, without the model's code.

Shapes: B batch, L prompt length, C capacity of the cache, M visual embeddings, V vocabulary.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, NamedTuple

import numpy as np
import paddle
from paddle import Tensor
from pydantic import Field

from paddle_vl.batch.positions import (
    checked_grid,
    frame_runs,
    mrope_position_ids,
    padded_segments,
    vision_layout,
)
from paddle_vl.batch.visual_index import check_visual_counts, compute_visual_indices
from paddle_vl.export.folder import ExportFolder
from paddle_vl.export.program import by_layer, with_room
from paddle_vl.families.hf_interface import id_rows
from paddle_vl.families.vlm.answering.chat import Answers
from paddle_vl.families.vlm.inputs.processor import VLProcessor, generation_settings
from paddle_vl.files.stored_settings import checked
from paddle_vl.generation.config import GenerationConfig, settings_of_call
from paddle_vl.generation.loop import Streamer, checked_prompts, chosen_tokens, collected

_Size = Annotated[int, Field(ge=1)]
# Buffers grow by this many positions, at least.
_CHUNK = 256


@checked
class ModelSizes:
    """What the runtime must know of the model's configuration."""

    image_token_id: Annotated[int, Field(ge=0)]
    video_token_id: Annotated[int, Field(ge=0)]
    vocab_size: _Size
    table_side: _Size
    merge: _Size
    aligns_corners: bool = True


class _Items(NamedTuple):
    """Pixels `[P, patch_dim]` and grids `[I, 3]` of images or videos."""

    pixels: np.ndarray
    grid: np.ndarray


class ExportedQwen3VL(Answers):
    """The programs of an exported model with its processor.

    Attributes:
        processor: tokenizer, image and video processing.
        generation_config: the checkpoint's, with the processor's end tokens if it names none.
    """

    def __init__(self, folder: ExportFolder):
        self._sizes = folder.sizes(ModelSizes)
        self._tower, self._prefill, self._decode = (
            folder.program(name) for name in ("tower", "prefill", "decode")
        )
        # Programs in ONNX return longer copies of the keys and values.
        self._writes_in_place = folder.runtime == "paddle"
        self.processor = VLProcessor.from_pretrained(folder.path, earlier_reasoning="drop")
        self.generation_config = generation_settings(folder.path)

    @property
    def tokens(self) -> "ExportedQwen3VL":
        """The programs."""
        return self

    def generate(
        self, input_ids: Any, *args: Any, streamer: Streamer | None = None, **batch: Any
    ) -> np.ndarray:
        """All new tokens, `[B, n]` int64; see `Qwen3VLForConditionalGeneration.generate`."""
        return collected(self.stream(input_ids, *args, **batch), input_ids, streamer)

    def stream(
        self,
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
        """Generate tokens; as `Qwen3VLForConditionalGeneration.stream`.

        Raises:
            ValueError: as there; or `prefill_chunk_size` is set.
        """
        vocab_size = self._sizes.vocab_size
        config = settings_of_call(generation_config, self.generation_config, overrides, vocab_size)
        if config.prefill_chunk_size is not None:
            raise ValueError(
                f"prefill_chunk_size is {config.prefill_chunk_size}, but an exported prefill runs "
                "whole prompts: leave it out, here or in generation_config.json (null)"
            )
        prompt_BL, mask_BL = checked_prompts(id_rows(input_ids), attention_mask)
        images = _items("image", pixel_values, image_grid_thw)
        videos = _items("video", pixel_values_videos, video_grid_thw)
        decoder = ExportedDecoder(self, prompt_BL, mask_BL, images, videos, config.max_new_tokens)
        return chosen_tokens(decoder, prompt_BL, mask_BL, config, on_logits)

    def decoder_of(self, ids_1L: np.ndarray, visual: Mapping[str, Any]) -> "ExportedDecoder":
        """A decoder of one prompt, of `ids_1L` int64 and its pixels and grids as of the processor.

        Raises:
            ValueError: the grids do not fit the pixels or the prompt.
        """
        images, videos = (
            _items(kind, visual.get(pixels), visual.get(f"{kind}_grid_thw"))
            for kind, pixels in (("image", "pixel_values"), ("video", "pixel_values_videos"))
        )
        return ExportedDecoder(self, ids_1L, np.ones_like(ids_1L), images, videos, _CHUNK)

    @property
    def vocab_size(self) -> int:
        """V."""
        return self._sizes.vocab_size

    def visual_rows(
        self, prompt_BL: np.ndarray, images: _Items | None, videos: _Items | None
    ) -> list[Tensor]:
        """Visual embeddings and levels in reading order, `[M, D]` each."""
        sizes = self._sizes
        is_image_BL, is_video_BL = (
            prompt_BL == token for token in (sizes.image_token_id, sizes.video_token_id)
        )
        num_images, num_videos = (
            0 if items is None else int(items.grid.prod(axis=1).sum()) // sizes.merge**2
            for items in (images, videos)
        )
        check_visual_counts(int(is_image_BL.sum()), num_images, int(is_video_BL.sum()), num_videos)
        given = [items for items in (images, videos) if items is not None]
        if not given:
            # The smallest picture, black: without any, the tower has no rows to attend to.
            side, ((_, width), _) = sizes.merge, self._tower.inputs["pixel_values"]
            pixels = np.zeros((side * side, width), dtype=np.float32)
            given = [_Items(pixels, np.array([[1, side, side]]))]
        grid = np.concatenate([items.grid for items in given])
        pixels = np.concatenate([items.pixels for items in given])
        outputs = self._tower(tower_inputs(pixels, grid, sizes))
        if images is None and videos is None:
            return [output[:0] for output in outputs]
        if images is not None and videos is not None:
            indices = compute_visual_indices(is_image_BL, is_video_BL, nonzero=np.flatnonzero)
            source: Any = paddle.to_tensor(np.asarray(indices.source))
            outputs = [paddle.index_select(output, source) for output in outputs]
        return outputs


def tower_inputs(pixels: np.ndarray, grid: np.ndarray, sizes: ModelSizes) -> dict[str, np.ndarray]:
    """Inputs of the tower's program by name, of pixels `[P, patch_dim]` and grids `[I, 3]`."""
    layout = vision_layout(
        grid,
        table_side=sizes.table_side,
        merge=sizes.merge,
        aligns_corners=sizes.aligns_corners,
    )
    rows_SQ, bias_SQ, place_P = padded_segments(frame_runs(grid))
    return {
        "pixel_values": pixels,
        "coordinates": layout.coordinates,
        "tap_rows": np.ascontiguousarray(layout.tap_rows.T),
        "tap_weights": np.ascontiguousarray(layout.tap_weights.T),
        "segment_rows": rows_SQ,
        "segment_bias": bias_SQ,
        "segment_place": place_P,
    }


def _items(kind: str, pixels: np.ndarray | None, grid: np.ndarray | None) -> _Items | None:
    """The images or the videos of a batch; None if it has none."""
    if pixels is None and grid is None:
        return None
    grid = checked_grid(kind, None if pixels is None else len(pixels), grid)
    return _Items(np.asarray(pixels, dtype=np.float32), grid)


class ExportedDecoder:
    """A batch of prompts, with the keys and values so far in buffers `[B, K, C, H]`."""

    def __init__(
        self,
        model: ExportedQwen3VL,
        prompt_BL: np.ndarray,
        mask_BL: np.ndarray,
        images: _Items | None,
        videos: _Items | None,
        max_new_tokens: int,
    ):
        self._model, self._prompt_BL, self._mask_BS = model, prompt_BL, mask_BL
        self._items: tuple[_Items | None, _Items | None] = images, videos
        sizes = model._sizes
        self._position_ids, rope_deltas_B = mrope_position_ids(
            prompt_BL,
            mask_BL,
            None if images is None else images.grid,
            None if videos is None else videos.grid,
            image_token_id=sizes.image_token_id,
            video_token_id=sizes.video_token_id,
            spatial_merge_size=sizes.merge,
        )
        self._next_position_B = mask_BL.sum(axis=1) + rope_deltas_B
        self._room = min(max_new_tokens, _CHUNK) if model._writes_in_place else 0
        self._buffers: list[Tensor] = []

    def prefill(self) -> Tensor:
        """Logits `[B, V]` float32 after the prompts."""
        visual_embeds, *levels = self._model.visual_rows(self._prompt_BL, *self._items)
        self._items = None, None
        logits_BV, *keys_values = self._model._prefill(
            {
                "input_ids": self._prompt_BL,
                "attention_mask": self._mask_BS,
                "position_ids": self._position_ids,
                "visual_embeds": visual_embeds,
                **{f"level_{g}": level for g, level in enumerate(levels)},
            }
        )
        self._buffers = keys_values
        if self._room:
            self._buffers = with_room(keys_values, self._room, axis=2)
        return logits_BV

    def advance(self, token_B: np.ndarray) -> Tensor:
        """Logits `[B, V]` float32 after one more token of each."""
        place, in_place = self._mask_BS.shape[1], self._model._writes_in_place
        if in_place and place == self._buffers[0].shape[2]:
            self._buffers = with_room(self._buffers, max(place, _CHUNK), axis=2)
        capacity = self._buffers[0].shape[2] if in_place else place + 1
        token_B1 = np.ascontiguousarray(token_B[:, None], dtype=np.int64)
        self._mask_BS = np.concatenate([self._mask_BS, np.ones_like(token_B1)], axis=1)
        mask_BC = np.zeros((len(token_B), capacity), dtype=np.int64)
        mask_BC[:, : place + 1] = self._mask_BS
        position_ids = np.broadcast_to(self._next_position_B[:, None], (3, len(token_B), 1))
        self._next_position_B = self._next_position_B + 1
        inputs = {
            "input_ids": token_B1,
            "attention_mask": mask_BC,
            "position_ids": np.ascontiguousarray(position_ids),
            **by_layer(self._buffers),
        }
        if in_place:
            inputs["place"] = np.array([place])
        logits_BV, *longer = self._model._decode(inputs)
        self._buffers = longer or self._buffers
        return logits_BV
