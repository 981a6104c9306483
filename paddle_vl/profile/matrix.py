"""A matrix of profiles: all choices of sharding, attention, recomputation and cameras, at growing
batch sizes.

A cell is one choice at one batch size. It runs several times, each in separate processes, and its
results are kept in a file. So an interrupted matrix continues, and after a change of the
configuration only the affected cells run again.
"""

import hashlib
import json
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import paddle

from paddle_vl.config.families import model_values
from paddle_vl.config.load import flatten, load_run_config
from paddle_vl.config.parallel_settings import launch_variables
from paddle_vl.processes import Limits
from paddle_vl.profile.cell_runs import CellOutcome, run_cell
from paddle_vl.profile.cells import RESULT_FILE, Cell, Growth, MatrixChoice
from paddle_vl.profile.memory import GB
from paddle_vl.profile.workload import ProfileSettings

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class MatrixSettings:
    """Choices of a matrix, and limits of a cell.

    Attributes:
        profile: of each cell, whose folder and number of cameras are its own; `out` is the folder
            of the cells and of the result.
        num_processes: ranks of each cell.
        choices: the lines of the matrix.
        growth: the batch sizes to try on each line.
        seconds: time limit of a cell.
        repeats: runs of each cell.
    """

    profile: ProfileSettings
    num_processes: int
    choices: Sequence[MatrixChoice]
    growth: Growth
    seconds: float
    repeats: int = 1

    @property
    def limits(self) -> Limits:
        """Limits of a cell; a launcher can limit memory on a CPU only."""
        limit = self.profile.memory_limit_gb
        if limit is None or not paddle.get_device().startswith("cpu"):
            return Limits(self.seconds)
        return Limits(self.seconds, int(limit * GB))


def all_choices(
    sharding: Sequence[str],
    recompute: Sequence[str],
    cameras: Sequence[int | None],
    attention: Sequence[str | None] = (None,),
) -> list[MatrixChoice]:
    """Every combination."""
    combined = product(cameras, recompute, attention, sharding)
    return [MatrixChoice(s, r, c, a) for c, r, a, s in combined]


def run_matrix(config_file: str, overrides: Sequence[str], settings: MatrixSettings) -> list[Cell]:
    """Run the missing cells of a matrix.

    A line ends when `growth` has no further batch size, or at a cell that failed or timed out,
    since the next size would too.

    Args:
        config_file, overrides: of the run that is profiled.

    Returns:
        All cells, by line and batch size.

    Raises:
        ValueError: a choice that this configuration or number of ranks does not allow.
    """
    if settings.profile.memory_limit_gb is None and paddle.get_device().startswith("cpu"):
        raise ValueError(
            "a matrix on a CPU needs a memory limit for each process, or the kernel would have to "
            "kill it: give --memory-limit-gb"
        )
    config = load_run_config(config_file, overrides)
    for choice in settings.choices:
        load_run_config(
            config_file, [*overrides, *choice.overrides(config, settings.num_processes, 1)]
        )
    cells = []
    for choice in settings.choices:
        fits: dict[int, bool] = {}
        while (size := settings.growth.next_size(fits)) is not None:
            own = [*overrides, *choice.overrides(config, settings.num_processes, size)]
            cells.append(_run_cell(config_file, own, choice, size, settings))
            if cells[-1].status not in ("ok", "oom"):
                break
            fits[size] = cells[-1].status == "ok"
    return sorted(cells, key=lambda c: (settings.choices.index(c.choice), c.batch_size))


def _run_cell(
    config_file: str,
    overrides: Sequence[str],
    choice: MatrixChoice,
    size: int,
    settings: MatrixSettings,
) -> Cell:
    """All runs of a cell, unless their results are known; the first that does not end well is the
    last."""
    folder = settings.profile.out / "cells" / f"{choice.name}-batch_{size}"
    current = cell_settings(config_file, overrides, choice, settings)
    if (known := Cell.read(folder)) is not None:
        why = known.outdated(current, settings.repeats)
        logger.info(
            "%s %s", known.name, f"runs again: {why}" if why else f"{_in_words(known)}, known"
        )
        if not why:
            return known
    variables = launch_variables(load_run_config(config_file, overrides).parallel)
    outcome, runs = CellOutcome("ok"), []
    while outcome.status == "ok" and len(runs) < settings.repeats:
        of_run = folder / f"run_{len(runs) + 1}" if runs else folder
        of_run.mkdir(parents=True, exist_ok=True)
        result = of_run / RESULT_FILE
        result.unlink(missing_ok=True)
        workload = replace(settings.profile.workload, cameras=choice.cameras)
        arguments = replace(settings.profile, out=of_run, workload=workload).arguments()
        command = ["profile", config_file, *overrides, *arguments]
        outcome = run_cell(command, settings.num_processes, of_run, settings.limits, variables)
        if outcome.status == "ok" and not result.exists():
            outcome = CellOutcome("failed", "ended well without a profile")
        elif outcome.status == "ok":
            runs.append(json.loads(result.read_text(encoding="utf-8")))
            runs[-1].pop("config", None)
    if outcome.status != "ok":
        which = f"run {len(runs) + 1}: " if runs else ""
        outcome, runs = CellOutcome(outcome.status, f"{which}{outcome.detail}"), []
    cell = Cell(choice, size, *outcome, current, tuple(runs))
    cell.write(folder)
    logger.info("%s: %s", cell.name, _in_words(cell))
    return cell


def cell_settings(
    config_file: str, overrides: Sequence[str], choice: MatrixChoice, settings: MatrixSettings
) -> dict[str, Any]:
    """All settings that the numbers of a cell depend on, as JSON values."""
    config, profile = load_run_config(config_file, overrides), settings.profile
    values = model_values(config.model.config or config.model.pretrained)
    model = json.dumps(values, sort_keys=True, default=str)
    return {
        **flatten(config.model_dump()),
        "model's config.json": hashlib.sha256(model.encode()).hexdigest()[:16],
        "nproc": settings.num_processes,
        "cameras": choice.cameras,
        "memory_limit_gb": profile.memory_limit_gb,
        "warmup": profile.warmup_steps,
        "steps": profile.steps,
        "synthetic": profile.workload.is_synthetic,
        **({} if profile.updates else {"updates": False}),
        # Flags of Paddle, the allocator's among them.
        **{name: value for name, value in os.environ.items() if name.startswith("FLAGS_")},
        "image_side": profile.workload.image_side,
        "answer_tokens": profile.workload.answer_tokens,
        "paddle": paddle.__version__,
    }


def _in_words(cell: Cell) -> str:
    if cell.status != "ok":
        return f"{cell.status} ({cell.detail})"
    return f"{cell.samples_per_sec:.2f} samples/s, {cell.memory_gb:.2f} GB"
