"""Answers that the trained model generates in an evaluation, on the ranks and layers that train it.

The model is neither copied nor converted. A batch of prompts goes through the run's `Runner` like
one of an evaluation, with caches in it: of the keys of each layer on the rank that has the layer.
The tokens that it chooses are the next, smaller batch. So tensor parallel ranks, pipeline stages
and sharded layers generate with the collectives of an evaluation, and each token costs one pass
over one token row per answer.

All ranks run equally many passes: until the last answer of any rank ends. After every pass one
all-reduce tells all ranks all tokens.

Shapes: D data ranks, G batches at once, R prompts of the largest batch.
"""

import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import paddle
from paddle import Tensor

from paddle_vl.batch.schema import Batch
from paddle_vl.families.base import Questions
from paddle_vl.parallel.ranks import SingleRank
from paddle_vl.train.evaluate import groups
from paddle_vl.train.reporting.reporter import memory_in_use
from paddle_vl.train.step import Runner


class Answers(NamedTuple):
    """
    Attributes:
        entries: scores by name, and what the answers cost.
        lines: of predictions.jsonl, on rank 0.
    """

    entries: dict[str, float]
    lines: list[dict[str, Any]]


def rows_of_batch(
    questions: Questions, most: int, runner: Runner, ranks: SingleRank, multiple: int
) -> int:
    """R: at most so many, and fewer where all ranks then have prompts at once."""
    shares = ranks.data_size * runner.batches_at_once
    return -(-min(most, -(-len(questions) // shares)) // multiple) * multiple


def answered(
    runner: Runner,
    questions: Questions,
    batches: Iterable[Batch],
    batch_rows: int,
    ranks: SingleRank,
    received: Callable[[], int | None],
) -> Answers | None:
    """Generate and score the answers; None if any rank received a stop signal.

    All ranks call it together.

    Args:
        batches: of this rank.
        batch_rows: R, the same on all ranks.
        received: returns the stop signal that this rank has received, or None.
    """
    begin, model, found = time.perf_counter(), runner.model, dict[int, list[int]]()
    was_training = model.training
    model.eval()
    try:
        for group in groups(batches, runner, ranks, received, questions.idle_batch):
            if group is None:
                return None
            # The schedules of a pipeline would repeat a batch, and the caches get its keys twice.
            missing = runner.batches_at_once - len(group)
            group += [questions.idle_batch() for _ in range(missing)]
            found |= _answers_of(group, runner, questions, batch_rows, ranks)
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
    return Answers(entries, lines)


def _answers_of(
    group: list[Any], runner: Runner, questions: Questions, batch_rows: int, ranks: SingleRank
) -> dict[int, list[int]]:
    """Ids of the answers of all ranks to a group, by number of the prompt; on every rank."""
    shape = (ranks.data_size, len(group), batch_rows)
    numbers = [batch.get("numbers", ()) for batch in group]
    own = np.zeros(shape, np.int64)
    for place, numbers_B in enumerate(numbers):
        # A place without a prompt has 0.
        own[ranks.data_rank, place, : len(numbers_B)] = np.asarray(numbers_B, np.int64) + 1
    numbers_DGR = np.reshape(ranks.totals(own.reshape(-1).tolist()), shape)
    batches = [questions.begun(batch) for batch in group]
    tokens, ended_DGR = list[np.ndarray](), numbers_DGR == 0
    while True:
        chosen = runner.values(batches, lambda output: output.choices)
        tokens.append(_of_all_ranks(chosen, numbers, shape, ranks))
        ended_DGR = ended_DGR | np.isin(tokens[-1], questions.ends)
        if ended_DGR.all() or len(tokens) == questions.max_new_tokens:
            break
        next_batches = []
        for place, batch in enumerate(batches):
            token_B = np.full(len(batch["input_ids"]), questions.filler, np.int64)
            count = len(numbers[place])
            token_B[:count] = tokens[-1][ranks.data_rank, place, :count]
            next_batches.append(questions.continued(batch, token_B))
        batches = next_batches
    return {
        int(numbers_DGR[where]) - 1: _up_to_end([each[where] for each in tokens], questions.ends)
        for where in zip(*np.nonzero(numbers_DGR), strict=True)
    }


def _of_all_ranks(
    chosen: list[Tensor], numbers: list[Any], shape: tuple[int, ...], ranks: SingleRank
) -> np.ndarray:
    """Tokens of all data ranks `[D, G, R]`; pipeline stages without the head have none to give."""
    own = paddle.zeros(shape, dtype="int64")
    for place, token_B in enumerate(chosen):
        count = len(numbers[place])
        if count:
            own[ranks.data_rank, place, :count] = token_B[:count]
    return ranks.sum_losses(own).numpy()


def _up_to_end(tokens: list[Any], ends: Any) -> list[int]:
    """The ids up to the first end, which is included."""
    ids = [int(token) for token in tokens]
    length = next((place + 1 for place, token in enumerate(ids) if token in ends), len(ids))
    return ids[:length]
