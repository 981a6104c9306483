"""Whether a process can hold its part of a model at all, known before a value of it is made."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

import paddle
from paddle import Tensor

from paddle_vl.config.parallel_settings import ParallelConfig
from paddle_vl.config.validate import machine_memory

GB = 10**9
_BYTES = {paddle.float64: 8, paddle.float32: 4, paddle.bfloat16: 2, paddle.float16: 2}
# AdamW's two moments; beside narrower weights it keeps float32 ones.
_MOMENTS, _MASTER = 8, 4


@dataclass(frozen=True)
class NeededMemory:
    """Bytes that a process holds all the time of training, its activations not among them.

    Attributes:
        parameters: how many it has.
    """

    parameters: int
    weights: float
    gradients: float
    optimizer: float

    @classmethod
    def of(cls, parameters: Iterable[Tensor], parallel: ParallelConfig) -> "NeededMemory":
        """Of a process's parameters, which may be without storage yet."""
        parts, stage = parallel.sharding_degree, parallel.sharding_stage
        count = weights = gradients = optimizer = 0
        for parameter in parameters:
            size, width = prod(parameter.shape), _BYTES.get(parameter.dtype, 4)
            count += size
            weights += size * width
            if not parameter.stop_gradient:
                # Those of fleet's sharding are float32.
                gradients += size * (4 if parts > 1 and stage == 1 else width)
                optimizer += size * (_MOMENTS + (_MASTER if width < 4 else 0))
        return cls(
            count,
            weights / (parts if stage == 3 and parallel.reshard_after_forward else 1),
            gradients / (parts if stage >= 2 and not parallel.reduce_once_per_step else 1),
            optimizer / parts,
        )

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer


def check_memory(needed: NeededMemory) -> None:
    """Refuse what cannot fit, whatever the batch.

    Raises:
        ValueError: it is more than the device has, with both numbers.
    """
    have, of = available_memory()
    if needed.total <= have:
        return
    raise ValueError(
        f"the {needed.parameters:,} parameters of this process need {needed.total / GB:,.1f} GB "
        f"before any activation (weights {needed.weights / GB:,.1f}, gradients "
        f"{needed.gradients / GB:,.1f}, AdamW {needed.optimizer / GB:,.1f}), and {of} has "
        f"{have / GB:,.1f} GB: choose a smaller model, freeze more of it (model.freeze, "
        "model.lora), or share it over more processes (parallel.*)"
    )


def available_memory() -> tuple[int, str]:
    """Bytes that there are at most, and what has them: the GPU, or this machine with its swap."""
    if not paddle.get_device().startswith("cpu"):
        properties = paddle.device.cuda.get_device_properties()
        return int(properties.total_memory), f"the {properties.name}"
    return machine_memory(), "this machine"
