"""Curves for VisualDL, in visualdl/."""

from importlib import import_module

from paddle_vl.train.reporting.writers.base import Start
from paddle_vl.train.reporting.writers.event_files import EventFiles


class Writer(EventFiles):
    package = name = "visualdl"
    pattern = "vdlrecords.*"

    def __init__(self, start: Start):
        super().__init__(import_module(self.package).LogWriter, start)
