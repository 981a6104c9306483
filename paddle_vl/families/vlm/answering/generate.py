"""Generation with a key-value cache; the vision tower and deepstack run once, in the prefill.

Shapes: B batch, L prompt length, S keys so far, V vocabulary, n new tokens.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import paddle
from paddle import Tensor

from paddle_vl.families.hf_interface import id_rows
from paddle_vl.families.vlm.modeling.call_arguments import called_batch, indices_of
from paddle_vl.families.vlm.modeling.layers import VisionFeatures, decoder_positions
from paddle_vl.families.vlm.modeling.moe import routed_rows
from paddle_vl.generation.config import GenerationConfig, settings_of_call
from paddle_vl.generation.loop import checked_prompts, chosen_tokens
from paddle_vl.nn.attention import RotaryTables
from paddle_vl.nn.transfer import on_device


def stream(
    model: Any,
    input_ids: np.ndarray,
    attention_mask: np.ndarray | None = None,
    pixel_values: np.ndarray | None = None,
    image_grid_thw: np.ndarray | None = None,
    pixel_values_videos: np.ndarray | None = None,
    video_grid_thw: np.ndarray | None = None,
    *,
    generation_config: GenerationConfig | None = None,
    on_logits: Callable[[np.ndarray], None] | None = None,
    kept: list[Any] | None = None,
    **overrides: Any,
) -> Iterator[np.ndarray]:
    """Generate tokens until every prompt has ended; arguments are checked at the call.

    Each step reads `[B]` ids on the host and nothing else.

    Args:
        model: a `paddle_vl.families.vlm.modeling.model.VLForConditionalGeneration`.
        input_ids: `[B, L]` int64 prompts or lists, padded on the left so that all end at the last
            column.
        attention_mask: `[B, L]`, 1 at real tokens.
        pixel_values, image_grid_thw, pixel_values_videos, video_grid_thw: as of the model.
        generation_config: None for the model's own `generation_config`, or the defaults.
        on_logits: called with the float32 logits `[B, V]` of every step, before any rule.
        kept: [] at first; the caches of a call, for a next one that begins with what they have.
        overrides: settings that replace those of the configuration, see `GenerationConfig`; HF's
            names are explained.

    Returns:
        Iterator of `[B]` int64, one per step; a prompt that has ended gives the pad token.

    Raises:
        ValueError: a prompt padded on the right, a bad setting, or a model split over ranks.
    """
    vocab_size = model.config.text_config.vocab_size
    config = settings_of_call(generation_config, model.generation_config, overrides, vocab_size)
    if model.placement.splits_parameters:
        raise ValueError(
            "this model is split over ranks; to generate, load the checkpoint in a single process"
        )
    prompt_BL, mask_BL = checked_prompts(id_rows(input_ids), attention_mask)
    visual = {
        "pixel_values": pixel_values,
        "image_grid_thw": image_grid_thw,
        "pixel_values_videos": pixel_values_videos,
        "video_grid_thw": video_grid_thw,
    }

    def steps() -> Iterator[np.ndarray]:
        decoder = _CachedDecoder(model, prompt_BL, mask_BL, visual, config, kept)
        was_training = model.training
        model.eval()
        try:
            yield from chosen_tokens(decoder, prompt_BL, mask_BL, config, on_logits)
            if kept is not None:
                kept.append(decoder)
        finally:
            if was_training:
                model.train()

    return steps()


def step_logits(
    model: Any,
    input_ids: Tensor,
    inputs: dict[str, Any],
    caches: list[Any],
) -> Tensor:
    """Logits `[B, V]` float32 after one more token per prompt, whose keys the caches get.

    No visual indices: a chosen placeholder is an ordinary token.

    Args:
        model: has `language_model` and `lm_head`: a model, or a program of one.
        input_ids: `[B, 1]` int64.
        inputs: of `LanguageModel.run`, without the hidden states.
        caches: one per layer, see `LanguageModel.run`.
    """
    hidden_BD = model.language_model.embedding.embed_tokens(input_ids.reshape([-1]))
    inputs = inputs | {"hidden_states": hidden_BD, "input_ids": input_ids}
    hidden_BD = model.language_model.run(inputs, caches)
    return model.lm_head(hidden_BD).astype("float32")


class _CachedDecoder:
    """A batch of prompts with the tokens appended so far, in the caches."""

    # Rotary tables are made for this many steps at once.
    TABLE_STEPS = 64

    def __init__(
        self,
        model: Any,
        prompt_BL: np.ndarray,
        mask_BL: np.ndarray,
        visual: dict[str, np.ndarray | None],
        config: GenerationConfig,
        kept: "list[_CachedDecoder] | None",
    ):
        self._model, self._prompt_BL, self._mask_BS = model, prompt_BL, mask_BL
        self._visual, self._chunk = visual, config.prefill_chunk_size
        self._position_ids, rope_deltas_B = model.position_ids(
            prompt_BL, mask_BL, visual["image_grid_thw"], visual["video_grid_thw"]
        )
        self._next_position_B = mask_BL.sum(axis=1) + rope_deltas_B
        self._has_padding = bool((mask_BL == 0).any())
        length = prompt_BL.shape[1]
        # The last token's keys are never needed.
        most = length + config.max_new_tokens - 1 if kept is None else None
        self._caches = model.new_caches(length, most)
        self._num_steps, self._tables = 0, None
        self._cached: dict[str, Any] = {"ids_LB": prompt_BL.T, **visual}
        if kept:
            self._continue(kept.pop())

    def _continue(self, earlier: "_CachedDecoder") -> None:
        """Take the caches of earlier prompts and answers if these prompts begin with them, without
        padding."""
        if self._has_padding or earlier._has_padding:
            return
        new: dict[str, Any] = {}
        for name, array in self._cached.items():
            old = earlier._cached[name]
            count = 0 if old is None else len(old)
            if old is not None and (array is None or not np.array_equal(old, array[:count])):
                return
            new[name] = None if array is None or len(array) == count else array[count:]
        if (ids_LB := new.pop("ids_LB")) is not None:
            self._caches, self._visual = earlier._caches, new
            self._prompt_BL, self._mask_BS = ids_LB.T, self._mask_BS[:, -len(ids_LB) :]
            self._position_ids = self._position_ids[:, :, -len(ids_LB) :]

    @paddle.no_grad()
    def prefill(self) -> Tensor:
        """Logits `[B, V]` float32 after the prompts, whose columns run in chunks."""
        model, length = self._model, self._prompt_BL.shape[1]
        given = {"position_ids": self._position_ids, **self._visual}
        batch = called_batch(model.config, model.placement.ops, self._prompt_BL, **given)
        mask_BL = self._mask_BS if self._has_padding else None
        features = model.encode_visual(batch)
        prompts = EmbeddedPrompts(model, self._prompt_BL, self._position_ids, features, mask_BL)
        chunk = self._chunk or length
        for begin in range(0, length, chunk):
            hidden_BLD = prompts.run(begin, min(begin + chunk, length), self._caches)
        return model.lm_head(hidden_BLD[:, -1]).astype("float32")

    @paddle.no_grad()
    def advance(self, token_B: np.ndarray) -> Tensor:
        """Append a token to every prompt; logits `[B, V]` float32 after it."""
        token_B1 = np.ascontiguousarray(token_B[:, None])
        self._cached["ids_LB"] = np.concatenate([self._cached["ids_LB"], token_B1.T])
        # Position and rotary table of the token, from tables of several steps.
        place = self._num_steps % self.TABLE_STEPS
        if place == 0:
            steps_BP = self._next_position_B[:, None] + np.arange(self.TABLE_STEPS)
            steps_3BP = np.repeat(steps_BP[None] + self._num_steps, 3, axis=0)
            self._tables = decoder_positions(self._model.config, paddle.to_tensor(steps_3BP))
        self._num_steps += 1
        assert self._tables is not None, "made before the first step"
        inputs = columns_of(self._tables, place, place + 1)
        if self._has_padding:
            self._mask_BS = np.concatenate([self._mask_BS, np.ones_like(token_B1)], axis=1)
            inputs["attention_mask"] = paddle.to_tensor(self._mask_BS)
        return step_logits(self._model, paddle.to_tensor(token_B1), inputs, self._caches)


class EmbeddedPrompts:
    """Embedded prompts, whose columns run through the decoder in parts, one after the other.

    Visual rows and deepstack levels go with their tokens. Layers see the rows of one part and the
    keys of those before it; the tower has run once.

    Args:
        prompt_BL: int64 ids.
        position_ids: `[3, B, L]` int64.
        features: of the images and videos in the prompts, see `model.encode_visual`.
        mask_BL: 1 at real tokens; None without padding.
    """

    def __init__(
        self,
        model: Any,
        prompt_BL: np.ndarray,
        position_ids: np.ndarray,
        features: VisionFeatures | None,
        mask_BL: np.ndarray | None = None,
    ):
        self._model, self._prompt_BL, self._mask_BL = model, prompt_BL, mask_BL
        config, ops = model.config, model.placement.ops
        batch = called_batch(config, ops, prompt_BL, mask_BL, position_ids=position_ids)
        if features is not None:
            ids = (config.image_token_id, config.video_token_id)
            counts = [int((prompt_BL == token_id).sum()) for token_id in ids]
            batch = on_device(batch | indices_of(prompt_BL, ids, ops, counts))
        self._whole = model.language_model.embedding(batch, features)

    def run(self, begin: int, end: int, caches: list[Any]) -> Tensor:
        """Hidden states `[B, end - begin, D]` of some columns, whose keys the caches get."""
        batch, length = self._prompt_BL.shape
        inputs = self._whole if end - begin == length else self._columns(begin, end)
        return self._model.language_model.run(inputs, caches).reshape([batch, end - begin, -1])

    def _columns(self, begin: int, end: int) -> dict[str, Any]:
        """The decoder's inputs for some columns of the prompts."""
        batch, length = self._prompt_BL.shape
        whole, inputs = self._whole, columns_of(self._whole, begin, end)
        inputs["input_ids"] = whole["input_ids"][:, begin:end]
        hidden_BLD = whole["hidden_states"].reshape([batch, length, -1])
        inputs["hidden_states"] = hidden_BLD[:, begin:end].reshape([batch * (end - begin), -1])
        if (mask_BL := self._mask_BL) is not None:
            inputs["attention_mask"] = paddle.to_tensor(mask_BL[:, :end].copy())
            if whole.get("routed_rows") is not None:
                rows = routed_rows((batch, end - begin), mask_BL[:, begin:end])
                inputs["routed_rows"] = rows
        ids = (self._model.config.image_token_id, self._model.config.video_token_id)
        # Reading order, as the rows of the levels.
        row_M, column_M = np.nonzero(np.isin(self._prompt_BL, ids))
        inside = np.flatnonzero((column_M >= begin) & (column_M < end))
        if (levels := whole.get("deepstack_visual_emb")) and len(inside):
            update = row_M[inside] * (end - begin) + column_M[inside] - begin
            inputs["visual_update_indices"] = paddle.to_tensor(update)
            taken = paddle.to_tensor(inside)
            inputs["deepstack_visual_emb"] = [paddle.index_select(each, taken) for each in levels]
        return inputs


def columns_of(inputs: dict[str, Any], begin: int, end: int) -> dict[str, Any]:
    """Positions and rotary tables of some columns."""
    # Not views, which each layer would copy.
    tables = (x[:, begin:end].contiguous() for x in inputs["rotary_pos_emb"])
    return {
        "position_ids": inputs["position_ids"][:, :, begin:end],
        "rotary_pos_emb": RotaryTables(*tables),
    }
