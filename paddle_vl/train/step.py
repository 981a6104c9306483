"""One training step: gradients over the micro-batches, then one optimizer update or none.

The micro-batches of all ranks count as one batch. Before the update the host reads once: the
gradient norm, or NaN for a bad step, and which parameters any rank's backward passes have reached.
Losses stay on the device until a report reads them.

With room for a fixed number of rows at experts of other ranks (`ExpertCapacity`), a step that needs
more makes no update: the norm says so, and the step is repeated with exact sizes.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import islice
from math import isnan
from typing import Any, Protocol

import numpy as np
import paddle
from paddle import Tensor

from paddle_vl.batch.schema import Batch, HostBatch
from paddle_vl.nn.experts import ExpertCapacity
from paddle_vl.nn.master_weights import ParameterStore
from paddle_vl.nn.objective import BatchAdapter, Loss
from paddle_vl.nn.transfer import host_table, on_device
from paddle_vl.parallel.ranks import ONE_RANK, SingleRank
from paddle_vl.train.optimizer import Optimizer
from paddle_vl.train.phases import Phase, phase

logger = logging.getLogger(__name__)
# Numbers besides loss counts, sources and branches: samples, tokens, packed places.
_NUM_REST = 3
# In place of a norm: the step is to be repeated with exact sizes.
_OVERFLOW = -1.0


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
        expert_capacities: the largest of all ranks, of each micro-batch; empty for exact sizes.
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
    expert_capacities: tuple[int, ...] = ()

    @property
    def num_agreed(self) -> int:
        """Number of values that ranks exchange before a step, the same for all steps of a run."""
        of_sources = (self.source_tokens, self.source_documents, self.source_targets)
        several = (self.counts, *of_sources, *self.needed, self.expert_capacities)
        return _NUM_REST + sum(map(len, several))


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
        is_repeated: whether these are results of a second pass, with exact sizes.
    """

    terms: Tensor
    grad_norm: Tensor
    is_good: Tensor
    totals: StepTotals
    source_sums: Tensor | None = None
    is_repeated: bool = False

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
        terms = paddle.zeros([len(self.loss.terms) + num_sources])
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

    def _output(self, batch: Any) -> Any:
        with phase(Phase.HOST_TO_DEVICE):
            # What the feed has not copied: a dummy image, and the batches of an evaluation.
            batch = on_device(batch)
        return self.adapter.forward(self.model, batch)


