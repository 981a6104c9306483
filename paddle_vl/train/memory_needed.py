"""Check that a rank has memory for its shards of a model, before any is materialized."""

from collections.abc import Iterable
from dataclasses import astuple, dataclass
from math import prod
from operator import add
from pathlib import Path

import paddle
from paddle import Tensor

from paddle_vl.config.parallel_settings import ParallelConfig

GB = 10**9
# AdamW's two moments, and the master weight of a half-precision parameter.
_MOMENTS, _MASTER = 8, 4
# cgroup versions 2 and 1; a container sees its own limit.
_CGROUP_LIMITS = (
    "/sys/fs/cgroup/memory.max",
    "/sys/fs/cgroup/memory/memory.limit_in_bytes",
)


@dataclass(frozen=True)
class NeededMemory:
    """Bytes that a rank needs throughout training, without activations.

    Attributes:
        parameters: number of its parameters.
    """

    parameters: int
    weights: float
    gradients: float
    optimizer: float

    @classmethod
    def of(
        cls,
        parameters: Iterable[Tensor],
        parallel: ParallelConfig,
        encoder_lanes: int | None = None,
        copies: int = 0,
        shards: int | None = None,
    ) -> "NeededMemory":
        """For a rank's parameters before ZeRO sharding, with storage or without.

        Args:
            encoder_lanes: for the parameters of a colocated encoder, which every rank has: lanes
                over which `encoder.sharding_stage` 1 shards the optimizer state.
            copies: of the trained values in float32, sharded like the optimizer state: the average
                of train.ema, the values of a reference.
            shards: ranks that shard each, of experts and tables other ones than of the rest;
                default: the sharding degree.
        """
        ranks, stage = parallel.sharding_degree, parallel.sharding_stage
        # Gradients of fleet's sharding are float32, and so are sums that one rank has all of.
        is_wide = ranks > 1 and (stage == 1 or shards == 1)
        ranks = ranks if shards is None else shards
        if encoder_lanes is not None:
            ranks, stage = encoder_lanes if parallel.encoder.sharding_stage else 1, 1
            is_wide = ranks > 1
        count = weights = gradients = optimizer = 0
        for parameter in parameters:
            size, width = prod(parameter.shape), parameter.element_size()
            count += size
            weights += size * width
            if not parameter.stop_gradient:
                gradients += size * (4 if is_wide else width)
                optimizer += size * (_MOMENTS + (_MASTER if width < 4 else 0) + 4 * copies)
        return cls(
            count,
            weights / (ranks if stage == 3 and parallel.reshard_after_forward else 1),
            gradients / (ranks if stage >= 2 and not parallel.reduce_once_per_step else 1),
            optimizer / ranks,
        )

    def __add__(self, other: "NeededMemory") -> "NeededMemory":
        return NeededMemory(*map(add, astuple(self), astuple(other)))

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer


def check_memory(needed: NeededMemory) -> None:
    """Refuse a model that cannot fit, whatever the batch.

    Raises:
        ValueError: it is more than the device has, with both numbers.
    """
    have, of = available_memory()
    if needed.total <= have:
        return
    raise ValueError(
        f"the {needed.parameters:,} parameters of this rank need {needed.total / GB:,.1f} GB "
        f"before any activation (weights {needed.weights / GB:,.1f}, gradients "
        f"{needed.gradients / GB:,.1f}, AdamW {needed.optimizer / GB:,.1f}), and {of} has "
        f"{have / GB:,.1f} GB: choose a smaller model, freeze more of it (model.freeze, "
        "model.lora), or shard it over more ranks (parallel.*)"
    )


def available_memory() -> tuple[int, str]:
    """Bytes of memory and a word for the device: the GPU, or this machine with its swap."""
    if not paddle.get_device().startswith("cpu"):
        properties = paddle.device.cuda.get_device_properties()
        return int(properties.total_memory), f"the {properties.name}"
    return machine_memory(), "this machine"


def machine_memory() -> int:
    """Bytes of memory and swap that the processes of this machine or container may use."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if " kB" in line}
    swap = sizes.get("SwapTotal", 0)
    total = sizes["MemTotal"] + swap
    for file in map(Path, _CGROUP_LIMITS):
        if file.is_file() and (text := file.read_text(encoding="ascii").strip()).isdigit():
            total = min(total, int(text) + swap)
    return total
