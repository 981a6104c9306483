"""Processes that another process starts and watches.

Guarantees: exit codes and the first failure are seen, a killed process before others; time and
memory have limits, of which the error names the rank and both numbers; at the end of the block
nothing runs that a process of it has started; output goes to the file given.
"""

import os
import platform
import signal
import sys
import time
from pathlib import Path

import pytest

from paddle_vl.processes import (
    Failure,
    Limits,
    MemoryLimitError,
    Processes,
    TimeLimitError,
    release_free_memory,
    resident_bytes,
)

SLEEP = "import time; time.sleep(60)"


def run(processes: Processes, *programs: str, output: Path | None = None) -> None:
    for program in programs:
        processes.start([sys.executable, "-c", program], dict(os.environ), output)


def wait(processes: Processes) -> None:
    for _ in processes.watched():
        pass


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_killed_process_is_the_first_failure(tmp_path):
    with Processes() as processes:
        fails = "import time; time.sleep(0.5); raise SystemExit(3)"
        killed = "import os, time; time.sleep(0.5); os.kill(os.getpid(), 9)"
        run(processes, fails, killed, "pass")
        while None in processes.codes():
            time.sleep(0.01)
        wait(processes)
    assert processes.codes() == [3, -9, 0]
    assert processes.failure == Failure(1, -9)
    assert str(processes.failure) == "rank 1 was killed by SIGKILL"


def test_the_first_failure_stays_and_a_success_is_none():
    with Processes(successes=(0, 143)) as processes:
        fails = "import time; time.sleep(0.5); raise SystemExit(4)"
        run(processes, "raise SystemExit(143)", fails, SLEEP)
        for _ in processes.watched():
            if processes.failure is not None:
                processes.signal(signal.SIGTERM)
    assert str(processes.failure) == "rank 1 ended with exit code 4"
    assert processes.codes() == [143, 4, -signal.SIGTERM]


def test_time_has_a_limit():
    with Processes(Limits(seconds=0.2)) as processes:
        run(processes, SLEEP)
        with pytest.raises(TimeLimitError, match=r"not done after 0\.2 s"):
            wait(processes)
    assert processes.codes() == [-signal.SIGKILL]


def test_memory_has_a_limit_for_each_process():
    with Processes(Limits(memory_bytes=100_000_000)) as processes:
        run(processes, SLEEP, f"held = bytearray(b'1') * 200_000_000; {SLEEP}")
        with pytest.raises(MemoryLimitError, match=r"rank 1 uses 0\.\d\d GB .* limit of 0\.10 GB"):
            wait(processes)


@pytest.mark.parametrize("end", [Processes.kill, lambda processes: processes.end(5.0)])
def test_what_a_process_has_started_ends_with_it(tmp_path, end):
    program = f"import subprocess, sys; c = subprocess.Popen([sys.executable, '-c', {SLEEP!r}]); "
    output = tmp_path / "output"
    with Processes() as processes:
        run(processes, f"{program} print(c.pid, flush=True); {SLEEP}", output=output)
        while not output.read_text().endswith("\n"):
            time.sleep(0.02)
        assert processes.end_of_output(0, 1) == [output.read_text().strip()]
        end(processes)
    child, deadline = int(output.read_text()), time.monotonic() + 10
    while is_running(child):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_process_that_is_gone_has_no_memory():
    assert resident_bytes() > 1_000_000
    with pytest.raises(FileNotFoundError):
        resident_bytes(1 << 30)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a call of glibc")
def test_free_memory_goes_back_to_the_system():
    blocks = [bytes(2048) for _ in range(20_000)]
    before = resident_bytes()
    # The last one lies behind all others, so that malloc keeps them for later.
    del blocks[:-1]
    release_free_memory()
    assert before - resident_bytes() > 30e6
