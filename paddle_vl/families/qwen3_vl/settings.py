"""Settings of a run that trains a Qwen3-VL."""

from paddle_vl.config.schema import RunConfig


class Qwen3VLRun(RunConfig):
    """All settings of a Qwen3-VL run."""
