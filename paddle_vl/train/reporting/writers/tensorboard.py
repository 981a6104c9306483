"""Curves for TensorBoard, in tensorboard/."""

from tensorboardX import SummaryWriter

from paddle_vl.train.reporting.writers.base import Start
from paddle_vl.train.reporting.writers.event_files import EventFiles


class Writer(EventFiles):
    name, pattern = "tensorboard", "events.out.tfevents.*"

    def __init__(self, start: Start):
        # `flush` of tensorboardX does not wait for its queue.
        super().__init__(SummaryWriter, start, flush_secs=1)
