"""Peak memory of this process since a reset, and the limit of the device. GB is 10^9 bytes.

On a GPU both numbers come from Paddle's allocator: memory of tensors, and memory reserved from the
device, which the limit applies to. On a CPU the first comes from Paddle's host allocator; the
second is the resident set of the process, with interpreter and libraries.
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
# Written to clear_refs, it resets the peak of the resident set, see proc(5).
_RESET_PEAK = "5"


class Peak(NamedTuple):
    """Bytes of tensors, and bytes reserved on a GPU or resident on a CPU."""

    allocated: int
    reserved: int


class MemoryMeter(Protocol):
    """Measures peak memory.

    Attributes:
        source: description of the numbers and of how they are measured.
    """

    source: str

    def reset(self) -> None:
        """Set the peak to the memory in use now."""

    def peak(self) -> Peak:
        """The peak since the reset."""
        ...

    def close(self) -> None:
        """Stop sampling."""


def memory_meter() -> MemoryMeter:
    """The meter of Paddle's device."""
    return HostMemory() if paddle.get_device().startswith("cpu") else DeviceMemory()


def device_memory_limit() -> int | None:
    """Bytes of the GPU; None on a CPU, where the limit is a setting."""
    if paddle.get_device().startswith("cpu"):
        return None
    return int(cuda.get_device_properties().total_memory)


class DeviceMemory:
    """Memory of the GPU, from Paddle's allocator."""

    source = "device memory by Paddle's allocator"

    def reset(self) -> None:
        cuda.reset_max_memory_allocated()
        cuda.reset_max_memory_reserved()

    def peak(self) -> Peak:
        return Peak(cuda.max_memory_allocated(), cuda.max_memory_reserved())

    def close(self) -> None:
        pass


class HostMemory:
    """Memory of a process on a CPU: tensors from Paddle's host allocator, and the resident set.

    The kernel records the peak of the resident set and resets it on request. If that is not
    allowed, the resident set is sampled, which misses peaks between samples.

    Args:
        process: the folder of the process in /proc.
        interval: seconds between samples.
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
    """Resident set of a process, by its folder in /proc.

    Raises:
        OSError: there is no such process.
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
