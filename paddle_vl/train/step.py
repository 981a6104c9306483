"""One training step: gradients over the micro-batches, then one optimizer update or none.

The micro-batches of all ranks count as one batch. Before the update the host reads one number, the
gradient norm or NaN for a bad step. Losses stay on the device until a report reads them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from math import isnan
from typing import Any, Protocol

import paddle
from paddle import Tensor

from paddle_vl.batch.schema import SOURCE_COUNTS, SOURCE_TARGETS, Batch
from paddle_vl.nn.master_weights import ParameterStore
from paddle_vl.nn.objective import BatchAdapter, Loss, zero_terms
from paddle_vl.parallel.ranks import ONE_RANK, SingleRank
from paddle_vl.train.colocated_optimizer import ColocatedOptimizer
from paddle_vl.train.optimizer import Optimizer
from paddle_vl.train.phases import Phase, phase

# Numbers besides loss counts, sources and branches: samples, tokens, packed places.
_NUM_REST = 3


@dataclass(frozen=True)
class MicroBatch:
    """A batch and its counts, taken on the host before arrays go to the device.

    Attributes:
        batch: arrays, or tensors on the device.
        counts: what it adds to the divisor of each loss term.
        optional_branches: whether it needs each optional branch of the model.
        num_samples, num_tokens, num_packed_places, lengths: see
            `paddle_vl.nn.objective.BatchAdapter`.
        flops: operations of its forward and backward pass; 0 where they are not counted.
        source_tokens, source_documents: tokens, and documents that begin, of each source of a mix;
            empty without one.
        source_targets: target tokens of each source of a batch with `label_sources`; else empty.
    """

    batch: Batch
    counts: tuple[int, ...]
    optional_branches: tuple[bool, ...]
    num_samples: int
    num_tokens: int
    num_packed_places: int
    lengths: tuple[int, ...] = ()
    flops: int = 0
    source_tokens: tuple[int, ...] = ()
    source_documents: tuple[int, ...] = ()
    source_targets: tuple[int, ...] = ()


def counted(
    batch: Batch, adapter: BatchAdapter, count_flops: Callable[[Batch], int] | None = None
) -> MicroBatch:
    """A batch from a collator, with its counts."""
    names = (*SOURCE_COUNTS, SOURCE_TARGETS)
    sources = {name: tuple(batch[name].tolist()) for name in names if name in batch}
    if sources:
        batch = {name: value for name, value in batch.items() if name not in sources}
    return MicroBatch(
        batch,
        tuple(adapter.counts(batch)),
        tuple(adapter.optional_branches(batch)),
        adapter.num_samples(batch),
        adapter.num_tokens(batch),
        adapter.num_packed_places(batch),
        tuple(adapter.lengths(batch)),
        0 if count_flops is None else count_flops(batch),
        **sources,
    )


@dataclass(frozen=True)
class StepTotals:
    """A step's counts over all ranks, known on the host before it begins.

    Attributes:
        counts: divisor of each loss term.
        num_samples: samples of all micro-batches.
        num_tokens: their tokens without padding, visual ones too.
        num_packed_places: token capacity of packed rows, padding included; 0 without packing.
        source_tokens, source_documents: tokens, and documents that begin, of each source of a mix;
            empty without one.
        source_targets: target tokens of each source; empty where no loss of sources is computed.
        needed: `needed[i][j]` data-parallel ranks need optional branch j in micro-batch i.
        signal: a stop signal that any rank received; the step must not begin then.
    """

    counts: tuple[int, ...]
    num_samples: int
    num_tokens: int
    num_packed_places: int
    needed: tuple[tuple[int, ...], ...]
    signal: int | None = None
    source_tokens: tuple[int, ...] = ()
    source_documents: tuple[int, ...] = ()
    source_targets: tuple[int, ...] = ()

    @property
    def num_agreed(self) -> int:
        """Number of values that ranks exchange before a step, the same for all steps of a run."""
        of_sources = (self.source_tokens, self.source_documents, self.source_targets)
        return len(self.counts) + _NUM_REST + sum(map(len, (*of_sources, *self.needed)))


@dataclass(frozen=True)
class StepOutcome:
    """Result of a step, on the device.

    Attributes:
        terms: `[n]` float32, mean of each loss term over the global batch, including a weighted
            load-balancing loss.
        grad_norm: float32 scalar, global gradient norm before clipping.
        is_good: bool scalar; False if a loss or the norm is not finite and the update is skipped.
        totals: counts of the step.
        source_sums: `[S]` float32, cross entropy summed over the target tokens of each source,
            without loss weights; None where `totals` have no targets of sources.
    """

    terms: Tensor
    grad_norm: Tensor
    is_good: Tensor
    totals: StepTotals
    source_sums: Tensor | None = None

    def means(self, loss: Loss) -> dict[str, float]:
        """The terms by name, read from the device."""
        return dict(zip(loss.terms, self.terms.numpy().tolist(), strict=True))


class Runner(Protocol):
    """Computes losses and gradients of this rank's layers: `ModelRunner`, or `PipelineRunner`.

    Attributes:
        batches_at_once: batches per call in an evaluation.
    """

    model: Any
    loss: Loss
    adapter: BatchAdapter

    @property
    def batches_at_once(self) -> int: ...

    def accumulate_gradients(
        self,
        batches: Sequence[Batch],
        totals: Sequence[int],
        store: ParameterStore | None = None,
        num_sources: int = 0,
    ) -> Tensor:
        """Add up the gradients of the loss over all batches.

        Args:
            totals: divisor of each loss term.
            store: of the model's parameters; None leaves gradients where autograd put them.
            num_sources: S, of batches with sources; the same on every rank.

        Returns:
            `[n + S]` float32, this rank's share of each term, and of the sum of each source.
        """
        ...

    def loss_sums(self, batches: Sequence[Batch]) -> Tensor:
        """`[n]`, each term before division, summed over the batches."""
        ...

    def values(self, batches: Sequence[Batch], of: Callable[[Any], Tensor]) -> list[Tensor]:
        """A value of the model's output for each batch, without gradients; nothing on pipeline
        stages without the head. All ranks call it."""
        ...


class ModelRunner:
    """Runs all layers of a model on every rank, without a pipeline. See `Runner`."""

    batches_at_once = 1

    def __init__(
        self,
        model: Any,
        loss: Loss,
        adapter: BatchAdapter,
        ranks: SingleRank = ONE_RANK,
    ):
        self.model, self.loss, self.adapter, self.ranks = model, loss, adapter, ranks

    def accumulate_gradients(
        self,
        batches: Sequence[Batch],
        totals: Sequence[int],
        store: ParameterStore | None = None,
        num_sources: int = 0,
    ) -> Tensor:
        terms = zero_terms(self.loss, num_sources)
        num_batches = len(batches) * self.ranks.data_size
        for batch in batches:
            with phase(Phase.FORWARD):
                loss, parts = self.loss.share(self._output(batch), totals, num_batches)
            with phase(Phase.BACKWARD):
                loss.backward()
                if store is not None:
                    store.end_micro_batch()
            terms = terms + parts
        return terms

    def loss_sums(self, batches: Sequence[Batch]) -> Tensor:
        first, *others = self.values(batches, self.loss.sums)
        return sum(others, first)

    @paddle.no_grad()
    def values(self, batches: Sequence[Batch], of: Callable[[Any], Tensor]) -> list[Tensor]:
        return [of(self._output(batch)) for batch in batches]

    def _output(self, batch: Batch) -> Any:
        with phase(Phase.HOST_TO_DEVICE):
            batch = self.adapter.to_device(batch)
        return self.adapter.forward(self.model, batch)


def agree_on_step(
    micro_batches: Sequence[MicroBatch],
    loss: Loss,
    ranks: SingleRank = ONE_RANK,
    signal: int | None = None,
) -> StepTotals:
    """Exchange counts before a step, in one message. All ranks call this together.

    Args:
        signal: a stop signal that this rank received.

    Raises:
        ValueError: the step has nothing to learn from, the same on every rank.
    """
    own = [
        (
            *(*batch.counts, batch.num_samples, batch.num_tokens, batch.num_packed_places),
            *(*batch.source_tokens, *batch.source_documents, *batch.source_targets),
        )
        for batch in micro_batches
    ]
    first = micro_batches[0]
    of_sources = (first.source_tokens, first.source_documents, first.source_targets)
    sums = [sum(column) for column in zip(*own, strict=True)]
    branches = [batch.optional_branches for batch in micro_batches]
    with phase(Phase.AGREEMENT):
        totals, signal = ranks.agree(
            [*sums, *(int(is_needed) for of in branches for is_needed in of)], signal
        )
    left = iter(totals)

    def taken(number: int) -> tuple[int, ...]:
        return tuple(islice(left, number))

    counts = taken(len(loss.terms))
    if signal is None:
        loss.check_counts(counts, len(micro_batches))
    num_samples, num_tokens, num_places = taken(_NUM_REST)
    source_counts = [taken(len(of_each)) for of_each in of_sources]
    needed = tuple(taken(len(of)) for of in branches)
    return StepTotals(counts, num_samples, num_tokens, num_places, needed, signal, *source_counts)


def leave_step(num_agreed: int, ranks: SingleRank, signal: int | None) -> int | None:
    """Take part in other ranks' `agree_on_step` with zeros and a stop signal.

    For a rank that was stopped while it waited for data.

    Args:
        num_agreed: of an earlier step.

    Returns:
        The signal that all ranks stop for.
    """
    return ranks.agree([0] * num_agreed, signal)[1]


def train_step(
    runner: Runner,
    optimizer: Optimizer | ColocatedOptimizer,
    micro_batches: Sequence[MicroBatch],
    learning_rate: float,
    ranks: SingleRank = ONE_RANK,
    totals: StepTotals | None = None,
    before_wait: Callable[[], object] = lambda: None,
) -> StepOutcome:
    """Train on the micro-batches of all ranks as one batch. All ranks call it together.

    A micro-batch weighs as much as it counts in the divisors of the losses.

    Args:
        micro_batches: this rank's.
        learning_rate: of this update.
        totals: from `agree_on_step`; None to call it here.
        before_wait: called when forward and backward passes are launched, and the host would wait.

    Raises:
        ValueError: the step has nothing to learn from.
    """
    loss, adapter, store = runner.loss, runner.adapter, optimizer.store
    totals = totals or agree_on_step(micro_batches, loss, ranks)
    batches = [
        adapter.synchronized(micro_batch.batch, needed, runner.model)
        for micro_batch, needed in zip(micro_batches, totals.needed, strict=True)
    ]
    store.begin_step(len(batches))
    num_sources = len(totals.source_targets)
    terms = runner.accumulate_gradients(batches, totals.counts, store, num_sources)
    with phase(Phase.GRADIENT_SUM):
        store.end_backward()
        optimizer.collect_gradients()
        if ranks.world_size > 1:
            ranks.sum_gradients(optimizer.tensors_with_specs)
    with phase(Phase.CLIP):
        terms, norm, source_sums = _summed(terms, optimizer, ranks, len(totals.counts))
        is_good = paddle.isfinite(terms).all() & paddle.isfinite(norm)
    before_wait()
    with phase(Phase.OPTIMIZER):
        # NaN is the flag of a bad step, alike on all ranks.
        read_norm = float(paddle.where(is_good, norm, paddle.full_like(norm, float("nan"))))
        if not isnan(read_norm):
            optimizer.update(learning_rate, read_norm)
    with phase(Phase.CLEARING):
        optimizer.clear_gradients()
    return StepOutcome(terms, norm, is_good, totals, source_sums)


@paddle.no_grad()
def _summed(
    terms: Tensor, optimizer: Optimizer | ColocatedOptimizer, ranks: SingleRank, num_terms: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The step's terms, gradient norm and sums of sources, in one all-reduce.

    Args:
        terms: this rank's share of terms and sums, see `Runner.accumulate_gradients`.
    """
    own = terms if ranks.counts_losses else paddle.zeros_like(terms)
    squares = optimizer.squared_norm(ranks).reshape([1])
    has_sources = own.shape[0] > num_terms
    parts = [own[:num_terms], squares, own[num_terms:]] if has_sources else [own, squares]
    totals = paddle.concat(parts)
    if ranks.world_size > 1:
        totals = ranks.sum_over_all(totals)
    source_sums = totals[num_terms + 1 :] if has_sources else None
    return totals[:num_terms], totals[num_terms].sqrt(), source_sums
