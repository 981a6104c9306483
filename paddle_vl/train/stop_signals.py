"""Requests to stop: signals, and the end of the launcher that started this process.

A thread waits for them, because Python runs its own signal handlers only when the main thread
returns from what it is in, which may be a step or a collective of minutes.

    signal                      outside of training       while a run trains
    first SIGINT or SIGTERM     the process ends          the step ends, a checkpoint is written
    again, in one burst         -                         counts as the same request
    again, later                -                         the process ends at once
    the launcher ends           the process ends          as the first signal, within 9 seconds

A launcher repeats itself (Paddle's sends SIGTERM three times, 0.2 s apart; `timeout` signals a
process and its group), hence the bursts.
"""

import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from paddle_vl.parallel.launcher import LAUNCHER_VARIABLE

logger = logging.getLogger(__name__)

NOT_SAVED = 1
ORPHAN_GRACE_S = 9.0
# Of Slurm and Kubernetes SIGTERM, of a terminal that is closed SIGHUP.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Seconds within which a repeated signal belongs to the one before.
_BURST_S = {signal.SIGINT: 0.2, signal.SIGTERM: 1.0, signal.SIGHUP: 1.0}


class StopSignals:
    """While entered, waits for requests to stop.

    Attributes:
        received: number of the signal that asked a training run to stop, None so far; SIGTERM for a
            launcher that has ended.
    """

    def __init__(self):
        self.received: int | None = None
        self._is_training, self._grace_s = False, None
        self._last_signal = -1.0
        self._deadline: float | None = None
        self._previous: dict[int, object] = {}
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "StopSignals":
        # Only the main thread may set handlers; elsewhere the process's own stay.
        if threading.current_thread() is not threading.main_thread():
            return self
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._previous_wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        for number in SIGNALS:
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # nohup
            self._previous[number] = signal.signal(number, _left_to_the_thread)
        self._thread = threading.Thread(target=self._watch, name="stop-signals", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._thread is None:
            return
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()
        signal.set_wakeup_fd(self._previous_wakeup)
        # The thread ends when nobody can write to it any more.
        os.close(self._writer)
        self._thread.join()
        os.close(self._reader)
        self._thread = None

    @contextmanager
    def training(self, grace_s: float | None) -> Iterator[None]:
        """While entered there is something to save before the process ends.

        Args:
            grace_s: seconds after a request at which it ends, saved or not; None for no limit.
        """
        self._grace_s, self._is_training = grace_s, True
        try:
            yield
        finally:
            self._is_training, self._deadline = False, None

    def _watch(self) -> None:
        poll = select.poll()
        poll.register(self._reader, select.POLLIN)
        launcher = _launcher()
        if launcher is not None:
            poll.register(launcher, select.POLLIN)
        try:
            while True:
                if self._deadline is not None and time.monotonic() >= self._deadline:
                    self._end_now("the time to stop in is over, no checkpoint of this step")
                for descriptor, _ in poll.poll(self._milliseconds_left()):
                    if descriptor == launcher:
                        poll.unregister(launcher)
                        self._orphaned()
                        continue
                    numbers = os.read(self._reader, 64)
                    if not numbers:
                        return
                    for number in numbers:
                        if number in SIGNALS:
                            self._note(signal.Signals(number))
        finally:
            if launcher is not None:
                os.close(launcher)

    def _milliseconds_left(self) -> float | None:
        if self._deadline is None:
            return None
        return max(0.0, self._deadline - time.monotonic()) * 1000

    def _note(self, number: signal.Signals) -> None:
        now, last = time.monotonic(), self._last_signal
        self._last_signal = now
        if not self._is_training:
            if self.received is None:
                logger.warning("%s: the process ends; there is nothing to save", number.name)
            _exit(128 + number)
        if self.received is None:
            self._request(number, self._grace_s, number.name)
        elif last < 0 or now - last > _BURST_S[number]:
            self._end_now(f"{number.name} again")

    def _orphaned(self) -> None:
        if not self._is_training:
            logger.warning("the launcher of this process has ended, and so does this process")
            _exit(128 + signal.SIGTERM)
        grace_s = min(ORPHAN_GRACE_S, self._grace_s or ORPHAN_GRACE_S)
        self._request(signal.SIGTERM, grace_s, "the launcher has ended")

    def _request(self, number: int, grace_s: float | None, reason: str) -> None:
        if grace_s is not None:
            deadline = time.monotonic() + grace_s
            self._deadline = min(deadline, self._deadline or deadline)
        if self.received is None:
            self.received = int(number)
            limit = "" if grace_s is None else f" within {grace_s:g} s"
            logger.warning(
                "%s: finishing this step, then saving a checkpoint%s; once more ends at once",
                reason,
                limit,
            )

    def _end_now(self, reason: str) -> None:
        logger.warning("%s: ended at once; continue with train.resume_from_checkpoint=auto", reason)
        _exit(NOT_SAVED)


def _left_to_the_thread(number: int, frame: FrameType | None) -> None:
    """Python's handler; the signal's number went to the thread already."""


def _launcher() -> int | None:
    """A descriptor that is readable once the launcher of this process has ended, if it has one.

    Not the number of its parent: that may be 1 from the start, in a container.
    """
    own = os.environ.get(LAUNCHER_VARIABLE)
    if own is None and "PADDLE_TRAINER_ID" not in os.environ:
        return None  # Started by a shell, which may end before its jobs.
    parent = os.getppid()
    if own is not None and parent != int(own):
        logger.warning("the launcher of this process has ended, and so does this process")
        _exit(128 + signal.SIGTERM)
    try:
        return os.pidfd_open(parent)
    except OSError:
        return None  # Outside of this container, or a kernel before 5.3.


def _exit(code: int) -> None:
    """End this process from a thread; data workers end with it."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue  # A terminal or pipe that is gone.
    os._exit(code)
