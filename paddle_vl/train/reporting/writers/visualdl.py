"""Curves for VisualDL, in visualdl/."""

from visualdl import LogWriter

from paddle_vl.train.reporting.writers.base import Start
from paddle_vl.train.reporting.writers.event_files import EventFiles


class Writer(EventFiles):
    name, pattern = "visualdl", "vdlrecords.*"

    def __init__(self, start: Start):
        super().__init__(LogWriter, start)
