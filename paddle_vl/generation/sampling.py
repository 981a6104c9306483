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


def rule_out(scores_BV: Tensor, ruled_out: Tensor) -> Tensor:
    """-inf where `ruled_out`, bool of a shape that broadcasts to `[B, V]`."""
    return paddle.where(ruled_out, paddle.full([], -np.inf, scores_BV.dtype), scores_BV)


def keep_top_p(scores_BV: Tensor, top_p: float | np.ndarray) -> Tensor:
    """Keep the fewest most likely tokens whose probabilities reach `top_p`, at least one; `[B, 1]`
    has one for each row."""
    rest: Any = 1 - top_p
    if isinstance(rest, np.ndarray):
        rest = paddle.to_tensor(rest.astype(np.float32))
    order_BV = paddle.argsort(scores_BV, axis=-1, stable=True)
    ascending_BV = paddle.take_along_axis(scores_BV, order_BV, axis=-1)
    reached_BV = F.softmax(ascending_BV, axis=-1).cumsum(axis=-1)
    unlikely_BV = (reached_BV <= rest).astype("int32")
    unlikely_BV[:, -1] = 0
    unlikely_BV = paddle.put_along_axis(
        paddle.zeros_like(unlikely_BV), order_BV, unlikely_BV, axis=-1
    )
    return rule_out(scores_BV, unlikely_BV.astype("bool"))


class TokenChoice:
    """The rules of a configuration, in HF's order, then the maximum or a sample.

    Samples of a prompt come from a generator of its own, by the seed and the prompt's number, so
    they do not depend on the other prompts of the batch.

    Args:
        prompt_BL: int64 ids.
        is_real_BL: bool, False at padding.
        vocab: V.
    """

    def __init__(
        self, config: GenerationConfig, prompt_BL: np.ndarray, is_real_BL: np.ndarray, vocab: int
    ):
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
        entropy: Any = np.random.SeedSequence(config.seed).entropy
        self._draws = [np.random.default_rng([entropy, row]) for row in range(len(prompt_BL))]

    def __call__(self, logits_BV: Tensor) -> Tensor:
        """The next tokens, `[B]` int64, which are seen from now on."""
        scores_BV = self.scores(logits_BV)
        if self._config.do_sample:
            numbers_B1 = np.array([[draw.random()] for draw in self._draws])
            token_B = draw_tokens(scores_BV, paddle.to_tensor(numbers_B1))
        else:
            token_B = scores_BV.argmax(axis=-1)
        self.append(token_B)
        return token_B

    def append(self, token_B: Tensor) -> None:
        """Mark the chosen tokens `[B]` as seen."""
        self._num_steps += 1
        if self._seen_BV is not None:
            self._seen_BV = self._seen_BV | (self._vocab_V == token_B.unsqueeze(1))

    def scores(self, logits_BV: Tensor) -> Tensor:
        """Scores of the next token, `[B, V]` float32."""
        config, scores_BV = self._config, logits_BV.astype("float32")
        if self._seen_BV is not None:
            penalty = config.repetition_penalty
            of_seen_BV = paddle.where(scores_BV < 0, scores_BV * penalty, scores_BV / penalty)
            scores_BV = paddle.where(self._seen_BV, of_seen_BV, scores_BV)
        if self._ending_V is not None and self._num_steps < config.min_new_tokens:
            scores_BV = rule_out(scores_BV, self._ending_V)
        if config.do_sample:
            if config.temperature != 1:
                scores_BV = scores_BV / config.temperature
            if config.top_k:
                # Scores equal to the k-th highest stay.
                top_BK = paddle.topk(scores_BV, min(config.top_k, scores_BV.shape[-1]))[0]
                scores_BV = rule_out(scores_BV, scores_BV < top_BK[:, -1:])
            if config.top_p < 1:
                scores_BV = keep_top_p(scores_BV, config.top_p)
        return scores_BV


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
