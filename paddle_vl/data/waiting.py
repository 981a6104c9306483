"""Description of a batch that the trainer waits for: its samples and who prepares them."""

from collections.abc import Sequence
from typing import NamedTuple

from paddle_vl.data.worker_pool import FromFiles, SampleSource, WorkerProgress, current_sample

_SHOWN_SAMPLES = 8


class PendingBatch(NamedTuple):
    """A batch that was requested and not yet returned.

    Attributes:
        epoch, number: its epoch and its place in the epoch.
        samples: its sample numbers.
        job: its number among the jobs of the workers, None where this process prepares it.
    """

    epoch: int
    number: int
    samples: list[int]
    job: int | None = None


def describe_wait(
    batch: PendingBatch,
    dataset: SampleSource,
    workers: Sequence[WorkerProgress] | None,
    rank: int | None = None,
) -> str:
    """Names the batch, its samples, and the process that prepares it.

    Args:
        workers: progress of the workers; None where this process prepares the batch.
        rank: data-parallel rank, None if there is only one.
    """
    shown = [_place(dataset, number) for number in batch.samples[:_SHOWN_SAMPLES]]
    if more := len(batch.samples) - len(shown):
        shown.append(f"{more} more")
    text = f"batch {batch.number} of epoch {batch.epoch}"
    text += "" if rank is None else f" of data-parallel rank {rank}"
    text += f", made from {', '.join(shown)}"
    if isinstance(dataset, FromFiles) and dataset.files:
        text += f" (data: {', '.join(map(str, dataset.files))})"
    if workers is None:
        at = _at(dataset, current_sample())
        return f"{text}; this process prepares it itself (data.num_workers is 0) and {at}"
    owners = [worker for worker in workers if worker.job == batch.job]
    if owners:
        return f"{text}; {_worker(dataset, owners[0])}"
    others = "; ".join(_worker(dataset, worker) for worker in workers)
    return f"{text}; no worker is at it: {others or 'none has started'}"


def _worker(dataset: SampleSource, worker: WorkerProgress) -> str:
    at = "has had no batch yet" if worker.job is None else _at(dataset, worker.sample)
    return f"worker {worker.worker} (process {worker.pid}) {at}"


def _at(dataset: SampleSource, sample: int | None) -> str:
    return "is between samples" if sample is None else f"is at {_place(dataset, sample)}"


def _place(dataset: SampleSource, number: int) -> str:
    return dataset.place(number) if isinstance(dataset, FromFiles) else f"sample {number}"
