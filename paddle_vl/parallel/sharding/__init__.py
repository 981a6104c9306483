"""Parameters, gradients and optimizer state divided over the processes of a sharding group.

One scheme for three stages: every parameter is seen flat, padded with zeros to `S * n` elements for
a group of `S` ranks, and rank `r` owns elements `r * n` to `(r + 1) * n` of it as a tensor of its
own, the shard. The optimizer sees shards only, so its state is divided at every stage. What else is
divided, beside the names that others gave it:

| stage | divided besides the optimizer's state | DeepSpeed | PyTorch FSDP | group_sharded |
| --- | --- | --- | --- | --- |
| 1 | nothing | ZeRO-1 | - | `os` |
| 2 | gradients | ZeRO-2 | `SHARD_GRAD_OP` | `os_g` |
| 3 | gradients, parameters of the units | ZeRO-3 | `FULL_SHARD` | `p_g_os` |

A unit is a layer of the model, such as a decoder layer: what is whole for a moment is one unit's.
FSDP's `SHARD_GRAD_OP` also frees parameters between backward and forward; stage 2 keeps them.
"""

from paddle_vl.parallel.sharding.fleet_optimizer import FleetSharding
from paddle_vl.parallel.sharding.stages import Sharding

__all__ = ["FleetSharding", "Sharding"]
