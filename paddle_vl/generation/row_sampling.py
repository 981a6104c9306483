"""The next tokens of rows that each have settings of their own.

The rules and their order are those of `paddle_vl.generation.sampling`; penalties of presence and
frequency follow that of repetition, as in vLLM. A row's choice depends on no other row: with a seed
it draws the numbers that a prompt alone does.

Shapes: R rows, V vocabulary, K candidates, T penalized tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import Tensor

from paddle_vl.generation.sampling import draw_tokens, keep_top_p, rule_out

# Ids of the answer so far to the tokens that may follow, bool `[V]`; None for all.
Allowed = Callable[[list[int]], np.ndarray | None]
# With at most this top_k in all rows, only so many candidates are sorted, and some more, since
# scores equal to the k-th highest stay.
_MOST_CANDIDATES, _TIES = 512, 32


@dataclass(frozen=True)
class Sampling:
    """How the tokens of an answer are chosen. Names as in OpenAI's and vLLM's interfaces.

    Attributes:
        max_tokens: the answer ends after so many.
        temperature: divides the scores; 0 takes the most likely token.
        top_k: sample among the k most likely; 0 among all.
        top_p: sample among the most likely that together have this probability.
        min_p: sample among those of at least this share of the highest probability.
        repetition_penalty: of tokens in prompt or answer, as in HF; 1 has no effect.
        presence_penalty, frequency_penalty: subtracted from the scores of tokens of the answer,
            once and as often as they occur; 0 has no effect.
        seed: of sampling; None for a different one each time.
        stop_token_ids: each ends the answer, as its last token.
        logprobs: give the log-probability of each token and this many of the most likely ones, of
            the scores before any rule; None for neither.
        allowed: called on the model's thread with the answer so far before each token.

    Raises:
        ValueError: a value is out of range.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    allowed: Allowed | None = None

    def __post_init__(self):
        for name, fits, range_ in (
            ("max_tokens", self.max_tokens >= 1, "at least 1"),
            ("temperature", 0 <= self.temperature < np.inf, "at least 0"),
            ("top_k", self.top_k >= 0, "at least 0"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("min_p", 0 <= self.min_p <= 1, "from 0 to 1"),
            ("repetition_penalty", 0 < self.repetition_penalty < np.inf, "above 0"),
            ("presence_penalty", abs(self.presence_penalty) < np.inf, "finite"),
            ("frequency_penalty", abs(self.frequency_penalty) < np.inf, "finite"),
            ("seed", self.seed is None or self.seed >= 0, "at least 0"),
            ("logprobs", self.logprobs is None or self.logprobs >= 0, "at least 0"),
        ):
            if not fits:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be {range_}")

    @property
    def samples(self) -> bool:
        return self.temperature > 0

    @property
    def penalizes(self) -> bool:
        penalties = (self.presence_penalty, self.frequency_penalty)
        return self.repetition_penalty != 1 or any(penalties)


class Choice(NamedTuple):
    """A chosen token; its log-probability and (token, log-probability) of the most likely ones, if
    the row asks for them."""

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class AnswerRow:
    """An answer so far, and what the choice of its next token depends on.

    Attributes:
        ids: of the answer.
    """

    def __init__(self, sampling: Sampling, prompt_L: np.ndarray):
        self.sampling, self.ids = sampling, []
        entropy: Any = np.random.SeedSequence(sampling.seed).entropy
        # As of the first prompt of a batch.
        self._random = np.random.default_rng([entropy, 0])
        seen = np.unique(prompt_L) if sampling.repetition_penalty != 1 else np.zeros(0, np.int64)
        # Tokens that are penalized, and how often the answer has them.
        self._seen_T, self._counts_T = seen, np.zeros(len(seen))

    def append(self, token_id: int) -> None:
        """Add a chosen token."""
        self.ids.append(token_id)
        if not self.sampling.penalizes:
            return
        place = np.flatnonzero(self._seen_T == token_id)
        if not len(place):
            self._seen_T = np.append(self._seen_T, token_id)
            self._counts_T = np.append(self._counts_T, 0.0)
        self._counts_T[place if len(place) else -1] += 1

    def draw(self) -> float:
        """The next number in [0, 1)."""
        return self._random.random()

    def penalties(self, size: int) -> np.ndarray:
        """float64 `[3, size]`: tokens, what their scores are divided by, and what is subtracted
        then; the first token fills up."""
        sampling, penalties_3T = self.sampling, np.array([[0.0], [1.0], [0.0]])
        if count := len(self._seen_T):
            minus_T = sampling.frequency_penalty * self._counts_T
            minus_T += sampling.presence_penalty * (self._counts_T > 0)
            divisor_T = np.full(count, sampling.repetition_penalty)
            penalties_3T = np.stack([self._seen_T, divisor_T, minus_T])
        filling = np.repeat(penalties_3T[:, :1], size - penalties_3T.shape[1], axis=1)
        return np.concatenate([penalties_3T, filling], axis=1)

    @property
    def num_penalized(self) -> int:
        return len(self._seen_T)


@paddle.no_grad()
def choose_tokens(
    logits_RV: Tensor, rows: Sequence[AnswerRow], allowed: Sequence[np.ndarray | None]
) -> list[Choice]:
    """The next token of each row. The host reads their ids, and what rows ask for beside.

    Args:
        logits_RV: maybe with more rows behind, which are left out.
        allowed: of each row the tokens that may follow, bool `[V]`; None for all.
    """
    logits_RV = logits_RV[: len(rows)].astype("float32")
    scores_RV = _penalized(logits_RV, rows)
    if any(mask is not None for mask in allowed):
        every = np.ones(scores_RV.shape[1], dtype=bool)
        mask_RV = np.stack([every if mask is None else mask for mask in allowed])
        scores_RV = rule_out(scores_RV, paddle.to_tensor(~mask_RV))
    token_R = scores_RV.argmax(axis=-1)
    if any(row.sampling.samples for row in rows):
        samples_R = paddle.to_tensor([row.sampling.samples for row in rows])
        token_R = paddle.where(samples_R, _drawn(scores_RV, rows), token_R)
    wanted = [row.sampling.logprobs for row in rows if row.sampling.logprobs is not None]
    if not wanted:
        return [Choice(int(token)) for token in token_R.numpy()]
    logprobs_RV = F.log_softmax(logits_RV, axis=-1)
    own_R1 = paddle.take_along_axis(logprobs_RV, token_R.unsqueeze(1), axis=1)
    tops = [x.numpy() for x in paddle.topk(logprobs_RV, max(1, *wanted), axis=-1)]
    choices = []
    for row, token, own, values, ids in zip(
        rows, token_R.numpy(), own_R1[:, 0].numpy(), *tops, strict=True
    ):
        if (count := row.sampling.logprobs) is None:
            choices.append(Choice(int(token)))
            continue
        top = zip(ids[:count].tolist(), values[:count].tolist(), strict=True)
        choices.append(Choice(int(token), float(own), tuple(top)))
    return choices


def _column(values: Sequence[Any], dtype: Any) -> Tensor:
    return paddle.to_tensor(np.array(values, dtype=dtype)[:, None])


def _penalized(scores_RV: Tensor, rows: Sequence[AnswerRow]) -> Tensor:
    most = max(row.num_penalized for row in rows)
    if not most:
        return scores_RV
    penalties_R3T = np.stack([row.penalties(most) for row in rows])
    ids_RT = paddle.to_tensor(penalties_R3T[:, 0].astype(np.int64))
    divisor_RT, minus_RT = (
        paddle.to_tensor(penalties_R3T[:, i].astype(np.float32)) for i in (1, 2)
    )
    of_seen_RT = paddle.take_along_axis(scores_RV, ids_RT, axis=1)
    of_seen_RT = paddle.where(of_seen_RT < 0, of_seen_RT * divisor_RT, of_seen_RT / divisor_RT)
    return paddle.put_along_axis(scores_RV, ids_RT, of_seen_RT - minus_RT, axis=1)


def _drawn(scores_RV: Tensor, rows: Sequence[AnswerRow]) -> Tensor:
    """A sample of each row, `[R]` int64; any token of rows that do not sample."""
    vocab, settings = scores_RV.shape[1], [row.sampling for row in rows]
    sampling = [each for each in settings if each.samples]
    largest = max(each.top_k for each in sampling)
    candidate_RK = None
    if all(0 < each.top_k <= _MOST_CANDIDATES for each in sampling):
        values_RK, ids_RK = paddle.topk(scores_RV, min(largest + _TIES, vocab), axis=-1)
        # In the order of their ids, in which a sample is drawn.
        order_RK = paddle.argsort(ids_RK, axis=-1)
        candidate_RK = paddle.take_along_axis(ids_RK, order_RK, axis=1)
        scores_RV = paddle.take_along_axis(values_RK, order_RK, axis=1)
    temperatures = [each.temperature if each.samples else 1.0 for each in settings]
    scores_RV = scores_RV / _column(temperatures, np.float32)
    if largest:
        largest = min(largest, vocab)
        top_RK = paddle.topk(scores_RV, largest, axis=-1)[0]
        places = [min(each.top_k or vocab, largest) - 1 for each in settings]
        last_R1 = paddle.take_along_axis(top_RK, _column(places, np.int64), axis=1)
        cut_R1 = _column([bool(each.top_k) for each in settings], bool)
        scores_RV = rule_out(scores_RV, (scores_RV < last_R1) & cut_R1)
    if any(each.top_p < 1 for each in sampling):
        # Above 1: nothing is excluded.
        shares = [each.top_p if each.top_p < 1 else 2.0 for each in settings]
        scores_RV = keep_top_p(scores_RV, np.array(shares)[:, None])
    if any(each.min_p for each in sampling):
        share_RV = F.softmax(scores_RV, axis=-1)
        least_R1 = share_RV.max(axis=-1, keepdim=True)
        least_R1 = least_R1 * _column([each.min_p for each in settings], np.float32)
        scores_RV = rule_out(scores_RV, share_RV < least_R1)
    numbers = [row.draw() if row.sampling.samples else 0.0 for row in rows]
    place_R = draw_tokens(scores_RV, _column(numbers, np.float64))
    if candidate_RK is None:
        return place_R
    return paddle.take_along_axis(candidate_RK, place_R.unsqueeze(1), axis=1).squeeze(1)
