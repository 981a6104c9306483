"""What a head says of the token rows that predict a target, without the logits of all rows.

Losses are sums; the mean over a step is computed once, from the counts of all ranks. Logits exist
for one chunk of rows at a time, whose number follows from the shapes alone: for a summed cross
entropy in forward only, for log-probabilities in backward again, since a loss of these gives each
row another gradient, which is known only after all rows.

Source: the order of work is that of Liger Kernel's fused linear cross entropy (Hsu et al.,
https://arxiv.org/abs/2410.10989).

Shapes: B batch, L padded length, T = B * L token rows, R of them with a target, V vocabulary, of
this rank where it has a share, S sources of a training mix.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import paddle
from paddle import Tensor
from paddle.autograd import PyLayer

from paddle_vl.batch.rows import IGNORE_INDEX
from paddle_vl.nn.linear import AdaptableLinear, Predict
from paddle_vl.nn.operations import slice_axis
from paddle_vl.nn.placement import Vocabulary

# Logits that exist at once: rows of a chunk times this rank's vocabulary.
CHUNK_LOGITS = 1 << 27


class TargetSources(NamedTuple):
    """Sources of target rows.

    Attributes:
        numbers: `[R]` int64.
        sums: `[S]` float32, cross entropies of each source so far, without factors and gradients.
    """

    numbers: Tensor
    sums: Tensor

    @paddle.no_grad()
    def add(self, losses_R1: Tensor) -> None:
        """Add the losses of all rows to the sums, 0 of rows without a target; always in the same
        order, which a scatter on a GPU would not."""
        is_of_RS = self.numbers.unsqueeze(1) == paddle.arange(self.sums.shape[0])
        losses_RS = paddle.where(is_of_RS, losses_R1.detach(), paddle.zeros([1, 1]))
        self.sums.add_(losses_RS.sum(axis=0))


class TargetRows(NamedTuple):
    """Token rows with a target, all of a batch's or more.

    Attributes:
        rows: `[R]` int64 row numbers, at least one.
        targets: `[R]` int64; `IGNORE_INDEX` counts as none.
        weights: `[R]` float32 factors of the rows in the loss; None for 1.
        sources: of the rows; None for no sums by source.
        entropy_weights: `[R]` float32, factors of the rows' entropies in what has gradients; None
            for none.
    """

    rows: Tensor
    targets: Tensor
    weights: Tensor | None = None
    sources: TargetSources | None = None
    entropy_weights: Tensor | None = None

    def part(self, begin: int, end: int) -> "TargetRows":
        """Some rows; their losses are added to the same sums by source."""
        weights, sources, of_entropy = self.weights, self.sources, self.entropy_weights
        return TargetRows(
            slice_axis(self.rows, begin, end),
            slice_axis(self.targets, begin, end),
            None if weights is None else slice_axis(weights, begin, end),
            sources and sources._replace(numbers=slice_axis(sources.numbers, begin, end)),
            None if of_entropy is None else slice_axis(of_entropy, begin, end),
        )


class TokenStatistics(NamedTuple):
    """What a head says of rows with a target, `[R]` float32 each, 0 where the target is
    `IGNORE_INDEX`. Only the log-probabilities and the entropy have a gradient.

    Attributes:
        log_probs: of the targets.
        entropy: of the distribution over the vocabulary, in nats.
        mean_logit: over the vocabulary.
        is_top: 1 where the target has the largest logit.
        log_collision: log of the sum of all squared probabilities.
    """

    log_probs: Tensor
    entropy: Tensor
    mean_logit: Tensor
    is_top: Tensor
    log_collision: Tensor


def head_loss(
    head: AdaptableLinear, x_TD: Tensor, targets: TargetRows, vocabulary: Vocabulary
) -> Tensor:
    """Summed cross entropy of a head's predictions for the rows with a target, a float32 scalar.

    The gradients of a chunk are computed with its loss, as long as its logits exist. Backward only
    multiplies them by the gradient of the sum. Sums of the parameters' gradients over chunks are
    float32.

    Args:
        head: of `LayerFactory.vocab_head`.
        x_TD: all rows, behind `RegionOps.enter_columns` or `enter_head`; rows without a target are
            not read.
        targets: the same on every mp rank; their rows are all different.
        vocabulary: of `RegionOps`.
    """

    def reduced(predict: Predict, rows: Sequence[Tensor], parameters: Sequence[Tensor]) -> Tensor:
        chunks = _Chunks(predict, rows, parameters, targets, vocabulary)
        given = [*rows, *parameters]
        if paddle.is_grad_enabled() and any(not value.stop_gradient for value in given):
            return _SumWithGradients.apply(chunks, *given)
        return sum(map(chunks.loss, chunks), paddle.zeros([]))

    return head(x_TD, reduced)


def head_log_probs(
    head: AdaptableLinear,
    x_TD: Tensor,
    targets: TargetRows,
    vocabulary: Vocabulary,
    temperature: float = 1.0,
) -> TokenStatistics:
    """Log-probabilities of the targets, and statistics of their rows; see `head_loss`.

    Args:
        temperature: divides the logits.
    """

    def reduced(predict: Predict, rows: Sequence[Tensor], parameters: Sequence[Tensor]) -> Any:
        chunks = _Chunks(predict, rows, parameters, targets, vocabulary, temperature)
        log_probs, entropy, *others = _LogProbs.apply(chunks, *rows, *parameters)
        return log_probs, entropy, *(value.detach() for value in others)

    return TokenStatistics(*head(x_TD, reduced))


def head_choices(
    head: AdaptableLinear, x_TD: Tensor, rows_R: Tensor, vocabulary: Vocabulary
) -> Tensor:
    """The token of the largest logit after some rows, `[R]` int64 and the same on every mp rank; of
    equal logits the first. No gradient; arguments as of `head_loss`."""

    def reduced(predict: Predict, rows: Sequence[Tensor], parameters: Sequence[Tensor]) -> Tensor:
        logits_RV = predict([paddle.index_select(x, rows_R) for x in rows], parameters)
        own_R, width = logits_RV.astype("float32").max(axis=1), logits_RV.shape[1]
        # Float32 has all numbers of a vocabulary.
        ids_R = (logits_RV.argmax(axis=1) + vocabulary.rank * width).astype("float32")
        is_here_R = own_R == vocabulary.largest(own_R)
        # Where no logit is a number the last token is taken.
        last = vocabulary.size * width - 1
        ids_R = paddle.where(is_here_R, ids_R, paddle.full_like(ids_R, last))
        return -vocabulary.largest(-ids_R)

    return head(x_TD, reduced).astype("int64")


def head_scores(
    head: AdaptableLinear, x_TD: Tensor, rows_R: Tensor, vocabulary: Vocabulary
) -> Tensor:
    """The logits of all tokens after some rows, `[R, V]` float32 and the same on every mp rank. No
    gradient; arguments as of `head_loss`."""

    def reduced(predict: Predict, rows: Sequence[Tensor], parameters: Sequence[Tensor]) -> Tensor:
        own_RV = predict([paddle.index_select(x, rows_R) for x in rows], parameters)
        own_RV, places = own_RV.astype("float32"), vocabulary.size
        shares = [paddle.zeros_like(own_RV)] * places
        shares[vocabulary.rank] = own_RV
        return vocabulary.total(paddle.concat(shares, axis=1)) if places > 1 else own_RV

    return head(x_TD, reduced)


def summed_cross_entropy(
    logits_TV: Tensor,
    targets_T: Tensor,
    weights_T: Tensor | None = None,
    sources: TargetSources | None = None,
    vocabulary: Vocabulary | None = None,
) -> Tensor:
    """Cross entropy summed over the rows whose target is not `IGNORE_INDEX`: a float32 scalar.

    The caller divides by the count of the global batch. (Paddle 3.3.1's own mean also counts
    ignored rows if the ignored index is negative.) Logits are cast to float32 first: a bfloat16 sum
    over the vocabulary is too coarse.

    Args:
        weights_T: float32 factors of the rows in the sum; None for 1.
        sources: of the rows, to sum their losses by; None for no such sums.
        vocabulary: of the logits; None for all of it.
    """
    losses_of = (vocabulary or Vocabulary()).losses
    losses_T1 = losses_of(logits_TV.astype("float32"), targets_T.unsqueeze(1))
    if sources is not None:
        sources.add(losses_T1)
    if weights_T is not None:
        losses_T1 = losses_T1 * weights_T.unsqueeze(1)
    return losses_T1.sum()


def next_token_targets(labels_BL: Tensor) -> Tensor:
    """Labels shifted left by one, so that row i has the target of its prediction: `[B * L]` int64.

    The last position of every batch row gets `IGNORE_INDEX`.
    """
    ignored = paddle.full([labels_BL.shape[0], 1], IGNORE_INDEX, dtype=labels_BL.dtype)
    return paddle.concat([labels_BL[:, 1:], ignored], axis=1).reshape([-1])


def num_targets(targets_T: Tensor) -> Tensor:
    """Number of targets that are not `IGNORE_INDEX`, a float32 scalar."""
    return (targets_T != IGNORE_INDEX).astype("float32").sum()


class _Chunks:
    """Rows with a target by chunks, and gradients of their losses until that of the sum is known;
    hides from `PyLayer` what it should not search.

    Args:
        predict: logits of rows and parameters, row by row.
        rows: `[T, ...]` each, the inputs of the head.
        parameters: of the head; their gradients are summed over the chunks.
    """

    def __init__(
        self,
        predict: Predict,
        rows: Sequence[Tensor],
        parameters: Sequence[Tensor],
        targets: TargetRows,
        vocabulary: Vocabulary,
        temperature: float = 1.0,
    ):
        self.predict, self.targets, self.vocabulary = predict, targets, vocabulary
        self.temperature = temperature
        self.rows, self.parameters = list(rows), list(parameters)
        self.num_rows = targets.rows.shape[0]
        most = max(1, CHUNK_LOGITS // parameters[0].shape[0])
        self.num_chunks = max(1, -(-self.num_rows // most))
        self.shapes, self.dtypes = [x.shape for x in rows], [x.dtype for x in parameters]
        # By chunk: row numbers, and the gradients of these rows.
        self.of_rows: list[tuple[Tensor, list[Tensor | None]]] = []
        self.of_parameters: list[Tensor | None] = [None] * len(parameters)

    def __iter__(self) -> Iterator[TargetRows]:
        """The targets of every chunk; all have the same size, but for one row."""
        for number in range(self.num_chunks):
            begin, end = (n * self.num_rows // self.num_chunks for n in (number, number + 1))
            yield self.targets.part(begin, end)

    def loss(self, chunk: TargetRows) -> Tensor:
        """The sum over the rows of a chunk."""
        return summed_cross_entropy(self.logits(chunk), *chunk[1:4], self.vocabulary)

    def logits(self, chunk: TargetRows) -> Tensor:
        """`[R, V]` of the rows of a chunk."""
        rows = [paddle.index_select(x, chunk.rows) for x in self.rows]
        return self._cooled(self.predict(rows, self.parameters))

    def _cooled(self, logits_RV: Tensor) -> Tensor:
        if self.temperature == 1.0:
            return logits_RV
        return logits_RV.astype("float32") / self.temperature

    @paddle.no_grad()
    def statistics(self) -> tuple[Tensor, ...]:
        """The values of `TokenStatistics` of all rows."""
        of_chunks = [
            _statistics_of(self.logits(chunk).astype("float32"), chunk.targets, self.vocabulary)
            for chunk in self
        ]
        return tuple(paddle.concat(list(each)) for each in zip(*of_chunks, strict=True))

    def with_gradients(self) -> Tensor:
        """The sum over all rows; keeps its gradients in place of the arguments."""
        total = paddle.zeros([])
        for chunk in self:
            rows = [
                _leaf(paddle.index_select(x.detach(), chunk.rows), x.stop_gradient)
                for x in self.rows
            ]
            # New ones for every chunk: Paddle would add up their gradients in their own dtype.
            parameters = [_leaf(x.detach(), x.stop_gradient) for x in self.parameters]
            with paddle.enable_grad():
                logits_RV = self._cooled(self.predict(rows, parameters))
                loss = summed_cross_entropy(logits_RV, *chunk[1:4], self.vocabulary)
            if chunk.entropy_weights is None:
                loss.backward()
            else:
                slopes_RV = _entropy_slopes(logits_RV.detach(), self.vocabulary)
                slopes_RV = slopes_RV.multiply_(chunk.entropy_weights.unsqueeze(1))
                ends: Any = [loss, logits_RV], [None, slopes_RV.astype(logits_RV.dtype)]
                paddle.autograd.backward(*ends)
            total += loss.detach()
            self._keep(chunk.rows, rows, parameters)
        # The arguments need not live until the backward pass.
        self.rows, self.parameters = [], []
        return total

    def _keep(self, numbers: Tensor, rows: Sequence[Tensor], parameters: Sequence[Tensor]) -> None:
        """Take over the gradients of a chunk's leaves."""
        self.of_rows.append((numbers, [None if x.stop_gradient else x.grad for x in rows]))
        for number, parameter in enumerate(parameters):
            if not parameter.stop_gradient:
                own: Any = parameter.grad
                grad, total = own.astype("float32"), self.of_parameters[number]
                self.of_parameters[number] = grad if total is None else total.add_(grad)

    def gradients(self, factor: Tensor) -> list[Tensor | None]:
        """Of all rows and parameters, times a scalar; each is freed once it is not needed."""
        whole: list[Tensor | None] = [None] * len(self.shapes)
        while self.of_rows:
            numbers, grads = self.of_rows.pop(0)
            for i, grad in enumerate(grads):
                if grad is None:
                    continue
                own = whole[i]
                if own is None:
                    own = paddle.zeros(self.shapes[i], dtype=grad.dtype)
                # In float32: Paddle would round the factor to the gradient's dtype, which changes
                # all gradients alike.
                scaled = (grad.astype("float32") * factor).astype(grad.dtype)
                whole[i] = paddle.scatter_(own, numbers, scaled)
        of_parameters, self.of_parameters = self.of_parameters, []
        return whole + [
            None if grad is None else grad.multiply_(factor).astype(dtype)
            for grad, dtype in zip(of_parameters, self.dtypes, strict=True)
        ]


