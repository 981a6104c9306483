"""Which checks of all are run."""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass

from paddle_vl.doctor.check import Check


class UnknownCheckError(ValueError):
    """`--only` names a check that does not exist."""


@dataclass(frozen=True)
class Choice:
    """The checks to run.

    Attributes:
        only: names of checks or groups; empty for all.
        is_quick: whether to leave slow checks out, unless `only` names them.
        done: names that were run already.
    """

    only: tuple[str, ...] = ()
    is_quick: bool = False
    done: tuple[str, ...] = ()


def chosen_checks(checks: Sequence[Check], choice: Choice) -> list[Check]:
    """The chosen ones, in their order.

    Raises:
        UnknownCheckError: a name is neither a check's nor a group's; names the nearest.
    """
    names = {name for check in checks for name in (check.name, check.group)}
    for name in choice.only:
        if name not in names:
            near = difflib.get_close_matches(name, sorted(names), 1)
            meant = f"; did you mean {near[0]}?" if near else ""
            raise UnknownCheckError(
                f"--only {name}: there is no such check or group{meant} "
                "`paddle-vl doctor --list` lists them"
            )
    chosen = []
    for check in checks:
        is_named = {check.name, check.group} & set(choice.only)
        is_wanted = is_named or (not choice.only and (check.is_quick or not choice.is_quick))
        if is_wanted and check.name not in choice.done:
            chosen.append(check)
    return chosen
