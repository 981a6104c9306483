"""Log-probabilities of target tokens from a head, without the logits of all rows.

Logits exist for a chunk of rows at a time, in forward and again in backward: a loss of
log-probabilities, unlike their sum, gives each row another gradient, which is known only after all
rows.

Shapes: R rows with a target, V vocabulary of this rank.
"""

from collections.abc import Callable, Iterator, Sequence

import paddle
from paddle import Tensor
from paddle.autograd import PyLayer

from paddle_vl.nn.objective import (
    IGNORE_INDEX,
    ChunkedSum,
    Predict,
    TargetRows,
    TokenStatistics,
    Vocabulary,
)


def log_probs_in_chunks(
    predict: Predict,
    rows: Sequence[Tensor],
    parameters: Sequence[Tensor],
    targets: TargetRows,
    cross_entropy: Callable[..., Tensor],
    vocabulary: Vocabulary,
) -> tuple[Tensor, ...]:
    """The values of `TokenStatistics`; arguments as of `objective.summed_in_chunks`.

    Args:
        vocabulary: of the logits that `predict` gives.
    """
    call = _Call(predict, rows, parameters, targets, cross_entropy, vocabulary)
    given = [*rows, *parameters]
    if paddle.is_grad_enabled() and any(not value.stop_gradient for value in given):
        log_probs, *others = _LogProbs.apply(call, *given)
        return log_probs, *(value.detach() for value in others)
    return call.statistics()


class _Call:
    """The arguments of `log_probs_in_chunks`; hides from `PyLayer` what it should not search."""

    def __init__(self, predict, rows, parameters, targets, cross_entropy, vocabulary):
        self.predict, self.cross_entropy, self.vocabulary = predict, cross_entropy, vocabulary
        self.rows, self.parameters, self.targets = list(rows), list(parameters), targets

    def chunked(self, targets: TargetRows) -> ChunkedSum:
        """The summed cross entropy of the same rows, a chunk at a time."""
        own_vocab = self.parameters[0].shape[0]
        return ChunkedSum(
            self.predict, self.rows, self.parameters, targets, own_vocab, self.cross_entropy
        )

    @paddle.no_grad()
    def statistics(self) -> tuple[Tensor, ...]:
        columns = zip(*self._of_chunks(), strict=True)
        return tuple(paddle.concat(list(each)) for each in columns)

    def _of_chunks(self) -> Iterator[TokenStatistics]:
        for chunk in self.chunked(self.targets).chunks():
            rows = [paddle.index_select(x, chunk.rows) for x in self.rows]
            logits_RV = self.predict(rows, self.parameters).astype("float32")
            yield statistics_of(logits_RV, chunk.targets, self.vocabulary)


class _LogProbs(PyLayer):
    @staticmethod
    def forward(ctx, call, *given):
        ctx.call = call
        statistics = call.statistics()
        ctx.mark_non_differentiable(*statistics[1:])
        return statistics

    @staticmethod
    def backward(ctx, grad_R, *_):
        # The gradient of a sum of cross entropies with these weights.
        chunked = ctx.call.chunked(ctx.call.targets._replace(weights=-grad_R))
        chunked.with_gradients()
        return tuple(chunked.gradients(paddle.ones([])))


def statistics_of(logits_RV: Tensor, targets_R: Tensor, vocabulary: Vocabulary) -> TokenStatistics:
    """The statistics of some rows, from this rank's logits `[R, V]` float32; no gradient."""
    own_vocab = logits_RV.shape[1]
    largest_R = vocabulary.largest(logits_RV.max(axis=1))
    shifted_RV = logits_RV - largest_R.unsqueeze(1)
    weights_RV = shifted_RV.exp()
    ids_R = targets_R - vocabulary.share * own_vocab
    is_here_R = (ids_R >= 0) & (ids_R < own_vocab)
    own_R1 = ids_R.clip(0, own_vocab - 1).unsqueeze(1)
    targeted_R = paddle.take_along_axis(shifted_RV, own_R1, axis=1).squeeze(1)
    sums = [
        weights_RV.sum(axis=1),
        (weights_RV * shifted_RV).sum(axis=1),
        logits_RV.sum(axis=1),
        (weights_RV * weights_RV).sum(axis=1),
        paddle.where(is_here_R, targeted_R, paddle.zeros_like(targeted_R)),
    ]
    total_R, weighted_R, logits_R, squares_R, targeted_R = vocabulary.total(paddle.stack(sums))
    log_total_R = total_R.log()
    values = (
        targeted_R - log_total_R,
        log_total_R - weighted_R / total_R,
        logits_R / (own_vocab * vocabulary.num_shares),
        (targeted_R >= 0).astype("float32"),
        squares_R.log() - 2 * log_total_R,
    )
    is_target_R = (targets_R != IGNORE_INDEX).astype("float32")
    return TokenStatistics(*(value * is_target_R for value in values))
