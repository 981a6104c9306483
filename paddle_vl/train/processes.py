"""What ranks exchange in training: the interface, and its implementation for one process.

`paddle_vl.parallel.processes` implements it for several ranks. Collective methods say that all
ranks call them.
"""

from collections.abc import Sequence
from typing import Any

import paddle
from paddle import Tensor

from paddle_vl.nn.parameter_table import ParamSpec


class SingleProcess:
    """World size 1.

    Attributes:
        rank: global rank.
        is_main: whether this rank writes files and logs; True on rank 0.
        holds_model: whether this rank takes part in saving the model; one data-parallel replica
            does.
        random_place: seed entropy besides seed and step; equal on ranks that must draw the same
            numbers.
        counts_data: whether this rank contributes to sums over samples; one of the ranks that load
            the same samples does.
        counts_losses: whether this rank contributes to sums over losses; one of the ranks that
            compute the same loss does.
        data_rank, data_size: this rank's shard of every global batch, and number of shards.
    """

    is_main = True
    rank = 0
    holds_model = True
    counts_data = True
    counts_losses = True
    data_rank = 0
    data_size = 1
    random_place: tuple[int, ...] = ()

    def agree(
        self, counts: Sequence[int], signal: int | None = None
    ) -> tuple[list[int], int | None]:
        """Sum of each count over data shards, and a stop signal that any rank received.

        One message between hosts; the device is not synchronized. Called by all ranks.
        """
        return list(counts), signal

    def totals(self, counts: Sequence[int]) -> list[int]:
        """Sum of each count over data shards. Called by all ranks."""
        return self.agree(counts)[0]

    def sum_losses(self, value: Tensor) -> Tensor:
        """All-reduce of a loss over data shards. Called by all ranks."""
        return self.sum_over_all(value if self.counts_losses else paddle.zeros_like(value))

    def gathered(self, value: Any) -> list[Any]:
        """All-gather of a JSON value, by rank. Called by all ranks."""
        return [value]

    def gathered_values(self, values_K: Tensor) -> Tensor:
        """All-gather of `[K]` values of every rank into `[P, K]`. Called by all ranks."""
        return values_K.unsqueeze(0)

    def sum_over_all(self, value: Tensor) -> Tensor:
        """All-reduce over all ranks. Called by all ranks."""
        return value

    def counts_here(self, spec: ParamSpec) -> bool:
        """Whether this rank contributes a trained parameter with that spec to `sum_over_all`; one
        of its replicas does."""
        return True

    def seed_split_random(self, entropy: Sequence[int]) -> None:
        """Seed the generator of sharded tensors, before every step."""

    def sum_gradients(self, tensors: Sequence[tuple[Tensor, ParamSpec]]) -> None:
        """Reduce gradients over ranks, once per step. Called by all ranks.

        Args:
            tensors: tensors that the optimizer updates, with the specs of their parameters.
        """

    def wait(self) -> None:
        """Barrier. Called by all ranks."""


ONE_PROCESS = SingleProcess()
