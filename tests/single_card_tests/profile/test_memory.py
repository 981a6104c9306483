"""Peak memory of a CPU process.

Guarantees: the peak counts memory that was freed since, and a reset clears it; tensors are counted
by Paddle's allocator, separately from the resident set; where the kernel refuses the reset, samples
replace the peak and the source says so; a GPU's numbers come from its allocator, both reset.
"""

from pathlib import Path

import paddle
import pytest

from paddle_vl.profile import memory
from paddle_vl.profile.memory import DeviceMemory, HostMemory, Peak

LARGE = 40_000_000


def use_and_drop(num_bytes: int) -> None:
    paddle.ones([num_bytes // 4], dtype="float32").sum()


def test_peak_counts_what_is_gone_and_a_reset_forgets_it():
    meter = HostMemory()
    assert "VmHWM" in meter.source
    meter.reset()
    before = meter.peak()
    use_and_drop(LARGE)
    peak = meter.peak()
    assert LARGE <= peak.allocated - before.allocated < LARGE + 1000
    assert peak.reserved >= peak.allocated
    meter.reset()
    assert meter.peak().allocated <= before.allocated


def refusing_process(folder: Path, resident_pages: int) -> Path:
    """A /proc folder whose peak cannot be reset."""
    (folder / "clear_refs").mkdir(parents=True)
    (folder / "statm").write_text(f"900 {resident_pages} 3 4 0 5 0")
    return folder


def test_resident_set_is_sampled_where_the_kernel_refuses(tmp_path):
    process = refusing_process(tmp_path, 100)
    meter = HostMemory(process, interval=0.001)
    try:
        assert meter.source == "resident set sampled every 1 ms"
        meter._sampler.highest = 500 * 4096
        assert meter.peak().reserved == 500 * 4096
        meter.reset()
        assert meter.peak().reserved == 100 * 4096
    finally:
        meter.close()


def test_sampler_sees_a_rise(tmp_path):
    process = refusing_process(tmp_path, 7)
    meter = HostMemory(process, interval=0.001)
    try:
        while meter._sampler.highest == 0:
            pass
        assert meter.peak().reserved == 7 * 4096
    finally:
        meter.close()


def test_gpu_numbers_are_its_allocators(monkeypatch):
    reset = []
    for name in ("reset_max_memory_allocated", "reset_max_memory_reserved"):
        monkeypatch.setattr(memory.cuda, name, lambda name=name: reset.append(name))
    monkeypatch.setattr(memory.cuda, "max_memory_allocated", lambda: 3)
    monkeypatch.setattr(memory.cuda, "max_memory_reserved", lambda: 5)
    monkeypatch.setattr(memory.paddle, "get_device", lambda: "gpu:0")
    meter = memory.memory_meter()
    assert isinstance(meter, DeviceMemory)
    meter.reset()
    assert len(reset) == 2
    assert meter.peak() == Peak(3, 5)


def test_a_process_that_is_gone_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        memory.resident_bytes(tmp_path / "gone")
