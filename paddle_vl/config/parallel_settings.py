"""Settings of the mesh of ranks and of what each axis does, see `docs/parallelism.md`."""

from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from paddle_vl.config.section import OnlyWith, Section

_STAGE, _SCHEDULE = "parallel.sharding_stage", "parallel.schedule"
_PP_SCHEDULE, _VIRTUAL = "parallel.pp_schedule", "parallel.num_virtual_stages"


def _from(axis: str, least: int) -> OnlyWith:
    return OnlyWith(f"parallel.{axis}_degree", range(least, 1 << 20))


CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
_Sharded = _from("sharding", 2)
_Options = dict[str, bool | int | float | str]


class ReservedRows(NamedTuple):
    """The largest micro-batch that static pipeline messages have room for, over all mp ranks: its
    token rows, and how many of them are visual."""

    tokens: int
    visual: int


class FleetConfig(Section):
    """Options that are passed to fleet under the names of its DistributedStrategy."""

    mp_configs: Annotated[_Options, _from("mp", 2)] = Field(default={})
    """options of tensor parallelism, e.g. {mp_async_allreduce: true}"""
    pp_configs: Annotated[_Options, _from("pp", 2)] = Field(default={})
    """options of the pipeline, e.g. {overlap_p2p_comm: true}"""
    sharding_configs: Annotated[_Options, _Sharded, OnlyWith(_STAGE, [1])] = Field(default={})
    """options of sharding at stage 1, e.g. {comm_overlap: true}"""


class EncoderConfig(Section):
    """The encoder's own mesh under `schedule: colocated`, over the same ranks."""

    dp_degree: Annotated[int | None, Field(ge=1, le=1 << 20)] = None
    """encoder lanes: groups of mp_degree ranks that encode different items; default: all ranks
    divided by encoder.mp_degree, and another number is refused"""
    mp_degree: Annotated[int, Field(ge=1, le=1 << 20)] = 1
    """tensor-parallel degree of the encoder: ranks that share its attention heads and MLPs"""
    sharding_stage: Literal[0, 1] = 0
    """1 shards the encoder's optimizer state over its lanes (ZeRO-1); 0 keeps it on every rank"""
    pp_degree: Literal[1] = 1
    """always 1: the encoder has no pipeline, and is divided by mp_degree"""
    cp_degree: Literal[1] = 1
    """always 1: the encoder has no context parallelism, as an image is one sequence of its own"""
    offload_rows: bool = False
    """keep the encoder's output rows and their gradients in host memory between the phases"""


class MeshSettings(Section):
    """Degrees of the mesh axes and the pipeline's schedule; a degree of 1 turns an axis off."""

    dp_degree: Annotated[int, Field(ge=1, le=1 << 20)] = 1
    """data-parallel degree: ranks with different samples"""
    mp_degree: Annotated[int, Field(ge=1, le=1 << 20)] = 1
    """tensor-parallel degree: ranks that share every matrix"""
    pp_degree: Annotated[int, Field(ge=1, le=1 << 20)] = 1
    """pipeline-parallel degree: stages of decoder layers"""
    sharding_degree: Annotated[int, Field(ge=1, le=1 << 20)] = 1
    """sharding degree: ranks with sharded optimizer state, and with different samples but for those
    of a context-parallel group"""
    cp_degree: Annotated[int, Field(ge=1, le=1 << 20), _Sharded] = 1
    """context-parallel degree: ranks of the sharding axis that take the same samples, each a slice
    of their token rows, in attention too; data.pad_to_multiple_of must be a multiple of it"""
    cp_attention: Annotated[Literal["gather", "ulysses"], _from("cp", 2)] = "gather"
    """attention with cp_degree: each rank gathers the keys and values of all (gather), or has all
    token rows of a part of the heads, by all-to-all (ulysses; cp_degree must divide the query heads
    of an mp rank)"""
    sharding_stage: Annotated[Literal[1, 2, 3], _Sharded] = 1
    """what is sharded, as in ZeRO: optimizer state (1), gradients too (2), parameters too (3)"""
    schedule: Annotated[Literal["plain", "colocated"], _from("pp", 2)] = "plain"
    """where the encoder runs: in the first pipeline stage (plain), or on all ranks before and after
    the pipeline of the language model (colocated)"""
    encoder: Annotated[EncoderConfig, OnlyWith(_SCHEDULE, ["colocated"])] = EncoderConfig()
    """the encoder's mesh under schedule: colocated"""
    sequence_parallel: Annotated[bool, _from("mp", 2)] = False
    """shard the token rows between the matrices over the mp ranks"""
    num_virtual_stages: Annotated[
        int,
        Field(ge=1, le=1024),
        _from("pp", 3),
        OnlyWith(_PP_SCHEDULE, ["1f1b", "fthenb", "balanced_memory"]),
    ] = 1
    """virtual pipeline stages on each rank (interleaved schedules)"""
    pp_schedule: Annotated[
        Literal["1f1b", "fthenb", "balanced_memory", "dualpipev"], _from("pp", 2)
    ] = "1f1b"
    """pipeline schedule: 1f1b (interleaved with num_virtual_stages); with num_virtual_stages also
    fthenb (all forward passes first) or balanced_memory (fthenb with a lower memory peak);
    dualpipev (two stages on each rank, in a V)"""
    pp_shapes: Annotated[
        Literal["static", "dynamic"], OnlyWith(_PP_SCHEDULE, ["1f1b"]), OnlyWith(_VIRTUAL, [1])
    ] = "static"
    """messages between stages: static pads all of a step to its largest micro-batch; dynamic sends
    each in its own size, which fleet sends first (1f1b without num_virtual_stages)"""

    @property
    def num_processes(self) -> int:
        """Ranks of the mesh."""
        return self.dp_degree * self.mp_degree * self.pp_degree * self.sharding_degree

    @property
    def data_degree(self) -> int:
        """Ranks with different samples."""
        return self.dp_degree * self.sharding_degree // self.cp_degree


