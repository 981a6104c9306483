"""Ctrl-C and SIGTERM as a wish to stop after the current step."""

import logging
import signal
import threading
from types import FrameType

logger = logging.getLogger(__name__)
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """While entered, notes the first signal; a second one acts as if this were not here.

    Attributes:
        received: number of the signal, None so far.
    """

    def __init__(self):
        self.received: int | None = None
        self._previous: dict[int, object] = {}

    def __enter__(self) -> "StopSignals":
        # Only the main thread may set handlers; elsewhere the process's own stay.
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *exception: object) -> None:
        self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        self._restore()
        logger.warning(
            "%s: finishing this step, then saving a checkpoint; once more stops at once",
            signal.Signals(number).name,
        )

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()
