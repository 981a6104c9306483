"""Choice of the next token: rules on scores in HF's order, then the maximum or a sample.

Shapes: B batch, L prompt length, V vocabulary. Scores are float32 `[B, V]`; an excluded token has
-inf.

Source: generation/logits_process.py of HF transformers; equal to it on equal logits. If the limit
of top-p falls between tokens of equal score, those of smaller id are excluded.
"""

from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import Tensor

from paddle_vl.generation.config import GenerationConfig


def penalize_repetition(scores_BV: Tensor, seen_BV: Tensor, penalty: float) -> Tensor:
    """Divide positive and multiply negative scores of seen tokens by the penalty.

    Args:
        seen_BV: bool, True at tokens of the prompt and the answer so far.
    """
    penalized_BV = paddle.where(scores_BV < 0, scores_BV * penalty, scores_BV / penalty)
    return paddle.where(seen_BV, penalized_BV, scores_BV)


def rule_out(scores_BV: Tensor, ruled_out: Tensor) -> Tensor:
    """-inf where `ruled_out`, bool of a shape that broadcasts to `[B, V]`."""
    return paddle.where(ruled_out, paddle.full([], -np.inf, scores_BV.dtype), scores_BV)


def keep_top_k(scores_BV: Tensor, top_k: int) -> Tensor:
    """Exclude scores below the k-th highest; scores equal to it stay."""
    kth_B1 = paddle.topk(scores_BV, min(top_k, scores_BV.shape[-1]))[0][:, -1:]
    return rule_out(scores_BV, scores_BV < kth_B1)


def keep_top_p(scores_BV: Tensor, top_p: float) -> Tensor:
    """Keep the fewest most likely tokens whose probabilities reach `top_p`, at least one."""
    order_BV = paddle.argsort(scores_BV, axis=-1, stable=True)
    ascending_BV = paddle.take_along_axis(scores_BV, order_BV, axis=-1)
    reached_BV = F.softmax(ascending_BV, axis=-1).cumsum(axis=-1)
    unlikely_BV = (reached_BV <= 1 - top_p).astype("int32")
    unlikely_BV[:, -1] = 0
    unlikely_BV = paddle.put_along_axis(
        paddle.zeros_like(unlikely_BV), order_BV, unlikely_BV, axis=-1
    )
    return rule_out(scores_BV, unlikely_BV.astype("bool"))


class LogitsRules:
    """The rules of a configuration, in HF's order, and the tokens that each answer has seen."""

    def __init__(
        self, config: GenerationConfig, prompt_BL: np.ndarray, is_real_BL: np.ndarray, vocab: int
    ):
        """Start from the prompts.

        Args:
            prompt_BL: int64 ids.
            is_real_BL: bool, False at padding.
            vocab: V.
        """
        self._config, self._num_steps = config, 0
        self._seen_BV = self._ending_V = self._vocab_V = None
        if config.repetition_penalty != 1:
            seen_BV = np.zeros((len(prompt_BL), vocab), dtype=bool)
            row, column = np.nonzero(is_real_BL)
            seen_BV[row, prompt_BL[row, column]] = True
            self._seen_BV = paddle.to_tensor(seen_BV)
            self._vocab_V = paddle.arange(vocab, dtype="int64")
        if config.min_new_tokens and config.eos_token_ids:
            self._ending_V = paddle.to_tensor(np.isin(np.arange(vocab), config.eos_token_ids))

    def __call__(self, logits_BV: Tensor) -> Tensor:
        """Scores of the next token, `[B, V]` float32."""
        config, scores_BV = self._config, logits_BV.astype("float32")
        if self._seen_BV is not None:
            scores_BV = penalize_repetition(scores_BV, self._seen_BV, config.repetition_penalty)
        if self._ending_V is not None and self._num_steps < config.min_new_tokens:
            scores_BV = rule_out(scores_BV, self._ending_V)
        if config.do_sample:
            if config.temperature != 1:
                scores_BV = scores_BV / config.temperature
            if config.top_k:
                scores_BV = keep_top_k(scores_BV, config.top_k)
            if config.top_p < 1:
                scores_BV = keep_top_p(scores_BV, config.top_p)
        return scores_BV

    def append(self, token_B: Tensor) -> None:
        """Mark the chosen tokens `[B]` as seen."""
        self._num_steps += 1
        if self._seen_BV is not None:
            self._seen_BV = self._seen_BV | (self._vocab_V == token_B.unsqueeze(1))


class RowDraws:
    """Uniform numbers in [0, 1), one generator per prompt, from the seed and the prompt's number.

    Draws of a prompt do not depend on the other prompts of the batch.
    """

    def __init__(self, seed: int | None, num_rows: int):
        entropy: Any = np.random.SeedSequence(seed).entropy
        self._rows = [np.random.default_rng([entropy, row]) for row in range(num_rows)]

    def next(self) -> Tensor:
        """`[B, 1]` float64."""
        return paddle.to_tensor(np.array([[row.random()] for row in self._rows]))


def draw_tokens(scores_BV: Tensor, uniform_B1: Tensor) -> Tensor:
    """Inverse of the cumulative distribution softmax(scores): `[B]` int64.

    Args:
        uniform_B1: float64 in [0, 1). A token of probability 0 is never drawn.
    """
    # On the CPU softmax and exp give a score of -inf a tiny probability instead of 0.
    is_possible_BV = (scores_BV > -np.inf).astype("float64")
    weight_BV = F.softmax(scores_BV, axis=-1).astype("float64") * is_possible_BV
    reached_BV = weight_BV.cumsum(axis=-1)
    return (reached_BV <= uniform_B1 * reached_BV[:, -1:]).sum(axis=-1)


class TokenChoice:
    """Greedy or sampled choice, by the configuration."""

    def __init__(self, config: GenerationConfig, num_rows: int):
        self._draws = RowDraws(config.seed, num_rows) if config.do_sample else None

    def __call__(self, scores_BV: Tensor) -> Tensor:
        """The next tokens, `[B]` int64."""
        if self._draws is None:
            return scores_BV.argmax(axis=-1)
        return draw_tokens(scores_BV, self._draws.next())
