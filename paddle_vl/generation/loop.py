"""The loop of generation: scores from a decoder, rules, the choice, until every prompt has ended.

Shapes: B batch, L prompt length, V vocabulary.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import numpy as np
import paddle

from paddle_vl.generation.config import GenerationConfig
from paddle_vl.generation.sampling import AnswerRow, Sampling, choose_tokens


class Streamer(Protocol):
    """HF's protocol of streamers."""

    def put(self, value: np.ndarray) -> None:
        """Takes the prompts `[B, L]` first, then the tokens `[B]` of each step; int64."""
        ...

    def end(self) -> None:
        """Called after the last token."""
        ...


def collected(
    steps: Iterable[np.ndarray], input_ids: np.ndarray, streamer: Streamer | None
) -> np.ndarray:
    """The tokens of all steps, `[B, n]` int64; a streamer gets them as they are chosen."""
    tokens = []
    if streamer is not None:
        streamer.put(np.asarray(input_ids))
    for token_B in steps:
        tokens.append(token_B)
        if streamer is not None:
            streamer.put(token_B)
    if streamer is not None:
        streamer.end()
    return np.stack(tokens, axis=1)


def checked_prompts(
    input_ids: np.ndarray, attention_mask: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """Prompts and mask `[B, L]` int64.

    Raises:
        ValueError: a prompt is padded on the right.
    """
    prompt_BL = np.asarray(input_ids, dtype=np.int64)
    mask_BL = np.ones_like(prompt_BL)
    if attention_mask is not None:
        mask_BL = np.asarray(attention_mask).astype(np.int64)
    if not mask_BL[:, -1].all():
        rows = np.flatnonzero(mask_BL[:, -1] == 0).tolist()
        raise ValueError(
            f"prompts {rows} are padded on the right, but generation continues at the last column: "
            "pad them on the left (data.padding_side: left)"
        )
    return prompt_BL, mask_BL


def chosen_tokens(
    decoder: Any,
    prompt_BL: np.ndarray,
    mask_BL: np.ndarray,
    config: GenerationConfig,
    on_logits: Callable[[np.ndarray], None] | None = None,
) -> Iterator[np.ndarray]:
    """`[B]` int64 ids, one array per step; a prompt that has ended gives the pad token.

    Each step reads `[B]` ids on the host and nothing else.

    Args:
        decoder: a batch of prompts; its `prefill()` gives the logits `[B, V]` float32 after them,
            `advance(token_B)` those after one more token of each.
        on_logits: called with the float32 logits `[B, V]` of every step, before any rule.
    """
    sampling = Sampling(
        config.max_new_tokens,
        min_tokens=config.min_new_tokens,
        temperature=config.temperature if config.do_sample else 0.0,
        top_k=config.top_k,
        top_p=config.top_p,
        repetition_penalty=config.repetition_penalty,
        # One for all prompts, which draw numbers of their own.
        seed=np.random.SeedSequence(config.seed).entropy,  # pyright: ignore[reportArgumentType]
        stop_token_ids=tuple(config.eos_token_ids),
    )
    prompts = enumerate(zip(prompt_BL, mask_BL.astype(bool), strict=True))
    rows = [AnswerRow(sampling, ids_L[mask_L], number) for number, (ids_L, mask_L) in prompts]
    ended_B = np.zeros(len(prompt_BL), dtype=bool)
    token_B = None
    for _ in range(config.max_new_tokens):
        with paddle.no_grad():
            logits_BV = decoder.prefill() if token_B is None else decoder.advance(token_B)
            if on_logits is not None:
                on_logits(logits_BV.numpy())
            token_B = np.array([choice.token_id for choice in choose_tokens(logits_BV, rows)])
        for row, token in zip(rows, token_B.tolist(), strict=True):
            row.append(token)
        if config.fill_token_id is not None:
            token_B = np.where(ended_B, config.fill_token_id, token_B)
        ended_B |= np.isin(token_B, config.eos_token_ids)
        yield token_B
        if ended_B.all():
            return
