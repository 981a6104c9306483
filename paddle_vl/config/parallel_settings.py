"""Settings of how the processes of a run share its work, see `docs/parallelism.md`."""

from typing import Literal

from pydantic import Field

from paddle_vl.config.section import Section


class FleetConfig(Section):
    """Options of fleet's own, by the names of its DistributedStrategy."""

    mp_configs: dict[str, bool | int | float | str] = Field(
        {}, description="of tensor parallelism, e.g. {mp_async_allreduce: true}"
    )
    pp_configs: dict[str, bool | int | float | str] = Field(
        {}, description="of the pipeline, e.g. {overlap_p2p_comm: true}"
    )
    sharding_configs: dict[str, bool | int | float | str] = Field(
        {}, description="of sharding at stage 1, e.g. {comm_overlap: true}"
    )


class ParallelConfig(Section):
    """How many processes share the work along each axis; 1 is off."""

    dp_degree: int = Field(1, ge=1, le=1 << 20, description="processes with different samples")
    mp_degree: int = Field(
        1, ge=1, le=1 << 20, description="processes that share every matrix (tensor)"
    )
    pp_degree: int = Field(
        1, ge=1, le=1 << 20, description="processes that share the layers (pipeline)"
    )
    sharding_degree: int = Field(
        1,
        ge=1,
        le=1 << 20,
        description="processes with different samples that share optimizer state",
    )
    sharding_stage: Literal[1, 2, 3] = Field(
        1, description="1 shares optimizer state, 2 gradients too, 3 parameters too (as ZeRO)"
    )
    sharding_gather_overlap: bool = Field(
        False,
        description="at stage 1 updated parameters come back beside the next step's forward pass",
    )
    reshard_after_forward: bool = Field(
        True,
        description="stage 3: free each unit behind its forward pass and gather it again for its "
        "backward pass; false: gather once a step (as FSDP's SHARD_GRAD_OP)",
    )
    reduce_dtype: Literal["float32", "bfloat16"] = Field(
        "float32",
        description="stages 2 and 3 of a bfloat16 model: what gradients travel as; they are added "
        "up over micro-batches in float32 all the same",
    )
    reduce_once_per_step: bool = Field(
        False,
        description="stage 2: keep whole float32 gradients over the micro-batches of a step, and "
        "send them once instead of in each",
    )
    ep_degree: int = Field(
        1,
        ge=1,
        le=1 << 20,
        description="dp processes that share the experts of a mixture among them",
    )
    sequence_parallel: bool = Field(
        False, description="split the token rows between the matrices over the mp processes"
    )
    num_virtual_stages: int = Field(
        1,
        ge=1,
        le=1024,
        description="parts of the layers on each pipeline process (interleaved schedules)",
    )
    pp_schedule: Literal["1f1b", "fthenb", "balanced_memory", "dualpipev"] = Field(
        "1f1b",
        description="order of a pipeline's work: 1f1b, interleaved with num_virtual_stages; with "
        "these also fthenb (all forward passes first), or balanced_memory (the same with less "
        "memory at its peak); dualpipev (two parts on each process, in a V)",
    )
    pp_shapes: Literal["static", "dynamic"] = Field(
        "static",
        description="messages between stages: all of a step as large as its largest micro-batch "
        "needs, or each of its own size, which fleet sends before it (1f1b without "
        "num_virtual_stages)",
    )
    pp_token_rows: int | None = Field(
        None,
        ge=1,
        description="with static pp_shapes: tokens of a micro-batch that messages have room for, "
        "padding included, the same in all steps; a larger one is refused; default: each step's own"
        ", or, with pp_visual_rows, what data.max_length and the batch size allow",
    )
    pp_visual_rows: int | None = Field(
        None,
        ge=0,
        description="with static pp_shapes: visual tokens of a micro-batch that messages have room "
        "for, in all steps; default: each step's own, or, with pp_token_rows, "
        "data.max_vision_tokens_per_row of each row or all tokens",
    )
    pp_split: Literal["count", "cost"] = Field(
        "count",
        description="give pipeline parts equally many layers, or equal work with tower and head",
    )
    vision: Literal["spread", "replicate"] = Field(
        "spread",
        description="with mp: encode each image on one of its processes, or all on every one",
    )
    branch_sync: Literal["hoisted", "all_reduce"] = Field(
        "hoisted",
        description="policies: each process lays out the optional parts that its own samples have, "
        "or, as OpenTau does, those that any process has in this micro-batch",
    )
    timeout_s: float = Field(
        1800,
        ge=1,
        le=7 * 24 * 3600,
        description="seconds that a process waits for others, at the start and in any operation, "
        "before the run ends and names who is missing",
    )
    fleet: FleetConfig = Field(
        FleetConfig(), description="options of fleet's own, which its strategy must know"
    )
