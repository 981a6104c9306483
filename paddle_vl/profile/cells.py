"""Cells of a matrix, each a choice at a batch size with its result; and the batch sizes to try."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from paddle_vl.config.schema import RunConfig
from paddle_vl.files.text_file import write_text
from paddle_vl.profile.cell_runs import Status
from paddle_vl.profile.workload import attention_settings, recompute_settings

CELL_FILE = "cell.json"
RESULT_FILE = "profile.json"
SHARDING_CHOICES = ("none", "dp", "stage1", "stage2", "stage3")


class MatrixChoice(NamedTuple):
    """The settings of one line of the matrix, along which the batch size grows.

    Attributes:
        sharding: how data-parallel ranks share the training state: `dp` (not at all), `stage1`,
            `stage2`, `stage3`; `none` for a single rank.
        recompute: a value of `train.recompute`.
        cameras: see `paddle_vl.profile.workload.Workload`.
        attention: `eager` or `sdpa`; None as configured.
    """

    sharding: str
    recompute: str
    cameras: int | None = None
    attention: str | None = None

    @property
    def name(self) -> str:
        """Name of the line and part of its folders' names."""
        cameras = "" if self.cameras is None else f"-cameras_{self.cameras}"
        attention = "" if self.attention is None else f"-attention_{self.attention}"
        return f"{self.sharding}-recompute_{self.recompute}{attention}{cameras}"

    def overrides(self, config: RunConfig, num_processes: int, batch_size: int) -> list[str]:
        """Settings of a cell as command line overrides.

        Raises:
            ValueError: mp_degree x pp_degree does not divide the number of ranks, the choice
                needs more or fewer ranks, the family has no such choice, or cp_degree is set.
        """
        parallel = config.parallel
        if parallel.cp_degree > 1:
            raise ValueError(
                f"parallel.cp_degree is {parallel.cp_degree}, and a matrix chooses "
                "sharding_degree, along which those ranks lie: set cp_degree=1, or profile single "
                "runs"
            )
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
            **recompute_settings(config, self.recompute),
            "train.per_device_train_batch_size": batch_size,
        }
        if self.attention is not None:
            settings |= attention_settings(config, self.attention)
        if degree > 1:
            settings["parallel.sharding_stage"] = int(self.sharding.removeprefix("stage"))
        return [f"{name}={value}" for name, value in settings.items()]


@dataclass(frozen=True)
class Cell:
    """One choice at one batch size.

    Attributes:
        batch_size: samples per micro-batch of a rank.
        settings: all settings that the cell's numbers depend on, flat.
        runs: the results of its runs, if its status is ok; see
            `paddle_vl.profile.summary.summarize`.
    """

    choice: MatrixChoice
    batch_size: int
    status: Status
    detail: str
    settings: Mapping[str, Any]
    runs: tuple[Mapping[str, Any], ...] = ()

    @property
    def profile(self) -> Mapping[str, Any]:
        """The result of the run of median throughput (of two the slower); empty without a run."""
        by_speed = sorted(self.runs, key=lambda run: run["global_samples_per_sec"])
        return by_speed[(len(by_speed) - 1) // 2] if by_speed else {}

    @property
    def speed_range(self) -> tuple[float, float]:
        """Samples per second of the slowest and of the fastest run."""
        speeds = [run["global_samples_per_sec"] for run in self.runs]
        return min(speeds), max(speeds)

    @property
    def samples_per_sec(self) -> float:
        return self.profile["global_samples_per_sec"]

    @property
    def memory_gb(self) -> float:
        """Peak of the worst rank: reserved memory on a GPU, resident set on a CPU."""
        return self.profile["peak_reserved_gb_worst"]

    @property
    def name(self) -> str:
        return f"{self.choice.name}-batch_{self.batch_size}"

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"choice": self.choice._asdict(), "profile": self.profile}

    def write(self, folder: Path) -> None:
        write_text(folder / CELL_FILE, json.dumps(self.as_json(), indent=1) + "\n")

    @classmethod
    def read(cls, folder: Path) -> "Cell | None":
        """The finished cell in a folder; None if there is none.

        Raises:
            RuntimeError: the file is not a cell's.
        """
        file = folder / CELL_FILE
        if not file.exists():
            return None
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
            del values["profile"]
            made = {"choice": MatrixChoice(**values["choice"]), "runs": tuple(values["runs"])}
            return cls(**values | made)
        except (json.JSONDecodeError, TypeError, KeyError) as error:
            raise RuntimeError(f"{file} is not a cell of a matrix ({error}); remove it") from error

    def outdated(self, settings: Mapping[str, Any], repeats: int) -> str:
        """Why the cell has to run again; empty if its result can be used."""
        # Through JSON, as the stored ones: a tuple becomes a list.
        now = json.loads(json.dumps(dict(settings)))
        names = {*self.settings, *now}
        changed = sorted(name for name in names if self.settings.get(name) != now.get(name))
        if changed or self.status not in ("ok", "oom"):
            return ", ".join(changed) or f"it had {self.status}"
        is_short = self.status == "ok" and len(self.runs) < repeats
        return f"it ran {len(self.runs)} time(s)" if is_short else ""


@dataclass(frozen=True)
class Growth:
    """Batch sizes to try: the given ones, or doubled from 1 until one does not fit and then
    bisected.

    Attributes:
        sizes: sizes in ascending order, tried until one does not fit; without any, doubling.
        largest: the last size of the doubling.
        resolution: bisection ends when the smallest size that does not fit exceeds the largest that
            fits by at most this share of the latter, or by 1.
    """

    sizes: Sequence[int] = ()
    largest: int = 64
    resolution: float = 0.125

    def __post_init__(self):
        if self.sizes and (min(self.sizes) < 1 or list(self.sizes) != sorted(set(self.sizes))):
            raise ValueError(
                f"batch sizes {list(self.sizes)}: give whole numbers from 1 in ascending order"
            )

    def next_size(self, fits: Mapping[int, bool]) -> int | None:
        """The next size to try, None at the end.

        Args:
            fits: whether each size tried so far fitted in memory.
        """
        if self.sizes:
            left = [size for size in self.sizes if size not in fits]
            return left[0] if left and all(fits.values()) else None
        low = max((size for size, is_fit in fits.items() if is_fit), default=0)
        high = min((size for size, is_fit in fits.items() if not is_fit), default=None)
        if high is None:
            return min(2 * low or 1, self.largest) if low < self.largest else None
        if high - low <= max(1, int(self.resolution * low)):
            return None
        return (low + high) // 2
