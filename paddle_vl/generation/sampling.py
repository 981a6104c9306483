"""Choice of the next token of each row, by rules of its own on scores, in HF's order, then the
maximum or a sample.

A row's choice depends on no other row. Penalties of presence and frequency follow that of
repetition, as in vLLM, and `min_p` follows top-p.

Shapes: R rows, V vocabulary, K candidates, T tokens with a penalty. Scores are float32 `[R, V]`; an
excluded token has -inf.

Source: generation/logits_process.py of HF transformers; equal to it on equal logits. If the limit
of top-p falls between tokens of equal score, those of smaller id are excluded.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import Tensor

# Ids of the answer so far to the tokens that may follow, bool `[V]`; None for all.
Allowed = Callable[[list[int]], np.ndarray | None]
# With at most this top_k in all rows, only so many candidates are sorted, and some more, since
# scores equal to the k-th highest stay. With still more equal ones all tokens are.
_MOST_CANDIDATES, _TIES = 512, 32
_LEAST, _LARGEST = 1e-38, 3.4e38


@dataclass(frozen=True)
class Sampling:
    """How the tokens of an answer are chosen. Names as in OpenAI's and vLLM's interfaces.

    Attributes:
        max_tokens: the answer ends after so many.
        min_tokens: no stop token is chosen before so many.
        temperature: divides the scores; 0 takes the most likely token.
        top_k: sample among the k most likely; 0 among all.
        top_p: sample among the most likely that together have this probability.
        min_p: sample among those of at least this share of the highest probability.
        repetition_penalty: of tokens in prompt or answer, as in HF; 1 has no effect.
        presence_penalty, frequency_penalty: subtracted from the scores of tokens of the answer,
            once and as often as they occur; 0 has no effect.
        seed: of sampling; None for a different one each time.
        stop_token_ids: each ends the answer, as its last token.
        suppress_tokens: never chosen, as in HF.
        logprobs: give the log-probability of each token and this many of the most likely ones, of
            the scores before any rule; None for neither.
        logprobs_mode: of the scores before any rule, or as in vLLM after all of them but, without
            penalties, suppress_tokens; those of a row that does not sample are raw.
        allowed: called on the model's thread with the answer so far before each token.

    Raises:
        ValueError: a value is out of range.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    suppress_tokens: tuple[int, ...] = ()
    logprobs: int | None = None
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs"] = "raw_logprobs"
    allowed: Allowed | None = None

    def __post_init__(self):
        for name, least, most in (
            *(("max_tokens", 1, np.inf), ("min_tokens", 0, self.max_tokens)),
            *(("temperature", 0, _LARGEST), ("top_k", 0, np.inf), ("top_p", _LEAST, 1)),
            *(("min_p", 0, 1), ("repetition_penalty", _LEAST, _LARGEST)),
            *((f"{x}_penalty", -_LARGEST, _LARGEST) for x in ("presence", "frequency")),
            *(("seed", 0, np.inf), ("logprobs", 0, np.inf)),
        ):
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                range_ = f"at least {least}" if most == np.inf else f"from {least:g} to {most:g}"
                raise ValueError(f"{name} is {value}: it must be {range_}")

    @property
    def samples(self) -> bool:
        return self.temperature > 0


class ChosenToken(NamedTuple):
    """A chosen token; its log-probability and (token, log-probability) of the most likely ones, if
    the row asks for them."""

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class AnswerRow:
    """An answer so far, and what the choice of its next token depends on.

    Args:
        prompt_L: its ids, without padding.
        number: of the row, where rows of one seed draw different numbers.

    Attributes:
        ids: of the answer.
        num_penalized: tokens with a penalty.
    """

    def __init__(self, sampling: Sampling, prompt_L: np.ndarray, number: int = 0):
        self.sampling, self.ids = sampling, list[int]()
        entropy: Any = np.random.SeedSequence(sampling.seed).entropy
        self._random = np.random.default_rng([entropy, number])
        repeated = np.unique(prompt_L) if sampling.repetition_penalty != 1 else []
        stops = sampling.stop_token_ids if sampling.min_tokens else ()
        # Tokens with a penalty: whether they are in prompt or answer, and how often in the answer.
        ruled_out = {*stops, *sampling.suppress_tokens} - {*repeated}
        self._ids_T = np.array([*repeated, *sorted(ruled_out)], dtype=np.int64)
        self._is_seen_T = np.arange(len(self._ids_T)) < len(repeated)
        self._counts_T = np.zeros(len(self._ids_T))

    @property
    def has_penalties(self) -> bool:
        """Whether scores change beside those of suppressed tokens."""
        own = self.sampling
        penalties = (own.presence_penalty, own.frequency_penalty, own.min_tokens)
        return own.repetition_penalty != 1 or any(penalties)

    @property
    def num_penalized(self) -> int:
        return len(self._ids_T)

    def append(self, token_id: int) -> None:
        """Add a chosen token."""
        self.ids.append(token_id)
        own = self.sampling
        if own.repetition_penalty == 1 and not (own.presence_penalty or own.frequency_penalty):
            return
        places = np.flatnonzero(self._ids_T == token_id)
        if not len(places):
            places = [len(self._ids_T)]
            self._ids_T = np.append(self._ids_T, token_id)
            self._is_seen_T = np.append(self._is_seen_T, True)
            self._counts_T = np.append(self._counts_T, 0.0)
        self._is_seen_T[places] = True
        self._counts_T[places] += 1

    def draw(self) -> float:
        """The next number in [0, 1)."""
        return self._random.random()

    def penalties(self, size: int) -> np.ndarray:
        """float64 `[3, size]`: tokens, what their scores are divided by, and what is subtracted
        then; the first token fills up."""
        own = self.sampling
        penalties_3T = np.array([[0.0], [1.0], [0.0]])
        if len(self._ids_T):
            divisor_T = np.where(self._is_seen_T, own.repetition_penalty, 1.0)
            minus_T = own.frequency_penalty * self._counts_T
            minus_T += own.presence_penalty * (self._counts_T > 0)
            if len(self.ids) < own.min_tokens:
                minus_T[np.isin(self._ids_T, own.stop_token_ids)] = np.inf
            if own.suppress_tokens:
                minus_T[np.isin(self._ids_T, own.suppress_tokens)] = np.inf
            penalties_3T = np.stack([self._ids_T, divisor_T, minus_T])
        filling = np.repeat(penalties_3T[:, :1], size - penalties_3T.shape[1], axis=1)
        return np.concatenate([penalties_3T, filling], axis=1)


