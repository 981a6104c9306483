"""Greedy decoding with a key-value cache: the tower and deepstack run once, in the prefill.

Shapes: B batch, L prompt length, V vocabulary.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import paddle

from paddle_vl.models.qwen3_vl.decoder import KeyValueCache

if TYPE_CHECKING:
    from paddle_vl.models.qwen3_vl.model import Qwen3VLForConditionalGeneration


def greedy_decode(
    model: "Qwen3VLForConditionalGeneration",
    input_ids: np.ndarray,
    attention_mask: np.ndarray | None = None,
    *,
    max_new_tokens: int,
    eos_token_ids: list[int],
    min_new_tokens: int = 0,
    on_logits: Callable[[np.ndarray], None] | None = None,
    **visual: Any,
) -> np.ndarray:
    """The most likely next token, again and again, until every row has ended.

    Args:
        input_ids: `[B, L]` prompts, padded on the left so that all end at the last column.
        attention_mask: `[B, L]`, 1 at real tokens.
        max_new_tokens: the most tokens to append.
        eos_token_ids: tokens that end a row; its later columns repeat the first of them.
        min_new_tokens: before this many, ending tokens are not chosen.
        on_logits: called with the float32 logits `[B, V]` of every step, before any is ruled out.
        visual: pixel values and grids as the model takes them.

    Returns:
        `[B, n]` int64 new tokens, n <= max_new_tokens.

    Raises:
        ValueError: a prompt padded on the right, or no room for a token.
    """
    steps = greedy_steps(model, input_ids, attention_mask, **visual)
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {max_new_tokens}; it must be at least 1")
    columns: list[np.ndarray] = []
    ended_B = np.zeros(len(input_ids), dtype=bool)
    logits_BV = next(steps)
    while True:
        if on_logits is not None:
            on_logits(logits_BV)
        if len(columns) < min_new_tokens:
            logits_BV = logits_BV.copy()
            logits_BV[:, eos_token_ids] = -np.inf
        token_B = logits_BV.argmax(axis=1)
        if eos_token_ids:
            token_B = np.where(ended_B, eos_token_ids[0], token_B)
        columns.append(token_B)
        ended_B |= np.isin(token_B, eos_token_ids)
        if ended_B.all() or len(columns) == max_new_tokens:
            return np.stack(columns, axis=1)
        logits_BV = steps.send(token_B)


def greedy_steps(
    model: "Qwen3VLForConditionalGeneration",
    input_ids: np.ndarray,
    attention_mask: np.ndarray | None = None,
    **visual: Any,
) -> Iterator[np.ndarray]:
    """A generator of next-token logits `[B, V]` float32: send it the tokens `[B]` it should append.

    Raises:
        ValueError: a prompt padded on the right.
    """
    input_ids = np.asarray(input_ids, dtype=np.int64)
    mask_BS = (
        np.ones_like(input_ids)
        if attention_mask is None
        else np.asarray(attention_mask).astype(int)
    )
    if not mask_BS[:, -1].all():
        rows = np.flatnonzero(mask_BS[:, -1] == 0).tolist()
        raise ValueError(
            f"prompts {rows} are padded on the right; generation continues at the last column, so "
            "pad them on the left (data.padding_side: left)"
        )
    position_ids, rope_deltas_B = model.position_ids(
        input_ids, mask_BS, visual.get("image_grid_thw"), visual.get("video_grid_thw")
    )
    caches = [KeyValueCache() for _ in model.decoder_layers]
    has_padding = bool((mask_BS == 0).any())
    next_position_B = mask_BS.sum(axis=1) + rope_deltas_B
    was_training = model.training
    model.eval()
    try:
        while True:
            with paddle.no_grad():
                output = model(
                    input_ids=input_ids,
                    attention_mask=mask_BS,
                    position_ids=position_ids,
                    has_left_padding=has_padding,
                    caches=caches,
                    **visual,
                )
                logits_BV = output.logits[:, -1].astype("float32").numpy()
            token_B = yield logits_BV
            visual = {}
            input_ids = np.asarray(token_B, dtype=np.int64)[:, None]
            mask_BS = np.concatenate([mask_BS, np.ones_like(input_ids)], axis=1)
            position_ids = np.broadcast_to(next_position_B[None, :, None], (3, len(token_B), 1))
            position_ids = np.ascontiguousarray(position_ids)
            next_position_B = next_position_B + 1
    finally:
        if was_training:
            model.train()
