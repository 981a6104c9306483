"""One process's word to the store that it is there, and what it asks about the others."""

import contextlib
import json
import os
import socket
import struct
import threading
import time
from typing import Any

from paddle_vl.parallel.store import server

# Between two tries to reach a store that is not there yet.
_RETRY = 0.05
# More than a store that works takes to answer what it need not wait for.
_ANSWER_SECONDS = 10.0
_MAX_ANSWER_BYTES = server.MAX_VALUE_BYTES
CONTINUE = (
    "start the run again; with train.resume_from_checkpoint=auto it goes on from its last "
    "checkpoint"
)


class Membership:
    """A connection to the store that lasts as long as this process.

    Made, it has reached the store.

    Args:
        rank, num_ranks: of this process, of the run.
        host, port: of the store.
        seconds: to wait for it.

    Raises:
        RuntimeError: the store does not come within that time.
    """

    def __init__(self, rank: int, num_ranks: int, host: str, port: int, seconds: float):
        self.rank, self.num_ranks = rank, num_ranks
        self.host, self.port = host, port
        self._lock = threading.Lock()
        self._deadline, self._seconds = time.monotonic() + seconds, seconds
        self._socket = self._connect()

    def come(self) -> None:
        """Say that this process is there, and wait until all are.

        Raises:
            RuntimeError: some do not come within the time, or one ends before; names them.
        """
        left = max(self._deadline - time.monotonic(), 0.0)
        try:
            answer = self._ask({"come": self.rank, "seconds": left}, left + _ANSWER_SECONDS)
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
        missing, gone = answer["missing"], answer["gone"]
        if gone and missing:
            raise RuntimeError(
                f"rank {self.rank}: {ranks_text(gone)} ended before {ranks_text(missing)} had "
                f"come: {logs_text(gone)} for the cause, and {CONTINUE}"
            )
        if missing:
            raise RuntimeError(
                f"rank {self.rank} has waited {self._seconds:g} s at {self._place} for "
                f"{ranks_text(missing)} to come: {logs_text(missing)}, and whether "
                f"that machine reaches this address; then {CONTINUE}"
            )

    def gone(self) -> list[int]:
        """Ranks that have ended, in that order. A store that does not answer ended with rank 0."""
        try:
            return self._ask({}, _ANSWER_SECONDS)["gone"]
        except (OSError, ValueError):
            return [0] if self.rank != 0 else []

    def tell(self, wait: dict[str, Any] | None) -> None:
        """Tell what this rank waits in, None for nothing; for those that it keeps waiting."""
        # A store that has ended has nobody to tell.
        with contextlib.suppress(OSError, ValueError):
            self._ask({"waits": wait}, _ANSWER_SECONDS)

    def waits(self) -> dict[int, dict[str, Any]]:
        """What ranks have told that they wait in; without an answer nothing."""
        try:
            told = self._ask({}, _ANSWER_SECONDS)["waits"]
        except (OSError, ValueError):
            return {}
        return {int(rank): wait for rank, wait in told.items()}

    def finish(self, problem: str | None = None) -> None:
        """Tell that this rank's work is done, or what ended it; the others need not wait for it."""
        with contextlib.suppress(OSError, ValueError):
            told = {"done": True} if problem is None else {"failed": problem}
            self._ask(told, _ANSWER_SECONDS)

    def failed(self) -> dict[int, str]:
        """Ranks that will not do their work, and why: what they said, or that they have ended.

        A store that does not answer ended with rank 0.
        """
        try:
            told = self._ask({}, _ANSWER_SECONDS)["failed"]
        except (OSError, ValueError):
            return {0: "has ended"} if self.rank != 0 else {}
        return {int(rank): problem for rank, problem in told.items()}

    @property
    def _place(self) -> str:
        return f"{self.host}:{self.port}"

    def _connect(self) -> socket.socket:
        while True:
            try:
                connection = socket.create_connection((self.host, self.port), _ANSWER_SECONDS)
            except OSError as error:
                if time.monotonic() >= self._deadline:
                    raise RuntimeError(
                        f"rank {self.rank} has waited {self._seconds:g} s for rank 0, whose store "
                        f"is to be at {self._place} ({error}): {logs_text([0])}, and whether "
                        f"this machine reaches that address; then {CONTINUE}"
                    ) from None
                time.sleep(_RETRY)
                continue
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return connection

    def _ask(self, question: dict[str, Any], seconds: float) -> dict[str, Any]:
        text = json.dumps(question).encode()
        with self._lock:
            self._socket.settimeout(seconds)
            self._socket.sendall(struct.pack("<IQ", server.ASK, len(text)) + text)
            (size,) = struct.unpack("<Q", self._receive(8))
            if size > _MAX_ANSWER_BYTES:
                raise ValueError(f"an answer of {size} bytes")
            return json.loads(self._receive(size))

    def _receive(self, size: int) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            part = self._socket.recv(size - len(parts))
            if not part:
                raise ConnectionError("the connection is closed")
            parts += part
        return bytes(parts)


def ranks_text(ranks: list[int]) -> str:
    """`rank 1`, or `ranks 1, 2`."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def logs_text(ranks: list[int]) -> str:
    """`see the log of rank 1`, or its file where both launchers' variables tell it."""
    folder = os.environ.get("PADDLE_LOG_DIR")
    if folder is None or os.environ.get("PADDLE_NNODES", "1") != "1":
        return f"see the log of {ranks_text(ranks)}"
    return "see " + ", ".join(f"{folder}/workerlog.{rank}" for rank in ranks)
