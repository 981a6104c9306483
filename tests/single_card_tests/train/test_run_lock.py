"""Lock of an output folder: whose it is, and when it is taken over."""

import fcntl
import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from paddle_vl.train.run_lock import LOCK_FILE, RunLock

ROOT = Path(__file__).parents[3]
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
    # A look at the folder says the same.
    with pytest.raises(RuntimeError, match=rf"process {holder.pid} on "):
        RunLock.check(tmp_path)


@pytest.mark.parametrize("is_damaged", [False, True])
def test_the_folder_of_a_killed_process_is_taken_over(holder, tmp_path, is_damaged):
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    file = tmp_path / LOCK_FILE
    assert json.loads(file.read_text())["pid"] == holder.pid
    if is_damaged:
        file.write_text('{"host": ')
    RunLock.check(tmp_path)
    lock = RunLock.acquire(tmp_path)
    assert json.loads(file.read_text())["pid"] == os.getpid()
    lock.release()
    assert not file.exists()


def test_a_process_keeps_its_folder_until_it_gives_it_back(tmp_path):
    lock = RunLock.acquire(tmp_path)
    assert RunLock.acquire(tmp_path) is lock
    lock.release()
    again = RunLock.acquire(tmp_path)
    assert again is not lock
    again.release()


def test_without_its_file_the_folder_is_still_locked(holder, tmp_path):
    (tmp_path / LOCK_FILE).unlink()
    with pytest.raises(RuntimeError, match="is in use by another process"):
        RunLock.check(tmp_path)
    with pytest.raises(RuntimeError, match="is in use by another process"):
        RunLock.acquire(tmp_path)


@pytest.mark.parametrize("refused", ["folders", "all"])
def test_file_systems_without_locks(tmp_path, monkeypatch, caplog, refused):
    own = fcntl.flock

    def flock(descriptor, kind):
        if refused == "all" or stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError("not supported")
        own(descriptor, kind)

    monkeypatch.setattr(fcntl, "flock", flock)
    RunLock.acquire(tmp_path).release()
    assert ("has no locks" in caplog.text) == (refused == "all")
