"""Sampled answers of a model that is split over ranks, by the passes of an evaluation.

Tensor-parallel ranks, pipeline stages, experts and sharded layers answer with the collectives that
train them: nothing is gathered or copied. It costs a pass over all of them for each token of the
longest answer, and a prompt runs once for each of its answers, its images once for those of a
batch.

Shapes: D data ranks, G batches at once, R rows of the largest batch.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import paddle

from paddle_vl.families.vlm.answering.groups import GroupBatches, Sampled
from paddle_vl.generation.sampling import AnswerRow, Sampling, choose_tokens
from paddle_vl.parallel.ranks import SingleRank
from paddle_vl.train.answers import passes
from paddle_vl.train.step import Runner


class SplitSampler:
    """Answers prompts on the ranks and layers that train. All ranks call it together.

    Args:
        batches: makes batches of prompts.
        samplings: of all answers to a prompt.
        max_rows: answers that run at once.
        multiple: divides the rows of a batch.
    """

    def __init__(
        self,
        batches: GroupBatches,
        samplings: Callable[[Any], Sequence[Sampling]],
        runner: Runner,
        ranks: SingleRank,
        max_rows: int,
        multiple: int,
    ):
        self._batches, self._samplings = batches, samplings
        self._runner, self._ranks = runner, ranks
        rows = max_rows // runner.batches_at_once // multiple * multiple
        self._max_rows = max(rows, multiple)

    def __call__(self, prompts: Sequence[Any]) -> list[list[Sampled]]:
        """The answers to each prompt, as many prompts on every data rank."""
        groups = [self._samplings(each) for each in prompts]
        rows = [
            (prompt, AnswerRow(sampling, prompt["input_ids"], copy))
            for prompt, group in zip(prompts, groups, strict=True)
            for copy, sampling in enumerate(group)
        ]
        at_once = self._max_rows * self._runner.batches_at_once
        sampled = [
            each
            for start in range(0, len(rows), at_once)
            for each in self._run(rows[start : start + at_once])
        ]
        ends = np.cumsum([len(group) for group in groups])
        return [sampled[end - len(group) : end] for end, group in zip(ends, groups, strict=True)]

    def _run(self, rows: Sequence[tuple[Any, AnswerRow]]) -> list[Sampled]:
        ranks, runner, make = self._ranks, self._runner, self._batches
        number = runner.batches_at_once
        size = -(-len(rows) // number)
        parts = [rows[place * size :][:size] for place in range(number)]
        answers = [[answer for _, answer in part] for part in parts]
        counts = [len(part) for part in parts]
        group = [self._synchronized(make.batch([prompt for prompt, _ in part])) for part in parts]
        shape = (ranks.data_size, number, size)
        # Every data rank has as many.
        is_real_DGR = np.broadcast_to(np.arange(size) < np.array(counts)[:, None], shape)

        def choose(batches: Sequence[Any]) -> np.ndarray:
            own = np.zeros([2, *shape])
            scores = runner.values(batches, lambda output: output.scores)
            for place, scores_BV in enumerate(scores):
                if counts[place]:
                    chosen = choose_tokens(scores_BV, answers[place])
                    own[:, ranks.data_rank, place, : counts[place]] = np.transpose(
                        [[each.token_id, each.logprob or 0.0] for each in chosen]
                    )
            tokens, log_probs = ranks.sum_losses(paddle.to_tensor(own)).numpy()
            tokens = tokens.astype(np.int64)
            for place, of_part in enumerate(answers):
                for row, answer in enumerate(of_part):
                    answer.append(int(tokens[ranks.data_rank, place, row]))
            kept.append(log_probs[ranks.data_rank])
            return tokens

        kept: list[np.ndarray] = []
        passes(make, ranks, group, counts, is_real_DGR, choose)
        return [
            self._cut(answer, [step[place, row] for step in kept])
            for place, of_part in enumerate(answers)
            for row, answer in enumerate(of_part)
        ]

    @staticmethod
    def _cut(answer: AnswerRow, log_probs: Sequence[float]) -> Sampled:
        """Up to the end token; rows go on until all have ended."""
        stops = answer.sampling.stop_token_ids
        ends = (place for place, token in enumerate(answer.ids, start=1) if token in stops)
        end = next(ends, None)
        ids = np.array(answer.ids[:end], np.int64)
        return Sampled(ids, np.array(log_probs[:end], np.float32), end is None)

    def _synchronized(self, batch: Any) -> Any:
        needed, _ = self._ranks.agree([*map(int, batch.optional_branches)])
        return self._runner.adapter.synchronized(batch, needed, self._runner.model)
