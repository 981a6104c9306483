"""Settings of a run that trains a captioner."""

from paddle_vl.config.schema import RunConfig


class CaptionerRun(RunConfig):
    """All settings of a captioner run; it adds none."""
