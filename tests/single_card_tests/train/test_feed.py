"""The feed of training steps, ahead of them on a GPU, and warnings of long waits for data."""

import itertools
import logging
import os
import threading
import time
import weakref
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from paddle_vl.batch.schema import VLBatch
from paddle_vl.config.load import load_run_config
from paddle_vl.data.loader import PrefetchLoader
from paddle_vl.train import trainer as trainer_module
from paddle_vl.train.build import build_trainer
from paddle_vl.train.feeding import feed
from paddle_vl.train.feeding.device_copies import DeviceCopies
from paddle_vl.train.feeding.feed import BatchFeed, warning_of_wait, watched
from tests.single_card_tests.data.probe_datasets import HeldDataset, token_rows
from tests.single_card_tests.train.fake_device import FakeDevice
from tests.single_card_tests.train.tiny_policy_run import write_tiny_policy_run
from tests.single_card_tests.train.tiny_run import write_tiny_run


class Numbers:
    """Endless batches, 5 per epoch: one token, the batch's number. Records the requests."""

    def __init__(self, clock=None, bad: int | None = None):
        self.taken, self.clock, self.bad, self.is_closed = 0, clock, bad, False
        self.skipped = {"of_a_kind": 1, "of_another": 2}

    @property
    def epoch(self) -> int:
        return self.taken // 5

    @property
    def batches_consumed(self) -> int:
        return self.taken % 5

    def __len__(self) -> int:
        return 5

    def __next__(self) -> VLBatch:
        number, self.taken = self.taken, self.taken + 1
        if self.clock is not None:
            self.clock.now += 1.0
        if number == self.bad:
            raise ValueError("a bad batch")
        ids = np.full([1, 2], number)
        return VLBatch(input_ids=ids, counts=(number,))

    def state_dict(self) -> dict:
        return {"taken": self.taken}

    def load_state_dict(self, state: dict, batches: int | None = None) -> None:
        self.taken = state["taken"]

    def waiting_for(self) -> str:
        return "a number"

    def close(self) -> None:
        self.is_closed = True


def fed_from(data, num_steps: int = 4, device: FakeDevice | None = None, **options) -> BatchFeed:
    copies = None if device is None else DeviceCopies(device)
    return BatchFeed(data, 2, num_steps, copies=copies, **options)


def numbers_of(step: feed.FedStep) -> list[int]:
    return [int(micro.input_ids[0, 0]) for micro in step.micro_batches]


def test_without_copies_batches_are_fetched_on_demand():
    data = Numbers()
    batches = fed_from(data)
    step = batches.next_step()
    assert [micro.counts for micro in step.micro_batches] == [(0,), (1,)]
    batches.prepare_next()
    assert data.taken == 2
    assert numbers_of(batches.next_step()) == [2, 3]
    batches.close()
    assert data.is_closed


def test_with_copies_the_next_step_is_fetched_when_one_was_launched():
    data, device = Numbers(), FakeDevice()
    batches = fed_from(data, device=device)
    assert numbers_of(batches.next_step()) == [0, 1]
    assert data.taken == 2
    device.log.clear()
    batches.prepare_next()
    batches.prepare_next()
    assert data.taken == 4
    # Recorded after the step; the wait follows when the batch is requested.
    assert device.log[0] == "record compute 1"
    assert device.log[-1] == "record copies 1"
    second = batches.next_step()
    assert device.log[-1] == "compute waits for copies 1"
    assert numbers_of(second) == [2, 3]


def test_nothing_is_fetched_beyond_the_last_step():
    data = Numbers()
    batches = fed_from(data, num_steps=3, device=FakeDevice())
    for _ in range(3):
        batches.next_step()
        batches.prepare_next()
    assert data.taken == 6
    # Batches beyond the run's last step, as in a profile, are fetched on demand.
    assert numbers_of(batches.next_step()) == [6, 7]


