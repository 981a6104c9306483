"""Token rows that predict something, and what: NumPy only, for loader workers."""

import numpy as np

IGNORE_INDEX = -100


def target_rows(targets_T: np.ndarray) -> np.ndarray:
    """Numbers of the rows whose target is not `IGNORE_INDEX`, and these targets: `[2, N]` int64.

    Row 0 if there is none: all ranks run the head, whatever their data.
    """
    rows_N = np.flatnonzero(targets_T != IGNORE_INDEX)
    if not rows_N.size:
        rows_N = np.zeros(1, dtype=np.int64)
    return np.stack([rows_N, targets_T[rows_N]])
