"""Parameters, gradients and optimizer state divided over the processes of a sharding group.

Stage 1 is fleet's, see `fleet_optimizer`. Stages 2 and 3 are of one scheme: every parameter is seen
flat, padded with zeros to `S * n` elements for a group of `S` ranks, and rank `r` owns elements
`r * n` to `(r + 1) * n` of it as a tensor of its own, the shard. The optimizer sees shards only, so
its state is divided at every stage. What else is divided, beside the names that others gave it:

| stage | divided besides the optimizer's state | DeepSpeed | PyTorch FSDP | group_sharded |
| --- | --- | --- | --- | --- |
| 1 | nothing | ZeRO-1 | - | `os` |
| 2 | gradients | ZeRO-2 | `SHARD_GRAD_OP` | `os_g` |
| 3 | gradients, parameters of units and tables | ZeRO-3 | `FULL_SHARD` | `p_g_os` |

A unit is a layer of the model, such as a decoder layer; a table is a token embedding or a head.
What is whole for a moment is one of them, and the one that is gathered ahead of its use. Stage 3
with `reshard_after_forward=False` is FSDP's `SHARD_GRAD_OP`: parameters are gathered once in a step
and freed behind its last backward pass. Stage 2 never frees them.

Gathers of the next unit and reductions run beside the computation, see `pending` and `storage`.
"""

from paddle_vl.parallel.sharding.fleet_optimizer import FleetSharding
from paddle_vl.parallel.sharding.options import ShardingOptions
from paddle_vl.parallel.sharding.stages import Sharding

__all__ = ["FleetSharding", "Sharding", "ShardingOptions"]
