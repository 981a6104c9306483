"""A run of Weights & Biases; its files are in wandb/."""

from functools import partial
from importlib import import_module

from paddle_vl.train.reporting.writers.base import Start
from paddle_vl.train.reporting.writers.service import ServiceRun


class Writer(ServiceRun):
    package = "wandb"

    def __init__(self, start: Start):
        self._wandb = import_module(self.package)
        # What a rank prints may quote data, and stays here.
        settings = self._wandb.Settings(console="off", quiet=True)
        folder = str(start.output_dir)
        init = partial(self._wandb.init, dir=folder, settings=settings)
        super().__init__(start, init, self._wandb.Image)

    def _finish(self, error: BaseException | None) -> None:
        self.run.finish(exit_code=int(error is not None))
        # A rank ends without Python's own end; the service writes the end of its file in its own.
        self._wandb.teardown()
