"""A run of Weights & Biases; its files are in wandb/."""

from functools import partial

import wandb

from paddle_vl.train.reporting.writers.base import Start
from paddle_vl.train.reporting.writers.service import ServiceRun


class Writer(ServiceRun):
    def __init__(self, start: Start):
        # What a rank prints may quote data, and stays here.
        settings = wandb.Settings(console="off", quiet=True)
        super().__init__(
            "wandb", start, partial(wandb.init, dir=str(start.output_dir), settings=settings)
        )

    def close(self) -> None:
        super().close()
        # A rank ends without Python's own end; the service writes the end of its file in its own.
        wandb.teardown()
