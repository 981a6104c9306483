"""Made-up profile results: measures of ranks, and cells of a matrix."""

from typing import Any

from paddle_vl.profile.cells import Cell, MatrixChoice
from paddle_vl.profile.memory import GB
from paddle_vl.profile.summary import RankMeasure
from paddle_vl.train.phases import Phase

FACTS = {"warmup": 2, "memory_limit_gb": 2.0, "distributed_type": "dp"}


def rank_measure(rank: int, steps: list[dict[Phase, float]], **given: Any) -> RankMeasure:
    """By default eight samples and no tokens in each step."""
    work = {
        "samples": [8] * len(steps),
        "tokens": [0] * len(steps),
        "cpu_seconds": [2.0] * len(steps),
    }
    memory = {"allocated": int(GB), "reserved": int(1.5 * GB), "memory_source": "the test"}
    seconds = [{name.value: value for name, value in step.items()} for step in steps]
    return RankMeasure(rank=rank, steps=seconds, **work | memory | given)


def cell(
    sharding: str,
    batch_size: int,
    speed: float | None = None,
    memory: float = 1.0,
    *,
    recompute: str = "none",
    cameras: int | None = 1,
    status: str = "ok",
    phases: dict[str, float] | None = None,
    settings: dict[str, Any] | None = None,
) -> Cell:
    """A cell; with `speed`, in samples per second, it is ok."""
    runs = []
    if status == "ok":
        step = 2 * batch_size / speed
        runs.append({
            "global_samples_per_sec": speed,
            "global_step_time_s": step,
            "samples_per_step": 2 * batch_size,
            "peak_reserved_gb_worst": memory,
            "peak_alloc_gb_worst": memory / 2,
            "memory_limit_gb": 4.0,
            "phase_means_s": phases or {"forward": step / 3, "bwd": step / 2, "total": step},
            "phase_medians_s": {"total": step},
            "per_rank_cpu_time_s": [step, 2 * step],
        })  # fmt: skip
    choice = MatrixChoice(sharding, recompute, cameras)
    return Cell(choice, batch_size, status, "", settings or {}, tuple(runs))
