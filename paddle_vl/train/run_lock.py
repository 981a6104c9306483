"""Lock of an output folder, so that one run at a time writes there.

`run.lock` names the owning process, which has an advisory lock (flock) on the file and, as files
get deleted, on the folder; the system releases both when the process ends. The owner also updates
the file's time, for file systems that do not share flock between machines. If its file is gone by
then, it locks again, or ends if another run has locked in the meantime.
"""

import fcntl
import json
import logging
import os
import socket
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from paddle_vl.threads import Watch, end_process

logger = logging.getLogger(__name__)

LOCK_FILE = "run.lock"
_BEAT_S = 10.0
_LOST = 1
# A lock of another machine is stale after this many seconds without renewal.
_STALE_S = 45.0
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_locks: dict[Path, "RunLock"] = {}


class RunLock:
    """A locked output folder, until `release` or the end of the process.

    Acquiring a folder twice in one process returns the same lock.
    """

    def __init__(self, path: Path):
        self._path = path
        self._folder, self._file = _locked(path)
        self._released = threading.Event()
        self._thread = Watch(self._beat, "run-lock")
        self._thread.start()

    @classmethod
    def acquire(cls, output_dir: Path) -> "RunLock":
        """Create and lock the folder.

        Raises:
            RuntimeError: another process, named in the message, trains there.
        """
        output_dir.mkdir(parents=True, exist_ok=True)
        path = output_dir.resolve() / LOCK_FILE
        if path in _locks:
            return _locks[path]
        lock = _locks[path] = cls(path)
        return lock

    @staticmethod
    def check(output_dir: Path) -> None:
        """Raise as `acquire` does if a process of this machine has the lock; acquires nothing."""
        path = output_dir.resolve() / LOCK_FILE
        if path in _locks:
            return
        for each in (path.parent, path):
            try:
                descriptor = os.open(each, os.O_RDONLY)
            except FileNotFoundError:
                continue
            try:
                # Shared, as all ranks of a run may check at once.
                _flock(descriptor, path, fcntl.LOCK_SH)
            finally:
                os.close(descriptor)

    def release(self) -> None:
        """Unlock the folder."""
        if self._released.is_set():
            return
        self._released.set()
        self._thread.join()
        del _locks[self._path]
        if _is_at(self._path, self._file):
            self._path.unlink()
        os.close(self._file)
        os.close(self._folder)

    def _beat(self) -> None:
        while not self._released.wait(_BEAT_S):
            try:
                if not _is_at(self._path, self._file):
                    self._lock_again()
                os.utime(self._path)
            except OSError as error:
                logger.warning("%s cannot be renewed: %s", self._path, error)
            except RuntimeError as error:
                logger.error("%s: this run ends, as two must not write there", error)
                end_process(_LOST)

    def _lock_again(self) -> None:
        """
        Raises:
            RuntimeError: another run has the folder now.
        """
        logger.warning(
            "%s was deleted or replaced while its run goes on: locking again", self._path
        )
        self._path.parent.mkdir(parents=True, exist_ok=True)
        folder, file = self._folder, self._file
        if _is_at(self._path.parent, folder):
            self._file = _locked_file(self._path)
        else:
            self._folder, self._file = _locked(self._path)
            os.close(folder)
        os.close(file)


def _locked(path: Path) -> tuple[int, int]:
    """The folder and the file, opened and locked."""
    folder = os.open(path.parent, os.O_RDONLY)
    with ExitStack() as on_failure:
        on_failure.callback(os.close, folder)
        _flock(folder, path)
        file = _locked_file(path)
        on_failure.pop_all()
    return folder, file


def _locked_file(path: Path) -> int:
    """The file, opened, locked and with this process as its owner."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        with ExitStack() as on_failure:
            on_failure.callback(os.close, file)
            is_locked = _flock(file, path)
            # Otherwise its owner has removed it in the meantime.
            if _is_at(path, file):
                _check_not_alive(path, is_locked)
                _write(file)
                on_failure.pop_all()
                return file


def _flock(descriptor: int, path: Path, kind: int = fcntl.LOCK_EX) -> bool:
    """Lock a file or folder; False if its file system has no such locks.

    Raises:
        RuntimeError: another process has locked it.
    """
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        raise RuntimeError(_refusal(path, _read(path))) from None
    except OSError:
        return False
    return True


def _is_at(path: Path, descriptor: int) -> bool:
    """Whether the path still leads to an opened file or folder."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _check_not_alive(path: Path, is_locked: bool) -> None:
    """If flock proves nothing (other machine, no locks), wait whether the owner renews the file.

    Raises:
        RuntimeError: it does.
    """
    owner = _read(path)
    if not owner:
        return
    if not is_locked or owner.get("boot_id") != _boot_id():
        age_s, told = _age_s(path), False
        begin, first = time.monotonic(), path.stat().st_mtime
        while age_s < _STALE_S and time.monotonic() - begin < _STALE_S:
            if not told:
                logger.warning(
                    "%s is of %s: waiting up to %.0f s to see whether it still runs",
                    path,
                    _described(owner),
                    _STALE_S - age_s,
                )
            told = True
            time.sleep(1.0)
            if path.stat().st_mtime != first:
                raise RuntimeError(_refusal(path, owner))
            age_s = _age_s(path)
    logger.info("%s of %s is stale and taken over", path, _described(owner))


def _age_s(path: Path) -> float:
    """Seconds since the file was renewed, by the file system's clock."""
    with tempfile.NamedTemporaryFile(prefix=".now-", dir=path.parent) as now:
        return os.stat(now.name).st_mtime - path.stat().st_mtime


def _read(path: Path) -> dict[str, Any]:
    try:
        owner = json.loads(path.read_bytes()[: 1 << 16])
    except (OSError, ValueError, RecursionError):
        return {}  # Deleted, empty, or cut short by a crash.
    return owner if isinstance(owner, dict) else {}


def _write(descriptor: int) -> None:
    owner = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": sys.argv,
        "boot_id": _boot_id(),
    }
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, (json.dumps(owner, indent=2) + "\n").encode(), 0)
    os.fsync(descriptor)


def _refusal(path: Path, owner: dict[str, Any]) -> str:
    return (
        f"train.output_dir {path.parent} is in use by {_described(owner)}: wait for it or stop it "
        f"(kill {owner.get('pid', 'PID')}), or choose another train.output_dir"
    )


def _described(owner: dict[str, Any]) -> str:
    if not owner:
        return "another process"
    return (
        f"process {owner.get('pid')} on {owner.get('host')}, started {owner.get('started')} as "
        f"{' '.join(map(str, owner.get('command', [])))}"
    )


def _boot_id() -> str:
    """Identifies a boot of this machine; containers on it share the id."""
    return _BOOT_ID.read_text(encoding="ascii").strip() if _BOOT_ID.exists() else ""
