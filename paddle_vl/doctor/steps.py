"""A steady training step: what it launches, copies and waits for, and copies of batches beside it.

Every batch is handed over, and its arrays are overwritten at once; later batches take the same
device buffers while earlier steps still compute. Each step takes the extremes of what it was given:
others show a copy that came too early, too late, or from memory that was given away.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import paddle
from paddle import Tensor

from paddle_vl.config.load import load_run_config
from paddle_vl.doctor.check import Machine, Result, check, ok, wrong
from paddle_vl.doctor.environment import best_s
from paddle_vl.doctor.kernels import profiled
from paddle_vl.testing import record_device_copies, record_host_reads
from paddle_vl.testing.tiny_run import write_tiny_run
from paddle_vl.train.build import build_trainer
from paddle_vl.train.feeding.device_copies import DeviceCopies, GpuDevice

_WARM_UP, _STEPS = 2, 4
# Reads of host memory: messages between hosts, and kernels that only run on a CPU.
_HOST_ONLY = ("parallel/ranks.py", "nn/attention.py", "nn/cpu/")
# The read that a step makes before its update.
_NORM = ("train/step.py",)
# On a CPU without copies beside the step, the feed makes tensors of the batch.
_FEED = ("train/feeding/",)
WAITS = "waits of the host"
# What an event counts as, by its kind and a part of its name.
_CLASSES = (
    ("Memcpy", "HtoD", "Memcpy to the device"), ("Memcpy", "", "Memcpy"),
    ("runtime", "LaunchKernel", "launches"), ("runtime", "LaunchCooperative", "launches"),
    ("runtime", "Memcpy", "copies"), ("runtime", "Synchronize", WAITS),
    ("DygraphKernelLaunch", "", "operators"), ("Kernel", "", "device kernels"),
)  # fmt: skip
_ROUNDS, _POISON = 30, 1e9
_ELEMENTS = (1 << 22, 1 << 20, 3 << 20)
_COPIED = 1 << 26


@check("step.counts", limit_s=90.0)
def step_counts(machine: Machine) -> Result:
    """Launches, copies and waits of a steady step."""
    settings = ["logging.logging_steps=1000", f"train.max_steps={_WARM_UP + _STEPS + 1}"]
    config = load_run_config(write_tiny_run(machine.folder / "counts"), settings)
    trainer = build_trainer(config, writes=False)

    def train(steps: int) -> None:
        for _ in range(steps):
            trainer.train_one_step()

    try:
        train(_WARM_UP)
        with record_host_reads() as reads, record_device_copies() as copies:
            train(1)
        counts = Counter(
            next((what for own, part, what in _CLASSES if kind == own and part in name), "")
            for kind, name in profiled(lambda: train(_STEPS))
        )
    finally:
        trainer.feed.close()
    per_step = {name: number / _STEPS for name, number in sorted(counts.items()) if name}
    reads = [place for place in reads if not place.startswith((*_HOST_ONLY, *_NORM))]
    copies = [place for place in copies if not place.startswith(_FEED)]
    figures = {"per_step": per_step, "host_reads": reads, "device_copies": copies}
    text = ", ".join(f"{number:g} {name}" for name, number in per_step.items())
    text = (
        f"per step of a tiny model (2 micro-batches, 4 layers): {text}; {len(reads)} host reads "
        f"beside its norm, {len(copies)} copies to the device beside its batches"
    )
    if problem := step_problem(reads, copies, per_step):
        return wrong(
            f"{text}; {problem}",
            "the host waits for the device there in every step, or holds it up: report it",
            **figures,
        )
    return ok(text, **figures)


def step_problem(
    reads: Sequence[str], copies: Sequence[str], per_step: Mapping[str, float]
) -> str | None:
    """What makes host and device wait in a steady step, if anything.

    Args:
        reads, copies: places of the package where the host reads the device, or copies to it.
        per_step: events of a step by name, as the profiler saw them.
    """
    for places, what in ((reads, "reads the device"), (copies, "copies to the device")):
        if places:
            return f"the host {what} at {places[0]}"
    # Once for the norm. The profiler itself waits when it begins and ends, less than once a step.
    waits = per_step.get(WAITS, 0)
    return f"the host waits {waits:g} times for the device" if waits >= 2 else None


@check("copies.race", need="gpu")
def copies_race(machine: Machine) -> Result:
    """Batches arrive whole while steps run."""
    rounds = 8 if machine.is_quick else _ROUNDS
    if bad := spoiled_rounds(GpuDevice(), rounds, _busy):
        return wrong(
            f"{len(bad)} of {rounds} steps computed with data of another batch: rounds {bad[:5]}",
            "set data.pin_memory: false in every run, and report this: a kernel read its buffer "
            "before the copy, or pinned memory was given away too early",
            spoiled=bad,
        )
    return ok(f"{rounds} batches of {sum(_ELEMENTS) * 4 / 1e6:.0f} MB arrived whole")


def spoiled_rounds(device: GpuDevice, rounds: int, busy: Callable[[], Any]) -> list[int]:
    """Numbers of the rounds whose step saw other values than those handed over.

    Args:
        busy: launches work on the compute stream, so that steps run late.
    """

    def extremes(batch: Mapping[str, Tensor]) -> list[Tensor]:
        """Smallest and largest entry of each array, on the device."""
        return [paddle.stack([x.min(), x.max()]) for _, x in sorted(batch.items())]

    copies, seen = DeviceCopies(device), []
    for number in range(rounds):
        # Sizes change, so that buffers grow and pinned memory is taken and freed.
        arrays = {
            f"x{i}": np.full(size // (1 + number % 3), float(number + i), np.float32)
            for i, size in enumerate(_ELEMENTS)
        }
        if number:
            copies.launched()
        (batch,) = copies.start([arrays], lambda name: True)
        for array in arrays.values():
            array[:] = _POISON
        copies.wait()
        before = extremes(batch)
        busy()
        # Buffers must hold until the step's last kernel.
        seen.append([*before, *extremes(batch)])
    wanted = [[[number + i] * 2 for i in range(len(_ELEMENTS))] * 2 for number in range(rounds)]
    found = [[x.tolist() for x in of_round] for of_round in seen]
    copies.close()
    return [number for number in range(rounds) if found[number] != wanted[number]]


def _busy() -> None:
    """A few milliseconds of products."""
    has_bfloat16 = paddle.device.cuda.get_device_capability()[0] >= 8
    x = paddle.ones([4096, 4096], "bfloat16" if has_bfloat16 else "float32")
    for _ in range(8):
        x = paddle.matmul(x, x) * 2.0**-12


@check("copies.overlap", need="gpu")
def copies_overlap(machine: Machine) -> Result:
    """Copies to the device run beside kernels."""
    device = GpuDevice()
    source = device.pinned(np.ones([_COPIED], np.float32))
    target = device.empty([_COPIED], "float32")

    def run(copies: bool, computes: bool) -> None:
        if copies:
            device.copy([(source, target)])
        for _ in range(4 * computes):
            _busy()

    copy_s = best_s(lambda: run(True, False), 3)
    compute_s = best_s(lambda: run(False, True), 3)
    both_s = best_s(lambda: run(True, True), 3)
    hidden = (copy_s + compute_s - both_s) / min(copy_s, compute_s)
    speed = 4 * _COPIED / copy_s / 1e9
    figures = {"copy_s": copy_s, "compute_s": compute_s, "both_s": both_s, "gb_per_s": speed}
    text = f"{speed:.1f} GB/s to the device, {100 * hidden:.0f} % of it hidden"
    if hidden < 0.5:
        return wrong(
            text,
            "copies wait for kernels: check that memory is pinned (ulimit -l), the device has a "
            "copy engine, and CUDA_LAUNCH_BLOCKING is unset",
            **figures,
        )
    return ok(text, **figures)