@pytest.mark.parametrize("device", [None, FakeDevice()])
def test_the_place_is_behind_the_steps_own_batches_and_gives_the_next(device):
    batches = fed_from(Numbers(), device=device)
    for _ in range(3):
        step = batches.next_step()
        batches.prepare_next()
    place = step.place
    assert (place.passes, place.skipped) == (1.2, 3)
    resumed = fed_from(Numbers(), device=device)
    resumed.next_step()
    resumed.prepare_next()
    resumed.continue_at(3, place.state)
    assert numbers_of(resumed.next_step()) == [6, 7]
    assert resumed.steps_fed == 4


def test_a_fault_belongs_to_the_step_whose_data_has_it():
    batches = fed_from(Numbers(bad=2), device=FakeDevice())
    batches.next_step()
    batches.prepare_next()
    with pytest.raises(ValueError, match="a bad batch"):
        batches.next_step()


class Clock:
    now = 0.0

    def perf_counter(self) -> float:
        return self.now

    monotonic = perf_counter


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(feed, "time", clock)
    return clock


@pytest.mark.parametrize(("is_done", "expected"), [(False, 0.0), (True, 2.0)])
def test_fetching_ahead_is_waiting_once_the_device_has_no_work(clock, is_done, expected):
    device = FakeDevice()

    class Slow(Numbers):
        def __next__(self) -> VLBatch:
            device.compute.events[-1].has_happened = is_done
            return super().__next__()

    device.compute.record_event()
    batches = fed_from(Slow(clock), device=device)
    assert batches.next_step().data_wait_s == 2.0
    batches.prepare_next()
    assert batches.next_step().data_wait_s == expected
    # Without copies this process prepares the batches itself.
    batches = fed_from(Numbers(clock))
    assert [batches.next_step().data_wait_s for _ in range(2)] == [2.0, 2.0]


class Seen(logging.Handler):
    """Ends a wait after this many warnings."""

    def __init__(self, count: int):
        super().__init__()
        self.messages, self._count, self.enough = [], count, threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())
        if len(self.messages) == self._count:
            self.enough.set()


class OpensPipe(Seen):
    """Releases the blocked sample when a message names its batch and the process that loads it.

    A worker may be at the sample while an earlier batch is still on its way.
    """

    def __init__(self, pipe: Path, who: str):
        super().__init__(0)
        self.pipe, self.who, self.naming = pipe, who, None

    def emit(self, record: logging.LogRecord) -> None:
        super().emit(record)
        text = self.messages[-1]
        if self.naming is None and "data: batch 1 of" in text and text.endswith(self.who):
            self.naming = text
            self.pipe.open("w").close()


@pytest.mark.parametrize(
    ("num_workers", "who"),
    [
        (0, "this process prepares it itself (data.num_workers is 0) and is at data.jsonl:4"),
        (1, "is at data.jsonl:4"),
    ],
)
def test_a_stalled_loader_is_named_and_that_it_goes_on(tmp_path, num_workers, who):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    loader = PrefetchLoader(
        HeldDataset(8, 3, str(pipe)), token_rows, 2, shuffle=False, drop_last=True,
        num_workers=num_workers,
    )  # fmt: skip
    handler = OpensPipe(pipe, who)
    batches = fed_from(loader, wait_warning_s=0.1)
    feed.logger.addHandler(handler)
    try:
        step = batches.next_step()
    finally:
        feed.logger.removeHandler(handler)
        batches.close()
    assert numbers_of(step) == [0, 2]
    assert "data: batch 1 of epoch 0; " in handler.naming
    assert ("worker 0 (process " in handler.naming) == (num_workers == 1)
    assert handler.messages[-1].startswith("step 1 goes on")


@pytest.fixture(scope="module")
def run_files(tmp_path_factory) -> dict[str, Path]:
    return {
        "language": write_tiny_run(tmp_path_factory.mktemp("language")),
        "policy": write_tiny_policy_run(tmp_path_factory.mktemp("policy")),
    }


def trainer_for(run_file: Path, output_dir: Path, *overrides: str):
    settings = [f"train.output_dir={output_dir}", "train.max_steps=4", "train.save_steps=2"]
    return build_trainer(load_run_config(run_file, [*settings, *overrides]))


