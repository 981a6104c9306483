"""Signals that ask a process to stop, read from a pipe.

Python runs its own signal handlers only when the main thread returns from what it is in, which may
be a step or a collective of minutes, and once for several signals of a kind. What it writes into a
pipe when a signal arrives is there at once, and for each.
"""

import os
import signal
import time
from types import FrameType
from typing import NamedTuple

# Of Slurm and Kubernetes SIGTERM; of a terminal that is closed SIGHUP.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Seconds within which a signal repeats the one before: Paddle's launcher sends SIGTERM three times,
# 0.2 s apart, and `timeout` signals a process and then its group. A person takes longer.
_BURST_S = {signal.SIGINT: 0.2, signal.SIGTERM: 1.0, signal.SIGHUP: 1.0}


class StopRequest(NamedTuple):
    """A signal that asked to stop; `is_again` where there was a request before it."""

    signal: signal.Signals
    is_again: bool


class StopRequests:
    """While entered, stop signals are read here instead of acting on the process.

    Only the main thread can enter it. SIGHUP stays ignored under nohup.

    Attributes:
        reader: the descriptor to wait at.
    """

    def __init__(self):
        self._last: float | None = None

    def __enter__(self) -> "StopRequests":
        self.reader, self._writer = os.pipe()
        for descriptor in (self.reader, self._writer):
            os.set_blocking(descriptor, False)
        self._previous_wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._previous = {
            number: signal.getsignal(number)
            for number in STOP_SIGNALS
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN
        }
        self.set_handlers()
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        signal.set_wakeup_fd(self._previous_wakeup)
        os.close(self._writer)
        os.close(self.reader)

    def set_handlers(self) -> None:
        """Call it when Paddle was imported meanwhile: it sets handlers of its own."""
        for number in self._previous:
            signal.signal(number, _left_to_the_pipe)

    def read(self) -> list[StopRequest]:
        """What has come since the last time; repetitions within a burst are left out."""
        try:
            numbers = os.read(self.reader, 64)
        except BlockingIOError:
            return []
        requests = []
        for number in numbers:
            if number not in self._previous:
                continue
            now, last = time.monotonic(), self._last
            self._last = now
            if last is None or now - last > _BURST_S[number]:
                requests.append(StopRequest(signal.Signals(number), last is not None))
        return requests


def _left_to_the_pipe(number: int, frame: FrameType | None) -> None:
    """Python has written the number into the pipe already."""
