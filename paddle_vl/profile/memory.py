"""Peak memory of this process between a reset and a look, and its limit.

On a GPU both numbers are of Paddle's allocator: what tensors took, and what it reserved from the
device, which is what runs out. On a CPU tensors are counted by Paddle's host allocator; in place of
the reserved memory stands the resident set of the whole process, with interpreter and libraries.
GB is 10^9 bytes.
"""

import os
import threading
from pathlib import Path
from typing import NamedTuple, Protocol

import paddle
from paddle.base import core
from paddle.device import cuda

GB = 1e9
_PAGE = os.sysconf("SC_PAGE_SIZE")
# What the kernel takes as "forget the peak resident set", see proc(5).
_RESET_PEAK = "5"


class Peak(NamedTuple):
    """Bytes: of tensors, and reserved from the device, or resident on a CPU."""

    allocated: int
    reserved: int


class MemoryMeter(Protocol):
    """How much memory there is and was in use.

    Attributes:
        source: in words, what the numbers are and how they were taken.
    """

    source: str

    def reset(self) -> None:
        """The peak is what is in use now."""

    def peak(self) -> Peak:
        """Since the reset."""

    def close(self) -> None:
        """Stop whatever watches."""


def memory_meter() -> MemoryMeter:
    """The meter of Paddle's device."""
    return HostMemory() if paddle.get_device().startswith("cpu") else DeviceMemory()


def device_memory_limit() -> int | None:
    """Bytes of the GPU, None on a CPU, where the limit is a setting."""
    if paddle.get_device().startswith("cpu"):
        return None
    return int(cuda.get_device_properties().total_memory)


class DeviceMemory:
    """The GPU's, by Paddle's allocator."""

    source = "device memory by Paddle's allocator"

    def reset(self) -> None:
        cuda.reset_max_memory_allocated()
        cuda.reset_max_memory_reserved()

    def peak(self) -> Peak:
        return Peak(cuda.max_memory_allocated(), cuda.max_memory_reserved())

    def close(self) -> None:
        pass


class HostMemory:
    """A CPU process's: tensors by Paddle's host allocator, and the resident set.

    The kernel keeps the peak of the resident set and forgets it on request. Where it does not let a
    process ask, the set is sampled instead, and a peak between two samples goes unseen.

    Args:
        process: the process's folder in /proc.
        interval: seconds between samples, where they are taken.
    """

    def __init__(self, process: Path = Path("/proc/self"), interval: float = 0.01):
        self._process, self._interval = process, interval
        self._sampler: _Sampler | None = None
        try:
            self._forget()
            self.source = "peak resident set kept by the kernel (VmHWM), reset"
        except OSError:
            self._sampler = _Sampler(process, interval)
            self.source = f"resident set sampled every {1000 * interval:g} ms"

    def reset(self) -> None:
        core.host_memory_stat_reset_peak_value("Allocated", 0)
        if self._sampler is None:
            self._forget()
        else:
            self._sampler.highest = 0

    def peak(self) -> Peak:
        if self._sampler is not None:
            resident = max(self._sampler.highest, resident_bytes(self._process))
        else:
            resident = _status(self._process, "VmHWM")
        return Peak(core.host_memory_stat_peak_value("Allocated", 0), resident)

    def close(self) -> None:
        if self._sampler is not None:
            self._sampler.stop()

    def _forget(self) -> None:
        (self._process / "clear_refs").write_text(_RESET_PEAK)


def resident_bytes(process: Path) -> int:
    """The resident set of a process by its folder in /proc.

    Raises:
        OSError: there is no such process (any more).
    """
    return int((process / "statm").read_text().split()[1]) * _PAGE


def _status(process: Path, name: str) -> int:
    for line in (process / "status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{process}/status has no {name}")


class _Sampler:
    def __init__(self, process: Path, interval: float):
        self.highest = 0
        self._process, self._interval = process, interval
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_over.wait(self._interval):
            self.highest = max(self.highest, resident_bytes(self._process))
