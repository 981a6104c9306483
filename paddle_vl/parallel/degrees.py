"""The degrees of a run on every mesh axis, and the rules that they must satisfy.

A rule is a function that yields a message for each problem of a `TopologyPlan`. Rules need neither
a device nor other ranks: `plan_problems` runs before anything is built.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Annotated, Any

from pydantic import Field

from paddle_vl.config.families import EncoderShape, ModelShape
from paddle_vl.config.parallel_settings import MeshSettings
from paddle_vl.config.section import settings_without_effect

AXES = ("dp", "mp", "pp", "sharding")
Problems = Iterator[str]


class ParallelDegrees(MeshSettings):
    """The mesh of ranks and the pipeline's schedule, the same on every rank; 1 turns an axis off.

    Raises:
        ValueError: a value outside of the setting's range.
    """

    ep_degree: Annotated[int, Field(ge=1)] = 1
    """expert-parallel degree: ranks that share the experts of a model"""
    num_micro_batches: Annotated[int, Field(ge=1)] = 1
    """micro-batches of a step, train.gradient_accumulation_steps"""

    def degree(self, axis: str) -> int:
        """Ranks along one of `AXES`, or that share the experts (`ep`)."""
        return getattr(self, f"{axis}_degree")


@dataclass(frozen=True)
class TopologyPlan:
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


def plan_problems(plan: TopologyPlan) -> list[str]:
    """All problems of a plan, the same on every rank."""
    run: Any = SimpleNamespace(parallel=plan.degrees)
    idle = settings_without_effect(run, plan.degrees, "parallel.")
    return [*idle, *(problem for rule in _RULES for problem in rule(plan))]


def _mesh(plan: TopologyPlan) -> Problems:
    degrees = plan.degrees
    if degrees.num_processes != plan.num_processes:
        arithmetic = " x ".join(f"{axis}_degree {degrees.degree(axis)}" for axis in AXES)
        yield (
            f"parallel: {arithmetic} = {degrees.num_processes}, but the run has "
            f"{plan.num_processes} rank{'s' if plan.num_processes > 1 else ''}: the product "
            "must equal it"
        )
    if degrees.sharding_stage > 1 and degrees.pp_degree > 1:
        yield (
            f"parallel.sharding_stage {degrees.sharding_stage} with parallel.pp_degree "
            f"{degrees.pp_degree}: a pipeline keeps full gradients over its micro-batches and "
            "full parameters between them; set sharding_stage=1, or pp_degree=1"
        )


def _schedule(plan: TopologyPlan) -> Problems:
    """The pipeline's schedule and its virtual stages."""
    degrees = plan.degrees
    schedule, virtual = degrees.pp_schedule, degrees.num_virtual_stages
    if schedule in ("fthenb", "balanced_memory") and virtual == 1:
        yield (
            f"parallel.pp_schedule is {schedule} but parallel.num_virtual_stages is 1: it is a "
            "schedule of virtual stages; set num_virtual_stages to 2 or more, or pp_schedule to "
            "1f1b"
        )
    each, what = virtual, f"num_virtual_stages {virtual}"
    if schedule == "dualpipev":
        each, what = 2, "2 model chunks of dualpipev"
    chunks = degrees.pp_degree * each
    if plan.model is not None and plan.model.num_hidden_layers < chunks:
        yield (
            f"num_hidden_layers is {plan.model.num_hidden_layers} but parallel.pp_degree "
            f"{degrees.pp_degree} x {what} = {chunks}: every stage needs a layer; lower one of them"
        )


