"""Says what is waited for when a wait gets long, while it lasts."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

logger = logging.getLogger(__name__)


class WaitWatch:
    """Around waits of one thread; a second one warns when a wait exceeds a time, again each time
    that it has doubled, and once when it is over.

        with WaitWatch(30.0, loader.waiting_for) as watch:
            with watch.waiting("step 7"):
                batch = next(loader)

    Args:
        after_s: seconds until the first warning.
        describe: what is waited for; called in the other thread.
    """

    def __init__(self, after_s: float, describe: Callable[[], str]):
        self._after_s, self._describe = after_s, describe
        self._changed = threading.Condition()
        self._wait: _Wait | None = None
        self._thread: threading.Thread | None = None

    def waiting(self, who: str) -> "_Wait":
        """A wait that lasts as long as the block."""
        return _Wait(self, who, self._after_s)

    def close(self) -> None:
        """End the thread. The watch can be used again, and starts a new one."""
        with self._changed:
            thread, self._thread = self._thread, None
            self._changed.notify()
        if thread is not None:
            thread.join()

    def __enter__(self) -> "WaitWatch":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _begin(self, wait: "_Wait") -> None:
        with self._changed:
            self._wait = wait
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, daemon=True)
                self._thread.start()
            self._changed.notify()

    def _end(self) -> None:
        with self._changed:
            self._wait = None

    def _run(self) -> None:
        with self._changed:
            while self._thread is threading.current_thread():
                left = None if self._wait is None else self._wait.left()
                if left is None or left > 0:
                    self._changed.wait(left)
                else:
                    self._wait.warn(self._describe())


class WatchedData(Protocol):
    """Batches that can tell what the next one waits for; see PrefetchLoader."""

    def __iter__(self) -> Iterator[Any]: ...

    def waiting_for(self) -> str: ...


def watched(data: WatchedData, after_s: float, who: str) -> Iterator[Any]:
    """The same batches, each waited for under a watch."""
    batches = iter(data)
    with WaitWatch(after_s, data.waiting_for) as watch:
        while True:
            with watch.waiting(who):
                batch = next(batches, None)
            if batch is None:
                return
            yield batch


class _Wait:
    def __init__(self, watch: WaitWatch, who: str, after_s: float):
        self._watch, self._who, self._next_s = watch, who, after_s
        self._begin = 0.0
        self._has_warned = False

    def __enter__(self) -> None:
        self._begin = time.monotonic()
        self._watch._begin(self)

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        self._watch._end()
        if self._has_warned and kind is None:
            waited_s = time.monotonic() - self._begin
            logger.warning("%s goes on: its data came after %.3g s", self._who, waited_s)

    def left(self) -> float:
        """Seconds until the next warning is due."""
        return self._begin + self._next_s - time.monotonic()

    def warn(self, what: str) -> None:
        logger.warning("%s has waited %.3g s for data: %s", self._who, self._next_s, what)
        self._has_warned = True
        self._next_s *= 2
