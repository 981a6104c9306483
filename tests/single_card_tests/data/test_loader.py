"""Loader: one stream of batches, independent of workers and of resuming.

Guarantees: workers and prefetching do not change the stream; it continues unchanged from every
saved position; a bad sample's error has its place, also from a worker; skipped samples are counted,
and left out or replaced by others of the whole mix, and a dataset of bad samples ends in an error;
a dead worker is reported; workers load neither Paddle nor the main script; closing ends them.
Epochs of packed rows differ in their number of batches; bad samples are left out of them, and
samples that have grown are refused.
"""

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import numpy as np
import pytest

from paddle_vl.data.jsonl import BadSampleError
from paddle_vl.data.loader import Packing, PrefetchLoader
from paddle_vl.data.packing import RowBudget, SampleLengths
from paddle_vl.data.worker_pool import WorkerPool
from paddle_vl.families.vlm.inputs.collate import VLCollator
from paddle_vl.families.vlm.inputs.dataset import MessagesDataset
from tests.single_card_tests.data.probe_datasets import (
    DyingDataset,
    HeldDataset,
    LongDataset,
    NumberDataset,
    die_halfway,
    stack_numbers,
    stack_rows,
)
from tests.single_card_tests.families.qwen3_vl.chat_builders import (
    question,
    random_image,
    tiny_processor,
    write_jsonl,
)

TRAIN = {"shuffle": True, "drop_last": True, "seed": 5}
EVALUATE = {"shuffle": False, "drop_last": False, "num_epochs": 1}


def loader(dataset, batch_size=3, **options):
    return PrefetchLoader(dataset, stack_numbers, batch_size, **options)


def take(batches, count):
    return [batch["numbers"] for batch in itertools.islice(batches, count)]


def run(*program: str) -> subprocess.CompletedProcess:
    """A Python program to its end, and to that of all that hold its output open."""
    return subprocess.run(
        [sys.executable, *program], capture_output=True, text=True, timeout=60,
        env={"PYTHONPATH": str(Path(__file__).parents[3])},
    )  # fmt: skip


EXPECTED = take(loader(NumberDataset(10), **TRAIN), 12)


