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
        self._path, self._released = path, threading.Event()
        # Descriptors of the folder and the file, by path.
        self._locked: dict[Path, int] = {}
        try:
            self._lock()
        except BaseException:
            self._close(*self._locked)
            raise
        self._thread = Watch(self._beat, "run-lock")
        self._thread.start()

    @classmethod
    def acquire(cls, output_dir: Path) -> "RunLock":
        """Create and lock the folder.

        Raises:
            RuntimeError: another process, named in the message, trains there.
        """
        path = output_dir.resolve() / LOCK_FILE
        if path not in _locks:
            _locks[path] = cls(path)
        return _locks[path]

    @staticmethod
    def check(output_dir: Path) -> None:
        """Raise as `acquire` does if a process of this machine has the lock; acquires nothing."""
        path = output_dir.resolve() / LOCK_FILE
        for each in () if path in _locks else (path.parent, path):
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
        if self._has(self._path):
            self._path.unlink()
        self._close(*self._locked)

    def _beat(self) -> None:
        while not self._released.wait(_BEAT_S):
            try:
                if not self._has(self._path):
                    logger.warning(
                        "%s was deleted or replaced while its run goes on: locking again",
                        self._path,
                    )
                    self._lock()
                os.utime(self._path)
            except OSError as error:
                logger.warning("%s cannot be renewed: %s", self._path, error)
            except RuntimeError as error:
                logger.error("%s: this run ends, as two must not write there", error)
                end_process(_LOST)

    def _lock(self) -> None:
        """Lock the folder and the file, or which of them is not at its path any more; the file
        gets this process as its owner.

        Raises:
            RuntimeError: another run has one of them.
        """
        folder = self._path.parent
        folder.mkdir(parents=True, exist_ok=True)
        for path, flags in ((folder, os.O_RDONLY), (self._path, os.O_RDWR | os.O_CREAT)):
            # An owner that ends may remove its file after it was opened here.
            while not self._has(path):
                self._close(path)
                self._locked[path] = os.open(path, flags, 0o644)
                is_locked = _flock(self._locked[path], self._path)
                if path == self._path and self._has(path):
                    _check_not_alive(path, is_locked)
                    _write(self._locked[path])

    def _has(self, path: Path) -> bool:
        """Whether the path still leads to the folder or file that was opened there."""
        try:
            return path in self._locked and os.path.samestat(
                os.fstat(self._locked[path]), os.stat(path)
            )
        except FileNotFoundError:
            return False

    def _close(self, *paths: Path) -> None:
        for descriptor in [self._locked.pop(path) for path in paths if path in self._locked]:
            os.close(descriptor)


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


def _check_not_alive(path: Path, is_locked: bool) -> None:
    """If flock proves nothing (other machine, no locks), wait whether the owner renews the file.

    Raises:
        RuntimeError: it does.
    """
    owner = _read(path)
    if not owner:
        return
    if not is_locked or owner.get("boot_id") != _boot_id():
        renewed = path.stat().st_mtime
        with tempfile.NamedTemporaryFile(prefix=".now-", dir=path.parent) as now:
            # By the file system's clock.
            left_s = min(_STALE_S, _STALE_S - (os.stat(now.name).st_mtime - renewed))
        end = time.monotonic() + left_s
        if left_s > 0:
            logger.warning(
                "%s is of %s: waiting up to %.0f s to see whether it still runs",
                path,
                _described(owner),
                left_s,
            )
        while time.monotonic() < end:
            time.sleep(1.0)
            if path.stat().st_mtime != renewed:
                raise RuntimeError(_refusal(path, owner))
    logger.info("%s of %s is stale and taken over", path, _described(owner))


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