def weights_of(folder: Path) -> dict[str, np.ndarray]:
    return {
        f"{name}/{key}": value
        for name in ("model", "optimizer")
        for key, value in load_file(folder / "checkpoint-4" / f"{name}.safetensors").items()
    }


@pytest.mark.parametrize("family", ["language", "policy"])
def test_a_step_on_a_cpu_keeps_no_array_that_became_a_tensor(tmp_path, run_files, family):
    trainer = trainer_for(run_files[family], tmp_path)
    runner, arrays = trainer.runner, []

    class Watched:
        def __getattr__(self, name):
            return getattr(data, name)

        def __len__(self):
            return len(data)

        def __next__(self):
            batch = next(data)
            arrays.extend(
                (name, weakref.ref(value))
                for name, value in batch.items()
                if isinstance(value, np.ndarray) and name not in batch.on_host
            )
            return batch

    def accumulate_gradients(batches, *others):
        assert [name for name, array in arrays if array() is not None] == []
        return accumulated(batches, *others)

    data, trainer.feed._data = trainer.feed._data, Watched()
    accumulated, runner.accumulate_gradients = runner.accumulate_gradients, accumulate_gradients
    trainer.train_one_step()
    trainer.feed.close()
    assert arrays


def test_a_run_with_copies_is_the_run_without_them(monkeypatch, tmp_path, run_files):
    run_file, device = run_files["policy"], FakeDevice()
    trainer_for(run_file, tmp_path / "plain").run()
    expected = weights_of(tmp_path / "plain")
    monkeypatch.setattr(trainer_module, "device_copies", lambda *_: DeviceCopies(device))
    trainer_for(run_file, tmp_path / "copied").run()
    assert sum(entry.startswith("copy ") for entry in device.log) == 4
    # Interrupted after the second step, whose batches were not the last ones fetched.
    (tmp_path / "cut").mkdir()
    (tmp_path / "copied" / "checkpoint-2").rename(tmp_path / "cut" / "checkpoint-2")
    trainer_for(run_file, tmp_path / "cut", "train.resume_from_checkpoint=auto").run()
    for folder in ("copied", "cut"):
        found = weights_of(tmp_path / folder)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            np.testing.assert_array_equal(found[name], value, err_msg=f"{folder}: {name}")


AFTER_S = 0.01


@pytest.fixture
def seen():
    handler = Seen(2)
    feed.logger.addHandler(handler)
    yield handler
    feed.logger.removeHandler(handler)


def test_a_long_wait_says_what_for_at_doubling_times_and_when_it_is_over(seen):
    names = itertools.chain(["batch 3"], itertools.repeat("batch 3, a sample further"))
    before = set(threading.enumerate())
    with warning_of_wait(AFTER_S, lambda: next(names), "step 7"):
        seen.enough.wait()
    assert set(threading.enumerate()) == before
    first, second, last = seen.messages[:2] + seen.messages[-1:]
    assert first == "step 7 has waited 0.01 s for data: batch 3"
    assert second == "step 7 has waited 0.02 s for data: batch 3, a sample further"
    assert last.startswith("step 7 goes on: its data came after 0.")


def test_a_wait_that_fails_does_not_go_on(seen):
    def fail():
        seen.enough.wait()
        raise KeyError

    with pytest.raises(KeyError), warning_of_wait(AFTER_S, lambda: "it", "it"):
        fail()
    assert not any("goes on" in message for message in seen.messages)
    told = len(seen.messages)
    with warning_of_wait(1000.0, lambda: pytest.fail("asked"), "step 1"):
        pass
    assert len(seen.messages) == told


def test_watched_batches_are_the_datas_and_each_is_waited_for(seen):
    class Data:
        def __iter__(self):
            yield 0
            # What was done with it was no wait.
            assert not seen.messages
            seen.enough.wait()
            yield 1

        def waiting_for(self) -> str:
            return "the second"

    found = []
    for number in watched(Data(), AFTER_S, "it"):
        found.append(number)
        time.sleep(0 if number else 3 * AFTER_S)
    assert found == [0, 1]
    assert seen.messages[0] == "it has waited 0.01 s for data: the second"
