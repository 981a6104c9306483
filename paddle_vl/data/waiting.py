"""What a batch waits for, in words: its samples, and which process is at which of them."""

from collections.abc import Sequence
from concurrent.futures import Future
from typing import NamedTuple

from paddle_vl.data.work_board import AtWork
from paddle_vl.data.worker_pool import FromFiles, LoadedBatch, SampleSource, sample_at_work

_SHOWN_SAMPLES = 8


class AskedBatch(NamedTuple):
    """A batch that was asked for.

    Attributes:
        epoch, number: its epoch, and its place there.
        samples: numbers of its samples.
        job: its number among the jobs of the workers, None where this process prepares it.
        future: brings it from them.
    """

    epoch: int
    number: int
    samples: list[int]
    job: int | None = None
    future: "Future[LoadedBatch] | None" = None


def described_wait(
    asked: AskedBatch,
    dataset: SampleSource,
    workers: Sequence[AtWork] | None,
    rank: int | None = None,
) -> str:
    """What a batch is made from, and how far it is.

    Args:
        workers: all that have started, None where this process prepares it.
        rank: data-parallel rank of this process, None for the only one.
    """
    shown = [_place(dataset, number) for number in asked.samples[:_SHOWN_SAMPLES]]
    if more := len(asked.samples) - len(shown):
        shown.append(f"{more} more")
    text = f"batch {asked.number} of epoch {asked.epoch}"
    text += "" if rank is None else f" of data-parallel rank {rank}"
    text += f", made from {', '.join(shown)}"
    if isinstance(dataset, FromFiles) and dataset.files:
        text += f" (data: {', '.join(map(str, dataset.files))})"
    if workers is None:
        at = _at(dataset, sample_at_work())
        return f"{text}; this process prepares it itself (data.num_workers is 0) and {at}"
    its = [worker for worker in workers if worker.job == asked.job]
    if its:
        return f"{text}; {_described(dataset, its[0])}"
    others = "; ".join(_described(dataset, worker) for worker in workers)
    return f"{text}; no worker has begun it: {others or 'none has started'}"


def _described(dataset: SampleSource, worker: AtWork) -> str:
    at = "has had no batch yet" if worker.job is None else _at(dataset, worker.sample)
    return f"worker {worker.worker} (process {worker.pid}) {at}"


def _at(dataset: SampleSource, sample: int | None) -> str:
    return "is between samples" if sample is None else f"is at {_place(dataset, sample)}"


def _place(dataset: SampleSource, number: int) -> str:
    return dataset.place(number) if isinstance(dataset, FromFiles) else f"sample {number}"
