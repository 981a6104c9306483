"""A batch with all that a step has to know of it on the host, whatever of it lies on the device."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paddle_vl.train.objective import Batch, Objective


@dataclass(frozen=True)
class MicroBatch:
    """A batch and what was counted of it.

    Attributes:
        batch: as the model takes it; arrays, or tensors on the device.
        counts: by how much it adds to what each loss term is divided by.
        asks: what it needs that others may not, see `Objective.asks`.
        num_samples, num_tokens, num_packed_places: see `Objective`.
        lengths: real tokens of each sample; empty where tokens are not counted.
        flops: operations of its forward and backward pass; 0 where they are not counted.
    """

    batch: Batch
    counts: tuple[int, ...]
    asks: tuple[bool, ...]
    num_samples: int
    num_tokens: int
    num_packed_places: int
    lengths: tuple[int, ...] = ()
    flops: int = 0


def counted(
    batch: Batch, objective: Objective, count_flops: Callable[[Batch], int] | None = None
) -> MicroBatch:
    """A batch of arrays, as a collator makes it, with its counts."""
    return MicroBatch(
        batch,
        tuple(objective.counts(batch)),
        tuple(objective.asks(batch)),
        objective.num_samples(batch),
        objective.num_tokens(batch),
        objective.num_packed_places(batch),
        tuple(objective.lengths(batch)),
        0 if count_flops is None else count_flops(batch),
    )


def totals_of(batches: Sequence[MicroBatch]) -> list[int]:
    """Counts of all terms, samples, tokens and packed places, added up."""
    rows = [
        (*batch.counts, batch.num_samples, batch.num_tokens, batch.num_packed_places)
        for batch in batches
    ]
    return [sum(column) for column in zip(*rows, strict=True)]
