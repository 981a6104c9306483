"""The loader with packed rows, whose epochs differ in their number of batches.

Guarantees: an epoch has every sample once; workers do not change the stream; it resumes from every
saved position, also on another number of ranks; bad samples are left out of their rows; resuming
with another row length is refused, and so are samples that have grown.
"""

import itertools
import json

import numpy as np
import pytest

from paddle_vl.data.jsonl import BadSampleError
from paddle_vl.data.loader import Packing, PrefetchLoader
from paddle_vl.data.packing import RowBudget, SampleLengths
from tests.single_card_tests.data.probe_datasets import (
    LongDataset,
    stack_rows,
)

TRAIN = {"shuffle": True, "drop_last": True, "seed": 5}
SIZES = SampleLengths(np.arange(60) % 7 + 1, np.zeros(60, dtype=np.int64))
PACKED = {"shuffle": True, "drop_last": False, "seed": 5, "packing": Packing(SIZES, RowBudget(10))}


def take(batches, count):
    return [batch["numbers"] for batch in itertools.islice(batches, count)]


def packed_loader(dataset=None, batch_size=2, **options):
    return PrefetchLoader(dataset or LongDataset(60), stack_rows, batch_size, **PACKED | options)


@pytest.fixture(scope="module", autouse=True)
def _small_windows():
    """Small windows, so that packing depends on the order."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("paddle_vl.data.packing.WINDOW", 12)
        patch.setattr("paddle_vl.data.packing._CARRIED", 3)
        yield


@pytest.fixture(scope="module")
def packed_stream() -> list:
    """Four epochs with different numbers of batches."""
    batches = packed_loader()
    counts = [batches.batches_in(epoch + 1) - batches.batches_in(epoch) for epoch in range(4)]
    assert len(set(counts)) > 1, counts
    return take(batches, sum(counts))


def test_packed_epochs_have_every_sample_once(packed_stream):
    batches, stream = packed_loader(), iter(packed_stream)
    for epoch in range(4):
        assert batches.epoch == epoch
        count = len(batches)
        assert take(batches, count) == (own := list(itertools.islice(stream, count)))
        assert sorted(n for batch in own for row in batch for n in row) == list(range(60))
        assert {len(batch) for batch in own} == {2}


@pytest.mark.parametrize(("num_workers", "prefetch"), [(1, 1), (2, 5)])
def test_packed_stream_does_not_depend_on_workers(packed_stream, num_workers, prefetch):
    options = {"num_workers": num_workers, "prefetch_batches": prefetch}
    with packed_loader(**options) as batches:
        assert take(batches, len(packed_stream)) == packed_stream


@pytest.mark.parametrize("stop", [0, 1, 11, 12, 13, 30])
def test_packed_stream_goes_on_from_every_position_and_in_other_processes(packed_stream, stop):
    interrupted = packed_loader()
    take(interrupted, stop)
    state = json.loads(json.dumps(interrupted.state_dict()))
    ranks = [packed_loader(batch_size=1, rank=rank, size=2) for rank in range(2)]
    for loader in ranks:
        loader.load_state_dict(state)
    for wanted in packed_stream[stop:]:
        assert [row for loader in ranks for row in next(loader)["numbers"]] == wanted


def test_other_rows_cannot_be_resumed():
    state = packed_loader().state_dict()
    with pytest.raises(ValueError, match="packing_length was 10 and is 11"):
        packed_loader(packing=Packing(SIZES, RowBudget(11))).load_state_dict(state)
    grown = SampleLengths(SIZES.tokens + 1, SIZES.vision)
    with pytest.raises(ValueError, match="sample_lengths was"):
        packed_loader(packing=Packing(grown, RowBudget(10))).load_state_dict(state)
    with pytest.raises(ValueError, match="shuffle was None and is True"):
        PrefetchLoader(LongDataset(60), stack_rows, 2, **TRAIN).load_state_dict(state)


def test_bad_samples_leave_their_packed_rows(packed_stream):
    with pytest.raises(BadSampleError, match=r"data\.jsonl:\d+: this one is bad"):
        take(packed_loader(LongDataset(60, bad=range(0, 60, 9))), 15)
    batches = packed_loader(LongDataset(60, bad=[3, 4], on_bad_sample="skip"))
    wanted = [[[n for n in row if n not in (3, 4)] for row in batch] for batch in packed_stream]
    assert take(batches, len(wanted)) == wanted
    assert batches.skipped == {"bad_kind": 8}


def test_samples_that_grew_since_they_were_measured_are_refused():
    half = SampleLengths(np.maximum(SIZES.tokens // 2, 1), SIZES.vision)
    with pytest.raises(RuntimeError, match=r"measured to fit a row of 10 tokens and have \d\d"):
        take(packed_loader(packing=Packing(half, RowBudget(10))), 5)


def test_packed_rows_are_for_training():
    with pytest.raises(ValueError, match="packed rows are shuffled and leave no sample out"):
        packed_loader(drop_last=True)
