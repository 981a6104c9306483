"""Slices of a batch's token rows for context parallelism, and which of them see a key; indices of a
shard of the rows.

A slice is a list of rows. Row n of a segment (a packed sample, or a row of the batch) attends to n
+ 1 keys, so equal intervals would not be equal work. Each segment is cut into 2 C chunks, and of C
ranks rank i takes chunks i and 2 C - 1 - i of each; the rows that are left over are dealt one by
one. So every rank has equally many rows, and of each long segment as many visible pairs.

Example: two ranks, segments of 8 and 5 rows (and 1 of padding):

    row    0 1 2 3 4 5 6 7 | 8 9 10 11 12 | 13
    rank   0 0 1 1 1 1 0 0 | 0 1  1  0  0 |  1      rows 12 and 13 are dealt

Shapes: T token rows of the batch, Q = T / C of a slice, S segments.
"""

from typing import Any, NamedTuple

import numpy as np

from paddle_vl.batch.rows import WHOLE_BATCH, RowPart
from paddle_vl.batch.schema import HostBatch, Own


def slice_of_rows(offsets_S: np.ndarray, size: int) -> np.ndarray:
    """The slice of every row: `[T]` int64 numbers below `size`.

    Args:
        offsets_S: first row of each segment, and the end T.

    Raises:
        ValueError: `size` does not divide T.
    """
    num_rows = int(offsets_S[-1])
    if num_rows % size:
        raise ValueError(
            f"{num_rows} token rows (batch x padded length) do not divide by the context-parallel "
            f"degree {size}: set data.pad_to_multiple_of to a multiple of {size}"
        )
    lengths_S = np.diff(offsets_S)
    chunks_S = lengths_S // (2 * size)
    place_T = np.arange(num_rows) - np.repeat(offsets_S[:-1], lengths_S)
    # A segment of fewer rows than chunks is dealt whole.
    chunk_T = place_T // np.repeat(np.maximum(chunks_S, 1), lengths_S)
    is_left_T = place_T >= np.repeat(2 * size * chunks_S, lengths_S)
    slice_T = np.minimum(chunk_T, 2 * size - 1 - chunk_T)
    slice_T[is_left_T] = np.arange(np.count_nonzero(is_left_T)) % size
    return slice_T


class RowSlice(NamedTuple):
    """One rank's slice.

    Attributes:
        rank: its number.
        rows: `[Q]` int64, ascending.
        slices, places: `[T]` slice of every row of the batch, and its place there.
        key_rows: `[1, 1, T, 2]` int32: of each key the place in the slice after the last row that
            sees it, and of the first one. Keys in the order of an all-gather: those of rank 0, ...
    """

    rank: int
    rows: np.ndarray
    slices: np.ndarray
    places: np.ndarray
    key_rows: np.ndarray

    @classmethod
    def of(cls, offsets_S: np.ndarray, rank: int, size: int) -> "RowSlice":
        """The slice of a rank, see `slice_of_rows`."""
        slice_T = slice_of_rows(offsets_S, size)
        keys_T, place_T = np.argsort(slice_T, kind="stable"), np.empty_like(slice_T)
        place_T[keys_T] = np.arange(slice_T.size) % (slice_T.size // size)
        is_own_T = slice_T == rank
        # Rows of the slice before each row of the batch, and all of them.
        before = np.concatenate([[0], np.cumsum(is_own_T)])
        ends_T = np.repeat(offsets_S[1:], np.diff(offsets_S))
        key_rows = np.stack([before[ends_T[keys_T]], before[keys_T]], axis=1).astype(np.int32)
        return cls(rank, np.flatnonzero(is_own_T), slice_T, place_T, key_rows[None, None])

    @property
    def orders(self) -> np.ndarray:
        """`[2, T]` int64: of each row of the batch the place in an all-gather of the slices, and of
        each of these places the row."""
        gathered_T = self.slices * len(self.rows) + self.places
        return np.stack([gathered_T, np.argsort(gathered_T)])

    def chosen(self, numbers_N: np.ndarray) -> np.ndarray:
        """Which of some row numbers are in the slice: bool."""
        return self.slices[numbers_N] == self.rank

    def shards(self, numbers_N: np.ndarray, parts: int) -> np.ndarray:
        """Numbers of the shards with these rows, if every slice has `parts` equal ones."""
        places_N = self.places[numbers_N]
        return self.slices[numbers_N] * parts + places_N * parts // len(self.rows)


def own_indices(batch: Own, part: RowPart, expert_part: RowPart = WHOLE_BATCH) -> Own:
    """A batch whose indices are of all token rows, with those of a shard; so are those of a batch
    within it.

    Args:
        part: token rows of this rank, for the visual indices.
        expert_part: token rows that its experts take.

    Raises:
        ValueError: `part.size` does not divide the token rows.
    """
    update_M, gather_M = batch["visual_update_indices"], batch["visual_gather_indices"]
    start, stop = part.bounds(batch["input_ids"].size)
    own = slice(*np.searchsorted(update_M, [start, stop]))
    found: dict[str, Any] = {
        "visual_update_indices": update_M[own] - start,
        "visual_gather_indices": gather_M[own],
    }
    if "real_row_indices" in batch:
        rows = expert_part.of_numbers(batch["real_row_indices"], batch["input_ids"].size)
        found["real_row_indices"] = rows
    for name, value in batch.items():
        if isinstance(value, HostBatch):
            found[name] = own_indices(value, part, expert_part)
    return batch | found
