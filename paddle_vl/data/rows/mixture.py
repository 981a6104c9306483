"""Which rows of which sources a run draws: a pure function of the sources, their sizes and the
seed, so that it is the same on every rank and after a restart.

Shapes: D rows that are drawn.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from xxhash import xxh3_64_intdigest

from paddle_vl.config.row_sources import RowSourceConfig, Strategy

_CHUNK = 1 << 16
# As many as a source may give.
_MOST_DRAWS = 10**9


@dataclass(frozen=True)
class Draws:
    """The rows of a mixture, in order; a trainer may shuffle them in each epoch.

    Attributes:
        sources: `[D]` numbers of the sources.
        rows: `[D]` numbers of rows in them.
    """

    sources: np.ndarray
    rows: np.ndarray

    def __len__(self) -> int:
        return len(self.rows)


def draws_of(
    sources: Sequence[RowSourceConfig],
    counts: Sequence[int],
    strategy: Strategy = "concat",
    *,
    seed: int,
) -> Draws:
    """The rows that a run draws.

    Args:
        counts: rows that each source has.
        strategy: `concat`: all rows, source by source; `interleave_*`: see `interleaved`.

    Raises:
        ValueError: a source gives no row, or the weights do not fit.
    """
    weights = checked_weights([each.weight for each in sources], strategy)
    kept = [number for number in range(len(sources)) if weights is None or weights[number] > 0]
    labels = [each.label for each in sources]
    rows = [drawn_rows(sources[n], counts[n], seed, labels[:n].count(labels[n])) for n in kept]
    if strategy == "concat":
        source_D = np.repeat(np.arange(len(rows)), [len(each) for each in rows])
        row_D = np.concatenate(rows)
    else:
        own = None if weights is None else [weights[number] for number in kept]
        source_D, place_D = interleaved([len(each) for each in rows], own, strategy, seed=seed)
        row_D = np.empty_like(place_D)
        for number, each in enumerate(rows):
            row_D[source_D == number] = each[place_D[source_D == number]]
    return Draws(np.array(kept)[source_D], row_D)


def checked_weights(weights: Sequence[float | None], strategy: Strategy) -> Sequence[float] | None:
    """The weights of all sources, None if they have none.

    Raises:
        ValueError: only some have one, all are 0, or the strategy has no use for them.
    """
    given = [weight for weight in weights if weight is not None]
    if not given:
        return None
    if len(given) < len(weights):
        raise ValueError(
            f"{len(given)} of {len(weights)} sources have a weight: give all of them one, or none"
        )
    if not any(given):
        raise ValueError("all weights are 0, so that there are no rows: give a source another")
    if strategy == "concat" and len({weight for weight in given if weight}) > 1:
        raise ValueError(
            f"the sources have weights {given}, which strategy concat has no use for: use "
            "interleave_under, interleave_over or interleave_once, or num_samples and ratio"
        )
    return given


def drawn_rows(source: RowSourceConfig, count: int, seed: int, earlier: int = 0) -> np.ndarray:
    """Numbers of a source's rows: all of them as often as they fit into the number that is asked
    for, then the first ones of a permutation.

    Args:
        earlier: sources of the same name before this one, which draw other rows.

    Raises:
        ValueError: that is no row.
    """
    wanted = source.num_samples or (count if source.ratio is None else int(count * source.ratio))
    if not count or not wanted:
        raise ValueError(
            f"source {source.label} gives no row: it has {count}, and its ratio is {source.ratio}: "
            "raise the ratio, or leave the source out"
        )
    times, rest = divmod(wanted, count)
    key = xxh3_64_intdigest(source.label.encode())
    some = np.random.default_rng([seed, key, earlier]).permutation(count)[:rest] if rest else []
    return np.concatenate([np.tile(np.arange(count), times), np.array(some, dtype=np.int64)])


def interleaved(
    lengths: Sequence[int], weights: Sequence[float] | None, strategy: Strategy, *, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Sources, and places in them, in the order of `datasets.interleave_datasets`.

    Args:
        lengths: rows of each source.
        weights: drawing probabilities, divided by their sum; None takes the sources in turn.
        strategy: `interleave_under` ends when the first source is used up, `interleave_over` when
            all are, beginning the others again, and `interleave_once` when all are, each row once.

    Returns:
        `[D]` source, `[D]` place.

    Raises:
        ValueError: a weight is so small that its source is hardly ever drawn.
    """
    limits = np.asarray(lengths)
    if weights is None:
        turns = int(limits.min() if strategy == "interleave_under" else limits.max())
        source_D = np.tile(np.arange(len(limits)), turns)
        place_D = np.repeat(np.arange(turns), len(limits))
    else:
        source_D, place_D = _by_chance(limits, np.asarray(weights, dtype=float), strategy, seed)
    if strategy == "interleave_once":
        first = place_D < limits[source_D]
        return source_D[first], place_D[first]
    return source_D, place_D % limits[source_D]


def _by_chance(
    limits: np.ndarray, weights: np.ndarray, strategy: Strategy, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Sources by chance until enough of them are used up, and how often each came before."""
    rng, chunks = np.random.default_rng(seed), []
    seen = np.zeros_like(limits)
    enough, end_of = (np.any, min) if strategy == "interleave_under" else (np.all, max)
    with np.errstate(all="ignore"):
        draws = end_of(limits * weights.sum() / weights)
    if not draws <= _MOST_DRAWS:
        raise ValueError(
            f"{strategy} with the weights {weights.tolist()} of sources of {limits.tolist()} rows "
            f"ends after some {draws:.0e} rows, more than {_MOST_DRAWS:.0e}: raise the smallest"
        )
    while not enough(seen >= limits):
        chunks.append(rng.choice(len(limits), size=_CHUNK, p=weights / weights.sum()))
        seen += np.bincount(chunks[-1], minlength=len(limits))
    source_D = np.concatenate(chunks)
    place_D = np.empty_like(source_D)
    ends = []
    for number, limit in enumerate(limits):
        at = np.flatnonzero(source_D == number)
        place_D[at] = np.arange(len(at))
        ends.append(at[limit - 1] + 1 if len(at) >= limit else len(source_D))
    end = end_of(ends)
    return source_D[:end], place_D[:end]
