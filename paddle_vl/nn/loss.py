"""Losses as sums and counts: the mean over a step is made once, from the counts of all ranks."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import paddle
from paddle import Tensor


class Loss(ABC):
    """The loss of a model family: weighted terms, each a sum divided by a count over a whole step.

    The micro-batches of all ranks count as one batch. `paddle_vl.families.base.BatchAdapter` counts
    what a batch adds to the divisors.

    Attributes:
        terms: names and weights; a term of weight 0 is reported but not trained.
        reported_counts: by term the name under which a metrics line reports its divisor.
    """

    terms: Mapping[str, float]
    reported_counts: Mapping[str, str] = {}

    @abstractmethod
    def check_counts(self, totals: Sequence[int], num_batches: int) -> None:
        """Refuse a step that has nothing to learn from.

        Args:
            totals: divisor of each term over the whole step.
            num_batches: micro-batches of this rank, for the message.

        Raises:
            ValueError: a divisor is 0; says what to look at.
        """

    @abstractmethod
    def share(self, output: Any, totals: Sequence[int], num_batches: int) -> tuple[Tensor, Tensor]:
        """What one micro-batch adds to the step.

        Args:
            output: the model's.
            totals: divisor of each term over the whole step.
            num_batches: micro-batches of all ranks.

        Returns:
            The scalar to differentiate, and each term `[n]`, detached.
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


def zero_terms(loss: Loss) -> Tensor:
    """A zero for each term, `[n]` float32."""
    return paddle.zeros([len(loss.terms)])
