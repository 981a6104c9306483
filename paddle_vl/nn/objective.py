"""Interface of a model family to the training step: its loss, and an adapter for its batches.

Losses are sums and counts; the mean over a step is computed once, from the counts of all ranks.

Shapes: S sources of a training mix.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

from paddle import Tensor

from paddle_vl.batch.schema import Batch

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

    @abstractmethod
    def to_device(self, batch: BatchT) -> BatchT:
        """The batch with tensors in place of the arrays that the model computes with."""

    @abstractmethod
    def forward(self, model: Any, batch: BatchT) -> Any:
        """The model's output for a batch on the device."""
