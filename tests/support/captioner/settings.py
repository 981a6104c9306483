"""Settings of a run that trains a captioner."""

from typing import ClassVar

from paddle_vl.config.schema import RunConfig

PARTS: dict[str, tuple[str, ...]] = {"decoder": ("captioner.layers.*",)}


class CaptionerRun(RunConfig):
    """All settings of a captioner run, the same as those of every run."""

    family: ClassVar[str] = "captioner"
    parts: ClassVar[dict[str, tuple[str, ...]]] = PARTS
