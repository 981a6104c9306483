"""A rank's connection to the store, for registration, and news of other ranks.

Gloo notices that a peer has ended or is late, and the operation raises without naming it. NCCL
does not notice: the main thread stays in the collective until Paddle's timeout. `PeerWatch` names
the rank, and ends a process that stays. Does not load Paddle.
"""

import contextlib
import json
import logging
import os
import re
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import paddle_vl
from paddle_vl.parallel.store import server
from paddle_vl.processes import in_one_line
from paddle_vl.threads import Watch, end_process

logger = logging.getLogger(__name__)

# Seconds between two attempts to reach a store that has not started yet.
_RETRY_S = 0.05
# A working store answers much faster.
_ANSWER_S = 10.0
# For the main thread to return by itself after another rank has failed.
_GRACE_S = 10.0
# fleetrun looks at its ranks once a second, and shows the log of the first that it finds ended:
# that of the cause, if the others end later.
_LAUNCHER_S = 2.0
# Seconds for the store to notice that a rank has ended, or that others give up too.
_NOTICE_S = 2.0
_OF_GLOO = re.compile(r".*gloo(?:/transport| group).*")
_POLL_S = 1.0
_PACKAGE = str(Path(paddle_vl.__file__).parent)
_EXIT_CODE = 1
CONTINUE = (
    "start the run again; with train.resume_from_checkpoint=auto it goes on from its last "
    "checkpoint"
)
# The connection of this process, once all ranks have met. Kept here, as the rendezvous loads
# Paddle, for which the watch must not wait.
of_this_process: list["Membership"] = []


