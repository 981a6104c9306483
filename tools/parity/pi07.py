"""Golden cases of pi07: training with every gradient, sampling, and the parts by themselves.

Tolerances are those of the golden README: in float32 a relative 1e-4 and an absolute 1e-5 on top.
Gradients, which may all be small, have 1e-4 of the largest entry of each tensor, and 1e-6 where
all of them are rounding (a key's bias shifts a whole row of scores, so its gradient is zero). A
trajectory may drift by 5e-4 of the largest loss or norm, and of the norm of each weight.

What was computed in bfloat16 is compared with a float32 run on the same weights: 2e-2 of a tensor's
largest entry, gradients 6e-2 of its norm (Paddle's CPU build cannot compute in bfloat16).
"""

from collections.abc import Iterator

from parity.comparison import CaseReport
from parity.pi07_golden import GoldenCase, GoldenFolders
from parity.pi07_optimizer import run_optimizer
from parity.pi07_parts import run_engine, run_freeze, run_ops, run_video
from parity.pi07_planner import run_planner
from parity.pi07_policy import run_normalize, run_policy
from parity.pi07_sampling import run_sampling
from parity.pi07_training import run_training, run_trajectory

__all__ = ["GoldenFolders", "run_cases"]

RUNNERS = {
    "train": run_training,
    "sample": run_sampling,
    "engine": run_engine,
    "ops": run_ops,
    "video": run_video,
    "normalize": run_normalize,
    "optim": run_optimizer,
    "policy": run_policy,
    "freeze": run_freeze,
}
# Kinds of two cases are told by their numbers in the golden README.
NUMBERED = {"13": run_training, "19": run_planner, "20": run_trajectory}


def run_cases(
    golden: GoldenFolders, cases: list[GoldenCase], scale: float, dtype: str
) -> Iterator[CaseReport]:
    """Yield a report for every case."""
    for case in cases:
        report = CaseReport(case.name, scale)
        run = NUMBERED.get(case.name[:2], RUNNERS.get(case.kind))
        if dtype != "float32":
            report.unsupported = f"dtype {dtype}: these cases are for float32"
        elif run is None:
            report.unsupported = f"a case of kind {case.kind!r}"
        else:
            try:
                run(case, report)
            except (KeyError, ValueError, RuntimeError) as error:
                # A case that is not as the README says, or lacks a file, fails alone.
                report.unsupported = f"{type(error).__name__}: {error}"
        yield report
