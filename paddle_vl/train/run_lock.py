"""Lock of an output folder, so that one run at a time writes there.

`run.lock` names the owning process, which has an advisory lock on the file (flock); the system
releases it when the process ends. The owner also updates the file's time, for file systems that do
not share flock between machines.
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

logger = logging.getLogger(__name__)

LOCK_FILE = "run.lock"
_BEAT_S = 10.0
# A lock of another machine is stale after this many seconds without renewal.
_STALE_S = 45.0
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_locks: dict[Path, "RunLock"] = {}


class RunLock:
    """A locked output folder, until `release` or the end of the process.

    Acquiring a folder twice in one process returns the same lock.
    """

    def __init__(self, path: Path, descriptor: int):
        self._path, self._descriptor = path, descriptor
        self._released = threading.Event()
        threading.Thread(target=self._beat, name="run-lock", daemon=True).start()

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
        descriptor, is_locked = _opened(path)
        with ExitStack() as on_failure:
            on_failure.callback(os.close, descriptor)
            _check_not_alive(path, descriptor, is_locked)
            _write(descriptor)
            on_failure.pop_all()
        lock = _locks[path] = cls(path, descriptor)
        return lock

    @staticmethod
    def check(output_dir: Path) -> None:
        """Raise as `acquire` does if a process of this machine has the lock; acquires nothing."""
        path = output_dir.resolve() / LOCK_FILE
        if path in _locks or not path.is_file():
            return
        descriptor = os.open(path, os.O_RDONLY)
        try:
            # Shared, as all ranks of a run may check at once.
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RuntimeError(_refusal(path, _read(descriptor))) from None
        except OSError:
            return  # No locks on this file system.
        finally:
            os.close(descriptor)

    def release(self) -> None:
        """Unlock the folder."""
        if self._released.is_set():
            return
        self._released.set()
        del _locks[self._path]
        self._path.unlink(missing_ok=True)
        os.close(self._descriptor)

    def _beat(self) -> None:
        while not self._released.wait(_BEAT_S):
            try:
                os.utime(self._path)
            except OSError as error:
                logger.warning("%s cannot be renewed: %s", self._path, error)


def _opened(path: Path) -> tuple[int, bool]:
    """The opened file, and whether it is locked; not every file system has locks."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = _read(descriptor)
            os.close(descriptor)
            raise RuntimeError(_refusal(path, owner)) from None
        except OSError:
            return descriptor, False
        try:
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return descriptor, True
        except FileNotFoundError:
            pass
        # Its owner has removed it in the meantime.
        os.close(descriptor)


def _check_not_alive(path: Path, descriptor: int, is_locked: bool) -> None:
    """If flock proves nothing (other machine, no locks), wait whether the owner renews the file.

    Raises:
        RuntimeError: it does.
    """
    owner = _read(descriptor)
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


def _read(descriptor: int) -> dict[str, Any]:
    text = os.pread(descriptor, 1 << 16, 0).decode(errors="replace")
    try:
        owner = json.loads(text)
    except ValueError:
        return {}  # Empty, or cut short by a crash.
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