def _leaf(value: Tensor, stop_gradient: bool) -> Tensor:
    value.stop_gradient = stop_gradient
    return value


class _SumWithGradients(PyLayer):
    @staticmethod
    def forward(ctx, chunks, *given):
        ctx.chunks = chunks
        return chunks.with_gradients()

    @staticmethod
    def backward(ctx, grad):
        return tuple(ctx.chunks.gradients(grad))


class _LogProbs(PyLayer):
    @staticmethod
    def forward(ctx, chunks, *given):
        ctx.chunks, statistics = chunks, chunks.statistics()
        ctx.mark_non_differentiable(*statistics[2:])
        ctx.set_materialize_grads(False)
        return statistics

    @staticmethod
    def backward(ctx, grad_R, entropy_grad_R, *_):
        # The gradient of a sum of cross entropies with these weights, and of entropies.
        chunks = ctx.chunks
        if entropy_grad_R is not None:
            is_target_R = (chunks.targets.targets != IGNORE_INDEX).astype("float32")
            entropy_grad_R = entropy_grad_R * is_target_R
        if grad_R is None:
            grad_R = paddle.zeros(chunks.targets.rows.shape)
        chunks.targets = chunks.targets._replace(weights=-grad_R, entropy_weights=entropy_grad_R)
        chunks.with_gradients()
        return tuple(chunks.gradients(paddle.ones([])))


