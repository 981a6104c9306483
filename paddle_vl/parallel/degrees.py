"""The degrees of a run on every mesh axis, and what the rules of `plan_rules` compare them with."""

import math
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from paddle_vl.config.families import EncoderShape, ModelShape
from paddle_vl.config.parallel_settings import MeshSettings

AXES = ("dp", "mp", "pp", "sharding")


class ParallelDegrees(MeshSettings):
    """The mesh of ranks and the pipeline's schedule, the same on every rank; 1 turns an axis off.

    Raises:
        ValueError: a value outside of the setting's range.
    """

    ep_degree: Annotated[int, Field(ge=1)] = 1
    """expert-parallel degree: dp ranks that share the experts of a model"""
    num_micro_batches: Annotated[int, Field(ge=1)] = 1
    """micro-batches of a step, train.gradient_accumulation_steps"""

    def degree(self, axis: str) -> int:
        """Ranks along one of `AXES`."""
        return getattr(self, f"{axis}_degree")

    @property
    def num_processes(self) -> int:
        return math.prod(self.degree(axis) for axis in AXES)


@dataclass(frozen=True)
class Plan:
    """Input of the rules. Rules about model or padding are skipped if it is None.

    Attributes:
        num_processes: world size of the launcher.
        pad_to_multiple_of: divides the padded length of every batch.
        encoder: sizes of the encoder under the colocated schedule.
    """

    degrees: ParallelDegrees
    num_processes: int
    model: ModelShape | None = None
    pad_to_multiple_of: int | None = None
    encoder: EncoderShape | None = None
