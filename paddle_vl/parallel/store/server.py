"""The store of a run: a process of its own, which rank 0 starts and which ends with it.

It speaks the protocol of Paddle 3.3's TCPStore, so that every process, rank 0 too, is a client of
it: Paddle's own server listens on all addresses of a machine. Beyond it, every process says that it
has come, so that a process that is missing or has ended can be named. It does not load Paddle.

A message is a command (4 bytes, unsigned), a text (8 bytes for the length, then UTF-8) and what the
command needs; numbers are little-endian. One connection has one question open at a time.
"""

import asyncio
import contextlib
import json
import socket
import struct
import sys
from collections import defaultdict
from typing import Any

# Commands and replies of Paddle's store, and our own question in JSON.
ADD, GET, CHECK, SET, WAIT = range(5)
ASK = 64
STOP_WAIT, READY, NOT_READY = 1, 2, 3
# A value that is set here does not go into the store: what else the connection names is apart from
# what other namespaces do. Paddle's clients put a slash before every key.
NAMESPACE = "/namespace"

# Bounds of Paddle's own server: more is none of its clients.
MAX_KEY_BYTES, MAX_VALUE_BYTES = 1 << 14, 1 << 24
_BACKLOG = 4096
# For the other processes to hear that rank 0 has ended; then this one does too.
_SECONDS_AFTER_RANK_0 = 2.0


class Store:
    """Values by key, and who has come and gone.

    Args:
        num_ranks: of the run.
        timeout: seconds to wait for a key.
    """

    def __init__(self, num_ranks: int, timeout: float):
        self.num_ranks, self.timeout = num_ranks, timeout
        self.values: dict[str, bytes] = {}
        # In the order in which they came, and ended.
        self.come: list[int] = []
        self.gone: list[int] = []
        # Ranks that have said that they are done, and why others are not: they failed, or ended.
        self.done: set[int] = set()
        self.failed: dict[int, str] = {}
        # What a rank has told that it waits in.
        self.waits: dict[int, Any] = {}
        self._waiting: defaultdict[str, list[asyncio.Future]] = defaultdict(list)
        self._complete: list[asyncio.Future] = []

    def put(self, key: str, value: bytes) -> None:
        self.values[key] = value
        _release(self._waiting.pop(key, []))

    def add(self, key: str, number: int) -> int:
        """Add to a value that is a number in digits, from 0."""
        total = int(self.values.get(key, b"0")) + number
        self.put(key, str(total).encode())
        return total

    async def wait(self, key: str) -> bool:
        """Until there is the key; False if the time is up, or a rank has ended meanwhile."""
        if key not in self.values and not self.gone:
            await self._wait_in(self._waiting[key], self.timeout)
        return key in self.values

    def enter(self, rank: int) -> None:
        """A rank has come.

        Raises:
            ValueError: it is not one of the run's, or has come before.
        """
        if not 0 <= rank < self.num_ranks:
            raise ValueError(f"this run has ranks 0 to {self.num_ranks - 1}, and no rank {rank}")
        if rank in self.come:
            raise ValueError(f"another process has come as rank {rank}")
        self.come.append(rank)
        if len(self.come) == self.num_ranks:
            _release(self._complete)

    def leave(self, rank: int) -> None:
        """A rank has ended: nobody waits any longer."""
        self.gone.append(rank)
        if rank not in self.done:
            self.failed.setdefault(rank, "has ended")
        for waiting in (self._complete, *self._waiting.values()):
            _release(waiting)

    async def wait_for_all(self, seconds: float) -> None:
        """Until all ranks have come, one has ended, or the time is up."""
        if self.missing and not self.gone:
            await self._wait_in(self._complete, seconds)

    @property
    def missing(self) -> list[int]:
        """Ranks that have not come."""
        return sorted(set(range(self.num_ranks)) - set(self.come))

    @property
    def is_left(self) -> bool:
        """Whether no rank is here any more."""
        return len(self.gone) == len(self.come)

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
    """One client. Closing it says that its rank has ended, if it came as one."""

    def __init__(self, store: Store, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self.store, self.reader, self.writer = store, reader, writer
        self.namespace, self.rank = "", None
        self._socket = writer.get_extra_info("socket")
        self._answers: set[asyncio.Task] = set()

    async def serve(self) -> None:
        # What is none of our messages ends the connection, as a client that has ended does, and as
        # the end of the server does.
        broken = (asyncio.IncompleteReadError, asyncio.CancelledError, OSError, ValueError)
        try:
            while True:
                await self._answer((await self._read("<I"))[0])
        except broken:
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
            # Beside the connection, whose end must be noticed meanwhile.
            answer = asyncio.create_task(self._answer_question(_question(text)))
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
            is_there = key in self.store.values
            self.writer.write(struct.pack("<i", READY if is_there else NOT_READY))
        elif command == WAIT:
            if not await self.store.wait(key):
                raise ConnectionError("nothing to wait for")
            self.writer.write(struct.pack("<i", STOP_WAIT))
        else:
            raise ValueError(f"command {command}")

    async def _answer_question(self, question: dict[str, Any]) -> None:
        """`{"come": rank, "seconds": s}` waits for all, `{"waits": what}` tells what the rank
        waits in, `{"done": true}` and `{"failed": why}` how its work has ended; any question gets
        who is here, what they wait in and who failed."""
        answer = {}
        if "come" in question:
            try:
                self.store.enter(question["come"])
                self.rank = question["come"]
                await self.store.wait_for_all(question["seconds"])
            except ValueError as error:
                answer["refused"] = str(error)
        if "waits" in question:
            self.store.waits[self.rank] = question["waits"]
        if "done" in question:
            self.store.done.add(self.rank)
        if "failed" in question:
            self.store.failed.setdefault(self.rank, str(question["failed"]))
        waits = {rank: wait for rank, wait in self.store.waits.items() if wait is not None}
        answer |= {"missing": self.store.missing, "gone": self.store.gone, "waits": waits}
        answer["failed"] = self.store.failed
        self._write_bytes(json.dumps(answer).encode())

    async def _read(self, form: str) -> tuple:
        return struct.unpack(form, await self._receive(struct.calcsize(form)))

    async def _receive(self, size: int) -> bytes:
        # Paddle's client sends a message in three parts and waits for the answer to each part's
        # packet, which the system else holds back for 40 ms. The option lasts for one packet.
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
        return await self.reader.readexactly(size)

    async def _read_bytes(self, most: int) -> bytes:
        (size,) = await self._read("<Q")
        if size > most:
            raise ValueError(f"{size} bytes")
        return await self._receive(size)

    def _write_bytes(self, value: bytes) -> None:
        self.writer.write(struct.pack("<Q", len(value)) + value)


def _question(text: str) -> dict[str, Any]:
    """Raises ValueError for what is none."""
    question = json.loads(text)
    if not isinstance(question, dict):
        raise ValueError(f"a question is an object, not {text[:50]}")
    if "come" in question and not (
        isinstance(question["come"], int) and isinstance(question.get("seconds"), int | float)
    ):
        raise ValueError(f"a rank comes by number, for seconds, not {text[:50]}")
    return question


async def serve(host: str, port: int, num_ranks: int, timeout: float) -> None:
    """Serve until standard input is closed, and then until every rank has heard of it.

    Says `ready` on standard output once it listens, or else why it does not.
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
