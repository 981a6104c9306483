"""Training data of a profile: the run's own, or synthetic data of its family."""

from dataclasses import dataclass
from pathlib import Path

from paddle_vl.config.families import family_of_run
from paddle_vl.config.schema import RunConfig
from paddle_vl.families.base import SyntheticData

# Global batches of a synthetic epoch; several, so that sample order is as with real data.
_BATCHES = 8


@dataclass(frozen=True)
class Workload:
    """Training data of a profile.

    Attributes:
        is_synthetic: whether samples are synthetic.
        cameras, image_side, answer_tokens: shapes of synthetic samples, see
            `paddle_vl.families.base.SyntheticData`; None for the family's defaults.
    """

    is_synthetic: bool = False
    cameras: int | None = None
    image_side: int | None = None
    answer_tokens: int | None = None

    @property
    def source(self) -> str:
        return "synthetic" if self.is_synthetic else "the run's own"


def with_workload(config: RunConfig, workload: Workload, folder: Path) -> RunConfig:
    """The configuration with the workload's data.

    Args:
        folder: for generated files.

    Raises:
        ValueError: the run's own data or this family do not support the workload.
    """
    shapes = {name: getattr(workload, name) for name in ("cameras", "image_side", "answer_tokens")}
    if not workload.is_synthetic:
        if given := [name for name, value in shapes.items() if value is not None]:
            name = given[0].replace("_", "-")
            raise ValueError(f"--{name} shapes made-up samples: it needs --synthetic")
        return config
    parallel, train = config.parallel, config.train
    data_ranks = parallel.dp_degree * parallel.sharding_degree
    num_samples = _BATCHES * data_ranks * train.per_device_train_batch_size
    data = SyntheticData(num_samples, folder, **shapes)
    return family_of_run(config).recipe_class().with_synthetic_data(config, data)
