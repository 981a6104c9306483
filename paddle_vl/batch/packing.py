"""Several samples in one row: where each of them begins among the token rows.

`cu_seqlens` `[S + 1]` int32 counts the T = B * L token rows, batch-major, up to each of S segments:
0 first, T last. A segment is a sample, or the padding at the end of a row; none crosses from a row
into the next. Two samples of 3 and 2 tokens in a row of 6, one of 4 in the next:

    row 0    a a a b b .          cu_seqlens = [0, 3, 5, 6, 10, 12]
    row 1    c c c c . .
"""

from collections.abc import Sequence

import numpy as np


def segment_offsets(lengths: Sequence[Sequence[int]], padded_length: int) -> np.ndarray:
    """`cu_seqlens` of rows that hold samples of these lengths and are filled up at the right."""
    segments: list[int] = []
    for row in lengths:
        segments += row
        if padding := padded_length - sum(row):
            segments.append(padding)
    return np.concatenate([[0], np.cumsum(segments)]).astype(np.int32)


def restart_offsets(text_positions_BL: np.ndarray) -> np.ndarray:
    """`cu_seqlens` from text positions: a segment begins where they do not go on by 1.

    Source: `find_packed_sequence_indices` of HF transformers.
    """
    begins_BL = np.diff(text_positions_BL, axis=1, prepend=0) != 1
    begins_BL[:, 0] = True
    return np.append(np.flatnonzero(begins_BL), begins_BL.size).astype(np.int32)


def check_offsets(cu_seqlens: np.ndarray, batch: int, length: int) -> None:
    """Raise unless the segments tile the rows of a `[batch, length]` batch.

    Raises:
        ValueError: they do not increase from 0 to B * L, or one crosses the end of a row.
    """
    offsets = np.asarray(cu_seqlens)
    tiles = (
        offsets.ndim == 1
        and offsets.size > 1
        and offsets[0] == 0
        and offsets[-1] == batch * length
        and (np.diff(offsets) > 0).all()
    )
    if not tiles:
        raise ValueError(
            f"cu_seqlens {_shown(offsets)} must increase from 0 to {batch * length}, the token "
            f"rows of a [{batch}, {length}] batch, padding counted as a segment of its own"
        )
    if missing := sorted(set(range(0, batch * length, length)) - set(offsets.tolist())):
        raise ValueError(
            f"a segment of cu_seqlens {_shown(offsets)} crosses token row {missing[0]}, where a "
            f"row of {length} tokens begins: samples are packed within rows"
        )


def key_ends(cu_seqlens: np.ndarray, length: int) -> np.ndarray:
    """For every token row the end, counted within its row of the batch, of its segment:
    `[B, L]` int32. Queries from there on do not see it."""
    ends_T = np.repeat(cu_seqlens[1:], np.diff(cu_seqlens))
    row_starts_T = np.arange(ends_T.size) // length * length
    return (ends_T - row_starts_T).reshape(-1, length).astype(np.int32)


def real_lengths(attention_mask_BL: np.ndarray, cu_seqlens: np.ndarray | None = None) -> np.ndarray:
    """Real tokens of every sample: `[B]`, or those of each segment that is not padding."""
    if cu_seqlens is None:
        return attention_mask_BL.sum(axis=1)
    lengths = np.add.reduceat(attention_mask_BL.reshape(-1), cu_seqlens[:-1])
    return lengths[lengths > 0]


def _shown(offsets: np.ndarray) -> str:
    values = offsets.reshape(-1).tolist()
    return str(values) if len(values) <= 8 else f"[{', '.join(map(str, values[:8]))}, ...]"
