"""Datasets and collators that probe a loader; worker processes can import them."""

import os
import signal
import sys
from collections import Counter
from multiprocessing.connection import Connection

import numpy as np

from paddle_vl.batch.schema import VLBatch
from paddle_vl.data.jsonl import BadSampleError


class NumberDataset:
    """Sample i holds the number i; the listed samples are bad."""

    fingerprint = 1

    def __init__(self, size: int, bad=(), on_bad_sample: str = "fail"):
        self.size = size
        self.bad = frozenset(bad)
        self.on_bad_sample = on_bad_sample
        self.skipped = Counter()

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, number: int) -> dict:
        if number in self.bad:
            raise BadSampleError("bad_kind", "this one is bad", f"data.jsonl:{number + 1}")
        return {"number": np.array([number])}


class DyingDataset(NumberDataset):
    """Ends its process at sample 3."""

    def __getitem__(self, number: int) -> dict:
        if number == 3:
            os._exit(1)
        return super().__getitem__(number)


class ProcessDataset(NumberDataset):
    """Samples describe the process that loads them."""

    def __getitem__(self, number: int) -> dict:
        loaded = "paddle" in sys.modules
        return {"number": np.array([os.getpid(), loaded, hasattr(sys.modules["__main__"], "MARK")])}


class HeldDataset(NumberDataset):
    """Blocks at a sample until a writer has opened and closed a named pipe."""

    files = ("data.jsonl",)

    def __init__(self, size: int, held: int, pipe: str):
        super().__init__(size)
        self.held, self.pipe = held, pipe

    def __getitem__(self, number: int) -> dict:
        if number == self.held:
            with open(self.pipe) as pipe:
                pipe.read()
        return super().__getitem__(number)

    def place(self, number: int) -> str:
        return f"data.jsonl:{number + 1}"


class LongDataset(NumberDataset):
    """Sample i holds the number i in i % 7 + 1 tokens."""

    def __getitem__(self, number: int) -> dict:
        super().__getitem__(number)
        return {"input_ids": np.full(number % 7 + 1, number)}


def stack_rows(rows: list) -> dict:
    """Collator of packed rows: the numbers of each row's samples."""
    return {"numbers": [[int(sample["input_ids"][0]) for sample in row] for row in rows]}


def stack_numbers(samples: list) -> dict:
    """Collator that stacks the numbers."""
    return {"numbers": np.concatenate([sample["number"] for sample in samples]).tolist()}


def token_rows(samples: list) -> VLBatch:
    """Collator of countable batches: each number is a token."""
    ids = np.stack([sample["number"] for sample in samples])
    return VLBatch(input_ids=ids, counts=(1,))


def die_halfway(dataset: NumberDataset, collator: object) -> bytes:
    """A result whose process is killed after writing half of it."""
    whole = Connection._send

    def half(self: Connection, buffer: memoryview, *more: object) -> None:
        if len(buffer) > 1000:
            os.write(self.fileno(), buffer[: len(buffer) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        whole(self, buffer, *more)

    Connection._send = half
    return bytes(100_000)
