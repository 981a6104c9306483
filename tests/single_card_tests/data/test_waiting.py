"""The loader's description of the batch that training waits for.

Guarantees: the message names the batch, and the process that is loading one of its samples, a
worker or the main one; it says if no worker has started the batch. A process blocks at a sample
until the test closes a pipe.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from paddle_vl.data.loader import PrefetchLoader
from paddle_vl.data.prefetch import PendingBatch
from paddle_vl.data.worker_pool import WorkerProgress
from tests.single_card_tests.data.probe_datasets import HeldDataset, NumberDataset, stack_numbers

EVALUATE = {"shuffle": False, "drop_last": False, "num_epochs": 1}


@pytest.fixture
def pipe(tmp_path) -> str:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    return str(path)


@contextmanager
def held(loader: PrefetchLoader, pipe: str):
    """Context in which a batch is awaited and a process blocks at its sample."""
    with ThreadPoolExecutor(1) as pool, loader:
        batch = pool.submit(next, loader)
        with open(pipe, "w"):
            yield
        assert batch.result()["numbers"] == [0, 1, 2]


def test_the_worker_that_is_at_a_sample_is_named(pipe):
    dataset = HeldDataset(6, 1, pipe)
    loader = PrefetchLoader(dataset, stack_numbers, 3, **EVALUATE, num_workers=1)
    with held(loader, pipe):
        pid = loader._pools[0]._workers[0].process.pid
        assert loader.waiting_for() == (
            f"batch 0 of epoch 0; worker 0 (process {pid}) is at data.jsonl:2"
        )


def test_without_workers_it_is_this_process_and_its_sample(pipe):
    loader = PrefetchLoader(HeldDataset(6, 2, pipe), stack_numbers, 3, **EVALUATE)
    with held(loader, pipe):
        assert loader.waiting_for().endswith(
            "this process prepares it itself (data.num_workers is 0) and is at data.jsonl:3"
        )


def test_a_process_that_collates_is_at_no_sample():
    loader, told = PrefetchLoader(NumberDataset(6), lambda _: tell(), 3, **EVALUATE), []

    def tell() -> dict:
        told.append(loader.waiting_for())
        return {}

    next(loader)
    assert told[0].endswith("(data.num_workers is 0) and is between samples")


def test_the_batch_is_the_one_that_is_asked_for_on_its_rank():
    loader = PrefetchLoader(NumberDataset(8), stack_numbers, 2, **EVALUATE, rank=1, size=2)
    assert loader.waiting_for() == "no batch was requested"
    next(loader), next(loader)
    assert loader.waiting_for().startswith("batch 1 of epoch 0 of data-parallel rank 1; ")


def described(workers: list) -> str:
    """The wait for a batch whose job has the number 4."""
    loader = PrefetchLoader(NumberDataset(20), stack_numbers, 3, **EVALUATE)
    return loader._described(PendingBatch("batch 0 of epoch 0"), workers, 4)


def test_workers_that_are_at_other_batches_are_told():
    workers = [WorkerProgress(0, 11, job=3, sample=7), WorkerProgress(1, 12, job=None, sample=None)]
    assert described(workers).endswith(
        "no worker is at it: worker 0 (process 11) is at sample 7; worker 1 (process 12) has "
        "had no batch yet"
    )
    assert described([]).endswith("no worker is at it: none has started")


def test_a_worker_behind_its_last_sample_is_between_samples():
    done = described([WorkerProgress(0, 11, 4, None)])
    assert done.endswith("worker 0 (process 11) is between samples")
