"""Status files of ranks, and the supervisor with real processes and all their outcomes.

Guarantees: a rank writes how it ended, also after an interrupt; out-of-memory exceptions are
recognized, including Paddle's own; messages are one line, without C++ frames. A cell is an OOM only
if that is certain: a rank reports it, its resident set passes the limit within a step, or it dies
without a message while the kernel counts a kill for memory; any other end is a failure with the
first error line; a cell that takes too long is ended; no process started by a cell is left, also in
other sessions; old status files are ignored.
"""

import errno
import os
import sys
import textwrap
from pathlib import Path

import paddle
import pytest

from paddle_vl.profile.supervise import (
    Limits,
    MemoryLimitError,
    Outcome,
    is_out_of_memory,
    leaving_status,
    read_statuses,
    run_cell,
    short_message,
)

ROOT = Path(__file__).parents[3]
MEGABYTE = 1_000_000
PRELUDE = """
import os, signal, subprocess, sys, time
from pathlib import Path
folder = Path(sys.argv[1])
def status(rank, state, detail="", late=0):
    text = '{"rank": %d, "pid": %d, "state": "%s", "detail": "%s", "time": %f}'
    partial = folder / ("partial-%d" % rank)
    partial.write_text(text % (rank, os.getpid(), state, detail, time.time() + late))
    partial.replace(folder / ("rank-%d.json" % rank))
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


def test_how_a_block_ended_is_written(tmp_path):
    with leaving_status(tmp_path, 1):
        assert [(status.rank, status.state) for status in read_statuses(tmp_path)] == [
            (1, "running")
        ]
    for rank, error in ((0, ValueError("bad key")), (2, MemoryError()), (3, KeyboardInterrupt())):
        with pytest.raises(type(error)), leaving_status(tmp_path, rank):
            raise error
    statuses = read_statuses(tmp_path)
    assert [status.state for status in statuses] == ["failed", "done", "oom", "failed"]
    assert statuses[0].detail == "ValueError: bad key"


@pytest.mark.parametrize(
    ("error", "is_memory"),
    [
        (MemoryError(), True),
        (MemoryLimitError("rank 0", 2, 1), True),
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


def test_an_allocation_that_paddle_refuses_is_a_memory_error():
    with pytest.raises(MemoryError) as caught:
        paddle.empty([10**14])
    assert is_out_of_memory(caught.value)


def test_messages_are_one_line_without_frames():
    message = short_message(RuntimeError(PADDLE_ERROR))
    assert message == (
        "RuntimeError: ResourceExhaustedError: Out of memory error on GPU 0. Cannot allocate 2GB."
    )
    assert len(short_message(RuntimeError("x" * 9999))) <= 400


def run(folder: Path, program: str, *, seconds=20.0, memory=None, **settings) -> Outcome:
    script = folder / "cell.py"
    script.write_text(PRELUDE + textwrap.dedent(program))
    command = [sys.executable, str(script), str(folder)]
    return run_cell(command, folder, Limits(seconds, memory), **settings)


def test_a_cell_whose_ranks_are_done_is_ok(tmp_path):
    assert run(tmp_path, "status(0, 'done')") == Outcome("ok")


def test_a_rank_that_says_so_is_out_of_memory_whatever_the_others_say(tmp_path):
    program = (
        "status(0, 'failed', 'peer lost'); status(1, 'oom', 'MemoryError: none'); sys.exit(241)"
    )
    assert run(tmp_path, program) == Outcome("oom", "rank 1: MemoryError: none")


def test_growth_within_a_step_is_seen_and_ended(tmp_path):
    program = """
    status(0, 'running')
    held = []
    while True:
        held.append(bytearray(os.urandom(1)) * 4_000_000)
        time.sleep(0.002)
    """
    outcome = run(tmp_path, program, memory=100 * MEGABYTE)
    assert outcome.status == "oom"
    assert "rank 0 uses 0." in outcome.detail
    assert "limit of 0.10 GB" in outcome.detail
    assert "within a step" in outcome.detail


@pytest.mark.parametrize(
    ("kills_after", "status", "detail"),
    [
        (4, "oom", "the kernel killed a process for memory"),
        (3, "failed", "rank 0 died without a message: ImportError: something odd"),
    ],
)
def test_a_killed_process_is_out_of_memory_only_by_the_kernels_count(
    tmp_path, kills_after, status, detail
):
    counts = tmp_path / "vmstat"
    counts.write_text("pgfault 7\noom_kill 3\n")
    program = f"""
    print('ImportError: something odd', flush=True)
    status(0, 'running')
    Path({str(counts)!r}).write_text('pgfault 9\\noom_kill {kills_after}\\n')
    os.kill(os.getpid(), signal.SIGKILL)
    """
    assert run(tmp_path, program, kernel_counts=counts) == Outcome(status, detail)


def test_of_several_failures_the_first_is_reported(tmp_path):
    program = """
    status(0, 'failed', 'RuntimeError: connection closed by peer', late=1)
    status(1, 'failed', 'ValueError: no file x')
    sys.exit(1)
    """
    assert run(tmp_path, program) == Outcome("failed", "rank 1: ValueError: no file x")


def test_an_end_before_any_status_is_reported_by_its_output(tmp_path):
    program = "print('error: no file run.yaml'); print('bye'); sys.exit(1)"
    outcome = run(tmp_path, program)
    assert outcome == Outcome("failed", "exit code 1: error: no file run.yaml")


def test_output_that_mentions_memory_is_no_oom(tmp_path):
    program = "status(0, 'failed', 'ValueError: bad key'); print('out of memory'); sys.exit(1)"
    assert run(tmp_path, program).status == "failed"


def test_status_files_of_an_earlier_try_are_ignored(tmp_path):
    run(tmp_path, "status(1, 'oom', 'old')")
    assert run(tmp_path, "status(0, 'done')") == Outcome("ok")


def test_a_cell_that_takes_too_long_is_ended_with_all_that_it_started(tmp_path):
    program = """
    child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'],
                             start_new_session=True)
    (folder / 'child').write_text(str(child.pid))
    status(0, 'running')
    time.sleep(60)
    """
    outcome = run(tmp_path, program, seconds=0.5)
    assert outcome == Outcome("timeout", "not done after 0.5 s")
    pids = [int((tmp_path / "child").read_text()), read_statuses(tmp_path)[0].pid]
    assert not any(is_running(pid) for pid in pids)


def test_a_rank_that_outlives_its_launcher_is_ended(tmp_path):
    program = """
    if os.fork() == 0:
        os.setsid()
        status(0, 'running')
        time.sleep(60)
    while not (folder / 'rank-0.json').exists():
        time.sleep(0.01)
    sys.exit(3)
    """
    outcome = run(tmp_path, program)
    assert outcome.status == "failed"
    assert not is_running(read_statuses(tmp_path)[0].pid)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_environment_reaches_the_cell(tmp_path):
    program = "status(0, 'done' if os.environ['CELL'] == '1' else 'failed')"
    assert run(tmp_path, program, environment={"CELL": "1"}) == Outcome("ok")
    assert "CELL" not in os.environ
