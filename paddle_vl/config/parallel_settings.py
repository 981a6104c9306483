"""Settings of the mesh of ranks and of what each axis does, see `docs/parallelism.md`."""

from typing import Literal

from pydantic import Field

from paddle_vl.config.section import Section


class FleetConfig(Section):
    """Options that are passed to fleet under the names of its DistributedStrategy."""

    mp_configs: dict[str, bool | int | float | str] = Field(
        default={}, description="options of tensor parallelism, e.g. {mp_async_allreduce: true}"
    )
    pp_configs: dict[str, bool | int | float | str] = Field(
        default={}, description="options of the pipeline, e.g. {overlap_p2p_comm: true}"
    )
    sharding_configs: dict[str, bool | int | float | str] = Field(
        default={}, description="options of sharding at stage 1, e.g. {comm_overlap: true}"
    )


class MeshSettings(Section):
    """Degrees of the mesh axes and the pipeline's schedule; a degree of 1 turns an axis off."""

    dp_degree: int = Field(
        default=1,
        ge=1,
        le=1 << 20,
        description="data-parallel degree: ranks with different samples",
    )
    mp_degree: int = Field(
        default=1,
        ge=1,
        le=1 << 20,
        description="tensor-parallel degree: ranks that share every matrix",
    )
    pp_degree: int = Field(
        default=1,
        ge=1,
        le=1 << 20,
        description="pipeline-parallel degree: stages of decoder layers",
    )
    sharding_degree: int = Field(
        default=1,
        ge=1,
        le=1 << 20,
        description="sharding degree: ranks with different samples and sharded optimizer state",
    )
    sharding_stage: Literal[1, 2, 3] = Field(
        default=1,
        description="what is sharded, as in ZeRO: optimizer state (1), gradients too (2), "
        "parameters too (3)",
    )
    sequence_parallel: bool = Field(
        default=False, description="shard the token rows between the matrices over the mp ranks"
    )
    num_virtual_stages: int = Field(
        default=1,
        ge=1,
        le=1024,
        description="virtual pipeline stages on each rank (interleaved schedules)",
    )
    pp_schedule: Literal["1f1b", "fthenb", "balanced_memory", "dualpipev"] = Field(
        default="1f1b",
        description="pipeline schedule: 1f1b (interleaved with num_virtual_stages); with "
        "num_virtual_stages also fthenb (all forward passes first) or balanced_memory (fthenb with "
        "a lower memory peak); dualpipev (two stages on each rank, in a V)",
    )
    pp_shapes: Literal["static", "dynamic"] = Field(
        default="static",
        description="messages between stages: static pads all of a step to its largest "
        "micro-batch; dynamic sends each in its own size, which fleet sends first (1f1b without "
        "num_virtual_stages)",
    )


class ParallelConfig(MeshSettings):
    """How the ranks of a run share its work."""

    sharding_gather_overlap: bool = Field(
        default=False,
        description="stage 1: all-gather updated parameters while the next forward pass runs",
    )
    reshard_after_forward: bool = Field(
        default=True,
        description="stage 3: free each unit's parameters after its forward pass and all-gather "
        "them again for its backward pass; false: all-gather once a step (FSDP's SHARD_GRAD_OP)",
    )
    reduce_dtype: Literal["float32", "bfloat16"] = Field(
        default="float32",
        description="stages 2 and 3 of a bfloat16 model: dtype in which gradients are "
        "reduce-scattered; they are accumulated over micro-batches in float32 in any case",
    )
    reduce_once_per_step: bool = Field(
        default=False,
        description="stage 2: keep unsharded float32 gradients over the micro-batches of a step "
        "and reduce-scatter once instead of after each",
    )
    pp_split: Literal["count", "cost"] = Field(
        default="count",
        description="give pipeline stages equally many layers (count), or equal work with vision "
        "tower and head counted (cost)",
    )
    vision: Literal["spread", "replicate"] = Field(
        default="spread",
        description="vision tower with mp: each rank encodes some of the images (spread), or "
        "every rank encodes all (replicate)",
    )
    timeout_s: float = Field(
        default=1800,
        ge=1,
        le=7 * 24 * 3600,
        description="seconds that a rank waits for other ranks, at the start and in any "
        "collective, before the run ends and names the missing ranks",
    )
    fleet: FleetConfig = Field(
        default=FleetConfig(), description="options passed to fleet; fleet must know their names"
    )
