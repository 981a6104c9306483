"""Samples of different lengths into rows of bounded length: bins, filled best fit decreasing.

Shapes: N samples.
"""

from dataclasses import dataclass

import numpy as np

# Samples that are packed together: enough to choose from, few enough to keep their random order.
WINDOW = 1024
# A row that is emptier is taken apart and packed again with the samples of the next window,
# together with others up to a share of it, so that samples that nothing fits do not pile up.
_GOOD_FILL = 0.99
_CARRIED = WINDOW // 4


@dataclass(frozen=True)
class RowBudget:
    """What a row holds at most.

    Attributes:
        tokens: of all kinds.
        vision_tokens: of images and videos; None for as many as tokens.
    """

    tokens: int
    vision_tokens: int | None = None

    @property
    def vision_limit(self) -> int:
        return self.tokens if self.vision_tokens is None else self.vision_tokens


@dataclass(frozen=True)
class SampleLengths:
    """Tokens of every sample, and how many of them are of images and videos: `[N]` int64 both.

    A sample without tokens is none: it is left out.
    """

    tokens: np.ndarray
    vision: np.ndarray


def pack(
    order: np.ndarray, lengths: SampleLengths, budget: RowBudget, rng: np.random.Generator | None
) -> list[np.ndarray]:
    """Rows of sample numbers; every sample of `order` is in one of them.

    Args:
        order: sample numbers, packed window by window in this order.
        rng: shuffles the rows of a window, which are made in the order of their longest sample.

    Raises:
        ValueError: a sample alone exceeds the budget.
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
    """As many rows as whole batches of that size take: the last rows are cut in two, the longest
    first, until there are enough; rows without samples follow where even that does not do."""
    missing = -len(rows) % batch
    whole = len(rows) - len(rows) % batch
    rows, last = rows[:whole], list(rows[whole:])
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
    """Largest first, each into the fullest row that has place for it."""
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
    """The rows that stay, and the samples of the others, the emptiest."""
    fill = np.array([tokens_N[row].sum() for row in rows]) / limit
    emptiest = [i for i in np.argsort(fill, kind="stable") if fill[i] < _GOOD_FILL]
    counts = np.cumsum([len(rows[i]) for i in emptiest])
    apart = set(emptiest[: int(np.searchsorted(counts, _CARRIED, side="right"))])
    samples = [rows[i] for i in sorted(apart)]
    kept = [row for i, row in enumerate(rows) if i not in apart]
    return kept, np.concatenate(samples) if samples else np.zeros(0, dtype=np.int64)


def _halves(row: np.ndarray, tokens_N: np.ndarray) -> list[np.ndarray]:
    """Two rows of about the same length, each sample to the shorter one, the longest first."""
    halves: list[list[int]] = [[], []]
    filled = [0, 0]
    for number in row[np.argsort(-tokens_N[row], kind="stable")].tolist():
        shorter = int(filled[1] < filled[0])
        halves[shorter].append(number)
        filled[shorter] += int(tokens_N[number])
    return [np.array(half, dtype=np.int64) for half in halves]
