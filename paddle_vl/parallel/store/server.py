"""The key-value store of a run: a separate process that rank 0 starts and that ends with rank 0.

It speaks the wire protocol of Paddle 3.3's TCPStore, and every rank, rank 0 included, is a client:
Paddle's own server would listen on all addresses of the machine. Beyond that protocol every rank
registers here, so that a rank that is missing or has ended can be named. Does not load Paddle.

A message is a command (4 bytes, unsigned), a text (8 bytes for the length, then UTF-8) and the
arguments of the command; numbers are little-endian. A connection has one open request at a time.
"""

import asyncio
import contextlib
import json
import socket
import struct
import sys
from collections import defaultdict
from typing import Any

# Commands and replies of Paddle's store, and one of ours: a request in JSON.
ADD, GET, CHECK, SET, WAIT = range(5)
ASK = 64
STOP_WAIT, READY, NOT_READY = 1, 2, 3
# Setting this key stores nothing; it sets the namespace of all later keys of the connection.
# Paddle's clients put a slash before every key.
NAMESPACE = "/namespace"

# The limits of Paddle's own server; a client that exceeds them is not Paddle's.
MAX_KEY_BYTES, MAX_VALUE_BYTES = 1 << 14, 1 << 24
_BACKLOG = 4096
# After rank 0 has ended the other ranks have this long to learn of it; then this process ends.
_SECONDS_AFTER_RANK_0 = 2.0


class Store:
    """Values by key, and the state of every rank.

    Args:
        num_ranks: world size.
        timeout: seconds to wait for a key.
    """

    def __init__(self, num_ranks: int, timeout: float):
        self.num_ranks, self.timeout = num_ranks, timeout
        self.values: dict[str, bytes] = {}
        # In order of time.
        self.joined: list[int] = []
        self.ended: list[int] = []
        # Ranks that reported success, and the problem of each that failed or ended without.
        self.done: set[int] = set()
        self.failed: dict[int, str] = {}
        # The operation that a rank reported to wait in.
        self.waits: dict[int, Any] = {}
        self._waiting: defaultdict[str, list[asyncio.Future]] = defaultdict(list)
        self._waiting_for_all: list[asyncio.Future] = []

    def put(self, key: str, value: bytes) -> None:
        self.values[key] = value
        _release(self._waiting.pop(key, []))

    def add(self, key: str, number: int) -> int:
        """Add to a value that is a decimal number; a missing one counts as 0."""
        total = int(self.values.get(key, b"0")) + number
        self.put(key, str(total).encode())
        return total

    async def wait(self, key: str) -> bool:
        """Wait until the key exists; False after the timeout, or when a rank has ended."""
        if key not in self.values and not self.ended:
            await self._wait_in(self._waiting[key], self.timeout)
        return key in self.values

    def join(self, rank: int) -> None:
        """Register a rank.

        Raises:
            ValueError: it is outside of the world size, or registered already.
        """
        if not 0 <= rank < self.num_ranks:
            raise ValueError(f"this run has ranks 0 to {self.num_ranks - 1}, and no rank {rank}")
        if rank in self.joined:
            raise ValueError(f"another process has joined as rank {rank}")
        self.joined.append(rank)
        if len(self.joined) == self.num_ranks:
            _release(self._waiting_for_all)

    def leave(self, rank: int) -> None:
        """Record that a rank has ended, and end all waits."""
        self.ended.append(rank)
        if rank not in self.done:
            self.failed.setdefault(rank, "has ended")
        for waiting in (self._waiting_for_all, *self._waiting.values()):
            _release(waiting)

    async def wait_for_all(self, seconds: float) -> None:
        """Wait until all ranks have joined, one has ended, or the time is over."""
        if self.missing and not self.ended:
            await self._wait_in(self._waiting_for_all, seconds)

    @property
    def missing(self) -> list[int]:
        """Ranks that have not joined."""
        return sorted(set(range(self.num_ranks)) - set(self.joined))

    @property
    def is_left(self) -> bool:
        """Whether every rank that joined has ended."""
        return len(self.ended) == len(self.joined)

    async def _wait_in(self, waiting: list[asyncio.Future], seconds: float) -> None:
        future = asyncio.get_running_loop().create_future()
        waiting.append(future)
        with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
            await asyncio.wait_for(future, seconds)


def _release(waiting: list[asyncio.Future]) -> None:
    for future in waiting:
        if not future.done():
            future.set_result(None)
    waiting.clear()


