"""A reference that a loss compares the trained model with, without a second model.

The reference has other values of the trained parameters, which each rank keeps of its own shards.
For a pass they change places with the trained values: the same layers, collectives and schedule
compute both, under any topology, and frozen parameters are in memory once. With adapters the
reference has zeros in theirs.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import paddle
from paddle import Tensor

from paddle_vl.batch.schema import Batch
from paddle_vl.nn.master_weights import ParameterStore, exchange_values
from paddle_vl.parallel.ranks import SingleRank
from paddle_vl.train.step import Runner

# Of an evaluation; in training an exchange is for all micro-batches of a step.
_BATCHES_OF_EXCHANGE = 4


class Reference:
    """The reference's values of the trained parameters, sharded like the optimizer's.

    Args:
        values: each trained parameter with its value on this rank, unsharded.
        store: of the parameters, once the optimizer has its shards.
    """

    @paddle.no_grad()
    def __init__(self, values: Iterable[tuple[Tensor, Tensor]], store: ParameterStore):
        self._store = store
        self._pairs: list[tuple[Tensor, Tensor]] = []
        for parameter, value in values:
            shard = store.shard_of(parameter)
            if shard is not None:
                full = value.astype("float32").numpy()
                own: Any = store.own_shard(parameter, np.asarray(full))
                self._pairs.append((shard, paddle.to_tensor(own).reshape(shard.shape)))

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The model is the reference inside the block. All ranks enter it together."""
        exchange_values(self._pairs, self._store)
        # After an error other ranks may not be here, to gather the trained values.
        yield
        exchange_values(self._pairs, self._store)


class ComparingRunner:
    """Runs the passes that a loss of compared answers needs before a step. A `Runner`.

    Args:
        runner: of the model; its loss has `values`, `other_batches` and `compared`, see
            `paddle_vl.families.vlm.preference.objective.PreferenceLoss`.
        reference: None for a loss that has none, or whose batches come with its values.
    """

    def __init__(self, runner: Runner, reference: Reference | None, ranks: SingleRank):
        self._runner, self._reference, self._ranks = runner, reference, ranks
        self.model, self.adapter = runner.model, runner.adapter
        self.loss: Any = runner.loss

    @property
    def batches_at_once(self) -> int:
        # An exchange copies all trained values twice, so it is for several batches.
        several = 1 if self._reference is None else _BATCHES_OF_EXCHANGE
        return max(several, self._runner.batches_at_once)

    def accumulate_gradients(
        self,
        batches: Sequence[Batch],
        totals: Sequence[int],
        store: ParameterStore | None = None,
        num_sources: int = 0,
    ) -> Tensor:
        compared = self._compared(batches, self._ranks.sum_losses)
        return self._runner.accumulate_gradients(compared, totals, store, num_sources)

    def loss_sums(self, batches: Sequence[Batch]) -> Tensor:
        return self._runner.loss_sums(self._compared(batches, None))

    def values(self, batches: Sequence[Batch], of: Callable[[Any], Tensor]) -> list[Tensor]:
        return self._runner.values(batches, of)

    def reference_values(self, batches: Sequence[Batch]) -> list[Tensor]:
        """`values` of the loss under the reference."""
        assert self._reference is not None, "asked of a run that has one"
        with self._reference.in_place():
            return self.values(batches, self.loss.values)

    def _compared(
        self, batches: Sequence[Batch], summed: Callable[[Tensor], Tensor] | None
    ) -> list[Batch]:
        loss = self.loss
        others = loss.other_batches(batches)
        own = self.values(others, loss.values) if others else []
        found: list[Tensor] = []
        if self._reference is not None:
            with self._reference.in_place():
                found = self.values([*batches, *others], loss.values)
        with paddle.no_grad():
            return loss.compared(batches, found, own, summed)
