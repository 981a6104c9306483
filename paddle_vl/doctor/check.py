"""A check: its name, what it needs, and the result of running it."""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

# Dtypes under test.
Dtype = Literal["float32", "bfloat16"]
# `wrong` is a finding; the others are not. `info` states what is, without a bound.
Status = Literal["ok", "wrong", "skipped", "info"]
# Key of the figures of a check that raised.
TRACEBACK = "traceback"
STATUSES: tuple[Status, ...] = ("ok", "wrong", "skipped", "info")


@dataclass(frozen=True)
class Result:
    """What a check found.

    Attributes:
        found: one sentence; of a skipped check the reason.
        figures: numbers and names by key, JSON values. Keys end in their unit: `_s`, `_ms`,
            `_gb_per_s` (10^9 bytes), `_tflop_per_s`, `_gb`.
        remedy: what to do; only of a wrong result.
    """

    status: Status
    found: str
    figures: Mapping[str, Any] = field(default_factory=dict)
    remedy: str = ""

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "figures": finite(dict(self.figures))}


def ok(found: str, **figures: Any) -> Result:
    return Result("ok", found, figures)


def info(found: str, **figures: Any) -> Result:
    return Result("info", found, figures)


def skipped(reason: str) -> Result:
    return Result("skipped", reason)


def wrong(found: str, remedy: str, **figures: Any) -> Result:
    return Result("wrong", found, figures, remedy)


@dataclass(frozen=True)
class Machine:
    """The machine as Paddle sees it.

    Attributes:
        device: `cpu` or `gpu`.
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
    def num_ranks(self) -> int:
        """Ranks of the checks with several processes: 2, 4 or 8; 1 where they cannot run."""
        if self.device == "cpu":
            return 2
        return max(size for size in (1, 2, 4, 8) if size <= max(1, self.num_devices))


@dataclass(frozen=True)
class Need:
    """Something that a check needs of the machine.

    Attributes:
        missing: reason of a skipped check.
    """

    is_met: Callable[[Machine], bool]
    missing: str


GPU = Need(lambda machine: machine.device == "gpu", "needs a GPU, and Paddle computes on a CPU")
SEVERAL_RANKS = Need(
    lambda machine: machine.num_ranks > 1,
    "needs two GPUs on this machine, and one is visible",
)
BFLOAT16 = Need(
    lambda machine: machine.has_bfloat16,
    "needs a GPU with bfloat16 (compute capability 8.0); Paddle's CPU kernels lack it",
)


@dataclass(frozen=True)
class Check:
    """One check.

    Attributes:
        name: `group.item`.
        title: what it shows, in a few words.
        run: returns the result; an exception is a finding too.
        needs: without these the check is skipped.
        limit_s: seconds until the check counts as hanging.
        is_quick: whether `--quick` runs it.
    """

    name: str
    title: str
    run: Callable[[Machine], Result]
    needs: tuple[Need, ...] = ()
    limit_s: float = 60.0
    is_quick: bool = True

    @property
    def group(self) -> str:
        return self.name.partition(".")[0]


def run_check(check: Check, machine: Machine) -> Result:
    """Run a check in this process; an exception becomes a finding."""
    for need in check.needs:
        if not need.is_met(machine):
            return skipped(need.missing)
    try:
        return check.run(machine)
    except (Exception, SystemExit) as error:
        import traceback

        frames = traceback.extract_tb(error.__traceback__)
        place = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "unknown"
        text = str(error).strip() or "without a message"
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        # Paddle's messages begin with a stack and have their reason at the end.
        shown = lines[0] if len(lines) < 4 else f"{lines[0]} ... {lines[-1]}"
        return wrong(
            f"raised {type(error).__name__}: {shown:.300}",
            "an error of the package, of Paddle or of the driver: report it with this table and "
            "--json",
            **{"place": place, TRACEBACK: "".join(traceback.format_exception(error))[-3000:]},
        )


def finite(value: Any) -> Any:
    """The value with numbers that JSON lacks (NaN, infinities) as strings."""
    if isinstance(value, Mapping):
        return {str(key): finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [finite(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
