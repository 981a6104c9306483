"""Which family of models a run trains."""

from pathlib import Path

from paddle_vl.config.schema import RunConfig
from paddle_vl.train.families.language import LanguageFamily

Family = LanguageFamily


def model_family(config: RunConfig, checkpoint: Path | None) -> Family:
    """The family of the run's model, with its data."""
    return LanguageFamily(config, checkpoint)
