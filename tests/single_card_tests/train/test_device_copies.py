"""Copies of batches to a fake device, which copies as late as it may: when they are waited for."""

import gc
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle
import pytest

from paddle_vl.batch.schema import HostBatch
from paddle_vl.train.feeding.device_copies import DeviceCopies, device_copies
from tests.single_card_tests.train.fake_device import FakeDevice


@dataclass(frozen=True, eq=False, kw_only=True)
class Fields(HostBatch):
    a: Any = None
    b: Any = None
    videos: Any = None
    masks: Any = None
    none: Any = None
    pixels: Any = None
    grid: Any = None
    count: Any = None
    note: Any = None
    on_host: tuple[str, ...] = ("grid",)


def step(copies: DeviceCopies, *batches: Fields) -> list[Fields]:
    """One step as a feed runs it: fetch, use, launch."""
    made = copies.start(batches)
    copies.wait()
    copies.launched()
    return made


def numbers(size: int, first: int = 0) -> np.ndarray:
    return np.arange(first, first + size)


def test_a_step_is_pinned_copied_and_waited_for_by_the_computing_stream():
    device = FakeDevice()
    copies = DeviceCopies(device)
    (batch,) = copies.start([Fields(a=numbers(3), b=numbers(2))])
    assert device.log == [
        "empty", "pin", "empty", "pin",
        # The memory is new: its earlier uses were launched before.
        "record compute 0", "copies waits for compute 0",
        "copy 2", "record copies 0",
    ]  # fmt: skip
    assert batch["a"][0].item() == 77
    device.log.clear()
    copies.wait()
    assert device.log == ["compute waits for copies 0"]
    assert batch["a"].tolist() == [0, 1, 2]
    assert batch["b"].tolist() == [0, 1]


def test_buffers_have_two_turns_each_behind_the_step_that_had_it():
    device = FakeDevice()
    copies = DeviceCopies(device)
    first, second = (step(copies, Fields(a=numbers(4, i)))[0]["a"] for i in range(2))
    launched = [event.name for event in device.compute.events]
    device.log.clear()
    third = copies.start([Fields(a=numbers(4, 2))])[0]["a"]
    # Two of the four events are for new memory; the first step was launched before the second
    # event.
    assert launched == ["compute 0", "compute 1", "compute 2", "compute 3"]
    assert device.log == ["pin", "copies waits for compute 1", "copy 1", "record copies 2"]
    assert third.data_ptr() == first.data_ptr() != second.data_ptr()
    assert second.tolist() == [1, 2, 3, 4]
    copies.wait()
    copies.launched()
    device.log.clear()
    copies.start([Fields(a=numbers(4, 3))])
    assert device.log[1] == "copies waits for compute 3"


def test_other_lengths_use_the_memory_there_is_until_it_is_too_small():
    device = FakeDevice()
    copies = DeviceCopies(device)
    pointers = []
    for size in (8, 8, 6, 9, 10):
        (batch,) = step(copies, Fields(a=numbers(2 * size).reshape([2, size])))
        assert batch["a"].tolist() == numbers(2 * size).reshape([2, size]).tolist()
        pointers.append(batch["a"].data_ptr())
        if size == 6:
            device.log.clear()
    one, other, third, fourth, fifth = pointers
    assert one == third != other == fourth
    # The buffer had 18 entries: 16 plus an eighth.
    assert device.log.count("empty") == 1
    assert fifth != one
    renewed = device.log.index("empty")
    assert device.log[renewed + 2 : renewed + 4] == [
        "record compute 6",
        "copies waits for compute 6",
    ]


def test_pinned_memory_is_held_until_it_was_read():
    device, held = FakeDevice(), []

    def pinned(array):
        tensor = paddle.to_tensor(array)
        held.append(weakref.ref(tensor))
        return tensor

    device.pinned = pinned
    copies = DeviceCopies(device)
    step(copies, Fields(a=numbers(3)))
    step(copies, Fields(a=numbers(3)))
    gc.collect()
    assert held[0]() is not None
    device.copies.events[0].has_happened = True
    step(copies, Fields(a=numbers(3)))
    gc.collect()
    assert [ref() is None for ref in held] == [True, False, False]
    copies.close()
    gc.collect()
    assert all(event.has_happened for event in device.copies.events)
    assert all(ref() is None for ref in held)


def test_lists_empty_arrays_types_and_micro_batches_are_kept_apart():
    device = FakeDevice()
    copies = DeviceCopies(device)
    batches = [
        Fields(videos=[np.full([2, 2], i, "float32"), np.full([3], i, "float32")],
               masks=np.array([True, False]), none=np.zeros([0, 4], "int64"))
        for i in range(2)
    ]  # fmt: skip
    made = step(copies, *batches)
    for batch, expected in zip(made, batches, strict=True):
        for video, array in zip(batch["videos"], expected["videos"], strict=True):
            np.testing.assert_array_equal(video.numpy(), array)
        assert batch["masks"].tolist() == [True, False]
        assert (batch["none"].shape, batch["none"].dtype) == ([0, 4], paddle.int64)
    # What stays on the host is not touched.
    host = Fields(pixels=numbers(2), grid=numbers(3), count=7, note=(True,))
    (kept,) = copies.start([host])
    copies.wait()
    copies.launched()
    assert kept["pixels"].tolist() == [0, 1]
    assert list(kept) == list(host)
    assert all(kept[name] is host[name] for name in host if name != "pixels")
    # The dtype of an entry may change, as with a dataset that stores smaller numbers.
    (later,) = step(copies, Fields(videos=[np.full([2], 9, "int64")]))
    assert later["videos"][0].tolist() == [9, 9]


def test_a_gpu_without_pinned_memory_names_the_setting(monkeypatch):
    def cannot_pin():
        raise RuntimeError("no pinned memory")

    monkeypatch.setattr(paddle, "get_device", lambda: "gpu:0")
    assert isinstance(device_copies(True, make=FakeDevice), DeviceCopies)
    with pytest.raises(RuntimeError, match=r"\(no pinned memory\): set data\.pin_memory=false"):
        device_copies(True, make=cannot_pin)
    assert device_copies(False, make=cannot_pin) is None
    monkeypatch.undo()
    assert device_copies(True) is None
