"""Interface of a model family to the training step: its loss, and an adapter for its batches.

Losses are sums and counts; the mean over a step is computed once, from the counts of all ranks.

Shapes: S sources of a training mix.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

from paddle import Tensor

from paddle_vl.batch.schema import HostBatch

BatchT = TypeVar("BatchT", bound=HostBatch)


class Loss(ABC):
    """The loss of a model family: weighted terms, each a sum divided by a count over a whole step.

    The micro-batches of all ranks count as one batch. `HostBatch.counts` is what a batch adds
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


class BatchAdapter(ABC, Generic[BatchT]):
    """What ranks agree on about a batch, and its way into the model.

    If one rank's batch needs an optional branch of the model (vision tower, an optional part of the
    prompt), other ranks may have to run it too, because its layers are collective:
    `HostBatch.optional_branches` tells what a batch needs; `synchronized` makes the batch to run
    once the needs of all ranks are known.
    """

    @abstractmethod
    def idle_batch(self, model: Any) -> BatchT:
        """A batch that adds 0 to every count, for a rank that has no batch left."""

    def synchronized(self, batch: BatchT, needed: Sequence[int], model: Any) -> BatchT:
        """The batch as this rank runs it.

        Args:
            needed: for each optional branch the number of data-parallel ranks whose batch needs it.
        """
        return batch

    @abstractmethod
    def forward(self, model: Any, batch: BatchT) -> Any:
        """The model's output for a batch on the device."""
