"""Lock of an output folder.

Guarantees: a folder locked by a live process is refused with host, pid and start time; the lock of
a process that ended in any way is taken over; if the owner is on another machine, the file's time
decides; a released lock leaves no file. Deleting the file or the folder admits no second run.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paddle_vl.train import run_lock
from paddle_vl.train.run_lock import LOCK_FILE, RunLock

ROOT = Path(__file__).parents[3]
TEXT = {"capture_output": True, "text": True}
HOLDER = """
import sys, time
from pathlib import Path
from paddle_vl.train.run_lock import RunLock
RunLock.acquire(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    """A process that holds the lock."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_second_run_is_refused_with_the_facts_of_the_first(holder, tmp_path):
    with pytest.raises(RuntimeError, match=rf"process {holder.pid} on .+, started 20") as caught:
        RunLock.acquire(tmp_path)
    assert f"train.output_dir {tmp_path.resolve()} is in use" in str(caught.value)
    assert f"kill {holder.pid}" in str(caught.value)


def test_a_look_at_the_folder_says_the_same(holder, tmp_path):
    with pytest.raises(RuntimeError, match=rf"process {holder.pid} on "):
        RunLock.check(tmp_path)
    holder.kill()
    holder.wait()
    RunLock.check(tmp_path)


def test_the_folder_of_a_killed_process_is_taken_over(holder, tmp_path):
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert json.loads((tmp_path / LOCK_FILE).read_text())["pid"] == holder.pid
    lock = RunLock.acquire(tmp_path)
    assert json.loads((tmp_path / LOCK_FILE).read_text())["pid"] == os.getpid()
    lock.release()
    assert not (tmp_path / LOCK_FILE).exists()


def test_a_process_keeps_its_folder_until_it_gives_it_back(tmp_path):
    lock = RunLock.acquire(tmp_path)
    assert RunLock.acquire(tmp_path) is lock
    lock.release()
    again = RunLock.acquire(tmp_path)
    assert again is not lock
    again.release()


def of_another_machine(folder: Path) -> Path:
    """A lock file of another machine, about whose owner flock has no information."""
    path = folder / LOCK_FILE
    owner = {"host": "other", "pid": 7, "started": "2026-01-01", "command": ["x"], "boot_id": "b"}
    path.write_text(json.dumps(owner))
    return path


def test_another_machines_run_that_renews_its_file_is_refused(tmp_path, monkeypatch):
    path = of_another_machine(tmp_path)
    slept = []

    def sleep(seconds):
        slept.append(seconds)
        if len(slept) == 3:
            os.utime(path, (time.time() + 1, time.time() + 1))

    monkeypatch.setattr(run_lock.time, "sleep", sleep)
    with pytest.raises(RuntimeError, match=r"process 7 on other, started 2026-01-01 as x"):
        RunLock.acquire(tmp_path)
    assert len(slept) == 3


def test_another_machines_run_that_renews_nothing_is_taken_over(tmp_path):
    path = of_another_machine(tmp_path)
    os.utime(path, (time.time() - 60, time.time() - 60))
    lock = RunLock.acquire(tmp_path)
    assert json.loads(path.read_text())["pid"] == os.getpid()
    lock.release()


def test_the_file_is_renewed_while_the_folder_is_held(tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock, "_BEAT_S", 0.02)
    lock = RunLock.acquire(tmp_path)
    os.utime(tmp_path / LOCK_FILE, (0, 0))
    deadline = time.monotonic() + 5
    while (tmp_path / LOCK_FILE).stat().st_mtime == 0:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    lock.release()


def test_a_damaged_file_is_nobodys(tmp_path):
    (tmp_path / LOCK_FILE).write_text('{"host": ')
    lock = RunLock.acquire(tmp_path)
    assert json.loads((tmp_path / LOCK_FILE).read_text())["pid"] == os.getpid()
    lock.release()


def test_without_its_file_the_folder_is_still_locked(holder, tmp_path):
    (tmp_path / LOCK_FILE).unlink()
    with pytest.raises(RuntimeError, match="is in use by another process"):
        RunLock.check(tmp_path)
    with pytest.raises(RuntimeError, match="is in use by another process"):
        RunLock.acquire(tmp_path)


@pytest.mark.parametrize("delete", [lambda f: (f / LOCK_FILE).unlink(), shutil.rmtree])
def test_what_is_deleted_is_locked_again(tmp_path, monkeypatch, delete):
    monkeypatch.setattr(run_lock, "_BEAT_S", 0.02)
    folder = tmp_path / "out"
    lock = RunLock.acquire(folder)
    delete(folder)
    deadline = time.monotonic() + 5
    while run_lock._read(folder / LOCK_FILE).get("pid") != os.getpid():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    other = subprocess.run([sys.executable, "-c", HOLDER, str(folder)], cwd=ROOT, **TEXT)
    assert f"in use by process {os.getpid()} on" in other.stderr
    lock.release()
    assert not (folder / LOCK_FILE).exists()


def test_a_run_whose_folder_was_taken_by_another_ends(tmp_path):
    script = f"from paddle_vl.train import run_lock\nrun_lock._BEAT_S = 1.0\n{HOLDER}"
    command = [sys.executable, "-c", script, str(tmp_path / "out")]
    pipe = subprocess.PIPE
    first = subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True)
    assert first.stdout.readline() == "held\n"
    (tmp_path / "out").rename(tmp_path / "moved")
    lock = RunLock.acquire(tmp_path / "out")
    assert first.wait(20) == 1
    assert "this run ends, as two must not write there" in first.communicate()[1]
    lock.release()
