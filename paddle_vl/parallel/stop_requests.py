"""Signals that ask a process to stop, read from a pipe.

Python runs signal handlers only when the main thread returns to the interpreter, which a step or a
collective may delay by minutes, and once for several signals of a kind. The wakeup pipe gets every
signal at once.
"""

import os
import signal
import time
from typing import NamedTuple

# Slurm and Kubernetes send SIGTERM, a closed terminal SIGHUP.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Within this many seconds a signal counts as a repetition: Paddle's launcher sends SIGTERM three
# times, 0.2 s apart, and `timeout` signals a process and then its group. A person takes longer.
_BURST_S = {signal.SIGINT: 0.2, signal.SIGTERM: 1.0, signal.SIGHUP: 1.0}


class StopRequest(NamedTuple):
    """A stop signal; `is_again` if it is not the first request."""

    signal: signal.Signals
    is_again: bool


class StopRequests:
    """Inside the block, stop signals are read here instead of acting on the process.

    Only the main thread can enter it. SIGHUP stays ignored under nohup.
    """

    def __init__(self):
        self._last: float | None = None

    def __enter__(self) -> "StopRequests":
        self._reader, self._writer = os.pipe()
        for descriptor in (self._reader, self._writer):
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
        os.close(self._reader)

    def set_handlers(self) -> None:
        """Set the handlers; call it again after importing Paddle, which replaces them."""
        for number in self._previous:
            # Nothing to do: Python has written the number into the pipe already.
            signal.signal(number, lambda number, frame: None)

    def read(self) -> list[StopRequest]:
        """Requests since the last call; repetitions within a burst are left out."""
        try:
            numbers = os.read(self._reader, 64)
        except BlockingIOError:
            return []
        requests = []
        for number in numbers:
            if number not in self._previous:
                continue
            number = signal.Signals(number)
            now, last = time.monotonic(), self._last
            self._last = now
            if last is None or now - last > _BURST_S[number]:
                requests.append(StopRequest(number, last is not None))
        return requests
