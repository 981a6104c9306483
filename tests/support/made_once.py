"""What the workers of a session of tests share: the first that asks makes it."""

import fcntl
from collections.abc import Callable
from pathlib import Path

import pytest


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """A folder of the session, which no test changes.

    Args:
        make: called with its path, which does not exist, in one of the workers.
    """
    base = factory.getbasetemp()
    folder = (base.parent if base.name.startswith("popen-") else base) / name
    with open(folder.with_suffix(".made"), "a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.seek(0)
        if not lock.read():
            make(folder)
            lock.write("made")
    return folder
