"""Interface of a model family to the training step: its loss, and an adapter for its batches; and
the cross entropy of tokens, of given logits or of a head's predictions in chunks.

Losses are sums and counts; the mean over a step is computed once, from the counts of all ranks.

Shapes: B batch, L padded length, T = B * L token rows, R of them with a target, V vocabulary, S
sources of a training mix.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar, cast

import paddle
import paddle.nn.functional as F
from paddle import Tensor
from paddle.autograd import PyLayer

from paddle_vl.batch.rows import IGNORE_INDEX
from paddle_vl.batch.schema import Batch
from paddle_vl.nn.operations import device_tensor, slice_axis

BatchT = TypeVar("BatchT", bound=Batch)


class Loss(ABC):
    """The loss of a model family: weighted terms, each a sum divided by a count over a whole step.

    The micro-batches of all ranks count as one batch. `BatchAdapter.counts` gives what a batch adds
    to the divisors.

    Attributes:
        terms: names and weights; a term of weight 0 is reported but not trained.
        reported_counts: term to the key of its divisor in a metrics line.
    """

    terms: Mapping[str, float]
    reported_counts: Mapping[str, str] = {}

    @abstractmethod
    def check_counts(self, totals: Sequence[int], num_batches: int) -> None:
        """Refuse a step without anything to learn from.

        Args:
            totals: divisor of each term over the whole step.
            num_batches: micro-batches of this rank, for the message.

        Raises:
            ValueError: a divisor is 0.
        """

    @abstractmethod
    def share(self, output: Any, totals: Sequence[int], num_batches: int) -> tuple[Tensor, Tensor]:
        """What one micro-batch adds to the step.

        Args:
            output: the model's.
            totals: divisor of each term over the whole step.
            num_batches: micro-batches of all ranks.

        Returns:
            The scalar to differentiate, and each term `[n]`, detached; of a batch with sources
            `[n + S]`, followed by the sums of each source, not divided.
        """

    @abstractmethod
    def sums(self, output: Any) -> Tensor:
        """Each term of a batch before division, `[n]`, for evaluation."""

    def metric_counts(self, model: Any) -> Mapping[str, Tensor]:
        """Counters of this rank that a metrics line reports summed over all ranks, each `[n]`."""
        return {}

    def metrics(self, totals: Mapping[str, Any]) -> dict[str, float]:
        """Entries of a metrics line from the summed `metric_counts`."""
        return {}


def weighted_loss(terms: Sequence[float], loss: Loss) -> float:
    """The loss from its terms, in the order of `loss.terms`."""
    weights = loss.terms.values()
    return sum(weight * term for weight, term in zip(weights, terms, strict=True) if weight)


def zero_terms(loss: Loss, num_sources: int = 0) -> Tensor:
    """A zero for each term, and for each source of a training mix: `[n + S]` float32."""
    return paddle.zeros([len(loss.terms) + num_sources])


class BatchAdapter(ABC, Generic[BatchT]):
    """Counts of a batch for the trainer, and its way into the model.

    If one rank's batch needs an optional branch of the model (vision tower, an optional part of the
    prompt), other ranks may have to run it too, because its layers are collective:
    `optional_branches` tells what a batch needs; `synchronized` makes the batch to run once the
    needs of all ranks are known.
    """

    @abstractmethod
    def counts(self, batch: BatchT) -> list[int]:
        """What a batch adds to the divisor of each loss term."""

    @abstractmethod
    def num_samples(self, batch: BatchT) -> int: ...

    @abstractmethod
    def idle_batch(self, model: Any) -> BatchT:
        """A batch that adds 0 to every count, for a rank that has no batch left."""

    def num_tokens(self, batch: BatchT) -> int:
        """Tokens without padding; 0 where throughput is not measured in tokens."""
        return 0

    def num_packed_places(self, batch: BatchT) -> int:
        """Token capacity of packed rows, padding included; 0 without packing."""
        return 0

    def lengths(self, batch: BatchT) -> list[int]:
        """Tokens of each sample without padding; empty where tokens are not counted."""
        return []

    def expert_capacity(self, batch: BatchT) -> int | None:
        """Rows that experts on other ranks are to have room for, see
        `paddle_vl.nn.experts.ExpertCapacity`; None for exact sizes."""
        return None

    def optional_branches(self, batch: BatchT) -> list[bool]:
        """Whether the batch needs each optional branch of the model."""
        return []

    def is_for_device(self, name: str) -> bool:
        """Whether a field is copied to the device; others stay on the host."""
        return True

    def synchronized(self, batch: BatchT, needed: Sequence[int], model: Any) -> BatchT:
        """The batch as this rank runs it.

        Args:
            needed: for each optional branch the number of data-parallel ranks whose batch needs it.
        """
        return batch

    def to_device(self, batch: BatchT) -> BatchT:
        """The batch with tensors in place of the arrays that the model computes with."""
        moved = {
            name: device_tensor(value) if self.is_for_device(name) else value
            for name, value in batch.items()
        }
        return cast(BatchT, moved)

    def forward(self, model: Any, batch: BatchT) -> Any:
        """The model's output for a batch on the device."""
        return model(**batch)


