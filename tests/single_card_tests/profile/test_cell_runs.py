"""Cells of a matrix in real processes, with all their outcomes.

Guarantees: out-of-memory exceptions are recognized, including Paddle's own; messages are one line,
without C++ frames. A cell is an OOM only if that is certain: a rank reports it, or its resident set
passes the limit within a step; any other end, a kill too, is a failure with the first error line; a
cell that takes too long is ended; errors of an earlier try are ignored; a request to stop ends the
matrix.
"""

import errno
import json
import os
import signal
import textwrap
import threading
import time

import paddle
import pytest

from paddle_vl.parallel import launcher
from paddle_vl.processes import Limits, MemoryLimitError
from paddle_vl.profile.cell_runs import (
    CellOutcome,
    is_out_of_memory,
    run_cell,
    short_message,
)

MEGABYTE = 1_000_000
# A rank's program: what it does is in its own file.
PRELUDE = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
folder, rank = Path(sys.argv[1]), int(os.environ.get("PADDLE_TRAINER_ID", 0))
def fails(message, is_memory=False, late=0):
    values = {"time": time.time() + late, "is_out_of_memory": is_memory, "message": message}
    (folder / f"rank-{rank}.error.json").write_text(json.dumps(values))
    sys.exit(1)
"""
PADDLE_ERROR = """

--------------------------------------
C++ Traceback (most recent call last):
--------------------------------------
0   paddle::memory::allocation::Allocator::Allocate()

----------------------
Error Message Summary:
----------------------
ResourceExhaustedError: Out of memory error on GPU 0.
Cannot allocate 2GB."""


@pytest.mark.parametrize(
    ("error", "is_memory"),
    [
        (MemoryError(), True),
        (MemoryLimitError(0, 2, 1), True),
        (RuntimeError(PADDLE_ERROR), True),
        (RuntimeError("std::bad_alloc"), True),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), True),
        (OSError(errno.ENOENT, "out of memory.txt"), False),
        (ValueError("no sample named out of memory"), False),
        (RuntimeError("Connection reset by peer"), False),
    ],
)
def test_memory_errors_are_told_from_others(error, is_memory):
    assert is_out_of_memory(error) is is_memory
    with pytest.raises(MemoryError) as caught:
        paddle.empty([10**14])
    assert is_out_of_memory(caught.value)


def test_messages_are_one_line_without_frames():
    message = short_message(RuntimeError(PADDLE_ERROR))
    assert message == (
        "RuntimeError: ResourceExhaustedError: Out of memory error on GPU 0. Cannot allocate 2GB."
    )
    assert len(short_message(RuntimeError("x" * 9999))) <= 400


@pytest.fixture
def run(tmp_path, monkeypatch):
    def run(program: str, ranks: int = 1, *, seconds=20.0, memory=None) -> CellOutcome:
        # Of an earlier try.
        stale = {"time": 0, "is_out_of_memory": True, "message": "old"}
        (tmp_path / "rank-0.error.json").write_text(json.dumps(stale))
        script = tmp_path / "cell.py"
        script.write_text(PRELUDE + textwrap.dedent(program))
        monkeypatch.setattr(launcher, "_MAIN", script)
        return run_cell([str(tmp_path)], ranks, tmp_path, Limits(seconds, memory))

    return run


def test_growth_within_a_step_is_seen_and_ended(run):
    program = """
    held = []
    while True:
        held.append(bytearray(os.urandom(1)) * 4_000_000)
        time.sleep(0.002)
    """
    outcome = run(program, memory=100 * MEGABYTE)
    assert outcome.status == "oom"
    assert "rank 0 uses 0." in outcome.detail
    assert "limit of 0.10 GB" in outcome.detail
    assert "within a step" in outcome.detail


SAYS_OOM = """
if rank == 0:
    fails("peer lost")
time.sleep(0.3)
fails("MemoryError: none", True)
"""
KILLED = """
print('ImportError: something odd', flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
SEVERAL = """
if rank == 0:
    fails("RuntimeError: connection closed by peer", late=1)
fails("ValueError: no file x")
"""
UNSAID = "print('error: no file run.yaml'); print('bye'); sys.exit(1)"
MENTIONED = "print('out of memory'); fails('ValueError: bad key')"


@pytest.mark.parametrize(
    ("program", "ranks", "outcome"),
    [
        ("pass", 2, ("ok", "")),
        ("time.sleep(60)", 1, ("timeout", "not done after 3 s")),
        # What a rank says counts, whatever the others say; else the first failure.
        (SAYS_OOM, 2, ("oom", "rank 1: MemoryError: none")),
        (SEVERAL, 2, ("failed", "rank 1: ValueError: no file x")),
        # Without a reason the output tells it; a kill and a word about memory are no OOM.
        (UNSAID, 1, ("failed", "rank 0 ended with exit code 1: error: no file run.yaml")),
        (KILLED, 1, ("failed", "rank 0 was killed by SIGKILL: ImportError: something odd")),
        (MENTIONED, 1, ("failed", "rank 0: ValueError: bad key")),
    ],
)
def test_how_a_cell_ended_is_told(run, program, ranks, outcome):
    seconds = 3.0 if outcome[0] == "timeout" else 20.0
    assert run(program, ranks, seconds=seconds) == CellOutcome(*outcome)


def test_a_request_to_stop_ends_the_matrix(run, tmp_path):
    program = """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    (folder / 'began').touch()
    time.sleep(60)
    """

    def stop():
        while not (tmp_path / "began").exists():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=stop)
    thread.start()
    with pytest.raises(SystemExit) as ended:
        run(program)
    thread.join()
    assert ended.value.code == 143
