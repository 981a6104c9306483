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


@pytest.mark.parametrize("num_workers", [0, 1])
def test_who_is_at_a_sample_is_named(pipe, num_workers):
    dataset = HeldDataset(6, 1, pipe)
    loader = PrefetchLoader(dataset, stack_numbers, 3, **EVALUATE, num_workers=num_workers)
    with held(loader, pipe):
        who = "this process prepares it itself (data.num_workers is 0) and"
        if num_workers:
            who = f"worker 0 (process {loader._pools[0]._workers[0].process.pid})"
        assert loader.waiting_for() == f"batch 0 of epoch 0; {who} is at data.jsonl:2"


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


AT_OTHERS = (
    "no worker is at it: worker 0 (process 11) is at sample 7; worker 1 (process 12) has had no "
    "batch yet"
)


@pytest.mark.parametrize(
    ("workers", "said"),
    [
        ([WorkerProgress(0, 11, 3, 7), WorkerProgress(1, 12, None, None)], AT_OTHERS),
        ([], "no worker is at it: none has started"),
        ([WorkerProgress(0, 11, 4, None)], "worker 0 (process 11) is between samples"),
    ],
)
def test_workers_are_told(workers, said):
    """The wait is for a batch whose job has the number 4."""
    loader = PrefetchLoader(NumberDataset(20), stack_numbers, 3, **EVALUATE)
    assert loader._described(PendingBatch("batch 0 of epoch 0"), workers, 4).endswith(f"; {said}")
