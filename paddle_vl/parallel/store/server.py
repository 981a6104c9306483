"""The key-value store of a run: a separate process that rank 0 starts and that ends with rank 0.

It is a server for Paddle 3.3's client of TCPStore, on every rank, rank 0 included. Paddle's own
server listens on all addresses of the machine, takes 45 ms for each answer, has no limit for a
wait, and does not notice that a rank has ended. Beyond that protocol every rank registers here, so
that a rank that is missing or has ended can be named, and ranks meet. Does not load Paddle.

A message is a command (4 bytes, unsigned), a text (8 bytes for the length, then UTF-8) and the
arguments of the command; numbers are little-endian. A connection has one open request at a time.
"""

import asyncio
import json
import socket
import struct
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

# Commands and replies of Paddle's store, and one of ours: a request in JSON, answered by a line.
ADD, GET, CHECK, SET, WAIT = range(5)
ASK = 64
STOP_WAIT, READY, NOT_READY = 1, 2, 3
# Setting this key stores nothing; it sets the namespace of all later keys of the connection.
# Paddle's clients put a slash before every key.
NAMESPACE = "/namespace"
# The problem of a rank that ends without a report.
ENDED = "has ended"

# The limits of Paddle's own server; a client that exceeds them is not Paddle's.
MAX_KEY_BYTES, MAX_VALUE_BYTES = 1 << 14, 1 << 24
_BACKLOG = 4096
# Between two looks whether the client of a waiting request is still there.
_LOOK_S = 1.0
# After rank 0 has ended the other ranks have this long to learn of it; then this process ends.
_SECONDS_AFTER_RANK_0 = 2.0


class Store:
    """Values by key, and the state of every rank.

    Args:
        num_ranks: world size.
        timeout: seconds to wait for a key.

    Attributes:
        joined: ranks that have registered.
        ended: those whose connection is closed, in order of time.
        failed: the problem of each that reported one, or ended without reporting success.
        meetings: what ranks have brought to each open meeting.
        last: what each rank brought to its last meeting.
    """

    def __init__(self, num_ranks: int, timeout: float):
        self.num_ranks, self.timeout = num_ranks, timeout
        self.values: dict[str, bytes] = {}
        self.joined: set[int] = set()
        self.ended: list[int] = []
        self.failed: dict[int, str] = {}
        self.meetings: dict[str, dict[int, Any]] = {}
        self.last: dict[int, Any] = {}
        # Of keys and meetings for which someone waits.
        self._events: dict[str, asyncio.Event] = {}

    def put(self, key: str, value: bytes) -> None:
        self.values[key] = value
        self.tell(key)

    def fail(self, rank: int, problem: str | None) -> None:
        """Record the problem of a rank, if any, and have everyone who waits look."""
        if problem is not None:
            self.failed.setdefault(rank, problem)
        for name in list(self._events):
            self.tell(name)

    def tell(self, name: str) -> None:
        if event := self._events.pop(name, None):
            event.set()

    async def wait(
        self, name: str, is_over: Callable[[], object], seconds: float, reader: asyncio.StreamReader
    ) -> None:
        """Wait for at most that time; asks again whenever the name is told."""
        end = time.monotonic() + seconds
        while not is_over() and (left := end - time.monotonic()) > 0:
            if reader.at_eof() or reader.exception() is not None:
                raise ConnectionError("the client has ended")
            event = self._events.setdefault(name, asyncio.Event())
            # The two are one class from Python 3.11 on.
            with suppress(TimeoutError, asyncio.TimeoutError):
                await asyncio.wait_for(event.wait(), min(left, _LOOK_S))


