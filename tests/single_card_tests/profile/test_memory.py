"""Peak memory of a CPU process.

Guarantees: the peak counts memory that was freed since, and a reset clears it; tensors are counted
by Paddle's allocator, separately from the resident set; where the kernel refuses the reset,
the source says so; a GPU's numbers come from its allocator, both reset.
"""

import paddle

from paddle_vl.profile import memory
from paddle_vl.profile.memory import MemoryMeter, MemoryPeak

LARGE = 40_000_000


def use_and_drop(num_bytes: int) -> None:
    paddle.ones([num_bytes // 4], dtype="float32").sum()


def test_peak_counts_what_is_gone_and_a_reset_forgets_it():
    meter = MemoryMeter()
    assert "VmHWM" in meter.source
    meter.reset()
    before = meter.peak()
    use_and_drop(LARGE)
    peak = meter.peak()
    assert LARGE <= peak.allocated - before.allocated < LARGE + 1000
    assert peak.reserved >= peak.allocated
    meter.reset()
    assert meter.peak().allocated <= before.allocated


def test_where_the_kernel_refuses_the_reset_the_peak_is_that_of_the_process(tmp_path, monkeypatch):
    # A folder in the place of the file cannot be written, by root either.
    (tmp_path / "clear_refs").mkdir()
    (tmp_path / "status").write_text("VmPeak:\t900 kB\nVmHWM:\t   70 kB\n")
    monkeypatch.setattr(memory, "_PROCESS", tmp_path)
    meter = MemoryMeter()
    assert meter.source == "peak resident set since the start of the process"
    meter.reset()
    assert meter.peak().reserved == 70 * 1024


def test_gpu_numbers_are_its_allocators(monkeypatch):
    reset = []
    for name in ("reset_max_memory_allocated", "reset_max_memory_reserved"):
        monkeypatch.setattr(memory.cuda, name, lambda name=name: reset.append(name))
    monkeypatch.setattr(memory.cuda, "max_memory_allocated", lambda: 3)
    monkeypatch.setattr(memory.cuda, "max_memory_reserved", lambda: 5)
    monkeypatch.setattr(memory.paddle, "get_device", lambda: "gpu:0")
    meter = MemoryMeter()
    meter.reset()
    assert len(reset) == 2
    assert meter.peak() == MemoryPeak(3, 5)
