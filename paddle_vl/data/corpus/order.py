"""The order of a source's documents: a pure function of seed and number, without a list of them.

A permutation of n numbers is a Feistel network over the next power of four, walked until it falls
below n (cycle walking). Source: Black and Rogaway, "Ciphers with arbitrary finite domains" (2002).
Memory is a few numbers per shard, whatever the number of documents.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from xxhash import xxh3_64_intdigest

_ROUNDS = 4


def permuted(number: int, count: int, keys: Sequence[int]) -> int:
    """The image of `number` under a permutation of `range(count)` that the keys choose."""
    half = max(1, (count - 1).bit_length() + 1 >> 1)
    mask = (1 << half) - 1
    seeds = _round_seeds(tuple(keys))
    while True:
        left, right = number >> half, number & mask
        for seed in seeds:
            mixed = xxh3_64_intdigest(right.to_bytes(8, "little"), seed)
            left, right = right, left ^ (mixed & mask)
        number = left << half | right
        if number < count:
            return number


@lru_cache(maxsize=256)
def _round_seeds(keys: tuple[int, ...]) -> list[int]:
    text = ",".join(map(str, keys))
    return [xxh3_64_intdigest(f"{text}/{i}".encode()) for i in range(_ROUNDS)]


@dataclass(frozen=True)
class DocumentOrder:
    """Numbers of documents in the order of an endless stream that repeats them epoch by epoch.

    Attributes:
        groups: documents of each group; a group is a shard, or a part that is read at once.
        groups_at_once: groups whose documents are mixed with each other at a time; None mixes all.
        seed: any integer; sources have different ones.
    """

    groups: tuple[int, ...]
    groups_at_once: int | None
    seed: int
    _starts: np.ndarray = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        starts = np.concatenate([[0], np.cumsum(self.groups)]).astype(np.int64)
        object.__setattr__(self, "_starts", starts)

    @property
    def count(self) -> int:
        """Documents of an epoch."""
        return int(self._starts[-1])

    def document(self, number: int) -> int:
        """The document at a place of the stream."""
        epoch, place = divmod(number, self.count)
        if self.groups_at_once is None:
            return permuted(place, self.count, (self.seed, epoch))
        order, blocks = self._blocks(epoch)
        block = int(np.searchsorted(blocks, place, side="right")) - 1
        start = int(blocks[block])
        inside = permuted(place - start, int(blocks[block + 1]) - start, (self.seed, epoch, block))
        first = block * self.groups_at_once
        for group in order[first : first + self.groups_at_once].tolist():
            if inside < self.groups[group]:
                return int(self._starts[group]) + inside
            inside -= self.groups[group]
        raise AssertionError("a block has as many places as its groups have documents")

    def block(self, number: int) -> tuple[int, int]:
        """Epoch of a place of the stream, and number of its block of groups in that epoch."""
        epoch, place = divmod(number, self.count)
        _, blocks = self._blocks(epoch)
        return epoch, int(np.searchsorted(blocks, place, side="right")) - 1

    def groups_after(self, epoch: int, block: int) -> list[int]:
        """The groups of the block after that one."""
        at_once = self.groups_at_once or len(self.groups)
        begin = (block + 1) * at_once
        if begin >= len(self.groups):
            epoch, begin = epoch + 1, 0
        order, _ = self._blocks(epoch)
        return order[begin : begin + at_once].tolist()

    def _blocks(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        return _block_starts(self.groups, self.groups_at_once or len(self.groups), self.seed, epoch)


# Strands of a loader are at most a few blocks apart, so two epochs of each source at a time.
@lru_cache(maxsize=64)
def _block_starts(
    groups: tuple[int, ...], at_once: int, seed: int, epoch: int
) -> tuple[np.ndarray, np.ndarray]:
    """The order of the groups in an epoch, and the first place of each block of them."""
    order = np.random.default_rng([seed, epoch]).permutation(len(groups))
    sizes = np.asarray(groups, dtype=np.int64)[order]
    sums = np.concatenate([[0], np.cumsum(sizes)])
    return order, np.append(sums[:-1:at_once], sums[-1])