def agree_on_step(
    micro_batches: Sequence[HostBatch],
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
    capacities = [each.expert_rows for each in micro_batches]
    capacities = [number for number in capacities if number is not None]
    with phase(Phase.AGREEMENT):
        totals, signal = ranks.agree(
            [*sums, *(int(is_needed) for of in branches for is_needed in of)], signal, capacities
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
    found = StepTotals(counts, num_samples, num_tokens, num_places, needed, signal, *source_counts)
    return replace(found, expert_capacities=taken(len(capacities)))


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
    optimizer: Optimizer,
    micro_batches: Sequence[HostBatch],
    learning_rate: float,
    ranks: SingleRank = ONE_RANK,
    totals: StepTotals | None = None,
    before_wait: Callable[[], object] = lambda: None,
    seed: Callable[[], object] = lambda: None,
) -> StepOutcome:
    """Train on the micro-batches of all ranks as one batch. All ranks call it together.

    A micro-batch weighs as much as it counts in the divisors of the losses. A step that counts
    nothing, or whose losses depend on no trained parameter, updates nothing.

    Args:
        micro_batches: this rank's.
        learning_rate: of this update.
        totals: from `agree_on_step`; None to call it here.
        before_wait: called when forward and backward passes are launched, and the host would wait;
            twice in a step that is repeated.
        seed: seeds what the passes draw; called before each.

    Raises:
        ValueError: the step has nothing to learn from.
    """
    totals = totals or agree_on_step(micro_batches, runner.loss, ranks)
    batches: list[Any] = [
        runner.adapter.synchronized(batch, needed, runner.model)
        for batch, needed in zip(micro_batches, totals.needed, strict=True)
    ]
    passes = partial(_passes, runner, optimizer, totals, ranks, before_wait)
    seed()
    capacities = [ExpertCapacity(rows) for rows in totals.expert_capacities]
    outcome, norm, reached = passes(batches, capacities)
    if norm == _OVERFLOW:
        with phase(Phase.CLEARING):
            optimizer.clear_gradients()
        seed()
        outcome, norm, reached = passes(batches, [])
        outcome = replace(outcome, is_repeated=True)
    own = optimizer.reached() if reached is None else reached
    # None where no answer has anything to learn from.
    has_counts = any(totals.counts)
    if has_counts and norm == 0.0 and not own.any():
        # As of text alone, where the tower alone is trained.
        if ranks.is_main:
            _tell_of_idle_steps()
    elif has_counts and not isnan(norm):
        with phase(Phase.OPTIMIZER):
            optimizer.update(learning_rate, norm, reached)
    with phase(Phase.CLEARING):
        optimizer.clear_gradients()
    return outcome


def _passes(
    runner: Runner,
    optimizer: Optimizer,
    totals: StepTotals,
    ranks: SingleRank,
    before_wait: Callable[[], object],
    batches: Sequence[Any],
    capacities: Sequence[ExpertCapacity],
) -> tuple[StepOutcome, float, np.ndarray | None]:
    """The gradients of a step; their norm, NaN or `_OVERFLOW`, and which parameters have one, see
    `Optimizer.update`, alike on all ranks.

    Args:
        capacities: of the micro-batches; none for exact sizes.
    """
    store, num_sources = optimizer.store, len(totals.source_targets)
    if capacities:
        pairs = zip(batches, capacities, strict=True)
        batches = [batch | {"expert_capacity": capacity} for batch, capacity in pairs]
    store.begin_step(len(batches))
    terms = runner.accumulate_gradients(batches, totals.counts, store, num_sources)
    with phase(Phase.GRADIENT_SUM):
        store.end_backward()
        optimizer.collect_gradients()
        if ranks.world_size > 1:
            ranks.sum_gradients(optimizer.tensors_with_specs)
    with phase(Phase.CLIP):
        terms, norm, source_sums, overflow, reached = _summed(
            terms, optimizer, ranks, len(totals.counts), capacities
        )
        is_good = paddle.isfinite(terms).all() & paddle.isfinite(norm)
    before_wait()
    with phase(Phase.OPTIMIZER):
        number = paddle.where(is_good, norm, paddle.full_like(norm, float("nan")))
        if overflow is not None:
            number = paddle.where(overflow > 0, paddle.full_like(norm, _OVERFLOW), number)
        outcome = StepOutcome(terms, norm, is_good, totals, source_sums)
        if reached is None:
            return outcome, float(number), None
        read = paddle.concat([number.reshape([1]), reached]).numpy()
    return outcome, float(read[0]), read[1:]


@cache
def _tell_of_idle_steps() -> None:
    """Once in a process."""
    logger.warning(
        "no trained parameter got a gradient in a step, so nothing was updated; that may happen "
        "again, and is not said again. If no step trains anything, check model.freeze against what "
        "the data contains"
    )


@host_table
def _flags(content: bytes) -> np.ndarray:
    """Float32 flags; nearly every step has the same ones."""
    return np.frombuffer(content, dtype=np.float32).copy()


@paddle.no_grad()
def _summed(
    terms: Tensor,
    optimizer: Optimizer,
    ranks: SingleRank,
    num_terms: int,
    capacities: Sequence[ExpertCapacity],
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """The step's terms, gradient norm, sums of sources, number of overflows, and on several ranks
    how many have reached each parameter, in one all-reduce.

    Args:
        terms: this rank's share of terms and sums, see `Runner.accumulate_gradients`.
        capacities: of the micro-batches; none for exact sizes.
    """
    own = terms if ranks.counts_losses else paddle.zeros_like(terms)
    squares = optimizer.squared_norm(ranks).reshape([1])
    has_sources = own.shape[0] > num_terms
    parts = [own[:num_terms], squares, own[num_terms:]] if has_sources else [own, squares]
    if capacities:
        overflows = [each for capacity in capacities for each in capacity.overflows]
        # A pipeline stage may have no layer with experts.
        flags = paddle.stack([paddle.zeros([], dtype="bool"), *overflows])
        parts.append(flags.astype("float32").sum().reshape([1]))
    if has_reached := ranks.world_size > 1:
        parts.append(_flags(optimizer.reached().tobytes()))
    totals = paddle.concat(parts)
    if has_reached:
        totals = ranks.sum_over_all(totals)
    end = own.shape[0] + 1
    source_sums = totals[num_terms + 1 : end] if has_sources else None
    overflow = totals[end] if capacities else None
    reached = totals[end + bool(capacities) :] if has_reached else None
    return totals[:num_terms], totals[num_terms].sqrt(), source_sums, overflow, reached