def next_token_targets(labels_BL: Tensor) -> Tensor:
    """Labels shifted left by one, so that row i has the target of its prediction: `[B * L]` int64.

    The last position of every batch row gets `IGNORE_INDEX`.
    """
    ignored = paddle.full([labels_BL.shape[0], 1], IGNORE_INDEX, dtype=labels_BL.dtype)
    return paddle.concat([labels_BL[:, 1:], ignored], axis=1).reshape([-1])


def num_targets(targets_T: Tensor) -> Tensor:
    """Number of targets that are not `IGNORE_INDEX`, a float32 scalar."""
    return (targets_T != IGNORE_INDEX).astype("float32").sum()


class SourceSums:
    """Cross entropies summed by source, without factors and gradients.

    Args:
        num_sources: S.

    Attributes:
        total: `[S]` float32, of all rows so far.
    """

    def __init__(self, num_sources: int):
        self.total = paddle.zeros([num_sources])

    @paddle.no_grad()
    def add(self, losses: Tensor, sources_T: Tensor) -> None:
        """Add rows; always in the same order, which a scatter on a GPU would not.

        Args:
            losses: `[T]` or `[T, 1]` float32; 0 of rows without a target.
            sources_T: int64 numbers of their sources.
        """
        losses_T1 = losses.detach().reshape([-1, 1])
        is_of_TS = sources_T.unsqueeze(1) == paddle.arange(self.total.shape[0])
        self.total += paddle.where(is_of_TS, losses_T1, paddle.zeros_like(losses_T1)).sum(axis=0)


class TargetSources(NamedTuple):
    """Sources of target rows.

    Attributes:
        numbers: `[R]` int64.
        sums: what the losses of the rows are added to when they are computed.
    """

    numbers: Tensor
    sums: SourceSums

    def add(self, losses: Tensor) -> None:
        """Add the losses of all rows."""
        self.sums.add(losses, self.numbers)


def summed_cross_entropy(
    logits_TV: Tensor,
    targets_T: Tensor,
    weights_T: Tensor | None = None,
    sources: TargetSources | None = None,
) -> Tensor:
    """Cross entropy summed over the rows whose target is not `IGNORE_INDEX`: a float32 scalar.

    The caller divides by the count of the global batch. (Paddle 3.3.1's own mean also counts
    ignored rows if the ignored index is negative.) Logits are cast to float32 first: a bfloat16 sum
    over the vocabulary is too coarse.

    Args:
        weights_T: float32 factors of the rows in the sum; None for 1.
        sources: of the rows, to sum their losses by; None for no such sums.
    """
    reduction = "sum" if weights_T is None and sources is None else "none"
    losses = F.cross_entropy(
        logits_TV.astype("float32"), targets_T, ignore_index=IGNORE_INDEX, reduction=reduction
    )
    if sources is not None:
        sources.add(losses)
    if weights_T is not None:
        losses = losses.reshape([-1]) * weights_T
    return losses if reduction == "sum" else losses.sum()


# Logits that exist at once in `summed_in_chunks`: rows of a chunk times this rank's vocabulary.
CHUNK_LOGITS = 1 << 27


class TargetRows(NamedTuple):
    """Token rows with a target, all of a batch's or more.

    Attributes:
        rows: `[R]` int64 row numbers, at least one.
        targets: `[R]` int64; `IGNORE_INDEX` counts as none.
        weights: `[R]` float32 factors of the rows in the loss; None for 1.
        sources: of the rows; None for no sums by source.
    """

    rows: Tensor
    targets: Tensor
    weights: Tensor | None = None
    sources: TargetSources | None = None

    def part(self, begin: int, end: int) -> "TargetRows":
        """Some rows; their losses are added to the same sums by source."""
        weights, sources = self.weights, self.sources
        return TargetRows(
            slice_axis(self.rows, begin, end),
            slice_axis(self.targets, begin, end),
            None if weights is None else slice_axis(weights, begin, end),
            sources and sources._replace(numbers=slice_axis(sources.numbers, begin, end)),
        )