def launch_variables(mesh: MeshSettings) -> dict[str, str]:
    """Variables that ranks need from their start, when CUDA reads them: with one queue a collective
    starts before the product launched after it. It would hold up the gathers of stage 3."""
    return {CONNECTIONS: "1"} if mesh.mp_degree > 1 and mesh.sharding_stage < 3 else {}


class ParallelConfig(MeshSettings):
    """How the ranks of a run share its work."""

    dp_comm_overlap: Annotated[
        bool | None,
        _from("dp", 2),
        OnlyWith("parallel.sharding_degree", [1]),
        OnlyWith(_SCHEDULE, ["plain"]),
        OnlyWith(_PP_SCHEDULE, ["1f1b", "fthenb", "balanced_memory"]),
    ] = None
    """all-reduce gradients over dp during the last backward pass; null: on GPUs"""
    sharding_gather_overlap: Annotated[bool | None, _Sharded, OnlyWith(_STAGE, [1])] = None
    """stage 1: all-gather updated parameters while the next forward pass runs; null: on GPUs"""
    cp_gather_overlap: Annotated[
        bool | None, _from("cp", 2), OnlyWith("parallel.cp_attention", ["gather"])
    ] = None
    """gather keys and values of half of the key heads while the others attend; null: on GPUs"""
    reshard_after_forward: Annotated[bool, _Sharded, OnlyWith(_STAGE, [3])] = True
    """stage 3: free each unit's parameters after its forward pass and all-gather them again for its
    backward pass; false: all-gather once a step (FSDP's SHARD_GRAD_OP)"""
    reduce_dtype: Annotated[
        Literal["float32", "bfloat16"],
        _Sharded,
        OnlyWith(_STAGE, [2, 3]),
        OnlyWith("model.compute_dtype", ["bfloat16"]),
    ] = "float32"
    """stages 2 and 3 of a bfloat16 model: dtype in which gradients are reduce-scattered; they are
    accumulated over micro-batches in float32 in any case"""
    reduce_once_per_step: Annotated[
        bool,
        _Sharded,
        OnlyWith(_STAGE, [2]),
        OnlyWith("train.gradient_accumulation_steps", range(2, 1 << 20)),
    ] = False
    """stage 2: keep unsharded float32 gradients over the micro-batches of a step and reduce-scatter
    once instead of after each"""
    pp_split: Literal["count", "cost"] = "count"
    """give pipeline stages equally many layers (count), or equal work with vision tower and head
    counted (cost)"""
    vision: Annotated[Literal["spread", "replicate"], OnlyWith(_SCHEDULE, ["plain"])] = "spread"
    """vision tower with mp: each rank encodes some of the images (spread), or every rank encodes
    all (replicate)"""
    timeout_s: Annotated[float, Field(ge=1, le=7 * 24 * 3600)] = 1800
    """seconds that a rank waits for other ranks, at the start and in any collective, before the run
    ends and names the missing ranks"""
    fleet: FleetConfig = FleetConfig()
    """options passed to fleet; fleet must know their names"""
