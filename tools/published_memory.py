"""The memory formula beside OpenTau's published measurements of pi07 on one machine.

    python tools/published_memory.py

prints the tables in docs/sharding.md. Source of the measurements: OpenTau pull request #273, pi07
low level, fully unfrozen, 8 A100 of 80 GiB, n_obs_history 6, bfloat16 compute, float32 masters and
Adam, bfloat16 gradient reduction, sdpa with per-layer recomputation; allocated memory of the worst
rank. GB are 10^9 bytes.

Memory of a step grows linearly with the batch. The part that does not grow (parameters, masters,
moments, gradients, one unit in use) is what the formula of `sharding_memory` gives; the measured
one is the intercept of a line through the published cells. What grows, the activations of a sample,
is the line's slope and not part of the formula.
"""

import argparse
from collections.abc import Sequence
from typing import NamedTuple

from paddle_vl.parallel.sharding import ShardingOptions
from sharding_memory import ModelElements, at_peak, between_steps, passing_bytes, published_pi07

GB, NUM_GPUS = 1e9, 8
# OpenTau reduces gradients in bfloat16.
OPENTAUS = ShardingOptions(reduce_dtype="bfloat16")


class Series(NamedTuple):
    """Published cells that differ in the batch only: allocated GB by samples per rank."""

    backend: str
    stage: int
    cameras: int
    allocated_gb: dict[int, float]

    @property
    def name(self) -> str:
        return f"{self.backend}, {self.cameras} camera{'s' if self.cameras > 1 else ''}"


class Line(NamedTuple):
    """Memory of a batch of b samples: fixed + per_sample * b, in GB."""

    fixed: float
    per_sample: float


PUBLISHED = (
    Series("ZeRO-2", 2, 1, {8: 36.22, 16: 46.25, 24: 56.31, 32: 67.36, 40: 78.41}),
    Series("FSDP full shard", 3, 1, {8: 43.86, 12: 51.29}),
    Series("FSDP full shard", 3, 4, {4: 39.33, 8: 49.68, 10: 54.85, 12: 61.02}),
)


def fitted(cells: dict[int, float]) -> Line:
    """The least-squares line through cells.

    Raises:
        ValueError: fewer than two batch sizes.
    """
    if len(cells) < 2:
        raise ValueError(f"a line needs two batch sizes, and there are {sorted(cells)}")
    mean_b, mean_gb = sum(cells) / len(cells), sum(cells.values()) / len(cells)
    slope = sum((b - mean_b) * (gb - mean_gb) for b, gb in cells.items())
    slope /= sum((b - mean_b) ** 2 for b in cells)
    return Line(mean_gb - slope * mean_b, slope)


def fixed_gb(model: ModelElements, stage: int, options: ShardingOptions = OPENTAUS) -> float:
    """The formula's memory of a rank that no batch changes, at its peak."""
    held = at_peak(model, stage, NUM_GPUS, options=options)
    return (held.total + passing_bytes(model, stage, options)) / GB


def parts_rows(model: ModelElements) -> list[str]:
    """What the fixed part consists of, in GB."""
    rows = []
    for stage in (2, 3):
        held, peak = between_steps(model, stage, NUM_GPUS), at_peak(model, stage, NUM_GPUS)
        passing = passing_bytes(model, stage, OPENTAUS)
        sizes = (held.parameters, held.masters, held.moments, peak.gradients, passing)
        cells = [size / GB for size in sizes] + [fixed_gb(model, stage)]
        rows.append(f"| {stage} | {' | '.join(f'{size:.2f}' for size in cells)} |")
    return rows


def fixed_rows(model: ModelElements, published: Sequence[Series] = PUBLISHED) -> list[str]:
    """Measured and computed fixed part of each series."""
    rows = []
    for series in published:
        line, computed = fitted(series.allocated_gb), fixed_gb(model, series.stage)
        difference = computed - line.fixed
        rows.append(
            f"| {series.name} | {line.per_sample:.2f} | {line.fixed:.2f} | {series.stage} "
            f"| {computed:.2f} | {difference:+.2f} ({100 * difference / line.fixed:+.0f} %) |"
        )
    return rows


def cell_rows(model: ModelElements) -> list[str]:
    """Each ZeRO-2 cell against the formula, and what the formula claims of stage 3 there."""
    series = PUBLISHED[0]
    growth, rows = fitted(series.allocated_gb).per_sample, []
    for batch, measured in series.allocated_gb.items():
        computed, claimed = (fixed_gb(model, stage) + growth * batch for stage in (2, 3))
        error = 100 * (computed - measured) / measured
        fsdp = PUBLISHED[1].allocated_gb.get(batch)
        rows.append(
            f"| {batch} | {measured:.2f} | {computed:.2f} ({error:+.0f} %) "
            f"| {'' if fsdp is None else f'{fsdp:.2f}'} | {claimed:.2f} |"
        )
    return rows


def main() -> None:
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    model = published_pi07(frozen_tower=False)
    for head, rows in (
        (
            ("stage", "parameters", "float32 copies", "moments", "gradients", "temporary", "fixed"),
            parts_rows(model),
        ),
        (
            ("published", "GB per sample", "fixed GB", "stage here", "formula GB", "difference"),
            fixed_rows(model),
        ),
        (
            ("batch", "ZeRO-2 GB", "stage 2 here", "FSDP GB", "stage 3 here"),
            cell_rows(model),
        ),
    ):
        print(f"| {' | '.join(head)} |\n|{' --- |' * len(head)}")
        print("\n".join(rows) + "\n")


if __name__ == "__main__":
    main()
