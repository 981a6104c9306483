"""Answers that the trained model generates in an evaluation, on the ranks and layers that train it.

The model is neither copied nor converted. A batch of prompts goes through the run's `Runner` like
one of an evaluation, with caches in it: of the keys of each layer on the rank that has the layer.
The tokens that it chooses are the next, smaller batch. So tensor-parallel ranks, pipeline stages
and sharded layers generate with the collectives of an evaluation, and each token costs one pass
over a token row per answer.

All ranks run equally many passes: until the last answer of any rank ends. After every pass one
all-reduce tells all ranks all tokens.

Shapes: D data ranks, G batches at once, R prompts of the largest batch.
"""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import paddle
from paddle import Tensor

from paddle_vl.config.schema import RunConfig
from paddle_vl.families.base import MeanLosses
from paddle_vl.parallel.ranks import SingleRank
from paddle_vl.parallel.topology import Topology
from paddle_vl.train.evaluate import groups
from paddle_vl.train.feeding.feed import watched
from paddle_vl.train.lanes import lane_loaders
from paddle_vl.train.reporting.reporter import memory_in_use
from paddle_vl.train.step import Runner

logger = logging.getLogger(__name__)


def passes(
    questions: Any,
    ranks: SingleRank,
    group: Sequence[Any],
    counts: Sequence[int],
    is_asked_DGR: np.ndarray,
    choose: Callable[[Sequence[Any]], np.ndarray],
) -> list[np.ndarray]:
    """The tokens `[D, G, R]` that follow prompts, one pass after the other until all have ended.

    Args:
        questions: a `paddle_vl.families.vlm.answering.questions.PromptBatches`.
        group: batches of this rank.
        counts: prompts of each.
        is_asked_DGR: of all ranks' rows.
        choose: runs batches, and tells all ranks the tokens.
    """
    batches = [questions.begun(batch) for batch in group]
    tokens, ended_DGR = list[np.ndarray](), ~is_asked_DGR
    while True:
        tokens.append(choose(batches))
        ended_DGR = ended_DGR | np.isin(tokens[-1], questions.ends)
        if ended_DGR.all() or len(tokens) == questions.max_new_tokens:
            return tokens
        own_GR = tokens[-1][ranks.data_rank]
        batches = [
            questions.continued(batch, tokens_R[:count])
            for batch, tokens_R, count in zip(batches, own_GR, counts, strict=True)
        ]


class Answering:
    """Generates and scores the answers to a run's questions.

    Args:
        questions: of `Family.questions`.
        multiple: divides the prompts of a batch.
    """

    def __init__(
        self,
        questions: Any,
        runner: Runner,
        ranks: SingleRank,
        topology: Topology,
        config: RunConfig,
        multiple: int,
    ):
        self.questions, self.runner, self.ranks = questions, runner, ranks
        self._warning_s = config.logging.data_wait_warning_s
        # Fewer than the setting where all ranks then have prompts at once.
        share = -(-len(questions) // (ranks.data_size * runner.batches_at_once))
        rows = -(-min(config.train.per_device_eval_batch_size, share) // multiple) * multiple
        self._shape = (ranks.data_size, runner.batches_at_once, rows)
        loaders = lane_loaders(
            lambda lane: {"": questions.loader(lane, rows)}, ranks, topology, questions.idle_batch
        )
        self._loader = loaders[""]

    def __call__(self, losses: MeanLosses, received: Callable[[], int | None]) -> MeanLosses | None:
        """The losses with scores, costs and lines of answers; None if any rank received a stop
        signal, as `received` tells. All ranks call it together."""
        begin, ranks, questions = time.perf_counter(), self.ranks, self.questions
        found, model = dict[int, list[int]](), self.runner.model
        was_training = model.training
        model.eval()
        try:
            with self._loader as batches:
                prompts = watched(batches, self._warning_s, "the questions of the evaluation")
                make_idle = questions.idle_batch
                for group in groups(prompts, self.runner, ranks, received, make_idle):
                    if group is None:
                        return None
                    found |= self._answers_to(group)
        finally:
            if was_training:
                model.train()
        seconds = time.perf_counter() - begin
        memory = ranks.gathered_values(paddle.full([1], memory_in_use(), dtype="float64"))
        scores, lines = questions.scored(found) if ranks.is_main else ({}, [])
        entries = {
            **ranks.gathered(scores)[0],
            "answer_tokens": sum(map(len, found.values())),
            "answer_seconds": round(seconds, 3),
            "answer_memory_gb": round(float(memory.max()) / 1e9, 3),
        }
        told = (f"{name} {value:.4g}" for name, value in entries.items())
        logger.info("%d answers: %s", len(found), ", ".join(told))
        return losses._replace(measured={**losses.measured, **entries}, answers=lines)

    def _answers_to(self, group: list[Any]) -> dict[int, list[int]]:
        """Ids of the answers of all ranks to a group, by number of the prompt; on every rank."""
        questions, own_rank = self.questions, self.ranks.data_rank
        # The schedules of a pipeline would repeat a batch, and its caches get the keys twice.
        missing = self._shape[1] - len(group)
        group += [questions.idle_batch() for _ in range(missing)]
        # By place in the group; a place without a prompt has number 0.
        counts, own = [len(batch["numbers"]) for batch in group], np.zeros(self._shape, np.int64)
        for place, batch in enumerate(group):
            own[own_rank, place, : counts[place]] = np.array(batch["numbers"], np.int64) + 1
        numbers_DGR = np.reshape(self.ranks.totals(own.reshape(-1).tolist()), self._shape)

        def choose(batches: Sequence[Any]) -> np.ndarray:
            chosen = self.runner.values(batches, lambda output: output.choices)
            return self._of_all_ranks(chosen, counts)

        tokens = passes(questions, self.ranks, group, counts, numbers_DGR > 0, choose)
        answers = {}
        for where in zip(*np.nonzero(numbers_DGR), strict=True):
            ids = [int(each[where]) for each in tokens]
            ends = (place for place, token in enumerate(ids, start=1) if token in questions.ends)
            answers[int(numbers_DGR[where]) - 1] = ids[: next(ends, None)]
        return answers

    def _of_all_ranks(self, chosen: Sequence[Tensor], counts: Sequence[int]) -> np.ndarray:
        """Tokens `[D, G, R]`; pipeline stages without the head have none to give."""
        own = paddle.zeros(self._shape, dtype="int64")
        for place, token_B in enumerate(chosen):
            if counts[place]:
                own[self.ranks.data_rank, place, : counts[place]] = token_B[: counts[place]]
        return self.ranks.sum_losses(own).numpy()
