"""What of stages 2 and 3 can be chosen."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ShardingOptions:
    """Settings of `Sharding`.

    Attributes:
        reshard_after_forward: stage 3: False keeps what a forward pass gathered until the step's
            end, so that each unit is gathered once per step and not twice per micro-batch.
        reduce_dtype: what gradients travel as; their sums over micro-batches are float32.
        reduce_once_per_step: stage 2: add whole gradients up, in float32, and reduce them in the
            last micro-batch's backward pass only.

    Raises:
        ValueError: another dtype.
    """

    reshard_after_forward: bool = True
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    reduce_once_per_step: bool = False

    def __post_init__(self):
        if self.reduce_dtype not in ("float32", "bfloat16"):
            raise ValueError(
                f"reduce_dtype is {self.reduce_dtype!r}; it must be float32 or bfloat16"
            )
