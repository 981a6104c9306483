"""Packing of samples into rows of bounded length (bin packing, best fit decreasing).

Shapes: N samples.
"""

from dataclasses import dataclass

import numpy as np

# Samples packed together: enough to choose from, few enough to keep the random order.
WINDOW = 1024
# Rows that are emptier are packed again with the next window, up to `_CARRIED` samples in all.
_GOOD_FILL = 0.99
_CARRIED = WINDOW // 4


@dataclass(frozen=True)
class RowBudget:
    """Limits of a packed row.

    Attributes:
        tokens: most tokens of all kinds.
        vision_tokens: most tokens of images and videos; None for no separate limit.
    """

    tokens: int
    vision_tokens: int | None = None

    @property
    def vision_limit(self) -> int:
        """Most vision tokens of a row."""
        return self.tokens if self.vision_tokens is None else self.vision_tokens


@dataclass(frozen=True)
class SampleLengths:
    """Tokens and vision tokens of every sample, each `[N]` int64; the former include the latter.

    A length of 0 marks a sample that is left out.
    """

    tokens: np.ndarray
    vision: np.ndarray


def pack(
    order: np.ndarray, lengths: SampleLengths, budget: RowBudget, rng: np.random.Generator | None
) -> list[np.ndarray]:
    """Rows of sample numbers; every sample of `order` is in exactly one row.

    Args:
        order: int64 sample numbers, packed window by window.
        rng: shuffles the rows of each window; None keeps them sorted by their longest sample.

    Raises:
        ValueError: a single sample exceeds the budget.
    """
    sizes = (lengths.tokens, lengths.vision)
    limits = (budget.tokens, budget.vision_limit)
    for size_N, limit, what in zip(sizes, limits, ("tokens", "vision tokens"), strict=True):
        if (size_N[order] > limit).any():
            number = int(order[size_N[order].argmax()])
            raise ValueError(
                f"sample {number} has {size_N[number]} {what} and a packed row holds {limit}"
            )
    rows: list[np.ndarray] = []
    carried = order[:0]
    for start in range(0, len(order), WINDOW):
        pool = np.concatenate([carried, order[start : start + WINDOW]])
        packed = _best_fit_decreasing(pool, *sizes, *limits)
        carried = order[:0]
        if start + WINDOW < len(order):
            packed, carried = _take_apart(packed, lengths.tokens, budget.tokens)
        if rng is not None:
            packed = [packed[i] for i in rng.permutation(len(packed))]
        rows += packed
    return rows


def fill_batches(rows: list[np.ndarray], lengths: SampleLengths, batch: int) -> list[np.ndarray]:
    """Extend the rows to a multiple of `batch`: split the longest of the last rows in two until
    there are enough; add empty rows if single samples cannot be split."""
    missing = -len(rows) % batch
    full = len(rows) - len(rows) % batch
    rows, last = rows[:full], list(rows[full:])
    for _ in range(missing):
        sizes = [lengths.tokens[row].sum() if len(row) > 1 else 0 for row in last]
        if not any(sizes):
            last.append(np.zeros(0, dtype=np.int64))
            continue
        longest = int(np.argmax(sizes))
        last += _halves(last.pop(longest), lengths.tokens)
    return rows + last


def _best_fit_decreasing(
    pool: np.ndarray, tokens_N: np.ndarray, vision_N: np.ndarray, tokens: int, vision: int
) -> list[np.ndarray]:
    """Place samples, largest first, each into the fullest row with room for it."""
    share = np.maximum(tokens_N[pool] / tokens, vision_N[pool] / max(vision, 1))
    pool = pool[np.argsort(-share, kind="stable")]
    free_tokens, free_vision = np.empty((2, len(pool)), dtype=np.int64)
    rows: list[list[int]] = []
    for number in pool.tolist():
        own_tokens, own_vision = tokens_N[number], vision_N[number]
        opened = len(rows)
        fits = np.flatnonzero(
            (free_tokens[:opened] >= own_tokens) & (free_vision[:opened] >= own_vision)
        )
        if fits.size:
            row = fits[free_tokens[fits].argmin()]
        else:
            row = opened
            rows.append([])
            free_tokens[row], free_vision[row] = tokens, vision
        rows[row].append(number)
        free_tokens[row] -= own_tokens
        free_vision[row] -= own_vision
    return [np.array(row, dtype=np.int64) for row in rows]


def _take_apart(
    rows: list[np.ndarray], tokens_N: np.ndarray, limit: int
) -> tuple[list[np.ndarray], np.ndarray]:
    """The rows to keep, and the samples of the emptiest rows."""
    fill = np.array([tokens_N[row].sum() for row in rows]) / limit
    emptiest = [i for i in np.argsort(fill, kind="stable") if fill[i] < _GOOD_FILL]
    counts = np.cumsum([len(rows[i]) for i in emptiest])
    apart = set(emptiest[: int(np.searchsorted(counts, _CARRIED, side="right"))])
    samples = [rows[i] for i in sorted(apart)]
    kept = [row for i, row in enumerate(rows) if i not in apart]
    return kept, np.concatenate(samples) if samples else np.zeros(0, dtype=np.int64)


def _halves(row: np.ndarray, tokens_N: np.ndarray) -> list[np.ndarray]:
    """Two rows of similar length: samples, longest first, each into the shorter row."""
    halves: list[list[int]] = [[], []]
    filled = [0, 0]
    for number in row[np.argsort(-tokens_N[row], kind="stable")].tolist():
        shorter = int(filled[1] < filled[0])
        halves[shorter].append(number)
        filled[shorter] += int(tokens_N[number])
    return [np.array(half, dtype=np.int64) for half in halves]


def check_ranks(batch_size: int, rank: int, size: int) -> None:
    """Raise a ValueError for a batch size below 1 or a data-parallel rank outside the world."""
    if batch_size < 1:
        raise ValueError(f"batch size is {batch_size}; at least 1 is needed")
    if not 0 <= rank < size:
        raise ValueError(f"data-parallel rank {rank} is outside [0, {size})")
