"""One sample, one reader: the ranks of a data lane on a machine take the batches that one of them
makes.

The reader writes a batch once into memory without a name and sends its descriptor to the others
over a local socket. They map that memory: it is there once, pixels that a later pipeline stage does
not touch cost it nothing, and it is freed with the last mapping, also where a process was killed.

The memory has the arrays of the batch, and behind them JSON, which says where they are.
"""

import json
import mmap
import os
import select
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import numpy as np

from paddle_vl.batch.schema import HostBatch

# Arrays in the memory begin at multiples of so many bytes.
_ALIGNMENT = 64
# Interval between calls of `while_waiting`.
CALL_S = 0.2
# Bytes of a message: where the JSON begins.
_MESSAGE_BYTES = 8


def machine() -> str:
    """The same text on ranks that can open each other's sockets."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot} {os.readlink('/proc/self/ns/mnt')} {os.geteuid()}"


def local_socket() -> socket.socket:
    """A socket whose messages stay apart."""
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


class LaneShare:
    """A rank's part in the reading of its lane. All ranks of it on a machine ask for the same
    batches in the same order.

    Attributes:
        reader: rank that reads.
        connections: the reader's to each of the others; theirs to the reader.
        reads: whether this rank is the reader.
        num_bytes: written into shared memory or mapped so far.
    """

    def __init__(self, reader: int, connections: Sequence[socket.socket], reads: bool):
        self.reader, self.connections, self.reads = reader, connections, reads
        self.num_bytes = 0

    def made(
        self,
        name: str,
        make: Callable[[], Any],
        while_waiting: Callable[[], None],
        errors: Mapping[str, type[Exception]],
    ) -> Any:
        """What `make` returns or raises on the reader, on all ranks of the lane.

        Args:
            name: of the batch.
            make: returns JSON values, dicts with any keys among them, tuples, arrays and batches.
            while_waiting: called repeatedly while the reader is at it. An exception from it ends
                the wait.
            errors: by name, those that all ranks raise with the same arguments; the others raise a
                RuntimeError in place of a different one.

        Raises:
            RuntimeError: the reader's process has ended.
        """
        if not self.reads:
            return self._received(name, while_waiting, errors)
        try:
            made = make()
        except Exception as error:
            kind = type(error).__name__
            failed = [kind, list(error.args) if kind in errors else [], str(error)]
            self._send({"name": name, "failed": failed})
            raise
        self._send({"name": name, "made": made})
        return made

    def _send(self, content: dict[str, Any]) -> None:
        with open(os.memfd_create("paddle-vl-batch"), "wb") as file:
            message = _written(content, file)
            self.num_bytes += file.tell()
            file.flush()
            for connection in self.connections:
                # That rank may have ended; the next collective says so.
                with suppress(OSError):
                    socket.send_fds(connection, [message], [file.fileno()])

    def _received(
        self,
        name: str,
        while_waiting: Callable[[], None],
        errors: Mapping[str, type[Exception]],
    ) -> Any:
        (connection,) = self.connections
        while not select.select([connection], [], [], CALL_S)[0]:
            while_waiting()
        message, descriptors = b"", []
        with suppress(ConnectionError):
            message, descriptors, *_ = socket.recv_fds(connection, _MESSAGE_BYTES, 1)
        reads = f"rank {self.reader}, which reads the data of this rank's lane,"
        if not message:
            raise RuntimeError(f"{reads} has ended before {name}; its own message says why")
        with open(descriptors[0], "rb") as file:
            # Pages that this rank writes to become its own.
            pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self.num_bytes += len(pages)
        plain, places = json.loads(pages[int.from_bytes(message, "little") :])
        content = _restored(plain, pages, places)
        assert content["name"] == name, f"{reads} sent {content['name']}, and this is at {name}"
        if "failed" in content:
            kind, arguments, text = content["failed"]
            if kind in errors:
                raise errors[kind](*arguments)
            raise RuntimeError(f"{reads} failed at {name}: {kind}: {text}")
        return content["made"]


def _written(content: dict[str, Any], file: IO[bytes]) -> bytes:
    """Write a batch, its arrays first; the message, where its JSON begins."""
    arrays: list[np.ndarray] = []
    places, end = [], 0
    plain = _plain(content, arrays)
    for array in arrays:
        file.seek(end)
        file.write(array.data if array.size else b"")
        places.append(end)
        end += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    file.seek(end)
    file.write(json.dumps([plain, places]).encode())
    return end.to_bytes(_MESSAGE_BYTES, "little")


def _plain(value: Any, arrays: list[np.ndarray]) -> Any:
    """JSON values that stand for a value; its arrays are added to the list.

    Raises:
        TypeError: there is something else in it.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, HostBatch):
        return {
            type(value).__name__: [
                [name, _plain(part, arrays)] for name, part in vars(value).items()
            ]
        }
    if isinstance(value, dict):
        return {"dict": [[_plain(part, arrays) for part in entry] for entry in value.items()]}
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_plain(each, arrays) for each in value]}
    if isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
        arrays.append(np.ascontiguousarray(value))
        kind = "array" if isinstance(value, np.ndarray) else "number"
        return {kind: [len(arrays) - 1, value.dtype.str, list(value.shape)]}
    raise TypeError(
        f"a batch has {type(value).__name__} {value!r:.100}, which ranks of a data lane cannot "
        "share: make it of numbers, texts, lists, dicts and arrays"
    )


def _restored(plain: Any, pages: mmap.mmap, places: Sequence[int]) -> Any:
    """The value for which `_plain` stands; arrays lie in the memory."""
    if not isinstance(plain, dict):
        return plain
    ((kind, found),) = plain.items()
    if kind in HostBatch.kinds:
        return HostBatch.kinds[kind](**{n: _restored(part, pages, places) for n, part in found})
    if kind == "dict":
        return dict([_restored(part, pages, places) for part in entry] for entry in found)
    if kind in ("list", "tuple"):
        values = [_restored(each, pages, places) for each in found]
        return values if kind == "list" else tuple(values)
    number, dtype, shape = found
    array = np.ndarray(shape, dtype, pages, places[number])
    return array if kind == "array" else array[()]
