"""A check: its name, what it needs, the result of running it, and which checks are chosen."""

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from paddle_vl.files.names import nearest

if TYPE_CHECKING:
    from paddle_vl.nn.examples import Dtype

# `wrong` is a finding; the others are not. `info` states what is, without a bound.
Status = Literal["ok", "wrong", "skipped", "info"]
# Key of the figures of a check that raised.
TRACEBACK = "traceback"


@dataclass(frozen=True)
class Result:
    """What a check found.

    Attributes:
        found: one sentence; of a skipped check the reason.
        figures: numbers and names by key, JSON values. Keys end in their unit, such as
            `_gb` (10^9 bytes).
        remedy: what to do; only of a wrong result.
    """

    status: Status
    found: str
    figures: Mapping[str, Any] = field(default_factory=dict)
    remedy: str = ""


def ok(found: str, **figures: Any) -> Result:
    return Result("ok", found, figures)


def info(found: str, **figures: Any) -> Result:
    return Result("info", found, figures)


def wrong(found: str, remedy: str, **figures: Any) -> Result:
    return Result("wrong", found, figures, remedy)


@dataclass(frozen=True)
class Machine:
    """The machine as Paddle sees it.

    Attributes:
        num_devices: GPUs that are visible; 0 on a CPU.
        has_bfloat16: whether the device has kernels for bfloat16.
        is_quick: whether small sizes and few repetitions are asked for.
        folder: for files of the checks; removed afterwards.
    """

    device: Literal["cpu", "gpu"]
    num_devices: int
    has_bfloat16: bool
    is_quick: bool
    folder: Path

    @property
    def dtypes(self) -> "tuple[Dtype, ...]":
        """Those that the device has kernels for."""
        return ("float32", "bfloat16") if self.has_bfloat16 else ("float32",)

    @property
    def num_ranks(self) -> int:
        """Ranks of the checks with several processes: 2, 4 or 8; 1 where they cannot run."""
        if self.device == "cpu":
            return 2
        return max(size for size in (1, 2, 4, 8) if size <= max(1, self.num_devices))


Run = Callable[[Machine], Result]
R = TypeVar("R", bound=Callable[..., Result])


@dataclass(frozen=True)
class Check:
    """One check.

    Attributes:
        name: `group.item`.
        title: what it shows, in a few words.
        run: returns the result; an exception is a finding too.
        needs_bfloat16: whether the check is skipped without.
        limit_s: seconds until the check counts as hanging.
        is_quick: whether `--quick` runs it.
    """

    name: str
    title: str
    run: Run
    needs_bfloat16: bool = False
    limit_s: float = 60.0
    is_quick: bool = True

    @property
    def group(self) -> str:
        return self.name.partition(".")[0]


# Modules with checks, in the order in which these run.
_PARTS = ("environment", "golden", "kernels", "ranks")
CHECKS: list[Check] = []


def all_checks() -> list[Check]:
    """Every check; some are skipped on a machine, with a reason."""
    for part in _PARTS:
        import_module(f"paddle_vl.doctor.{part}")
    return CHECKS


def check(name: str, **settings: Any) -> Callable[[R], R]:
    """Decorator: add a function to the checks; its docstring is the title.

    Args:
        settings: see `Check`.
    """

    def add(run: R) -> R:
        CHECKS.append(Check(name, (run.__doc__ or "").rstrip("."), run, **settings))
        return run

    return add


def run_check(check: Check, machine: Machine) -> Result:
    """Run a check in this process; an exception becomes a finding."""
    if check.needs_bfloat16 and not machine.has_bfloat16:
        why = "needs a GPU with bfloat16 (compute capability 8.0); Paddle's CPU kernels lack it"
        return Result("skipped", why)
    try:
        return check.run(machine)
    except (Exception, SystemExit) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        # Paddle's messages begin with a stack and have their reason at the end.
        shown = f"{lines[0]} ... {lines[-1]}" if len(lines) > 3 else "".join(lines[:1])
        return wrong(
            f"raised {type(error).__name__}: {shown:.300}",
            "an error of the package, of Paddle or of the driver: report it with this table and "
            "--json",
            **{TRACEBACK: "".join(traceback.format_exception(error))[-3000:]},
        )


class UnknownCheckError(ValueError):
    """`--only` names a check that does not exist."""


def chosen_checks(
    checks: Sequence[Check], only: Sequence[str] = (), is_quick: bool = False
) -> list[Check]:
    """The checks to run, in their order.

    Args:
        only: names of checks or groups; empty for all.
        is_quick: whether to leave slow checks out, unless `only` names them.

    Raises:
        UnknownCheckError: a name is neither a check's nor a group's; names the nearest.
    """
    names = {name for check in checks for name in (check.name, check.group)}
    for name in only:
        if name not in names:
            raise UnknownCheckError(
                f"--only {name}: there is no such check or group; {nearest(name, sorted(names))}"
                " (`paddle-vl doctor --list` lists them)"
            )
    if only:
        return [check for check in checks if {check.name, check.group} & set(only)]
    return [check for check in checks if check.is_quick or not is_quick]