class Membership:
    """A connection to the store that lasts as long as this process.

    Args:
        rank, num_ranks: of this process; world size.
        host, port: of the store.
        seconds: to wait for the store, and for other ranks.

    Raises:
        RuntimeError: the store cannot be reached within that time.
    """

    def __init__(self, rank: int, num_ranks: int, host: str, port: int, seconds: float):
        self.rank, self.num_ranks, self.seconds = rank, num_ranks, seconds
        self._place, self._lock = f"{host}:{port}", threading.Lock()
        self._deadline = time.monotonic() + seconds
        while True:
            try:
                self._socket = socket.create_connection((host, port), _ANSWER_S)
                break
            except OSError as error:
                if time.monotonic() > self._deadline:
                    raise RuntimeError(
                        f"rank {rank} has waited {seconds:g} s for rank 0, whose store is to be at "
                        f"{self._place} ({error}): {logs_text([0])}, and whether this machine "
                        f"reaches that address; then {CONTINUE}"
                    ) from None
                time.sleep(_RETRY_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._answers = self._socket.makefile("rb")

    def join(self) -> None:
        """Register this rank, and wait until all ranks have joined.

        Raises:
            RuntimeError: some do not join within the time, or one ends before; names them.
        """
        try:
            answer = self.meet("start", seconds=max(self._deadline - time.monotonic(), 0))
        except (OSError, ValueError) as error:
            raise RuntimeError(
                f"rank {self.rank}: the store of this run at {self._place} has ended, or another "
                f"program answers there ({error}): {logs_text([0])}, and {CONTINUE}"
            ) from None
        if "refused" in answer:
            raise RuntimeError(
                f"rank {self.rank} is refused by the store at {self._place}: {answer['refused']}. "
                "Two runs have the same address, or the launcher's variables are wrong: give each "
                "run ports of its own"
            )
        if missing := answer["missing"]:
            waited = f"has waited {self.seconds:g} s at {self._place} for {ranks_text(missing)}"
            if ended := answer["ended"]:
                waited = f"waits for {ranks_text(missing)}, and {ranks_text(ended)} ended meanwhile"
            raise RuntimeError(
                f"rank {self.rank} {waited}: {logs_text(ended or missing)}, and whether that "
                f"machine reaches this address; then {CONTINUE}"
            )

    def wait_for_all(self) -> None:
        """Wait for all ranks to come here, in the order in which all of them call this.

        Raises:
            RuntimeError: some do not come within the time, or have ended; names them.
        """
        try:
            answer = self.meet("all")
        except (OSError, ValueError):
            answer = {"missing": [0], "ended": [0], "failed": []}
        if missing := answer["missing"]:
            failed = dict(answer["failed"])
            ended = answer["ended"] or list(failed)[:1]
            if ended:
                time.sleep(_LAUNCHER_S)
            raise RuntimeError(self.failure_text(ended, missing, failed))

    def meet(
        self,
        name: str,
        ranks: Sequence[int] | None = None,
        value: Any = None,
        seconds: float | None = None,
    ) -> dict[str, Any]:
        """Exchange values between these ranks, by default all; see `server._Connection._meet`."""
        seconds = self.seconds if seconds is None else seconds
        return self.ask({"meet": [name, ranks, value, seconds]}, seconds + _ANSWER_S)

    def state(self) -> dict[str, Any]:
        """Ranks that have `ended`, in that order, and the problem of each that `failed` or ended
        without reporting success. A store that does not answer ended with rank 0."""
        try:
            answer = self.ask({})
        except (OSError, ValueError):
            if self.rank == 0:
                return {"ended": [], "failed": {}}
            return {"ended": [0], "failed": {0: server.ENDED}}
        return answer | {"failed": dict(answer["failed"])}

    def report_end(self, problem: str | None = None) -> None:
        """Report that this rank is done, or the problem that ends it."""
        # Without a store there is nobody left to read it.
        with contextlib.suppress(OSError, ValueError):
            self.ask({"end": problem})

    def failure_text(
        self,
        ended: Sequence[int],
        late: Sequence[int],
        failed: Mapping[int, str],
        problem: str = "too late",
    ) -> str:
        """Why an operation failed: the problem of the first rank that ended, or the ranks that have
        ended without one; or else those that are late.

        Args:
            failed: problems by rank.
        """
        culprits = ended or late
        if ended and failed.get(ended[0], server.ENDED) != server.ENDED:
            culprits, problem = ended[:1], f"rank {ended[0]} {failed[ended[0]]}"
        elif culprits:
            got = f"got no answer from {ranks_text(late)}"
            problem = f"{ranks_text(ended)} ended" if ended else got
        see = f"{logs_text(culprits)} for the cause, and " if culprits else ""
        return f"rank {self.rank}: a collective failed: {problem}; {see}{CONTINUE}"

    def ask(self, request: Mapping[str, Any], seconds: float = _ANSWER_S) -> dict[str, Any]:
        """The store's answer to a request, see `server._Connection._reply`.

        Raises:
            OSError, ValueError: no answer within that time, or no store's.
        """
        text = json.dumps({"rank": self.rank, **request}).encode()
        with self._lock:
            self._socket.settimeout(seconds)
            self._socket.sendall(struct.pack("<IQ", server.ASK, len(text)) + text)
            return json.loads(self._answers.readline(server.MAX_VALUE_BYTES))


class PeerWatch:
    """Inside the block, ends this process if another rank has failed and this one keeps waiting.

    A thread polls the store once per second after the rendezvous. On exit it reports success or the
    exception to the store.

    Raises:
        RuntimeError: in place of an error of gloo; names the ranks that have ended or are late.
    """

    def __init__(self):
        self._is_over = threading.Event()
        self._thread = Watch(self._watch, "peer-watch")

    def __enter__(self) -> "PeerWatch":
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._is_over.set()
        problem = None
        if error is not None:
            problem = f"failed with {in_one_line(error)}"
        for membership in of_this_process:
            membership.report_end(problem)
            # In a backward pass Paddle hides it in the text of another error.
            if error is not None and _OF_GLOO.search(str(error)):
                raise RuntimeError(_explained(membership, str(error))) from error

    def _watch(self) -> None:
        failed: dict[int, str] = {}
        while not failed:
            if self._is_over.wait(_POLL_S):
                return
            for membership in of_this_process:
                failed = membership.state()["failed"]
        if self._is_over.wait(_GRACE_S):
            return
        rank, problem = next(iter(failed.items()))
        logger.error(
            "rank %d: rank %d %s, and this rank has not come back for %.0f s from %s: ended; "
            "%s for the cause, and %s",
            of_this_process[0].rank,
            rank,
            problem,
            _GRACE_S,
            _place_of_main_thread(),
            logs_text([rank]),
            CONTINUE,
        )
        end_process(_EXIT_CODE)


def _explained(membership: Membership, text: str) -> str:
    """Why an operation of gloo failed, after this rank has reported so."""
    # Gloo reports a closed connection as TIMEOUT too, but then names the peer.
    is_late = "TIMEOUT" in text and re.search(r"pair_rank = \d", text) is None
    end = time.monotonic() + _NOTICE_S
    while not (ended := membership.state()["ended"]) and time.monotonic() < end:
        time.sleep(_RETRY_S)
    # Ranks that waited for the same one have given up by now.
    failed = membership.state()["failed"]
    late = [rank for rank in range(membership.num_ranks) if is_late and rank not in failed]
    return membership.failure_text(ended, late, failed, _OF_GLOO.findall(text)[0])


def ranks_text(ranks: Sequence[int]) -> str:
    """`rank 1`, or `ranks 1, 2`."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def logs_text(ranks: Sequence[int]) -> str:
    """`see the log of rank 1`, or the path of its file if the launcher's variables give it."""
    folder = os.environ.get("PADDLE_LOG_DIR")
    if folder is None or os.environ.get("PADDLE_NNODES", "1") != "1":
        return f"see the log of {ranks_text(ranks)}"
    return "see " + ", ".join(f"{folder}/workerlog.{rank}" for rank in ranks)


def _place_of_main_thread() -> str:
    """The main thread's innermost frame in this package."""
    frames = sys._current_frames()
    stack = traceback.extract_stack(frames[threading.main_thread().ident or 0])
    own = [entry for entry in stack if entry.filename.startswith(_PACKAGE)]
    entry = (own or stack)[-1]
    path = Path(entry.filename)
    return f"{path.parent.name}/{path.name}:{entry.lineno} in {entry.name}"