@paddle.no_grad()
def choose_tokens(
    logits_RV: Tensor, rows: Sequence[AnswerRow], allowed: Sequence[np.ndarray | None] = ()
) -> list[ChosenToken]:
    """The next token of each row. The host reads their ids, and what rows ask for beside.

    Args:
        logits_RV: maybe with more rows behind, which are left out.
        allowed: of each row the tokens that may follow, bool `[V]`; None for all.
    """
    if logits_RV.shape[0] > len(rows):
        logits_RV = logits_RV[: len(rows)]
    logits_RV = logits_RV.astype("float32")
    scores_RV = penalized(logits_RV, rows)
    if any(mask is not None for mask in allowed):
        every = np.ones(scores_RV.shape[1], dtype=bool)
        mask_RV = np.stack([every if mask is None else mask for mask in allowed])
        scores_RV = rule_out(scores_RV, paddle.to_tensor(~mask_RV))
    token_R, tokens = _best_or_drawn(scores_RV, rows)
    wanted = [row.sampling.logprobs for row in rows if row.sampling.logprobs is not None]
    if not wanted:
        return [ChosenToken(int(token)) for token in tokens]
    modes = [row.sampling.samples and row.sampling.logprobs_mode[0] == "p" for row in rows]
    if any(modes):
        # A token that is suppressed for what it is still has its share, as in training.
        bare_RV = scores_RV if any(row.has_penalties for row in rows) else logits_RV
        shaped_RV = shaped(bare_RV, [row.sampling for row in rows])
        logits_RV = paddle.where(_column(modes, bool), shaped_RV, logits_RV)
    logprobs_RV = F.log_softmax(logits_RV, axis=-1)
    own_R1 = paddle.take_along_axis(logprobs_RV, token_R.unsqueeze(1), axis=1)
    # Of the token alone no others are searched.
    most = max(wanted)
    tops = (
        [x.numpy() for x in paddle.topk(logprobs_RV, most, axis=-1)]
        if most
        else [[[]] * len(rows)] * 2
    )
    choices = []
    for row, token, own, values, ids in zip(rows, tokens, own_R1[:, 0].numpy(), *tops, strict=True):
        if (count := row.sampling.logprobs) is None:
            choices.append(ChosenToken(int(token)))
            continue
        top = zip([*map(int, ids[:count])], [*map(float, values[:count])], strict=True)
        choices.append(ChosenToken(int(token), float(own), tuple(top)))
    return choices


def _column(values: Sequence[Any], dtype: Any) -> Tensor:
    return paddle.to_tensor(np.array(values, dtype=dtype)[:, None])


def penalized(scores_RV: Tensor, rows: Sequence[AnswerRow]) -> Tensor:
    """Scores after the rules that hold without sampling too."""
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


def _best_or_drawn(scores_RV: Tensor, rows: Sequence[AnswerRow]) -> tuple[Tensor, np.ndarray]:
    """The tokens, `[R]` int64, on the device and on the host."""
    best_R, samples = scores_RV.argmax(axis=-1), [row.sampling.samples for row in rows]
    if not any(samples):
        return best_R, best_R.numpy()
    numbers = [row.draw() if row.sampling.samples else 0.0 for row in rows]
    uniform_R1, samples_R = _column(numbers, np.float64), paddle.to_tensor(samples)
    token_R = paddle.where(samples_R, _drawn(scores_RV, rows, uniform_R1), best_R)
    tokens = token_R.numpy()
    if (tokens < 0).any():
        drawn_R = _drawn(scores_RV, rows, uniform_R1, may_be_few=False)
        token_R = paddle.where(samples_R, drawn_R, best_R)
        tokens = token_R.numpy()
    return token_R, tokens


