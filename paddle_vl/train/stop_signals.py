"""Stop requests to a training process: signals, and the end of its launcher.

    request                     outside of training       during training
    first SIGINT or SIGTERM     the process ends          the step ends, a checkpoint is written
    again, in one burst         -                         counts as the same request
    again, later                -                         the process ends at once
    the launcher ends           the process ends          as the first signal, within 9 seconds

A thread handles them, so that they take effect while the main thread is in a step or collective.
"""

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from paddle_vl.parallel.launcher import LAUNCHER_VARIABLE, PARENT
from paddle_vl.parallel.stop_requests import StopRequests
from paddle_vl.threads import Watch, end_process

logger = logging.getLogger(__name__)

ORPHAN_GRACE_S = 9.0
NOT_SAVED = 1
_POLL_S = 0.05


class StopSignals:
    """Handles stop requests while entered. Does nothing outside of the main thread.

    Attributes:
        received: signal that asked the training to stop, or None; SIGTERM if the launcher ended.
    """

    def __init__(self):
        self.received: int | None = None
        self._is_training, self._grace_s = False, None
        self._deadline: float | None = None
        self._requests = StopRequests()
        self._thread: Watch | None = None
        self._is_over = threading.Event()

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            self._requests.__enter__()
            self._is_over.clear()
            self._thread = Watch(self._watch, "stop-signals")
            self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._thread is not None:
            self._is_over.set()
            self._thread.join()
            self._thread = None
            self._requests.__exit__(*exception)

    def set_handlers(self) -> None:
        """Set the handlers again; importing Paddle replaces them."""
        if self._thread is not None:
            self._requests.set_handlers()

    @contextmanager
    def training(self, grace_s: float | None) -> Iterator[None]:
        """While entered, the first request only sets `received`, so that the run can save.

        Args:
            grace_s: seconds from a request until the process ends, saved or not; None for no limit.
        """
        self.set_handlers()
        self._grace_s, self._is_training = grace_s, True
        try:
            yield
        finally:
            self._is_training, self._deadline = False, None

    def _watch(self) -> None:
        # The process that started this one as a rank; None for a process from a shell, which may
        # end before its jobs.
        launcher = PARENT if "PADDLE_TRAINER_ID" in os.environ else None
        if own := os.environ.get(LAUNCHER_VARIABLE):
            launcher = int(own)
        while not self._is_over.wait(_POLL_S):
            if self._deadline is not None and time.monotonic() > self._deadline:
                _end_now("the time to stop in is over and no checkpoint of this step written")
            # An orphan's parent is process 1 or a subreaper.
            if launcher is not None and os.getppid() != launcher:
                launcher = None
                self._orphaned()
            for request in self._requests.read():
                self._requested(request.signal)

    def _requested(self, number: signal.Signals) -> None:
        if not self._is_training:
            if self.received is None:
                logger.warning("%s: the process ends; there is nothing to save", number.name)
            end_process(128 + number)
        if self.received is not None:
            _end_now(f"{number.name} again")
        self._note(number, self._grace_s, number.name)

    def _orphaned(self) -> None:
        if not self._is_training:
            logger.warning("the launcher of this process has ended, and so does this process")
            end_process(128 + signal.SIGTERM)
        if self.received is None:
            grace_s = min(ORPHAN_GRACE_S, self._grace_s or ORPHAN_GRACE_S)
            self._note(signal.SIGTERM, grace_s, "the launcher has ended")
        else:
            deadline = time.monotonic() + ORPHAN_GRACE_S
            self._deadline = min(deadline, self._deadline or deadline)

    def _note(self, number: int, grace_s: float | None, reason: str) -> None:
        if grace_s is not None:
            self._deadline = time.monotonic() + grace_s
        self.received = int(number)
        logger.warning(
            "%s: finishing this step, then saving a checkpoint%s; once more ends at once",
            reason,
            "" if grace_s is None else f" within {grace_s:g} s",
        )


def _end_now(reason: str) -> None:
    logger.warning("%s: ended at once; continue with train.resume_from_checkpoint=auto", reason)
    end_process(NOT_SAVED)
