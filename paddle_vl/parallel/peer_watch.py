"""Ends this process when another rank has failed and this one waits for it all the same.

Gloo notices that a peer has ended, and the operation raises. NCCL does not: the main thread stays
in it until Paddle's time-out. A rank that fails says so to the store of the run, or the store
notices its end; a thread of every other rank asks it, and after some seconds ends a process whose
main thread has not come back by itself.
"""

import logging
import os
import sys
import threading
import time
import traceback
from pathlib import Path

import paddle_vl
from paddle_vl.parallel.store.membership import CONTINUE, Membership, logs_text

logger = logging.getLogger(__name__)

GRACE_S = 10.0
_ASK_EVERY_S = 1.0
_PACKAGE = str(Path(paddle_vl.__file__).parent)
_FAILED = 1


class PeerWatch:
    """While entered, watches the other ranks, once the processes of the run have met.

    Left without an exception it tells the store that this rank is done, and its end is no failure
    for the others; left with one it tells them which.

    Args:
        grace_s: for the main thread to come back by itself after another rank has failed.
    """

    def __init__(self, grace_s: float = GRACE_S):
        self._grace_s = grace_s
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="peer-watch", daemon=True)

    def __enter__(self) -> "PeerWatch":
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._is_over.set()
        membership = _membership()
        if membership is not None:
            membership.finish(None if error is None else _first_line(error))

    def _watch(self) -> None:
        failed: dict[int, str] = {}
        while not failed:
            if self._is_over.wait(_ASK_EVERY_S):
                return
            membership = _membership()
            if membership is not None:
                failed = membership.failed()
        begin = time.monotonic()
        if self._is_over.wait(self._grace_s):
            return
        rank, problem = next(iter(failed.items()))
        logger.error(
            "rank %d: rank %d %s, and this rank has not come back for %.0f s from %s: ended; "
            "%s for the cause, and %s",
            membership.rank,
            rank,
            problem,
            time.monotonic() - begin,
            _place_of_main_thread(),
            logs_text([rank]),
            CONTINUE,
        )
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(_FAILED)


def _membership() -> Membership | None:
    # Paddle is loaded when the processes meet, and not before.
    rendezvous = sys.modules.get("paddle_vl.parallel.store.rendezvous")
    return None if rendezvous is None else rendezvous.membership()


def _first_line(error: BaseException) -> str:
    text = next(iter(str(error).strip().splitlines()), "")
    return f"failed with {type(error).__name__}: {text}"


def _place_of_main_thread() -> str:
    """The innermost place of this package that the main thread is in."""
    frame = sys._current_frames()[threading.main_thread().ident]
    stack = traceback.extract_stack(frame)
    own = [entry for entry in stack if entry.filename.startswith(_PACKAGE)]
    entry = (own or stack)[-1]
    path = Path(entry.filename)
    return f"{path.parent.name}/{path.name}:{entry.lineno} in {entry.name}"
