"""Threads of this package, none of which dies unnoticed.

Python prints the traceback of a thread that fails and goes on without it; hours later a watch is
missed. Whoever joins a `JoinedThread` gets its error. A `Watch`, for which nobody waits, ends the
process instead.
"""

import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

logger = logging.getLogger(__name__)

_FAILED = 1


class JoinedThread(threading.Thread):
    """A thread whose `join` raises what its target raised."""

    _error: BaseException | None = None

    def run(self) -> None:
        try:
            super().run()
        except BaseException as error:
            self._error = error

    def join(self, timeout: float | None = None) -> None:
        super().join(timeout)
        if self._error is not None:
            raise self._error


class Watch(threading.Thread):
    """A daemon thread; an exception in it ends the process with exit code 1."""

    def __init__(self, target: Callable[..., Any], name: str, args: Sequence[Any] = ()):
        super().__init__(target=target, name=name, args=args, daemon=True)

    def run(self) -> None:
        try:
            super().run()
        except BaseException:
            logger.critical(
                "the thread %s failed, without which this process must not go on: it ends",
                self.name,
                exc_info=True,
            )
            end_process(_FAILED)


def end_process(code: int) -> None:
    """End this process from any thread; loader workers end with it."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue  # A terminal or pipe that is gone.
    os._exit(code)