def _entropy_slopes(logits_RV: Tensor, vocabulary: Vocabulary) -> Tensor:
    """`[R, V]` float32, the derivatives of each row's entropy by this rank's logits:
    -p (log p + H)."""
    shifted_RV = logits_RV.astype("float32")
    shifted_RV = shifted_RV - vocabulary.largest(shifted_RV.max(axis=1)).unsqueeze(1)
    weights_RV = shifted_RV.exp()
    sums = [weights_RV.sum(axis=1), (weights_RV * shifted_RV).sum(axis=1)]
    total_R, weighted_R = vocabulary.total(paddle.stack(sums))
    mean_R1 = (weighted_R / total_R).unsqueeze(1)
    # In place, as each array of a chunk counts.
    slopes_RV = weights_RV.divide_(total_R.unsqueeze(1))
    return slopes_RV.multiply_(shifted_RV.scale_(-1.0).add_(mean_R1))


def _statistics_of(logits_RV: Tensor, targets_R: Tensor, vocabulary: Vocabulary) -> TokenStatistics:
    """The statistics of some rows, from this rank's logits `[R, V]` float32; no gradient."""
    own_vocab = logits_RV.shape[1]
    largest_R = vocabulary.largest(logits_RV.max(axis=1))
    shifted_RV = logits_RV - largest_R.unsqueeze(1)
    weights_RV = shifted_RV.exp()
    ids_R = targets_R - vocabulary.rank * own_vocab
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
        logits_R / (own_vocab * vocabulary.size),
        (targeted_R >= 0).astype("float32"),
        squares_R.log() - 2 * log_total_R,
    )
    is_target_R = (targets_R != IGNORE_INDEX).astype("float32")
    return TokenStatistics(*(value * is_target_R for value in values))
