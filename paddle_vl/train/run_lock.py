"""Lock of an output folder, so that one run at a time writes there.

The owner has an advisory lock (flock) on the folder and on `run.lock` in it, which names the owner;
the system releases both when the process ends. Two are locked as the file may be deleted, and as
some network file systems lock files alone.
"""

import fcntl
import json
import logging
import os
import socket
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

LOCK_FILE = "run.lock"
_locks: dict[Path, "RunLock"] = {}


class RunLock:
    """A locked output folder, until `release` or the end of the process.

    Acquiring a folder twice in one process returns the same lock.
    """

    def __init__(self, path: Path):
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = os.open(path.parent, os.O_RDONLY)
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        self._descriptors = [folder, file]
        try:
            # No shortcut: both are to be locked.
            if not any([_flock(each, path, fcntl.LOCK_EX) for each in self._descriptors]):
                logger.warning(
                    "the file system of %s has no locks: nothing keeps a second run out of it",
                    path.parent,
                )
        except BaseException:
            self._close()
            raise
        _write(file)

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
        """Raise as `acquire` does if another process has the lock; acquires nothing."""
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
        if _locks.pop(self._path, None) is not None:
            self._path.unlink(missing_ok=True)
            self._close()

    def _close(self) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)


def _flock(descriptor: int, path: Path, kind: int) -> bool:
    """Lock a file or folder; False if its file system has no such locks.

    Raises:
        RuntimeError: another process has locked it.
    """
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        raise RuntimeError(_refusal(path)) from None
    except OSError:
        return False
    return True


def _write(descriptor: int) -> None:
    owner = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": sys.argv,
    }
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, (json.dumps(owner, indent=2) + "\n").encode(), 0)
    os.fsync(descriptor)


def _refusal(path: Path) -> str:
    owner = _read(path)
    told = "another process"
    if owner:
        told = (
            f"process {owner.get('pid')} on {owner.get('host')}, started {owner.get('started')} as "
            f"{' '.join(map(str, owner.get('command', [])))}"
        )
    return (
        f"train.output_dir {path.parent} is in use by {told}: wait for it or stop it "
        f"(kill {owner.get('pid', 'PID')}), or choose another train.output_dir"
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        owner = json.loads(path.read_bytes()[: 1 << 16])
    except (OSError, ValueError, RecursionError):
        return {}  # Deleted, empty, or cut short by a crash.
    return owner if isinstance(owner, dict) else {}
