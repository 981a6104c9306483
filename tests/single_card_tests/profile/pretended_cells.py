"""Cells of a matrix that are not run: their results follow from their command lines."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from paddle_vl.cli.main import build_parser
from paddle_vl.processes import Limits
from paddle_vl.profile.cell_runs import CellOutcome
from paddle_vl.profile.cells import RESULT_FILE, Growth
from paddle_vl.profile.matrix import MatrixSettings, all_choices
from paddle_vl.profile.workload import ProfileSettings, Workload
from tests.single_card_tests.profile.measures import cell

# Largest batch that fits, and samples per second of one sample, by sharding choice.
CAPACITY = {"dp": 3, "stage2": 6, "stage3": 5}
SPEED = {"dp": 6.0, "stage2": 5.0, "stage3": 4.0}


def matrix_settings(out: Path) -> MatrixSettings:
    workload = Workload(is_synthetic=True)
    return MatrixSettings(
        ProfileSettings(out, workload, warmup_steps=1, steps=2, memory_limit_gb=2.0),
        num_processes=2,
        choices=all_choices(["dp", "stage2"], ["none"], [1]),
        growth=Growth(largest=8, resolution=0),
        seconds=30.0,
    )


def with_profile(settings: MatrixSettings, **changes: object) -> MatrixSettings:
    """The settings with others of each profile."""
    return replace(settings, profile=replace(settings.profile, **changes))


class Pretended:
    """Runs cells by their command line alone; `broken` gives the outcome for a sharding choice."""

    def __init__(self, broken: dict[str, CellOutcome] | None = None):
        self.ran: list[tuple[str, int]] = []
        self.limits: set[Limits] = set()
        self.broken = broken or {}

    def __call__(
        self,
        arguments: list[str],
        num_ranks: int,
        folder: Path,
        limits: Limits,
        variables: Mapping[str, str],
    ) -> CellOutcome:
        options, given = self.parsed(arguments)
        assert (num_ranks, options.nproc) == (2, 1)
        stage = f"stage{given['parallel.sharding_stage']}"
        sharding = "dp" if given["parallel.sharding_degree"] == "1" else stage
        size = int(given["train.per_device_train_batch_size"])
        self.limits.add(limits)
        assert Path(options.out) == folder
        self.ran.append((sharding, size))
        if sharding in self.broken:
            return self.broken[sharding]
        if size > CAPACITY[sharding]:
            return CellOutcome("oom", "rank 0 uses too much")
        speed = SPEED[sharding] * size
        profile = cell(sharding, size, speed, memory=size / 4).profile
        (folder / RESULT_FILE).write_text(json.dumps({**profile, "config": "not kept"}))
        return CellOutcome("ok")

    @staticmethod
    def parsed(arguments: list[str]):
        options = build_parser().parse_args(arguments)
        given = dict(override.split("=", 1) for override in options.overrides)
        return options, {"parallel.sharding_stage": "none", **given}
