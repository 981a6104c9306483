"""The key-value store of a run: a separate process that rank 0 starts and that ends with rank 0.

It speaks the wire protocol of Paddle 3.3's TCPStore, and every rank, rank 0 included, is a client.
Paddle's own server listens on all addresses of the machine, answers a read after 90 ms, and a wait
for a key that does not come never ends, whatever its timeout. Beyond that protocol every rank
registers here, so that a rank that is missing or has ended can be named, and ranks compare their
collectives. Does not load Paddle.

A message is a command (4 bytes, unsigned), a text (8 bytes for the length, then UTF-8) and the
arguments of the command; numbers are little-endian. A connection has one open request at a time.
"""

import asyncio
import json
import socket
import struct
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
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
_LEFT = "has left the checked section"


class Changes:
    """Wakes those that wait for a condition when something has changed."""

    def __init__(self):
        self._change = asyncio.Event()

    def tell(self) -> None:
        self._change.set()
        self._change = asyncio.Event()

    async def wait(self, is_over: Callable[[], object], seconds: float) -> None:
        """Wait until a condition holds, for so many seconds at most."""
        end = time.monotonic() + seconds
        while not is_over() and (left := end - time.monotonic()) > 0:
            with suppress(TimeoutError, asyncio.TimeoutError):
                await asyncio.wait_for(self._change.wait(), left)


class Store:
    """Values by key, and the state of every rank.

    Args:
        num_ranks: world size.
        timeout: seconds to wait for a key.

    Attributes:
        joined, ended: ranks in order of time.
        failed: the problem of each rank that failed, or ended without reporting success.
        sections: checked ones, by name.
    """

    def __init__(self, num_ranks: int, timeout: float):
        self.num_ranks, self.timeout = num_ranks, timeout
        self.values: dict[str, bytes] = {}
        self.joined: list[int] = []
        self.ended: list[int] = []
        self.failed: dict[int, str] = {}
        self.sections: defaultdict[str, Section] = defaultdict(Section)
        self._done: set[int] = set()
        self._changes = Changes()

    def put(self, key: str, value: bytes) -> None:
        self.values[key] = value
        self._changes.tell()

    async def wait(self, key: str) -> bool:
        """Wait until the key exists; False after the timeout, or when a rank has ended."""
        await self._changes.wait(lambda: key in self.values or self.ended, self.timeout)
        return key in self.values

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

    def leave(self, rank: int) -> None:
        """Record that a rank has ended, and end all waits."""
        self.ended.append(rank)
        if rank not in self._done:
            self.failed.setdefault(rank, "has ended")
        self._changes.tell()


class Section:
    """The ranks inside a block of `paddle_vl.parallel.collective_check`, which meet here.

    Methods wait for other ranks and return a problem, or None; all ranks get the first one found.
    A rank that has ended is noticed when its time is over.
    """

    def __init__(self):
        self._problem: str | None = None
        self._left: set[int] = set()
        # The last collective of each rank, for messages.
        self._last: dict[int, str] = {}
        self._numbers: Counter[tuple[int, tuple[int, ...]]] = Counter()
        # What ranks of a group are about to do as which number, until all of them have come.
        self._plans: dict[tuple[tuple[int, ...], int], dict[int, tuple[str, str]]] = {}
        self._changes = Changes()

    async def meet(
        self, rank: int, ranks: Sequence[int], agreed: str, shown: str, seconds: float
    ) -> str | None:
        """Reach a collective of `ranks`, and wait until all of them have.

        Args:
            agreed: what must be equal on all ranks, as text.
            shown: description for messages.
            seconds: to wait for a rank.
        """
        group = tuple(ranks)
        self._numbers[rank, group] += 1
        number = self._numbers[rank, group]
        here = f"collective {number} of ranks {list(ranks)}"
        self._last[rank] = f"{shown}, {here}"
        plans = self._plans.setdefault((group, number), {})
        plans[rank] = agreed, shown
        if len(plans) == len(group):
            del self._plans[group, number]
        problem = await self._wait(
            lambda: [each for each in group if each not in plans],
            f"{here}: rank {rank} is about to do {shown}",
            seconds,
        )
        if problem is not None or len({agreed for agreed, _ in plans.values()}) == 1:
            return problem
        # The different plans, each with its ranks.
        alike = defaultdict(list)
        for each, (agreed, _) in sorted(plans.items()):
            alike[agreed].append(each)
        told = "; ".join(f"{ranks_text(of)} {plans[of[0]][1]}" for of in alike.values())
        return self._found(f"{here}: the ranks are about to do different things: {told}")

    async def leave(self, rank: int, num_ranks: int, seconds: float) -> str | None:
        """Leave the checked section, and wait until all ranks have."""
        self._left.add(rank)
        return await self._wait(
            lambda: sorted(set(range(num_ranks)) - self._left),
            f"rank {rank} {_LEFT}{self._last_of(rank)}",
            seconds,
        )

    async def fail(self, rank: int, error: str) -> None:
        """Report why this rank starts no further collectives."""
        self._found(f"rank {rank} {error}{self._last_of(rank)}")

    async def _wait(
        self, missing: Callable[[], list[int]], here: str, seconds: float
    ) -> str | None:
        self._changes.tell()
        await self._changes.wait(
            lambda: self._problem or not missing() or self._left.intersection(missing()), seconds
        )
        ranks = missing()
        if not ranks:
            return None
        gone = [rank for rank in ranks if rank in self._left]
        problem = self._found(
            f"{here}; rank {gone[0]} {_LEFT}{self._last_of(gone[0])}"
            if gone
            else f"{here}; rank {ranks[0]} has not come within {seconds:g} s"
            f"{self._last_of(ranks[0])}"
        )
        return problem if problem.startswith(here) else f"{problem} [{here}]"

    def _found(self, problem: str) -> str:
        """Keep a problem, unless there is one; returns the first one."""
        self._problem = self._problem or problem
        self._changes.tell()
        return self._problem

    def _last_of(self, rank: int) -> str:
        if rank not in self._last:
            return "; it reached none before"
        return f"; its last collective: {self._last[rank]}"


def ranks_text(ranks: list[int]) -> str:
    """`rank 1`, or `ranks 1, 2`."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


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
            self.store.leave(self.rank)

    async def _answer(self, command: int) -> None:
        text = (await self._read_bytes(MAX_KEY_BYTES)).decode()
        key, values = f"{self.namespace}\n{text}", self.store.values
        if command == ASK:
            self._write_bytes(json.dumps(await self._reply(json.loads(text))).encode())
        elif command == SET:
            value = await self._read_bytes(MAX_VALUE_BYTES)
            if text == NAMESPACE:
                self.namespace = value.decode()
            else:
                self.store.put(key, value)
        elif command == ADD:
            # Read first: another client may add to the value while this one's number arrives.
            (number,) = await self._read("<q")
            # The value is a decimal number; a missing one counts as 0.
            total = int(values.get(key, b"0")) + number
            self.store.put(key, str(total).encode())
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
        for name in ("meet", "leave", "fail"):
            if name in request:
                method = getattr(self.store.sections[str(request.get("section"))], name)
                return {"problem": await method(rank, *request[name])}
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
