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
import socket
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
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


def listening(path: str, num_others: int) -> socket.socket:
    """The reader's socket that the others connect to."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(path)
    listener.listen(num_others)
    return listener


def connected(path: str) -> socket.socket:
    """A socket to the reader that listens there."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(path)
    return connection


class LaneShare:
    """A rank's part in the reading of its lane. All ranks of it ask for the same batches in the
    same order.

    Args:
        reader: rank that reads.
        sockets: the reader's to each of the others; theirs to the reader.

    Attributes:
        reads: whether this rank is the reader.
        num_bytes: written into shared memory or mapped so far.
    """

    def __init__(self, reader: int, sockets: Sequence[socket.socket], reads: bool):
        self.reader, self.reads, self._sockets = reader, reads, sockets
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
            for connection in self._sockets:
                try:
                    socket.send_fds(connection, [str(end).encode()], [file.fileno()])
                except OSError:
                    # That rank has ended; the next collective says so.
                    continue

    def _received(self, name: str, while_waiting: Callable[[], None]) -> Any:
        (connection,) = self._sockets
        while not wait([connection], CALL_S):
            while_waiting()
        message, descriptors, *_ = socket.recv_fds(connection, _ALIGNMENT, 1)
        if not message:
            raise RuntimeError(
                f"rank {self.reader}, which reads the data of this rank's lane, has ended before "
                f"{name}; its own message says why"
            )
        with open(descriptors[0], "rb") as file:
            # Pages that this rank writes to become its own.
            pages = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
        self.num_bytes += pages.nbytes
        head, places = pickle.loads(pages[int(message) :])
        sent, made, error = pickle.loads(head, buffers=[pages[start:end] for start, end in places])
        assert sent == name, f"rank {self.reader} sent {sent}, and this rank is at {name}"
        if error is not None:
            raise error
        return made
