"""Peak memory of this process since a reset, and the limit of the device. GB is 10^9 bytes.

On a GPU both numbers come from Paddle's allocator: memory of tensors, and memory reserved from the
device, which the limit applies to. On a CPU the first comes from Paddle's host allocator; the
second is the resident set of the process, with interpreter and libraries.
"""

from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import paddle
from paddle.base import core
from paddle.device import cuda

GB = 1e9
_PROCESS = Path("/proc/self")
# Written to clear_refs, it resets the peak of the resident set, see proc(5).
_RESET_PEAK = "5"


class MemoryPeak(NamedTuple):
    """Bytes of tensors, and bytes reserved on a GPU or resident on a CPU."""

    allocated: int
    reserved: int


class MemoryMeter:
    """Peak memory of this process.

    On a CPU the kernel keeps the peak of the resident set, and resets it on request; where that is
    not allowed, the peak is that since the start of the process.

    Attributes:
        source: what the numbers are.
    """

    def __init__(self):
        self._is_cpu = paddle.get_device().startswith("cpu")
        self.source = "device memory by Paddle's allocator"
        if self._is_cpu:
            try:
                _forget_resident_peak()
                self.source = "peak resident set kept by the kernel (VmHWM), reset"
            except OSError:
                self.source = "peak resident set since the start of the process"

    def reset(self) -> None:
        """Set the peak to the memory in use now."""
        if not self._is_cpu:
            cuda.reset_max_memory_allocated()
            cuda.reset_max_memory_reserved()
            return
        core.host_memory_stat_reset_peak_value("Allocated", 0)
        with suppress(OSError):
            _forget_resident_peak()

    def peak(self) -> MemoryPeak:
        """The peak since the reset."""
        if not self._is_cpu:
            return MemoryPeak(cuda.max_memory_allocated(), cuda.max_memory_reserved())
        status = (_PROCESS / "status").read_text()
        kilobytes = status.partition("VmHWM:")[2].split()[0]
        return MemoryPeak(core.host_memory_stat_peak_value("Allocated", 0), 1024 * int(kilobytes))


def device_memory_limit() -> int | None:
    """Bytes of the GPU; None on a CPU, where the limit is a setting."""
    if paddle.get_device().startswith("cpu"):
        return None
    return int(cuda.get_device_properties().total_memory)


def _forget_resident_peak() -> None:
    (_PROCESS / "clear_refs").write_text(_RESET_PEAK)