class TokenStatistics(NamedTuple):
    """What a head says of rows with a target, `[R]` float32 each, 0 where the target is
    `IGNORE_INDEX`. Only the log-probabilities have a gradient.

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


class Vocabulary(NamedTuple):
    """The ranks that share the vocabulary; by default there is one.

    Attributes:
        share: number of this rank's share; all shares are equal.
        num_shares: their number.
        largest, total: all-reduces over the ranks, without a gradient.
    """

    share: int = 0
    num_shares: int = 1
    largest: Callable[[Tensor], Tensor] = lambda x: x
    total: Callable[[Tensor], Tensor] = lambda x: x


# The logits `[R, V]` of rows and parameters.
Predict = Callable[[Sequence[Tensor], Sequence[Tensor]], Tensor]


def summed_in_chunks(
    predict: Predict,
    rows: Sequence[Tensor],
    parameters: Sequence[Tensor],
    targets: TargetRows,
    vocab_size: int,
    cross_entropy: Callable[..., Tensor] = summed_cross_entropy,
) -> Tensor:
    """Summed cross entropy of a head's predictions; logits exist for one chunk of rows at a time.

    The gradients of a chunk are computed with its loss, as long as its logits exist. Backward only
    multiplies them by the gradient of the sum. Sums of the parameters' gradients over chunks are
    float32. The number of chunks follows from the shapes alone.

    Source: the order of work is that of Liger Kernel's fused linear cross entropy (Hsu et al.,
    https://arxiv.org/abs/2410.10989).

    Args:
        predict: logits of rows and parameters, row by row.
        rows: `[T, ...]` each, the inputs of the head; rows without a target are not read.
        parameters: of the head; their gradients are summed over the chunks.
        targets: their rows are all different.
        vocab_size: V of the logits on this rank.
        cross_entropy: of logits, targets, weights and sources, summed; may be collective.

    Returns:
        A float32 scalar.
    """
    call = ChunkedSum(predict, rows, parameters, targets, vocab_size, cross_entropy)
    given = [*rows, *parameters]
    if paddle.is_grad_enabled() and any(not value.stop_gradient for value in given):
        return cast(Tensor, _SumWithGradients.apply(call, *given))
    return sum(map(call.loss, call.chunks()), paddle.zeros([]))


class ChunkedSum:
    """The arguments of `summed_in_chunks`, and gradients of the sum until its own is known; hides
    from `PyLayer` what it should not search."""

    def __init__(self, predict, rows, parameters, targets, vocab_size, cross_entropy):
        self.predict, self.cross_entropy, self.targets = predict, cross_entropy, targets
        self.rows, self.parameters = list(rows), list(parameters)
        self.num_rows = targets.rows.shape[0]
        most = max(1, CHUNK_LOGITS // vocab_size)
        self.num_chunks = max(1, -(-self.num_rows // most))
        self.shapes, self.dtypes = [x.shape for x in rows], [x.dtype for x in parameters]
        # By chunk: row numbers, and the gradients of these rows.
        self.of_rows: list[tuple[Tensor, list[Tensor | None]]] = []
        self.of_parameters: list[Tensor | None] = [None] * len(parameters)

    def chunks(self) -> Iterator[TargetRows]:
        """The targets of every chunk; all have the same size, but for one row."""
        for number in range(self.num_chunks):
            begin, end = (n * self.num_rows // self.num_chunks for n in (number, number + 1))
            yield self.targets.part(begin, end)

    def loss(self, chunk: TargetRows) -> Tensor:
        """The sum over the rows of a chunk."""
        rows = [paddle.index_select(x, chunk.rows) for x in self.rows]
        return self._loss(chunk, rows, self.parameters)

    def _loss(self, chunk: TargetRows, rows, parameters) -> Tensor:
        return self.cross_entropy(self.predict(rows, parameters), *chunk[1:])

    def with_gradients(self) -> Tensor:
        """The sum over all rows; keeps its gradients in place of the arguments."""
        total = paddle.zeros([])
        for chunk in self.chunks():
            rows = [
                _leaf(paddle.index_select(x.detach(), chunk.rows), x.stop_gradient)
                for x in self.rows
            ]
            # New ones for every chunk: Paddle would add up their gradients in their own dtype.
            parameters = [_leaf(x.detach(), x.stop_gradient) for x in self.parameters]
            with paddle.enable_grad():
                loss = self._loss(chunk, rows, parameters)
            loss.backward()
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
    def forward(ctx, call, *given):
        ctx.call = call
        return call.with_gradients()

    @staticmethod
    def backward(ctx, grad):
        return tuple(ctx.call.gradients(grad))
