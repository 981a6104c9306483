"""A run of SwanLab; its files are in swanlab/."""

from functools import partial
from importlib import import_module

from paddle_vl.train.reporting.writers.base import Start
from paddle_vl.train.reporting.writers.service import ServiceRun


class Writer(ServiceRun):
    package = "swanlab"

    def __init__(self, start: Start):
        swanlab = import_module(self.package)
        folder = str(start.output_dir / "swanlab")
        # What a rank prints may quote data, and stays here.
        settings = swanlab.Settings(terminal={"proxy_type": "none"})
        init = partial(swanlab.init, log_dir=folder, settings=settings)
        super().__init__(start, init, swanlab.Image)

    def _finish(self, error: BaseException | None) -> None:
        if error is None:
            self.run.finish()
        else:
            self.run.finish(state="crashed", error=repr(error))