def test_training_stream_is_shuffled_and_without_end():
    assert {len(batch) for batch in EXPECTED} == {3}
    epochs = np.reshape(EXPECTED, (4, 9)).tolist()
    assert all(len(set(epoch)) == 9 for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4


def test_evaluation_gives_every_sample_once_and_can_be_repeated():
    batches = loader(NumberDataset(5), **EVALUATE)
    for _ in range(2):
        assert take(batches, None) == [[0, 1, 2], [3, 4]]


@pytest.mark.parametrize(("num_workers", "prefetch"), [(1, 1), (2, 5)])
def test_stream_depends_neither_on_workers_nor_on_prefetching(num_workers, prefetch):
    options = {"num_workers": num_workers, "prefetch_batches": prefetch}
    with loader(NumberDataset(10), **TRAIN, **options) as batches:
        assert take(batches, 12) == EXPECTED


@pytest.mark.parametrize("stop", range(8))
def test_stream_goes_on_from_every_position(stop):
    interrupted = loader(NumberDataset(10), **TRAIN)
    take(interrupted, stop)
    state = json.loads(json.dumps(interrupted.state_dict()))
    resumed = loader(NumberDataset(10), **TRAIN)
    resumed.load_state_dict(state)
    assert (resumed.epoch, resumed.batches_consumed) == divmod(stop, 3)
    assert take(resumed, 12 - stop) == EXPECTED[stop:]


def test_position_counts_batches_handed_out_not_those_prefetched():
    options = {"num_workers": 1, "prefetch_batches": 4}
    with loader(NumberDataset(10), **TRAIN, **options) as batches:
        take(batches, 2)
        state = batches.state_dict()
        take(batches, 3)
        batches.load_state_dict(state)
        assert take(batches, 10) == EXPECTED[2:]


def test_other_data_or_settings_cannot_be_resumed_and_are_all_named():
    state = loader(NumberDataset(10), **TRAIN).state_dict()
    other = loader(NumberDataset(11), batch_size=2, **TRAIN)
    with pytest.raises(
        ValueError, match=r"num_samples was 10 and is 11; global_batch_size was 3 and is 2"
    ):
        other.load_state_dict(state)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_bad_sample_fails_with_its_place(num_workers):
    with loader(NumberDataset(5, bad=[3]), **EVALUATE, num_workers=num_workers) as batches:
        assert take(batches, 1) == [[0, 1, 2]]
        with pytest.raises(BadSampleError, match=r"^data\.jsonl:4: this one is bad$"):
            next(batches)


def test_skipped_samples_are_replaced_by_others_of_the_whole_mix():
    """16 bad frames of an episode: the one behind them is not trained on 16 times."""
    bad = range(40, 56)
    whole = np.concatenate(take(loader(NumberDataset(200), **TRAIN), 66))
    batches = loader(NumberDataset(200, bad, "skip"), **TRAIN)
    found = np.concatenate(take(batches, 66))
    is_bad = np.isin(whole, bad)
    assert batches.skipped == {"bad_kind": is_bad.sum()}
    assert is_bad.sum() > 12
    np.testing.assert_array_equal(found[~is_bad], whole[~is_bad])
    assert not np.isin(found, bad).any()
    assert max(np.bincount(found[is_bad])) <= 3
    # On other ranks and from a position too.
    for rank in range(2):
        with loader(NumberDataset(200, bad, "skip"), **TRAIN, rank=rank, size=2) as own:
            own.load_state_dict({**own.state_dict(), "batches_consumed": 5})
            np.testing.assert_array_equal(np.concatenate(take(own, 28)), found[30 + rank :: 2])


@pytest.mark.parametrize("num_workers", [0, 1])
def test_skipped_samples_are_left_out_of_an_evaluation(num_workers):
    dataset = NumberDataset(9, bad=[1, 3, 4, 5], on_bad_sample="skip")
    with loader(dataset, **EVALUATE, num_workers=num_workers) as batches:
        assert take(batches, None) == [[0, 2], [6, 7, 8]]
        assert batches.skipped == {"bad_kind": 4}


def test_skipped_counts_are_those_of_the_batches_handed_out_and_are_resumed():
    dataset = NumberDataset(6, bad=[0, 3], on_bad_sample="skip")
    dataset.skipped["broken_json"] = 7
    options = {**EVALUATE, "num_workers": 1, "prefetch_batches": 2}
    with loader(dataset, **options) as batches:
        take(batches, 1)
        assert batches.skipped == {"broken_json": 7, "bad_kind": 1}
        state = batches.state_dict()
    resumed = loader(dataset, **EVALUATE)
    resumed.load_state_dict(state)
    assert take(resumed, None) == [[4, 5]]
    assert resumed.skipped == {"broken_json": 7, "bad_kind": 2}


def test_all_samples_bad_fails_in_training_and_evaluation():
    dataset = NumberDataset(6, bad=range(6), on_bad_sample="skip")
    with pytest.raises(BadSampleError, match=r"data\.jsonl:.*6 samples of all are bad"):
        next(loader(dataset, **TRAIN))
    with pytest.raises(ValueError, match="every sample of epoch 0 is bad.*'bad_kind': 6"):
        next(loader(dataset, **EVALUATE))


def test_dead_worker_is_reported():
    with (
        loader(DyingDataset(6), **EVALUATE, num_workers=1) as batches,
        pytest.raises(RuntimeError, match=r"worker process died.*data\.num_workers"),
    ):
        take(batches, None)


def test_a_worker_killed_while_it_sends_a_result_breaks_the_pool():
    pool = WorkerPool((NumberDataset(6), None), 2)
    futures = [pool.submit(die_halfway) for _ in range(4)]
    for future in futures:
        with pytest.raises(BrokenProcessPool):
            future.result(timeout=30)
    with pytest.raises(BrokenProcessPool):
        pool.submit(die_halfway)
    pool.close()


def test_closing_does_not_wait_for_the_rest_of_a_result():
    pool = WorkerPool((NumberDataset(6), None), 1)
    future = pool.submit(die_halfway)
    while pool._workers[0].process.is_alive():
        time.sleep(0.01)
    closing = threading.Thread(target=pool.close, daemon=True)
    closing.start()
    closing.join(timeout=30)
    assert not closing.is_alive()
    assert future.done()


def test_workers_load_neither_paddle_nor_the_main_script(tmp_path):
    """The script has no main guard and pretends to have imported Paddle."""
    script = tmp_path / "train.py"
    script.write_text(
        "import os, sys, types\n"
        "from tests.single_card_tests.data.probe_datasets import ProcessDataset\n"
        "from tests.single_card_tests.data.test_loader import EVALUATE, loader\n"
        "MARK = True\n"
        "sys.modules['paddle'] = types.ModuleType('paddle')\n"
        "with loader(ProcessDataset(2), batch_size=1, num_workers=1, **EVALUATE) as batches:\n"
        "    for (pid, has_paddle, has_main) in [batch['numbers'] for batch in batches]:\n"
        "        print(pid != os.getpid(), has_paddle, has_main)\n"
        "print(__file__ == sys.argv[0])\n"
    )
    result = run(str(script))
    assert result.stdout.split() == ["True", "0", "0"] * 2 + ["True"], result.stderr


def test_workers_end_with_a_main_process_that_is_killed():
    program = (
        "import os, signal\n"
        "from tests.single_card_tests.data.test_loader import NumberDataset, TRAIN, loader\n"
        "batches = loader(NumberDataset(10), **TRAIN, num_workers=1)\n"
        "next(batches)\n"
        "print('loaded', flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    result = run("-c", program)
    assert (result.stdout, result.returncode) == ("loaded\n", -signal.SIGKILL)


def test_the_first_worker_of_a_process_leaves_signals_to_it():
    """Python's own helper, which starts before the first one, lets SIGTERM through again."""
    program = (
        "import multiprocessing\n"
        "from tests.single_card_tests.data.test_loader import NumberDataset, TRAIN, loader\n"
        "with loader(NumberDataset(10), **TRAIN, num_workers=1) as batches:\n"
        "    next(batches)\n"
        "    (worker,) = multiprocessing.active_children()\n"
        "    print(open(f'/proc/{worker.pid}/status').read())\n"
    )
    result = run("-c", program)
    (blocked,) = (
        int(line.split()[1], 16) for line in result.stdout.splitlines() if line[:7] == "SigBlk:"
    )
    for kept in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        assert blocked >> (kept - 1) & 1, kept


def test_a_wait_for_a_stuck_worker_can_be_left(tmp_path):
    pipe = str(tmp_path / "pipe")
    os.mkfifo(pipe)
    dataset = HeldDataset(9, 4, pipe)
    with loader(dataset, shuffle=False, drop_last=True, num_workers=1) as batches:
        assert take(batches, 1) == [[0, 1, 2]]

        def leave():
            raise KeyError("asked to stop")

        batches.while_waiting = leave
        with pytest.raises(KeyError, match="asked to stop"):
            next(batches)
        assert batches.state_dict()["batches_consumed"] == 1
        begin = time.monotonic()
    # The worker never finishes its sample.
    assert time.monotonic() - begin < 10


@pytest.mark.parametrize(
    ("name", "value"), [("num_workers", -1), ("prefetch_batches", 0), ("num_epochs", 0)]
)
def test_number_out_of_range_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match=f"{name} is {value}"):
        loader(NumberDataset(3), **{**TRAIN, name: value})


def test_conversations_give_the_same_batches_in_workers(tmp_path):
    rows = []
    for number in range(4):
        random_image(8, 8 * (1 + number % 2), seed=number).save(tmp_path / f"{number}.png")
        rows.append(question("<image>?", images=[f"{number}.png"]))
    processor = tiny_processor()
    dataset = MessagesDataset([write_jsonl(tmp_path / "a.jsonl", rows)], processor)
    collator = VLCollator(
        processor.pad_token_id, processor.image_token_id, processor.video_token_id
    )
    inline = list(PrefetchLoader(dataset, collator, 2, **EVALUATE))
    with PrefetchLoader(dataset, collator, 2, **EVALUATE, num_workers=1) as batches:
        for expected, batch in zip(inline, batches, strict=True):
            assert expected.keys() == batch.keys()
            for key, value in expected.items():
                np.testing.assert_array_equal(batch[key], value)


# Packed rows.

SIZES = SampleLengths(np.arange(60) % 7 + 1, np.zeros(60, dtype=np.int64))
PACKED = {"shuffle": True, "drop_last": False, "seed": 5, "packing": Packing(SIZES, RowBudget(10))}


def packed_loader(dataset=None, batch_size=2, **options):
    return PrefetchLoader(dataset or LongDataset(60), stack_rows, batch_size, **PACKED | options)


@pytest.fixture(scope="module")
def small_windows():
    """Small windows, so that packing depends on the order."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("paddle_vl.data.packing.WINDOW", 12)
        patch.setattr("paddle_vl.data.packing._CARRIED", 3)
        yield


@pytest.fixture(scope="module")
def packed_stream(small_windows) -> list:
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
