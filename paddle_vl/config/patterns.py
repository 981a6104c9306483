"""Patterns (`*`, `?`) over the names of parameters or modules."""

import difflib
import fnmatch
from collections.abc import Iterable, Iterator, Mapping, Sequence


def matching_names(
    patterns: Sequence[str],
    names: Iterable[str],
    setting: str,
    *,
    kind: str = "parameters",
    groups: Mapping[str, Sequence[str]] | None = None,
    by_suffix: bool = False,
) -> set[str]:
    """The names that match at least one pattern (`*`, `?`, case-sensitive).

    Args:
        setting: name of the setting with the patterns, for the error.
        kind: what the names belong to, for the error.
        groups: named groups of patterns.
        by_suffix: a pattern may also match the end of a name after a dot.

    Raises:
        ValueError: a pattern matches no name; the message has the nearest names.
    """
    names, groups = list(names), groups or {}
    matched: set[str] = set()
    for pattern in patterns:
        alternatives = list(groups.get(pattern, [pattern]))
        if by_suffix:
            alternatives += [f"*.{alternative}" for alternative in alternatives]
        found = {name for name in names if any(fnmatch.fnmatchcase(name, p) for p in alternatives)}
        if not found:
            raise ValueError(
                f"{setting}: the pattern {pattern!r} fits none of {len(names)} {kind}; the nearest "
                f"are {', '.join(_nearest(pattern, names, by_suffix))}"
            )
        matched |= found
    return matched


def misspelt_groups(patterns: Iterable[str], setting: str, groups: Iterable[str]) -> Iterator[str]:
    """Messages about entries without a dot or pattern that are close to the name of a group."""
    groups = list(groups)
    for pattern in patterns:
        if pattern not in groups and not set(pattern) & set(".*?["):
            for near in difflib.get_close_matches(pattern, groups, n=1):
                yield (
                    f"{setting}: no part of the model is called {pattern!r}; did you mean {near}? "
                    f"(the parts are {', '.join(groups)})"
                )


def _nearest(pattern: str, names: Sequence[str], by_suffix: bool) -> list[str]:
    """Three names close to the pattern, compared by their ends if it may match ends."""
    depth = pattern.count(".") + 1
    ends: dict[str, str] = {}
    for name in names:
        ends.setdefault(".".join(name.split(".")[-depth:]) if by_suffix else name, name)
    close = difflib.get_close_matches(pattern, ends, n=3, cutoff=0.0)
    return [ends[end] for end in close]
