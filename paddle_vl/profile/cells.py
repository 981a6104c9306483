"""The cells of a matrix as data: which choice at which batch size, and what it came to."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from paddle_vl.config.schema import RunConfig
from paddle_vl.profile.cell import Outcome, Status

CELL_FILE = "cell.json"
RESULT_FILE = "profile.json"
SHARDING_CHOICES = ("none", "dp", "stage1", "stage2", "stage3")


class Choice(NamedTuple):
    """What a line of the matrix holds fixed while the batch grows.

    Attributes:
        sharding: how processes with different samples share the training state: `dp`, `stage1`,
            `stage2`, `stage3`; `none` for a single one.
        cameras: see `paddle_vl.profile.workload.Workload`.
    """

    sharding: str
    recompute: str
    cameras: int | None = None

    @property
    def name(self) -> str:
        """For folders and for lines."""
        cameras = "" if self.cameras is None else f"-cameras_{self.cameras}"
        return f"{self.sharding}-recompute_{self.recompute}{cameras}"

    def overrides(self, config: RunConfig, num_processes: int, batch_size: int) -> list[str]:
        """Settings of a cell, as the command line takes them.

        Raises:
            ValueError: matrices and pipeline do not divide the processes, or the choice needs more
                or fewer of them.
        """
        parallel = config.parallel
        inner = parallel.mp_degree * parallel.pp_degree
        data_size, rest = divmod(num_processes, inner)
        if rest or not data_size:
            raise ValueError(
                f"{num_processes} processes do not divide by mp_degree {parallel.mp_degree} x "
                f"pp_degree {parallel.pp_degree}: change --nproc or the degrees"
            )
        if (self.sharding == "none") != (data_size == 1):
            raise ValueError(
                f"sharding choice {self.sharding} with {data_size} process(es) that take different "
                "samples: choose none for one, and dp, stage1, stage2 or stage3 for several"
            )
        dp, degree = (data_size, 1) if self.sharding in ("none", "dp") else (1, data_size)
        settings = {
            "parallel.dp_degree": dp,
            "parallel.sharding_degree": degree,
            "train.recompute": self.recompute,
            "train.per_device_train_batch_size": batch_size,
        }
        if degree > 1:
            settings["parallel.sharding_stage"] = int(self.sharding.removeprefix("stage"))
        return [f"{name}={value}" for name, value in settings.items()]


@dataclass(frozen=True)
class Cell:
    """One choice at one batch size.

    Attributes:
        batch_size: samples per micro-batch of one process.
        settings: all that the cell's numbers follow from, flat.
        limit_seconds: how long it was allowed to take.
        profile: what it measured, where it is ok; see `paddle_vl.profile.summary.summarize`.
    """

    choice: Choice
    batch_size: int
    status: Status
    detail: str
    settings: Mapping[str, Any]
    limit_seconds: float
    profile: Mapping[str, Any] = field(default_factory=dict)

    @property
    def samples_per_sec(self) -> float:
        return self.profile["global_samples_per_sec"]

    @property
    def step_ms(self) -> float:
        return 1000 * self.profile["global_step_time_s"]

    @property
    def median_step_ms(self) -> float:
        """Of the slowest process; little moved by a step that something else held up."""
        return 1000 * self.profile["phase_medians_s"]["total"]

    @property
    def cpu_ms(self) -> float:
        """CPU time of a step, the mean over the processes."""
        times = self.profile["per_rank_cpu_time_s"]
        return 1000 * sum(times) / len(times)

    @property
    def cpu_ms_per_sample(self) -> float:
        """Of all processes together."""
        times = self.profile["per_rank_cpu_time_s"]
        return 1000 * sum(times) / self.profile["samples_per_step"]

    @property
    def memory_gb(self) -> float:
        """Peak of the worst process, of what runs out."""
        return self.profile["peak_reserved_gb_worst"]

    @property
    def tensors_gb(self) -> float:
        """Peak of the worst process, of tensors alone."""
        return self.profile["peak_alloc_gb_worst"]

    @property
    def name(self) -> str:
        return f"{self.choice.name}-batch_{self.batch_size}"

    def write(self, folder: Path) -> None:
        values = asdict(self) | {"choice": self.choice._asdict()}
        partial = folder / f"{CELL_FILE}.partial"
        partial.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
        partial.replace(folder / CELL_FILE)

    @classmethod
    def read(cls, folder: Path) -> "Cell | None":
        """None where none has ended.

        Raises:
            RuntimeError: the file is not a cell's.
        """
        file = folder / CELL_FILE
        if not file.exists():
            return None
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
            return cls(**values | {"choice": Choice(**values["choice"])})
        except (json.JSONDecodeError, TypeError, KeyError) as error:
            raise RuntimeError(f"{file} is not a cell of a matrix ({error}); remove it") from error

    def stands(self, settings: Mapping[str, Any], limit_seconds: float) -> bool:
        """Whether the cell need not be run again: the same settings, and an end that is its own.

        A failure may have been mended since, and more time may be enough.
        """
        if self.differing(settings) or self.status == "failed":
            return False
        return self.status != "timeout" or limit_seconds <= self.limit_seconds

    def differing(self, settings: Mapping[str, Any]) -> list[str]:
        """Names of settings that have changed since."""
        # As they were written: a tuple comes back as a list.
        now = json.loads(json.dumps(dict(settings)))
        return sorted(
            name for name in {*self.settings, *now} if self.settings.get(name) != now.get(name)
        )


def ended_cell(
    choice: Choice,
    batch_size: int,
    outcome: Outcome,
    settings: Mapping[str, Any],
    limit_seconds: float,
    profile: Mapping[str, Any] | None,
) -> Cell:
    """A cell from how its processes ended; one that is ok must have a profile."""
    status, detail = outcome
    if status == "ok" and profile is None:
        status, detail = "failed", "ended well without a profile"
    kept = {} if status != "ok" else {k: v for k, v in profile.items() if k != "config"}
    return Cell(choice, batch_size, status, detail, settings, limit_seconds, kept)


def content_hash(values: Mapping[str, Any]) -> str:
    """A short name of a mapping's content."""
    text = json.dumps(values, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
