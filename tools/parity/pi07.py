"""Golden cases of pi07: training with every gradient, sampling, and single components.

Tolerances are those of the golden README: in float32 1e-4 relative plus 1e-5 absolute; gradients
1e-4 of the largest entry of a tensor, or 1e-6 absolute where the full gradient is rounding (a
key's bias shifts a full row of scores, so its gradient is zero); a trajectory 5e-4 of the largest
loss or norm, and of the norm of each weight.

Cases computed in bfloat16 are compared at 2e-2 of a tensor's largest entry and 6e-2 of the norm of
a gradient, with a float32 run on the same weights or, with `--dtype bfloat16`, a bfloat16 run.
"""

from collections.abc import Iterator

from paddle_vl.nn.linear import default_dtype
from parity.golden import PI07Case, PI07Folders
from parity.pi07_golden import Comparison
from parity.pi07_parts import run_engine, run_freeze, run_ops, run_optimizer, run_video
from parity.pi07_policy import run_normalize, run_policy
from parity.pi07_training import run_planner, run_sampling, run_training, run_trajectory

FOLDERS = PI07Folders
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
# Runners of cases whose kind does not determine one, by number in the golden README.
NUMBERED = {"13": run_training, "19": run_planner, "20": run_trajectory}


def run_cases(
    golden: PI07Folders, cases: list[PI07Case], scale: float, dtype: str
) -> Iterator[Comparison]:
    """Yield a report for every case."""
    for case in cases:
        report = Comparison(case.name, scale)
        run = NUMBERED.get(case.name[:2], RUNNERS.get(case.kind))
        if dtype != "float32" and not case.is_bfloat16:
            report.unsupported = f"dtype {dtype}: the case is for float32"
        elif run is None:
            report.unsupported = f"a case of kind {case.kind!r}"
        else:
            try:
                report.golden, report.is_bfloat16 = case.tensors, case.is_bfloat16
                with default_dtype(dtype):
                    run(case, report)
            except (KeyError, ValueError, RuntimeError) as error:
                # A malformed case does not stop the others.
                report.unsupported = f"{type(error).__name__}: {error}"
        yield report