def _micro_batches(plan: TopologyPlan) -> Problems:
    """The number of micro-batches that a schedule needs."""
    degrees = plan.degrees
    schedule, interleaves = degrees.pp_schedule, degrees.num_virtual_stages > 1
    stages, micro_batches = degrees.pp_degree, degrees.num_micro_batches
    setting = f"train.gradient_accumulation_steps {micro_batches}"
    pipeline = f"parallel.pp_degree {stages}"
    if stages == 1:
        return
    if micro_batches < stages:
        # Under the colocated schedule stages that wait for the pipeline have work in the encoder.
        if degrees.schedule != "colocated" or schedule != "1f1b" or interleaves:
            yield (
                f"{setting} is less than {pipeline}: the micro-batches fill the stages of the "
                "pipeline, and some stage would always be idle; set "
                f"train.gradient_accumulation_steps to {stages} or more"
            )
    elif schedule == "dualpipev" and micro_batches < 2 * stages:
        yield (
            f"{setting} is less than twice {pipeline}: dualpipev has that many micro-batches in "
            f"flight; set train.gradient_accumulation_steps to {2 * stages} or more"
        )
    elif schedule == "1f1b" and interleaves and micro_batches < 2 * stages:
        yield (
            f"{setting} is less than twice {pipeline}: interleaved 1f1b has that many "
            f"micro-batches in flight; set train.gradient_accumulation_steps to {2 * stages} or "
            f"more, or parallel.pp_schedule to fthenb with {stages} of them"
        )
    elif schedule in ("fthenb", "balanced_memory") and micro_batches % stages:
        more = -(-micro_batches // stages) * stages
        yield (
            f"{setting} is no multiple of {pipeline}: {schedule} runs the micro-batches in groups "
            f"of pp_degree; set train.gradient_accumulation_steps to {more}"
        )


def _tensor_parallel(plan: TopologyPlan) -> Problems:
    multiple, mp, model = plan.pad_to_multiple_of, plan.degrees.mp_degree, plan.model
    if model is not None:
        yield from _indivisible("num_attention_heads", model.num_attention_heads, mp)
        heads = model.num_key_value_heads
        if heads % mp and mp % heads:
            yield (
                f"num_key_value_heads {heads} and parallel.mp_degree {mp}: one must divide the "
                "other, so that a rank has entire kv heads or ranks share one evenly; choose an "
                f"mp_degree that divides {heads} or is a multiple of it"
            )
        padded = f"pad the vocabulary to {-(-model.vocab_size // mp) * mp}, or "
        yield from _indivisible("vocab_size", model.vocab_size, mp, padded)
        yield from _indivisible("intermediate_size", model.intermediate_size, mp)
        if plan.degrees.ep_degree == 1:
            yield from _indivisible("moe_intermediate_size", model.moe_intermediate_size, mp)
        shared = model.shared_expert_intermediate_size
        yield from _indivisible("shared_expert_intermediate_size", shared, mp)
        # A key head stays on one rank with its value heads.
        yield from _indivisible("linear_num_key_heads", model.linear_num_key_heads, mp)
    if multiple is not None and plan.degrees.sequence_parallel and multiple % mp:
        # The length itself must divide: the last evaluation batch has any number of samples.
        yield (
            f"data.pad_to_multiple_of {multiple} does not divide by parallel.mp_degree {mp}: "
            "sequence_parallel shards the token rows (samples x padded length) of every batch over "
            f"{mp} ranks, also of a batch of one sample; set data.pad_to_multiple_of={mp}"
        )


def _context_parallel(plan: TopologyPlan) -> Problems:
    degrees, cp, model = plan.degrees, plan.degrees.cp_degree, plan.model
    if cp == 1:
        return
    if degrees.sharding_degree % cp and degrees.sharding_degree > 1:
        yield (
            f"parallel.cp_degree {cp} does not divide parallel.sharding_degree "
            f"{degrees.sharding_degree} ({_division(degrees.sharding_degree, cp)}): the ranks that "
            "share the rows of a sample are neighbours along the sharding axis; set "
            f"sharding_degree to a multiple of {cp}"
        )
    if degrees.schedule == "colocated":
        yield (
            f"parallel.schedule is colocated with parallel.cp_degree {cp}: its bridge sends a data "
            "lane all rows of its items, and knows no slices of them; set cp_degree=1 (and "
            "mp_degree with sequence_parallel for long samples), or schedule=plain"
        )
    if model is not None and model.linear_num_key_heads:
        yield (
            f"parallel.cp_degree is {cp} but the model has layers with a recurrent state (gated "
            "delta rule), which passes through all tokens of a sample in order: ranks would have "
            "to hand it on, slice by slice; set cp_degree=1, and mp_degree with sequence_parallel "
            "for long samples"
        )
    if model is not None and degrees.cp_attention == "ulysses":
        yield from _ulysses(model, cp, degrees.mp_degree)
    parts = cp * (degrees.mp_degree if degrees.sequence_parallel else 1)
    multiple = plan.pad_to_multiple_of
    if multiple is not None and multiple % parts and not multiple % (parts // cp):
        of_rows = f"parallel.cp_degree {cp}"
        if parts > cp:
            of_rows += f" x mp_degree {parts // cp} (sequence_parallel)"
        yield (
            f"data.pad_to_multiple_of {multiple} does not divide by {of_rows} = {parts}: every "
            "batch is cut into that many slices of equally many token rows; set "
            f"data.pad_to_multiple_of={parts}"
        )


def _ulysses(model: ModelShape, cp: int, mp: int) -> Problems:
    heads, keys = (max(n // mp, 1) for n in (model.num_attention_heads, model.num_key_value_heads))
    if heads % cp or (keys % cp and cp % keys):
        yield (
            f"parallel.cp_attention is ulysses with parallel.cp_degree {cp}, but of mp_degree {mp} "
            f"a rank has {heads} query and {keys} key heads, which are divided over the "
            f"{cp} ranks: cp_degree must divide the query heads, and divide the key heads or be a "
            "multiple of them; choose such a cp_degree, or cp_attention=gather"
        )


def experts_fold(ep: int, dp: int, inner: int) -> bool:
    """Whether ep ranks that follow each other are a part of, or several, sharding x mp blocks.

    Args:
        dp: their number in the run.
        inner: sharding x mp, the ranks of such a block.
    """
    return inner % ep == 0 or (ep % inner == 0 and dp % (ep // inner) == 0)


def _experts(plan: TopologyPlan) -> Problems:
    degrees = plan.degrees
    ep, dp, sharding, mp = (degrees.degree(axis) for axis in ("ep", "dp", "sharding", "mp"))
    if not experts_fold(ep, dp, sharding * mp):
        yield (
            f"parallel.ep_degree {ep} with sharding_degree {sharding} x mp_degree {mp} = "
            f"{sharding * mp} and dp_degree {dp}: experts are divided over neighbouring ranks of "
            "sharding x mp, and of dp beyond; choose an ep_degree that divides "
            f"{sharding * mp}, or is {sharding * mp} times a divisor of dp_degree"
        )
    if ep > 1 and mp > 1 and not degrees.sequence_parallel:
        yield (
            f"parallel.ep_degree {ep} with parallel.mp_degree {mp}: an expert is on one rank, and "
            "model-parallel ranks send it different token rows: set "
            "parallel.sequence_parallel=true (and data.pad_to_multiple_of), or ep_degree=1, which "
            "divides every expert over the mp ranks"
        )
    experts = 0 if plan.model is None else plan.model.num_experts
    if ep > 1 and plan.model is not None and not experts:
        yield f"parallel.ep_degree is {ep} but the model has no experts: set ep_degree=1"
    if experts % ep:
        yield (
            f"num_experts {experts} does not divide by parallel.ep_degree {ep} "
            f"({_division(experts, ep)}): choose an ep_degree that divides {experts}"
        )


def _tables(plan: TopologyPlan) -> Problems:
    """Tables, whose rows are divided over the ranks of a stage that have all parameters."""
    ep, sharding, mp = (plan.degrees.degree(axis) for axis in ("ep", "sharding", "mp"))
    ranks = max(sharding * mp, ep)
    for rows in () if plan.model is None else plan.model.table_rows:
        if rows % ranks:
            yield (
                f"a table of {rows} rows (n-grams) does not divide over {ranks} ranks, "
                f"sharding_degree {sharding} x mp_degree {mp} or ep_degree {ep}, of which each has "
                f"equally many rows ({_division(rows, ranks)}): choose degrees whose product "
                f"divides {rows}, and more ranks along dp"
            )


def _colocated(plan: TopologyPlan) -> Problems:
    """The schedule that runs the encoder on all ranks, with dp and mp of its own."""
    degrees, world = plan.degrees, plan.degrees.num_processes
    if degrees.schedule != "colocated":
        return
    encoder = degrees.encoder
    dp, mp = encoder.dp_degree, encoder.mp_degree
    lanes, data = world // mp, degrees.data_degree
    if world % mp:
        yield (
            f"parallel.encoder.mp_degree {mp} does not divide the {world} ranks of the run: "
            "encoder lanes have equally many ranks and leave none out; choose a divisor"
        )
    elif dp is not None and dp * mp != world:
        yield (
            f"parallel.encoder: dp_degree {dp} x mp_degree {mp} = {dp * mp}, but the run has "
            f"{world} ranks, and every rank takes part in the encoder: set dp_degree={lanes} "
            "or leave it out"
        )
    if world % mp == 0 and lanes % data and data % lanes:
        yield (
            f"{lanes} encoder lanes ({world} ranks / parallel.encoder.mp_degree {mp}) and {data} "
            f"data lanes (parallel.dp_degree {degrees.dp_degree} x sharding_degree "
            f"{degrees.sharding_degree}): one number must divide the other, so that the items of a "
            "data lane go to whole encoder lanes; change encoder.mp_degree"
        )
    if encoder.sharding_stage and world == mp:
        yield (
            f"parallel.encoder.sharding_stage is {encoder.sharding_stage} but there is one "
            f"encoder lane of {mp} ranks: its optimizer state is sharded over lanes; set "
            "sharding_stage to 0, or lower encoder.mp_degree"
        )
    widths = {} if plan.encoder is None else plan.encoder.widths
    for name, width in widths.items():
        if width % mp:
            yield (
                f"{name} {width} does not divide by parallel.encoder.mp_degree {mp} "
                f"({_division(width, mp)}): choose an encoder.mp_degree that divides {width}"
            )
    if degrees.ep_degree > 1:
        yield (
            f"parallel.schedule is colocated with parallel.ep_degree {degrees.ep_degree}: expert "
            "parallelism is not supported by this schedule yet; set ep_degree=1, or schedule=plain"
        )


def _indivisible(name: str, value: int, mp: int, remedy: str = "") -> Problems:
    if value % mp:
        yield (
            f"{name} {value} does not divide by parallel.mp_degree {mp} ({_division(value, mp)}): "
            f"{remedy}choose an mp_degree that divides {value}"
        )


def _division(value: int, by: int) -> str:
    return f"{value} = {value // by} x {by} + {value % by}"


_RULES = (
    *(_mesh, _micro_batches, _schedule, _tensor_parallel),
    *(_context_parallel, _experts, _tables, _colocated),
)
