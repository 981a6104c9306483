"""Mean losses over a dataset."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, repeat
from typing import Any

import paddle

from paddle_vl.batch.schema import HostBatch
from paddle_vl.families.base import MeanLosses, Measure
from paddle_vl.nn.objective import Loss, weighted_loss
from paddle_vl.parallel.ranks import ONE_RANK, SingleRank
from paddle_vl.train.step import Runner


def mean_losses(
    runner: Runner,
    batches: Iterable[HostBatch],
    ranks: SingleRank = ONE_RANK,
    received: Callable[[], int | None] = lambda: None,
    measure: Measure | None = None,
) -> MeanLosses | None:
    """Mean of each loss term over all batches; None if any rank received a stop signal.

    All ranks call it together.

    Args:
        batches: of this rank.
        received: returns the stop signal that this rank has received, or None.
        measure: measures the batches too.

    Raises:
        ValueError: the count of a loss term is 0.
    """
    loss, model = runner.loss, runner.model
    sums, counts = paddle.zeros([len(loss.terms)], "float64"), [0] * len(loss.terms)
    was_training = model.training
    model.eval()
    if measure is not None:
        measure.begin()
    try:
        for group in groups(batches, runner, ranks, received):
            if group is None:
                return None
            sums += runner.loss_sums(group).astype("float64")
            for batch in group:
                if measure is not None:
                    measure.add(batch)
                counts = [a + b for a, b in zip(counts, batch.counts, strict=True)]
    finally:
        if was_training:
            model.train()
    values = ranks.sum_losses(sums).numpy().tolist()
    counts = ranks.totals(counts)
    trained = zip(counts, loss.terms.values(), strict=True)
    if not all(count for count, weight in trained if weight):
        raise ValueError("the evaluation data has no target token: there is no loss to report")
    # A term that is only reported may lack data: rewards of one kind of answers.
    means = [value / max(count, 1) for value, count in zip(values, counts, strict=True)]
    names = list(loss.terms)
    losses = MeanLosses(
        weighted_loss(means, loss),
        dict(zip(names, means, strict=True)),
        dict(zip(names, counts, strict=True)),
    )
    if measure is None:
        return losses
    totals = ranks.sum_losses(paddle.to_tensor(measure.sums)).numpy()
    return losses._replace(measured=measure.entries(totals), shown=measure.shown)


def combined(by_source: Mapping[str, MeanLosses], loss: Loss) -> MeanLosses:
    """The mean losses over several sources, each target token counted once.

    Args:
        by_source: with "" as the only name, data without named sources.
    """
    if list(by_source) == [""]:
        return by_source[""]
    names = list(loss.terms)
    counts = {name: sum(each.counts[name] for each in by_source.values()) for name in names}
    means = {
        name: sum(each.terms[name] * each.counts[name] for each in by_source.values())
        / max(counts[name], 1)
        for name in names
    }
    return MeanLosses(weighted_loss(list(means.values()), loss), means, counts, by_source)


def groups(
    batches: Iterable[HostBatch],
    runner: Runner,
    ranks: SingleRank,
    received: Callable[[], int | None],
    make_idle: Callable[[], HostBatch] | None = None,
) -> Iterator[list[HostBatch] | None]:
    """Groups of as many batches as the runner takes; None if any rank received a stop signal.

    There are equally many batches on all ranks, each with the same optional branches, as layers may
    be collective. Ranks exchange one message before each batch. A rank without a batch left runs
    idle ones, which count nothing: of `make_idle`, by default the adapter's.
    """
    adapter, model = runner.adapter, runner.model
    idle: Any = None
    group: list[HostBatch] = []
    batch: Any
    for batch in chain(batches, repeat(None)):
        is_left = batch is not None
        if not is_left and idle is None:
            idle = adapter.idle_batch(model) if make_idle is None else make_idle()
        own = batch if is_left else idle
        counts = [is_left, *map(int, own.optional_branches)]
        (num_left, *needed), signal = ranks.agree(counts, received())
        if signal is not None:
            yield None
            return
        if num_left == 0:
            break
        group.append(adapter.synchronized(own, needed, model))
        if len(group) == runner.batches_at_once:
            yield group
            group = []
    if group:
        yield group
