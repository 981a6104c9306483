"""Copies of batches to a GPU beside a running step: right under a race, and overlapped.

Every batch is handed over, and its arrays are overwritten at once; later batches take the same
device buffers while earlier steps still compute. Each step sums what it was given: a sum of other
values shows a copy that came too early, too late, or from memory that was given away.
"""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
from paddle import Tensor

from paddle_vl.doctor.check import GPU, Check, Machine, Result, ok, wrong
from paddle_vl.train.feeding.device_copies import Device, DeviceCopies, GpuDevice

_ROUNDS, _POISON = 30, 1e9
_ELEMENTS = (1 << 22, 1 << 20, 3 << 20)


def checks(machine: Machine) -> list[Check]:
    return [
        Check("copies.race", "batches arrive whole while steps run", _race, (GPU,)),
        Check("copies.overlap", "copies to the device run beside kernels", _overlap, (GPU,)),
    ]


def _race(machine: Machine) -> Result:
    rounds = 8 if machine.is_quick else _ROUNDS
    bad = spoiled_rounds(GpuDevice(), rounds, _busy)
    figures = {"rounds": rounds, "spoiled": bad, "megabytes": sum(_ELEMENTS) * 4 / 1e6}
    if bad:
        return wrong(
            f"{len(bad)} of {rounds} steps computed with data of another batch: rounds {bad[:5]}",
            "set data.pin_memory: false in every run, and report this: a kernel read its buffer "
            "before the copy, or pinned memory was given away too early",
            **figures,
        )
    return ok(f"{rounds} batches of {figures['megabytes']:.0f} MB arrived whole", **figures)


def spoiled_rounds(device: Device, rounds: int, busy: Callable[[], Any]) -> list[int]:
    """Numbers of the rounds whose step saw other values than those handed over.

    Args:
        busy: launches work on the compute stream, so that steps run late.
    """
    copies = DeviceCopies(device)
    sums: list[list[Tensor]] = []
    wanted: list[list[float]] = []
    for number in range(rounds):
        # Sizes change, so that buffers grow and pinned memory is taken and freed.
        arrays = {
            f"x{i}": np.full(size // (1 + number % 3), float(number + i), np.float32)
            for i, size in enumerate(_ELEMENTS)
        }
        wanted.append([float(number + i) for i in range(len(_ELEMENTS))])
        if number:
            copies.launched()
        (batch,) = copies.start([arrays], lambda name: True)
        for array in arrays.values():
            array[:] = _POISON
        copies.wait()
        before = [_extremes(batch[name]) for name in arrays]
        busy()
        # Buffers must hold until the step's last kernel.
        sums.append(before + [_extremes(batch[name]) for name in arrays])
    bad = []
    for number, (found, values) in enumerate(zip(sums, wanted, strict=True)):
        seen = [tuple(map(float, extremes.numpy())) for extremes in found]
        if seen != [(value, value) for value in values] * 2:
            bad.append(number)
    copies.close()
    return bad


def _extremes(x: Tensor) -> Tensor:
    """Smallest and largest entry, on the device."""
    return paddle.stack([x.min(), x.max()])


def _busy() -> Tensor:
    """A few milliseconds of products."""
    x = paddle.ones([4096, 4096], "bfloat16" if _has_bf16() else "float32")
    for _ in range(8):
        x = paddle.matmul(x, x) * 2.0**-12
    return x


def _has_bf16() -> bool:
    return paddle.device.cuda.get_device_capability()[0] >= 8


def _overlap(machine: Machine) -> Result:
    device = GpuDevice()
    source = device.pinned(np.ones([1 << 26], np.float32))
    target = device.empty([1 << 26], "float32")
    size = 4 * (1 << 26)

    def compute() -> None:
        for _ in range(4):
            _busy()

    def copy() -> None:
        device.copy([(source, target)])

    def both() -> None:
        copy()
        compute()

    copy_s, compute_s, both_s = (_seconds(run) for run in (copy, compute, both))
    hidden = (copy_s + compute_s - both_s) / min(copy_s, compute_s)
    figures = {
        "copy_s": copy_s,
        "compute_s": compute_s,
        "both_s": both_s,
        "gb_per_s": size / copy_s / 1e9,
        "hidden_share": hidden,
    }
    text = f"{figures['gb_per_s']:.1f} GB/s to the device, {100 * hidden:.0f} % of it hidden"
    if hidden < 0.5:
        return wrong(
            text,
            "copies wait for kernels: check that memory is pinned (ulimit -l), the device has a "
            "copy engine, and CUDA_LAUNCH_BLOCKING is unset",
            **figures,
        )
    return ok(text, **figures)


def _seconds(run: Callable[[], None]) -> float:
    run()
    times = []
    for _ in range(3):
        paddle.device.synchronize()
        begin = time.perf_counter()
        run()
        paddle.device.synchronize()
        times.append(time.perf_counter() - begin)
    return min(times)
