"""What the processes of a run do together in training: one seam, and its single-process side.

`paddle_vl.parallel.processes` has the other side. Every method that several processes must call
together says so; a single process just goes on.
"""

from collections.abc import Sequence
from typing import Any

import paddle
from paddle import Tensor

from paddle_vl.nn.parameter_table import ParamSpec


class SingleProcess:
    """The only process of a run.

    Attributes:
        rank: this process among all.
        is_main: whether this process writes files and speaks to the user.
        holds_model: whether this process and those that have the rest of its model save it.
        random_place: what random numbers depend on beside seed and step; equal on processes that
            must draw the same.
        counts_data: whether this process speaks for its part of the data, which others may have.
        counts_losses: whether it counts its losses in a sum over all processes; of those that have
            the same ones does.
        data_rank, data_size: which part of every batch of samples is this process's, of how many.
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
        """Each count added up over the parts of the data, and a stop signal that any process
        received. Host numbers, in one message; the device is not waited for. Called by all
        together."""
        return list(counts), signal

    def totals(self, counts: Sequence[int]) -> list[int]:
        """Each count added up over the parts of the data, see `agree`."""
        return self.agree(counts)[0]

    def sum_losses(self, value: Tensor) -> Tensor:
        """A loss added up over the parts of the data. Called by all together."""
        return self.sum_over_all(value if self.counts_losses else paddle.zeros_like(value))

    def gathered(self, value: Any) -> list[Any]:
        """The values of all processes, of JSON's types, by rank. Called by all together."""
        return [value]

    def gathered_values(self, values_K: Tensor) -> Tensor:
        """`[P, K]`, the values of all processes. Called by all together."""
        return values_K.unsqueeze(0)

    def sum_over_all(self, value: Tensor) -> Tensor:
        """A value added up over all processes. Called by all together."""
        return value

    def counts_here(self, spec: ParamSpec) -> bool:
        """Whether this rank counts a trained parameter with that spec in `sum_over_all`: one of
        those that have the same values does."""
        return True

    def seed_split_random(self, entropy: Sequence[int]) -> None:
        """Start the generator for what this process has a part of, before every step."""

    def sum_gradients(self, tensors: Sequence[tuple[Tensor, ParamSpec]]) -> None:
        """Make every gradient that of the whole step. Called by all together, once per step.

        Args:
            tensors: what the optimizer updates, with the specs of their parameters.
        """

    def wait(self) -> None:
        """Until all are here."""


ONE_PROCESS = SingleProcess()
