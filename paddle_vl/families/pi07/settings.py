"""Settings of a run that trains a pi07 policy or planner."""

from paddle_vl.config.schema import RunConfig


class PI07Run(RunConfig):
    """All settings of a pi07 run."""
