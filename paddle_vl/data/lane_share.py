"""One sample, one reader: the ranks of a data lane on a machine take the batches that one of them
makes.

The reader writes a batch once into memory without a name and sends its descriptor to the others
over a local socket. They map that memory: it is there once, pixels that a later pipeline stage does
not touch cost it nothing, and it is freed with the last mapping, also where a process was killed.

What arrives is unpickled; the sockets lie in a folder that only this user can open.
"""

import mmap
import os
import pickle
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import Any

# Arrays in the memory begin at multiples of so many bytes.
_ALIGNMENT = 64
# Interval between calls of `while_waiting`.
CALL_S = 0.2


def machine() -> str:
    """The same text on ranks that can open each other's sockets."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot} {os.readlink('/proc/self/ns/mnt')} {os.geteuid()}"


class LaneShare:
    """A rank's part in the reading of its lane. All ranks of it ask for the same batches in the
    same order.

    Attributes:
        reader: rank that reads.
        connections: the reader's to each of the others; theirs to the reader.
        reads: whether this rank is the reader.
        num_bytes: written into shared memory or mapped so far.
    """

    def __init__(self, reader: int, connections: Sequence[Connection], reads: bool):
        self.reader, self.connections, self.reads = reader, connections, reads
        self.num_bytes = 0

    def made(self, name: str, make: Callable[[], Any], while_waiting: Callable[[], None]) -> Any:
        """What `make` returns or raises on the reader, on all ranks of the lane.

        Args:
            name: of the batch.
            while_waiting: called repeatedly while the reader is at it. An exception from it ends
                the wait.

        Raises:
            RuntimeError: the reader's process has ended.
        """
        if not self.reads:
            return self._received(name, while_waiting)
        made = error = None
        try:
            made = make()
        except Exception as caught:
            error = caught
        self._send((name, made, error))
        if error is not None:
            raise error
        return made

    def _send(self, content: Any) -> None:
        arrays: list[pickle.PickleBuffer] = []
        head = pickle.dumps(content, protocol=5, buffer_callback=arrays.append)
        places, end = [], 0
        with open(os.memfd_create("paddle-vl-batch"), "wb") as file:
            for array in arrays:
                file.seek(end)
                size = file.write(array.raw())
                places.append((end, end + size))
                end += -(-size // _ALIGNMENT) * _ALIGNMENT
            file.seek(end)
            pickle.dump((head, places), file)
            self.num_bytes += file.tell()
            file.flush()
            for connection in self.connections:
                try:
                    connection.send_bytes(str(end).encode())
                    send_handle(connection, file.fileno(), None)
                except OSError:
                    # That rank has ended; the next collective says so.
                    continue

    def _received(self, name: str, while_waiting: Callable[[], None]) -> Any:
        (connection,) = self.connections
        try:
            while not connection.poll(CALL_S):
                while_waiting()
            start = int(connection.recv_bytes())
            descriptor = recv_handle(connection)
        except (EOFError, ConnectionError) as error:
            raise RuntimeError(
                f"rank {self.reader}, which reads the data of this rank's lane, has ended before "
                f"{name}; its own message says why"
            ) from error
        with open(descriptor, "rb") as file:
            # Pages that this rank writes to become its own.
            pages = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
        self.num_bytes += pages.nbytes
        head, places = pickle.loads(pages[start:])
        sent, made, error = pickle.loads(head, buffers=[pages[i:j] for i, j in places])
        assert sent == name, f"rank {self.reader} sent {sent}, and this rank is at {name}"
        if error is not None:
            raise error
        return made
