"""Names that are none here: the nearest that is one, and what to do about those of other packages.

A package's names are a table of data, `{name: Foreign(remedy, neutral)}`, beside the function that
users of that package call; the functions here read every such table.
"""

import difflib
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, ParamSpec, TypeVar

from paddle_vl.files.text_file import shown

P = ParamSpec("P")
R = TypeVar("R")


class Foreign(NamedTuple):
    """An argument or setting of another package that is not one here.

    Attributes:
        remedy: what to do instead.
        neutral: values at which it asks for nothing.
    """

    remedy: str
    neutral: tuple = (None, False)

    def asks(self, value: Any) -> bool:
        """Whether a value asks for something."""
        # By identity where there are no scalars: an array has no single truth value.
        is_scalar = isinstance(value, str | int | float)
        return not any(value is each or (is_scalar and value == each) for each in self.neutral)


def without_foreign(
    given: Mapping[str, Any], known: Mapping[str, Foreign], owner: str
) -> dict[str, Any]:
    """The arguments without those of another package that ask for nothing.

    Args:
        known: those of the other package, by name.
        owner: who takes the arguments, for the message.

    Raises:
        ValueError: some ask for something; says of each what to do instead.
    """
    problems = []
    for name, value in given.items():
        if name in known and known[name].asks(value):
            found = f"shape {list(value.shape)}" if hasattr(value, "shape") else shown(value)
            problems.append(f"{owner} has no {name} ({found} was given): {known[name].remedy}")
    if problems:
        raise ValueError("; ".join(problems))
    return {name: value for name, value in given.items() if name not in known}


def refuse_foreign(given: Mapping[str, Any], known: Mapping[str, Foreign], owner: str) -> None:
    """Accept arguments of another package that ask for nothing, and refuse all others.

    Raises:
        ValueError: see `without_foreign`.
        TypeError: an argument is not the other package's either.
    """
    if unknown := without_foreign(given, known, owner):
        raise TypeError(f"{owner} has no argument {', '.join(unknown)}")


def explains(
    known: Mapping[str, Foreign], owner: str
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator: `without_foreign` on the keyword arguments of a function."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def explained(*args: Any, **kwargs: Any) -> R:
            return function(*args, **without_foreign(kwargs, known, owner))

        return explained

    return decorate


def nearest(name: str, known: Iterable[str], prefix: str = "") -> str:
    """A question after the nearest known name: `did you mean <prefix><name>?`"""
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.0)[0]
    return f"did you mean {prefix}{found}?"