class _Connection:
    """One client. If it registered a rank, the end of the connection is the end of that rank."""

    def __init__(self, store: Store, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self.store, self.reader, self.writer = store, reader, writer
        self.namespace = ""
        self.rank: int | None = None
        self.problem: str | None = ENDED
        self._socket = writer.get_extra_info("socket")

    async def serve(self) -> None:
        # A malformed message closes the connection, like the end of the client or of the server.
        with suppress(asyncio.IncompleteReadError, asyncio.CancelledError, OSError, ValueError,
                      TypeError, LookupError):  # fmt: skip
            while True:
                await self._answer((await self._read("<I"))[0])
        self.writer.close()
        if self.rank is not None:
            self.store.ended.append(self.rank)
            self.store.fail(self.rank, self.problem)

    async def _answer(self, command: int) -> None:
        store = self.store
        text = (await self._bytes(MAX_VALUE_BYTES if command == ASK else MAX_KEY_BYTES)).decode()
        key = f"{self.namespace}\n{text}"
        if command == ASK:
            answer = json.dumps(await self._reply(json.loads(text)))
            self.writer.write(f"{answer}\n".encode())
        elif command == SET:
            value = await self._bytes(MAX_VALUE_BYTES)
            if text == NAMESPACE:
                self.namespace = value.decode()
            else:
                store.put(key, value)
        elif command == ADD:
            # Read first: another client may add to the value while this one's number arrives.
            (number,) = await self._read("<q")
            # The value is a decimal number; a missing one counts as 0.
            total = int(store.values.get(key, b"0")) + number
            store.put(key, str(total).encode())
            self.writer.write(struct.pack("<q", total))
        elif command == GET:
            value = store.values.get(key, b"")
            self.writer.write(struct.pack("<Q", len(value)) + value)
        elif command == CHECK:
            self.writer.write(struct.pack("<i", READY if key in store.values else NOT_READY))
        elif command == WAIT:
            await store.wait(
                key, lambda: key in store.values or store.ended, store.timeout, self.reader
            )
            # Without the key the client is told that the connection is closed.
            store.values[key]
            self.writer.write(struct.pack("<i", STOP_WAIT))
        else:
            raise ValueError(f"command {command}")

    async def _reply(self, request: dict[str, Any]) -> dict[str, Any]:
        """Register the rank with its first request; `{"end": problem}`, null on success, reports
        how it ends, and `{"meet": ...}` has the arguments of `_meet`."""
        store, rank = self.store, request["rank"]
        if self.rank is None:
            if rank in store.joined:
                return {"refused": f"another process has joined as rank {rank}"}
            if rank not in range(store.num_ranks):
                told = f"this run has ranks 0 to {store.num_ranks - 1}, and no rank {rank}"
                return {"refused": told}
            self.rank = rank
            store.joined.add(rank)
        if "end" in request:
            self.problem = request["end"]
            store.fail(rank, self.problem)
        meeting = await self._meet(rank, *request["meet"]) if "meet" in request else {}
        return {"ended": store.ended, "failed": list(store.failed.items()), **meeting}

    async def _meet(
        self, rank: int, name: str, ranks: list[int] | None, value: Any, seconds: float
    ) -> dict[str, Any]:
        """Exchange values between these ranks, by default all.

        Returns:
            The `values` that are not null, by rank; when the time is over, or one of the ranks has
            ended or failed, also those that are `missing`, and what each brought `last`.
        """
        store, expected = self.store, range(self.store.num_ranks) if ranks is None else ranks
        brought = store.meetings.setdefault(name, {})
        brought[rank] = value
        if value is not None:
            store.last[rank] = value
        if len(brought) == len(expected):
            del store.meetings[name]
            store.tell(name)

        def is_over() -> bool:
            gone = not {*store.ended, *store.failed}.isdisjoint(expected)
            return gone or len(brought) == len(expected)

        await store.wait(name, is_over, seconds, self.reader)
        values = [(rank, value) for rank, value in brought.items() if value is not None]
        missing = sorted(set(expected).difference(brought))
        last = [(rank, store.last.get(rank)) for rank in expected] if missing else []
        return {"values": values, "missing": missing, "last": last}

    async def _read(self, form: str) -> tuple:
        return struct.unpack(form, await self._receive(struct.calcsize(form)))

    async def _receive(self, size: int) -> bytes:
        # Paddle's client sends a message in three packets and waits for each acknowledgement, which
        # the kernel would delay by 40 ms. The option lasts for one packet.
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
        return await self.reader.readexactly(size)

    async def _bytes(self, limit: int) -> bytes:
        (size,) = await self._read("<Q")
        if size > limit:
            raise ValueError(f"{size} bytes")
        return await self._receive(size)


async def serve(host: str, port: int, num_ranks: int, timeout: float) -> None:
    """Serve until standard input is closed, and then until every rank has learned of it.

    Prints `ready` once it listens, or the reason why it cannot.
    """
    store = Store(num_ranks, timeout)
    try:
        server = await asyncio.start_server(
            lambda reader, writer: _Connection(store, reader, writer).serve(),
            host,
            port,
            backlog=_BACKLOG,
        )
    except OSError as error:
        print(error.strerror or error, flush=True)
        return
    print("ready", flush=True)
    async with server:
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
        end = time.monotonic() + _SECONDS_AFTER_RANK_0
        while len(store.ended) < len(store.joined) and time.monotonic() < end:
            await asyncio.sleep(0.02)


if __name__ == "__main__":
    given = sys.stdin.readline().split()
    asyncio.run(serve(given[0], int(given[1]), int(given[2]), float(given[3])))
