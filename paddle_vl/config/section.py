"""What all sections of a run's settings have in common."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Frozen and strict: no unknown key, no silent conversion, no number that is not finite."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)
