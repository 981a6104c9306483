"""Sampled answers of a model that is split over ranks, by the passes of an evaluation.

Tensor-parallel ranks, pipeline stages, experts and sharded layers answer with the collectives that
train them: nothing is gathered or copied. It costs a pass over all of them for each token of the
longest answer, and a prompt runs once for each of its answers, its images once for those of a
batch.

Shapes: D data ranks, G batches at once, R rows of the largest batch.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import paddle

from paddle_vl.parallel.ranks import SingleRank
from paddle_vl.train.answers import passes
from paddle_vl.train.step import Runner


class SplitSampler:
    """Answers prompts on the ranks and layers that train. All ranks call it together.

    Args:
        rollouts: see `paddle_vl.train.rollouts`.
        multiple: divides the rows of a batch.
    """

    def __init__(self, rollouts: Any, runner: Runner, ranks: SingleRank, multiple: int):
        self._rollouts, self._runner, self._ranks = rollouts, runner, ranks
        rows = rollouts.settings.max_num_seqs // runner.batches_at_once // multiple * multiple
        self._at_once = max(rows, multiple) * runner.batches_at_once

    def __call__(self, prompts: Sequence[Any]) -> list[list[Any]]:
        """The answers to each prompt, of as many prompts on every data rank."""
        rows, size = self._rollouts.split_rows(prompts), self._rollouts.size
        for start in range(0, len(rows), self._at_once):
            self._run(rows[start : start + self._at_once])
        sampled = [each.sampled() for each in rows]
        return [sampled[start : start + size] for start in range(0, len(rows), size)]

    def _run(self, rows: Sequence[Any]) -> None:
        ranks, runner, make = self._ranks, self._runner, self._rollouts.batches
        number, own_rank = runner.batches_at_once, ranks.data_rank
        size = -(-len(rows) // number)
        parts = [rows[place * size :][:size] for place in range(number)]
        counts = [len(part) for part in parts]
        group = [self._synchronized(make.batch([row.prompt for row in part])) for part in parts]
        shape = (ranks.data_size, number, size)
        # Every data rank has as many.
        is_real_DGR = np.broadcast_to(np.arange(size) < np.array(counts)[:, None], shape)

        def choose(batches: Sequence[Any]) -> np.ndarray:
            own = np.zeros([2, *shape])
            # Pipeline stages without the head have none.
            scores = runner.values(batches, lambda output: output.scores)
            for place, scores_BV in enumerate(scores):
                if parts[place]:
                    chosen = self._rollouts.chosen_for(scores_BV, parts[place])
                    own[:, own_rank, place, : counts[place]] = chosen
            tokens, log_probs = ranks.sum_losses(paddle.to_tensor(own)).numpy()
            for place, part in enumerate(parts):
                of_part = zip(*(x[own_rank, place] for x in (tokens, log_probs)), strict=True)
                for row, (token, log_prob) in zip(part, of_part, strict=False):
                    row.append(int(token), float(log_prob))
            return tokens.astype(np.int64)

        passes(make, ranks, group, counts, is_real_DGR, choose)

    def _synchronized(self, batch: Any) -> Any:
        needed, _ = self._ranks.agree([*map(int, batch.optional_branches)])
        return self._runner.adapter.synchronized(batch, needed, self._runner.model)
