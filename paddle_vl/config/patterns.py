"""Patterns over names: of parameters, of modules."""

import difflib
import fnmatch
from collections.abc import Iterable, Mapping, Sequence


def matching_names(
    patterns: Sequence[str],
    names: Iterable[str],
    setting: str,
    *,
    kind: str = "parameters",
    groups: Mapping[str, Sequence[str]] | None = None,
    by_suffix: bool = False,
) -> set[str]:
    """The names that at least one pattern (`*`, `?`, case counts) fits.

    Args:
        setting: where the patterns come from, for the message.
        kind: what the names are of, for the message.
        groups: words that may stand for several patterns.
        by_suffix: a pattern may also fit the end of a name, behind a dot.

    Raises:
        ValueError: a pattern that fits no name, with the nearest names.
    """
    names, groups = list(names), groups or {}
    matched: set[str] = set()
    for pattern in patterns:
        alternatives = list(groups.get(pattern, [pattern]))
        if by_suffix:
            alternatives += [f"*.{alternative}" for alternative in alternatives]
        fitting = {
            name for name in names if any(fnmatch.fnmatchcase(name, p) for p in alternatives)
        }
        if not fitting:
            raise ValueError(
                f"{setting}: the pattern {pattern!r} fits none of {len(names)} {kind}; the nearest "
                f"are {', '.join(_nearest(pattern, names, by_suffix))}"
            )
        matched |= fitting
    return matched


def _nearest(pattern: str, names: Sequence[str], by_suffix: bool) -> list[str]:
    """Three names like the pattern; where it may be an end of them, those with such an end."""
    depth = pattern.count(".") + 1
    ends: dict[str, str] = {}
    for name in names:
        ends.setdefault(".".join(name.split(".")[-depth:]) if by_suffix else name, name)
    close = difflib.get_close_matches(pattern, ends, n=3, cutoff=0.0)
    return [ends[end] for end in close]
