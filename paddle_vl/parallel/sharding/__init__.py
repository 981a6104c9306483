"""Sharding of optimizer state, gradients and parameters over ranks that take different samples.

A parameter is flattened and padded with zeros to `S * n` elements for a group of `S` ranks. The
shard of rank `r` is a tensor of elements `r * n` to `(r + 1) * n`. The optimizer updates shards, so
its state is sharded at every stage. Sharded besides:

| stage | also sharded | DeepSpeed | PyTorch FSDP | group_sharded |
| --- | --- | --- | --- | --- |
| 1 | nothing | ZeRO-1 | - | `os` |
| 2 | gradients | ZeRO-2 | `SHARD_GRAD_OP` | `os_g` |
| 3 | gradients, parameters of units and tables | ZeRO-3 | `FULL_SHARD` | `p_g_os` |

A unit is a layer of the model, such as a decoder layer; a table is a token embedding or a head; the
root is all else. At stage 3 only the unit in use and the prefetched one are unsharded. Stage 3 with
`reshard_after_forward=False` is FSDP's `SHARD_GRAD_OP`: parameters are gathered once per step and
freed after its last backward pass. Stage 2 never frees them.

Collectives (stages 2 and 3), overlapped with computation, all but the last over the sharding group:

| when | communicated |
| --- | --- |
| forward of a unit or table (3) | all-gather of its parameters, prefetched during the one before |
| backward of a unit | the same all-gather (3); reduce-scatter of its gradients after it |
| end of a micro-batch | reduce-scatter of the gradients of the root and of tables |
| after the optimizer's step | all-gather of the parameters of all (2) or of the root (3) |
| last reduce-scatter of a bucket in a step | all-reduce of its shards over dp |
"""

from paddle_vl.parallel.sharding.fleet_optimizer import FleetSharding
from paddle_vl.parallel.sharding.stages import Sharding, ShardingOptions

__all__ = ["FleetSharding", "Sharding", "ShardingOptions"]