def _drawn(
    scores_RV: Tensor, rows: Sequence[AnswerRow], uniform_R1: Tensor, may_be_few: bool = True
) -> Tensor:
    """A sample of each row, `[R]` int64; any token of rows that do not sample; -1 where the few
    candidates that are sorted leave out scores equal to the k-th highest.

    Args:
        may_be_few: False to sort all tokens.
    """
    settings = [row.sampling for row in rows]
    largest = max(each.top_k for each in settings)
    has_few = all(each.top_k or not each.samples for each in settings)
    if not (may_be_few and has_few and largest <= _MOST_CANDIDATES):
        return draw_tokens(shaped(scores_RV, settings), uniform_R1)
    count = min(largest + _TIES, scores_RV.shape[1])
    values_RK, ids_RK = paddle.topk(scores_RV, count, axis=-1)
    # In the order of their ids, in which a sample is drawn.
    order_RK = paddle.argsort(ids_RK, axis=-1)
    candidate_RK = paddle.take_along_axis(ids_RK, order_RK, axis=1)
    few_RK = paddle.take_along_axis(values_RK, order_RK, axis=1)
    place_R = draw_tokens(shaped(few_RK, settings), uniform_R1)
    token_R = paddle.take_along_axis(candidate_RK, place_R.unsqueeze(1), axis=1).squeeze(1)
    if count == scores_RV.shape[1]:
        return token_R
    last_R1 = _column([min(each.top_k or 1, count) - 1 for each in settings], np.int64)
    kth_R = paddle.take_along_axis(values_RK, last_R1, axis=1).squeeze(1)
    is_cut_R = (values_RK[:, -1] == kth_R) & (kth_R > -np.inf)
    return paddle.where(is_cut_R, paddle.full_like(token_R, -1), token_R)


def shaped(scores_RV: Tensor, settings: Sequence[Sampling]) -> Tensor:
    """Scores after the rules of sampling; those of a row that does not sample mean nothing."""
    temperatures = [each.temperature or 1.0 for each in settings]
    scores_RV = scores_RV / _column(temperatures, np.float32)
    if largest := min(max(each.top_k for each in settings), scores_RV.shape[1]):
        # Scores equal to the k-th highest stay.
        top_RK = paddle.topk(scores_RV, largest, axis=-1)[0]
        places = [min(each.top_k or largest, largest) - 1 for each in settings]
        last_R1 = paddle.take_along_axis(top_RK, _column(places, np.int64), axis=1)
        cuts_R1 = _column([bool(each.top_k) for each in settings], bool)
        scores_RV = rule_out(scores_RV, (scores_RV < last_R1) & cuts_R1)
    if any(each.top_p < 1 for each in settings):
        # Above 1, so that nothing is excluded.
        shares = [each.top_p if each.top_p < 1 else 2.0 for each in settings]
        scores_RV = keep_top_p(scores_RV, shares)
    if any(each.min_p for each in settings):
        share_RV = F.softmax(scores_RV, axis=-1)
        least_R1 = share_RV.max(axis=-1, keepdim=True)
        least_R1 = least_R1 * _column([each.min_p for each in settings], np.float32)
        scores_RV = rule_out(scores_RV, share_RV < least_R1)
    return scores_RV


def rule_out(scores_RV: Tensor, ruled_out: Tensor) -> Tensor:
    """-inf where `ruled_out`, bool of a shape that broadcasts to `[R, V]`."""
    return paddle.where(ruled_out, paddle.full([], -np.inf, scores_RV.dtype), scores_RV)


def keep_top_p(scores_RV: Tensor, top_p: Sequence[float]) -> Tensor:
    """Keep the fewest most likely tokens of each row whose probabilities reach its `top_p`, at
    least one."""
    order_RV = paddle.argsort(scores_RV, axis=-1, stable=True)
    ascending_RV = paddle.take_along_axis(scores_RV, order_RV, axis=-1)
    reached_RV = F.softmax(ascending_RV, axis=-1).cumsum(axis=-1)
    unlikely_RV = (reached_RV <= _column([1 - p for p in top_p], np.float32)).astype("int32")
    unlikely_RV[:, -1] = 0
    unlikely_RV = paddle.put_along_axis(
        paddle.zeros_like(unlikely_RV), order_RV, unlikely_RV, axis=-1
    )
    return rule_out(scores_RV, unlikely_RV.astype("bool"))


def draw_tokens(scores_RV: Tensor, uniform_R1: Tensor) -> Tensor:
    """Inverse of the cumulative distribution softmax(scores): `[R]` int64.

    Args:
        uniform_R1: float64 in [0, 1). A token of probability 0 is never drawn.
    """
    # On the CPU softmax and exp give a score of -inf a tiny probability instead of 0.
    is_possible_RV = (scores_RV > -np.inf).astype("float64")
    weight_RV = F.softmax(scores_RV, axis=-1).astype("float64") * is_possible_RV
    reached_RV = weight_RV.cumsum(axis=-1)
    return (reached_RV <= uniform_R1 * reached_RV[:, -1:]).sum(axis=-1)