class _Connection:
    """One client. If it registered a rank, the end of the connection is the end of that rank."""

    def __init__(self, store: Store, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self.store, self.reader, self.writer = store, reader, writer
        self.namespace = ""
        self.rank: int | None = None
        self._socket = writer.get_extra_info("socket")
        self._answers: set[asyncio.Task] = set()

    async def serve(self) -> None:
        # A malformed message closes the connection, like the end of the client or of the server.
        closing = (asyncio.IncompleteReadError, asyncio.CancelledError, OSError, ValueError)
        try:
            while True:
                await self._answer((await self._read("<I"))[0])
        except closing:
            pass
        finally:
            self.writer.close()
            for answer in self._answers:
                answer.cancel()
            if self.rank is not None:
                self.store.leave(self.rank)

    async def _answer(self, command: int) -> None:
        text = (await self._read_bytes(MAX_KEY_BYTES)).decode()
        if command == ASK:
            # A separate task, since the end of the connection must be noticed meanwhile.
            answer = asyncio.create_task(self._answer_request(_parsed_request(text)))
            self._answers.add(answer)
            answer.add_done_callback(self._answers.discard)
            return
        key = f"{self.namespace}\n{text}"
        if command == SET:
            value = await self._read_bytes(MAX_VALUE_BYTES)
            if text == NAMESPACE:
                self.namespace = value.decode()
            else:
                self.store.put(key, value)
        elif command == ADD:
            (number,) = await self._read("<q")
            self.writer.write(struct.pack("<q", self.store.add(key, number)))
        elif command == GET:
            self._write_bytes(self.store.values.get(key, b""))
        elif command == CHECK:
            exists = key in self.store.values
            self.writer.write(struct.pack("<i", READY if exists else NOT_READY))
        elif command == WAIT:
            if not await self.store.wait(key):
                raise ConnectionError("the key did not come")
            self.writer.write(struct.pack("<i", STOP_WAIT))
        else:
            raise ValueError(f"command {command}")

    async def _answer_request(self, request: dict[str, Any]) -> None:
        """Answer a request with the state of all ranks.

        `{"join": rank, "seconds": s}` registers a rank and waits for all, `{"waits": operation}`
        reports what the rank waits in, `{"done": true}` and `{"failed": reason}` how it ended.
        """
        answer = {}
        if "join" in request:
            try:
                self.store.join(request["join"])
                self.rank = request["join"]
                await self.store.wait_for_all(request["seconds"])
            except ValueError as error:
                answer["refused"] = str(error)
        if self.rank is not None:
            if "waits" in request:
                self.store.waits[self.rank] = request["waits"]
            if "done" in request:
                self.store.done.add(self.rank)
            if "failed" in request:
                self.store.failed.setdefault(self.rank, str(request["failed"]))
        waits = {rank: wait for rank, wait in self.store.waits.items() if wait is not None}
        answer |= {"missing": self.store.missing, "ended": self.store.ended, "waits": waits}
        answer["failed"] = self.store.failed
        self._write_bytes(json.dumps(answer).encode())

    async def _read(self, form: str) -> tuple:
        return struct.unpack(form, await self._receive(struct.calcsize(form)))

    async def _receive(self, size: int) -> bytes:
        # Paddle's client sends a message in three packets and waits for each acknowledgement, which
        # the kernel would delay by 40 ms. The option lasts for one packet.
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
        return await self.reader.readexactly(size)

    async def _read_bytes(self, limit: int) -> bytes:
        (size,) = await self._read("<Q")
        if size > limit:
            raise ValueError(f"{size} bytes")
        return await self._receive(size)

    def _write_bytes(self, value: bytes) -> None:
        self.writer.write(struct.pack("<Q", len(value)) + value)


def _parsed_request(text: str) -> dict[str, Any]:
    """Raises ValueError for a malformed request."""
    request = json.loads(text)
    if not isinstance(request, dict):
        raise ValueError(f"a request is an object, not {text[:50]}")
    if "join" in request and not (
        isinstance(request["join"], int) and isinstance(request.get("seconds"), int | float)
    ):
        raise ValueError(f"a rank joins by number, for seconds, not {text[:50]}")
    return request


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
        end = asyncio.get_running_loop().time() + _SECONDS_AFTER_RANK_0
        while not store.is_left and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(0.02)


def main() -> None:
    host, port, num_ranks, timeout = sys.stdin.readline().split()
    asyncio.run(serve(host, int(port), int(num_ranks), float(timeout)))


if __name__ == "__main__":
    main()
