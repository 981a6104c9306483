"""A matrix of profiles: all choices of sharding, attention, recomputation and cameras, at growing
batch sizes.

A cell is one choice at one batch size. It runs several times, each in separate processes, and every
run writes its result to a file. So an interrupted matrix continues, and after a change of the
configuration only the affected cells run again.
"""

import json
import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import paddle

from paddle_vl.config.families import model_values
from paddle_vl.config.load import flatten, load_run_config
from paddle_vl.profile.cells import (
    RESULT_FILE,
    Cell,
    Choice,
    Growth,
    content_hash,
    ended_cell,
    of_several_runs,
)
from paddle_vl.profile.memory import GB
from paddle_vl.profile.supervise import Limits, Outcome, run_cell
from paddle_vl.profile.workload import Workload

logger = logging.getLogger(__name__)
_MAIN = Path(__file__).parents[1] / "__main__.py"
# Runs a cell's command in a folder, within limits.
CellRunner = Callable[[Sequence[str], Path, Limits], Outcome]


@dataclass(frozen=True)
class MatrixSettings:
    """Choices of a matrix, and limits of a cell.

    Attributes:
        out: folder of the cells and of the result.
        num_processes: ranks of each cell.
        choices: the lines of the matrix.
        growth: the batch sizes to try on each line.
        seconds: time limit of a cell.
        memory_limit_gb: limit per rank; None for the GPU's memory.
        warmup_steps, steps: of each profile.
        workload: training data; each choice sets the number of cameras.
        repeats: runs of each cell.
        updates: whether steps update the parameters, see `paddle_vl.profile.run.ProfileSettings`.
    """

    out: Path
    num_processes: int
    choices: Sequence[Choice]
    growth: Growth
    seconds: float
    memory_limit_gb: float | None
    warmup_steps: int
    steps: int
    workload: Workload
    repeats: int = 1
    updates: bool = True

    @property
    def limits(self) -> Limits:
        """Limits of a cell; a supervisor can limit memory on a CPU only."""
        limit = self.memory_limit_gb
        if limit is None or not paddle.get_device().startswith("cpu"):
            return Limits(self.seconds)
        return Limits(self.seconds, int(limit * GB))


def all_choices(
    sharding: Sequence[str],
    recompute: Sequence[str],
    cameras: Sequence[int | None],
    attention: Sequence[str | None] = (None,),
) -> list[Choice]:
    """Every combination."""
    combined = product(cameras, recompute, attention, sharding)
    return [Choice(s, r, c, a) for c, r, a, s in combined]


def run_matrix(
    config_file: str,
    overrides: Sequence[str],
    settings: MatrixSettings,
    run: CellRunner = run_cell,
) -> list[Cell]:
    """Run the missing cells of a matrix.

    A line ends when `growth` has no further batch size, or at a cell that failed or timed out,
    since the next size would too.

    Args:
        config_file, overrides: of the run that is profiled.
        run: runs a cell's command.

    Returns:
        All cells, by line and batch size.

    Raises:
        ValueError: a choice that this configuration or number of ranks does not allow.
    """
    if settings.memory_limit_gb is None and paddle.get_device().startswith("cpu"):
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
            cell = _cell(config_file, own, choice, size, settings, run)
            cells.append(cell)
            if cell.status not in ("ok", "oom"):
                break
            fits[size] = cell.status == "ok"
    return sorted(cells, key=lambda c: (settings.choices.index(c.choice), c.batch_size))


def _cell(
    config_file: str,
    overrides: Sequence[str],
    choice: Choice,
    size: int,
    settings: MatrixSettings,
    run: CellRunner,
) -> Cell:
    """The cell of all its runs; the first that does not run to its end is the last."""
    folder, runs = settings.out / "cells" / f"{choice.name}-batch_{size}", []
    for number in range(1, settings.repeats + 1):
        own = folder if number == 1 else folder / f"run_{number}"
        runs.append(_one_run(config_file, overrides, choice, size, settings, run, own))
        if runs[-1].status != "ok":
            break
    return of_several_runs(runs)


def _one_run(
    config_file: str,
    overrides: Sequence[str],
    choice: Choice,
    size: int,
    settings: MatrixSettings,
    run: CellRunner,
    folder: Path,
) -> Cell:
    folder.mkdir(parents=True, exist_ok=True)
    current = cell_settings(config_file, overrides, choice, settings)
    known = Cell.read(folder)
    if known is not None:
        if known.is_valid(current, settings.seconds):
            logger.info("%s: %s, known", known.name, _in_words(known))
            return known
        changed = ", ".join(known.differing(current)) or f"it had {known.status}"
        logger.info("%s runs again: %s", known.name, changed)
    result = folder / RESULT_FILE
    result.unlink(missing_ok=True)
    command = cell_command(config_file, overrides, choice, folder, settings)
    outcome = run(command, folder, settings.limits)
    profile = json.loads(result.read_text(encoding="utf-8")) if result.exists() else None
    cell = ended_cell(choice, size, outcome, current, settings.seconds, profile)
    cell.write(folder)
    logger.info("%s: %s", cell.name, _in_words(cell))
    return cell


def cell_settings(
    config_file: str, overrides: Sequence[str], choice: Choice, settings: MatrixSettings
) -> dict[str, Any]:
    """All settings that the numbers of a cell depend on, as JSON values."""
    config = load_run_config(config_file, overrides)
    workload = settings.workload
    return {
        **flatten(config.model_dump()),
        "model's config.json": content_hash(
            model_values(config.model.config or config.model.pretrained)
        ),
        "nproc": settings.num_processes,
        "cameras": choice.cameras,
        "memory_limit_gb": settings.memory_limit_gb,
        "warmup": settings.warmup_steps,
        "steps": settings.steps,
        "synthetic": workload.is_synthetic,
        **({} if settings.updates else {"updates": False}),
        # Flags of Paddle, the allocator's among them.
        **{name: value for name, value in os.environ.items() if name.startswith("FLAGS_")},
        "image_side": workload.image_side,
        "answer_tokens": workload.answer_tokens,
        "paddle": paddle.__version__,
    }


def cell_command(
    config_file: str,
    overrides: Sequence[str],
    choice: Choice,
    folder: Path,
    settings: MatrixSettings,
) -> list[str]:
    """The command line that profiles a cell."""
    workload = settings.workload
    flags = {
        "--nproc": settings.num_processes,
        "--out": folder,
        "--warmup": settings.warmup_steps,
        "--steps": settings.steps,
        "--memory-limit-gb": settings.memory_limit_gb,
        "--cameras": choice.cameras,
        "--image-side": workload.image_side,
        "--answer-tokens": workload.answer_tokens,
    }
    given = [
        part for name, value in flags.items() if value is not None for part in (name, str(value))
    ]
    if workload.is_synthetic:
        given.append("--synthetic")
    if not settings.updates:
        given.append("--no-optimizer")
    return [sys.executable, str(_MAIN), "profile", config_file, *overrides, *given]


def _in_words(cell: Cell) -> str:
    if cell.status != "ok":
        return f"{cell.status} ({cell.detail})"
    return f"{cell.samples_per_sec:.2f} samples/s, {cell.memory_gb:.2f} GB"
