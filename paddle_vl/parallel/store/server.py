"""The key-value store of a run: a separate process that rank 0 starts and that ends with rank 0.

It speaks the wire protocol of Paddle 3.3's TCPStore, and every rank, rank 0 included, is a client.
Paddle's own server listens on all addresses of the machine, and needs three seconds more to bring
four ranks of a CPU together. Beyond that protocol every rank registers here, so that a rank that is
missing or has ended can be named, and ranks compare their collectives. Does not load Paddle.

A message is a command (4 bytes, unsigned), a text (8 bytes for the length, then UTF-8) and the
arguments of the command; numbers are little-endian. A connection has one open request at a time.
"""

import asyncio
import json
import socket
import struct
import sys
from collections.abc import Callable
from contextlib import suppress
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

    Attributes:
        joined, ended: ranks in order of time.
        failed: the problem of each rank that failed, or ended without reporting success.
    """

    def __init__(self, num_ranks: int, timeout: float):
        self.num_ranks, self.timeout = num_ranks, timeout
        self.values: dict[str, bytes] = {}
        self.joined: list[int] = []
        self.ended: list[int] = []
        self.failed: dict[int, str] = {}
        self._done: set[int] = set()
        self._meetings: dict[str, dict[int, Any]] = {}
        # What each rank brought to its last meeting.
        self._last: dict[int, Any] = {}
        self._changed = asyncio.Condition()

    async def put(self, key: str, value: bytes) -> None:
        self.values[key] = value
        await self._tell()

    async def wait(self, key: str) -> bool:
        """Wait until the key exists; False after the timeout, or when a rank has ended."""
        await self._wait(lambda: key in self.values or self.ended, self.timeout)
        return key in self.values

    async def meet(
        self, rank: int, name: str, ranks: list[int], value: Any, seconds: float
    ) -> dict[str, Any]:
        """Exchange values between ranks.

        Returns:
            `values` of all of them, or of those that have come when the time is over or a missing
            one has ended; what the missing ones brought `last`.
        """
        values = self._meetings.setdefault(name, {})
        values[rank] = self._last[rank] = value
        if len(values) == len(ranks):
            del self._meetings[name]
        await self._tell()

        def missing() -> set[int]:
            return set(ranks).difference(values)

        await self._wait(lambda: not missing() or missing().intersection(self.ended), seconds)
        last = {rank: self._last.get(rank) for rank in missing()}
        return {"values": values, "last": last, "ended": self.ended}

    def state(self, rank: int, request: dict[str, Any]) -> dict[str, Any]:
        """The state of all ranks, after a rank has reported.

        `{"join": rank}` registers a rank, `{"done": true}` and `{"failed": reason}` say how it
        ended.
        """
        if "join" in request and rank in self.joined:
            return {"refused": f"another process has joined as rank {rank}"}
        if "join" in request and not 0 <= rank < self.num_ranks:
            return {"refused": f"this run has ranks 0 to {self.num_ranks - 1}, and no rank {rank}"}
        if "join" in request:
            self.joined.append(rank)
        if "done" in request:
            self._done.add(rank)
        if "failed" in request:
            self.failed.setdefault(rank, str(request["failed"]))
        missing = sorted(set(range(self.num_ranks)) - set(self.joined))
        return {"missing": missing, "ended": self.ended, "failed": self.failed}

    async def leave(self, rank: int) -> None:
        """Record that a rank has ended, and end all waits for keys."""
        self.ended.append(rank)
        if rank not in self._done:
            self.failed.setdefault(rank, "has ended")
        await self._tell()

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _wait(self, is_over: Callable[[], object], seconds: float) -> None:
        # The two are one class from Python 3.11 on.
        with suppress(TimeoutError, asyncio.TimeoutError):
            async with self._changed:
                await asyncio.wait_for(self._changed.wait_for(is_over), seconds)


class _Connection:
    """One client. If it registered a rank, the end of the connection is the end of that rank."""

    def __init__(self, store: Store, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self.store, self.reader, self.writer = store, reader, writer
        self.namespace = ""
        self.rank: int | None = None
        self._socket = writer.get_extra_info("socket")

    async def serve(self) -> None:
        # A malformed message closes the connection, like the end of the client or of the server.
        with suppress(
            asyncio.IncompleteReadError, asyncio.CancelledError, OSError, ValueError, TypeError
        ):
            while True:
                await self._answer((await self._read("<I"))[0])
        self.writer.close()
        if self.rank is not None:
            await self.store.leave(self.rank)

    async def _answer(self, command: int) -> None:
        limit = MAX_VALUE_BYTES if command == ASK else MAX_KEY_BYTES
        text = (await self._read_bytes(limit)).decode()
        key, values = f"{self.namespace}\n{text}", self.store.values
        if command == ASK:
            self._write_bytes(json.dumps(await self._reply(json.loads(text))).encode())
        elif command == SET:
            value = await self._read_bytes(MAX_VALUE_BYTES)
            if text == NAMESPACE:
                self.namespace = value.decode()
            else:
                await self.store.put(key, value)
        elif command == ADD:
            # Read first: another client may add to the value while this one's number arrives.
            (number,) = await self._read("<q")
            # The value is a decimal number; a missing one counts as 0.
            total = int(values.get(key, b"0")) + number
            await self.store.put(key, str(total).encode())
            self.writer.write(struct.pack("<q", total))
        elif command == GET:
            self._write_bytes(values.get(key, b""))
        elif command == CHECK:
            self.writer.write(struct.pack("<i", READY if key in values else NOT_READY))
        elif command == WAIT:
            if not await self.store.wait(key):
                raise ConnectionError("the key did not come")
            self.writer.write(struct.pack("<i", STOP_WAIT))
        else:
            raise ValueError(f"command {command}")

    async def _reply(self, request: Any) -> dict[str, Any]:
        if not isinstance(request, dict) or not isinstance(request.get("rank"), int):
            raise ValueError(f"a request is an object with a rank, not {request}")
        rank = request["rank"]
        if "meet" in request:
            return await self.store.meet(rank, *request["meet"])
        state = self.store.state(rank, request)
        if "join" in request and "refused" not in state:
            self.rank = rank
        return state

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
        while len(store.ended) < len(store.joined) and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(0.02)


def main() -> None:
    host, port, num_ranks, timeout = sys.stdin.readline().split()
    asyncio.run(serve(host, int(port), int(num_ranks), float(timeout)))


if __name__ == "__main__":
    main()
