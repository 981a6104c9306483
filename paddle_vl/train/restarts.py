"""`paddle-vl train --max_restarts`: restarts of a run after a rank failed."""

import logging
from collections.abc import Sequence
from pathlib import Path

from paddle_vl.config.load import load_run_config
from paddle_vl.config.schema import RunConfig
from paddle_vl.parallel.degrees import experts_fold
from paddle_vl.parallel.launcher import Attempt
from paddle_vl.processes import Failure
from paddle_vl.train.reporting.run_files import read_starts

logger = logging.getLogger(__name__)


class Restarts:
    """Decides on the next start of a run after a failure.

    Args:
        arguments: of the first start: the command, the file of settings, and overrides.
        config: settings of the first start.
        num_ranks: world size of the first start.
        most: maximum number of restarts.
        fewest_ranks: minimum world size; each restart has fewer ranks if the settings allow it.
            None keeps the world size.

    Raises:
        ValueError: `fewest_ranks` without restarts, or above `num_ranks`.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        config: RunConfig,
        num_ranks: int,
        most: int,
        fewest_ranks: int | None = None,
    ):
        if fewest_ranks is not None and (most == 0 or fewest_ranks > num_ranks):
            raise ValueError(
                f"--min_nproc {fewest_ranks} is about further starts with fewer than --nproc "
                f"{num_ranks} ranks: give --max_restarts too, and a number up to --nproc"
            )
        self.arguments = list(arguments)
        self._config, self._num_ranks = config, num_ranks
        self._most, self._fewest_ranks = most, fewest_ranks
        self._num_restarts = 0
        self._num_starts = self._starts_of_training()

    def after(self, failure: Failure) -> Attempt | None:
        """The next start; None if no restart is left, or if the failed start trained no step."""
        before, self._num_starts = self._num_starts, self._starts_of_training()
        if self._num_restarts == self._most:
            return None
        if self._num_starts == before:
            logger.error("no step was reached, so the run is not started again")
            return None
        self._num_restarts += 1
        overrides = {"train.resume_from_checkpoint": "auto"}
        if self._fewest_ranks is not None:
            fewer = degrees_with_fewer_ranks(self._config, self._num_ranks, self._fewest_ranks)
            if fewer is None:
                logger.warning(
                    "no %d to %d ranks divide the samples of a micro-batch as before, so there are "
                    "%d again; parallel.dp_degree and sharding_degree may shrink to divisors",
                    self._fewest_ranks,
                    self._num_ranks - 1,
                    self._num_ranks,
                )
            else:
                self._num_ranks, changes = fewer
                overrides |= changes
        self.arguments += [f"{name}={value}" for name, value in overrides.items()]
        _, file, *settings = self.arguments
        self._config = load_run_config(file, settings)
        logger.warning(
            "start %d of %d again, with %d ranks, from the newest checkpoint of %s",
            self._num_restarts,
            self._most,
            self._num_ranks,
            self._config.train.output_dir,
        )
        return Attempt(list(self.arguments), self._num_ranks)

    def _starts_of_training(self) -> int:
        return len(read_starts(Path(self._config.train.output_dir)))


def degrees_with_fewer_ranks(
    config: RunConfig, num_ranks: int, fewest: int
) -> tuple[int, dict[str, int]] | None:
    """Largest world size below `num_ranks` on which the run gives the same numbers.

    Tensor, context and pipeline parallelism do not change, nor does the number of samples of a
    micro-batch over all ranks. For equal world sizes the largest sharding degree is taken.

    Returns:
        World size and changed settings; None if there is none.
    """
    parallel, train = config.parallel, config.train
    cp = parallel.cp_degree
    replica_size = parallel.mp_degree * parallel.pp_degree * cp
    samples = train.per_device_train_batch_size * parallel.data_degree
    # Families without experts have no such setting.
    ep = getattr(parallel, "ep_degree", 1)
    for size in range(num_ranks - 1, fewest - 1, -1):
        data_size = size // replica_size
        if size % replica_size or data_size == 0 or samples % data_size:
            continue
        for sharding in range(min(data_size, parallel.sharding_degree // cp), 0, -1):
            dp = data_size // sharding
            inner = sharding * cp * parallel.mp_degree
            if data_size % sharding == 0 and experts_fold(ep, dp, inner):
                return size, {
                    "parallel.dp_degree": dp,
                    "parallel.sharding_degree": sharding * cp,
                    "train.per_device_train_batch_size": samples // data_size,
                }
    return None
