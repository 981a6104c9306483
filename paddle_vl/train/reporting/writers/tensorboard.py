"""Curves for TensorBoard, in tensorboard/."""

from importlib import import_module

from paddle_vl.train.reporting.writers.base import Start
from paddle_vl.train.reporting.writers.event_files import EventFiles


class Writer(EventFiles):
    package, name = "tensorboardX", "tensorboard"
    pattern = "events.out.tfevents.*"

    def __init__(self, start: Start):
        # `flush` of tensorboardX does not wait for its queue.
        super().__init__(import_module(self.package).SummaryWriter, start, flush_secs=1)
