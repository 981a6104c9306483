"""Micro-batches of sampled answers, as many on every rank, and passes over them before an update.

Shapes: D data ranks, T tokens of a data rank's answers, N learned ones of a micro-batch.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import paddle
from paddle import Tensor

from paddle_vl.batch.rows import IGNORE_INDEX
from paddle_vl.parallel.ranks import SingleRank
from paddle_vl.train.step import Runner


class RolloutBatches:
    """
    Args:
        rollouts: see `paddle_vl.train.rollouts`.
        batch_size: answers of a micro-batch of a rank.
        num_micro_batches: of an update, or several times as many where ranks have unequal shares.
    """

    def __init__(
        self, rollouts: Any, runner: Runner, ranks: SingleRank, batch_size: int,
        num_micro_batches: int,
    ):  # fmt: skip
        self._rollouts, self._runner, self._ranks = rollouts, runner, ranks
        self._batch_size, self._accumulation = batch_size, num_micro_batches

    def of(
        self, groups: Sequence[Any], rows_of: Callable[[Any], Sequence[Any]] | None = None
    ) -> list[Any]:
        """This rank's micro-batches of the groups of all ranks, and idle ones where others have
        more.

        Args:
            rows_of: makes the rows of a group; None for the ones to learn.
        """
        size, make = self._batch_size, rows_of or self._rollouts.rows
        own = [each for each in groups if each.owner == self._ranks.data_rank]
        rows = [row for group in own for row in make(group)]
        starts = range(0, len(rows), size)
        batches = [self._rollouts.collate(rows[start : start + size]) for start in starts]
        owners = [each.owner for each in groups]
        most = max([owners.count(owner) for owner in {*owners}], default=0)
        number = -(-most * self._rollouts.size // size)
        # Schedules of a pipeline take certain numbers.
        number = max(1, -(-number // self._accumulation)) * self._accumulation
        runner, missing = self._runner, number - len(batches)
        idle = [runner.adapter.idle_batch(runner.model) for _ in range(missing)]
        # They have no samples, and so no lengths.
        return [*batches, *(each | {"lengths": ()} for each in idle)]

    def log_probs(
        self, parts: Sequence[Sequence[Any]], run: Callable[[Sequence[Any]], list[Tensor]]
    ) -> list[list[np.ndarray]]:
        """Log-probabilities of the tokens of all answers, by group; 0 of tokens that are not
        learned. Called by all ranks.

        Args:
            parts: the groups of each update.
            run: gives those of the learned tokens of each micro-batch, `[N]`; nothing on pipeline
                stages without the head.
        """
        ranks, groups = self._ranks, [group for part in parts for group in part]
        starts, ends = dict[int, int](), [0] * ranks.data_size
        for group in groups:
            starts[id(group)] = ends[group.owner]
            ends[group.owner] += int(group.lengths.sum())
        own_T = paddle.zeros([max(ends)])
        for part in parts:
            batches = self.of(part, lambda x: self._rollouts.numbered(x, starts[id(x)]))
            batches = [self._synchronized(each) for each in batches]
            for batch, values_N in zip(batches, run(batches), strict=False):
                # An idle batch and a slice without targets have a token that stands for none.
                is_target_N = np.asarray(batch.target_rows)[1] != IGNORE_INDEX
                if is_target_N.any():
                    numbers = np.asarray(batch.sampler_log_probs)[is_target_N].astype(np.int64)
                    chosen = paddle.to_tensor(np.flatnonzero(is_target_N))
                    values = paddle.index_select(values_N.astype("float32"), chosen)
                    own_T = paddle.scatter(own_T, paddle.to_tensor(numbers), values)
        own_T = self._runner.model.placement.ops.context.total(own_T)
        every_DT = paddle.zeros([ranks.data_size, max(ends)])
        every_DT[ranks.data_rank] = own_T
        every_DT = ranks.sum_losses(every_DT).numpy()
        found = []
        for group in groups:
            start, sizes = starts[id(group)], np.cumsum(group.lengths)
            values = every_DT[group.owner, start : start + sizes[-1]]
            found.append(np.split(values, sizes[:-1]))
        return found

    def _synchronized(self, batch: Any) -> Any:
        needed, _ = self._ranks.agree([*map(int, batch.optional_branches)])
        return self._runner.adapter.synchronized(batch, needed, self._runner.model)
